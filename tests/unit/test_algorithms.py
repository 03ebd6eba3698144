"""Tests of the inputs and advantages of each algorithm, of the KL estimators, and of user functions in their place."""

import math
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.advantages import Rectangle, with_gae
from rltrain.algorithms.algorithm import Algorithm, Replicas
from rltrain.algorithms.kl import (
    asked_tokens,
    divergence_from,
    forward_kl,
    kl_estimate,
    reverse_kl,
    with_teacher_advantages,
)
from rltrain.algorithms.losses import sample_index
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.algorithms.registry import ALGORITHMS, algorithm_of
from rltrain.config import schema
from rltrain.config.schema import Config, Loss, Teacher
from rltrain.data.experience import Experience, join
from rltrain.errors import ConfigError
from tests.support.packed_experience import packed_experience
from tests.support.schedule_configs import NO_EVALUATION, make_config
from tests.unit.test_policy_losses import SHAPE, in_double, present_logprobs

OPTIONAL = {"env", "evaluation", "inference", "teacher"}
PENALTY = {"coef": 0.3, "where": "reward"}


def of(name: str, **sections) -> Algorithm:
    return algorithm_of(make_config(algorithm=name, **sections))


def samples() -> Experience:
    experience = packed_experience([(2, 3), (1, 5), (2, 1), (2, 4)])
    return experience.with_fields(returns=None, reference_logprobs=experience.rollout_logprobs * 1.5)


def test_the_config_takes_the_names_of_the_registry():
    assert set(get_args(Config.model_fields["algorithm"].annotation)) == ALGORITHMS.keys()


@pytest.mark.parametrize(
    ("name", "sections", "needed", "usable"),
    [
        ("grpo", {}, {"actor", "rollout", "reward"}, {"reference"}),
        ("grpo", {"loss": {"kl": PENALTY}}, {"actor", "rollout", "reward", "reference"}, set()),
        ("ppo", {}, {"actor", "critic", "rollout", "reward"}, {"reference"}),
        ("remax", {}, {"actor", "rollout", "reward"}, {"reference"}),
        ("reinforce_plus_plus", {"loss": {"kl": PENALTY}}, {"actor", "rollout", "reward", "reference"}, set()),
        ("sft", {}, {"actor", "rollout", "reward"}, {"evaluation"}),
        ("sft", {"placement": {"actor": 0, "evaluation": 1}}, {"actor", "evaluation"}, set()),
        ("sft", {"loss": {"kl": PENALTY}, **NO_EVALUATION}, {"actor"}, set()),
        ("dpo", {}, {"actor", "reference"}, set()),
        ("reward_model", {}, {"actor"}, set()),
    ],
)
def test_the_roles_of_a_run(name, sections, needed, usable):
    algorithm = of(name, **sections)
    assert algorithm.needs().keys() == needed
    rewarding = {"reward_model", "judge"} if "reward" in needed else set()
    assert algorithm.usable_roles() == needed | usable | rewarding | (OPTIONAL if algorithm.generates else set())


@pytest.mark.parametrize("penalised", [False, True])
def test_ppo_compares_with_the_critic_and_leaves_it_returns(penalised):
    experience = samples()
    token_rewards = -torch.rand(experience.num_tokens) if penalised else None
    algorithm = of("ppo", advantages={"gamma": 0.9, "gae_lambda": 0.5})
    found = algorithm.with_advantages(experience, token_rewards)
    expected = with_gae(experience, token_rewards, gamma=0.9, lam=0.5)
    assert torch.equal(found.advantages, expected.advantages)
    assert torch.equal(found.returns, expected.returns)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus", "remax"])
def test_without_a_critic_there_are_no_returns_for_it(name):
    assert not of(name).with_advantages(samples().with_fields(values=None)).has("returns")


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {"remax", "sft"}))
def test_without_greedy_samples_all_are_trained_on(name):
    algorithm, experience = of(name), samples()
    assert algorithm.greedy_samples_per_group() == 0
    assert not algorithm.is_greedy(experience).any()
    assert algorithm.compared_with_greedy(experience) is experience


