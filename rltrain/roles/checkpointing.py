"""Checkpoints of a run at the boundaries between its steps, on disk and in the nodes' memory."""

import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from os import PRIO_PROCESS, setpriority
from pathlib import Path
from typing import Any

import torch.distributed as dist

from rltrain.checkpoint.memory_files import fetch
from rltrain.checkpoint.node_memory import KEPT, MOST, NodeMemory, origins, records_of
from rltrain.checkpoint.run_files import RUN_FILE, Contents, FileRecord, random_states, record_of
from rltrain.checkpoint.run_folder import CheckpointFolder, name_of
from rltrain.checkpoint.run_writer import NICENESS, FilesWriter, Target, Written
from rltrain.errors import CheckpointError
from rltrain.observability.reporter import Reporter
from rltrain.observability.run_logs import ID_FILE, read_id
from rltrain.roles.inputs import Inputs
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.transfers import Transfers
from rltrain.runtime.job_store import JobStore, poll, poll_s
from rltrain.runtime.machine import JobThread
from rltrain.runtime.stopping import PAUSE, StopRequest
from rltrain.schedule.iterations import is_memory_save_step, is_save_step
from rltrain.schedule.order import Order
from rltrain.tasks.roles import roles_beside_steps

logger = logging.getLogger(__name__)

# Checkpoints in the nodes' memory. Each rank's files are there, with a copy on the next node.

LOOK_S = 0.05
"""Seconds between two checks of the store by a rank's thread. Jobs with more than 50 ranks check less often."""
MAX_INCOMPLETE_IN_MEMORY = MOST - KEPT
"""Most incomplete checkpoints at a time. Older ones are given up, because newer ones are more useful."""
REMEMBERED = 8
"""Number of verdicts kept in the store."""
COUNTS, GIVEN_UP = "counts", "given up"
"""The verdicts on the checkpoint of a step."""


