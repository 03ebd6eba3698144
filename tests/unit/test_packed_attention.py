"""The torch core attention over packed sequences, and the choice of the model's modules."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rltrain.errors import ConfigError
from rltrain.training.megatron import layers
from rltrain.training.megatron.attention import PackedAttention, packed_sequences, thd_sequences

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
LENGTHS = {
    "one sequence": [7],
    "short ones share a batch": [3, 40, 1, 17, 40],
    "long ones are sorted by length": [300, 5, 290, 140, 1, 150, 129],
}


def by_sequence(query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
    outputs = []
    for q, k, v in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        outputs.append(output.permute(2, 0, 1, 3).flatten(2))
    return torch.cat(outputs)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_packed_attention_equals_attention_sequence_by_sequence(lengths: list[int]) -> None:
    torch.manual_seed(0)
    shapes = [(sum(lengths), 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    packed = packed_sequences(lengths, CPU)
    actual = PackedAttention(softmax_scale=None)(*inputs, None, packed_seq_params=packed)
    expected = by_sequence(*inputs, lengths)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_positions_begin_anew_in_each_sequence_and_slots_are_distinct() -> None:
    lengths = LENGTHS["long ones are sorted by length"]
    packed = packed_sequences(lengths, CPU)
    assert torch.equal(packed.positions, torch.cat([torch.arange(length) for length in lengths]))
    assert len(packed.unpad_index.unique()) == sum(lengths)
    assert torch.equal(packed.pad_index[packed.unpad_index], torch.arange(sum(lengths)))
    assert len(packed.pad_index) == sum(count * width for count, width in packed.batches)
    assert packed.batches == ((2, 300), (3, 150), (2, 5))


def test_transformer_engine_gets_the_boundaries_of_sequences() -> None:
    packed = thd_sequences([3, 5, 2], CPU)
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 3, 8, 10]
    assert packed.cu_seqlens_q.dtype == torch.int32
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 5


@pytest.mark.parametrize("installed", [True, False])
def test_transformer_engine_is_used_only_where_it_can_be(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "HAVE_TE", installed)
    assert layers.uses_transformer_engine("auto", torch.device("cuda")) is installed
    assert layers.uses_transformer_engine("auto", CPU) is False
    assert layers.uses_transformer_engine("local", torch.device("cuda")) is False
    with pytest.raises(ConfigError, match="model.transformer_impl is transformer_engine, but"):
        layers.uses_transformer_engine("transformer_engine", CPU)
