"""Where canonical tensors lie in Megatron's global ones, against formulas on whole tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.checkpoint.conversion import chunks_of_writer
from rltrain.checkpoint.megatron_keys import GlobalTensors, extra_state_keys
from rltrain.errors import CheckpointError
from rltrain.models import Architecture, canonical_tensors
from rltrain.runtime.grid import Grid
from tests.megatron_checkpoints import ARCHITECTURES, canonical_values

LAYERS = "decoder.layers."


def global_values(architecture: Architecture, tensors: GlobalTensors) -> dict[str, Tensor]:
    """The global tensors, put together from the locations of canonical ones; NaN where none lies."""
    whole = {key: torch.full(shape, float("nan")) for key, shape in tensors.shapes.items()}
    for number, value in enumerate(canonical_values(architecture).values()):
        matrix = value.reshape(-1, value.shape[-1])
        for box in tensors.location(number):
            chunk = tensors.chunk_of(box)
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
            rows, cols = slice(box["row"], box["row"] + box["rows"]), slice(box["col"], box["col"] + box["cols"])
            assert whole[chunk.key][place].isnan().all(), "each element is taken once"
            whole[chunk.key][place] = matrix[rows, cols].reshape(chunk.shape)
    return whole


def test_layers_of_a_dense_model_are_stacked() -> None:
    architecture = ARCHITECTURES["qwen3"]
    values, names = global_values(architecture, GlobalTensors(architecture)), canonical_values(architecture)
    mlp = values[LAYERS + "mlp.linear_fc1.weight"]
    assert mlp.shape == (4, 48, 12)
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        gate, up = names[prefix + "mlp.gate_proj.weight"], names[prefix + "mlp.up_proj.weight"]
        assert torch.equal(mlp[layer], torch.cat([gate, up]))
        fused_norm = values[LAYERS + "self_attention.linear_qkv.layer_norm_weight"][layer]
        assert torch.equal(fused_norm, names[prefix + "input_layernorm.weight"])


def test_queries_stand_beside_the_keys_and_values_of_their_group() -> None:
    architecture = ARCHITECTURES["qwen2_tied"]
    values, names = global_values(architecture, GlobalTensors(architecture)), canonical_values(architecture)
    q, k, v = (names[f"model.layers.3.self_attn.{part}_proj.bias"].view(2, -1) for part in "qkv")
    assert torch.equal(values[LAYERS + "self_attention.linear_qkv.bias"][3], torch.cat([q, k, v], dim=1).flatten())


def test_layers_beside_experts_have_numbers_and_experts_are_stacked() -> None:
    architecture = ARCHITECTURES["qwen3_moe"]
    values, names = global_values(architecture, GlobalTensors(architecture)), canonical_values(architecture)
    down = [names[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"] for expert in range(4)]
    assert torch.equal(values[LAYERS + "2.mlp.experts.experts.linear_fc2.weight"], torch.stack(down))
    assert torch.equal(values[LAYERS + "1.mlp.linear_fc2.weight"], names["model.layers.1.mlp.down_proj.weight"])


def test_rows_beyond_the_vocabulary_are_padding() -> None:
    architecture = ARCHITECTURES["qwen3"]
    assert GlobalTensors(architecture).shapes["output_layer.weight"] == (128, 12), "as Megatron-LM pads"
    values = global_values(architecture, GlobalTensors(architecture, padded_vocab_size=24))
    assert values["output_layer.weight"][:, 0].isnan().tolist() == [False] * 21 + [True] * 3
    with pytest.raises(CheckpointError, match="20 rows.*21"):
        GlobalTensors(architecture, padded_vocab_size=20)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_but_the_padded_vocabulary_is_covered(name: str) -> None:
    architecture = ARCHITECTURES[name]
    tensors = GlobalTensors(architecture, padded_vocab_size=architecture.vocab_size)
    assert not any(value.isnan().any() for value in global_values(architecture, tensors).values())
    assert sum(value.numel() for value in global_values(architecture, tensors).values()) == sum(
        torch.Size(shape).numel() for shape in canonical_tensors(architecture).shapes
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_layers_with_experts_may_be_stacked_too(name: str) -> None:
    sparse_only = {"mixtral": True, "qwen3_moe": False}[name]
    architecture = ARCHITECTURES[name]
    shapes = GlobalTensors(architecture, stacked=sparse_only).shapes
    assert GlobalTensors.stored_as(architecture, shapes).shapes == shapes
    assert ((4, 4, 48, 12) in shapes.values()) == sparse_only


def test_other_tensors_than_the_models_are_named() -> None:
    architecture = ARCHITECTURES["qwen3"]
    shapes = dict(GlobalTensors(architecture).shapes)
    del shapes["decoder.final_layernorm.weight"]
    shapes |= {"output_layer.bias": (128,), LAYERS + "mlp.linear_fc2.weight": (4, 12, 23)}
    with pytest.raises(CheckpointError) as told:
        GlobalTensors.stored_as(architecture, shapes)
    assert "the checkpoint lacks decoder.final_layernorm.weight" in str(told.value)
    assert "the model does not have output_layer.bias" in str(told.value)
    assert "decoder.layers.mlp.linear_fc2.weight [4, 12, 23] instead of [4, 12, 24]" in str(told.value)


@st.composite
def writers(draw: st.DrawFn) -> Grid:
    tp, pp, ep, replicas = (draw(st.integers(1, 4)) for _ in range(4))
    return Grid(tuple(range(tp * pp * ep * replicas)), tp=tp, pp=pp, ep=ep, etp=draw(st.sampled_from([1, tp, None])))


@given(grid=writers(), name=st.sampled_from(list(ARCHITECTURES)))
@settings(max_examples=25)
def test_writers_share_out_every_element_once(grid: Grid, name: str) -> None:
    tensors = GlobalTensors(ARCHITECTURES[name])
    written = {key: torch.zeros(shape, dtype=torch.int32) for key, shape in tensors.shapes.items()}
    for rank in grid.ranks:
        for chunk in chunks_of_writer(tensors, grid, rank):
            written[chunk.key][
                tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
            ] += 1
    assert all((count == 1).all() for count in written.values())


def test_writers_of_a_layout_that_divides_hold_as_much_as_its_ranks() -> None:
    tensors = GlobalTensors(ARCHITECTURES["mixtral"])
    grid = Grid(tuple(range(8)), tp=2, pp=2, ep=2, etp=2)
    sizes = [
        sum(torch.Size(chunk.shape).numel() for chunk in chunks_of_writer(tensors, grid, rank)) for rank in grid.ranks
    ]
    total = sum(torch.Size(shape).numel() for shape in tensors.shapes.values())
    assert max(sizes) < 1.5 * total / 8


def test_extra_states_are_those_that_transformer_engine_asks_for() -> None:
    stacked = extra_state_keys(GlobalTensors(ARCHITECTURES["qwen3"]))
    assert LAYERS + "self_attention.linear_qkv._extra_state/shard_3_4" in stacked
    assert LAYERS + "self_attention.core_attention._extra_state/shard_0_4" in stacked
    assert "decoder.final_layernorm._extra_state/shard_0_1" in stacked
    assert not any("output_layer" in key or "embedding" in key for key in stacked)
    sparse = extra_state_keys(GlobalTensors(ARCHITECTURES["mixtral"]))
    assert LAYERS + "2.mlp.experts.experts.linear_fc1._extra_state/shard_3_4" in sparse
    assert LAYERS + "2.self_attention.linear_qkv._extra_state/shard_0_1" in sparse
