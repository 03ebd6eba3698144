"""Samples are packed into rows and cut between ranks, and attention keeps them separate."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rltrain.config import schema
from rltrain.data.experience import Experience
from rltrain.errors import ConfigError
from rltrain.models import Architecture, attention
from rltrain.models.attention import attend, sees
from rltrain.models.flops import positions_read
from rltrain.runtime.grid import Grid
from rltrain.training import packed_attention, sliced_attention
from rltrain.training.megatron import context_parallel, model_config
from rltrain.training.megatron.attention import PackedAttention, packed_sequences, thd_sequences
from rltrain.training.megatron.context_parallel import sequences_of_share, thd_slices
from rltrain.training.megatron.experts import routed_samples
from rltrain.training.megatron.model import layout_of_model
from rltrain.training.megatron.model_config import ModelOptions, transformer_config
from rltrain.training.packed_attention import attend_blockwise
from rltrain.training.packing import (
    ContextShare,
    balanced_bins,
    inverse,
    pack,
    padded_to,
    padding_alone,
    places_of,
    places_of_all,
)
from tests.support.model_shards import LATENT, tiny_architecture
from tests.unit.test_config_checks import check_in_world_of_8

lengths_strategy = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def experience_of(lengths: list[int]) -> Experience:
    num_tokens, num_samples = sum(lengths), len(lengths)
    return Experience(
        sample_ids=torch.arange(num_samples),
        group_ids=torch.arange(num_samples),
        prompt_ids=torch.arange(num_samples) + 100,
        lengths=torch.tensor(lengths),
        truncated=torch.zeros(num_samples, dtype=torch.bool),
        tokens=torch.arange(num_tokens),
        response_mask=torch.ones(num_tokens, dtype=torch.bool),
        policy_version=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=torch.randn(num_tokens),
    )


@given(lengths_strategy, st.integers(1, 100))
def test_bins_hold_every_index_once_and_respect_the_limit(lengths: list[int], max_tokens: int) -> None:
    bins = balanced_bins(lengths, max_tokens)
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    for members in bins:
        assert members == sorted(members)
        assert sum(lengths[i] for i in members) <= max_tokens or len(members) == 1
    assert bins == sorted(bins) == balanced_bins(lengths, max_tokens)


@given(lengths_strategy, st.integers(40, 200))
def test_bins_are_few_and_balanced(lengths: list[int], max_tokens: int) -> None:
    loads = [sum(lengths[i] for i in members) for members in balanced_bins(lengths, max_tokens)]
    if len(loads) > 1:
        assert max(loads) - min(loads) <= max(lengths)
        # Longest-first placement would also have needed any two of the bins beyond the minimum.
        assert sum(loads) > (len(loads) - 1) * (max_tokens - max(lengths))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=30), st.integers(1, 100))
def test_the_samples_of_a_pair_are_never_parted(pairs: list[tuple[int, int]], max_tokens: int) -> None:
    whole = experience_of([length for pair in pairs for length in pair])
    groups = torch.arange(len(pairs)).repeat_interleave(2) * 3
    whole = whole.with_fields(group_ids=groups, chosen=torch.tensor([True, False] * len(pairs)))
    batches = [batch.experience for batch in pack(whole, max_tokens, device=torch.device("cpu"))]
    for batch in batches:
        assert batch.group_ids[batch.chosen].tolist() == batch.group_ids[~batch.chosen].tolist()
        assert batch.num_tokens <= max_tokens or batch.num_samples == 2
    assert sorted(i for batch in batches for i in batch.sample_ids.tolist()) == list(range(2 * len(pairs)))


@given(lengths_strategy, st.integers(1, 100), st.integers(1, 8), st.booleans())
def test_micro_batches_hold_every_token_once_and_pad_as_asked(
    lengths: list[int], max_tokens: int, multiple_of: int, equal_lengths: bool
) -> None:
    experience = experience_of(lengths)
    batches = pack(
        experience, max_tokens, device=torch.device("cpu"), multiple_of=multiple_of, equal_lengths=equal_lengths
    )
    gathered = torch.cat([batch.token_index for batch in batches])
    assert torch.equal(gathered.sort().values, torch.arange(experience.num_tokens))
    for batch in batches:
        assert torch.equal(batch.experience.tokens, experience.tokens[batch.token_index])
        assert torch.equal(batch.experience.rollout_logprobs, experience.rollout_logprobs[batch.token_index])
        assert torch.equal(batch.padded_tokens[: batch.num_tokens], batch.experience.tokens)
        assert len(batch.padded_tokens) % multiple_of == 0
        assert sum(batch.segments) == len(batch.padded_tokens)
        num_samples = batch.experience.num_samples
        assert list(batch.segments[:num_samples]) == batch.experience.lengths.tolist()
        assert all(0 < piece <= max(batch.segments[:num_samples]) for piece in batch.segments[num_samples:])
    padded_lengths = {len(batch.padded_tokens) for batch in batches}
    assert not equal_lengths or len(padded_lengths) == 1
    if not equal_lengths:
        assert all(len(b.padded_tokens) - b.num_tokens < multiple_of for b in batches)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.integers(1, 60), st.integers(1, 5))
def test_bins_can_be_a_multiple_of_a_number(lengths: list[int], max_tokens: int, multiple: int) -> None:
    bins = balanced_bins(lengths, max_tokens, multiple)
    assert len(bins) % multiple == 0 and len(bins) - len(balanced_bins(lengths, max_tokens)) < 2 * multiple
    assert sorted(index for members in bins for index in members) == [*range(len(lengths))]
    assert all(sum(lengths[i] for i in members) <= max_tokens or len(members) == 1 for members in bins)
    assert all(bins[: len(lengths)]), "no bin is empty while samples are left"


def test_micro_batches_that_are_too_few_are_filled_up_with_padding() -> None:
    batches = pack(experience_of([3, 5]), 6, device=torch.device("cpu"), equal_lengths=True, count_multiple_of=4)
    assert [batch.lengths for batch in batches] == [(3,), (5,), (), ()]
    assert {sum(batch.segments) for batch in batches} == {5} == {len(batch.padded_tokens) for batch in batches}
    assert [batch.token_index.tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5, 6, 7], [], []]


CPU, CUDA, META = torch.device("cpu"), torch.device("cuda"), torch.device("meta")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
BY_HEADS = {"cp_communication": "all_to_all"}
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


def model_section(transformer_impl: str, dtype: str = "bfloat16") -> schema.Model:
    return schema.Model.model_validate({"path": "m", "transformer_impl": transformer_impl, "dtype": dtype})


@pytest.mark.parametrize("installed", [True, False])
def test_transformer_engine_is_used_only_where_it_can_be(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "HAVE_TE", installed)
    assert model_config.uses_transformer_engine(model_section("auto"), CUDA) is installed
    assert model_config.uses_transformer_engine(model_section("auto"), CPU) is False
    assert model_config.uses_transformer_engine(model_section("local"), CUDA) is False
    with pytest.raises(ConfigError, match="model.transformer_impl is transformer_engine, but"):
        model_config.uses_transformer_engine(model_section("transformer_engine"), CPU)


def test_float32_takes_local_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    assert model_config.uses_transformer_engine(model_section("auto", "float32"), CUDA) is False
    with pytest.raises(ConfigError, match=r"but model\.dtype is float32, .* or set model\.dtype to bfloat16"):
        model_config.uses_transformer_engine(model_section("transformer_engine", "float32"), CUDA)


@pytest.mark.parametrize(
    ("architecture", "settings", "problem"),
    [
        (tiny_architecture("qwen3", head_dim=16), {}, None),
        (tiny_architecture("qwen3", head_dim=12), {}, "the model's keys and values have 12 and 12"),
        (tiny_architecture("deepseek_v3", head_dim=192, mla=replace(LATENT, value_head_dim=128)), BY_HEADS, None),
        (tiny_architecture("deepseek_v3", head_dim=24), {}, "the model's keys and values have 24 and 5"),
        (tiny_architecture("qwen3", head_dim=16, num_kv_heads=1), {}, None),
        (tiny_architecture("qwen3", head_dim=16, num_kv_heads=1), BY_HEADS, "it distributes the 1 key-value heads"),
    ],
)
def test_sequences_that_ranks_share_take_local_layers_where_it_has_no_kernel(
    architecture: Architecture, settings: dict[str, str], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    shared, alone = Grid((0, 1), cp=2), Grid((0, 1))
    auto, asked = (model_section(how).model_copy(update=settings) for how in ("auto", "transformer_engine"))
    assert model_config.uses_transformer_engine(auto, CUDA, architecture, shared) is (problem is None)
    assert model_config.uses_transformer_engine(asked, CUDA, architecture, alone)
    with pytest.raises(ConfigError, match=problem) if problem else nullcontext():
        model_config.uses_transformer_engine(asked, CUDA, architecture, shared)


@pytest.mark.parametrize(("given", "refused"), [("1", True), ("0", False), (None, False)])
def test_experts_in_one_parameter_are_refused(
    given: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_config, "HAVE_TE", True)
    if given is not None:
        monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", given)
    for architecture in (tiny_architecture("qwen3"), tiny_architecture("qwen3_moe")):
        context = pytest.raises(ConfigError, match="SINGLE_PARAM is 1: Transformer Engine would keep all experts")
        with context if refused and architecture.moe else nullcontext():
            layout_of_model(architecture, Grid((0,)), model=model_section("auto"), device=CUDA)


def flash_stand_in(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, *most: int, **how: Any
) -> Tensor:
    """Computes on the CPU the documented result of torch.nn.attention.varlen's kernel."""
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query) == len(key) == len(value)
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert how["enable_gqa"] == (query.size(1) != key.size(1)) and how["scale"] is None
    return bottom_right_stand_in(query, key, value, cu_seq_q, cu_seq_k, *most, **how)


