"""Tests of losses against plain arithmetic: the policy's parts, likelihood, preferences, values."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.correction import summarize
from rltrain.algorithms.losses import (
    LossFunction,
    LossOutput,
    before_tokens,
    clipped_value_loss,
    direct_preference_loss,
    likelihood_loss,
    masked_max,
    ranking_loss,
    response_totals,
    sample_index,
    token_weights,
    value_loss,
)
from rltrain.algorithms.losses import summarize as summarize_values
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config import schema
from rltrain.config.schema import Preference
from rltrain.data.experience import Experience
from rltrain.training.packing import pack
from tests.support.packed_experience import packed_experience

MAX_RESPONSE_TOKENS = 7
TIS = schema.Correction(high=1.1)


def make_experience(seed: int, prompt_lengths: list[int], response_lengths: list[int]) -> Experience:
    generator = torch.Generator().manual_seed(seed)
    lengths = [p + r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    mask = [[False] * p + [True] * r for p, r in zip(prompt_lengths, response_lengths, strict=True)]
    num_tokens = sum(lengths)

    def logprobs() -> torch.Tensor:
        return -torch.rand(num_tokens, generator=generator) * 2

    return Experience(
        sample_ids=torch.arange(len(lengths)),
        group_ids=torch.arange(len(lengths)) // 2,
        prompt_ids=torch.arange(len(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        truncated=torch.zeros(len(lengths), dtype=torch.bool),
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        response_mask=torch.tensor([m for row in mask for m in row], dtype=torch.bool),
        policy_version=torch.zeros(num_tokens, dtype=torch.int32),
        rollout_logprobs=logprobs(),
        actor_logprobs=logprobs(),
        reference_logprobs=logprobs(),
        advantages=torch.randn(num_tokens, generator=generator),
    )


def current_values(experience: Experience, seed: int = 99) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(experience.num_tokens, generator=generator) * 2
    return logprobs.requires_grad_(), torch.rand(experience.num_tokens, generator=generator).requires_grad_()


def plain_k(kind: str, actor: float, reference: float) -> float:
    ratio = math.exp(reference - actor)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[kind]


def plain_policy_loss(
    experience: Experience, logprobs: torch.Tensor, entropy: torch.Tensor, loss: schema.Loss
) -> dict[str, float]:
    """Computes the loss and its metrics by loops over sequences and tokens, on Python floats."""
    old = experience.rollout_logprobs if loss.old_logprobs == "rollout" else experience.actor_logprobs
    others = (experience.rollout_logprobs, experience.reference_logprobs, experience.advantages)
    rows = list(zip(*(column.tolist() for column in (logprobs, entropy, old, *others)), strict=True))
    mask, offsets = experience.response_mask.tolist(), experience.offsets().tolist()
    totals = {"loss": 0.0, "ppo_kl": 0.0, "pg_clipfrac": 0.0, "entropy": 0.0, "reference_kl": 0.0, "kl_loss": 0.0}
    totals |= {"train_rollout_logprob_abs_diff": 0.0, "abs_diff_max": 0.0, "ratio_max": 0.0, "ratio": 0.0}
    totals |= {"pg_loss": 0.0, "tis_weight": 0.0, "tis_clipped": 0.0, "ess": 0.0}
    all_tokens, cap = sum(mask), loss.correction.high
    for start, end in zip(offsets, offsets[1:], strict=False):
        positions = [i for i in range(start, end) if mask[i]]
        divisor = {
            "token_mean": all_tokens,
            "sequence_mean": len(positions) * experience.num_samples,
            "dr_grpo": experience.num_samples * MAX_RESPONSE_TOKENS,
        }[loss.normalization]
        for i in positions:
            new, ent, old_i, rollout, reference, advantage = rows[i]
            ratio = math.exp(new - old_i)
            clipped = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
            probability_ratio = math.exp(old_i - rollout)
            weight = 1.0 if cap is None else min(probability_ratio, cap)
            objective = weight * min(ratio * advantage, clipped * advantage)
            kl = plain_k(loss.kl.estimator, new, reference)
            kl *= ratio if loss.kl.estimator != "k2" and loss.kl.unbiased is not False else 1.0
            penalty = loss.kl.coef * kl if loss.kl.where == "loss" else 0.0
            totals["loss"] += (-objective - loss.entropy_coef * ent + penalty) / divisor
            totals["pg_loss"] -= objective / divisor
            totals["kl_loss"] += kl / divisor
            totals["tis_weight"] += weight / all_tokens
            totals["ess"] += weight**2 / all_tokens
            totals["tis_clipped"] += (probability_ratio > (cap or math.inf)) / all_tokens
            totals["ppo_kl"] += (old_i - new) / all_tokens
            totals["pg_clipfrac"] += (clipped * advantage < ratio * advantage) / all_tokens
            totals["entropy"] += ent / all_tokens
            totals["reference_kl"] += plain_k("k3", new, reference) / all_tokens
            totals["train_rollout_logprob_abs_diff"] += abs(new - rollout) / all_tokens
            totals["abs_diff_max"] = max(totals["abs_diff_max"], abs(new - rollout))
            totals["ratio"] += ratio / all_tokens
            totals["ratio_max"] = max(totals["ratio_max"], ratio)
    totals["ess"] = totals["tis_weight"] ** 2 / totals["ess"]
    return totals | {"rejected_tokens": 0.0, "rejected_sequences": 0.0}


LOSSES = [
    schema.Loss(),
    schema.Loss(clip_low=0.2, clip_high=0.28, old_logprobs="rollout"),
    schema.Loss(normalization="sequence_mean", entropy_coef=0.01),
    schema.Loss(normalization="dr_grpo", kl=schema.Kl(coef=0.1, estimator="k3")),
    schema.Loss(normalization="sequence_mean", kl=schema.Kl(coef=0.1, estimator="k2")),
    schema.Loss(entropy_coef=0.3, kl=schema.Kl(coef=0.5, estimator="k1")),
    schema.Loss(kl=schema.Kl(coef=0.2, unbiased=False)),
    schema.Loss(kl=schema.Kl(coef=0.5, estimator="k1", where="reward")),
    schema.Loss(correction=TIS),
    schema.Loss(
        correction=schema.Correction(high=2.0), normalization="sequence_mean", kl=schema.Kl(coef=0.1, estimator="k3")
    ),
]
SMOOTH = [
    schema.Loss(policy="sapo"),
    schema.Loss(policy="geometric_mean", normalization="sequence_mean", clip_low=0.4, clip_high=0.4),
    schema.Loss(dual_clip=1.5, correction=schema.Correction(method="icepop", low=0.5, high=2.0)),
    schema.Loss(kl=schema.Kl(coef=0.2, unbiased=True), correction=schema.Correction(level="geometric", high=1.1)),
    schema.Loss(normalization="sequence_mean", correction=schema.Correction(method="mis", level="sequence", high=3.0)),
]
WITH_STOPPED_GRADIENTS = [
    schema.Loss(policy="gspo", normalization="sequence_mean", correction=schema.Correction(reject_above=0.3)),
    schema.Loss(policy="cispo", clip_low=1.0, clip_high=0.5, correction=schema.Correction(opsm_delta=0.1)),
]
OF_MICRO_BATCHES = [schema.Loss(policy="clip_cov"), schema.Loss(policy="kl_cov", normalization="sequence_mean")]
"""Losses with covariances over a micro-batch."""
SPLITTABLE = [*LOSSES, *SMOOTH, *WITH_STOPPED_GRADIENTS]
ALL = [*SPLITTABLE, *OF_MICRO_BATCHES]


def means(outputs: list[LossOutput], experience: Experience) -> dict[str, float]:
    """Returns the loss and metrics of the mini-batch `experience`, from the `outputs` of its micro-batches."""
    divisor, num_tokens = sum(o.divisor.item() for o in outputs) or 1, int(experience.response_mask.sum()) or 1
    result = {"loss": sum(o.loss.item() for o in outputs) / divisor}
    result |= {name: sum(o.sums[name].item() for o in outputs) / divisor for name in outputs[0].sums}
    result |= {name: sum(o.token_sums[name].item() for o in outputs) / num_tokens for name in outputs[0].token_sums}
    return summarize(result | {name: max(o.maxima[name].item() for o in outputs) for name in outputs[0].maxima})


@pytest.mark.parametrize("loss", LOSSES, ids=range(len(LOSSES)))
def test_policy_loss_equals_plain_python(loss: schema.Loss) -> None:
    experience = make_experience(0, [3, 1, 2, 4], [5, 1, 7, 2])
    logprobs, entropy = current_values(experience)
    actual = means([policy_loss(loss, MAX_RESPONSE_TOKENS)(experience, logprobs, entropy)], experience)
    expected = plain_policy_loss(experience, logprobs.detach(), entropy.detach(), loss)
    names = {"loss", "pg_loss", "ppo_kl", "pg_clipfrac", "entropy", "reference_kl", "ratio", "ratio_max"}
    names |= {"train_rollout_logprob_abs_diff", "train_rollout_logprob_abs_diff_max"}
    if loss.kl.coef and loss.kl.where == "loss":
        names.add("kl_loss")
    if loss.correction.high is not None:
        names |= {"tis_weight", "tis_clipped", "ess", "rejected_tokens", "rejected_sequences"}
    expected["train_rollout_logprob_abs_diff_max"] = expected.pop("abs_diff_max")
    assert actual == pytest.approx({name: expected[name] for name in names}, rel=1e-4, abs=1e-6)


def split(experience: Experience, cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cuts), experience.num_samples]
    return [list(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]


def accumulate(
    function: LossFunction, experience: Experience, parts: list[list[int]]
) -> tuple[list[LossOutput], torch.Tensor, torch.Tensor]:
    """Returns the outputs per part and the gradients for logprobs and entropy. Each part is evaluated separately, as on
    a rank."""
    logprobs, entropy = current_values(experience)
    outputs = []
    for part in parts:
        samples = torch.tensor(part, dtype=torch.int64)
        index = torch.isin(sample_index(experience), samples)
        output = function(experience.select(samples), logprobs[index], entropy[index])
        output.loss.backward()
        outputs.append(output)
    entropy_gradient = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    assert logprobs.grad is not None
    return outputs, logprobs.grad, entropy_gradient


@settings(max_examples=25)
@given(
    shape=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 6), max_size=4),
    loss=st.sampled_from([*SPLITTABLE, None]),
    seed=st.integers(0, 1000),
)
def test_any_split_into_micro_batches_and_ranks_gives_the_same_loss_and_gradient(
    shape: list[tuple[int, int]], cuts: list[int], loss: schema.Loss | None, seed: int
) -> None:
    experience = make_experience(seed, [p for p, _ in shape], [r for _, r in shape])
    function = likelihood_loss() if loss is None else policy_loss(loss, MAX_RESPONSE_TOKENS)
    whole, gradient, entropy_gradient = accumulate(function, experience, [list(range(len(shape)))])
    parts = split(experience, [min(c, len(shape)) for c in cuts])
    pieces, pieces_gradient, pieces_entropy_gradient = accumulate(function, experience, parts)
    assert means(pieces, experience) == pytest.approx(means(whole, experience), rel=1e-5, abs=1e-6)
    assert sum(p.divisor.item() for p in pieces) == whole[0].divisor.item()
    torch.testing.assert_close(pieces_gradient, gradient, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pieces_entropy_gradient, entropy_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [*LOSSES, *SMOOTH], ids=range(len(LOSSES + SMOOTH)))
def test_gradient_equals_finite_differences(loss: schema.Loss) -> None:
    experience = make_experience(3, [2, 1], [3, 4])
    double = {
        name: getattr(experience, name).double()
        for name in ("rollout_logprobs", "actor_logprobs", "reference_logprobs", "advantages")
    }
    experience = experience.with_fields(**double)
    function = policy_loss(loss, MAX_RESPONSE_TOKENS)
    logprobs, entropy = (v.detach().double().requires_grad_() for v in current_values(experience))
    assert torch.autograd.gradcheck(
        lambda lp, ent: function(experience, lp, ent).loss, (logprobs, entropy), eps=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("normalization", "factors", "divisor"),
    [("token_mean", (1, 1), 4), ("sequence_mean", (1, 1 / 3), 2), ("dr_grpo", (1, 1), 2 * 10)],
)
def test_weights_of_known_lengths(normalization: Any, factors: tuple[float, float], divisor: float) -> None:
    """The third sample has no response and does not count as a sequence."""
    experience = make_experience(0, [1, 1, 2], [1, 3, 0])
    weights = token_weights(experience, normalization, max_response_tokens=10)
    first, second = factors
    torch.testing.assert_close(weights.factor, torch.tensor([0.0, first, 0, second, second, second, 0, 0]))
    assert weights.divisor.item() == divisor


@pytest.mark.parametrize("loss", [*ALL, None], ids=range(len(ALL) + 1))
def test_no_samples_give_zeros_under_the_same_names(loss: schema.Loss | None) -> None:
    experience = make_experience(0, [2], [3])
    function = likelihood_loss() if loss is None else policy_loss(loss, MAX_RESPONSE_TOKENS)
    some = function(experience, *current_values(experience))
    none = function(experience.select(torch.zeros(0, dtype=torch.int64)), torch.zeros(0), torch.zeros(0))
    assert (none.loss.item(), none.divisor.item()) == (0, 0)
    for kind in ("sums", "token_sums", "maxima"):
        assert {name: value.item() for name, value in getattr(none, kind).items()} == dict.fromkeys(
            getattr(some, kind), 0
        )


@pytest.mark.parametrize("loss", ALL, ids=range(len(ALL)))
def test_values_outside_the_response_reach_neither_loss_nor_gradient(loss: schema.Loss) -> None:
    experience = make_experience(5, [2, 3], [3, 2])
    outside = ~experience.response_mask
    logprobs, entropy = (v.detach() for v in current_values(experience))
    function = policy_loss(loss, MAX_RESPONSE_TOKENS)
    expected = function(experience, logprobs, entropy)
    names = ("rollout_logprobs", "actor_logprobs", "reference_logprobs", "advantages")
    poisoned = experience.with_fields(**{n: getattr(experience, n).masked_fill(outside, -1000.0) for n in names})
    for poison in (float("nan"), float("-inf"), -1000.0):
        bad_logprobs = logprobs.masked_fill(outside, poison).requires_grad_()
        bad_entropy = entropy.masked_fill(outside, poison).requires_grad_()
        output = function(poisoned, bad_logprobs, bad_entropy)
        output.loss.backward()
        assert output.loss.item() == expected.loss.item()
        assert means([output], experience) == means([expected], experience)
        assert bad_logprobs.grad is not None and bool((bad_logprobs.grad[outside] == 0).all())
        assert bool(bad_logprobs.grad.isfinite().all())


def test_metrics_carry_no_gradient_and_the_first_update_has_ratio_one() -> None:
    experience = make_experience(1, [1, 2], [4, 4])
    logprobs = experience.actor_logprobs.clone().requires_grad_()
    entropy = torch.zeros_like(logprobs).requires_grad_()
    output = policy_loss(schema.Loss(correction=TIS), 8)(experience, logprobs, entropy)
    assert not any(v.requires_grad for v in (output.sums | output.token_sums | output.maxima).values())
    plain = means([policy_loss(schema.Loss(), 8)(experience, logprobs, entropy)], experience)
    mean_advantage = experience.advantages[experience.response_mask].mean().item()
    assert plain["loss"] == pytest.approx(-mean_advantage, rel=1e-5)
    assert (plain["ppo_kl"], plain["pg_clipfrac"], plain["ratio_max"]) == (0, 0, 1)


def test_a_missing_field_is_named() -> None:
    experience = make_experience(1, [1], [2])
    values = {name: getattr(experience, name) for name in experience.present() if name != "actor_logprobs"}
    logprobs, entropy = current_values(experience)
    with pytest.raises(ValueError, match="no actor_logprobs in"):
        policy_loss(schema.Loss(), 8)(Experience(**values), logprobs, entropy)


def test_likelihood_loss_is_mean_negative_log_likelihood_of_the_response() -> None:
    experience = make_experience(2, [2, 1], [1, 2])
    logprobs = torch.tensor([-9.0, -9.0, -1.0, -9.0, -2.0, -6.0], requires_grad=True)
    entropy = torch.tensor([9.0, 9.0, 0.5, 9.0, 1.0, 1.5])
    output = likelihood_loss()(experience, logprobs, entropy)
    output.loss.backward()
    assert means([output], experience) == pytest.approx({"loss": 3.0, "entropy": 1.0})
    torch.testing.assert_close(logprobs.grad, torch.tensor([0.0, 0, -1, 0, -1, -1]))


def test_maximum_of_nothing_is_zero() -> None:
    assert masked_max(torch.tensor([3.0]), torch.tensor([False])).item() == 0
    assert masked_max(torch.empty(0), torch.empty(0, dtype=torch.bool)).item() == 0


def test_totals_leave_out_what_is_outside_of_responses() -> None:
    experience = make_experience(2, [2, 1], [1, 2])
    nothing = torch.nan
    wide = torch.tensor([nothing, nothing, 0.1, nothing, 0.2, 0.4], dtype=torch.float64)
    flags = torch.tensor([True, True, True, True, False, True])
    totals = response_totals(experience, {"wide": wide, "flags": flags})
    assert totals["wide"].dtype == torch.float64 and totals["wide"].item() == pytest.approx(0.7, abs=1e-12)
    assert totals["flags"].dtype == torch.float32 and totals["flags"].item() == 2


CPU = torch.device("cpu")
Pairs = list[tuple[int, int, int]]
"""Numbers of tokens per pair: prompt, chosen response, rejected response."""

pairs_strategy = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


def pairs_of(shape: Pairs, seed: int, *, chosen_first: bool = True) -> Experience:
    samples = [(prompt, length) for prompt, *both in shape for length in (both if chosen_first else both[::-1])]
    experience = packed_experience(samples, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    chosen = (torch.arange(len(samples)) % 2 == 0) == chosen_first
    reference = (-2 * torch.rand(experience.num_tokens, generator=generator)).masked_fill(
        ~experience.response_mask, math.nan
    )
    margins = torch.rand(len(shape), generator=generator).repeat_interleave(2)
    return experience.with_fields(chosen=chosen, margins=margins, reference_logprobs=reference)


def outputs_of(experience: Experience, seed: int) -> Tensor:
    return torch.randn(experience.num_tokens, generator=torch.Generator().manual_seed(seed + 2)).requires_grad_()


def of_pairs(experience: Experience, per_token: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Returns (chosen, rejected) values of each pair, over whole samples."""
    parts = per_token.split(experience.lengths.tolist())
    chosen = experience.chosen.tolist()
    return [(parts[i], parts[i + 1]) if chosen[i] else (parts[i + 1], parts[i]) for i in range(0, len(parts), 2)]


