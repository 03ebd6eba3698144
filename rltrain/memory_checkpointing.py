"""Saving a run in its nodes' memory: each rank's files there, and a copy of them on the next node."""

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from os import PRIO_PROCESS, setpriority
from typing import Any

import torch.distributed as dist

from rltrain.checkpoint.memory_files import fetch
from rltrain.checkpoint.node_memory import KEPT, MOST, NodeMemory, origins, records_of
from rltrain.checkpoint.run_files import RUN_FILE, FileRecord, record_of
from rltrain.checkpoint.run_writer import NICENESS, Target, Written
from rltrain.roles.role import Job, Metrics
from rltrain.runtime.machine import JobThread

logger = logging.getLogger(__name__)

LOOK_S = 0.05
"""Between two looks of a rank's thread for what it waits for; with many ranks more, as in liveness.polling."""
MAX_INCOMPLETE = MOST - KEPT
"""Steps that may be under way: older ones are given up, since newer ones are worth more."""
REMEMBERED = 8
"""Verdicts that stay in the store."""
COUNTS, GIVEN_UP = "counts", "given up"
"""The verdicts on a step."""


class MemoryCheckpointing:
    """One rank's part in it.

    The rank's writer writes its files into the node's memory. Then a thread of its own fetches those of the ranks of
    the node before that it keeps the copy of. Once all ranks have said that theirs are there, the job's leader makes
    the manifest, and every node's first rank lets its folder count. A rank that fails, or no room, costs that
    checkpoint and not the job.
    """

    def __init__(self, job: Job, memory: NodeMemory, report_steps_before: Callable[[], None]) -> None:
        self.job, self.memory, self.folder = job, memory, memory.folder
        self.report_steps_before = report_steps_before
        self.rank, self.per_node = job.world.rank, job.world.ranks_per_node
        self.store = dist.PrefixStore("memory_checkpoint", job.world.background)
        hosting = [*job.placement.hosting]
        self.hosting = hosting
        self.origins = origins(hosting, self.per_node).get(self.rank, [])
        """The ranks whose files this one copies."""
        of_node = [rank for rank in hosting if self._node(rank) == self._node(self.rank)]
        self.completes_node = self.rank == min(of_node, default=None)
        self._begun: dict[int, float] = {}
        """On the leader, the steps that are not complete, and when they were begun."""
        self._runs: dict[int, str] = {}
        self._decided: list[int] = []
        self._is_first = True
        self._next_look = 0.0
        self._metrics: Metrics = {}
        self._closing = threading.Event()
        self._saved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._every_s = max(LOOK_S, job.world.size / 1000)
        self._thread = JobThread(target=self._copy_steps, name="memory checkpoint copier", daemon=True)
        self._thread.start()

    def begin(self, step: int, run: Mapping[str, Any] | None) -> Target:
        """Where this rank's files of `step` go; `run` on the leader: what run.json is to say."""
        if run is not None:
            self._begun[step], self._runs[step] = time.perf_counter(), json.dumps(run, indent=1)
            for old in [*self._begun][:-MAX_INCOMPLETE]:
                self._decide(old, GIVEN_UP)
        return Target(self.folder.checkpoints.partial(step), self._report(step))

    def look(self) -> None:
        """On the leader: what all ranks have written and copied counts. To be called often; waits for nobody."""
        if not self._begun or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._every_s
        for step in [*self._begun]:
            if self.store.check(self._keys(step)):
                self._complete(step)

    def take_metrics(self) -> Metrics:
        """perf/memory_checkpoint_* since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """The run has come to its end. What is under way is dropped, and what is there removed. Collective over: all
        ranks."""
        self._closing.set()
        self._saved.put(None)
        self._thread.join()
        waiting = "all ranks to be done with checkpoints in memory"
        self.job.job_store.meet("node_memory/end", self.job.world.size, waiting_for=waiting)
        if self.job.world.local_rank == 0:
            self.folder.remove()

    def _report(self, step: int) -> Callable[[Written], None]:
        def report(written: Written) -> None:
            if not self._is_decided(step):
                self.store.set(f"{step}/written/{self.rank}", json.dumps(asdict(written)))
            self._saved.put(step)

        return report

    def _keys(self, step: int) -> list[str]:
        return [f"{step}/{what}/{rank}" for what in ("written", "copied") for rank in self.hosting]

    def _complete(self, step: int) -> None:
        """As all ranks have reported."""
        files: dict[str, FileRecord] = {}
        problems: list[str] = []
        keys = self._keys(step)
        for key, report in zip(keys, map(json.loads, self.store.multi_get(keys)), strict=True):
            if report["problem"]:
                problems.append(f"rank {key.rsplit('/', 1)[1]}: {report['problem']}")
            files |= records_of(report["files"])
        if problems:
            logger.warning("the checkpoint of step %d in memory is given up: %s", step, problems[0])
            self._decide(step, GIVEN_UP)
            return
        self.report_steps_before()  # whoever goes on from here does not report them again
        run = self._runs[step]
        records = {**files, RUN_FILE: record_of(run.encode())}
        manifest = {name: record._asdict() for name, record in sorted(records.items())}
        self._metrics["perf/memory_checkpoint_s"] = time.perf_counter() - self._begun[step]
        self._metrics["perf/memory_checkpoint_bytes"] = sum(record.num_bytes for record in files.values())
        texts = {"manifest": json.dumps(manifest, indent=1), "run": run}
        self.store.set(f"{step}/texts", json.dumps(texts))
        self._decide(step, COUNTS)

    def _decide(self, step: int, verdict: str) -> None:
        """What becomes of a step on all nodes."""
        self.store.set(f"{step}/verdict", verdict)
        del self._begun[step], self._runs[step]
        self._decided.append(step)
        if verdict == COUNTS:
            for key in self._keys(step):  # nobody looks at them any more
                self.store.delete_key(key)
        for old in self._decided[:-REMEMBERED]:
            for key in (f"{old}/verdict", f"{old}/texts", *self._keys(old)):
                self.store.delete_key(key)
        self.store.set("oldest", str(self._decided[-REMEMBERED:][0]))
        self._decided = self._decided[-REMEMBERED:]

    def _copy_steps(self) -> None:
        """The thread: one step after the other."""
        with suppress(OSError):  # a system may forbid it, or know it for processes only
            setpriority(PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (step := self._saved.get()) is not None:
            problem = self._copy(step)
            if self._closing.is_set():
                continue
            if not self._is_decided(step):
                self.store.set(f"{step}/copied/{self.rank}", json.dumps({"problem": problem, "files": {}}))
            verdict = self._verdict(step)
            if verdict == GIVEN_UP:
                self.folder.checkpoints.abandon(step)
            elif verdict == COUNTS and self.completes_node:
                self._complete_node(step)

    def _complete_node(self, step: int) -> None:
        if problem := self.folder.complete(step, **json.loads(self.store.get(f"{step}/texts"))):
            logger.warning("the checkpoint of step %d cannot be kept in this node's memory: %s", step, problem)
        elif self._is_first:
            self._is_first = False
            if problem := self.folder.lack_of_room(step):
                logger.warning("%s", problem)

    def _copy(self, step: int) -> str | None:
        """What went wrong with the files of other ranks, in words."""
        partial = self.folder.checkpoints.partial(step)
        for rank in self.origins:
            key = f"{step}/written/{rank}"
            if not self._await(step, key):
                return None
            report = json.loads(self.store.get(key))
            for name, record in records_of(report["files"]).items():
                there = f"{partial.relative_to(self.folder.base)}/{name}"
                address = self.memory.addresses[self._node(rank)]
                if problem := fetch(address, there, partial / name, record, self._closing):
                    return problem
        return None

    def _verdict(self, step: int) -> str | None:
        """Once there is one; None where the run has come to its end."""
        while not self._closing.is_set():
            if self._is_decided(step):
                key = f"{step}/verdict"
                return self.store.get(key).decode() if self.store.check([key]) else GIVEN_UP
            self._closing.wait(self._every_s)
        return None

    def _await(self, step: int, key: str) -> bool:
        """Whether it has come: it does not where the step was decided, or the run has come to its end, before."""
        while not self._closing.is_set():
            if self.store.check([key]):
                return True
            if self._is_decided(step):
                return False
            self._closing.wait(self._every_s)
        return False

    def _is_decided(self, step: int) -> bool:
        """Also where its verdict is so old that the store has it no more."""
        if self.store.check([f"{step}/verdict"]):
            return True
        return self.store.check(["oldest"]) and step < int(self.store.get("oldest"))

    def _node(self, rank: int) -> int:
        return rank // self.per_node
