"""Seconds of work are told from seconds of waiting, in whatever way tasks and waits lie within each other."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from rltrain.cli.report_run import read_run
from rltrain.observability.reporter import RoleWork
from rltrain.observability.trace import Trace, TraceFile
from rltrain.roles.role import Operations
from rltrain.runtime.heartbeat import TaskClock, TaskTime
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.world import World
from rltrain.schedule.order import Entry
from rltrain.trainer import Trainer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_counts_once_to_the_innermost_task_or_wait():
    now = Clock()
    clock = TaskClock(now)
    with clock.waiting("its turn"):
        now.now += 1000
    with clock.task("generate") as generate:
        now.now += 1
        with clock.waiting("the last groups"):
            now.now += 20
            with clock.task("weight_sync") as sync:
                with clock.waiting("the others"), clock.waiting("one of them"):
                    now.now += 300
                now.now += 4000
            now.now += 30
        now.now += 2
    now.now += 1000
    assert generate == TaskTime(work_s=3, wait_s=50)
    assert sync == TaskTime(work_s=4000, wait_s=300)


def test_a_task_or_wait_that_fails_is_over():
    now = Clock()
    clock = TaskClock(now)
    with pytest.raises(KeyError), clock.task("update"), clock.waiting("the others"):
        raise KeyError
    with clock.task("score") as score:
        now.now += 1
    assert score == TaskTime(work_s=1)


def test_waits_are_spans_within_their_task(tmp_path):
    trace = TraceFile(tmp_path, 0, ("actor",))
    clock = TaskClock()
    clock.span = trace.span
    with (
        clock.waiting("its turn"),
        trace.span("weight_sync", role="actor"),
        clock.task("weight_sync"),
        clock.waiting("the others"),
        clock.waiting("one of them"),
    ):
        pass
    trace.close()
    (rank,) = read_run(tmp_path).ranks
    assert [(span.name, span.category, span.depth, span.arguments) for span in rank.spans] == [
        ("weight_sync", "task", 0, {"role": "actor"}),
        ("the others", "wait", 1, {"task": "weight_sync"}),
    ]


@pytest.fixture
def job_store() -> JobStore:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    return JobStore(World(0, 2, 0, 2, torch.device("cpu"), store, timeout_s=60.0))


def test_waits_by_name_are_counted_and_what_is_there_already_is_not_waited_for(job_store):
    clock, noted = job_store.heartbeat.task_clock, []

    @contextmanager
    def note(what: str, category: str, task: str):
        noted.append((what, category, task))
        yield

    clock.span = note
    there, arrived, waiter = threading.Event(), threading.Event(), Waiter(job_store, report_s=60)
    there.set()
    job_store.put("verdict", True)
    with clock.task("score") as spent:
        waiter.until(there.wait, "what is there", [1])
        job_store.get("verdict", waiting_for="a verdict that is there")
        assert noted == []
        threading.Timer(0.1, arrived.set).start()
        waiter.until(arrived.wait, "rewards", [1])
        threading.Timer(0.1, job_store.put, ("late", True)).start()
        job_store.get("late", waiting_for="a late verdict")
    assert noted == [("rewards", "wait", "score"), ("a late verdict", "wait", "score")]
    assert spent.wait_s >= 0.15


def test_a_task_reports_its_work_and_its_waits_and_not_the_sync_that_an_engine_joins_in_the_middle(job_store):
    now, reported = Clock(), {}
    clock = job_store.heartbeat.task_clock = TaskClock(now)
    order = [Entry("task", "generate", ("rollout",), 1), Entry("task", "weight_sync", ("actor", "rollout"), 2)]

    def generate(step: int, chunk: int) -> dict[str, float]:
        now.now += 1
        trainer._join_sync(1)
        with clock.waiting("the last groups"):
            now.now += 20
        return {"rollout/response_tokens": 7}

    def weight_sync(step: int, chunk: int) -> None:
        with clock.waiting("the others"):
            now.now += 300
        now.now += 4000

    def is_sync(entry: Entry) -> bool:
        return entry.name == "weight_sync"

    trainer: Any = Trainer.__new__(Trainer)
    trainer.order, trainer.rank, trainer.hosted, trainer.trace = order, 0, {"rollout"}, Trace()
    trainer.job = SimpleNamespace(
        heartbeat=job_store.heartbeat, world=job_store.world, leader_of=lambda role: 0, operations=Operations()
    )
    trainer.work = RoleWork()
    trainer.roles, trainer.joint_tasks = {"rollout": SimpleNamespace(generate=generate)}, {"weight_sync": weight_sync}
    trainer.offloader = SimpleNamespace(enter=lambda position: None, changed=lambda role, part: None)
    trainer.in_flight = SimpleNamespace(
        has=is_sync, is_joined=is_sync, announce=lambda entry: None, come_to=lambda position, entry: False
    )
    trainer.reporter = SimpleNamespace(add=lambda step, metrics: reported.update({step: metrics}))
    trainer.transfers = SimpleNamespace(post=None, wait=None)
    cast(Trainer, trainer)._execute(0)
    assert reported == {
        1: {"perf/generate_s": 1, "perf/generate_wait_s": 20, "rollout/response_tokens": 7},
        2: {"perf/weight_sync_s": 4000, "perf/weight_sync_wait_s": 300},
    }
