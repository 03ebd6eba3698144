"""The value and gradient of every policy loss equal its paper's formula, written in loops over sequences and tokens."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rltrain.algorithms.policy_loss import POLICY_LOSSES, ResponseTokens, clip, clip_cov, covariances, policy_loss
from rltrain.config import schema
from rltrain.data.experience import Experience
from tests.support.packed_experience import packed_experience

SHAPE = [(2, 5), (1, 1), (3, 0), (0, 4), (2, 7)]
"""Prompt and response tokens of the samples. One has no response."""


def in_double(shape: list[tuple[int, int]] = SHAPE, seed: int = 0, advantages: str = "of sequences") -> Experience:
    """Returns experience in float64. Longer responses have holes like a conversation, ratios are e^-2 to e^2, and
    values outside the mask are infinite."""
    experience = packed_experience(shape, seed)
    generator = torch.Generator().manual_seed(seed + 50)
    mask = experience.response_mask.clone()
    for start, (prompt, response) in zip(experience.offsets().tolist(), shape, strict=False):
        if response > 4:
            mask[start + prompt + 2] = False

    def numbers(outside: float) -> Tensor:
        values = -2 * torch.rand(experience.num_tokens, generator=generator, dtype=torch.float64)
        return values.masked_fill(~mask, outside)

    values = torch.randn(experience.num_tokens, generator=generator, dtype=torch.float64)
    if advantages == "of sequences":
        values = torch.repeat_interleave(values[: experience.num_samples], experience.lengths)
    return experience.with_fields(
        response_mask=mask,
        advantages=values.masked_fill(~mask, math.inf),
        actor_logprobs=numbers(-math.inf),
        rollout_logprobs=numbers(math.nan),
        reference_logprobs=numbers(math.inf),
    )


def present_logprobs(experience: Experience, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = -2 * torch.rand(experience.num_tokens, generator=generator, dtype=torch.float64)
    return values.masked_fill(~experience.response_mask, -math.inf).requires_grad_()


def sequences(experience: Experience) -> Iterator[list[int]]:
    """Yields the places of each response's tokens. Samples without a response are skipped."""
    offsets, mask = experience.offsets().tolist(), experience.response_mask.tolist()
    for start, end in zip(offsets, offsets[1:], strict=False):
        if places := [i for i in range(start, end) if mask[i]]:
            yield places


def clipped(ratio: Tensor, advantage: Tensor, loss: schema.Loss) -> Tensor:
    bounded = min(max(ratio, torch.tensor(1 - loss.clip_low)), torch.tensor(1 + loss.clip_high))
    return torch.minimum(ratio * advantage, bounded * advantage)


def of_clip(ratio: Tensor, advantage: Tensor, logprob: Tensor, loss: schema.Loss) -> Tensor:
    objective = clipped(ratio, advantage, loss)
    if loss.dual_clip is not None and advantage < 0:
        return torch.maximum(objective, loss.dual_clip * advantage)
    return objective


def of_cispo(ratio: Tensor, advantage: Tensor, logprob: Tensor, loss: schema.Loss) -> Tensor:
    weight = min(max(ratio.item(), 1 - loss.clip_low), 1 + loss.clip_high)
    return weight * advantage * logprob


def of_sapo(ratio: Tensor, advantage: Tensor, logprob: Tensor, loss: schema.Loss) -> Tensor:
    tau = loss.sapo.tau_pos if advantage > 0 else loss.sapo.tau_neg
    return 4 / tau / (1 + torch.exp(-tau * (ratio - 1))) * advantage


def of_reinforce(ratio: Tensor, advantage: Tensor, logprob: Tensor, loss: schema.Loss) -> Tensor:
    return advantage * logprob


