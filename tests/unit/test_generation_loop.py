"""The loop of a generate task: engines, here threads over one real store, draw the chunks of a stream of groups."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

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
from rltrain.rollout.rollout_state import EngineStart
from rltrain.rollout.sample import SampleGroup
from tests.unit.shared_store import LIMIT_S, ShortPatience, on_ranks, open_store
from tests.unit.test_groups import prompt_groups

NUM_SAMPLES = 2
Chunk = tuple[list[Finished], list[SampleGroup]]


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    with open_store() as store:
        yield store


def lengths_in_waves(number: int) -> int:
    """Of sample `number`: long-tailed, 1 to 40 tokens."""
    return 40 if number % 14 == 0 else 1 + number * 7 % 11


@dataclass
class Setting:
    """What all engines of a test have in common: a stream of groups of which each step takes `per_step`."""

    per_step: int = 6
    num_chunks: int = 1
    num_engines: int = 1
    partial: bool = False
    length_of: Callable[[int], int] = lengths_in_waves
    step_s: Callable[[int], float] = lambda engine: 0.0
    shared: bool = True
    num_slots: int = 4
    versions: list[int] = field(default_factory=list)
    """Taken by `sync`, one after the other, as soon as they are there."""

    num_steps: int = 1
    ahead: int = 0
    """Groups of the next steps that may be begun."""
    max_staleness: int | None = None

    @property
    def rules(self) -> StreamRules:
        return StreamRules(
            self.num_steps * self.per_step,
            self.per_step,
            self.num_chunks,
            "run" if self.partial else None,
            num_ahead=self.ahead,
            max_staleness=self.max_staleness,
        )

    def loop(self, engine: int, store: dist.Store, start: EngineStart = EngineStart()) -> GenerationLoop:  # noqa: B008 - it is frozen
        groups = prompt_groups(self.length_of, NUM_SAMPLES, self.num_slots)
        assignment: PromptAssignment = StaticAssignment(engine, self.num_engines, start.next_position, start.returned)
        if self.shared:
            assignment = SharedAssignment(store, start.next_position, start.returned)

        def sync() -> None:
            groups.engine.policy_version = self.versions.pop(0)

        rules = replace(self.rules, done=start.state.consumed)
        loop = GenerationLoop(
            groups,
            assignment,
            CompletionLog(store, rules.per_chunk, self.num_engines, rules.chunks_per_log),
            LeaderDecisions(None),
            ShortPatience(),
            SimpleNamespace(advance=lambda: time.sleep(self.step_s(engine))),
            rules,
            engine=engine,
            ranks=[other for other in range(self.num_engines) if other != engine],
            in_flight=SimpleNamespace(is_due=lambda: bool(self.versions), join=sync),
        )
        loop.resume(start.state)
        return loop

    def run(self, store: dist.TCPStore) -> list[list[Chunk]]:
        """By engine, what it got of every chunk of every step."""

        def engine(rank: int, own: dist.Store) -> list[Chunk]:
            loop = self.loop(rank, own)
            return [loop.run(step, chunk) for step in range(self.num_steps) for chunk in range(self.num_chunks)]

        return on_ranks(store, engine, self.num_engines)


def positions(groups: list[Finished] | list[SampleGroup]) -> list[int]:
    return [group.position for group in groups]


def assert_all_drawn_once(by_engine: list[list[Chunk]], num_groups: int) -> None:
    """Every rank sees the same chunks, and every group of them is at the one engine that drew it, whole."""
    assert all(
        [finished for finished, _ in chunks] == [finished for finished, _ in by_engine[0]] for chunks in by_engine
    )
    listed = [entry for finished, _ in by_engine[0] for entry in finished]
    assert Counter(positions(listed)) == Counter(range(num_groups))
    held = {group.position: group for chunks in by_engine for _, drawn in chunks for group in drawn}
    assert sum(len(drawn) for chunks in by_engine for _, drawn in chunks) == len(held) == num_groups
    for entry in listed:
        group = held[entry.position]
        assert (entry.num_tokens, entry.num_response_tokens) == (group.num_tokens, group.num_response_tokens)
        for sample in group.samples:
            assert list(sample.tokens) == [1000 * sample.id + t for t in range(len(sample.tokens))]


def test_one_engine_draws_step_after_step(store):
    chunks = Setting(num_steps=3).run(store)[0]
    assert [positions(drawn) for _, drawn in chunks] == [[*range(6)], [*range(6, 12)], [*range(12, 18)]]
    assert_all_drawn_once([chunks], 18)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_engines_share_a_step_and_agree_on_its_chunks(store, shared, num_chunks):
    setting = Setting(num_steps=4, num_chunks=num_chunks, num_engines=2, shared=shared, step_s=lambda engine: 1e-4)
    assert_all_drawn_once(setting.run(store), 24)


def test_chunks_come_in_the_order_of_completion(store):
    """Long responses do not hold up the chunks that are full without them."""
    length = {0: 30, 1: 1, 2: 9, 3: 3}
    setting = Setting(per_step=4, num_chunks=4, length_of=lambda number: length[number // 2], num_slots=8)
    chunks = setting.run(store)[0]
    assert [positions(finished) for finished, _ in chunks] == [[1], [3], [2], [0]]


def test_an_engine_that_holds_none_of_a_chunk_learns_of_it_all_the_same(store):
    setting = Setting(per_step=2, num_engines=2, shared=False, length_of=lambda number: 20 if number < 2 else 1)
    (first, second) = setting.run(store)
    assert positions(first[0][0]) == positions(second[0][0]) == [0, 1]
    assert (positions(first[0][1]), positions(second[0][1])) == ([0], [1])


def test_a_fast_engine_takes_prompts_from_a_slow_one(store):
    setting = Setting(
        per_step=24,
        num_engines=2,
        length_of=lambda number: 5,
        step_s=lambda engine: [5e-3, 5e-4][engine],
        num_slots=2,
    )
    slow, fast = setting.run(store)
    assert_all_drawn_once([slow, fast], 24)
    assert len(fast[0][1]) > 2 * len(slow[0][1])


def test_slots_that_a_tail_leaves_idle_take_groups_of_the_next_step(store):
    """Group 0 is long; the groups of the next step are done before it and handed over in their own task."""
    setting = Setting(per_step=2, num_steps=2, ahead=2, length_of=lambda number: 60 if number < 2 else 2, num_slots=8)
    loop = setting.loop(0, store)
    finished, drawn = loop.run(0, 0)
    assert positions(drawn) == [0, 1]
    assert {*loop.drawn} == {2, 3}, "done, and kept for their step"
    num_steps = loop.groups.engine.num_steps
    finished, drawn = loop.run(1, 0)
    assert positions(finished) == positions(drawn) == [2, 3]
    assert loop.groups.engine.num_steps == num_steps, "there was nothing left to decode"
    assert not loop.drawn


def test_no_group_is_begun_before_the_horizon_allows_it(store):
    setting = Setting(per_step=2, num_steps=2, length_of=lambda number: 30, num_slots=8)
    loop = setting.loop(0, store)
    loop.run(0, 0)
    assert {number // NUM_SAMPLES for number in loop.groups.engine.started} == {0, 1}


def test_the_horizon_may_move_while_a_task_runs(store):
    """It does when weights that are fresh enough for the next step come in flight."""
    setting = Setting(
        per_step=2,
        num_steps=2,
        ahead=2,
        max_staleness=0,
        length_of=lambda number: 200 if number < 2 else 1,
        num_slots=8,
    )
    loop = setting.loop(0, store)
    loop.heartbeat.advance = lambda: setting.versions.append(1) if loop.groups.engine.num_steps == 50 else None
    loop.run(0, 0)
    assert loop.groups.engine.started[:4] == [0, 1, 2, 3]
    assert sorted(loop.groups.engine.started) == list(range(8))
    versions = {sample.policy_versions for group in loop.drawn.values() for sample in group.samples}
    assert versions == {(1,)}, "begun before the weights were fresh enough"


def test_a_partial_rollout_ends_with_enough_groups_and_goes_on_with_the_others(store):
    setting = Setting(
        per_step=2, num_steps=3, ahead=1, partial=True, length_of=lambda number: 50 if number < 2 else 3, num_slots=8
    )
    loop = setting.loop(0, store)
    finished, _ = loop.run(0, 0)
    assert positions(finished) == [1, 2], "group 0 is not waited for"
    assert len(loop.groups.begun) == 1
    loop.groups.suspend()
    assert positions(loop.run(1, 0)[0]) == [3, 4]
    assert positions(loop.run(2, 0)[0]) == [0, 5]
    assert loop.groups.engine.started.count(0) == 2, "continued once, not begun anew"
    assert len(loop.groups.begun) == 0


def test_suspended_groups_go_on_also_where_no_new_ones_may_begin(store):
    """As after an evaluation in the middle of a step."""
    setting = Setting(per_step=2, num_chunks=2, length_of=lambda number: 9 if number < 2 else 1)
    loop = setting.loop(0, store)
    assert positions(loop.run(0, 0)[1]) == [1]
    loop.groups.suspend()
    assert positions(loop.run(0, 1)[1]) == [0]


@pytest.mark.parametrize("num_engines", [1, 2])
def test_over_many_partial_steps_nothing_is_lost_or_drawn_twice(store, num_engines):
    setting = Setting(
        per_step=4, num_steps=12, ahead=3, num_chunks=2, num_engines=num_engines, partial=True, step_s=lambda _: 1e-4
    )
    assert_all_drawn_once(setting.run(store), 48)


@pytest.mark.parametrize("num_engines", [1, 3])
def test_over_many_steps_with_look_ahead_nothing_is_lost_or_drawn_twice(store, num_engines):
    setting = Setting(
        per_step=4, num_steps=12, ahead=4, num_chunks=2, num_engines=num_engines, step_s=lambda engine: engine * 2e-4
    )
    assert_all_drawn_once(setting.run(store), 48)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("partial", [True, False])
def test_one_engine_alone_does_the_same_however_long_its_decode_steps_take(store, monkeypatch, shared, partial):
    """Tasks end and groups begin by what has been drawn, never by the clock: here it jumps at random."""
    setting = Setting(per_step=4, num_steps=8, ahead=3, num_chunks=2, partial=partial, shared=shared)
    real, ahead_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead_s)

    def draw(name: str, jump_s: Callable[[], float]) -> list[Chunk]:
        def jump() -> None:
            nonlocal ahead_s
            ahead_s += jump_s()

        loop = setting.loop(0, dist.PrefixStore(name, store))
        loop.heartbeat.advance = jump
        chunks = []
        for step in range(8):
            loop.groups.engine.policy_version = step
            chunks += [loop.run(step, chunk) for chunk in range(2)]
        return chunks

    slow = draw("slow", lambda: 0.01)
    if partial:
        assert any(len({*s.policy_versions}) > 1 for _, drawn in slow for group in drawn for s in group.samples)
    for seed in range(5):
        rng = random.Random(seed)
        assert draw(f"{seed}", lambda rng=rng: rng.choice([0.0, 0.0, 5e-4, 4e-3])) == slow


def test_new_weights_are_taken_between_decode_steps_and_running_responses_go_on(store):
    setting = Setting(per_step=1, length_of=lambda number: 400, num_slots=2)
    loop = setting.loop(0, store)
    loop.heartbeat.advance = lambda: setting.versions.append(1) if loop.groups.engine.num_steps == 50 else None
    _, (group,) = loop.run(0, 0)
    for sample in group.samples:
        versions = list(sample.policy_versions)
        assert versions == sorted(versions) and {*versions} == {0, 1}
        assert versions.index(1) >= 50
        assert len(sample.tokens) == 400, "every token once"
    assert loop.groups.engine.started == [0, 1], "nothing was sampled again"


def test_new_weights_are_taken_while_an_engine_waits_for_the_last_groups_of_another(store):
    """Otherwise the actor, which has come to the sync, would wait for the slowest engine."""
    setting = Setting(per_step=2, num_engines=2, shared=False, length_of=lambda number: 1 if number < 2 else 200)
    taken = threading.Event()

    def engine(rank: int, own: dist.Store) -> Chunk:
        loop = setting.loop(rank, own)
        if rank == 0:
            loop.in_flight.is_due = lambda: bool(loop.drawn) and not taken.is_set()
            loop.in_flight.join = taken.set
        else:
            loop.in_flight.is_due = lambda: False
            loop.heartbeat.advance = lambda: None if taken.is_set() or loop.groups.engine.num_steps < 199 else wait()
        return loop.run(0, 0)

    def wait() -> None:
        assert taken.wait(LIMIT_S / 2), "the engine that waits did not join"

    assert_all_drawn_once([[chunk] for chunk in on_ranks(store, engine, 2)], 2)


def test_a_sync_that_is_due_at_the_end_of_a_task_comes_first(store):
    setting = Setting(per_step=1, length_of=lambda number: 1, num_slots=2)
    loop = setting.loop(0, store)
    loop.heartbeat.advance = lambda: setting.versions.append(1) if loop.groups.engine.policy_version == 0 else None
    loop.run(0, 0)
    assert loop.groups.engine.policy_version == 1