def test_ppo_whitens_a_step_by_the_sums_of_all_replicas():
    algorithm = of("ppo")
    experience = algorithm.with_advantages(samples())
    seen = []
    found = algorithm.over_whole_step(experience, Replicas(lambda sums: seen.append(sums) or sums))
    trained_on = found.advantages[found.response_mask].double()
    assert len(seen) == 1 and seen[0][0] == experience.response_mask.sum()
    assert abs(trained_on.mean()) < 1e-6 and math.isclose(trained_on.std(), 1, rel_tol=1e-5)


@pytest.mark.parametrize("algorithm", [of("grpo"), of("ppo", advantages={"whiten": False}), of("sft"), of("dpo")])
def test_without_whitening_a_step_is_as_it_was_and_nobody_is_asked(algorithm):
    experience = samples()
    assert not algorithm.needs_whole_step()
    nothing = Replicas(lambda sums: pytest.fail("an unnecessary collective"))
    assert algorithm.over_whole_step(experience, nothing) is experience


def test_the_actor_takes_demonstrations_as_they_are_and_samples_as_they_were_drawn():
    sampling = {"rollout": {"sampling": {"temperature": 0.7}}}
    assert [of(name, **sampling).temperature() for name in ("grpo", "ppo", "sft", "dpo")] == [0.7, 0.7, 1.0, 1.0]


SHAPES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5)), min_size=1, max_size=7)
WEIGHTS = [None, {"high": 1.2}, {"method": "icepop", "low": 0.8, "high": 1.5, "level": "sequence"}]


