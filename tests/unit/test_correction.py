"""Tests of importance weights and masks for samples of other weights, and of the limit on their age."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.advantages import with_sample_advantages
from rltrain.algorithms.correction import (
    apply_staleness_limit,
    corrected,
    summarize,
    token_staleness,
    weight_sums,
    with_weight_mean,
)
from rltrain.algorithms.policy_loss import ResponseTokens, kl_term, policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from tests.support.packed_experience import packed_experience
from tests.unit.test_policy_losses import SHAPE, in_double, present_logprobs, sequences


def plain_k(kind: str, log_ratio: float) -> float:
    """Returns the estimate of KL(engine || actor) from log(actor / engine)."""
    return {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(log_ratio) - 1 - log_ratio}[kind]


def plain_correction(experience: Experience, present: Tensor, loss: schema.Loss) -> dict[int, tuple[bool, float]]:
    """Returns (whether it is left out, its weight) for every response token, by index."""
    correction, result = loss.correction, {}
    actor = experience.actor_logprobs if loss.old_logprobs == "actor" else present
    for places in sequences(experience):
        log_ratios = [(actor[i] - experience.rollout_logprobs[i]).item() for i in places]
        mean = sum(log_ratios) / len(log_ratios)
        estimate = sum(plain_k(correction.reject_by, value) for value in log_ratios) / len(log_ratios)
        rejected = correction.reject_above is not None and abs(estimate) > correction.reject_above
        for bounds in correction.masks:
            per_sequence = {"sequence": [sum(log_ratios)], "geometric": [mean], "every_token": log_ratios}
            ratios = [math.exp(value) for value in per_sequence.get(bounds.level, [])]
            rejected = rejected or any(not bounds.low <= ratio <= bounds.high for ratio in ratios)
        drift = sum((experience.rollout_logprobs[i] - present[i]).item() for i in places) / len(places)
        for i, log_ratio in zip(places, log_ratios, strict=True):
            of_level = {"token": log_ratio, "sequence": sum(log_ratios), "geometric": mean}[correction.level]
            weight, outside = 1.0, False
            if correction.high is not None:
                ratio = math.exp(of_level)
                outside = not correction.low <= ratio <= correction.high
                weight = {
                    "tis": min(max(ratio, correction.low), correction.high),
                    "mis": ratio,
                    "icepop": 0.0 if outside else ratio,
                    "mask": 1.0,
                }[correction.method]
            if correction.opsm_delta is not None and drift > correction.opsm_delta and experience.advantages[i] < 0:
                weight = 0.0
            masked = any(
                bounds.level == "token" and not bounds.low <= math.exp(log_ratio) <= bounds.high
                for bounds in correction.masks
            )
            left_out = rejected or masked or (outside and correction.method in ("mis", "mask"))
            result[i] = (left_out, weight)
    return result


def plain_loss(experience: Experience, present: Tensor, loss: schema.Loss) -> Tensor:
    """Returns the weighted clipped loss over the remaining tokens. It is a mean over tokens, or over sequences with a
    token left."""
    plan = plain_correction(experience, present.detach(), loss)
    old = experience.actor_logprobs if loss.old_logprobs == "actor" else experience.rollout_logprobs
    left = [[i for i in places if not plan[i][0]] for places in sequences(experience)]
    left = [places for places in left if places]
    num_tokens, total = sum(map(len, left)), torch.zeros((), dtype=torch.float64)
    for places in left:
        for i in places:
            ratio, advantage = torch.exp(present[i] - old[i]), experience.advantages[i]
            objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            divisor = num_tokens if loss.normalization == "token_mean" else len(places) * len(left)
            total = total - plan[i][1] * objective / divisor
    return total


CORRECTIONS: list[dict[str, Any]] = [
    *({"method": method, "level": level, "low": low, "high": high}
      for method in ("tis", "mis", "icepop", "mask")
      for level, low, high in (("token", 0.4, 1.5), ("sequence", 0.05, 4.0), ("geometric", 0.9, 1.1))),
    {"high": 1.5},
    {"masks": [{"level": "token", "low": 0.4, "high": 2.0}]},
    {"high": 1.5, "masks": [{"level": "geometric", "low": 0.8, "high": 1.2}, {"level": "sequence", "high": 3.0}]},
    {"method": "icepop", "low": 0.5, "high": 1.5, "masks": [{"level": "every_token", "low": 0.2, "high": 4.0}]},
    {"reject_above": 0.15, "reject_by": "k1"},
    {"reject_above": 0.25, "reject_by": "k2"},
    {"reject_above": 0.3, "reject_by": "k3"},
    {"opsm_delta": 0.05},
    {"method": "mis", "level": "sequence", "high": 3.0, "reject_above": 0.3, "opsm_delta": 0.1},
]  # fmt: skip
OF_ENGINE = [
    {"method": "mask", "low": 0.5, "high": 2.0},
    {"masks": [{"level": "geometric", "low": 0.6, "high": 1.7}]},
    {"reject_above": 0.3, "reject_by": "k3"},
    {"opsm_delta": 0.05},
]
"""Corrections of the ratio against the engine."""
LOSSES = [
    *(schema.Loss(correction=schema.Correction(**keys), normalization="sequence_mean") for keys in CORRECTIONS),
    *(schema.Loss(correction=schema.Correction(**keys)) for keys in CORRECTIONS[-4:]),
    *(schema.Loss(correction=schema.Correction(**keys), old_logprobs="rollout") for keys in OF_ENGINE),
]


def loss_and_gradient(experience: Experience, loss: schema.Loss) -> tuple[Tensor, Tensor]:
    present = present_logprobs(experience)
    output = policy_loss(loss, 9)(experience, present, torch.zeros_like(present))
    mean = output.loss / output.divisor.clamp(min=1)
    return mean, torch.autograd.grad(mean, present)[0]


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_loss_and_gradient_are_those_written_out(loss: schema.Loss) -> None:
    """With old_logprobs: actor and tis, this is decoupled PPO. Behaviour, proximal and present weights all differ."""
    decided = set()
    for seed in range(3):
        experience = in_double(SHAPE * 2, seed, "of tokens" if seed else "of sequences")
        present = present_logprobs(experience)
        expected = plain_loss(experience, present, loss)
        (expected_gradient,) = torch.autograd.grad(expected, present)
        value, gradient = loss_and_gradient(experience, loss)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
        decided |= set(plain_correction(experience, present.detach(), loss).values())
    assert len(decided) > 1, "a correction that treats all tokens alike tests nothing"


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_metrics_count_what_was_done(loss: schema.Loss) -> None:
    experience = in_double(SHAPE * 2)
    present = present_logprobs(experience)
    output = policy_loss(loss, 9)(experience, present, torch.zeros_like(present))
    plan = plain_correction(experience, present.detach(), loss)
    weights = {i: 0.0 if left_out else weight for i, (left_out, weight) in plan.items()}
    expected = {
        "tis_weight": sum(weights.values()) / len(weights),
        "ess": sum(weights.values()) ** 2 / len(weights) / sum(weight**2 for weight in weights.values()),
        "rejected_tokens": sum(weight == 0 for weight in weights.values()) / len(weights),
    }
    without = [all(weights[i] == 0 for i in places) for places in sequences(experience)]
    expected["rejected_sequences"] = sum(without) / len(without)
    actual = summarize({name: total.item() / len(weights) for name, total in output.token_sums.items()})
    assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert ("tis_clipped" in actual) == (loss.correction.high is not None)
    assert not actual.keys() & {"correctable_sequences", "tis_weight_square"}


def test_what_the_engine_drew_is_weighed_by_the_present_weights_where_the_loss_has_no_ratio() -> None:
    """Expects -sg[r 1(low <= r <= high)] A log pi with r against the engine. The mean counts tokens outside the bounds
    as 0."""
    correction = schema.Correction(method="icepop", low=0.8, high=1.2)
    loss = schema.Loss(policy="reinforce", old_logprobs="rollout", correction=correction)
    experience = in_double(SHAPE * 2)
    present = present_logprobs(experience)
    places = [i for sequence in sequences(experience) for i in sequence]
    ratios = {i: math.exp((present[i] - experience.rollout_logprobs[i]).item()) for i in places}
    inside = [i for i in places if 0.8 <= ratios[i] <= 1.2]
    expected = -sum(ratios[i] * experience.advantages[i] * present[i] for i in inside) / len(places)
    value, gradient = loss_and_gradient(experience, loss)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
    (expected_gradient,) = torch.autograd.grad(expected, present)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
    assert 0 < len(inside) < len(places)


@pytest.mark.parametrize("old", ["actor", "rollout"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("method", ["tis", "mis", "icepop"])
def test_normalized_weights_have_mean_1(method: Any, level: Any, old: Any) -> None:
    """The mean is over tokens or sequences of both replicas. With mis it leaves out the masked ones."""
    correction = schema.Correction(method=method, level=level, low=0.5, high=1.4, normalize="mini_batch")
    loss = schema.Loss(policy="reinforce", old_logprobs=old, correction=correction)
    parts = [in_double(SHAPE, seed) for seed in (0, 1)]
    present = [present_logprobs(part).detach() for part in parts]
    bare = loss.model_copy(update={"correction": correction.model_copy(update={"normalize": None})})
    pairs = list(zip(parts, present, strict=True))
    plans = [plain_correction(part, new, bare) for part, new in pairs]
    weights = []
    for part, plan in zip(parts, plans, strict=True):
        groups = sequences(part) if level != "token" else [[i] for places in sequences(part) for i in places]
        weights += [plan[places[0]][1] for places in groups if method != "mis" or not plan[places[0]][0]]
    mean = sum(weights) / len(weights)
    own = [weight_sums(part, new if old == "rollout" else None, loss) for part, new in pairs]
    total = torch.stack(own).sum(0)
    assert (total[0] / total[1]).item() == pytest.approx(mean)
    for (part, new), plan in zip(pairs, plans, strict=True):
        result = corrected(with_weight_mean(part, total), new, loss)
        for place, (left_out, weight) in plan.items():
            assert result.weights[place].item() == pytest.approx(0 if left_out else weight / mean, rel=1e-5)
        assert result.token_means["tis_weight_mean"].tolist() == pytest.approx([mean] * part.num_tokens)


def test_weights_of_which_none_is_left_are_not_divided_by_0() -> None:
    loss = schema.Loss(correction=schema.Correction(method="icepop", low=1e8, high=1e9, normalize="step"))
    experience = with_weight_mean(in_double(), weight_sums(in_double(), None, loss))
    assert experience.weight_means.tolist() == [1] * experience.num_samples
    empty = in_double().select(torch.zeros(0, dtype=torch.int64))
    assert weight_sums(empty, None, loss).tolist() == [0, 0]


def test_what_is_rejected_may_go_on_counting_in_the_divisor() -> None:
    masks = ({"level": "token", "low": 0.6, "high": 1.5}, {"level": "every_token", "low": 0.45, "high": 1e9})
    experience = in_double(SHAPE * 2)
    present = present_logprobs(experience)
    out, zero = (
        schema.Loss(correction=schema.Correction(masks=masks, rejected=kind), entropy_coef=0.5)
        for kind in ("left_out", "weight_0")
    )
    ones = torch.ones_like(present)
    kept, counted = (policy_loss(loss, 9)(experience, present, ones) for loss in (out, zero))
    num_tokens = int(experience.response_mask.sum())
    assert kept.sums["pg_loss"].item() == pytest.approx(counted.sums["pg_loss"].item())
    assert 0 < kept.divisor.item() < counted.divisor.item() == num_tokens
    entropy = counted.sums["pg_loss"].item() - counted.loss.item()
    assert entropy == pytest.approx(0.5 * num_tokens), "the entropy counts all tokens"


def test_without_a_correction_there_are_no_metrics_of_one() -> None:
    experience = in_double()
    result = corrected(experience, present_logprobs(experience), schema.Loss())
    assert (result.experience, result.weights, result.token_means) == (experience, None, {})
    assert summarize({"entropy": 1.0}) == {"entropy": 1.0}


def test_where_everything_is_left_out_there_is_no_loss_and_nothing_to_divide_by() -> None:
    experience = in_double()
    present = present_logprobs(experience)
    loss = schema.Loss(correction=schema.Correction(reject_above=1e-9))
    output = policy_loss(loss, 9)(experience, present, torch.zeros_like(present))
    output.loss.backward()
    assert (output.loss.item(), output.divisor.item()) == (0, 0)
    assert present.grad is not None and bool((present.grad == 0).all())
    metrics = summarize({name: total.item() / 11 for name, total in output.token_sums.items()})
    assert metrics["ess"] == 0 and metrics["rejected_sequences"] == 1


def test_what_the_engine_or_the_actor_held_impossible_has_a_bounded_effect() -> None:
    """No value of a token outside the mask reaches the gradient, however extreme it is."""
    experience = packed_experience([(0, 2), (0, 2)]).with_fields(
        actor_logprobs=torch.tensor([-1.0, -1e4, -1.0, -1.0]),
        rollout_logprobs=torch.tensor([-1e4, -1.0, -1.0, -1.0]),
        advantages=-torch.ones(4),
    )
    present = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    weights = corrected(experience, present, schema.Loss(correction=schema.Correction(high=2.0))).weights
    assert weights.tolist() == [2, 0, 1, 1]
    for method in ("mis", "mask"):
        loss = schema.Loss(correction=schema.Correction(method=method, low=0.5, high=2.0))
        output = policy_loss(loss, 9)(experience, present, torch.zeros(4))
        (gradient,) = torch.autograd.grad(output.loss, present)
        assert (output.divisor.item(), gradient.tolist()) == (2, [0, 0, 1, 1])


def test_a_missing_field_is_named() -> None:
    columns = packed_experience([(1, 2)]).columns()
    del columns["actor_logprobs"]
    with pytest.raises(ValueError, match="no actor_logprobs in"):
        corrected(Experience(**columns), torch.zeros(3), schema.Loss(correction=schema.Correction(high=2.0)))


@pytest.mark.parametrize(
    ("estimator", "unbiased"), [("k1", True), ("k3", True), ("k1", None), ("k3", None), ("k2", False)]
)
def test_the_unbiased_kl_has_the_value_and_gradient_of_the_divergence(estimator: Any, unbiased: bool | None) -> None:
    """Takes every token of a vocabulary once, weighted by its probability under the old policy. With on-policy tokens,
    k2 has this gradient without a correction."""
    generator = torch.Generator().manual_seed(3)
    logits, old, reference = (torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(3))
    logits.requires_grad_()
    logprobs = logits.log_softmax(0)
    old = logprobs.detach() if estimator == "k2" else old.log_softmax(0)
    reference = reference.log_softmax(0)
    experience = packed_experience([(0, 6)]).with_fields(
        actor_logprobs=old, reference_logprobs=reference, advantages=torch.zeros(6)
    )
    tokens = ResponseTokens.of(experience, logprobs, "actor_logprobs")
    term = kl_term(tokens, schema.Kl(coef=1.0, estimator=estimator, unbiased=unbiased))
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    expected = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad((old.exp() * term).sum(), logits)[0], expected)
    if estimator != "k2":
        torch.testing.assert_close((old.exp() * term).sum().detach(), divergence.detach())


def test_a_token_that_became_unlikely_does_not_outweigh_the_others() -> None:
    """Its log-prob has fallen by 12.6 since it was sampled. The reference still finds it likely."""
    drawn, present = torch.tensor([-0.1]), torch.tensor([-12.7])
    experience = packed_experience([(0, 1)]).with_fields(
        actor_logprobs=drawn, reference_logprobs=drawn, advantages=torch.zeros(1)
    )
    tokens = ResponseTokens.of(experience, present, "actor_logprobs")
    assert float(kl_term(tokens, schema.Kl(coef=1.0))) == pytest.approx(1.0, abs=1e-3)
    assert float(kl_term(tokens, schema.Kl(coef=1.0, unbiased=False))) > 2e5


def test_the_unbiased_kl_is_in_the_loss() -> None:
    experience, loss = in_double(), schema.Loss(kl=schema.Kl(coef=0.3, unbiased=True))
    present = present_logprobs(experience)
    places = [i for sequence in sequences(experience) for i in sequence]
    expected = plain_loss(experience, present, loss)
    for i in places:
        log = experience.reference_logprobs[i] - present[i]
        term = torch.exp(present[i] - experience.actor_logprobs[i]) * (torch.exp(log) - log - 1)
        expected = expected + 0.3 * term / len(places)
    value, gradient = loss_and_gradient(experience, loss)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, present)[0])


SHAPES = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 6)), min_size=1, max_size=6)
STEP = 6


def rows_of(experience: Experience) -> list[list[tuple[bool, int]]]:
    """Returns (in the response mask, policy version) of each sample's tokens."""
    lengths = experience.lengths.tolist()
    masks, versions = experience.response_mask.split(lengths), experience.policy_version.split(lengths)
    return [list(zip(m.tolist(), v.tolist(), strict=True)) for m, v in zip(masks, versions, strict=True)]