def of_dppo(ratio: Tensor, advantage: Tensor, logprob: Tensor, loss: schema.Loss) -> Tensor:
    """Equations 12 to 14 of the paper, with the truncated ratio of its section 5.4."""
    present = math.exp(logprob.item())
    old = present / ratio.item()
    tv = abs(present - old)
    kl = old * math.log(old / present) + (1 - old) * math.log((1 - old) / (1 - present))
    distance = {"tv": tv, "kl": kl}[loss.dppo.divergence]
    away = (advantage > 0 and ratio > 1) or (advantage < 0 and ratio < 1)
    if away and distance > (loss.clip_high if advantage > 0 else loss.clip_low):
        return 0 * logprob
    return min(ratio.item(), loss.dppo.ratio_max or math.inf) * advantage * logprob


OF_TOKENS: dict[str, Callable[[Tensor, Tensor, Tensor, schema.Loss], Tensor]] = {
    "clip": of_clip,
    "cispo": of_cispo,
    "sapo": of_sapo,
    "reinforce": of_reinforce,
    "dppo": of_dppo,
}


def of_gspo(ratios: list[Tensor], advantage: Tensor, loss: schema.Loss) -> Tensor:
    """Equation 5 of the paper, with the gradient of the sequence's own ratio."""
    ratio = math.prod(ratios[1:], start=ratios[0]) ** (1 / len(ratios))
    return clipped(ratio, advantage, loss)


def of_geometric_mean(ratios: list[Tensor], advantage: Tensor, loss: schema.Loss) -> Tensor:
    """{prod min(ratio^sgn, clip(ratio^sgn))}^(sgn / length) A. The bounds of a ratio are e^-low and e^high."""
    low, high = math.exp(-loss.clip_low), math.exp(loss.clip_high)
    bounds = (low, high) if advantage > 0 else (1 / high, 1 / low)
    sign = torch.sign(advantage)
    product = torch.ones((), dtype=torch.float64)
    for ratio in ratios:
        product = product * torch.minimum(ratio**sign, (ratio**sign).clamp(*bounds))
    return product ** (sign / len(ratios)) * advantage


OF_SEQUENCES = {"gspo": of_gspo, "geometric_mean": of_geometric_mean}


def written_out(experience: Experience, logprobs: Tensor, loss: schema.Loss) -> Tensor:
    """Returns the mean loss of the batch: over sequences, or over tokens if the loss and its normalization are of
    tokens."""
    old = experience.rollout_logprobs if loss.old_logprobs == "rollout" else experience.actor_logprobs
    objectives, all_sequences = [], list(sequences(experience))
    num_tokens = sum(map(len, all_sequences))
    for places in all_sequences:
        ratios = [torch.exp(logprobs[i] - old[i]) for i in places]
        if loss.policy in OF_SEQUENCES:
            objective = OF_SEQUENCES[loss.policy](ratios, experience.advantages[places[0]], loss)
            objectives.append(objective / len(all_sequences))
            continue
        divisor = num_tokens if loss.normalization == "token_mean" else len(places) * len(all_sequences)
        for i, ratio in zip(places, ratios, strict=True):
            objective = OF_TOKENS[loss.policy](ratio, experience.advantages[i], logprobs[i], loss)
            objectives.append(objective / divisor)
    return -torch.stack(objectives).sum()


def assert_equals(experience: Experience, loss: schema.Loss, expected_of: Callable[..., Tensor]) -> None:
    """Asserts equality with value and gradient of `expected_of`, up to weights in float32."""
    logprobs = present_logprobs(experience)
    output = policy_loss(loss, 9)(experience, logprobs, torch.zeros_like(logprobs))
    (gradient,) = torch.autograd.grad(output.loss / output.divisor, logprobs)
    expected = expected_of(experience, logprobs, loss)
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)
    torch.testing.assert_close(output.loss / output.divisor, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)
    assert bool((gradient[~experience.response_mask] == 0).all())


