"""Staleness limits against plain Python, sample by sample."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.algorithms.advantages import with_sample_advantages
from rltrain.algorithms.correction import apply_staleness_limit, token_staleness
from rltrain.data.experience import Experience
from tests.unit.packed_experience import packed_experience

SHAPES = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 6)), min_size=1, max_size=6)
STEP = 6


def rows_of(experience: Experience) -> list[list[tuple[bool, int]]]:
    """(in the response mask, policy version) of each sample's tokens."""
    lengths = experience.lengths.tolist()
    masks, versions = experience.response_mask.split(lengths), experience.policy_version.split(lengths)
    return [list(zip(m.tolist(), v.tolist(), strict=True)) for m, v in zip(masks, versions, strict=True)]


@settings(max_examples=30)
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
    counts |= {"tokens": sum(mask), "staleness_sum": sum(staleness), "staleness_max": max(staleness)}
    kept, actual_counts = apply_staleness_limit(experience, STEP, limit, how)
    assert kept.response_mask.tolist() == mask
    assert token_staleness(kept, STEP).tolist() == staleness
    assert actual_counts == counts
    assert how == "correct" or actual_counts["staleness_max"] <= limit
    unchanged = {name: value for name, value in experience.columns().items() if name != "response_mask"}
    assert all(value is kept.columns()[name] for name, value in unchanged.items())


def test_nothing_is_stale_within_the_limit() -> None:
    experience = packed_experience([(1, 4), (2, 3)])
    for how in ("drop", "mask"):
        kept, counts = apply_staleness_limit(experience, 5, 5, how)
        assert torch.equal(kept.response_mask, experience.response_mask)
        assert (counts["stale_samples"], counts["stale_tokens"]) == (0, 0)


def test_a_dropped_sample_is_in_no_baseline() -> None:
    experience = packed_experience([(1, 2)] * 3)
    versions = torch.tensor([0, 5, 5, 0, 1, 5, 0, 5, 5], dtype=torch.int32)
    experience = experience.with_fields(
        policy_version=versions, group_ids=torch.zeros(3, dtype=torch.int64), rewards=torch.tensor([1.0, 50.0, 0.0])
    )
    kept, counts = apply_staleness_limit(experience, 5, 1, "drop")
    assert (counts["stale_samples"], counts["stale_tokens"]) == (1, 1)
    advantages = with_sample_advantages(kept, lambda rewards, groups: groups.centred(rewards)).advantages
    assert advantages is not None and advantages.tolist() == [0, 0.5, 0.5, 0, 0, 0, 0, -0.5, -0.5]


def test_no_samples() -> None:
    nothing = packed_experience([(1, 1)]).select(torch.zeros(0, dtype=torch.int64))
    _, counts = apply_staleness_limit(nothing, 3, 0, "drop")
    assert set(counts.values()) == {0}
