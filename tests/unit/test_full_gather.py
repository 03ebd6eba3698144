"""The slow oracle and the checksums on one rank, without process groups."""

import numpy as np
import pytest
import torch

from rltrain.errors import SyncMismatchError
from rltrain.reshard.copy_table import MAX_ELEMENTS, bits_of
from rltrain.reshard.layout import Layout
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import plan
from rltrain.reshard.verify import converted, full_gather_sync, verify
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from tests.model_shards import PADDING, Place, engine_shard, full_tensors, megatron_shard, tiny_architecture

ARCHITECTURE = tiny_architecture("qwen2")
ONE_RANK = Grid((0,))


def shards() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    full = full_tensors(ARCHITECTURE)
    cut = megatron_shard(ARCHITECTURE, full, Place()), engine_shard(ARCHITECTURE, full, Place())
    held, expected = ({name: torch.tensor(values) for name, values in shard.items()} for shard in cut)
    return held, expected


def test_one_rank_needs_no_group() -> None:
    source, destination = megatron_layout(ARCHITECTURE, ONE_RANK), engine_layout(ARCHITECTURE, ONE_RANK)
    held, expected = shards()
    wanted = {name: torch.full_like(tensor, PADDING) for name, tensor in expected.items()}
    full_gather_sync(source, destination, held, wanted, None)
    assert all(torch.equal(wanted[name], expected[name]) for name in expected)
    made = plan(source, destination, 0, 1)
    verify(made, source, destination, held, wanted, group=None)
    held["decoder.final_layernorm.weight"][5] = wanted["model.norm.weight"][5] = torch.nan
    verify(made, source, destination, held, wanted, group=None)
    wanted["model.norm.weight"].view(torch.int32)[5] += 1  # another NaN, where nothing is converted
    with pytest.raises(
        SyncMismatchError, match=r"model\.norm\.weight differs on rank\(s\) 0 from what rank\(s\) 0 sent"
    ):
        verify(made, source, destination, held, wanted, group=None)


def test_a_tensor_that_no_rank_holds_in_full_is_refused_by_name() -> None:
    source, destination = megatron_layout(ARCHITECTURE, Grid((0, 1), tp=2)), engine_layout(ARCHITECTURE, ONE_RANK)
    half = Layout(source.ranks[:1], source.parts[:1], source.tensors, source.types, source.build)
    shard = megatron_shard(ARCHITECTURE, full_tensors(ARCHITECTURE), Place(tp=2))
    held = {name: torch.tensor(values) for name, values in shard.items()}
    with pytest.raises(ValueError, match=r"holds 192 of 252 elements of model\.embed_tokens\.weight"):
        full_gather_sync(half, destination, held, shards()[1], None)


def test_tensors_that_are_missing_or_of_another_type_are_refused() -> None:
    source, destination = megatron_layout(ARCHITECTURE, ONE_RANK), engine_layout(ARCHITECTURE, ONE_RANK)
    held, wanted = shards()
    with pytest.raises(ValueError, match="rank 0 is in the layout of ranks"):
        full_gather_sync(source, destination, held, None, None)
    with pytest.raises(ValueError, match=r"torch\.bfloat16.*torch\.float32"):
        full_gather_sync(source, destination, held, {name: tensor.bfloat16() for name, tensor in wanted.items()}, None)


def test_conversions_have_the_prescribed_nans() -> None:
    values = torch.tensor([1.0, torch.nan, -torch.nan, torch.inf])
    assert converted(values, torch.bfloat16).view(torch.int16).tolist() == [0x3F80, 0x7FFF, 0x7FFF, 0x7F80]
    assert converted(values, torch.float16).view(torch.int16).tolist() == [0x3C00, 0x7FFF, 0x7FFF, 0x7C00]
    assert converted(values.half(), torch.float32).view(torch.int32)[1:3].tolist() == [0x7FFFFFFF] * 2
    kept = torch.tensor([0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert converted(kept, torch.float32).view(torch.int32).tolist() == [0x7FC10000]


def test_bits_of_nan_count_only_where_they_must_be_kept() -> None:
    for dtype, integers in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        nans = torch.tensor([[torch.nan, -torch.nan, torch.inf, -torch.inf, -1.0]]).to(dtype)
        nans.view(integers)[0, 0] -= 2
        exact, loose = (bits_of(nans, exact=exact)[0].tolist() for exact in (True, False))
        assert exact[0] != exact[1] and loose[0] == loose[1]
        assert exact[2:] == loose[2:] and len(set(loose)) == 4
    float8 = torch.tensor([[0x7F, 0xFF, 0x7E, 0xFE]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    loose = bits_of(float8, exact=False)[0].tolist()
    assert loose[0] == loose[1] and loose[2:] == [0x7E, 0xFE]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_boxes_are_read_in_place_and_converted_in_steps(dtype: str) -> None:
    """A vector longer than a step, and a matrix of several: checked with a plan that copies them."""
    width = MAX_ELEMENTS // 3
    architecture = tiny_architecture("llama", num_layers=1, hidden_size=width, num_heads=1, num_kv_heads=1, head_dim=2,
                                     ffn_hidden_size=5, vocab_size=7)  # fmt: skip
    source, destination = megatron_layout(architecture, ONE_RANK), engine_layout(architecture, ONE_RANK, dtype=dtype)
    held = {name: torch.arange(float(np.prod(s))).reshape(s) for name, s in source.on(0).parameters}
    wanted = {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, shape in destination.on(0).parameters}
    full_gather_sync(source, destination, held, wanted, None)
    made = plan(source, destination, 0, 1)
    verify(made, source, destination, held, wanted, group=None)
    rows = wanted["model.layers.0.mlp.gate_up_proj.weight"]
    rows[[0, 3]] = rows[[3, 0]]  # of different steps, at the same place in each
    with pytest.raises(SyncMismatchError, match=r"gate_proj\.weight differs"):
        verify(made, source, destination, held, wanted, group=None)