class MemoryCheckpointing:
    """One rank's part in checkpoints in memory. `hosting` has all ranks with a role.

    The rank's writer writes its files into the node's memory. Then a thread copies files of the previous node's ranks,
    this rank's share of them. Once all ranks have reported both, the job's leader makes the manifest, and the first
    rank of each node completes its folder. A failed rank or full memory costs this checkpoint, not the job.
    """

    def __init__(
        self, job_store: JobStore, hosting: Sequence[int], memory: NodeMemory, report_steps_before: Callable[[], None]
    ) -> None:
        self.job_store, self.world, self.memory, self.folder = job_store, job_store.world, memory, memory.folder
        self.report_steps_before = report_steps_before
        self.rank, self.per_node = self.world.rank, self.world.ranks_per_node
        self.store = dist.PrefixStore("memory_checkpoint", self.world.background)
        self.hosting = hosting
        self.origins = origins(hosting, self.per_node).get(self.rank, [])
        """The ranks with files to be copied by this one."""
        of_node = [rank for rank in hosting if self._node(rank) == self._node(self.rank)]
        self.completes_node = self.rank == min(of_node, default=None)
        self._begun: dict[int, float] = {}
        """On the leader: the start time of each incomplete step."""
        self._runs: dict[int, str] = {}
        self._decided: list[int] = []
        self._is_first = True
        self._next_look = 0.0
        self._metrics: Metrics = {}
        self._closing = threading.Event()
        self._saved: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._every_s = max(LOOK_S, self.world.size / 1000)
        self._thread = JobThread(target=self._copy_steps, name="memory checkpoint copier", daemon=True)
        self._thread.start()

    def begin(self, step: int, run: Mapping[str, Any] | None) -> Target:
        """Starts a checkpoint of `step` and returns the target for this rank's files. On the leader `run` is the
        content of run.json."""
        if run is not None:
            self._begun[step], self._runs[step] = time.perf_counter(), json.dumps(run, indent=1)
            for old in [*self._begun][:-MAX_INCOMPLETE_IN_MEMORY]:
                self._decide(old, GIVEN_UP)
        return Target(self.folder.checkpoints.partial(step), self._report(step))

    def look(self) -> None:
        """Completes the steps written and copied by all ranks. Called often on the leader; it never waits."""
        if not self._begun or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self._every_s
        for step in [*self._begun]:
            if self.store.check(self._keys(step)):
                self._complete(step)

    def take_metrics(self) -> Metrics:
        """Returns the perf/memory_checkpoint_* metrics since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def close(self) -> None:
        """Ends checkpoints in memory with the run: drops unfinished ones and removes the nodes' folders. Collective
        over: all ranks."""
        self._closing.set()
        self._saved.put(None)
        self._thread.join()
        waiting = "all ranks to finish checkpoints in memory"
        self.job_store.meet("node_memory/end", self.world.size, waiting_for=waiting)
        if self.world.local_rank == 0:
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
        """Decides on a step from the reports of all ranks."""
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
        self.report_steps_before()  # a resumed run does not report them again
        run = self._runs[step]
        records = {**files, RUN_FILE: record_of(run.encode())}
        manifest = {name: record._asdict() for name, record in sorted(records.items())}
        self._metrics["perf/memory_checkpoint_s"] = time.perf_counter() - self._begun[step]
        self._metrics["perf/memory_checkpoint_bytes"] = sum(record.num_bytes for record in files.values())
        texts = {"manifest": json.dumps(manifest, indent=1), "run": run}
        self.store.set(f"{step}/texts", json.dumps(texts))
        self._decide(step, COUNTS)

    def _decide(self, step: int, verdict: str) -> None:
        """Publishes the verdict on a step to all nodes."""
        self.store.set(f"{step}/verdict", verdict)
        del self._begun[step], self._runs[step]
        self._decided.append(step)
        if verdict == COUNTS:
            for key in self._keys(step):  # not needed any longer
                self.store.delete_key(key)
        for old in self._decided[:-REMEMBERED]:
            for key in (f"{old}/verdict", f"{old}/texts", *self._keys(old)):
                self.store.delete_key(key)
        self.store.set("oldest", str(self._decided[-REMEMBERED:][0]))
        self._decided = self._decided[-REMEMBERED:]

    def _copy_steps(self) -> None:
        """The thread: copies one step after another."""
        with suppress(OSError):  # some systems forbid it, or allow it for processes only
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
        """Copies the files of other ranks. Returns the problem in words, or None."""
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
        """Waits for the verdict on a step and returns it. Returns None if the run ends first."""
        while not self._closing.is_set():
            if self._is_decided(step):
                key = f"{step}/verdict"
                return self.store.get(key).decode() if self.store.check([key]) else GIVEN_UP
            self._closing.wait(self._every_s)
        return None

    def _await(self, step: int, key: str) -> bool:
        """Waits for a key in the store. Returns False if the step is decided or the run ends before the
        key is there."""
        while not self._closing.is_set():
            if self.store.check([key]):
                return True
            if self._is_decided(step):
                return False
            self._closing.wait(self._every_s)
        return False

    def _is_decided(self, step: int) -> bool:
        """Returns whether the step has a verdict. It may be so old that the store has deleted it."""
        if self.store.check([f"{step}/verdict"]):
            return True
        return self.store.check(["oldest"]) and step < int(self.store.get("oldest"))

    def _node(self, rank: int) -> int:
        return rank // self.per_node


MAX_INCOMPLETE = 4
"""Most checkpoints that may wait for evaluations beside training. With more of them training waits."""
# Checkpoints at the boundaries between steps, at fixed intervals or because the run is asked to stop.

LATE_COPY_S = "perf/checkpoint_late_copy_s"
STOPPED = "stopped"
"""A key in the store: the checkpoint of a stopped run is complete."""


@dataclass(frozen=True)
class RunControl:
    """The settings beyond the config that decide when and where a run is saved."""

    inputs: Inputs
    """The identity of the run's inputs."""
    stop: StopRequest
    memory: NodeMemory | None
    """The nodes' memory for checkpoints, or None."""


