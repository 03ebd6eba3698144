"""Cases for test_watchdog.py: three ranks execute the tasks of a step. One sleeps, dies or is slow."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.config.schema import Timeouts
from rltrain.exchange.transport import InTransit, Transport
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import LOOPBACK, join_world

NUM_RANKS = 3
MEMBERS = {"actor": (0, 1), "rollout": (2,)}
NO_PROGRESS_S = 6.0
"""Seconds. On a busy machine no rank may run for several seconds."""
BEAT_S = 0.2

# task -> roles that join it, in the order of a step
TASKS = {"generate": ("rollout",), "update": ("actor",), "weight_sync": ("actor", "rollout")}
VICTIMS = {"generate": 2, "wait samples": 1, "update": 1, "weight_sync": 0}
FAULTY_STEP = 2
FAULT_FILE = "fault"


class Rank:
    """Executes TASKS step after step as the trainer does: joint tasks by a collective, samples by a message.

    `fault` is called with (task, step) in the middle of every task.
    """

    def __init__(self, folder: str, fault: Callable[[str, int], None]) -> None:
        world = replace(join_world(60.0), timeouts=Timeouts(no_progress_s=NO_PROGRESS_S))
        self.number = world.rank
        self.fault = fault
        job_store = JobStore(world, guarded=True)
        self.heartbeat = job_store.heartbeat
        self.heartbeat.interval_s = BEAT_S
        self.waiter = Waiter(job_store)
        self.groups = {ranks: dist.new_group(list(ranks)) for ranks in [(2,), (0, 1), (0, 1, 2)]}
        self.transport = Transport(world.rank, LOOPBACK, world.store, world.background)
        self.sent: list[InTransit] = []
        self.heartbeat.start()
        store, beats = world.background, job_store.beats
        self.watchdog = Watchdog(
            self.heartbeat, job_store.observer, store, Path(folder), interval_s=BEAT_S, beats=beats
        )
        self.watchdog.start()

    def run(self, num_steps: int) -> None:
        for step in range(num_steps):
            for number, (task, roles) in enumerate(TASKS.items()):
                position = 2 * (step * len(TASKS) + number)
                ranks = tuple(sorted(rank for role in roles for rank in MEMBERS[role]))
                if self.number in ranks:
                    self.heartbeat.begin(task, "+".join(roles), step, position=position)
                    self.fault(task, step)
                    dist.all_reduce(torch.ones(4), group=self.groups[ranks])
                if task == "generate":
                    self._transfer_samples(step, position + 1)
        self.heartbeat.finish()
        self.watchdog.stop()

    def _transfer_samples(self, step: int, position: int) -> None:
        samples = torch.ones(2)
        if self.number in MEMBERS["rollout"]:
            self.sent += [self.transport.send(peer, step, [samples]) for peer in MEMBERS["actor"]]
        else:
            self.heartbeat.begin("wait samples", "actor", step, position=position)
            self.fault("wait samples", step)
            received = [self.transport.receive(2, step)]
            self.waiter.until(lambda seconds: self.transport.wait(received, seconds), f"wait samples[{step}]", [2])


def fail_in(task: str, folder: str, fail: Callable[[], None]) -> Callable[[str, int], None]:
    """Returns a fault: the rank of VICTIMS writes a file and fails in the middle of `task`."""

    def fault(name: str, step: int) -> None:
        if (name, step, dist.get_rank()) == (task, FAULTY_STEP, VICTIMS[task]):
            Path(folder, FAULT_FILE).touch()
            fail()

    return fault


def deep_in_a_task() -> None:
    time.sleep(600)


def sleeping(folder: str, task: str) -> None:
    """A rank does not return from `task` until the watchdog ends the job."""
    Rank(folder, fail_in(task, folder, deep_in_a_task)).run(4)


def killed(folder: str, task: str) -> None:
    """A rank dies in the middle of `task`."""
    Rank(folder, fail_in(task, folder, lambda: os.kill(os.getpid(), signal.SIGKILL))).run(4)


def stopped(folder: str) -> None:
    """Rank 0 decides about stalls. Its whole process is frozen for a while, with its watchdog."""

    def freeze() -> None:
        time.sleep(5 * BEAT_S)  # the other ranks get to know the task
        thaw = ["sh", "-c", f"sleep 14; kill -CONT {os.getpid()}"]  # the launcher cannot end a frozen process
        subprocess.Popen(thaw, start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    Rank(folder, fail_in("weight_sync", folder, freeze)).run(4)


def slow(folder: str) -> float:
    """A rank takes longer than the limit in a task, a wait and a joint task, but makes progress. Returns its
    seconds."""

    def fault(task: str, step: int) -> None:
        if task != "update" and step == FAULTY_STEP and dist.get_rank() == VICTIMS[task]:
            for _ in range(int(1.3 * NO_PROGRESS_S / BEAT_S)):
                time.sleep(BEAT_S)
                rank.heartbeat.advance()

    rank = Rank(folder, fault)
    start = time.monotonic()
    rank.run(4)
    return time.monotonic() - start
