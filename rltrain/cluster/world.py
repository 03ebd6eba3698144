"""This process's place in the job: rank, device, and the key-value store that all ranks share."""

import json
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rltrain.errors import StallError

POLL_S = 0.005


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

    @property
    def backend(self) -> str:
        """Backend of the groups that carry device tensors."""
        return "nccl" if self.device.type == "cuda" else "gloo"


def join_world(timeout_s: float) -> World:
    """Meet the other ranks in the store that torchrun names. No process group is made yet."""
    local_rank = int(os.environ["LOCAL_RANK"])
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
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
        store=dist.PrefixStore("rltrain", store),
        timeout_s=timeout_s,
    )


def start_process_groups(world: World) -> None:
    """Initialise torch.distributed over the whole world. Collective over: all ranks."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=dist.PrefixStore("process_groups", world.store),
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_s),
    )


class Bulletin:
    """Small JSON values that ranks leave for each other in the store: metrics, verdicts, what a rank is doing."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.store = dist.PrefixStore("bulletin", world.store)

    def put(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def has(self, *keys: str) -> bool:
        return self.store.check(list(keys))

    def get(self, key: str, waiting_for: str) -> Any:
        """The value at `key`, once it is there; StallError naming `waiting_for` after the world's time limit."""
        deadline = time.monotonic() + self.world.timeout_s
        while not self.has(key):
            if time.monotonic() > deadline:
                raise StallError(f"rank {self.world.rank} waited {self.world.timeout_s:.0f} s for {waiting_for}")
            time.sleep(POLL_S)
        return json.loads(self.store.get(key))

    def forget(self, key: str) -> None:
        self.store.delete_key(key)

    def announce(self, what: str) -> None:
        """Tell the others what this rank is doing from now on."""
        self.put(f"doing/{self.world.rank}", [what, time.time()])

    def activity(self, rank: int) -> str:
        """What `rank` last announced, in words."""
        key = f"doing/{rank}"
        if not self.has(key):
            return "has not started"
        what, since = json.loads(self.store.get(key))
        return f"is at {what} since {time.time() - since:.0f} s"