WRITTEN_OUT = [
    schema.Loss(),
    schema.Loss(clip_low=0.2, clip_high=0.28, normalization="sequence_mean", old_logprobs="rollout"),
    schema.Loss(dual_clip=1.5),
    schema.Loss(dual_clip=3.0, normalization="sequence_mean"),
    schema.Loss(policy="cispo", clip_low=1.0, clip_high=0.5),
    schema.Loss(policy="cispo", normalization="sequence_mean", old_logprobs="rollout"),
    schema.Loss(policy="sapo"),
    schema.Loss(policy="sapo", sapo=schema.Sapo(tau_pos=0.7, tau_neg=2.0), normalization="sequence_mean"),
    schema.Loss(policy="reinforce"),
    schema.Loss(policy="dppo", clip_low=0.3, clip_high=0.2),
    schema.Loss(policy="dppo", clip_low=0.05, clip_high=0.1, dppo=schema.Dppo(divergence="kl", ratio_max=1.5)),
    schema.Loss(policy="gspo", clip_low=0.1, clip_high=0.15, normalization="sequence_mean"),
    schema.Loss(policy="gspo", clip_low=0.9, clip_high=3.0, normalization="sequence_mean", old_logprobs="rollout"),
    schema.Loss(policy="geometric_mean", clip_low=0.4, clip_high=0.4, normalization="sequence_mean"),
    schema.Loss(policy="geometric_mean", clip_low=0.3, clip_high=0.6, normalization="sequence_mean"),
]


def name_of(loss: schema.Loss) -> str:
    return f"{loss.policy}-{loss.normalization}-{loss.old_logprobs}-{loss.dual_clip}"


@pytest.mark.parametrize("loss", WRITTEN_OUT, ids=name_of)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_the_paper_s(loss: schema.Loss, seed: int) -> None:
    assert_equals(in_double(seed=seed), loss, written_out)
    if loss.policy in OF_TOKENS:
        assert_equals(in_double(seed=seed, advantages="of tokens"), loss, written_out)


def test_gspo_gives_each_token_its_own_advantage() -> None:
    """Equation 13: s_t has the value of the sequence's ratio and the gradient of its token's log-prob."""

    def by_token(experience: Experience, logprobs: Tensor, loss: schema.Loss) -> Tensor:
        total, all_sequences = torch.zeros((), dtype=torch.float64), list(sequences(experience))
        for places in all_sequences:
            log_ratio = sum((logprobs[i] - experience.actor_logprobs[i]).item() for i in places) / len(places)
            for i in places:
                ratio = math.exp(log_ratio) * logprobs[i].exp() / logprobs[i].exp().item()
                total = total - clipped(ratio, experience.advantages[i], loss) / len(places) / len(all_sequences)
        return total

    loss = schema.Loss(policy="gspo", clip_low=0.2, clip_high=0.4, normalization="sequence_mean")
    for seed in range(3):
        assert_equals(in_double(seed=seed, advantages="of tokens"), loss, by_token)


def plain_covariances(experience: Experience, logprobs: Tensor) -> dict[int, float]:
    places = [i for sequence in sequences(experience) for i in sequence]
    advantages, values = experience.advantages.tolist(), logprobs.tolist()
    mean_advantage = sum(advantages[i] for i in places) / len(places)
    mean_logprob = sum(values[i] for i in places) / len(places)
    return {i: (values[i] - mean_logprob) * (advantages[i] - mean_advantage) for i in places}


def test_kl_cov_holds_the_tokens_of_largest_covariance() -> None:
    def by_token(experience: Experience, logprobs: Tensor, loss: schema.Loss) -> Tensor:
        covariance = plain_covariances(experience, logprobs)
        ranked = sorted(covariance, key=lambda i: covariance[i], reverse=True)
        held = ranked[: max(1, int(loss.kl_cov.ratio * len(ranked)))]
        total = torch.zeros((), dtype=torch.float64)
        for i in covariance:
            log_ratio = logprobs[i] - experience.actor_logprobs[i]
            penalty = loss.kl_cov.coef * log_ratio.abs() if i in held else 0.0
            total = total - log_ratio.exp() * experience.advantages[i] + penalty
        return total / len(covariance)

    for ratio in (2e-4, 0.4):
        loss = schema.Loss(policy="kl_cov", kl_cov=schema.KlCov(ratio=ratio, coef=0.7))
        assert_equals(in_double(advantages="of tokens"), loss, by_token)


