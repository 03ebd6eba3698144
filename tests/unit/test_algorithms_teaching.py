"""The distance from a teacher against the exact divergence, as advantages and in the loss, by gradient too."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rltrain.algorithms.kl import asked_tokens, divergence_from, forward_kl, reverse_kl, with_teacher_advantages
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.algorithms.supervised import Distillation
from rltrain.config.schema import Config, Loss, Teacher
from rltrain.data.experience import Experience
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import make_config

VOCAB = 7


def distributions(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of the actor, with a gradient, and log-probs of a teacher."""
    generator = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, rows, VOCAB, generator=generator, dtype=torch.float64) * 2
    return logits.requires_grad_(), teacher.log_softmax(1)


def test_over_the_whole_vocabulary_it_is_the_divergence_by_value_and_gradient() -> None:
    logits, teacher = distributions(5)
    actor = logits.log_softmax(1)
    exact = torch.stack([sum(p.exp() * (p - q) for p, q in zip(actor[i], teacher[i], strict=True)) for i in range(5)])
    order = torch.stack([torch.randperm(VOCAB) for _ in range(5)])
    found = reverse_kl(actor.gather(1, order), teacher.gather(1, order))
    torch.testing.assert_close(found, exact)
    for values in (found, exact):
        values.gradient = torch.autograd.grad(values.sum(), logits, retain_graph=True)[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(found.gradient, exact.gradient)  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [1, 3, 6])
def test_over_the_likeliest_tokens_it_is_that_of_these_and_all_others_as_one(count: int) -> None:
    logits, teacher = distributions(9, seed=count)
    actor, top = logits.log_softmax(1), teacher.topk(count, dim=1)
    found = reverse_kl(actor.gather(1, top.indices), top.values)
    for row in range(9):
        mine, its = actor[row].exp(), teacher[row].exp()
        named = [int(token) for token in top.indices[row]]
        outcomes = [(mine[token], its[token]) for token in named]
        outcomes.append((1 - sum(p for p, _ in outcomes), 1 - sum(q for _, q in outcomes)))
        torch.testing.assert_close(found[row], sum(p * (p / q).log() for p, q in outcomes))
    whole = (actor.exp() * (actor - teacher)).sum(1)
    assert bool((found <= whole + 1e-9).all()) and bool((found > 0).all())


@pytest.mark.parametrize("count", [1, 3, VOCAB])
@pytest.mark.parametrize("min_logprob", [None, -2.0])
@pytest.mark.parametrize("rest", [True, False])
def test_the_forward_kl_is_written_out_by_value_and_gradient(count: int, min_logprob: float | None, rest: bool) -> None:
    logits, teacher = distributions(9, seed=count)
    actor, top = logits.log_softmax(1), teacher.topk(count, dim=1)
    found = forward_kl(actor.gather(1, top.indices), top.values, rest=rest, min_logprob=min_logprob)
    least = -math.inf if min_logprob is None else min_logprob
    rows = []
    for row in range(9):
        pairs = [
            (actor[row, token].clamp(min=least), teacher[row, token].clamp(min=least)) for token in top.indices[row]
        ]
        total = sum(q.exp() * (q - p) for p, q in pairs)
        p, q = (torch.clamp(1 - sum(pair[side].exp() for pair in pairs), min=1e-5) for side in (0, 1))
        rows.append(total + q * (q / p).log() if rest else total * (total > 0))
    expected = torch.stack(rows)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(values.sum(), logits, retain_graph=True)[0] for values in (found, expected)]
    torch.testing.assert_close(*gradients)
    if count == VOCAB and min_logprob is None:
        torch.testing.assert_close(found, (teacher.exp() * (teacher - actor)).sum(1))


def with_teacher(experience: Experience, top_k: int = 0) -> Experience:
    torch.manual_seed(1)
    num_tokens = experience.num_tokens
    top = torch.randn(num_tokens, VOCAB).log_softmax(1).topk(top_k, dim=1)
    return experience.with_fields(
        teacher_logprobs=-torch.rand(num_tokens), teacher_top_ids=top.indices, teacher_top_logprobs=top.values
    )


def test_an_advantage_is_lowered_by_how_much_likelier_its_token_is_to_the_actor() -> None:
    experience = with_teacher(packed_experience([(2, 3), (1, 2), (3, 0)]))
    experience = experience.with_fields(advantages=torch.full((experience.num_tokens,), 0.5))
    taught = with_teacher_advantages(experience, 0.3).advantages
    bounded = with_teacher_advantages(experience, 0.3, 0.2).advantages
    for token in range(experience.num_tokens):
        inside = bool(experience.response_mask[token])
        distance = inside * float(experience.actor_logprobs[token] - experience.teacher_logprobs[token])
        assert float(taught[token]) == pytest.approx(0.5 - 0.3 * distance, abs=1e-6)
        assert float(bounded[token]) == pytest.approx(0.5 - 0.3 * min(max(distance, -0.2), 0.2), abs=1e-6)