def naive_dpo(experience: Experience, logprobs: Tensor, preference: Preference) -> Tensor:
    """Returns the mean over pairs by a loop, in fp64."""
    beta, wrong = preference.beta, preference.label_smoothing
    losses = []
    columns = logprobs.double(), experience.reference_logprobs.double(), experience.response_mask
    for actor, reference, mask in zip(*(of_pairs(experience, column) for column in columns), strict=True):
        log_ratios = [a[inside].sum() - r[inside].sum() for a, r, inside in zip(actor, reference, mask, strict=True)]
        h = log_ratios[0] - log_ratios[1]
        if preference.loss == "ipo":
            loss = (h - 1 / (2 * beta)) ** 2
        else:
            right = torch.log(1 / (1 + torch.exp(-beta * h)))
            loss = -(1 - wrong) * right - wrong * torch.log(1 / (1 + torch.exp(beta * h)))
        losses.append(loss - preference.sft_coef * actor[0][mask[0]].mean())
    return torch.stack(losses).mean()


def naive_ranking(experience: Experience, scores: Tensor, preference: Preference) -> Tensor:
    losses = []
    for number, (chosen, rejected) in enumerate(of_pairs(experience, scores.double())):
        margin = experience.margins.double()[2 * number]
        difference = chosen[-1] - rejected[-1] - margin
        losses.append(torch.log(1 + torch.exp(-difference)) + preference.center_coef * (chosen[-1] + rejected[-1]) ** 2)
    return torch.stack(losses).mean()


