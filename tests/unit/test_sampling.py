"""Sampling: random numbers, draws by the Gumbel maximum, truncation, log-probs, seeds."""

import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.roles.rollout import DrawingRole
from rltrain.rollout.embedded import decoder as sampling_module
from rltrain.rollout.embedded.decoder import (
    BLOCK_TOKENS,
    COUNTER_STEP,
    FIRST_BLOCK,
    NO_STREAM,
    POSITION_STEP,
    choose_draw,
    draw,
    draw_by_kernel,
    log_uniforms,
    mix64,
    num_differences,
    race,
    random_streams,
    truncate,
)
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.sample import mix64 as mix64_int
from rltrain.rollout.sample import request_seed

CPU = torch.device("cpu")


def chi_square_bound(degrees_of_freedom: int, sigmas: float = 4.0) -> float:
    """Returns an upper quantile of the chi-square distribution (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * degrees_of_freedom)
    return degrees_of_freedom * (1.0 - spread + sigmas * math.sqrt(spread)) ** 3


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, max_response_tokens=1, stop_token_ids=())


def test_mix64_is_splitmix64() -> None:
    """The outputs are published for seed 0. The state advances by the golden ratio and is then mixed."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix64_int(golden * n % 2**64) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(-(2**63), 2**63 - 1))
def test_tensor_mix_equals_integer_mix(value: int) -> None:
    assert int(mix64(torch.tensor([value]))) % 2**64 == mix64_int(value % 2**64)


