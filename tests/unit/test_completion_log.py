"""Chunks of finished groups: all engines agree on them, whoever finished what at which moment."""

import random
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from rltrain.rollout import generation_loop as tickets_module
from rltrain.rollout.generation_loop import CompletionLog, Finished
from rltrain.runtime.job_store import POLL_S, poll
from tests.unit.shared_store import ShortPatience, on_ranks, open_store


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    with open_store() as store:
        yield store


def group(position: int) -> Finished:
    return Finished(position, num_tokens=10 + position, num_response_tokens=position, engine=position % 3)


def test_a_chunk_is_full_with_its_last_ticket(store):
    completion_log = CompletionLog(store, per_chunk=2, num_readers=1, chunks_per_log=99)
    completion_log.add("step 0", group(5))
    assert not completion_log.is_full("step 0", 0) and completion_log.read("step 0", 0) is None
    completion_log.add("step 0", group(3))
    assert completion_log.is_full("step 0", 0) and not completion_log.is_full("step 0", 1)
    assert completion_log.read("step 0", 0) == [group(3), group(5)], "by position, not by when they got done"


def test_logs_do_not_mix(store):
    completion_log = CompletionLog(store, per_chunk=1, num_readers=1, chunks_per_log=99)
    completion_log.add("step 1", group(9))
    assert not completion_log.is_full("step 0", 0)
    completion_log.add("step 0", group(4))
    assert completion_log.read("step 0", 0) == [group(4)]
    assert completion_log.read("step 1", 0) == [group(9)]


def test_a_drawn_ticket_may_still_have_to_be_written(store):
    """The counter comes first: who sees it full waits for the entry."""
    completion_log = CompletionLog(store, per_chunk=2, num_readers=1, chunks_per_log=99)
    completion_log.add("step 0", group(0))
    completion_log.store.add("step 0/count", 1)
    assert completion_log.is_full("step 0", 0)
    assert completion_log.read("step 0", 0) is None
    completion_log.store.append("step 0/0", "1:11:1:1;")
    assert completion_log.read("step 0", 0) == [group(0), group(1)]


def test_a_rank_knows_of_its_own_tickets_without_looking(store, monkeypatch):
    """The store, in which others enter theirs, is looked into every few milliseconds at most."""
    now_s = 100.0
    monkeypatch.setattr(tickets_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    mine, others = (CompletionLog(store, per_chunk=1, num_readers=2, chunks_per_log=99) for _ in range(2))
    assert not mine.is_full("run", 0), "just looked"
    mine.add("run", group(0))
    assert mine.is_full("run", 0) and not mine.is_full("run", 1)
    others.add("run", group(1))
    assert not mine.is_full("run", 1), "seen with the next look"
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
    assert store.num_keys() > before - 1, "the other has yet to read it"
    assert second.read("step 0", 0) == [group(0)]
    assert not first.store.check(["step 0/0"]) and not first.store.check(["step 0/0/read"])


def test_nothing_is_left_of_a_log_that_is_complete_and_read(store):
    completion_log = CompletionLog(store, per_chunk=2, num_readers=1, chunks_per_log=2)
    before = store.num_keys()
    for position in range(4):
        completion_log.add("step 0", group(position))
    assert completion_log.read("step 0", 0) and completion_log.is_full("step 0", 1), "counted on until the last chunk"
    completion_log.read("step 0", 1)
    assert store.num_keys() == before
