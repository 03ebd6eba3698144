"""A permutation that is computed: each number comes once, and about as often in one place as in another."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.data import prompt_order
from rltrain.data.prompt_order import FeistelPermutation, PromptOrder

KEYS = st.lists(st.integers(0, 2**63), max_size=3).map(tuple)


@settings(max_examples=60)
@given(size=st.one_of(st.integers(1, 70), st.integers(1, 5000)), key=KEYS)
def test_each_number_comes_once(size: int, key: tuple[int, ...]) -> None:
    permutation = FeistelPermutation(size, key)
    found = permutation.of(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))
    assert permutation.of(np.array([size - 1, 0])).tolist() == [found[-1], found[0]], "whatever else is asked for"


@given(size=st.integers(2**40, 2**62), key=KEYS, numbers=st.lists(st.integers(0, 2**40 - 1), unique=True, min_size=1))
def test_large_sizes(size: int, key: tuple[int, ...], numbers: list[int]) -> None:
    found = FeistelPermutation(size, key).of(np.array(numbers)).tolist()
    assert len(set(found)) == len(numbers) and min(found) >= 0 and max(found) < size


def test_numbers_are_spread_evenly() -> None:
    """Of numbers in many permutations each goes to each place about equally often, and what neighbours do has
    nothing to do with each other."""
    size, times = 30, 1000
    found = np.stack([FeistelPermutation(size, (7, epoch)).of(np.arange(size)) for epoch in range(times)])
    counts = np.stack([np.bincount(found[:, number], minlength=size) for number in range(size)])
    chi_square = ((counts - times / size) ** 2 / (times / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)
    distances = np.bincount((found[:, 1:] - found[:, :-1]).ravel() % size, minlength=size)[1:]
    assert abs(distances - times).max() < 6 * np.sqrt(times)


def test_many_rows_are_not_ordered_by_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones keep the order that numpy gives them; of large ones steps, epochs and streams hold what they hold of
    small ones."""
    assert PromptOrder(9, seed=3, shuffle=True, stream=(2,)).rows(0, 9).tolist() == [
        *np.random.default_rng([3, 0, 2]).permutation(9)
    ]
    monkeypatch.setattr(prompt_order, "HELD_ROWS", 50)
    large = PromptOrder(60, seed=3, shuffle=True, stream=(2,))
    positions = [large.row(position) for position in range(200)]
    of_steps = [row for step in range(20) for row in large.rows_for_step(step, 10)]
    assert positions == large.rows(0, 200).tolist() == of_steps
    epochs = [positions[first : first + 60] for first in (0, 60, 120)]
    assert all(sorted(epoch) == list(range(60)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert positions[90:] == [PromptOrder(60, seed=3, shuffle=True, stream=(2,)).row(p) for p in range(90, 200)]
    for seed, stream in ((4, (2,)), (3, (1,)), (3, ())):
        assert PromptOrder(60, seed=seed, shuffle=True, stream=stream).rows(0, 60).tolist() != epochs[0]
    assert PromptOrder(60, seed=3, shuffle=False).rows(55, 10).tolist() == [*range(55, 60), *range(5)]