def grid_of(shape: dict[str, int], first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns streams, positions and counters of a grid. `shape` has their numbers."""
    seeds, positions, counters = (torch.arange(shape.get(name, 1)) for name in ("seeds", "positions", "counters"))
    return random_streams(seeds.tolist(), CPU)[:, None, None], positions[:, None], counters + first


@pytest.mark.parametrize("first", [0, FIRST_BLOCK])
@pytest.mark.parametrize("axis", ["counters", "positions", "seeds"])
def test_numbers_are_uniform_and_inside_the_open_interval(axis: str, first: int) -> None:
    count = 100_000
    logs = log_uniforms(*grid_of({axis: count}, first)).flatten()
    assert logs.dtype == torch.float32 and logs.shape == (count,)
    assert bool(torch.isfinite(logs).all()) and float(logs.max()) < 0
    numbers = logs.double().exp_()
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    assert chi_square(counts, torch.full((100,), count / 100)) < chi_square_bound(99)
    pairs = (numbers[:-1] * 10).long() * 10 + (numbers[1:] * 10).long()
    counts = pairs.bincount(minlength=100).float()
    assert chi_square(counts, torch.full((100,), (count - 1) / 100)) < chi_square_bound(99)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_numbers_of_neighbouring_seeds_positions_and_tokens_are_independent(axis: int) -> None:
    """Large numbers decide a draw, so they are tested too. Each of 64 tokens is the largest equally often."""
    numbers = log_uniforms(*grid_of({"seeds": 64, "positions": 64, "counters": 64})).double().exp_()
    one, other = numbers.narrow(axis, 0, 63).flatten(), numbers.narrow(axis, 1, 63).flatten()
    counts = ((one * 16).long() * 16 + (other * 16).long()).bincount(minlength=256).float()
    assert chi_square(counts, torch.full((256,), len(one) / 256)) < chi_square_bound(255)
    bits = numbers.mul(2.0**20).long()
    differing = sum((((bits.narrow(axis, 0, 63) ^ bits.narrow(axis, 1, 63)) >> bit) & 1).sum() for bit in range(20))
    expected = len(one) * 20 / 2
    assert abs(int(differing) - expected) < 4 * math.sqrt(expected / 2)
    winners = numbers.argmax(axis).flatten().bincount(minlength=64).float()
    assert chi_square(winners, torch.full((64,), 64.0)) < chi_square_bound(63)


def test_small_exponentials_keep_their_precision() -> None:
    """The largest of a million logarithms are as far from 0 as those of exact numbers."""
    logs = log_uniforms(*grid_of({"seeds": 10, "counters": 100_000})).flatten()
    least = (-logs).topk(100, largest=False).values.double() * len(logs)  # arrivals of a Poisson process of rate 1
    gaps = torch.diff(least, prepend=torch.zeros(1))
    assert float(gaps.min()) > 0 and 0.6 < float(gaps.mean()) < 1.4
    counts = torch.histc(torch.exp(-gaps).float(), bins=5, min=0, max=1)
    assert chi_square(counts, torch.full((5,), 20.0)) < chi_square_bound(4)


def test_positions_and_counters_of_a_response_never_coincide() -> None:
    distance = POSITION_STEP * pow(COUNTER_STEP, -1, 2**64) % 2**64  # between two positions, in counters
    apart = min(min(step * distance % 2**64, -step * distance % 2**64) for step in range(1, 2**14))
    assert apart > 2 * FIRST_BLOCK


def unmix64(value: int) -> int:
    """Computes the inverse of splitmix64's finaliser."""
    for bits, multiplier in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = value
        while shifted:
            shifted >>= bits
            value ^= shifted
        value = value * pow(multiplier, -1, 2**64) % 2**64
    return value


@pytest.mark.parametrize(("low_bits", "number"), [(0, 2.0**-24), (2**63 - 1, 1.0)])
def test_extreme_bits_stay_inside_the_open_interval(low_bits: int, number: float) -> None:
    """`bits` come before the last step of the finaliser. The numbers are made without this step."""
    bits = low_bits ^ low_bits >> 31
    stream = unmix64(bits)
    assert mix64_int(stream) == bits
    signed = torch.tensor([stream - 2**64 if stream >= 2**63 else stream])
    (log,) = log_uniforms(signed, torch.zeros_like(signed), torch.zeros_like(signed)).tolist()
    assert log < 0 and math.isfinite(log)
    assert math.exp(log) == pytest.approx(number, rel=1e-6)


def test_streams_differ_between_neighbouring_seeds_and_accept_any_integer() -> None:
    streams = random_streams([0, 1, 2, -1, 2**63, 2**64 - 2], CPU)
    assert len(set(streams.tolist())) == 6
    assert random_streams([2**64 + 5], CPU).tolist() == random_streams([5], CPU).tolist()


def test_request_seeds_are_distinct_reproducible_and_non_negative() -> None:
    keys = [
        (seed, step, prompt, sample)
        for seed in (0, 1)
        for step in range(5)
        for prompt in range(20)
        for sample in range(8)
    ]
    seeds = [request_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [request_seed(*key) for key in keys]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampled_frequencies_match_the_tempered_softmax(temperature: float) -> None:
    count, vocab = 60_000, 12
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    streams = random_streams(list(range(count)), CPU)
    positions = torch.zeros(count, dtype=torch.int64)
    tokens, logprobs = draw(row.expand(count, -1), streams, positions, sampling(temperature))
    probabilities = torch.softmax(row / temperature, -1)
    counts = tokens.bincount(minlength=vocab).float()
    assert chi_square(counts, probabilities * count) < chi_square_bound(vocab - 1)
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-5, rtol=0)


def test_greedy_takes_the_largest_logit_and_scores_it_at_temperature_one() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    ignored = torch.arange(50)
    tokens, logprobs = draw(logits, ignored, ignored, sampling(temperature=0.0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_greedy_rows_among_others_take_the_largest_logit_whatever_is_cut_off() -> None:
    logits = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    streams, positions = random_streams([*range(40)], CPU), torch.zeros(40, dtype=torch.int64)
    greedy = torch.arange(40) % 4 == 3
    for alone in (sampling(0.7), sampling(0.7, top_p=0.6, top_k=4)):
        mixed = replace(alone, greedy=GreedyPlaces(1, 4))
        tokens, logprobs = draw(logits, streams.masked_fill(greedy, NO_STREAM), positions, mixed)
        expected = draw(logits, streams, positions, alone)[0].where(~greedy, logits.argmax(-1))
        assert torch.equal(tokens, expected)
        tempered = torch.log_softmax(logits / 0.7, -1)
        torch.testing.assert_close(logprobs, tempered.gather(-1, tokens[:, None])[:, 0])


def kept_reference(weights: list[float], top_p: float, top_k: int) -> set[int]:
    """Computes the kept tokens by the definition, one at a time."""
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    if top_k:
        order = order[:top_k]
    total = math.fsum(weights[token] for token in order)
    kept: set[int] = set()
    for token in order:
        if top_p < 1 and math.fsum(weights[k] for k in kept) >= top_p * total:
            break
        kept.add(token)
    return kept


@settings(max_examples=40)
@given(
    weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=20, unique=True),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 25),
)
def test_truncation_keeps_the_tokens_of_the_definition(weights: list[int], top_p: float, top_k: int) -> None:
    """Whole numbers add up exactly, so both sides agree even if a sum equals the threshold."""
    kept, ids = truncate(torch.tensor([weights], dtype=torch.float64), top_p, top_k)
    kept_ids = ids[0][kept[0] > 0].tolist()
    assert set(kept_ids) == kept_reference([float(weight) for weight in weights], top_p, top_k)
    assert kept[0][kept[0] > 0].tolist() == [weights[token] for token in kept_ids]


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_truncated_draws_stay_inside_and_keep_untruncated_logprobs(
    seed: int, top_p: float, top_k: int, temperature: float
) -> None:
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(seed)).expand(64, -1)
    tempered = torch.log_softmax(logits / temperature, -1)
    positions = torch.arange(64)
    streams = random_streams([seed], CPU).expand(64)
    tokens, logprobs = draw(logits, streams, positions, sampling(temperature, top_p, top_k))
    assert set(tokens.tolist()) <= kept_reference(tempered[0].exp().tolist(), top_p, top_k)
    torch.testing.assert_close(logprobs, tempered[0][tokens])