def with_squares(shape: list[tuple[int, int]], seed: int = 0) -> Experience:
    """Adds log-probs and sums of squared probabilities from a random policy over 5 tokens."""
    experience = packed_experience(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    probabilities = (3 * torch.randn(experience.num_tokens, 5, generator=generator)).softmax(1)
    return experience.with_fields(actor_logprobs=probabilities[:, 0].log(), actor_squares=probabilities.square().sum(1))


def written_out(experience: Experience, penalty: torch.Tensor | None, correction: dict[str, Any] | None) -> list[float]:
    """Computes by loops, for every response token, the reward still to come minus the weighted mean at its position."""
    advantages = [0.0] * experience.num_tokens
    offsets, places, energies, to_go = experience.offsets().tolist(), [], [], []
    for sample in range(experience.num_samples):
        own = [i for i in range(offsets[sample], offsets[sample + 1]) if experience.response_mask[i]]
        log_ratios = [(experience.actor_logprobs[i] - experience.rollout_logprobs[i]).item() for i in own]
        total, weights, rewards = 0.0, [], []
        for place, i in enumerate(own):
            weight = 1.0
            if correction:
                of_level = sum(log_ratios) if correction.get("level") == "sequence" else log_ratios[place]
                ratio = math.exp(of_level)
                weight = min(ratio, correction["high"])
                if correction.get("method") == "icepop":
                    weight = ratio if correction["low"] <= ratio <= correction["high"] else 0.0
            probability = math.exp(experience.actor_logprobs[i])
            total += weight**2 * (1 - 2 * probability + experience.actor_squares[i].item())
            weights.append(total)
            left = 0.0 if penalty is None else sum(penalty[j].item() for j in own[place:])
            rewards.append(experience.rewards[sample].item() + left)
        places.append(own)
        energies.append(weights)
        to_go.append(rewards)
    for sample, own in enumerate(places):
        group = [j for j in range(len(places)) if experience.group_ids[j] == experience.group_ids[sample] and places[j]]
        for place, i in enumerate(own):
            there = [j for j in group if len(places[j]) > place]
            weighed = sum(energies[j][place] * to_go[j][place] for j in there)
            baseline = weighed / (sum(energies[j][place] for j in there) + 1e-8) if len(there) > 1 else 0.0
            advantages[i] = to_go[sample][place] - baseline if len(group) > 1 else 0.0
    return advantages


@pytest.mark.parametrize("correction", WEIGHTS)
@settings(max_examples=25, deadline=None)
@given(shape=SHAPES, seed=st.integers(0, 9), penalized=st.booleans())
@example(shape=[(1, 2), (1, 4)], seed=0, penalized=False)
def test_every_token_has_the_baseline_of_its_place(
    correction: dict[str, Any] | None, shape: list[tuple[int, int]], seed: int, penalized: bool
) -> None:
    experience = with_squares(shape, seed)
    penalty = -torch.rand(experience.num_tokens, generator=torch.Generator().manual_seed(seed)) if penalized else None
    algorithm = of("optimal_token_baseline", loss={"correction": correction or {}})
    found = algorithm.with_advantages(experience, penalty).advantages
    assert found.tolist() == pytest.approx(written_out(experience, penalty, correction), rel=1e-4, abs=1e-5)


def test_it_has_the_least_variance_of_all_constants() -> None:
    """Compares constant baselines on one token of a vocabulary of 4, with samples in proportion to the policy. No other
    baseline gives the gradient by the logits, (r - b) (one_hot - p), a smaller variance."""
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    drawn = torch.repeat_interleave(torch.arange(4), torch.tensor([4, 3, 2, 1]))
    experience = packed_experience([(1, 1)] * 10).with_fields(
        group_ids=torch.zeros(10, dtype=torch.int64),
        rewards=rewards[drawn],
        actor_logprobs=probabilities[drawn].log().repeat_interleave(2),
        actor_squares=probabilities.square().sum().expand(20),
    )
    found = of("optimal_token_baseline").with_advantages(experience).advantages[experience.response_mask]
    baseline = (rewards[drawn] - found).mean().item()
    scores = torch.eye(4, dtype=torch.float64) - probabilities

    def spread(constant: float) -> float:
        return float((((rewards - constant) ** 2) * scores.square().sum(1) * probabilities).sum())

    assert all(spread(baseline) < spread(baseline + step) for step in (-0.05, 0.05))


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"loss": {"old_logprobs": "rollout"}}, "loss.old_logprobs: got rollout; expected actor"),
        ({"model": {"path": "m", "router_replay": "recompute"}}, "model.router_replay: got recompute"),
        ({"batch": {"samples_per_prompt": 1}}, "compares the samples of a prompt"),
    ],
)
def test_what_it_needs_is_asked_for(sections: dict[str, Any], told: str) -> None:
    assert told in " ".join(of("optimal_token_baseline", **sections).problems())
    assert "inference" not in of("optimal_token_baseline").usable_roles()


VOCAB = 7


