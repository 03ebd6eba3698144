"""DAPO's penalty of long responses against its equation, and truncated ones out of the loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import num_truncated, overlong_penalties, without_truncated
from rltrain.config.schema import OverlongPenalty
from tests.unit.packed_experience import packed_experience


def plain_penalty(length: int, longest: int, buffer: int) -> float:
    """Yu et al. 2025, equation 13."""
    if length <= longest - buffer:
        return 0.0
    return ((longest - buffer) - length) / buffer if length <= longest else -1.0


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)).filter(sum), min_size=1, max_size=6), st.integers(1, 10)
)
def test_equals_the_equation(shape: list[tuple[int, int]], buffer: int) -> None:
    settings = OverlongPenalty(buffer_tokens=buffer, factor=0.5)
    found = overlong_penalties(packed_experience(shape), settings, max_response_tokens=10)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([0.5 * plain_penalty(length, 10, buffer) for _, length in shape])


def test_what_was_observed_between_turns_takes_room_and_what_stands_before_them_does_not() -> None:
    experience = packed_experience([(2, 6), (1, 1)])
    mask = experience.response_mask.clone()
    mask[4:6] = False
    found = overlong_penalties(experience.with_fields(response_mask=mask), OverlongPenalty(buffer_tokens=4), 8)
    assert found.tolist() == [-0.5, 0.0]


def test_truncated_samples_leave_the_loss_and_the_others_stay() -> None:
    experience = packed_experience([(1, 2), (1, 2), (1, 0)])
    experience = experience.with_fields(truncated=torch.tensor([True, False, True]))
    assert num_truncated(experience) == 1
    left = without_truncated(experience).response_mask
    assert left.tolist() == [False, False, False, False, True, True, False]