FORWARD = {"where": "loss", "top_k": 4, "kl": "forward", "rest": False, "min_logprob": -3.0, "max_distance": 0.6}


@pytest.mark.parametrize("shape", [[(2, 3), (1, 5)], []])
def test_the_forward_kl_is_a_bounded_term_of_the_loss(shape: list[tuple[int, int]]) -> None:
    experience = with_teacher(packed_experience(shape), 4)
    experience = experience.with_fields(advantages=torch.zeros(experience.num_tokens))
    logits = torch.randn(experience.num_tokens, VOCAB, generator=torch.Generator().manual_seed(3)).requires_grad_()
    asked = logits.log_softmax(1).gather(1, experience.teacher_top_ids)
    inside = experience.response_mask
    arguments = experience, logits.log_softmax(1)[:, 0], torch.zeros(experience.num_tokens), asked
    found = policy_loss(Loss(), 1, Teacher(coef=0.7, **FORWARD))(*arguments)  # type: ignore[arg-type]
    top = experience.teacher_top_logprobs[inside]
    distances = forward_kl(asked[inside], top, rest=False, min_logprob=-3.0)
    assert not shape or (distances > 0.6).any() and (distances < 0.6).any()
    expected = 0.7 * distances.clamp(max=0.6).sum()
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found.loss, expected))
    )
    assert found.token_sums["teacher_kl"].item() == pytest.approx(expected.item() / 0.7)


@pytest.mark.parametrize("settings", [{"where": "loss"}, {"where": "loss", "top_k": 4}, {"where": "advantage"}])
@pytest.mark.parametrize("shape", [[(2, 3), (1, 2)], [(2, 0), (1, 4)], []])
def test_the_term_of_the_loss(settings: dict[str, Any], shape: list[tuple[int, int]]) -> None:
    """Sums over response tokens alone, whatever stands elsewhere, beside the policy's own loss."""
    teacher, top_k = Teacher(coef=0.7, **settings), settings.get("top_k", 0)
    experience = packed_experience(shape)
    experience = with_teacher(experience.with_fields(advantages=torch.randn(experience.num_tokens)), top_k)
    logits = torch.randn(experience.num_tokens, VOCAB, requires_grad=True)
    drawn, asked = logits.log_softmax(1)[:, 0], logits.log_softmax(1).gather(1, experience.teacher_top_ids)
    inside = experience.response_mask
    dirty = torch.where(inside, drawn, float("inf"))
    others = [torch.where(inside[:, None], asked, float("nan"))] if top_k else []
    arguments = experience, dirty, torch.zeros_like(dirty)
    taught, alone = (policy_loss(Loss(), 1, told)(*arguments, *others) for told in (teacher, None))
    if top_k:
        expected = reverse_kl(asked[inside], experience.teacher_top_logprobs[inside]).sum()
    else:
        expected = ((drawn - experience.teacher_logprobs)[inside] ** 2 / 2).sum()
    is_term = settings["where"] == "loss"
    torch.testing.assert_close(taught.loss - alone.loss, 0.7 * expected * is_term)
    (gradient,) = torch.autograd.grad(taught.loss - alone.loss, logits, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad(0.7 * expected * is_term, logits)
    torch.testing.assert_close(gradient, expected_gradient)
    assert ("teacher_loss" in taught.sums) is is_term and "teacher_kl" in taught.token_sums


def test_the_divergence_from_the_reference_and_from_the_teacher_stand_beside_each_other() -> None:
    """Each asks for tokens of its own."""
    experience = packed_experience([(1, 3), (2, 2)])
    ids = {"reference": torch.arange(VOCAB).expand(experience.num_tokens, -1), "teacher": torch.randint(VOCAB, (8, 3))}
    told = {role: torch.randn(8, VOCAB).log_softmax(1).gather(1, of_role) for role, of_role in ids.items()}
    for role in ids:
        experience = experience.with_fields(**{f"{role}_top_ids": ids[role], f"{role}_top_logprobs": told[role]})
    actor = torch.randn(8, VOCAB).log_softmax(1)
    asked = asked_tokens(experience)
    assert asked is not None and asked.shape == (8, VOCAB + 3)
    for role in ids:
        found = divergence_from(role, experience, [actor.gather(1, asked)])
        expected = reverse_kl(actor.gather(1, ids[role]), told[role]).masked_fill(~experience.response_mask, 0)
        torch.testing.assert_close(found, expected)
    assert divergence_from("teacher", packed_experience([(1, 1)]), []) is None


def test_distillation_learns_from_the_teacher_alone() -> None:
    config: Config = make_config(algorithm="distillation")
    experience = Distillation(config).with_advantages(packed_experience([(1, 2), (2, 2)]))
    assert experience.advantages.tolist() == [0.0] * 7
    assert "teacher" in Distillation(config).needs()
