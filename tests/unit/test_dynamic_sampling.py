"""Groups that count only once a filter has kept them: every step ends by count, no group is lost or counted twice."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rltrain.rollout.generation_loop import (
    CompletionLog,
    Finished,
    GenerationLoop,
    LeaderDecisions,
    PromptAssignment,
    SharedAssignment,
    StaticAssignment,
    StreamRules,
)
from rltrain.rollout.groups import DropCount, Selection, Verdict
from rltrain.rollout.rollout_state import EngineStart, RolloutState, share_out
from rltrain.rollout.sample import SampleGroup
from tests.unit.shared_store import Jobs, ShortPatience, open_store
from tests.unit.test_groups import prompt_groups

NUM_SAMPLES = 2
FRESH = EngineStart()
Chunk = tuple[list[Finished], list[SampleGroup]]


@dataclass
class ScriptedFilter:
    """Drops what `drops` says, and knows it `lag` looks after a group was finished."""

    drops: Callable[[int], bool]
    lag: int = 0
    looks: Counter[int] = field(default_factory=Counter)
    told: Counter[int] = field(default_factory=Counter)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    """(step, position)."""
    spared: list[tuple[int, int]] = field(default_factory=list)
    """Likewise."""

    def verdicts(self, groups: Mapping[int, SampleGroup], step: int) -> Iterable[Verdict]:
        known = [position for position in groups if self.looks[position] >= self.lag]
        self.looks.update(groups.keys())
        self.told.update(known)
        return [Verdict(position, "dull" if self.drops(position) else None, f"of {position}") for position in known]

    def drop(self, group: SampleGroup, step: int, reason: str) -> None:
        assert reason == "dull"
        self.dropped.append((step, group.position))

    def spare(self, group: SampleGroup, step: int, reason: str) -> None:
        self.spared.append((step, group.position))


@dataclass
class Setting:
    """What the engines of a run have in common."""

    drops: Callable[[int], bool]
    limit: int = 100
    per_step: int = 4
    num_steps: int = 3
    num_chunks: int = 1
    num_engines: int = 1
    shared: bool = False
    ahead: int = 0
    lag: int = 0
    length_of: Callable[[int], int] = lambda number: 1 + number * 7 % 5

    def loop(self, engine: int, store: dist.Store, start: EngineStart = FRESH) -> tuple[GenerationLoop, ScriptedFilter]:
        num_groups, done = self.num_steps * self.per_step, start.state.consumed
        rules = StreamRules(num_groups, self.per_step, self.num_chunks, "run", done, num_ahead=self.ahead)
        assignment: PromptAssignment = StaticAssignment(engine, self.num_engines, start.next_position, start.returned)
        if self.shared:
            assignment = SharedAssignment(store, start.next_position, start.returned)
        selection = Selection(DropCount(store, self.limit))
        loop = GenerationLoop(
            prompt_groups(self.length_of, NUM_SAMPLES),
            assignment,
            CompletionLog(store, rules.per_chunk, self.num_engines, rules.chunks_per_log),
            LeaderDecisions(None),
            ShortPatience(),
            SimpleNamespace(advance=lambda: None),
            rules,
            engine=engine,
            ranks=[other for other in range(self.num_engines) if other != engine],
            selection=selection,
        )
        loop.resume(start.state)
        selection.filter = ScriptedFilter(self.drops, self.lag)
        return loop, selection.filter

    def run(self, jobs: Jobs) -> list[tuple[list[Chunk], GenerationLoop, ScriptedFilter]]:
        """By engine."""

        def engine(rank: int, own: dist.Store) -> Any:
            loop, scripted = self.loop(rank, own)
            chunks = [loop.run(step, chunk) for step in range(self.num_steps) for chunk in range(self.num_chunks)]
            return chunks, loop, scripted

        return jobs.run(engine, self.num_engines)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with open_store() as store:
        yield Jobs(store, num_ranks=2)


def positions(groups: Iterable[Finished | SampleGroup]) -> list[int]:
    return [group.position for group in groups]


def test_others_are_drawn_in_the_place_of_those_that_are_dropped(jobs):
    """Odd ones are dull; nothing is begun that the step does not take, so the weights that draw it are the step's."""
    ((chunks, loop, scripted),) = Setting(lambda position: position % 2 == 1).run(jobs)
    assert [positions(drawn) for _, drawn in chunks] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert sorted(scripted.dropped) == [((p + 1) // 8, p) for p in range(1, 23, 2)]
    assert not loop.groups.begun and not loop.selection.undecided
    assert loop.consumed.num_dropped == 11 and loop.consumed.num_handed_over == 12


def test_a_step_ends_though_every_group_is_dull(jobs):
    """After the limit it takes what there is."""
    ((chunks, loop, scripted),) = Setting(lambda position: True, limit=3).run(jobs)
    assert [len(drawn) for _, drawn in chunks] == [4, 4, 4]
    assert Counter(step for step, _ in scripted.dropped) == {0: 3, 1: 3, 2: 3}
    assert Counter(step for step, _ in scripted.spared) == {0: 4, 1: 4, 2: 4}
    assert loop.selection.drops.total == 9


def test_what_is_known_of_a_group_is_kept_until_it_is_handed_over(jobs):
    setting = Setting(lambda position: position == 1, ahead=4)
    loop, _ = setting.loop(0, jobs.start(1)[0])
    _, drawn = loop.run(0, 0)
    assert {position: loop.selection.records[position] for position in positions(drawn)} == {
        position: f"of {position}" for position in positions(drawn)
    }
    assert loop.selection.records.keys() == {*positions(drawn), *loop.drawn}


@settings(max_examples=25, deadline=None)
@given(
    st.sets(st.integers(0, 40), max_size=25),
    st.sampled_from([0, 2, 100]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([0, 3]),
    st.sampled_from([0, 4]),
    st.sampled_from([1, 2]),
)
def test_every_group_is_handed_over_dropped_or_still_there(
    jobs, dull, limit, num_engines, shared, lag, ahead, num_chunks
):
    by_engine = Setting(
        dull.__contains__, limit, num_engines=num_engines, shared=shared, lag=lag, ahead=ahead, num_chunks=num_chunks
    ).run(jobs)
    (finished, *others) = [[entries for entries, _ in chunks] for chunks, _, _ in by_engine]
    assert all(other == finished for other in others), "all engines agree"
    assert [len(entries) for entries in finished] == [4 // num_chunks] * 3 * num_chunks
    handed_over = [entry.position for entries in finished for entry in entries]
    assert sorted(handed_over) == sorted(
        p for chunks, _, _ in by_engine for _, drawn in chunks for p in positions(drawn)
    )
    dropped = [position for _, _, scripted in by_engine for _, position in scripted.dropped]
    assert dull.issuperset(dropped)
    assert (
        max(Counter(step for _, _, scripted in by_engine for step, _ in scripted.dropped).values(), default=0) <= limit
    )
    held = [p for _, loop, _ in by_engine for p in (*loop.groups.begun, *loop.drawn, *loop.selection.undecided)]
    everything = Counter([*handed_over, *dropped, *held])
    assert everything == Counter(range(len(everything))), "each once, and none is left out"
    if not ahead:
        assert not held, "the step that began a group takes or drops it"
        if limit == 100:
            kept = [position for position in range(60) if position not in dull]
            assert sorted(handed_over) == kept[:12], "whatever the engines' speed"
    assert all(count == 1 for _, _, scripted in by_engine for count in scripted.told.values())
    (consumed,) = {loop.consumed for _, loop, _ in by_engine}
    unseen = [position for _, loop, _ in by_engine for position in loop.selection.unseen]
    assert consumed.num_dropped == len(dropped) - len(unseen)


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 40), max_size=25), st.sampled_from([0, 4]), st.sampled_from([0, 1]), st.integers(1, 3))
def test_a_run_that_goes_on_from_a_checkpoint_takes_what_it_would_have_taken(jobs, dull, ahead, lag, cut):
    """With one engine, at the same decode steps; what counts already is not asked for again."""
    setting = Setting(dull.__contains__, limit=3, ahead=ahead, lag=lag, num_steps=4)
    ((expected, _, whole),) = setting.run(jobs)
    loop, before = setting.loop(0, jobs.start(1)[0])
    found = [loop.run(step, 0) for step in range(cut)]
    state = RolloutState.from_contents(loop.state().contents())
    (start,) = share_out([state], 1)
    assert start.state.consumed.num_handed_over == 4 * cut
    resumed, after = setting.loop(0, jobs.start(1)[0], start)
    found += [resumed.run(step, 0) for step in range(cut, 4)]
    assert [positions(drawn) for _, drawn in found] == [positions(drawn) for _, drawn in expected]
    assert [drawn for _, drawn in found] == [drawn for _, drawn in expected]
    assert before.dropped + after.dropped == whole.dropped
    assert not {p for p in before.told if p in state.records} & after.told.keys()


@settings(max_examples=10, deadline=None)
@given(st.sets(st.integers(0, 40), max_size=25), st.sampled_from([0, 2]), st.sampled_from([0, 2]))
def test_engines_of_another_number_go_on_with_what_was_dropped(jobs, dull, ahead, lag):
    setting = Setting(dull.__contains__, num_engines=2, ahead=ahead, lag=lag, num_steps=4)

    def first(rank: int, own: dist.Store) -> Any:
        loop, scripted = setting.loop(rank, own)
        chunks = [loop.run(step, 0) for step in range(2)]
        return [chunk for chunk, _ in chunks], scripted.dropped, loop.state()

    by_engine = jobs.run(first, 2)
    (start,) = share_out([state for _, _, state in by_engine], 1)
    alone = Setting(setting.drops, num_steps=4, ahead=ahead, lag=lag)
    loop, scripted = alone.loop(0, jobs.start(1)[0], start)
    later = [loop.run(step, 0)[0] for step in (2, 3)]
    handed_over = [entry.position for entries in (*by_engine[0][0], *later) for entry in entries]
    dropped = [p for _, of_engine, _ in by_engine for _, p in of_engine] + [p for _, p in scripted.dropped]
    held = [*loop.groups.begun, *loop.drawn, *loop.selection.undecided]
    everything = Counter([*handed_over, *dropped, *held])
    assert everything == Counter(range(len(everything)))
    assert len(handed_over) == 16 and dull.isdisjoint(handed_over)


@pytest.mark.parametrize("limit", [0, 1])
def test_counts_of_steps_that_are_over_do_not_stay(limit: int) -> None:
    store = dist.HashStore()
    engines = [DropCount(store, limit) for _ in range(2)]
    for step in range(0, 60, 3):
        assert [engine.take(step) for engine in engines] == [limit > 0, False]
        assert store.num_keys() <= 2, "this step's, and that of all"
