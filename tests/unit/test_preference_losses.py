"""Losses of pairs are their papers' in fp64, by gradient too, however pairs are spread over micro-batches."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.losses import LossFunction, direct_preference_loss, ranking_loss
from rltrain.config.schema import Preference
from rltrain.data.experience import Experience
from rltrain.training.packing import pack
from tests.unit.packed_experience import packed_experience

CPU = torch.device("cpu")
Pairs = list[tuple[int, int, int]]
"""Of each pair prompt tokens, and response tokens of the chosen and of the rejected sample."""

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
    """(chosen, rejected) of each pair: its tokens' numbers, of the whole sample."""
    parts = per_token.split(experience.lengths.tolist())
    chosen = experience.chosen.tolist()
    return [(parts[i], parts[i + 1]) if chosen[i] else (parts[i + 1], parts[i]) for i in range(0, len(parts), 2)]


def naive_dpo(experience: Experience, logprobs: Tensor, preference: Preference) -> Tensor:
    """Mean over pairs, one after the other, in fp64."""
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

LOSSES: dict[str, tuple[Callable[[Preference], LossFunction], Naive, Preference]] = {
    "dpo": (direct_preference_loss, naive_dpo, Preference(beta=0.3)),
    "uncertain labels": (direct_preference_loss, naive_dpo, Preference(beta=0.3, label_smoothing=0.2)),
    "ipo": (direct_preference_loss, naive_dpo, Preference(loss="ipo", beta=0.4)),
    "with the chosen responses' likelihood": (direct_preference_loss, naive_dpo, Preference(sft_coef=0.7)),
    "Bradley-Terry": (ranking_loss, naive_ranking, Preference()),
    "centred": (ranking_loss, naive_ranking, Preference(center_coef=0.1)),
}


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=8)
@given(shape=pairs_strategy, seed=st.integers(0, 99), max_tokens=st.integers(1, 60), chosen_first=st.booleans())
def test_loss_and_gradient_are_the_papers(
    name: str, shape: Pairs, seed: int, max_tokens: int, chosen_first: bool
) -> None:
    make, naive, preference = LOSSES[name]
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
    """Of 40000 tokens each response, whose log-probs differ from the reference's by 1e-4."""
    experience = pairs_of([(1, 40000, 40000)], 0)
    reference = torch.full((experience.num_tokens,), -1.7)
    logprobs = reference + 1e-4 * experience.chosen.repeat_interleave(experience.lengths)
    output = direct_preference_loss(Preference(beta=1.0))(
        experience.with_fields(reference_logprobs=reference), logprobs
    )
    assert output.sums["margin"].item() == pytest.approx(4.0, rel=1e-2)
