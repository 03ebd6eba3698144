"""The order of prompts: permutations, mixes of sources, curricula and rates of solved prompts."""

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.checkpoint.run_folder import Resumed
from rltrain.config.data import SolvedRate
from rltrain.data import prompt_order
from rltrain.data.experience import SIBLINGS_APART
from rltrain.data.prompt_order import (
    BLOCK,
    CurriculumOrder,
    FeistelPermutation,
    Mix,
    Outcomes,
    PromptOrder,
    RowOrder,
    Shares,
    SolvedRateOrder,
    SolvedRates,
)
from rltrain.errors import CheckpointError
from rltrain.roles.scoring import OutcomeTeller, training_rows
from rltrain.rollout.rollout_state import Consumed, OutcomeLog, SolvedRateRows
from rltrain.runtime.grid import Grid
from tests.support.packed_experience import packed_experience
from tests.support.shared_store import ShortPatience

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
    """The rows of a source come in its own order, and each once per epoch of the source."""
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
    """A resumed run needs this, and an engine that takes every other position."""
    sizes = [5 + source for source in range(len(weights))]
    one = mix_of(weights, sizes, shuffle=shuffle)
    rows = [one.row(position) for position in positions]
    assert [mix_of(weights, sizes, shuffle=shuffle).row(position) for position in positions] == rows


def test_shares_converge_to_the_weights() -> None:
    mix = mix_of([0.7, 0.2, 0.1], [1000, 10, 300])
    counts = Counter(mix.place(position)[0] for position in range(6_400))
    assert [counts[source] for source in range(3)] == [4_480, 1_280, 640]


def test_engines_that_take_every_other_position_get_the_same_mix() -> None:
    """With strictly alternating sources the first engine would get only one source."""
    mix = mix_of([1.0, 1.0], [50, 50])
    counts = Counter(mix.place(position)[0] for position in range(0, 40 * BLOCK, 2))
    assert 0.4 < counts[0] / (20 * BLOCK) < 0.6
    assert [mix_of([1.0, 1.0], [9, 9], shuffle=False).place(p)[0] for p in range(6)] == [0, 1, 0, 1, 0, 1]


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    mix = mix_of([1.0, 1.0], [30, 30])
    stream = [mix.row(position) for position in range(60)]
    assert [row for row in stream if row < 30] != [row - 30 for row in stream if row >= 30]


class Backwards(RowOrder):
    """An order of negative rows, to show the end of a curriculum."""

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
    """Each source goes from easy to hard at its own pace."""
    orders = [curriculum([3.0, 1.0, 2.0], steps=3, per_step=1), curriculum([1.0, 2.0], steps=2, per_step=1)]
    mix = Mix(orders, [0, 3], [1.0, 1.0], seed=0, shuffle=False)
    assert [mix.row(position) for position in range(5)] == [1, 3, 2, 4, 0]


@pytest.mark.parametrize("weights", [[3.0], [1e-9, 1e9]])
def test_one_source_and_extreme_weights(weights: list[float]) -> None:
    largest = weights.index(max(weights))
    assert {Shares(weights).source(number)[0] for number in range(0, 10**12, 10**11)} == {largest}


KEYS = st.lists(st.integers(0, 2**63), max_size=3).map(tuple)


@settings(max_examples=60)
@given(size=st.one_of(st.integers(1, 70), st.integers(1, 5000)), key=KEYS)
def test_each_number_comes_once(size: int, key: tuple[int, ...]) -> None:
    permutation = FeistelPermutation(size, key)
    found = permutation.of(np.arange(size))
    assert sorted(found.tolist()) == list(range(size))
    assert permutation.of(np.array([size - 1, 0])).tolist() == [found[-1], found[0]], (
        "the result must not depend on other numbers"
    )


@given(size=st.integers(2**40, 2**62), key=KEYS, numbers=st.lists(st.integers(0, 2**40 - 1), unique=True, min_size=1))
def test_large_sizes(size: int, key: tuple[int, ...], numbers: list[int]) -> None:
    found = FeistelPermutation(size, key).of(np.array(numbers)).tolist()
    assert len(set(found)) == len(numbers) and min(found) >= 0 and max(found) < size


def test_numbers_are_spread_evenly() -> None:
    """Over many permutations, each number comes to each place about equally often. Neighbours are independent."""
    size, times = 30, 1000
    found = np.stack([FeistelPermutation(size, (7, epoch)).of(np.arange(size)) for epoch in range(times)])
    counts = np.stack([np.bincount(found[:, number], minlength=size) for number in range(size)])
    chi_square = ((counts - times / size) ** 2 / (times / size)).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 6 * np.sqrt(2 * freedom)
    distances = np.bincount((found[:, 1:] - found[:, :-1]).ravel() % size, minlength=size)[1:]
    assert abs(distances - times).max() < 6 * np.sqrt(times)


