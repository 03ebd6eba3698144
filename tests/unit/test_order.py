"""The stream of prompts: what a mix gives each source, and that any position can be asked for alone."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.data.prompt_order import BLOCK, CurriculumOrder, Mix, PromptOrder, RowOrder, Shares

WEIGHTS = st.lists(st.sampled_from([1.0, 2.0, 0.5, 0.1, 1 / 3, 0.7, 100.0]), min_size=1, max_size=7)
few = settings(max_examples=15, derandomize=True, deadline=None)


def mix_of(weights: list[float], sizes: list[int], *, seed: int = 0, shuffle: bool = True) -> Mix:
    firsts = [sum(sizes[:source]) for source in range(len(sizes))]
    orders = [PromptOrder(size, seed=seed, shuffle=shuffle, stream=(i,)) for i, size in enumerate(sizes)]
    return Mix(orders, firsts, weights, seed=seed, shuffle=shuffle)


@few
@given(WEIGHTS, st.integers(0, 10**15), st.integers(1, 200))
def test_every_stretch_of_numbers_is_shared_out_by_weight(weights: list[float], first: int, length: int) -> None:
    shares = Shares(weights)
    counts = Counter(shares.source(number)[0] for number in range(first, first + length))
    total = sum(Fraction(repr(weight)) for weight in weights)
    for source, weight in enumerate(weights):
        fair = length * Fraction(repr(weight)) / total
        assert abs(counts[source] - fair) <= 2 * len(weights).bit_length()


@few
@given(WEIGHTS, st.integers(1, 200))
def test_each_source_counts_its_own_numbers(weights: list[float], length: int) -> None:
    """So its rows come in its own order, and each once in an epoch of it."""
    places = [Shares(weights).source(number) for number in range(length)]
    for source in range(len(weights)):
        own = [index for at, index in places if at == source]
        assert own == [*range(len(own))]


@few
@given(WEIGHTS, st.data(), st.booleans(), st.integers(0, 2**32))
def test_a_mix_has_every_row_once_per_epoch_of_its_source(
    weights: list[float], data: st.DataObject, shuffle: bool, seed: int
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 20), min_size=len(weights), max_size=len(weights)))
    mix = mix_of(weights, sizes, seed=seed, shuffle=shuffle)
    stream = [mix.row(position) for position in range(3 * BLOCK + 5)]
    for source, size in enumerate(sizes):
        first = mix.firsts[source]
        own = [row for row in stream if first <= row < first + size]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == [*range(first, first + size)]


@few
@given(WEIGHTS, st.lists(st.integers(0, 10**12), min_size=1, max_size=20), st.booleans())
def test_any_position_of_a_mix_can_be_asked_for_alone(
    weights: list[float], positions: list[int], shuffle: bool
) -> None:
    """As a resumed run does, or an engine that takes every other position."""
    sizes = [5 + source for source in range(len(weights))]
    one = mix_of(weights, sizes, shuffle=shuffle)
    rows = [one.row(position) for position in positions]
    assert [mix_of(weights, sizes, shuffle=shuffle).row(position) for position in positions] == rows


def test_shares_converge_to_the_weights() -> None:
    mix = mix_of([0.7, 0.2, 0.1], [1000, 10, 300])
    counts = Counter(mix.place(position)[0] for position in range(6_400))
    assert [counts[source] for source in range(3)] == [4_480, 1_280, 640]


def test_engines_that_take_every_other_position_get_the_same_mix() -> None:
    """Strictly alternating sources would give the first engine all of one."""
    mix = mix_of([1.0, 1.0], [50, 50])
    counts = Counter(mix.place(position)[0] for position in range(0, 40 * BLOCK, 2))
    assert 0.4 < counts[0] / (20 * BLOCK) < 0.6
    assert [mix_of([1.0, 1.0], [9, 9], shuffle=False).place(p)[0] for p in range(6)] == [0, 1, 0, 1, 0, 1]


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    mix = mix_of([1.0, 1.0], [30, 30])
    stream = [mix.row(position) for position in range(60)]
    assert [row for row in stream if row < 30] != [row - 30 for row in stream if row >= 30]


class Backwards(RowOrder):
    """Tells where a curriculum has ended."""

    def row(self, position: int) -> int:
        return -1 - position


def curriculum(difficulties: list[float], *, steps: int, per_step: int, shuffle: bool = True) -> CurriculumOrder:
    return CurriculumOrder(
        np.array(difficulties), steps=steps, per_step=per_step, seed=3, shuffle=shuffle, then=Backwards()
    )


def test_a_curriculum_of_as_many_prompts_as_rows_is_the_sorted_file() -> None:
    difficulties = [float(d) for d in np.random.default_rng(0).permutation(24)]
    order = curriculum(difficulties, steps=6, per_step=4)
    steps = [[difficulties[row] for row in order.rows_for_step(step, 4)] for step in range(6)]
    assert [sorted(step) for step in steps] == [[4.0 * i + j for j in range(4)] for i in range(6)]
    assert any(step != sorted(step) for step in steps), "shuffled within a step"
    assert [order.row(24), order.row(30)] == [-1, -7], "then the other order, from its beginning"


@few
@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_a_curriculum_grows_harder_and_repeats_no_row_within_a_step(
    num_rows: int, steps: int, per_step: int, shuffle: bool
) -> None:
    difficulties = [float((7 * row) % num_rows) for row in range(num_rows)]
    order = curriculum(difficulties, steps=steps, per_step=per_step, shuffle=shuffle)
    windows = []
    for step in range(steps):
        rows = order.rows_for_step(step, per_step)
        assert len(set(rows)) == min(per_step, num_rows)
        windows.append([difficulties[row] for row in rows])
    easiest = [min(window) for window in windows]
    assert max(windows[0]) - min(difficulties) < order.window and max(difficulties) - easiest[-1] < order.window
    alone = curriculum(difficulties, steps=steps, per_step=per_step, shuffle=shuffle)
    last = steps * per_step - 1
    assert alone.row(last) == order.row(last)


def test_a_mix_of_curricula() -> None:
    """Each source goes from easy to hard in its own draws."""
    orders = [curriculum([3.0, 1.0, 2.0], steps=3, per_step=1), curriculum([1.0, 2.0], steps=2, per_step=1)]
    mix = Mix(orders, [0, 3], [1.0, 1.0], seed=0, shuffle=False)
    assert [mix.row(position) for position in range(5)] == [1, 3, 2, 4, 0]


@pytest.mark.parametrize("weights", [[3.0], [1e-9, 1e9]])
def test_one_source_and_extreme_weights(weights: list[float]) -> None:
    largest = weights.index(max(weights))
    assert {Shares(weights).source(number)[0] for number in range(0, 10**12, 10**11)} == {largest}
