"""Which tokens a rank of context parallelism computes, and what its attention is given."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.models import attention
from rltrain.models.flops import positions_read
from rltrain.runtime.grid import Grid
from rltrain.training.megatron import context_parallel
from rltrain.training.megatron.chunk import ModelOptions
from rltrain.training.megatron.context_parallel import sequences_of_share, thd_slices
from rltrain.training.megatron.experts import routed_samples
from rltrain.training.megatron.model import transformer_config
from rltrain.training.packing import ContextShare, inverse, pack, padded_to, padding_alone, places_of, places_of_all
from tests.model_shards import tiny_architecture
from tests.unit.test_config_checks import check_in_world_of_8
from tests.unit.test_packed_attention import by_sequence
from tests.unit.test_packing import experience_of

CPU = torch.device("cpu")
sizes_strategy = st.sampled_from([2, 3, 4])
lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=25)
@given(lengths_strategy, sizes_strategy)
def test_ranks_share_out_every_sequence_evenly(slices: list[int], size: int) -> None:
    lengths = [2 * size * each for each in slices]
    order = places_of_all(lengths, size)
    assert torch.equal(order.sort().values, torch.arange(sum(lengths)))
    assert torch.equal(order[inverse(order)], torch.arange(sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    reads = [int((positions[places_of(lengths, ContextShare(rank, size))] + 1).sum()) for rank in range(size)]
    assert reads == [positions_read(lengths) // size] * size, "positions that its tokens attend to"


def test_a_rank_has_a_slice_and_the_one_as_far_from_the_end() -> None:
    assert places_of([8, 4], ContextShare(0, 2)).tolist() == [0, 1, 6, 7, 8, 11]
    assert places_of([8, 4], ContextShare(1, 2)).tolist() == [2, 3, 4, 5, 9, 10]


@settings(max_examples=25)
@given(lengths_strategy, st.integers(10, 100), sizes_strategy, st.integers(1, 8), st.booleans())
def test_micro_batches_hold_every_token_on_one_rank(
    lengths: list[int], max_tokens: int, size: int, multiple_of: int, equal_lengths: bool
) -> None:
    experience = experience_of(lengths)
    padding: dict[str, Any] = {"multiple_of": multiple_of, "equal_lengths": equal_lengths}
    shares = [ContextShare(rank, size) for rank in range(size)]
    of_ranks = [pack(experience, max_tokens, device=CPU, share=share, **padding) for share in shares]
    assert len({len(batches) for batches in of_ranks}) == 1
    for batches in zip(*of_ranks, strict=True):
        first = batches[0]
        assert all(batch.segments == first.segments for batch in batches)
        assert all(segment % (2 * size) == 0 for segment in first.segments) and sum(first.segments) % multiple_of == 0
        assert first.lengths == tuple(first.experience.lengths.tolist())
        rows = torch.cat([batch.padded_tokens[: batch.num_rows] for batch in batches])
        for batch in batches:
            assert len(batch.padded_tokens) * size == sum(batch.segments)
            assert batch.slices is not None
            assert torch.equal(rows[batch.slices.row_of_token], batch.experience.tokens)
        told = torch.cat([batch.rows_of(batch.experience.rollout_logprobs) for batch in batches])
        assert torch.equal(told[first.slices.row_of_token], first.experience.rollout_logprobs)
    assert not equal_lengths or len({sum(batch.segments) for batch in of_ranks[0]}) == 1


@settings(max_examples=25)
@given(lengths_strategy, sizes_strategy, st.integers(0, 5))
def test_every_token_is_its_samples_on_one_rank_and_the_rest_is_padding(
    lengths: list[int], size: int, behind: int
) -> None:
    experience = experience_of(lengths)
    shares = [ContextShare(rank, size) for rank in range(size)]
    of_ranks = [pack(experience, sum(lengths), device=CPU, share=share)[0] for share in shares]
    rows = len(of_ranks[0].padded_tokens) + 2 * behind
    padded = [padded_to(batch, rows, share) for batch, share in zip(of_ranks, shares, strict=True)]
    empty = [padding_alone(experience, rows, CPU, share) for share in shares]
    for batches, found in ((of_ranks, lengths), (padded, lengths), (empty, [])):
        told = [routed_samples(batch, torch.ones(len(found))) for batch in batches]
        assert {len(batch.padded_tokens) for batch in batches} == {len(samples.of_token) for samples in told}
        counts = torch.cat([samples.of_token for samples in told]).bincount(minlength=len(found) + 1)
        assert all(torch.equal(samples.lengths, counts) for samples in told)
        assert counts[:-1].tolist() == found
        assert all(sum(batch.segments) == size * len(batch.padded_tokens) for batch in batches)
        assert all(segment % (2 * size) == 0 for batch in batches for segment in batch.segments)
    for batch in padded:
        assert batch.slices is not None
        tokens = torch.cat([other.padded_tokens[: other.num_rows] for other in padded])[batch.slices.row_of_token]
        assert torch.equal(tokens, experience.tokens)


BY_HEADS = {"model": {"path": "m", "cp_communication": "all_to_all"}}


@pytest.mark.parametrize("communication", [{}, BY_HEADS])
def test_heads_that_can_be_shared_out_are_accepted(communication: dict[str, Any]) -> None:
    for parallel in ({"cp": 2}, {"tp": 2, "cp": 4}, {"pp": 2, "cp": 4}):
        check_in_world_of_8(
            placement={"actor,reference,rollout,reward": "all"}, actor={"parallel": parallel}, **communication
        )


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    """Of eight heads and two key-value heads."""
    sections: dict[str, Any] = {
        "placement": {"actor,reference": "0-5", "rollout,reward": "6-7"},
        "actor": {"parallel": {"cp": 3}},
    }
    check_in_world_of_8(**sections)
    with pytest.raises(ConfigError) as refused:
        check_in_world_of_8(**sections, **BY_HEADS)
    assert (
        "actor.parallel.cp: got 3 with model.cp_communication all_to_all, and a tensor-parallel rank has 8 attention "
        "heads and 2 key-value heads; expected a divisor of the former and a divisor or multiple of the latter, or "
        "model.cp_communication: auto"
    ) in str(refused.value)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_experts_are_dealt_out_to_the_ranks_that_cut_sequences(family: str) -> None:
    architecture = tiny_architecture(family, max_positions=4096, num_heads=8)
    for parallel in ({"cp": 2}, {"cp": 4, "ep": 4}, {"tp": 2, "cp": 2, "ep": 4, "etp": 1}):
        check_in_world_of_8(
            architecture, placement={"actor,reference,rollout,reward": "all"}, actor={"parallel": parallel}
        )


def bottom_right_stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int, **how: Any
) -> Tensor:
    """torch.nn.attention.varlen's kernel, as its documentation has it, of sequences with more keys than queries: the
    last query attends to all keys, the one before it to all but one."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and how["window_size"] == (-1, 0)
    sizes, num_keys = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(sizes), max(num_keys)) and sum(sizes) == len(query) and sum(num_keys) == len(key)
    outputs = []
    for q, k, v in zip(query.split(sizes), key.split(num_keys), value.split(num_keys), strict=True):
        whole = torch.cat([q.new_zeros(len(k) - len(q), *q.shape[1:]), q])
        outputs.append(by_sequence(whole[:, None], k[:, None], v[:, None], [len(k)])[-len(q) :, 0].view(q.shape))
    return torch.cat(outputs)