Naive = Callable[[Experience, Tensor, Preference], Tensor]

PREFERENCE_LOSSES: dict[str, tuple[Callable[[Preference], LossFunction], Naive, Preference]] = {
    "dpo": (direct_preference_loss, naive_dpo, Preference(beta=0.3)),
    "uncertain labels": (direct_preference_loss, naive_dpo, Preference(beta=0.3, label_smoothing=0.2)),
    "ipo": (direct_preference_loss, naive_dpo, Preference(loss="ipo", beta=0.4)),
    "with the chosen responses' likelihood": (direct_preference_loss, naive_dpo, Preference(sft_coef=0.7)),
    "Bradley-Terry": (ranking_loss, naive_ranking, Preference()),
    "centred": (ranking_loss, naive_ranking, Preference(center_coef=0.1)),
}


@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
@settings(max_examples=8)
@given(shape=pairs_strategy, seed=st.integers(0, 99), max_tokens=st.integers(1, 60), chosen_first=st.booleans())
def test_loss_and_gradient_are_the_papers(
    name: str, shape: Pairs, seed: int, max_tokens: int, chosen_first: bool
) -> None:
    make, naive, preference = PREFERENCE_LOSSES[name]
    experience = pairs_of(shape, seed, chosen_first=chosen_first)
    outputs = outputs_of(experience, seed)
    expected = naive(experience, outputs, preference)
    (expected_gradient,) = torch.autograd.grad(expected, outputs)
    found = [
        make(preference)(batch.experience, outputs[batch.token_index])
        for batch in pack(experience, max_tokens, device=CPU)
    ]
    loss = torch.stack([output.loss for output in found]).sum() / sum(output.divisor for output in found)
    (gradient,) = torch.autograd.grad(loss, outputs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-5)
    assert torch.allclose(gradient, expected_gradient.float(), rtol=1e-3, atol=1e-5)


