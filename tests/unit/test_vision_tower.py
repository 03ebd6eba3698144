"""Vision towers and their patches, compared with transformers."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rltrain.models import attention
from rltrain.models.flops import vision_flops
from rltrain.models.vision import Grid, Tower
from rltrain.models.vision_tower import CLASSES, build_tower, encode, patches_of
from tests.support.vision_checkpoints import tiny_config, tiny_vision

SIZES = ((56, 28), (28, 28), (84, 112))
"""Heights and widths of images in pixels."""
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CPU = torch.device("cpu")


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (1, *size, 3), generator=generator, dtype=torch.uint8) for size in SIZES]


def patches(kind: Tower = "qwen3_vl") -> tuple[Tensor, Tensor]:
    return patches_of(tiny_vision(kind), images(), torch.tensor(MEAN), torch.tensor(STD))


def outputs_of(whole: Any, cut: Tensor, grids: Tensor) -> list[Tensor]:
    """Returns the features of the whole model, and those of its deepstack layers. Some releases split them by image."""
    found = whole.model.get_image_features(cut, grids)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return [part if isinstance(part, Tensor) else torch.cat([*part]) for part in parts]


@pytest.fixture(scope="module", params=CLASSES)
def model(request: pytest.FixtureRequest) -> tuple[Tower, Any]:
    """Returns the kind of a tower and a whole model of transformers with it."""
    torch.manual_seed(0)
    config = tiny_config(request.param)
    return request.param, AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa").eval()


@pytest.fixture
def tower(model: tuple[Tower, Any], tmp_path: Path) -> Any:
    """Returns our tower with the weights of the model."""
    kind, whole = model
    tiny_config(kind).save_pretrained(tmp_path)
    built = build_tower(tiny_vision(kind), tmp_path, torch.float32, CPU)
    assert not built.training
    built.load_state_dict(whole.model.visual.state_dict(), strict=True)
    return built


def test_features_are_those_of_the_whole_model(model: tuple[Tower, Any], tower: Any) -> None:
    kind, whole = model
    cut, grids = patches(kind)
    with torch.no_grad():
        expected = outputs_of(whole, cut, grids)
        features, deepstack = encode(tower, cut, grids)
    assert features.shape == (int(grids.prod(1).sum()) // 4, tiny_vision(kind).out_hidden)
    assert len(deepstack) == len(tiny_vision(kind).deepstack)
    assert all(torch.equal(given, wanted) for given, wanted in zip([features, *deepstack], expected, strict=True))


def test_gradients_are_those_of_the_whole_model(model: tuple[Tower, Any], tower: Any) -> None:
    kind, whole = model
    cut, grids = patches(kind)
    for one in (whole, tower):
        one.zero_grad()
    features, deepstack = encode(tower, cut, grids)
    for outputs in (outputs_of(whole, cut, grids), [features, *deepstack]):
        torch.stack([part.square().sum() for part in outputs]).sum().backward()
    wanted = {name: parameter.grad for name, parameter in whole.model.visual.named_parameters()}
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and torch.equal(parameter.grad, wanted[name]), name


def test_an_image_is_encoded_alone(model: tuple[Tower, Any], tower: Any) -> None:
    kind, _ = model
    cut, grids = patches(kind)
    num_patches = grids.prod(1).tolist()
    with torch.no_grad():
        together, _ = encode(tower, cut, grids)
        alone = [encode(tower, part, grid[None])[0] for part, grid in zip(cut.split(num_patches), grids, strict=True)]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-5)


def test_a_tower_has_the_given_dtype_and_device(model: tuple[Tower, Any], tmp_path: Path) -> None:
    kind, whole = model
    tiny_config(kind).save_pretrained(tmp_path)
    dtypes = {p.dtype for p in build_tower(tiny_vision(kind), tmp_path, torch.bfloat16, CPU).parameters()}
    assert dtypes == {torch.bfloat16}
    on_meta = build_tower(tiny_vision(kind), tmp_path, torch.float32, torch.device("meta"))
    shapes = {name: parameter.shape for name, parameter in on_meta.named_parameters()}
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    assert shapes == {name: parameter.shape for name, parameter in whole.model.visual.named_parameters()}


@pytest.mark.parametrize(("patch", "mean", "std"), [(7, MEAN, STD), (14, (0.5,) * 3, (0.5,) * 3)])
def test_patches_are_those_of_the_processor(patch: int, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    vision = replace(tiny_vision("qwen3_vl"), patch=patch)
    processor = Qwen2VLImageProcessorPil(patch_size=patch, image_mean=[*mean], image_std=[*std])
    given = images()
    expected = processor([Image.fromarray(image[0].numpy()) for image in given], do_resize=False, return_tensors="pt")
    cut, grids = patches_of(vision, given, torch.tensor(mean), torch.tensor(std))
    assert torch.equal(grids, expected["image_grid_thw"])
    assert cut.dtype == torch.float32 and torch.equal(cut, expected["pixel_values"])


def test_frames_share_patches_and_the_last_is_repeated() -> None:
    vision = tiny_vision("qwen3_vl")
    film = torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 14, 28, 3)
    cut, grids = patches_of(vision, [film], torch.zeros(3), torch.full((3,), 1 / 255))
    assert grids.tolist() == [[2, 2, 4]]
    frames = cut.view(2, 8, 3, 2, 49)
    expected = np.array([[0, 1], [2, 2]])
    assert np.allclose(frames.numpy(), expected[:, None, None, :, None], atol=1e-6)


def test_an_image_of_parts_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="28 x 21 pixels; expected multiples of 14"):
        patches_of(tiny_vision("qwen3_vl"), [torch.zeros(1, 28, 21, 3)], torch.zeros(3), torch.ones(3))


@pytest.mark.parametrize("grid", [(1, 8, 8), (1, 4, 12), (2, 8, 4)])
def test_flops_are_those_that_torch_counts(tower: Any, model: tuple[Tower, Any], grid: Grid) -> None:
    vision = tiny_vision(model[0])
    tower.config._attn_implementation = "eager"  # torch does not count the products of fused attention on CPUs
    with FlopCounterMode(display=False) as counter:
        encode(tower, torch.zeros(prod(grid), vision.patch_size), torch.tensor([grid]))
    assert vision_flops(vision, [grid]) == counter.get_total_flops()


def test_a_gpu_attends_within_all_windows_in_one_call(tower: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, of_keys: Tensor, *most: int, **how: Any) -> Tensor:
        """Computes the documented result of torch.nn.attention.varlen's kernel without a causal mask."""
        assert how["window_size"] == (-1, -1) and not how["enable_gqa"] and starts.dtype == torch.int32
        assert torch.equal(starts, of_keys) and most == (int(starts.diff().max()),) * 2
        calls.append(len(q))
        parts = zip(*(x.transpose(0, 1).split(starts.diff().tolist(), dim=1) for x in (q, k, v)), strict=True)
        attended = [torch.nn.functional.scaled_dot_product_attention(*part, scale=how["scale"]) for part in parts]
        return torch.cat(attended, dim=1).transpose(0, 1)

    expected = encode(tower, *patches())[0]
    monkeypatch.setattr(attention, "packed_kernel", lambda: kernel)
    monkeypatch.setattr(attention, "attends_packed", lambda *rows: True)
    torch.testing.assert_close(encode(tower, *patches())[0], expected)
    assert calls == [len(patches()[0])] * len(tower.blocks)


def test_torchs_flash_kernel_takes_the_heads_of_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real operator also checks the shapes of tensors without data."""
    monkeypatch.setattr(attention, "FLASH_DEVICE", "meta")
    for head_dim in (80, 72):  # of Qwen2.5-VL and of Qwen3-VL
        heads = [torch.empty(20, 16, head_dim, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in "qkv"]
        boundaries = torch.tensor([0, 12, 20], dtype=torch.int32, device="meta")
        attended = attention.attend_whole(*heads, boundaries, 12, scale=0.1)
        attended.sum().backward()
        assert attended.shape == heads[0].shape and all(x.grad is not None for x in heads)