@pytest.mark.parametrize("packed_kernel", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_slices_attend_to_all_before_them(size: int, packed_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed_kernel:
        monkeypatch.setattr(attention, "packed_kernel", lambda: bottom_right_stand_in)
        monkeypatch.setattr(context_parallel, "attends_packed", lambda *rows: True)
    lengths = [2 * size * each for each in (1, 7, 40, 3, 2)]
    query, key, value = (torch.randn(sum(lengths), 1, heads, 8) for heads in (4, 2, 2))
    expected, order = by_sequence(query, key, value, lengths), places_of_all(lengths, size)
    for rank in range(size):
        share = ContextShare(rank, size)
        places = places_of(lengths, share)
        sequences = sequences_of_share(lengths, share, CPU, by_heads=False)
        rows = [query[places][:, 0], key[order][:, 0], value[order][:, 0]]
        attended = context_parallel.attend_slices(*rows, sequences, None)
        torch.testing.assert_close(attended.flatten(1), expected[places][:, 0])
        positions = torch.cat([torch.arange(length) for length in lengths])
        assert torch.equal(sequences.positions, positions[places])


def test_transformer_engine_gets_whole_sequences_and_how_to_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "plain_group", lambda group: ("plain", group))
    group: Any = "ranks"
    packed = thd_slices([8, 4, 12], group, CPU)
    assert packed.cp_group == ("plain", group)
    boundaries = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
    assert [b.tolist() for b in boundaries] == [[0, 8, 12, 24]] * 4
    assert packed.qkv_format == "thd" and packed.max_seqlen_q == packed.max_seqlen_kv == 12
    for communication, type_ in (("auto", "p2p"), ("all_to_all", "a2a")):
        model = schema.Model(path="m", cp_communication=communication)
        options = ModelOptions(model, schema.Parallel(cp=2), CPU, transformer_engine=False)
        config = transformer_config(tiny_architecture("qwen3"), Grid((0, 1), cp=2), 0, options)
        assert (config.context_parallel_size, config.cp_comm_type) == (2, type_)