@settings(max_examples=30)
@example(shape=[], limit=0, how="drop", seed=0)
@example(shape=[(1, 4), (2, 3)], limit=6, how="drop", seed=0)
@example(shape=[(1, 4), (2, 3)], limit=6, how="mask", seed=0)
@given(shape=SHAPES, limit=st.integers(0, 6), how=st.sampled_from(["drop", "mask", "correct"]), seed=st.integers(0, 99))
def test_what_is_left_and_counted_equals_plain_python(
    shape: list[tuple[int, int]], limit: int, how: Any, seed: int
) -> None:
    experience = packed_experience(shape, seed)
    mask, staleness = [], []
    counts = dict.fromkeys(["stale_samples", "stale_tokens", "tokens", "staleness_sum", "staleness_max"], 0)
    for row in rows_of(experience):
        over = [inside and STEP - version > limit for inside, version in row]
        counts["stale_samples"] += any(over)
        counts["stale_tokens"] += sum(over)
        for (inside, version), token_over in zip(row, over, strict=True):
            removed = {"drop": any(over), "mask": token_over, "correct": False}[how]
            mask.append(inside and not removed)
            staleness.append(STEP - version if mask[-1] else 0)
    counts |= {"tokens": sum(mask), "staleness_sum": sum(staleness), "staleness_max": max(staleness, default=0)}
    kept, actual_counts = apply_staleness_limit(experience, STEP, limit, how)
    assert kept.response_mask.tolist() == mask
    assert token_staleness(kept, STEP).tolist() == staleness
    assert actual_counts == counts
    assert how == "correct" or actual_counts["staleness_max"] <= limit
    unchanged = {name: value for name, value in experience.columns().items() if name != "response_mask"}
    assert all(value is kept.columns()[name] for name, value in unchanged.items())


def test_a_dropped_sample_is_in_no_baseline() -> None:
    experience = packed_experience([(1, 2)] * 3)
    versions = torch.tensor([0, 5, 5, 0, 1, 5, 0, 5, 5], dtype=torch.int32)
    experience = experience.with_fields(
        policy_version=versions, group_ids=torch.zeros(3, dtype=torch.int64), rewards=torch.tensor([1.0, 50.0, 0.0])
    )
    kept, counts = apply_staleness_limit(experience, 5, 1, "drop")
    assert (counts["stale_samples"], counts["stale_tokens"]) == (1, 1)
    advantages = with_sample_advantages(kept, lambda rewards, groups: groups.centred(rewards)).advantages
    assert advantages.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, -0.5, -0.5]
