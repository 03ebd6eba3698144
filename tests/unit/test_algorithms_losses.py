"""Policy and supervised losses against plain-Python references, and their independence from how a batch is split."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.correction import summarize
from rltrain.algorithms.losses import LossFunction, LossOutput, likelihood_loss, masked_max, sample_index, token_weights
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience

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
    """The loss and its metrics by loops over sequences and tokens, on Python floats."""
    old = experience.rollout_logprobs if loss.old_logprobs == "rollout" else experience.actor_logprobs
    columns = [
        logprobs,
        entropy,
        old,
        experience.rollout_logprobs,
        experience.reference_logprobs,
        experience.advantages,
    ]
    rows = list(zip(*(c.tolist() for c in columns), strict=True))
    mask, offsets = experience.response_mask.tolist(), experience.offsets().tolist()
    totals = {"loss": 0.0, "ppo_kl": 0.0, "pg_clipfrac": 0.0, "entropy": 0.0, "reference_kl": 0.0, "kl_loss": 0.0}
    totals |= {"train_rollout_logprob_abs_diff": 0.0, "abs_diff_max": 0.0, "ratio_max": 0.0}
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
"""Their covariances are of a micro-batch."""
SPLITTABLE = [*LOSSES, *SMOOTH, *WITH_STOPPED_GRADIENTS]
ALL = [*SPLITTABLE, *OF_MICRO_BATCHES]


def means(outputs: list[LossOutput], experience: Experience) -> dict[str, float]:
    """Loss and metrics of the mini-batch `experience`, of whose micro-batches `outputs` are."""
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
    names = {"loss", "pg_loss", "ppo_kl", "pg_clipfrac", "entropy", "reference_kl", "ratio_max"}
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
    """Outputs per part and the gradients for logprobs and entropy, each part evaluated on its own as a rank would."""
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
    """The third sample has no response: it is no sequence."""
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