def test_a_gpu_takes_all_sequences_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def kernel(*tensors: Tensor, **settings: Any) -> Tensor:
        calls.append(len(tensors[0]))
        return flash_stand_in(*tensors, **settings)

    monkeypatch.setattr(attention, "packed_kernel", lambda: kernel)
    monkeypatch.setattr(packed_attention, "attends_packed", lambda *rows: True)
    lengths = LENGTHS["long ones are sorted by length"]
    inputs = [torch.randn(sum(lengths), 1, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    actual = PackedAttention(softmax_scale=None)(*inputs, None, packed_seq_params=packed_sequences(lengths, CPU))
    torch.testing.assert_close(actual, by_sequence(*inputs, lengths))
    assert calls == [sum(lengths)]


@pytest.mark.parametrize(
    ("taken", "dtype", "heads"),
    [
        (True, torch.bfloat16, (128, 128)),
        (True, torch.float16, (64, 64)),
        (False, torch.float32, (128, 128)),
        (False, torch.bfloat16, (192, 128)),  # latent attention
        (False, torch.bfloat16, (20, 20)),
        (False, torch.bfloat16, (512, 512)),
    ],
)
def test_torchs_flash_kernel_takes_what_it_is_given(
    taken: bool, dtype: torch.dtype, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real operator also checks the shapes of tensors without data."""
    monkeypatch.setattr(attention, "FLASH_DEVICE", "meta")
    query, key, value = (
        torch.empty(17, 1, count, size, dtype=dtype, device=META, requires_grad=True)
        for count, size in ((8, heads[0]), (2, heads[0]), (2, heads[1]))
    )
    assert attention.attends_packed(query[:, 0], key[:, 0], value[:, 0]) is taken
    packed = packed_sequences([5, 3, 9], META)
    attended = PackedAttention(softmax_scale=None)(query, key, value, None, packed_seq_params=packed)
    attended.sum().backward()
    assert attended.shape == (17, 1, 8 * heads[1]) and attended.dtype == dtype
    assert [x.grad.shape for x in (query, key, value)] == [x.shape for x in (query, key, value)]


def test_kernels_of_other_torches_are_taken_where_they_suffice() -> None:
    """The kernel of torch 2.11 accepts grouped heads without an argument. The kernel of 2.10 has no window."""

    def of_212(query: Tensor, *, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> list[Any]:
        return [query, scale, window_size, enable_gqa]

    def of_211(query: Tensor, *, scale: float, window_size: tuple[int, int]) -> list[Any]:
        return [query, scale, window_size]

    def of_210(query: Tensor, *, is_causal: bool) -> None:
        raise AssertionError("has no window")

    called = []
    for kernel in (of_212, of_211):
        taken = attention._with_grouped_heads(kernel)
        assert taken is not None
        called.append(taken("rows", scale=0.5, window_size=(3, 0), enable_gqa=True))
    assert called == [["rows", 0.5, (3, 0), True], ["rows", 0.5, (3, 0)]]
    assert attention._with_grouped_heads(of_210) is None


def test_rows_on_the_cpu_are_padded() -> None:
    assert not attention.attends_packed(*torch.empty(3, 17, 8, 64, dtype=torch.bfloat16))


@pytest.mark.parametrize("enabled", [True, False])
def test_cudnn_is_left_out_of_our_attention_and_of_nobody_elses(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def sdpa(*tensors: Tensor, **settings: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        if len(seen) == 2:
            raise ValueError("a kernel that fails")
        return scaled_dot_product_attention(*tensors, **settings)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", sdpa)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        attention.attend(*torch.randn(3, 1, 2, 5, 8), causal=True)
        with pytest.raises(ValueError, match="fails"):
            attention.attend(*torch.randn(3, 1, 2, 5, 8), causal=True)
        assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False, False], enabled)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


sizes_strategy = st.sampled_from([2, 3, 4])
slice_lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(max_examples=25)
@given(slice_lengths, sizes_strategy)
def test_ranks_share_out_every_sequence_evenly(slices: list[int], size: int) -> None:
    lengths = [2 * size * each for each in slices]
    order = places_of_all(lengths, size)
    assert torch.equal(order.sort().values, torch.arange(sum(lengths)))
    assert torch.equal(order[inverse(order)], torch.arange(sum(lengths)))
    positions = torch.cat([torch.arange(length) for length in lengths])
    reads = [int((positions[places_of(lengths, ContextShare(rank, size))] + 1).sum()) for rank in range(size)]
    assert reads == [positions_read(lengths) // size] * size, (
        "the tokens of every rank attend to equally many positions"
    )


def test_a_rank_has_a_slice_and_the_one_as_far_from_the_end() -> None:
    assert places_of([8, 4], ContextShare(0, 2)).tolist() == [0, 1, 6, 7, 8, 11]
    assert places_of([8, 4], ContextShare(1, 2)).tolist() == [2, 3, 4, 5, 9, 10]


@settings(max_examples=25)
@given(slice_lengths, st.integers(10, 100), sizes_strategy, st.integers(1, 8), st.booleans())
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
@given(slice_lengths, sizes_strategy, st.integers(0, 5))
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


BY_HEADS_CONFIG = {"model": {"path": "m", "cp_communication": "all_to_all"}}


@pytest.mark.parametrize("communication", [{}, BY_HEADS_CONFIG])
def test_heads_that_can_be_shared_out_are_accepted(communication: dict[str, Any]) -> None:
    for parallel in ({"cp": 2}, {"tp": 2, "cp": 4}, {"pp": 2, "cp": 4}):
        check_in_world_of_8(
            placement={"actor,reference,rollout,reward": "all"}, actor={"parallel": parallel}, **communication
        )


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    """The model has eight heads and two key-value heads."""
    sections: dict[str, Any] = {
        "placement": {"actor,reference": "0-5", "rollout,reward": "6-7"},
        "actor": {"parallel": {"cp": 3}},
    }
    check_in_world_of_8(**sections)
    with pytest.raises(ConfigError) as refused:
        check_in_world_of_8(**sections, **BY_HEADS_CONFIG)
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
    """Computes on the CPU the documented result of torch.nn.attention.varlen's kernel for sequences with more keys than
    queries. The last query attends to all keys. The previous query attends to one key less."""
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
        monkeypatch.setattr(sliced_attention, "attends_packed", lambda *rows: True)
    lengths = [2 * size * each for each in (1, 7, 40, 3, 2)]
    query, key, value = (torch.randn(sum(lengths), 1, heads, 8) for heads in (4, 2, 2))
    expected, order = by_sequence(query, key, value, lengths), places_of_all(lengths, size)
    for rank in range(size):
        share = ContextShare(rank, size)
        places = places_of(lengths, share)
        sequences = sequences_of_share(lengths, share, CPU, by_heads=False)
        rows = [query[places][:, 0], key[order][:, 0], value[order][:, 0]]
        attended = sliced_attention.attend_slices(*rows, sequences, None)
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


def at_once(
    queries: Tensor, keys: Tensor, values: Tensor, window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Computes attention by its formula."""
    group = queries.size(1) // keys.size(1)
    keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
    scores = queries @ keys.mT / queries.size(-1) ** 0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    places = torch.arange(queries.size(2))
    scores = scores.masked_fill(~sees(places, places, window), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : queries.size(2)] @ values


@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    st.integers(1, 17),
    st.none() | st.integers(1, 20),
    st.none() | st.just(0.7),
    st.booleans(),
    st.integers(1, 20),
)
def test_blocks_change_nothing(
    sequences: int,
    heads: tuple[int, int],
    length: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    block_tokens: int,
) -> None:
    torch.manual_seed(0)
    sizes = [(heads[0], 5), (heads[1], 5), (heads[1], 3)]
    inputs = [
        torch.randn(sequences, count, length, size, dtype=torch.float64, requires_grad=True) for count, size in sizes
    ]
    sinks = torch.randn(heads[0], dtype=torch.float64, requires_grad=True) if has_sinks else None
    learned = [*inputs, *([sinks] if sinks is not None else [])]
    expected = at_once(*inputs, window, softcap, sinks)
    found = attend_blockwise(*inputs, window=window, softcap=softcap, sinks=sinks, block_tokens=block_tokens)
    torch.testing.assert_close(found, expected)
    given_back = torch.randn_like(expected)
    for mine, theirs in zip(
        torch.autograd.grad(found, learned, given_back), torch.autograd.grad(expected, learned, given_back), strict=True
    ):
        torch.testing.assert_close(mine, theirs)
    if softcap is None and window is None and sinks is not None:
        of_engines = attend(*inputs, causal=True, sinks=sinks[:, None, None])
        torch.testing.assert_close(of_engines.float(), expected.float())  # its scores are float32


def test_half_precision_keeps_its_type() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 33, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(4, dtype=torch.bfloat16, requires_grad=True)
    found = attend_blockwise(*inputs, sinks=sinks, window=9, block_tokens=8)
    gradients = torch.autograd.grad(found.float().square().sum(), [*inputs, sinks])
    assert all(x.dtype == torch.bfloat16 for x in (found, *gradients))
    wide = [x.detach().double().requires_grad_() for x in (*inputs, sinks)]
    expected = at_once(*wide[:3], 9, None, wide[3])
    torch.testing.assert_close(found.double(), expected, rtol=4e-2, atol=4e-2)
    for mine, theirs in zip(gradients, torch.autograd.grad(expected.square().sum(), wide), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.1, atol=0.1)


def test_blocks_are_as_many_queries_as_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    blocks = packed_attention._blocks

    def noted(length: int, block_tokens: int, window: int | None) -> object:
        asked.append(block_tokens)
        return blocks(length, block_tokens, window)

    monkeypatch.setattr(packed_attention, "_blocks", noted)
    monkeypatch.setattr(packed_attention, "SCORES_AT_ONCE", 2 * 3 * 40 * 20)
    rows = torch.randn(2, 3, 40, 4)
    for window in (None, 30, 9):
        attend_blockwise(rows, rows, rows, window=window, softcap=1.0)
    attend_blockwise(*[rows.expand(2, 3, 40, 4).repeat(9, 1, 1, 1)] * 3, softcap=1.0)
    assert asked == [20, 30, 20, packed_attention.LEAST_TOKENS]


@pytest.mark.parametrize("per_row", [True, False])
def test_engines_attend_to_so_many_scores_at_once(per_row: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 7, 5), torch.randn(2, 2, 9, 5), torch.randn(2, 2, 9, 3)
    bias = torch.zeros(2, 1, 7 if per_row else 1, 9).masked_fill_(torch.rand(2, 1, 7 if per_row else 1, 9) < 0.4, -1e9)
    sinks = torch.randn(4, 7 if per_row else 1, 1)
    expected = attend(queries, keys, values, bias, softcap=2.0, sinks=sinks)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 2 * 4 * 9 * 3)
    torch.testing.assert_close(attend(queries, keys, values, bias, softcap=2.0, sinks=sinks), expected)