def test_rewards_and_accuracy_of_dpo_are_those_of_the_log_ratios() -> None:
    experience = pairs_of([(1, 2, 1), (2, 1, 1)], 0).with_fields(reference_logprobs=torch.zeros(13))
    logprobs = torch.tensor([0, -1, -2, 0, -4, 0, 0, -3, 0, 0, -1.0])
    assert experience.num_tokens == len(logprobs) == 11
    experience = experience.with_fields(
        reference_logprobs=torch.zeros(11), truncated=torch.tensor([True] + [False] * 3)
    )
    output = direct_preference_loss(Preference(beta=0.5, sft_coef=1.0))(experience, logprobs)
    means = {name: (total / output.divisor).item() for name, total in output.sums.items()}
    assert means == {
        "accuracy": 0.5,  # -3 against -4, -3 against -1
        "margin": pytest.approx(-0.25),
        "chosen_reward": -1.5,
        "rejected_reward": -1.25,
        "truncated_ratio": 0.25,
        "chosen_logprob": -3.0,
        "rejected_logprob": -2.5,
        "sft_loss": 2.25,
    }


def test_a_share_without_pairs_has_the_same_metrics_as_others() -> None:
    experience = pairs_of([(1, 2, 1)], 0)
    none = experience.select(torch.zeros(0, dtype=torch.int64))
    preference = Preference(sft_coef=1.0, center_coef=1.0)
    for make in (direct_preference_loss, ranking_loss):
        some, nothing = (make(preference)(of, torch.zeros(of.num_tokens)) for of in (experience, none))
        assert nothing.sums.keys() == some.sums.keys()
        assert [float(value) for value in (nothing.loss, nothing.divisor, *nothing.sums.values())] == [0.0] * (
            2 + len(some.sums)
        )


