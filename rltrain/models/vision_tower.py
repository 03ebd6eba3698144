"""Vision towers: transformers' own modules, and the patches that they encode."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rltrain.models.attention import attend_whole
from rltrain.models.vision import Grid, Tower, Vision

CLASSES: dict[Tower, str] = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "qwen3_vl": "Qwen3VLVisionModel",
    "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
    "qwen3_5": "Qwen3_5VisionModel",
    "qwen3_5_moe": "Qwen3_5MoeVisionModel",
}
"""The class of a kind of tower, in transformers.models.<kind>.modeling_<kind>."""
ATTENTION = "rltrain_flash_vision"
"""The name of this file's attention in transformers. Because of "flash" in it, towers call it once for all images.
They would call another one for each frame or window."""
BYTE = 255.0


def build_tower(vision: Vision, folder: Path, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Returns the tower described by `folder`/config.json in eval mode. The contents of its parameters are undefined.

    Buffers, such as rotary frequencies, have their contents, except on device meta.
    """
    from transformers import AttentionInterface, AutoConfig
    from transformers.initialization import no_init_weights

    kind: Any = getattr(
        import_module(f"transformers.models.{vision.kind}.modeling_{vision.kind}"), CLASSES[vision.kind]
    )
    AttentionInterface.register(ATTENTION, attend_frames)
    config = AutoConfig.from_pretrained(folder, local_files_only=True).vision_config
    with torch.device(device), no_init_weights():
        tower: Any = kind._from_config(config, dtype=dtype, attn_implementation="sdpa")
    tower.config._attn_implementation = ATTENTION  # given earlier, transformers would load a flash kernel of this name
    built: nn.Module = tower.eval()
    return built


def attend_frames(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Returns attention [1, patches, heads, head_dim] of query, key and value [1, heads, patches, head_dim].

    Patches attend to all patches of their frame or window. `cu_seq_lens_q` has the starts of these and the end of the
    last one, and `max_length_q` the largest number of patches in one.
    """
    assert cu_seq_lens_q is not None and max_length_q is not None, "transformers passes them because of the name"
    queries, keys, values = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    return attend_whole(queries, keys, values, cu_seq_lens_q, int(max_length_q), scale=scale)[None], None


def patches_of(vision: Vision, pixels: Sequence[Tensor], mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """Cuts images into patches, as transformers' image processors do.

    `pixels` are uint8 of shape [frames, height, width, 3]. Heights and widths are those of whole tokens. The last frame
    is repeated if a patch needs more frames. `mean` and `std` are fp32 of shape [3], for colours from 0 to 1. All are
    on one device.

    Returns the patches, fp32 [patches, vision.patch_size], and the grids, int64 [images, 3], on this device. The
    patches of a token follow each other. Raises ValueError for other heights and widths.
    """
    grids = torch.tensor([grid_of(vision, image.shape[:3]) for image in pixels], device=mean.device)
    return torch.cat([_cut(vision, (image.float() / BYTE - mean) / std) for image in pixels]), grids


def grid_of(vision: Vision, shape: Sequence[int]) -> Grid:
    """Returns the grid of an image with `shape` (frames, height, width) in pixels. Raises ValueError if it has no whole
    tokens."""
    frames, height, width = shape
    side = vision.patch * vision.merge
    if height % side or width % side:
        raise ValueError(f"an image has {height} x {width} pixels; expected multiples of {side}")
    return -(-frames // vision.temporal_patch), height // vision.patch, width // vision.patch


def _cut(vision: Vision, image: Tensor) -> Tensor:
    frames, rows, columns = grid_of(vision, image.shape[:3])
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
