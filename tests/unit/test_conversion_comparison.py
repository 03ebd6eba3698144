"""Two checkpoints are compared in their tensors' order, and the first difference is named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rltrain.checkpoint import conversion
from rltrain.checkpoint.conversion import first_difference
from rltrain.checkpoint.conversion_sources import HfSource, Processes
from tests.converted_checkpoints import make_checkpoint


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal checkpoints."""
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def change(folder: Path, name: str, index: tuple[int, ...], value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name][index] = value
    save_file(tensors, folder / "model.safetensors")


def difference(a: Path, b: Path) -> str | None:
    return first_difference(HfSource(a, "A"), HfSource(b, "B"), Processes())


@pytest.mark.parametrize("block_bytes", [1, 300, 10**9])
def test_the_first_of_several_differences_is_named(
    block_bytes: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "BLOCK_BYTES", block_bytes)
    a, b = pair
    assert difference(a, b) is None
    change(b, "lm_head.weight", (0, 0), 1.0)
    change(a, "model.layers.1.mlp.up_proj.weight", (40, 31), 7.0)
    change(b, "model.layers.1.mlp.up_proj.weight", (40, 31), 0.5)
    change(b, "model.layers.1.mlp.up_proj.weight", (47, 0), 0.5)
    expected = f"model.layers.1.mlp.up_proj.weight[40, 31] is 7.0 in {a} and 0.5 in {b}"
    assert difference(a, b) == expected
    change(a, "model.layers.0.self_attn.q_norm.weight", (3,), -2.0)
    found = difference(a, b)
    assert found is not None
    assert found.startswith("model.layers.0.self_attn.q_norm.weight[3] is -2.0")


def test_values_are_compared_by_their_bits(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        change(folder, "model.norm.weight", (4,), float("nan"))
    assert difference(*pair) is None
    change(pair[0], "model.norm.weight", (5,), 0.0)
    change(pair[1], "model.norm.weight", (5,), -0.0)
    found = difference(*pair)
    assert found is not None
    assert "model.norm.weight[5] is 0.0" in found and "-0.0" in found


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3", {"rope_theta": 5e5}, "rope_theta is 10000.0 in"),
        ("qwen3", {"vocab_size": 130}, "vocab_size is 131 in"),
        ("qwen3_tied", {}, "head_dim is 32 in"),
        ("llama", {}, "family is qwen3 in"),
    ],
)
def test_architectures_are_compared_first(name: str, changes: dict[str, object], words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", name, **changes)
    found = difference(tmp_path / "a", tmp_path / "b")
    assert found is not None
    assert words in found


def test_types_are_compared(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "a")
    make_checkpoint(tmp_path / "b", dtype=torch.bfloat16)
    found = difference(tmp_path / "a", tmp_path / "b")
    assert found is not None
    assert "model.embed_tokens.weight is float32 in" in found and "--dtype" in found