def test_long_responses_are_compared_without_rounding() -> None:
    """Each response has 40000 tokens. Their log-probs differ from the reference's by 1e-4."""
    experience = pairs_of([(1, 40000, 40000)], 0)
    reference = torch.full((experience.num_tokens,), -1.7)
    logprobs = reference + 1e-4 * experience.chosen.repeat_interleave(experience.lengths)
    output = direct_preference_loss(Preference(beta=1.0))(
        experience.with_fields(reference_logprobs=reference), logprobs
    )
    assert output.sums["margin"].item() == pytest.approx(4.0, rel=1e-2)


def value_means(outputs: list[LossOutput]) -> dict[str, float]:
    divisor = sum(output.divisor.item() for output in outputs)
    loss = sum(output.loss.item() for output in outputs) / divisor
    names = outputs[0].token_sums
    return {"loss": loss} | {name: sum(o.token_sums[name].item() for o in outputs) / divisor for name in names}


def plain(experience: Experience, values: torch.Tensor, clip: float | None) -> dict[str, float]:
    mask = experience.response_mask
    rows = zip(values[mask].tolist(), experience.values[mask].tolist(), experience.returns[mask].tolist(), strict=True)
    losses, clipped, residuals, returns, current = [], [], [], [], []
    for value, old, target in rows:
        near = value if clip is None else min(max(value, old - clip), old + clip)
        losses.append(max((value - target) ** 2, (near - target) ** 2) / 2)
        clipped.append((near - target) ** 2 > (value - target) ** 2)
        residuals.append(target - value)
        returns.append(target)
        current.append(value)
    return {
        "loss": statistics.fmean(losses),
        "value_mean": statistics.fmean(current),
        "value_clipfrac": statistics.fmean(clipped),
        "return_mean": statistics.fmean(returns),
        "explained_variance": 1 - statistics.pvariance(residuals) / statistics.pvariance(returns),
    }


