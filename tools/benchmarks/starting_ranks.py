"""Ranks of a job, each a thread of this process: what they do with the store from their first connection on."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from control_plane_job import RANKS_PER_NODE, JobAtSize

from rltrain.exchange.transport import Transport
from rltrain.roles.resuming import claim_folders, find_checkpoint
from rltrain.runtime import heartbeat
from rltrain.runtime.ending import Ending
from rltrain.runtime.grid import job_leader
from rltrain.runtime.job_store import JobStore
from rltrain.runtime.nodes import (
    Spoken,
    of_machine,
    of_program,
    refuse_folders_apart,
    refuse_other_order,
    refuse_unlike_nodes,
)
from rltrain.runtime.placement import RankList, group_lists
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import LOOPBACK, World, address_among_nodes, join_attempt
from rltrain.trainer import Trainer

TIMEOUT_S = 600.0
STACK_BYTES = 256 * 1024
MADE_BY_EVERY = 64
"""Every so manyeth rank makes gloo groups."""
ADDRESSES = "x" * 160
"""As much as a rank of a lazy group leaves in the store."""


class StartingJob(JobAtSize):
    """What all ranks of this process derive alike, once."""

    @cached_property
    def lists_of(self) -> dict[int, list[tuple[int, RankList]]]:
        """Rank -> number and ranks of each process group that it is in."""
        found: dict[int, list[tuple[int, RankList]]] = {rank: [] for rank in range(self.size)}
        for number, ranks in enumerate(group_lists(self.grids)):
            for rank in ranks:
                found[rank].append((number, ranks))
        return found

    @cached_property
    def leader(self) -> int:
        return job_leader(self.grids)

    @cached_property
    def spoken(self) -> dict[str, Spoken]:
        """What the first rank of every node says at the start."""
        world = self.world(0)
        return {"programs": of_program(self.config, world), "machines": of_machine(self.config, world, {})}

    @cached_property
    def digest(self) -> str:
        return self.order.digest()

    @cached_property
    def device(self) -> Any:
        """gloo's, for all groups of this process, since each has a thread that wakes up a hundred times a second; a
        rank makes one for every group, which takes it half a millisecond."""
        return dist.ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=True)

    def derive(self) -> None:
        """So that no rank does it while others are timed."""
        _ = self.lists_of, self.leader, self.spoken, self.digest, self.device


class StartingRank:
    """One rank; its phases are to be called in the order of PHASES."""

    def __init__(self, job: StartingJob, rank: int, connect: Callable[[int], dist.Store]) -> None:
        self.job, self.rank, self._connect = job, rank, connect
        self.through: list[float] = []
        """Seconds on the machine's clock at the end of each phase."""

    def run(self) -> None:
        for phase in PHASES.values():
            phase(self)
            self.through.append(time.monotonic())

    def connect(self) -> None:
        self.store = dist.PrefixStore("rltrain", self._connect(self.rank))

    def join(self) -> None:
        attempt = join_attempt(self.store, self.rank, self.job.size, TIMEOUT_S)
        store = dist.PrefixStore(f"attempt{attempt}", self.store)
        address = address_among_nodes(store, self.rank, self.rank == RANKS_PER_NODE, LOOPBACK, TIMEOUT_S)
        self.world = World(
            self.rank,
            self.job.size,
            self.rank % RANKS_PER_NODE,
            RANKS_PER_NODE,
            torch.device("cpu"),
            store,
            timeout_s=TIMEOUT_S,
            timeouts=self.job.config.timeouts,
            address=address,
            node=self.rank // RANKS_PER_NODE,
            num_nodes=self.job.size // RANKS_PER_NODE,
        )

    def watch(self) -> None:
        """The connection of a rank's threads, its first beat, and what its watchdog looks for."""
        Ending(self.world.background, self.rank, self.job.size)
        self.job_store = JobStore(self.world, guarded=True)
        self.job_store.heartbeat.publish()
        own, background = self.job_store, self.world.background
        self.watchdog = Watchdog(own.heartbeat, own.observer, background, self.job.folder, beats=own.beats)

    def compare_nodes(self) -> None:
        refuse_unlike_nodes(self.world, "programs", lambda: self.job.spoken["programs"])
        refuse_other_order(self.world)
        refuse_unlike_nodes(self.world, "machines", lambda: self.job.spoken["machines"])

    def find_where_to_begin(self) -> None:
        refuse_folders_apart(self.world, claim_folders(self.job.config, self.job.leader, self.job_store))
        find_checkpoint(self.job.config, self.job_store)

    def make_groups(self) -> None:
        """gloo's, of all ranks and of each list that this one is in. None is kept, for each has threads of its own.

        To make one is a rank's own work, 5 ms for 4,096 ranks, and one call of the store: most ranks do that alone
        here, where they share two processors.
        """
        store = dist.PrefixStore("process_groups", self.world.store.clone())  # type: ignore[attr-defined]
        for number, ranks in [(-1, range(self.job.size)), *self.job.lists_of[self.rank]]:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices, options._timeout = [self.job.device], timedelta(seconds=TIMEOUT_S)
            named = dist.PrefixStore(f"{number}", store)
            if self.rank % MADE_BY_EVERY:
                named.set(str(self.rank), ADDRESSES)
            else:
                dist.ProcessGroupGloo(named, ranks.index(self.rank), len(ranks), options)
        self.of_groups = store

    def agree_on_order(self) -> None:
        order = SimpleNamespace(digest=lambda: self.job.digest)
        part = SimpleNamespace(job=SimpleNamespace(job_store=self.job_store), order=order, rank=self.rank)
        Trainer._agree_on_order(cast(Trainer, part))

    def listen(self) -> None:
        """For experience: a socket and a thread."""
        self.transport = Transport(self.rank, self.world.address, self.world.store, self.world.background)


PHASES: dict[str, Callable[[StartingRank], None]] = {
    "the rank's connection": StartingRank.connect,
    "agree on the attempt": StartingRank.join,
    "its threads' connection, first beat": StartingRank.watch,
    "compare nodes": StartingRank.compare_nodes,
    "folders, checkpoint": StartingRank.find_where_to_begin,
    "connection and making of groups": StartingRank.make_groups,
    "agree on the order": StartingRank.agree_on_order,
    "listen for experience": StartingRank.listen,
}


def rendezvous(rank: int, size: int) -> dist.Store:
    """As join_world has it: os.environ has MASTER_ADDR and MASTER_PORT."""
    found: Any = next(iter(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=TIMEOUT_S))))
    return cast(dist.Store, found[0])


def share_a_process() -> None:
    """What costs a rank nothing where it is alone: asking for its turn, and looking through all threads at a beat."""
    sys.setswitchinterval(1.0)
    heartbeat.main_thread_communicates = lambda: False


def start_all(ranks: Iterable[StartingRank]) -> None:
    """All at once, each in a thread of its own; return once the last is through."""
    threading.stack_size(STACK_BYTES)
    try:
        starting = list(ranks)
        with ThreadPoolExecutor(len(starting)) as pool:
            list(pool.map(StartingRank.run, starting))
    finally:
        threading.stack_size(0)


def memory_mb(process: int | str | None = "self") -> float:
    """Resident, of this process or another."""
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
