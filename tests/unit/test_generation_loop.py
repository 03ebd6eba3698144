"""Tests of the prompts of an engine, and of the finished groups in a chunk."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rltrain.data.experience import assign_groups
from rltrain.rollout import generation_loop as tickets_module
from rltrain.rollout.generation_loop import CompletionLog, Finished, SharedAssignment, StaticAssignment, StreamRules
from rltrain.rollout.rollout_state import Consumed
from rltrain.runtime.job_store import POLL_S, poll
from tests.support.generation_loops import NUM_SAMPLES, Chunk, Setting, positions
from tests.support.shared_store import LIMIT_S, ShortPatience, on_ranks, open_store


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    with open_store() as store:
        yield store


def assert_all_drawn_once(by_engine: list[list[Chunk]], num_groups: int) -> None:
    """Expects the same chunks on every rank, and every group whole on the one engine that generated it."""
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


def test_replicas_are_balanced_by_what_they_compute(store):
    """Group n has a prompt of n + 1 tokens and two responses. With shared prefixes the prompt is computed once."""
    setting = Setting(per_step=12, num_engines=2, shares_prefixes=True, length_of=lambda number: 13 - number // 2)
    finished, _ = setting.run(store)[0][0]
    assert [entry.num_tokens for entry in finished] == [n + 1 + 2 * (13 - n) for n in range(12)]
    counts = torch.tensor([entry.num_tokens for entry in finished])
    replicas = assign_groups(counts, 2)
    computed = [int(counts[replicas == own].sum()) for own in (0, 1)]
    assert abs(computed[0] - computed[1]) <= 2


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_engines_share_a_step_and_agree_on_its_chunks(store, shared, num_chunks):
    setting = Setting(num_steps=4, num_chunks=num_chunks, num_engines=2, shared=shared, step_s=lambda engine: 1e-4)
    assert_all_drawn_once(setting.run(store), 24)


def test_chunks_come_in_the_order_of_completion(store):
    """Long responses do not delay full chunks."""
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
        per_step=24, num_engines=2, length_of=lambda number: 5, step_s=lambda engine: [5e-3, 5e-4][engine], num_slots=2
    )
    slow, fast = setting.run(store)
    assert_all_drawn_once([slow, fast], 24)
    assert len(fast[0][1]) > 2 * len(slow[0][1])


def test_slots_that_a_tail_leaves_idle_take_groups_of_the_next_step(store):
    """Group 0 is long. Groups of the next step finish before it, and their own task hands them over."""
    setting = Setting(per_step=2, num_steps=2, ahead=2, length_of=lambda number: 60 if number < 2 else 2, num_slots=8)
    loop = setting.loop(0, store)
    finished, drawn = loop.run(0, 0)
    assert positions(drawn) == [0, 1]
    assert {*loop.drawn} == {2, 3}, "they are done and kept for their step"
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
    """It moves if fresh enough weights for the next step arrive in flight."""
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
    assert loop.groups.engine.started.count(0) == 2, "continued once, not begun again"
    assert len(loop.groups.begun) == 0


def test_suspended_groups_go_on_also_where_no_new_ones_may_begin(store):
    """An evaluation in the middle of a step suspends groups like this."""
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
    """Tasks end and groups begin by the generated tokens, never by the clock. The clock jumps at random here."""
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
    """Otherwise the actor would wait at the sync for the slowest engine."""
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
        assert taken.wait(LIMIT_S / 2), "the waiting engine did not join"

    assert_all_drawn_once([[chunk] for chunk in on_ranks(store, engine, 2)], 2)


def test_a_sync_that_is_due_at_the_end_of_a_task_comes_first(store):
    setting = Setting(per_step=1, length_of=lambda number: 1, num_slots=2)
    loop = setting.loop(0, store)
    loop.heartbeat.advance = lambda: setting.versions.append(1) if loop.groups.engine.policy_version == 0 else None
    loop.run(0, 0)
    assert loop.groups.engine.policy_version == 1


def group(position: int) -> Finished:
    return Finished(position, num_tokens=10 + position, num_response_tokens=position, engine=position % 3)


def test_a_chunk_is_full_with_its_last_ticket(store):
    completion_log = CompletionLog(store, per_chunk=2, num_readers=1, chunks_per_log=99)
    completion_log.add("step 0", group(5))
    assert not completion_log.is_full("step 0", 0) and completion_log.read("step 0", 0) is None
    completion_log.add("step 0", group(3))
    assert completion_log.is_full("step 0", 0) and not completion_log.is_full("step 0", 1)
    assert completion_log.read("step 0", 0) == [group(3), group(5)], "sorted by position, not by time"


def test_logs_do_not_mix(store):
    completion_log = CompletionLog(store, per_chunk=1, num_readers=1, chunks_per_log=99)
    completion_log.add("step 1", group(9))
    assert not completion_log.is_full("step 0", 0)
    completion_log.add("step 0", group(4))
    assert completion_log.read("step 0", 0) == [group(4)]
    assert completion_log.read("step 1", 0) == [group(9)]


def test_a_drawn_ticket_may_still_have_to_be_written(store):
    """The counter is raised first. A reader of a full counter waits for the entry."""
    completion_log = CompletionLog(store, per_chunk=2, num_readers=2, chunks_per_log=99)
    completion_log.add("step 0", group(0))
    completion_log.store.add("step 0/count", 1)
    assert completion_log.is_full("step 0", 0)
    assert completion_log.read("step 0", 0) is None
    completion_log.store.append("step 0/0", "1:11:1:1;")
    assert completion_log.read("step 0", 0) == [group(0), group(1)]


def test_a_rank_knows_of_its_own_tickets_without_looking(store, monkeypatch):
    """It reads the other ranks' entries in the store at most every few milliseconds."""
    now_s = 100.0
    monkeypatch.setattr(tickets_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    mine, others = (CompletionLog(store, per_chunk=1, num_readers=2, chunks_per_log=99) for _ in range(2))
    assert not mine.is_full("run", 0), "the last look was just before"
    mine.add("run", group(0))
    assert mine.is_full("run", 0) and not mine.is_full("run", 1)
    others.add("run", group(1))
    assert not mine.is_full("run", 1), "visible only at the next look"
    now_s += 2 * POLL_S
    assert mine.is_full("run", 1)


def test_engines_that_finish_at_the_same_time_agree_on_every_chunk(store):
    num_ranks, per_chunk, num_chunks = 4, 3, 8

    def engine(rank: int, own: dist.Store) -> list[list[Finished]]:
        completion_log = CompletionLog(own, per_chunk, num_readers=num_ranks, chunks_per_log=99)
        rng = random.Random(rank)
        for position in range(rank, per_chunk * num_chunks, num_ranks):
            completion_log.add("run", group(position))
            time.sleep(rng.random() * 1e-3)
        return [
            poll(ShortPatience(), lambda chunk=chunk: completion_log.read("run", chunk), "a chunk", [])
            for chunk in range(num_chunks)
        ]

    seen = on_ranks(store, engine, num_ranks)
    assert all(chunks == seen[0] for chunks in seen)
    assert all(len(chunk) == per_chunk for chunk in seen[0])
    assert Counter(entry for chunk in seen[0] for entry in chunk) == Counter(map(group, range(per_chunk * num_chunks)))


def test_a_chunk_is_deleted_once_all_have_read_it(store):
    first, second = (CompletionLog(store, per_chunk=1, num_readers=2, chunks_per_log=99) for _ in range(2))
    first.add("step 0", group(0))
    before = store.num_keys()
    assert first.read("step 0", 0) == [group(0)]
    assert store.num_keys() > before - 1, "the other reader has not read it yet"
    assert second.read("step 0", 0) == [group(0)]
    assert not first.store.check(["step 0/0"]) and not first.store.check(["step 0/0/read"])


def test_nothing_is_left_of_a_log_that_is_complete_and_read(store):
    completion_log = CompletionLog(store, per_chunk=2, num_readers=1, chunks_per_log=2)
    before = store.num_keys()
    for position in range(4):
        completion_log.add("step 0", group(position))
    assert completion_log.read("step 0", 0) and completion_log.is_full("step 0", 1), (
        "the count continues until the last chunk"
    )
    completion_log.read("step 0", 1)
    assert store.num_keys() == before


@given(st.integers(1, 5), st.integers(0, 20), st.lists(st.integers(0, 7), max_size=6))
def test_a_fixed_deal_gives_every_position_to_one_engine_whatever_its_speed(num_engines, start, growth):
    max_position = start
    assignments = [StaticAssignment(engine, num_engines, start) for engine in range(num_engines)]
    dealt: list[int] = []
    for more in growth:
        max_position += more
        for engine, assignment in enumerate(assignments):
            claimed = assignment.claim(room=0, max_position=max_position)
            assert all(position % num_engines == engine for position in claimed)
            dealt += claimed
    assert sorted(dealt) == list(range(start, max_position))


def test_a_shared_deal_goes_to_who_has_room(store):
    fast, slow = SharedAssignment(store), SharedAssignment(store)
    assert slow.claim(room=1, max_position=10) == [0]
    assert fast.claim(room=3, max_position=10) == [1, 2, 3]
    assert slow.claim(room=0, max_position=10) == []
    assert fast.claim(room=2, max_position=10) == [4, 5]


def test_a_position_beyond_the_horizon_is_held_until_the_horizon_has_moved(store):
    assignment, other = SharedAssignment(store), SharedAssignment(store)
    assert assignment.claim(room=5, max_position=2) == [0, 1]
    assert assignment.held == [2]
    assert assignment.claim(room=5, max_position=2) == []
    assert other.claim(room=5, max_position=2) == []
    assert (assignment.held, other.held) == ([2], [3]), "a second request takes no further position"
    assert other.claim(room=1, max_position=4) == [3]
    assert assignment.claim(room=2, max_position=5) == [2, 4]


def test_what_is_held_keeps_until_there_is_room(store):
    assignment = SharedAssignment(store)
    assert assignment.claim(room=1, max_position=0) == []
    assert assignment.claim(room=0, max_position=5) == []
    assert assignment.claim(room=1, max_position=5) == [0]


def test_a_resumed_run_goes_on_from_its_first_position(store):
    assert SharedAssignment(store, start=40).claim(room=2, max_position=42) == [40, 41]
    assert StaticAssignment(1, 2, start=40).claim(room=0, max_position=44) == [41, 43]


def test_engines_of_unequal_speed_share_all_positions_out(store):
    """There are several horizons and room for one group at a time. The other engines finish three groups per group of
    the slow one."""
    num_engines, per_step, num_steps = 3, 12, 4

    def engine(rank: int, own: dist.Store) -> list[list[int]]:
        assignment, claimed = SharedAssignment(own), []
        done = dist.PrefixStore("done", own)
        for step in range(num_steps):
            claimed.append([])
            while done.add(f"step {step}", 0) < per_step:
                positions = assignment.claim(1, max_position=(step + 1) * per_step)
                claimed[-1] += positions
                others_did = done.add(f"step {step}", len(positions)) + 3
                while rank == 0 and done.add(f"step {step}", 0) < min(others_did, per_step):
                    time.sleep(1e-3)
        return claimed

    by_engine = on_ranks(store, engine, num_engines)
    for step in range(num_steps):
        dealt = Counter(position for claimed in by_engine for position in claimed[step])
        assert dealt == Counter(range(step * per_step, (step + 1) * per_step))
    slow, *fast = (sum(map(len, claimed)) for claimed in by_engine)
    assert 3 * slow <= sum(fast), "fast ones take more"


OWN_LOGS = StreamRules(num_groups=24, per_step=6, num_chunks=3)
SHARED = StreamRules(num_groups=24, per_step=6, num_chunks=3, shared_log="run", done=Consumed(6), num_ahead=4)


def test_a_step_of_its_own_log_takes_the_groups_at_its_own_positions():
    assert [OWN_LOGS.log_of(position) for position in (0, 5, 6, 23)] == ["step 0", "step 0", "step 1", "step 3"]
    assert OWN_LOGS.entries_of(2, 1) == ("step 2", 1)
    assert (OWN_LOGS.per_chunk, OWN_LOGS.chunks_per_log) == (2, 3)


def test_steps_that_share_a_log_take_what_is_done_next():
    assert {SHARED.log_of(position) for position in range(24)} == {"run"}
    entries = [SHARED.entries_of(step, chunk) for step in range(1, 4) for chunk in range(3)]
    assert entries == [("run", number) for number in range(SHARED.chunks_per_log)], "from the first step drawn here"


@pytest.mark.parametrize("version", [None, 0, 3])
def test_nothing_is_begun_beyond_the_stream(version):
    assert [OWN_LOGS.max_position(step, version) for step in range(4)] == [6, 12, 18, 24]
    assert [SHARED.max_position(step, version) for step in range(4)] == [10, 16, 22, 24]


def test_weights_have_to_be_fresh_enough_for_the_next_step_where_that_is_asked():
    rules = StreamRules(num_groups=24, per_step=6, num_ahead=6, max_staleness=1)
    assert [rules.max_position(2, version) for version in (None, 0, 1, 2, 3)] == [18, 18, 18, 24, 24]
    assert rules.max_position(0, 0) == 12
    assert rules.max_position(0, None) == 6, "incomplete weights do not count as version 0"


@given(st.sets(st.integers(0, 30), max_size=20), st.data())
def test_a_run_takes_the_positions_that_are_open_and_the_first_ones_first(taken, data):
    """Some of the positions that are not open were dropped."""
    num_dropped = len(taken) % 4 + 4 * data.draw(st.integers(0, len(taken) // 4))
    done = Consumed().after(sorted(taken)[num_dropped:], sorted(taken)[:num_dropped])
    rules = StreamRules(num_groups=40, per_step=4, done=done)
    still_open = [position for position in range(100) if position not in taken]
    for step in range(rules.first_step, 10):
        begun = [position for position in still_open if position < rules.max_position(step, None)]
        assert begun == still_open[: (step + 1 - rules.first_step) * 4], "independent of earlier drops"
        assert {rules.log_of(position) for position in begun[-4:]} == {f"step {step}"}
        assert rules.max_position(step, None, num_dropped=2) == still_open[len(begun) + 2]