class Checkpointing:
    """One rank's part in checkpoints.

    A checkpoint is a cut through the order of tasks. Every rank saves the state of its roles when it reaches the cut.
    The sources of experience that crosses the cut save it too, so no rank waits for another. The job's leader completes
    the checkpoint once the files of all ranks with a role are durable.
    """

    def __init__(
        self,
        job: Job,
        order: Order,
        roles: Mapping[str, Role],
        transfers: Transfers,
        reporter: Reporter,
        control: RunControl,
    ) -> None:
        self.job, self.order, self.roles, self.transfers, self.reporter = job, order, roles, transfers, reporter
        self.stop, self.inputs = control.stop, control.inputs
        self.leader = job.leader
        self.settings = job.config.checkpoint
        self.folder = CheckpointFolder(Path(job.config.checkpoint_dir))
        self.writer = FilesWriter(asynchronous=self.settings.asynchronous)
        self.store = dist.PrefixStore("checkpoint", job.world.background)  # the writing thread uses it too
        self.stopped_by: str | None = None
        """The signal or the reason for a pause, if the run ends at this rank's present boundary. None otherwise."""
        self._boundary: int | None = None
        self._incomplete: deque[int] = deque()
        """The steps of checkpoints that this rank has yet to complete, in ascending order."""
        self._late = frozenset(job.placement.hosting_nothing_but(roles_beside_steps()))
        """Ranks that reach a boundary long after the others."""
        self._earlier_logs = job.resumed.logs if job.resumed else {}
        """On the leader: sizes of the sample logs when this job began. The job before may have had more ranks."""
        self._saved_at_s = time.monotonic()
        """Start time of the last checkpoint on disk, or of this job."""
        self.last_saved: int | None = None
        """Step of the last checkpoint with files of this rank, on disk or in memory."""
        self._metrics: Metrics = {}
        self.memory: MemoryCheckpointing | None = None
        if control.memory:
            hosting = [*job.placement.hosting]
            self.memory = MemoryCheckpointing(job.job_store, hosting, control.memory, reporter.collect)
            job.waiter.meanwhile = self.memory.look

    @property
    def paused_by(self) -> str | None:
        """The user's message at the end of a paused run: where it paused and how to continue. None for other runs."""
        if self.stopped_by is None or not self.stopped_by.startswith(PAUSE):
            return None
        where = self.folder.path / name_of(self._boundary or 0)
        return (
            f"{self.stopped_by.removeprefix(PAUSE)}. The run is paused after step {self._boundary}, saved in {where}; "
            "change the config as needed, and the same command continues from there"
        )

    @property
    def told_stop(self) -> str:
        """The user's message at the end of a run stopped by a signal."""
        step = self._boundary or 0
        where = self.folder.path / name_of(step)
        return f"{self.stopped_by}: stopped after step {step}, saved in {where}; the same command continues from there"

    def at_boundary(self, step: int, chunk: int) -> None:
        """Saves a checkpoint if one is due, or if the run is to stop here. Acts once per boundary, for all roles of
        this rank."""
        if step == self._boundary:
            return
        self._boundary = step
        reason, is_time = None, False
        if self.settings.saves:
            reason = self.stop.verdict(step, is_time=self._is_time(step))
            is_time = self.stop.saves_at(step)
        durably = bool(reason) or is_time or is_save_step(self.job.config, step)
        if durably or is_memory_save_step(self.job.config, step):
            with self.job.heartbeat.task_clock.waiting("the previous checkpoint to be written"):
                self._make_way(durably)
            self.stopped_by = reason
            self._save(step, durably)

    def may_join(self, position: int, sync: int) -> bool:
        """Returns whether an engine at `position` may join the weight sync at position `sync`.

        It may not if a checkpoint saved by time is between them. The checkpoint would hold responses newer than its
        weights.
        """
        saved = self.stop.saved_by_time() if self.settings.save_every_s else ()
        return not any(position < self.order.boundary(step) <= sync for step in saved)

    def metrics(self) -> Metrics:
        """Returns the perf/checkpoint_* metrics since the last call. See observability.names."""
        metrics, self._metrics = self._metrics, {}
        metrics |= self.memory.take_metrics() if self.memory else {}
        late_s = sum(role.take_copying_s() for role in self.roles.values())
        return {**metrics, LATE_COPY_S: late_s} if late_s else metrics

    def look(self) -> None:
        """Completes checkpoints whose files are all durable. Called often. Raises CheckpointError if a file could not
        be written."""
        if self.memory:
            self.memory.look()
        while self._incomplete and self.store.check([*self._reports(self._incomplete[0]).values()]):
            self._complete(self._incomplete.popleft())

    def finish(self) -> None:
        """Waits until this rank has completed all checkpoints that it has to complete.

        In a stopped run every rank waits for all of them. Once one rank has ended, a launcher may kill the others.
        """
        self.writer.join()
        if self._incomplete:
            while self._incomplete:
                self._wait_for(self._reports(self._incomplete[0]))
                self.look()
        elif self.stopped_by:
            self._wait_for({self.leader: STOPPED})

    def close(self) -> None:
        """Frees the nodes' memory. Called at the end of the run, on all ranks."""
        if self.memory:
            self.memory.close()

    def _is_time(self, step: int) -> bool:
        """Returns whether checkpoint.save_every_s asks for a checkpoint at the boundary of `step`, as far as this rank
        knows.

        One is due after the last step if the job has saved by time before, or was resumed from disk. So the newest
        checkpoint is of the end. None is due while the last one is still being written.
        """
        every_s = self.settings.save_every_s
        if not every_s or is_save_step(self.job.config, step):
            return False
        resumed = self.job.resumed
        if step == self.job.config.steps and (self.stop.saved_by_time() or (resumed and not resumed.in_memory)):
            return True
        return time.monotonic() - self._saved_at_s >= every_s and not self.writer.is_busy

    def _make_way(self, durably: bool) -> None:
        """Waits until another checkpoint may begin.

        The last one must be written, except for the files of late ranks. At most MAX_INCOMPLETE checkpoints may wait
        for those, because they take room on disk. A checkpoint in memory alone does not wait for the disk.
        """
        if not durably:
            self.writer.release()  # the disk may still be busy
            self.look()
            return
        self.writer.join()
        if self._incomplete:
            reports = self._reports(self._incomplete[-1])
            self._wait_for({rank: key for rank, key in reports.items() if rank not in self._late})
        while len(self._incomplete) >= MAX_INCOMPLETE:
            self._wait_for(self._reports(self._incomplete[0]))
            self.look()
        self.look()

    def _wait_for(self, keys: Mapping[int, str]) -> None:
        """Waits for keys in the store. `keys` has them by the rank that sets them."""
        if not self.store.check([*keys.values()]):
            missing = {rank: key for rank, key in keys.items() if not self.store.check([key])}
            awaited, what = [*missing.values()], "the other ranks' files of a checkpoint"
            every_s = poll_s(self.job.world.size)
            poll(self.job.waiter, lambda: self.store.check(awaited) or None, what, [*missing], every_s=every_s)

    def _save(self, step: int, durably: bool) -> None:
        rank, cut, begin = self.job.world.rank, self.order.boundary(step), time.perf_counter()
        files: dict[str, Contents] = {}
        for name in reversed([*self.roles]):  # the rollout comes first: it asks environments to save
            files |= {f"{name}/{file}": contents for file, contents in self.roles[name].save_state().items()}
        if crossing := self.transfers.save(cut):
            files[f"transfers/rank_{rank:05d}.safetensors"] = Contents(crossing, {})
        files[f"ranks/rank_{rank:05d}.safetensors"] = self._of_rank(step)
        self.last_saved = step
        self._metrics["perf/checkpoint_copy_s"] = time.perf_counter() - begin
        self.writer.start(files, *self._targets(step, durably))

    def _targets(self, step: int, durably: bool) -> list[Target]:
        """Returns the targets of this rank's files. Memory comes first because it is faster."""
        is_leader, targets = self.job.world.rank == self.leader, list[Target]()
        if self.memory and is_memory_save_step(self.job.config, step):
            targets.append(self.memory.begin(step, self._run(step) if is_leader else None))
        if durably:
            self._saved_at_s = time.monotonic()
            if is_leader:
                self._incomplete.append(step)
            targets.append(Target(self.folder.begin(step), self._report(step)))
        return targets

    def _of_rank(self, step: int) -> Contents:
        tensors, states = random_states(self.job.world.device)
        logs = {**self._earlier_logs, **{log.name: log.num_bytes for role in self.roles.values() for log in role.logs}}
        texts = {"random": states, "metrics": json.dumps(self.reporter.unfinished(step)), "logs": json.dumps(logs)}
        return Contents(tensors, texts)

    def _report(self, step: int) -> Callable[[Written], None]:
        key = self._reports(step)[self.job.world.rank]
        return lambda written: self.store.set(key, json.dumps(asdict(written)))

    def _reports(self, step: int) -> dict[int, str]:
        """Returns the report keys of all ranks with something to save."""
        return {rank: f"{step}/{rank}" for rank in self.job.placement.hosting}

    def _complete(self, step: int) -> None:
        files: dict[str, FileRecord] = {}
        seconds: list[float] = []
        for rank, key in self._reports(step).items():
            report = json.loads(self.store.get(key))
            self.store.delete_key(key)
            if report["problem"]:
                self.folder.abandon(step)
                raise CheckpointError(
                    f"the checkpoint of step {step} could not be saved: rank {rank} could not write to "
                    f"{self.folder.path}: {report['problem']}; {self.folder.last_good()}. Make room or change "
                    "checkpoint.dir, and start the job again with checkpoint.resume: auto"
                )
            files |= {name: FileRecord(*record) for name, record in report["files"].items()}
            seconds.append(report["seconds"])
        self._metrics["perf/checkpoint_write_s"] = max(seconds)
        self._metrics["perf/checkpoint_bytes"] = sum(record.num_bytes for record in files.values())
        self.reporter.collect()  # a resumed run does not report the steps before again
        self.folder.complete(step, files, self._run(step), self.settings.keep)
        if self._stopped_by(step):
            self.store.set(STOPPED, "1")

    def _stopped_by(self, step: int) -> str | None:
        """Returns the signal or reason that ends the run at the boundary of the step, or None."""
        return self.stopped_by if step == self._boundary else None

    def _run(self, step: int) -> dict[str, Any]:
        """Returns the content of run.json. It is needed before any other file of the checkpoint is read."""
        job = self.job
        return {
            "format": 1,
            "step": step,
            "world_size": job.world.size,
            "config": job.config.model_dump(mode="json"),
            "architectures": {role: asdict(job.architectures[role]) for role in job.architectures},
            "inputs": self.inputs,
            "data_from": job.rows.first_step,
            "crossing": [list(entry.transfer) for entry in self.order.crossing(self.order.boundary(step)).values()],
            "stopped_by": self._stopped_by(step),
            "history": read_id(Path(job.config.output_dir, ID_FILE)),
        }