def test_truncated_frequencies_match_the_renormalised_distribution() -> None:
    count, vocab, top_k = 40_000, 10, 4
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(count)
    streams = random_streams([11], CPU).expand(count)
    tokens, _ = draw(row.expand(count, -1), streams, positions, sampling(top_k=top_k))
    kept = row.topk(top_k).indices
    expected = torch.softmax(row[kept], -1) * count
    counts = tokens.bincount(minlength=vocab).float()
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], expected) < chi_square_bound(top_k - 1)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_frequencies_over_several_blocks_match_the_distribution(top_p: float) -> None:
    """The last block is not full, one block has no weight at all, and the likely tokens are in different blocks."""
    count, vocab = 6_000, 3 * BLOCK_TOKENS + 40
    row = torch.full((vocab,), -torch.inf)
    likely = torch.tensor([0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 77, vocab - 2, vocab - 1])
    row[likely] = torch.tensor([0.3, 1.0, 2.0, 2.5, 0.0, 1.5, 2.2])
    streams, positions = random_streams(list(range(count)), CPU), torch.full((count,), 5)
    tokens, _ = draw(row.expand(count, -1), streams, positions, sampling(top_p=top_p))
    kept, ids = truncate(torch.softmax(row, -1)[None], top_p, 0)
    expected = torch.zeros(vocab).scatter_(0, ids[0], kept[0])
    counts, there = tokens.bincount(minlength=vocab).float(), expected > 0
    assert counts[there].sum() == count
    expected *= count / expected.sum()
    assert chi_square(counts[there], expected[there]) < chi_square_bound(int(there.sum()) - 1)


@pytest.mark.parametrize("vocab", [5, 2 * BLOCK_TOKENS + 3])
def test_a_token_of_weight_zero_is_never_drawn(vocab: int) -> None:
    weights = torch.zeros(2000, vocab)
    weights[:, [1, vocab - 2]] = torch.tensor([1e-30, 2e-30])
    streams, positions = random_streams(list(range(2000)), CPU)[:, None], torch.zeros(2000, 1, dtype=torch.int64)
    assert set(race(weights, streams, positions).flatten().tolist()) == {1, vocab - 2}


def test_rounding_moves_few_draws() -> None:
    """An error of 1e-5 in the logits changes about 1e-5 of the draws, at any place of the vocabulary."""
    logits = 3 * torch.randn(4000, 1000, generator=torch.Generator().manual_seed(0))
    streams, positions = random_streams(list(range(4000)), CPU), torch.arange(4000)
    tokens, _ = draw(logits, streams, positions, sampling())
    off = logits + 1e-5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    assert int((draw(off, streams, positions, sampling())[0] != tokens).sum()) <= 2


