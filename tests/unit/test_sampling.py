"""Sampling: random numbers, inversion, truncation, log-probs, seeds."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.config import schema
from rltrain.roles.drawing import DrawingRole
from rltrain.rollout.embedded.random_streams import mix64, random_streams, uniforms
from rltrain.rollout.embedded.sampling import draw, invert_cdf, truncate
from rltrain.rollout.engine import GreedyPlaces, SamplingParams
from rltrain.rollout.stream.seeds import mix64 as mix64_int
from rltrain.rollout.stream.seeds import request_seed

CPU = torch.device("cpu")


def chi_square_bound(degrees_of_freedom: int, sigmas: float = 4.0) -> float:
    """Upper quantile of the chi-square distribution (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * degrees_of_freedom)
    return degrees_of_freedom * (1.0 - spread + sigmas * math.sqrt(spread)) ** 3


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, max_response_tokens=1, stop_token_ids=())


def test_mix64_is_splitmix64() -> None:
    """The generator's published outputs for seed 0: the state advances by the golden ratio, then is mixed."""
    golden = 0x9E3779B97F4A7C15
    outputs = [mix64_int(golden * n % 2**64) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@given(st.integers(-(2**63), 2**63 - 1))
def test_tensor_mix_equals_integer_mix(value: int) -> None:
    assert int(mix64(torch.tensor([value]))) % 2**64 == mix64_int(value % 2**64)


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_uniforms_are_uniform_and_inside_the_open_interval(axis: str) -> None:
    count = 100_000
    index = torch.arange(count)
    if axis == "positions":
        numbers = uniforms(random_streams([7], CPU).expand(count), index)
    else:
        numbers = uniforms(random_streams(list(range(count)), CPU), torch.zeros_like(index))
    assert numbers.dtype == torch.float32
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    assert chi_square(counts, torch.full((100,), count / 100)) < chi_square_bound(99)
    pairs = (numbers[:-1] * 10).long() * 10 + (numbers[1:] * 10).long()
    counts = pairs.bincount(minlength=100).float()
    assert chi_square(counts, torch.full((100,), (count - 1) / 100)) < chi_square_bound(99)


def unmix64(value: int) -> int:
    """The inverse of splitmix64's finaliser."""
    for bits, multiplier in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        shifted = value
        while shifted:
            shifted >>= bits
            value ^= shifted
        value = value * pow(multiplier, -1, 2**64) % 2**64
    return value


@pytest.mark.parametrize(("bits", "number"), [(0, 2.0**-24), (2**64 - 1, 1 - 2.0**-24)])
def test_extreme_bits_stay_inside_the_open_interval(bits: int, number: float) -> None:
    stream = unmix64(bits)
    assert mix64_int(stream) == bits
    signed = torch.tensor([stream - 2**64 if stream >= 2**63 else stream])
    assert uniforms(signed, torch.zeros_like(signed)).tolist() == [number]


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
    numbers = uniforms(streams, torch.zeros(count, dtype=torch.int64))
    tokens, logprobs = draw(row.expand(count, -1), numbers, sampling(temperature))
    probabilities = torch.softmax(row / temperature, -1)
    counts = tokens.bincount(minlength=vocab).float()
    assert chi_square(counts, probabilities * count) < chi_square_bound(vocab - 1)
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-5, rtol=0)


def test_greedy_takes_the_largest_logit_and_scores_it_at_temperature_one() -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(0))
    ignored = torch.full((50,), torch.nan)
    tokens, logprobs = draw(logits, ignored, sampling(temperature=0.0))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_greedy_rows_among_others_take_the_largest_logit_whatever_is_cut_off() -> None:
    logits = torch.randn(40, 7, generator=torch.Generator().manual_seed(0))
    numbers = uniforms(random_streams([*range(40)], CPU), torch.zeros(40, dtype=torch.int64))
    greedy = torch.arange(40) % 4 == 3
    for alone in (sampling(0.7), sampling(0.7, top_p=0.6, top_k=4)):
        mixed = replace(alone, greedy=GreedyPlaces(1, 4))
        tokens, logprobs = draw(logits, numbers.masked_fill(greedy, -1), mixed)
        expected = draw(logits, numbers, alone)[0].where(~greedy, logits.argmax(-1))
        assert torch.equal(tokens, expected)
        tempered = torch.log_softmax(logits / 0.7, -1)
        torch.testing.assert_close(logprobs, tempered.gather(-1, tokens[:, None])[:, 0])


def kept_reference(weights: list[float], top_p: float, top_k: int) -> set[int]:
    """Kept tokens by the definition, one at a time."""
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
    """Whole numbers add up exactly, so that both sides agree even where a sum equals the threshold."""
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
    tokens, logprobs = draw(logits, uniforms(streams, positions), sampling(temperature, top_p, top_k))
    assert set(tokens.tolist()) <= kept_reference(tempered[0].exp().tolist(), top_p, top_k)
    torch.testing.assert_close(logprobs, tempered[0][tokens])


def test_truncated_frequencies_match_the_renormalised_distribution() -> None:
    count, vocab, top_k = 40_000, 10, 4
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    positions = torch.arange(count)
    tokens, _ = draw(row.expand(count, -1), uniforms(random_streams([11], CPU), positions), sampling(top_k=top_k))
    kept = row.topk(top_k).indices
    expected = torch.softmax(row[kept], -1) * count
    counts = tokens.bincount(minlength=vocab).float()
    assert counts.sum() == counts[kept].sum()
    assert chi_square(counts[kept], expected) < chi_square_bound(top_k - 1)


def test_inversion_never_picks_a_token_of_weight_zero() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for number in (2.0**-24, 0.25, 0.5, 0.75, 1 - 2.0**-24):
        picked = int(invert_cdf(weights, torch.tensor([[number]])))
        assert picked == (1 if number < 0.5 else 3)


def test_a_draw_depends_on_its_own_row_only() -> None:
    logits = torch.randn(32, 20, generator=torch.Generator().manual_seed(1))
    streams, positions = random_streams(list(range(32)), CPU), torch.arange(32)
    tokens, logprobs = draw(logits, uniforms(streams, positions), sampling())
    order = torch.randperm(32, generator=torch.Generator().manual_seed(2))
    shuffled, shuffled_logprobs = draw(logits[order], uniforms(streams[order], positions[order]), sampling())
    assert shuffled.tolist() == tokens[order].tolist()
    torch.testing.assert_close(shuffled_logprobs, logprobs[order])


def test_rows_with_nan_are_drawn_without_failing_and_stay_visible() -> None:
    logits = torch.zeros(3, 5)
    logits[1] = float("nan")
    zeros = torch.zeros(3, dtype=torch.int64)
    tokens, logprobs = draw(logits, uniforms(random_streams([1, 2, 3], CPU), zeros), sampling())
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 5
    assert torch.isfinite(logprobs).tolist() == [True, False, True]


def test_a_response_ends_at_the_checkpoint_s_tokens_a_turn_s_and_those_of_the_config():
    job = SimpleNamespace(architecture=SimpleNamespace(eos_token_ids=(9, 4)))
    role = SimpleNamespace(job=job, sessions=SimpleNamespace(end_tokens=frozenset({4, 6})))
    params = DrawingRole.sampling_params(role, schema.Sampling(stop_token_ids=(9, 2, 6)))
    assert params.stop_token_ids == (9, 4, 2, 6)
