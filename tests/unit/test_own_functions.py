"""Policy losses and advantages that are functions of the user's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rltrain.algorithms.advantages import Rectangle
from rltrain.algorithms.algorithm import Replicas
from rltrain.algorithms.losses import sample_index
from rltrain.algorithms.policy_loss import policy_loss
from rltrain.algorithms.registry import algorithm_of
from rltrain.config import schema
from rltrain.data.experience import Experience, join
from rltrain.errors import ConfigError
from tests.unit.packed_experience import packed_experience
from tests.unit.schedule_configs import make_config
from tests.unit.test_policy_losses import SHAPE, in_double, present_logprobs

FILE = f"{Path(__file__).parent / 'user_learning.py'}:"
NORMALIZATIONS = ("token_mean", "sequence_mean", "dr_grpo")


def result_of(settings: schema.Loss, experience: Experience) -> tuple[float, float, list[float]]:
    """Loss, divisor and gradient."""
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
        ("of_more", {}, "asks for temperature; what there is to ask for is logprobs"),
        ("one_number", {}, r"returned a tensor of shape \(\); expected the loss of each of"),
        ("rows", {}, r"returned a tensor of shape \(\d+, \d+\); expected a tensor with one number"),
        ("raises", {}, "raised KeyError: 'no loss'"),
        ("clipped_rows", {"high": 2.0}, "gives a sum, whose tokens loss.correction cannot weigh"),
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
    """Also where what was observed lies between the turns of a response."""
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
    """Two replicas, of which the first has two chunks; groups are numbered within a chunk."""
    shapes = ([(1, 3), (2, 1)], [(1, 2), (1, 4)], [(2, 2), (1, 5)])
    ids = (torch.tensor([4, 5]), torch.tensor([0, 1]), torch.tensor([2, 3]))
    made = [
        packed_experience(shape, int(own[0])).with_fields(sample_ids=own)
        for shape, own in zip(shapes, ids, strict=True)
    ]
    return [join(made[:2]), made[2]]


def own_algorithm(function: str, **advantages: Any) -> Any:
    batch = {"samples_per_prompt": 2, "prompts_per_step": 3}
    return algorithm_of(
        make_config(algorithm="own", batch=batch, advantages={"function": FILE + function, **advantages})
    )


def over_step(algorithm: Any, parts: list[Experience]) -> list[Tensor]:
    """Of each replica, what becomes of its samples; tensors are gathered in the order in which all ask for them."""
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
    """Discounted by the config's gamma, not by the function's default."""
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
        ({"advantages": {"function": "a.py:b"}}, "algorithm grpo does not look at it"),
        ({"algorithm": "own", "advantages": {"function": "a.py:b", "mask_truncated": True}}, "sees all samples"),
    ],
)
def test_a_function_and_its_algorithm_come_together(sections: dict[str, Any], told: str) -> None:
    assert told in " ".join(algorithm_of(make_config(**sections)).problems())