def test_a_draw_depends_on_its_own_row_only() -> None:
    logits = torch.randn(32, 20, generator=torch.Generator().manual_seed(1))
    streams, positions = random_streams(list(range(32)), CPU), torch.arange(32)
    tokens, logprobs = draw(logits, streams, positions, sampling())
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    shuffled, shuffled_logprobs = draw(logits[order], streams[order], positions[order], sampling())
    assert shuffled.tolist() == tokens[order].tolist()
    torch.testing.assert_close(shuffled_logprobs, logprobs[order])


@pytest.mark.parametrize("vocab", [5, 3 * BLOCK_TOKENS])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", [sampling(), sampling(0.0), sampling(top_k=3), sampling(top_p=0.5)])
def test_rows_that_are_not_finite_are_drawn_without_failing_and_stay_visible(
    how: SamplingParams, bad: float, vocab: int
) -> None:
    logits = torch.zeros(3, vocab)
    logits[1] = bad
    tokens, logprobs = draw(logits, random_streams([1, 2, 3], CPU), torch.zeros(3, dtype=torch.int64), how)
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocab
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


def test_a_response_ends_at_the_checkpoint_s_tokens_a_turn_s_and_those_of_the_config():
    encoder = SimpleNamespace(end_tokens=frozenset({4, 7}))
    prompts = SimpleNamespace(encoder=encoder)
    job = SimpleNamespace(architecture=SimpleNamespace(eos_token_ids=(9, 4)), rows=SimpleNamespace(prompts=prompts))
    role = SimpleNamespace(job=job, sessions=SimpleNamespace(end_tokens=frozenset({4, 6})))
    params = DrawingRole.sampling_params(role, schema.Sampling(stop_token_ids=(9, 2, 6)))
    assert params.stop_token_ids == (9, 4, 2, 6, 7)


CUDA = torch.device("cuda")


def kernel(monkeypatch: pytest.MonkeyPatch, draw_rows: object) -> None:
    """Replaces the kernel's module by one with `draw_rows`, since the real one imports Triton."""
    module = ModuleType("sampling_kernel")
    module.draw_rows = draw_rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rltrain.rollout.embedded.triton_kernels", module)


def by_torch(
    logits: torch.Tensor, streams: torch.Tensor, positions: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(logits, streams, positions, sampling(temperature))


def test_a_kernel_is_used_where_it_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    found = partial(num_differences, CPU)
    monkeypatch.setattr(sampling_module, "num_differences", lambda device: found())
    assert choose_draw(CPU) == (draw, "")
    kernel(monkeypatch, by_torch)
    assert choose_draw(CUDA) == (draw_by_kernel, "")
    kernel(monkeypatch, lambda logits, *rest: by_torch(logits.flip(-1), *rest))
    assert choose_draw(CUDA)[0] is draw and "differently" in choose_draw(CUDA)[1]
    kernel(monkeypatch, lambda *arguments: (by_torch(*arguments)[0], torch.full((64,), torch.nan)))
    assert choose_draw(CUDA)[0] is draw
    monkeypatch.delitem(sys.modules, "rltrain.rollout.embedded.triton_kernels")
    monkeypatch.setitem(sys.modules, "triton", None)  # not installed
    assert choose_draw(CUDA)[0] is draw and "import of triton" in choose_draw(CUDA)[1]


@pytest.mark.parametrize("how", [sampling(), sampling(0.0), sampling(0.5), sampling(0.5, top_p=0.5), sampling(top_k=3)])
def test_with_the_kernel_draws_are_the_same(monkeypatch: pytest.MonkeyPatch, how: SamplingParams) -> None:
    kernel(monkeypatch, by_torch)
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    arguments = logits, random_streams([*range(50)], CPU), torch.arange(50), how
    for found, expected in zip(draw_by_kernel(*arguments), draw(*arguments), strict=True):
        assert torch.equal(found, expected)