@pytest.mark.parametrize("ratio", [2e-4, 0.3, 1.0])
def test_clip_cov_leaves_out_some_tokens_of_large_covariance(ratio: float) -> None:
    """The choice of tokens is random. Their number, their range and the loss of all other tokens are not."""
    settings = schema.Loss(policy="clip_cov", clip_cov=schema.ClipCov(ratio=ratio, low=0.05, high=0.8))
    experience = in_double(SHAPE * 3, advantages="of tokens")
    logprobs = present_logprobs(experience)
    tokens = ResponseTokens.of(experience, logprobs, "actor_logprobs")
    plain, result = clip(tokens, settings), clip_cov(tokens, settings)
    chosen, binds = result.shares["covariance_tokens"], plain.shares["pg_clipfrac"]
    covariance = plain_covariances(experience, logprobs)
    within = {i for i, value in covariance.items() if 0.05 < value < 0.8 and not binds[i]}
    assert set(torch.nonzero(chosen).flatten().tolist()) <= within
    assert int(chosen.sum()) == min(len(within), max(1, int(ratio * len(covariance)))) > 0
    torch.testing.assert_close(result.per_token, torch.where(chosen, 0.0, plain.per_token), equal_nan=True)
    assert torch.equal(clip_cov(tokens, settings).shares["covariance_tokens"], chosen)


def test_covariances_of_no_tokens_are_none() -> None:
    empty = in_double([(2, 0), (1, 0)])
    assert covariances(ResponseTokens.of(empty, present_logprobs(empty), "actor_logprobs")).tolist() == [0, 0, 0]


@pytest.mark.parametrize("policy", POLICY_LOSSES)
def test_the_first_update_has_the_policy_gradient(policy: str) -> None:
    """If the present weights are the old ones, every loss has the gradient -A d log pi, except for chosen tokens."""
    experience = in_double()
    logprobs = experience.actor_logprobs.clone().requires_grad_()
    loss = schema.Loss(policy=policy, normalization="sequence_mean", clip_cov=schema.ClipCov(low=98, high=99))
    output = policy_loss(loss, 9)(experience, logprobs, torch.zeros_like(logprobs))
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    for places in sequences(experience):
        expected = -experience.advantages[places] / len(places)
        torch.testing.assert_close(gradient[places], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "binds", "gradient"),
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.5, 1.0, -1.3, True, 0.0),
        (1.5, -1.0, 1.5, False, 1.0),
        (0.5, 1.0, -0.5, False, -1.0),
        (0.5, -1.0, 0.8, True, 0.0),
        (1.5, 0.0, 0.0, False, 0.0),
        (4.0, -1.0, 3.0, False, 0.0),
    ],
)
def test_clips_bind_only_where_they_lower_the_objective_or_bound_a_negative_one(
    ratio: float, advantage: float, loss: float, binds: bool, gradient: float
) -> None:
    experience = packed_experience([(0, 1)]).with_fields(
        advantages=torch.tensor([advantage]), actor_logprobs=torch.zeros(1)
    )
    logprobs = torch.tensor([math.log(ratio)], requires_grad=True)
    tokens = ResponseTokens.of(experience, logprobs, "actor_logprobs")
    result = clip(tokens, schema.Loss(clip_low=0.2, clip_high=0.3, dual_clip=3.0))
    (by_ratio,) = torch.autograd.grad(result.per_token.sum(), tokens.ratio)
    assert result.per_token.item() == pytest.approx(loss)
    assert result.shares["pg_clipfrac"].item() is binds
    assert result.shares["dual_clipfrac"].item() is (ratio > 3 and advantage < 0)
    assert by_ratio.item() == pytest.approx(gradient)


def test_config_and_registry_have_the_same_names() -> None:
    assert {*POLICY_LOSSES, "own"} == set(schema.PolicyLoss.__args__)