def test_many_rows_are_not_ordered_by_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small orders keep numpy's permutation. Large ones keep the properties of steps, epochs and streams."""
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


few_derandomized = settings(max_examples=30, derandomize=True, deadline=None)
SOLVED_WEIGHTS = (3.0, 1.0, 0.5)


def base_order(sizes: list[int], seed: int = 0) -> RowOrder:
    orders = [PromptOrder(size, seed=seed, shuffle=True, stream=(i,)) for i, size in enumerate(sizes)]
    firsts = [sum(sizes[:source]) for source in range(len(sizes))]
    return orders[0] if len(sizes) == 1 else Mix(orders, firsts, SOLVED_WEIGHTS[: len(sizes)], seed=seed, shuffle=True)


def by_solved_rate(sizes: list[int], per_window: int, **keys: float) -> SolvedRateOrder:
    rates = SolvedRates(sum(sizes), SolvedRate(**keys))
    return SolvedRateOrder(base_order(sizes), rates, per_window=per_window, seed=0)


def test_estimates_remember_what_was_seen_before():
    rates = SolvedRates(4, SolvedRate(memory=0.75, low=0.3, high=0.6, retire_after=2))
    rates.learn({0: (1, 4), 1: (4, 4), 2: (1, 2)})
    rates.learn({0: (3, 4), 1: (2, 2)})
    assert rates.rates.tolist() == pytest.approx([0.75 * 0.25 + 0.25 * 0.75, 1.0, 0.5, np.nan], nan_ok=True)
    assert rates.is_retired.tolist() == [False, True, False, False]
    assert rates.is_wanted.tolist() == [True, False, True, True], "row 3 has no outcome yet"
    shares = {"unseen": 0.25, "too_hard": 0, "in_window": 0.5, "too_easy": 0.25}
    assert rates.metrics() == {
        **{f"curriculum/{name}": share for name, share in shares.items()},
        "curriculum/retired": 1,
        "curriculum/solved_rate_mean": pytest.approx((0.375 + 1 + 0.5) / 3),
    }
    rates.learn({1: (1, 2)})
    assert not rates.is_retired.any()


