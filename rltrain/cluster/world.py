"""This process's place in the job: rank, device, and the key-value store that all ranks share."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rltrain.cluster.attempts import join_attempt
from rltrain.config.schema import Timeouts

TRANSPORT_TIMEOUT_S = 7 * 24 * 3600.0
"""Of process groups. Theirs would run while the awaited rank gets on, break the group and name nobody: it must never
come before the limits of `timeouts`, which the watchdog and Waiter keep."""


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
