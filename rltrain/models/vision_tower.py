"""Vision towers: transformers' own modules, and the patches that they encode."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rltrain.models.vision import Grid, Tower, Vision

CLASSES: dict[Tower, str] = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
}
"""The class of a kind of tower, in transformers.models.<kind>.modeling_<kind>."""
ATTENTION = "sdpa"
"""transformers' name of torch's attention."""
BYTE = 255.0


def build_tower(vision: Vision, folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns the tower described by `folder`/config.json in eval mode. The contents of its parameters are undefined.

    Buffers, such as rotary frequencies, have their contents, except on device meta.
    """
    from transformers import AutoConfig
    from transformers.initialization import no_init_weights

    kind: Any = getattr(
        import_module(f"transformers.models.{vision.kind}.modeling_{vision.kind}"), CLASSES[vision.kind]
    )
    config = AutoConfig.from_pretrained(folder, local_files_only=True).vision_config
    with torch.device(device), no_init_weights():
        tower: nn.Module = kind._from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    return tower.eval()


def patches_of(vision: Vision, pixels: Sequence[Tensor], mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts images into patches, as transformers' image processors do.

    `pixels` are uint8 of shape [frames, height, width, 3]. Heights and widths are those of whole tokens. The last frame
    is repeated if a patch needs more frames. `mean` and `std` are fp32 of shape [3], for colours from 0 to 1. All are
    on one device.

    Returns the patches, fp32 [patches, vision.patch_size], and the grids, int64 [images, 3], on this device. The
    patches of a token follow each other. Raises ValueError for other heights and widths.
    """
    grids = torch.tensor([_grid(vision, image.shape) for image in pixels], device=mean.device)
    return torch.cat([_cut(vision, (image.float() / BYTE - mean) / std) for image in pixels]), grids


def _grid(vision: Vision, shape: Sequence[int]) -> Grid:
    frames, height, width, _ = shape
    side = vision.patch * vision.merge
    if height % side or width % side:
        raise ValueError(f"an image has {height} x {width} pixels; expected multiples of {side}")
    return -(-frames // vision.temporal_patch), height // vision.patch, width // vision.patch


def _cut(vision: Vision, image: Tensor) -> Tensor:
    frames, rows, columns = _grid(vision, image.shape)
    missing = frames * vision.temporal_patch - len(image)
    whole = torch.cat([image, image[-1:].expand(missing, -1, -1, -1)])
    merge, patch = vision.merge, vision.patch
    parts = whole.view(frames, -1, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return parts.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, vision.patch_size)


def encode(tower: nn.Module, patches: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Encodes the patches of images of `grids`, int64 [images, 3].

    Returns the features, [tokens, vision.out_hidden] in the dtype of the tower, and the same for each of its deepstack
    layers. Tokens are in the order of the images.
    """
    found = tower(patches, grid_thw=grids)
    return found.pooler_output, [*(getattr(found, "deepstack_features", None) or ())]
