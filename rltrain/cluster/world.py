"""This process's place in the job: rank, device, and the key-value store that all ranks share."""

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from rltrain.cluster.attempts import join_attempt
from rltrain.cluster.interfaces import address_among_nodes, address_of, interface_with
from rltrain.config.schema import Timeouts

logger = logging.getLogger(__name__)

TRANSPORT_TIMEOUT_S = 7 * 24 * 3600.0
"""Of process groups. Theirs would run while the awaited rank gets on, break the group and name nobody: it must never
come before the limits of `timeouts`, which the watchdog and Waiter keep."""

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"


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
    address: str = LOOPBACK
    """By which other nodes reach this one; of no use where there are none."""
    node: int = 0
    """In the order of torchrun's agents, which is that of the ranks; `node:` in a placement counts so."""
    num_nodes: int = 1
    has_store_in_rank_0: bool = False
    """Whether the store is rank 0's, and ends with it, and not an agent's: TORCH_DISABLE_SHARE_RDZV_TCP_STORE."""

    @cached_property
    def background(self) -> dist.Store:
        """The store over a connection for all threads but the main one, whose waits hold up its own. Calls are short:
        every connection of every rank is one that the server has."""
        return self.store.clone()  # type: ignore[attr-defined,no-any-return]

    @property
    def ranks_on_node(self) -> range:
        """Of this one's node."""
        first = self.rank - self.local_rank
        return range(first, first + self.ranks_per_node)

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
    store = dist.PrefixStore(f"attempt{attempt}", store)
    ranks_per_node, address = int(os.environ["LOCAL_WORLD_SIZE"]), LOOPBACK
    node = int(os.environ.get("GROUP_RANK", rank // ranks_per_node))
    num_nodes = int(os.environ.get("GROUP_WORLD_SIZE", -(-size // ranks_per_node)))
    if num_nodes > 1:
        begins_second = node == 1 and local_rank == 0
        by_route = address_among_nodes(store, rank, begins_second, os.environ["MASTER_ADDR"], timeout_s)
        address = address_of(os.environ.get(GLOO_INTERFACE, "")) or by_route
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        ranks_per_node=ranks_per_node,
        device=device,
        store=store,
        timeout_s=timeout_s,
        timeouts=Timeouts(no_progress_s=timeout_s),
        restarted=attempt > 0 or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0,
        address=address,
        node=node,
        num_nodes=num_nodes,
        has_store_in_rank_0=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def start_process_groups(world: World, timeout_s: float = TRANSPORT_TIMEOUT_S) -> None:
    """Initialise torch.distributed over the whole world. Collective over: all ranks.

    Ranks of a gloo group connect to each other when they first have something to send: all at once, each would ask the
    store for the addresses of all others. Who sends first then waits until the other side receives, as the ranks of a
    collective do at one time.
    """
    _choose_gloo_interface(world)
    os.environ.setdefault(GLOO_LAZY, "1")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo",
        store=dist.PrefixStore("process_groups", world.store.clone()),  # type: ignore[attr-defined]
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )


def _choose_gloo_interface(world: World) -> None:
    """Between nodes gloo would take the interface that the host's name resolves to, and where that fails loopback.

    What the user has chosen stays.
    """
    if world.size == world.ranks_per_node or GLOO_INTERFACE in os.environ:
        return
    name = interface_with(world.address)
    if name is not None:
        os.environ[GLOO_INTERFACE] = name
    if world.rank == 0:
        chosen = f"{name} (on this one, by its route to the others)" if name else "an interface of its own choice"
        logger.warning("gloo reaches other nodes over %s; %s chooses another", chosen, GLOO_INTERFACE)