@settings(max_examples=25)
@given(
    shape=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9)), max_size=5),
    cut=st.integers(0, 6),
    clip=st.sampled_from([None, 0.05, 0.5]),
    seed=st.integers(0, 99),
)
def test_loss_and_metrics_over_any_split_equal_plain_python(
    shape: list[tuple[int, int]], cut: int, clip: float | None, seed: int
) -> None:
    experience = packed_experience([(1, 3), *shape], seed)
    change = torch.randn(experience.num_tokens, generator=torch.Generator().manual_seed(seed))
    values = (experience.values + 0.3 * change).masked_fill(~experience.response_mask, math.nan)
    positions = torch.arange(experience.num_tokens)
    edge = int(experience.offsets()[min(cut, experience.num_samples)])
    samples = torch.arange(experience.num_samples)
    outputs = [
        value_loss(clip)(experience.select(samples[:cut]), values[positions < edge]),
        value_loss(clip)(experience.select(samples[cut:]), values[positions >= edge]),
    ]
    assert summarize_values(value_means(outputs)) == pytest.approx(plain(experience, values, clip), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "binds", "gradient"),
    [
        (0.5, 0.5, 1.0, 0.125, False, -0.5),  # on the old value
        (0.9, 0.5, 1.0, 0.045, True, 0.0),  # moves too fast towards the return, so it is held back
        (0.1, 0.5, 1.0, 0.405, False, -0.9),  # moves away from the return, so the plain loss pulls it back
        (0.6, 0.5, 1.0, 0.08, False, -0.4),  # within the clip
    ],
)
def test_clip_binds_only_where_a_value_moved_far_towards_its_return(
    value: float, old: float, target: float, loss: float, binds: bool, gradient: float
) -> None:
    moved = torch.tensor([value], requires_grad=True)
    per_token, clip_binds = clipped_value_loss(moved, torch.tensor([target]), torch.tensor([old]), 0.2)
    per_token.sum().backward()
    assert per_token.item() == pytest.approx(loss)
    assert clip_binds.item() is binds
    assert moved.grad is not None and moved.grad.item() == pytest.approx(gradient)