def distributions(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns the actor's logits, with a gradient, and a teacher's log-probs, both of shape [rows, VOCAB]."""
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
    """The term adds to the policy loss. Only response tokens count, even if other tokens hold inf or NaN."""
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
    """The reference and the teacher each request their own tokens."""
    experience = packed_experience([(1, 3), (2, 2)])
    ids = {"reference": torch.arange(VOCAB).expand(experience.num_tokens, -1), "teacher": torch.randint(VOCAB, (8, 3))}
    told = {role: torch.randn(8, VOCAB).log_softmax(1).gather(1, of_role) for role, of_role in ids.items()}
    for role in ids:
        experience = experience.with_fields(**{f"{role}_top_ids": ids[role], f"{role}_top_logprobs": told[role]})
    actor = torch.randn(8, VOCAB).log_softmax(1)
    asked = asked_tokens(experience)
    assert asked.shape == (8, VOCAB + 3)
    for role in ids:
        found = divergence_from(role, experience, [actor.gather(1, asked)])
        expected = reverse_kl(actor.gather(1, ids[role]), told[role]).masked_fill(~experience.response_mask, 0)
        torch.testing.assert_close(found, expected)
    assert divergence_from("teacher", packed_experience([(1, 1)]), []) is None


def test_distillation_learns_from_the_teacher_alone() -> None:
    algorithm = of("distillation")
    assert algorithm.with_advantages(packed_experience([(1, 2), (2, 2)])).advantages.tolist() == [0.0] * 7
    assert "teacher" in algorithm.needs()


def test_k3_is_never_negative_and_exact_for_tiny_differences() -> None:
    actor = torch.linspace(-3, 0, 301)
    assert bool((kl_estimate(actor, torch.full_like(actor, -1.0), "k3") >= 0).all())


FILE = f"{Path(__file__).resolve().parents[1] / 'support/user_learning.py'}:"
NORMALIZATIONS = ("token_mean", "sequence_mean", "dr_grpo")


def result_of(settings: schema.Loss, experience: Experience) -> tuple[float, float, list[float]]:
    """Returns the loss, the divisor and the gradient."""
    present = present_logprobs(experience)
    output = policy_loss(settings, 9)(experience, present, torch.zeros_like(present))
    (gradient,) = torch.autograd.grad(output.loss, present)
    return output.loss.item(), output.divisor.item(), gradient.tolist()


@pytest.mark.parametrize("function", ["clipped", "clipped_rows"])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_clip_of_ones_own_is_the_clip(function: str, normalization: Any) -> None:
    for seed in range(3):
        experience = in_double(SHAPE * 2, seed)
        own, known = (
            result_of(schema.Loss(policy=policy, function=name, normalization=normalization), experience)
            for policy, name in (("own", FILE + function), ("clip", None))
        )
        assert own[:2] == pytest.approx(known[:2], rel=1e-6) and own[2] == pytest.approx(known[2], rel=1e-6)


def test_a_loss_of_tokens_is_corrected_as_any_other() -> None:
    correction = schema.Correction(method="mis", low=0.6, high=1.5)
    own, known = (
        result_of(schema.Loss(policy=policy, function=name, correction=correction), in_double(SHAPE * 2))
        for policy, name in (("own", FILE + "clipped"), ("clip", None))
    )
    assert own[1] < int(in_double(SHAPE * 2).response_mask.sum()), "something is left out"
    assert own[:2] == pytest.approx(known[:2], rel=1e-6) and own[2] == pytest.approx(known[2], rel=1e-6)


def test_a_micro_batch_of_no_samples_gives_zeros() -> None:
    nothing = in_double().select(torch.zeros(0, dtype=torch.int64))
    assert result_of(schema.Loss(policy="own", function=FILE + "clipped_rows"), nothing) == (0, 0, [])


@pytest.mark.parametrize(
    ("function", "correction", "told"),
    [
        ("of_others", {}, r"takes \(logits\); expected parameters \(logprobs, old_logprobs, advantages\) or"),
        ("of_more", {}, "asks for parameter temperature; available are logprobs"),
        ("one_number", {}, r"returned a tensor of shape \(\); expected the loss of each of"),
        ("rows", {}, r"returned a tensor of shape \(\d+, \d+\); expected a tensor with one number"),
        ("raises", {}, "raised KeyError: 'no loss'"),
        ("clipped_rows", {"high": 2.0}, "returns a sum, and loss.correction needs the loss of each token"),
        ("missing", {}, "has no function 'missing'"),
    ],
)
def test_what_cannot_be_called_or_taken_is_refused(function: str, correction: dict[str, Any], told: str) -> None:
    loss = schema.Loss(policy="own", function=FILE + function, correction=schema.Correction(**correction))
    with pytest.raises(ConfigError, match=f"^loss.function: .*{told}"):
        result_of(loss, in_double())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=1, max_size=5), st.randoms())
def test_rows_hold_every_response_and_give_it_back(shape: list[tuple[int, int]], random: Any) -> None:
    """Covers responses with observed tokens between their turns."""
    experience = packed_experience([(prompt + 1, response) for prompt, response in shape])
    observed = torch.tensor([random.random() < 0.3 for _ in range(experience.num_tokens)])
    experience = experience.with_fields(response_mask=experience.response_mask & ~observed)
    rows, values = Rectangle.of(experience), torch.arange(1.0, experience.num_tokens + 1)
    padded, mask = rows.padded(values), experience.response_mask
    for sample, line in enumerate(padded.tolist()):
        of_sample = torch.nonzero((sample_index(experience) == sample) & mask).flatten()
        span = range(int(of_sample[0]), int(of_sample[-1]) + 1) if len(of_sample) else range(0)
        assert line == [place + 1.0 for place in span] + [0.0] * (rows.shape[1] - len(span))
    back = rows.packed(padded, experience.num_tokens)
    assert torch.equal(back[mask], values[mask])


def parts_of_step() -> list[Experience]:
    """Returns the parts of two replicas. The first has two chunks. Groups are numbered within a chunk."""
    shapes = ([(1, 3), (2, 1)], [(1, 2), (1, 4)], [(2, 2), (1, 5)])
    ids = (torch.tensor([4, 5]), torch.tensor([0, 1]), torch.tensor([2, 3]))
    made = [
        packed_experience(shape, int(own[0])).with_fields(sample_ids=own)
        for shape, own in zip(shapes, ids, strict=True)
    ]
    return [join(made[:2]), made[2]]


def own_algorithm(function: str, **advantages: Any) -> Any:
    batch = {"samples_per_prompt": 2, "prompts_per_step": 3}
    return of("own", batch=batch, advantages={"function": FILE + function, **advantages})


def over_step(algorithm: Any, parts: list[Experience]) -> list[Tensor]:
    """Returns the advantages of each replica. The gathered tensors come in the order of the requests."""
    begun = [algorithm.with_advantages(part) for part in parts]
    names = ("sample_ids", "lengths", "advantages", "response_mask")
    columns = [torch.cat([getattr(one, name) for one in begun]) for name in names]
    found = []
    for one in begun:
        answers = iter(columns)
        found.append(algorithm.over_whole_step(one, Replicas(gathered=lambda _, answers=answers: next(answers))))
    return [one.advantages for one in found]


def test_advantages_of_samples_are_of_the_whole_step() -> None:
    parts = parts_of_step()
    mean = torch.cat([part.rewards for part in parts]).double().mean()
    for part, found in zip(parts, over_step(own_algorithm("centred_over_step"), parts), strict=True):
        groups = part.sample_ids // 2
        expected = (part.rewards.double() - mean + 0.001 * groups)[sample_index(part)]
        assert torch.allclose(found.double(), expected.masked_fill(~part.response_mask, 0), atol=1e-6)


def test_advantages_of_tokens_are_of_rows_of_the_whole_step() -> None:
    """Discounts by the gamma of the config instead of the function's default."""
    parts = parts_of_step()
    mean = torch.cat([part.rewards for part in parts]).mean()
    for part, found in zip(parts, over_step(own_algorithm("returns_less_mean", gamma=0.9), parts), strict=True):
        for sample in range(part.num_samples):
            places = torch.nonzero((sample_index(part) == sample) & part.response_mask).flatten()
            left = torch.arange(len(places) - 1, -1, -1)
            expected = part.rewards[sample] * 0.9**left - mean + part.sample_ids[sample] // 2
            assert torch.allclose(found[places], expected, atol=1e-5)
        assert not found[~part.response_mask].any()


def test_an_answer_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantages.function: .*returned \(5,\); expected a tensor of shape \(6,\)"):
        over_step(own_algorithm("too_few"), parts_of_step())


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        ({"algorithm": "own"}, "advantages.function: got null"),
        ({"advantages": {"function": "a.py:b"}}, "algorithm grpo does not use it"),
        ({"algorithm": "own", "advantages": {"function": "a.py:b", "mask_truncated": True}}, "sees all samples"),
    ],
)
def test_a_function_and_its_algorithm_come_together(sections: dict[str, Any], told: str) -> None:
    assert told in " ".join(algorithm_of(make_config(**sections)).problems())
