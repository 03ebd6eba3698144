"""Files that hold all experts of a layer in one tensor, as Qwen3.5's published ones do, against files of one each."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from rltrain.checkpoint.hf_reader import load_parameters
from rltrain.models import canonical_tensors, read_architecture
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.converted_checkpoints import stored_tensors
from tests.unit.test_conversion import difference, to_hf, to_megatron

NUM_EXPERTS = 4
TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 8,
}
PICTURES = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_position_embeddings": 4}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a checkpoint with a tensor of each expert, the same with their stacks)."""
    apart, stacked = tmp_path_factory.mktemp("apart"), tmp_path_factory.mktemp("stacked")
    config = transformers.Qwen3_5MoeConfig(text_config=TEXT, vision_config={**PICTURES, "out_hidden_size": 32})
    torch.manual_seed(0)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    for folder in (apart, stacked):
        model.save_pretrained(folder)
    tensors = stored_tensors(apart)
    for layer in range(TEXT["num_hidden_layers"]):
        experts = f"model.language_model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{number}.{name}_proj.weight") for number in range(NUM_EXPERTS)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], dim=1), f"{experts}.down_proj": down}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, stacked / "model.safetensors")
    return apart, stacked


def loaded(path: Path, layout: Layout, rank: int) -> dict[str, torch.Tensor]:
    parameters = {name: torch.full(shape, torch.nan) for name, shape in layout.on(rank).parameters}
    load_parameters(path, layout, rank, parameters)
    return parameters


def test_the_tensors_are_those_of_the_file(folders: tuple[Path, Path]) -> None:
    tensors = canonical_tensors(read_architecture(folders[1]))
    stored = {name: tuple(tensor.shape) for name, tensor in stored_tensors(folders[1]).items()}
    assert dict(zip(tensors.names, tensors.shapes, strict=True)) == {
        name: shape for name, shape in stored.items() if not name.startswith("model.visual.")
    }


@pytest.mark.parametrize("layout_of", [megatron_layout, engine_layout])
@pytest.mark.parametrize("sizes", [{}, {"tp": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_ranks_hold_the_same(folders: tuple[Path, Path], layout_of: object, sizes: dict[str, int]) -> None:
    assert callable(layout_of)
    grid = Grid((0, 1, 2, 3), **sizes)
    if layout_of is megatron_layout and sizes.get("ep"):
        grid = Grid((0, 1, 2, 3), **sizes, etp=1)
    apart, stacked = (layout_of(read_architecture(folder), grid) for folder in folders)
    for rank in grid.ranks:
        one, other = (loaded(path, of, rank) for path, of in zip(folders, (apart, stacked), strict=True))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_there_and_back_is_bit_exact(folders: tuple[Path, Path], tmp_path: Path) -> None:
    to_megatron(folders[1], tmp_path / "megatron", tp=2, ep=2)
    to_hf(tmp_path / "megatron", tmp_path / "back", max_file_bytes=20_000)
    written, tensors = stored_tensors(tmp_path / "back"), stored_tensors(folders[1])
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert difference(folders[1], tmp_path / "back") is None