@few_derandomized
@given(st.lists(st.integers(30, 60), min_size=1, max_size=3), st.integers(1, 9))
def test_as_long_as_nothing_is_known_prompts_come_as_without_a_curriculum(sizes: list[int], per_window: int) -> None:
    order, without = by_solved_rate(sizes, per_window), base_order(sizes)
    for _ in range(25 // per_window):
        order.draw()
    positions = range(25 // per_window * per_window)
    assert [order.row(position) for position in positions] == [without.row(position) for position in positions]


@few_derandomized
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(1, 16), st.data())
def test_every_window_has_the_wanted_rows_first_and_each_source_its_share(
    sizes: list[int], per_window: int, data: st.DataObject
) -> None:
    order = by_solved_rate(sizes, per_window, outside=0.0, memory=0.0, retire_after=1)
    base = base_order(sizes)
    firsts = [sum(sizes[:source]) for source in range(len(sizes))]
    for window in range(6):
        solved = data.draw(st.lists(st.integers(0, 4), min_size=sum(sizes), max_size=sum(sizes)))
        order.learn({row: (count, 4) for row, count in enumerate(solved)})
        order.draw()
        rows = [order.row(position) for position in range(window * per_window, (window + 1) * per_window)]
        sources = [0] * per_window
        if isinstance(base, Mix):
            sources = [base.place(window * per_window + offset)[0] for offset in range(per_window)]
        for source, (first, size) in enumerate(zip(firsts, sizes, strict=True)):
            drawn = [row for row, of in zip(rows, sources, strict=True) if of == source]
            assert all(first <= row < first + size for row in drawn)
            wanted = {row for row in range(first, first + size) if 1 <= solved[row] <= 3}
            retired = {row for row in range(first, first + size) if solved[row] == 4}
            if len(drawn) <= size:
                assert len(set(drawn)) == len(drawn)
                assert len(wanted & {*drawn}) == min(len(wanted), len(drawn))
                assert len(retired & {*drawn}) == max(0, len(drawn) - size + len(retired))


def test_wanted_rows_come_equally_often_and_others_in_their_share_of_turns():
    order = by_solved_rate([400], 20, outside=0.25)
    order.learn({row: (row % 2 * 2, 2) if row < 200 else (1, 2) for row in range(400)})
    for _ in range(250):
        order.draw()
    counts = np.bincount([order.row(position) for position in range(5000)], minlength=400)
    epochs = 5000 / (200 + 0.25 * 200)
    assert np.ptp(counts[200:]) <= 2 and counts[200:].mean() == pytest.approx(epochs, abs=1)
    assert counts[:200].mean() == pytest.approx(0.25 * epochs, rel=0.1)


def outcomes_of(step: int, num_rows: int) -> Outcomes:
    return {row: ((step * 7 + row * 3) % 5, 4 + (step + row) % 2) for row in range(step % 3, num_rows, 3)}


SIZES, PER_WINDOW = [17, 9], 4


@dataclass
class Run:
    """Ranks of engines at different positions of the order of tasks, with the rows of each."""

    lead: int
    num_ranks: int
    first: int = 0
    store: dist.Store = field(default_factory=dist.HashStore)

    def __post_init__(self) -> None:
        self.log = OutcomeLog(self.store, self.num_ranks)
        self.told = self.first
        self.steps = [self.first - 1] * self.num_ranks
        self.ranks = [
            SolvedRateRows(
                by_solved_rate(SIZES, PER_WINDOW, outside=0.2),
                self.log,
                lead=self.lead,
                scoring=0,
                waiter=ShortPatience(),
                first_window=self.first,
            )
            for _ in range(self.num_ranks)
        ]

    def begin(self, rank: int, step: int, below: int) -> None:
        """Begins a step. Rewards come as late as possible, unless another rank already needed them."""
        for scored in range(self.told, step - self.lead):
            self.log.put(scored, outcomes_of(scored, sum(SIZES)))
        self.told = max(self.told, step - self.lead)
        self.steps[rank] = step
        self.ranks[rank].begin(step, Consumed(below), Consumed(below), None)


def play(run: Run, actions: list[tuple[int, bool, int]], step: int) -> list[list[tuple[int, int]]]:
    """Returns the begun (position, row) pairs by rank. Ranks take turns in any order: each goes to its next step, at
    most two after `step`, or begins a position at most five windows ahead."""
    begun: list[list[tuple[int, int]]] = [[] for _ in run.ranks]
    for rank in range(run.num_ranks):
        run.begin(rank, step, step * PER_WINDOW)
    for rank, comes_to_next, ahead in actions:
        if comes_to_next and run.steps[rank] < step + 2:
            run.begin(rank, run.steps[rank] + 1, step * PER_WINDOW)
        else:
            position = step * PER_WINDOW + ahead
            begun[rank].append((position, run.ranks[rank].row(position)))
    for rank in range(run.num_ranks):
        run.begin(rank, step + 3, (step + 3) * PER_WINDOW - 1)
    return begun


actions = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5 * PER_WINDOW - 1)), max_size=20)


@few_derandomized
@given(st.integers(0, 2), st.lists(actions, min_size=3, max_size=3))
def test_ranks_agree_on_every_row_and_a_resumed_run_on_those_of_one_that_never_stopped(
    lead: int, stretches: list[list[tuple[int, bool, int]]]
) -> None:
    whole, cut = Run(lead, 3), Run(lead, 3)
    rows: dict[int, int] = {}
    for number, stretch in enumerate(stretches):
        of_whole, of_cut = play(whole, stretch, number * 4), play(cut, stretch, number * 4)
        assert of_cut == of_whole
        for position, row in (found for of_rank in of_whole for found in of_rank):
            assert rows.setdefault(position, row) == row
        cut = resumed(cut, at=number * 4 + 4 - lead)
    for rank in range(3):
        whole.begin(rank, 12, 12 * PER_WINDOW)
    keys = [f"outcomes/step {step}" for step in range(12 - lead)] + [
        f"outcomes/window {window}" for window in range(12)
    ]
    assert whole.told == 12 - lead
    assert not any(whole.store.check([key]) for key in keys), "outcomes that all ranks have read are deleted"


def resumed(run: Run, at: int) -> Run:
    """Resumes in another job, at the boundary before training on step `at`. The other engines know less of the drawn
    rows. The reward repeats the outcomes of the last steps."""
    states = [state for rank in run.ranks if (state := rank.state()) is not None]
    other = Run(run.lead, run.num_ranks, first=max(at, 0))
    for rank in other.ranks:
        rank.resume(states)
    other.told = run.ranks[0].num_read
    return other