def test_a_value_within_the_clip_is_never_held_back() -> None:
    """Rounding must not hold it back either. The difference from the old value often has no exact float."""
    generator = torch.Generator().manual_seed(0)
    values, old_values, returns = (torch.randn(10_000, generator=generator) for _ in range(3))
    per_token, clip_binds = clipped_value_loss(values, returns, old_values, 0.5)
    within = (values - old_values).abs() < 0.499
    assert within.sum() > 1000 and not clip_binds[within].any()
    assert torch.equal(per_token[within], (values - returns)[within].square() / 2)


def test_gradient_is_of_response_tokens_alone_and_metrics_carry_none() -> None:
    experience = packed_experience([(2, 3), (1, 2)])
    values = torch.linspace(-1, 1, experience.num_tokens).requires_grad_()
    output = value_loss(None)(experience, values)
    output.loss.backward()
    expected = (values.detach() - experience.returns).masked_fill(~experience.response_mask, 0)
    torch.testing.assert_close(values.grad, expected)
    assert not any(value.requires_grad for value in output.token_sums.values())


@pytest.mark.parametrize("target", [0.0, 0.3, -7.1])
def test_equal_returns_leave_no_variance_to_explain(target: float) -> None:
    experience = packed_experience([(1, 7)])
    experience = experience.with_fields(returns=torch.full((8,), target))
    metrics = summarize_values(value_means([value_loss(0.2)(experience, torch.linspace(-1, 1, 8))]))
    assert math.isnan(metrics["explained_variance"])
    assert metrics["return_mean"] == pytest.approx(target)


def test_a_value_loss_names_a_missing_field() -> None:
    columns = packed_experience([(1, 2)]).columns()
    del columns["returns"]
    with pytest.raises(ValueError, match="no returns in"):
        value_loss(None)(Experience(**columns), torch.zeros(3))


LENGTHS = torch.tensor([3, 1, 2])


def test_a_token_gets_the_score_at_the_token_before_and_a_first_token_none() -> None:
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert before_tokens(scores, LENGTHS).tolist() == [0, 1, 2, 0, 0, 5]
    assert before_tokens(torch.zeros(0), LENGTHS[:0]).tolist() == []


def test_a_gradient_reaches_every_score_but_a_samples_last() -> None:
    scores = torch.zeros(6, requires_grad=True)
    (before_tokens(scores, LENGTHS) * torch.arange(1.0, 7)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [2, 3, 0, 0, 6, 0]
