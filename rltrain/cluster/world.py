"""This process's place in the job: rank, device, and the key-value store that all ranks share."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rltrain.cluster.attempts import join_attempt
from rltrain.cluster.heartbeat import Heartbeat
from rltrain.cluster.judgement import what_it_does
from rltrain.cluster.observer import Observer
from rltrain.config.schema import Timeouts
from rltrain.errors import StallError

POLL_S = 0.005
POLL_SHARE = 0.01
"""Of the time that a wait has lasted, between two looks for what it is for."""
LOOK_S = 1.0
"""Between two looks at the heartbeats of the ranks waited for."""

TRANSPORT_TIMEOUT_S = 7 * 24 * 3600.0
"""Of process groups. Theirs would run while the awaited rank gets on, break the group and name nobody: it must never
come before the limits of `timeouts`, which the watchdog and Patience keep."""


@dataclass(frozen=True)
class World:
    """One torchrun job. `store` is the rendezvous store; its keys are prefixed by use."""

    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device
    store: dist.Store
    timeout_s: float
    """How long setting up may wait: meeting in the store, and the first connections of process groups."""
    timeouts: Timeouts = Timeouts()
    restarted: bool = False
    """Whether torchrun has started the job anew after an attempt that failed."""

    @property
    def backend(self) -> str:
        """Backend of the groups that carry device tensors."""
        return "nccl" if self.device.type == "cuda" else "gloo"


def join_world(timeout_s: float) -> World:
    """Meet the other ranks in the store that torchrun names. No process group is made yet."""
    local_rank = int(os.environ["LOCAL_RANK"])
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
    store = dist.PrefixStore("rltrain", store)
    attempt = join_attempt(store, rank, size, timeout_s)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        device=device,
        store=dist.PrefixStore(f"attempt{attempt}", store),
        timeout_s=timeout_s,
        timeouts=Timeouts(no_progress_s=timeout_s),
        restarted=attempt > 0 or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0,
    )


def start_process_groups(world: World) -> None:
    """Initialise torch.distributed over the whole world. Collective over: all ranks."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=dist.PrefixStore("process_groups", world.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=TRANSPORT_TIMEOUT_S),
    )


class Bulletin:
    """Small JSON values that ranks leave for each other in the store: metrics, verdicts; and this rank's heartbeat.

    In a `guarded` job a watchdog ends waits that are in vain; otherwise they end
    themselves.
    """

    def __init__(self, world: World, guarded: bool = False) -> None:
        self.world = world
        self.guarded = guarded
        self.store = dist.PrefixStore("bulletin", world.store)
        self.heartbeat = Heartbeat(world.rank, world.store)
        self.observer = Observer(self.heartbeat.board, world.size, world.timeouts)

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def get(self, key: str, waiting_for: str) -> Any:
        """The value at `key`, once any other rank has put it there; StallError naming `waiting_for` if none will."""
        if not self.has(key):
            self._wait_for(key, waiting_for)
        return json.loads(self.store.get(key))

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def activity(self, rank: int) -> str:
        """What `rank` is doing, in words."""
        beat = self.heartbeat.now() if rank == self.world.rank else self.heartbeat.board.read([rank])[rank]
        return f"{what_it_does(beat)} since {max(time.time() - beat.since, 0):.0f} s"

    def end_wait_in_vain(self, describe: Callable[[], str]) -> None:
        """Raise StallError if nobody in the job gets on; `describe` says what it waits for, in words.

        To be called every LOOK_S seconds of a wait inside `heartbeat.waiting`.
        """
        if not self.guarded and (stall := self.observer.find_stall()):
            raise StallError(f"{describe()}: {stall}")

    def _wait_for(self, key: str, waiting_for: str) -> None:
        start = time.monotonic()
        next_look = start + LOOK_S
        with self.heartbeat.waiting(waiting_for, ()):
            while not self.has(key):
                time.sleep(max(POLL_S, min((time.monotonic() - start) * POLL_SHARE, LOOK_S)))
                if time.monotonic() >= next_look:
                    next_look += LOOK_S
                    self.end_wait_in_vain(lambda: f"rank {self.world.rank} waits for {waiting_for}")