def test_what_was_learnt_stays_where_steps_are_drawn_anew():
    """Repeated steps keep their rows."""
    run, ahead = Run(lead=1, num_ranks=1), range(4 * PER_WINDOW, 5 * PER_WINDOW)
    for step in range(5):
        run.begin(0, step, step * PER_WINDOW)
        run.ranks[0].row(step * PER_WINDOW)
    rows = [run.ranks[0].row(position) for position in ahead]
    state = run.ranks[0].state()
    again = Run(lead=0, num_ranks=1, first=4)
    again.ranks[0].resume([state])
    again.told = again.ranks[0].num_read
    assert again.ranks[0].order.rates.rates.tolist() == pytest.approx(state.tensors["rates"].tolist(), nan_ok=True)
    again.begin(0, 4, 4 * PER_WINDOW)
    assert [again.ranks[0].row(position) for position in ahead] == rows
    again.ranks[0].row(5 * PER_WINDOW)
    expected = by_solved_rate(SIZES, PER_WINDOW).rates
    for step in range(4):
        expected.learn(outcomes_of(step, sum(SIZES)))
    assert again.ranks[0].order.rates.rates.tolist() == pytest.approx(expected.rates.tolist(), nan_ok=True)
    assert [*again.ranks[0].order.windows] == [4, 5]


def job_with(store: dist.Store, resumed: Resumed | None = None) -> Any:
    """Returns the parts of a job used by the curriculum."""
    return SimpleNamespace(
        config=SimpleNamespace(
            data=SimpleNamespace(solved_rate=SolvedRate()), batch=SimpleNamespace(prompts_per_step=4), seed=0
        ),
        rows=SimpleNamespace(
            prompts=SimpleNamespace(order=base_order(SIZES), train=range(sum(SIZES))),
            first_step=resumed.data_from if resumed else 0,
        ),
        world=SimpleNamespace(store=store),
        grids={"rollout": Grid((0,))},
        shape=SimpleNamespace(lead=0),
        waiter=ShortPatience(),
        leader_of=lambda role: 0,
        first_step=resumed.step if resumed else 0,
        resumed=resumed,
    )


def test_a_checkpoint_without_is_refused_where_its_samples_are_gone_on_with(tmp_path: Path) -> None:
    """The outcomes of samples scored before the checkpoint are unknown."""
    with pytest.raises(CheckpointError, match=r"data.solved_rate: .* was saved without"):
        training_rows(job_with(dist.HashStore(), Resumed(tmp_path, 5, continues=True)))
    anew = training_rows(job_with(dist.HashStore(), Resumed(tmp_path, 5, continues=False)))
    anew.begin(5, Consumed(20), Consumed(20), None)
    assert anew.row(20) == base_order(SIZES).row(0), "without outcomes the first rows come first"


def test_an_episode_counts_once_and_one_that_failed_does_not():
    """The samples: 0 and 2 of row 5, another trajectory of 2 with the same reward, 4 of row 6, and a failed one."""
    experience = packed_experience([(2, length) for length in (3, 1, 2, 2, 0)]).with_fields(
        sample_ids=torch.tensor([0, 2, 2 + SIBLINGS_APART, 4, 5]),
        prompt_ids=torch.tensor([5, 5, 5, 6, 6]),
        rewards=torch.tensor([0.5, 1.0, 1.0, 0.0, 1.0]),
    )
    store = dist.HashStore()
    teller = OutcomeTeller(job_with(store), is_leader=True)
    teller.begin_step()
    teller.add(experience)
    teller.tell(3, [teller.record(), [(7, 1, 2), (5, 0, 1)]])
    assert OutcomeLog(store, 1).read(3) == {5: (1, 3), 6: (0, 1), 7: (1, 2)}
    job = job_with(store)
    job.config.data.solved_rate = SolvedRate(solved_above=-0.5)  # as for rewards of -1 and 1
    of_negative = OutcomeTeller(job, is_leader=False)
    of_negative.add(experience.with_fields(rewards=torch.tensor([-1.0, 1.0, 1.0, 0.0, 1.0])))
    assert of_negative.record() == [(5, 1, 2), (6, 1, 1)]


def test_rates_of_other_rows_are_refused():
    run = Run(lead=0, num_ranks=1)
    state = run.ranks[0].state()
    other = SolvedRateRows(by_solved_rate([25], 4), run.log, lead=0, scoring=0, waiter=ShortPatience(), first_window=0)
    with pytest.raises(CheckpointError, match=r"26 rows in 2 sources.*data.train has 25 rows in 1"):
        other.resume([state])
