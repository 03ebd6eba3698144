"""A process's part in the job: rank, device, store, network interface, number of the attempt."""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.config.schema import Timeouts
from rltrain.errors import StallError

# Numbers of attempts. After a restart by torchrun, the store still has the keys of earlier attempts.

POLL_S, POLL_SHARE = 0.01, 0.02
"""Rank 0 polls for arriving ranks. Its pause is at least POLL_S seconds, and at least POLL_SHARE of the time waited."""


def join_attempt(store: dist.Store, rank: int, size: int, timeout_s: float) -> int:
    """Returns the number of this attempt. It is equal on all ranks of the attempt, and different from earlier attempts.

    torchrun gives ranks no such number, because its agents count only their own restarts. Rank 0 takes the next number
    and sends it to all asking ranks until all have it. Asking ranks append to one list, so one poll of rank 0 serves
    them all. Raises StallError if ranks are missing after `timeout_s`. Collective over: all ranks.
    """
    if rank == 0:
        attempt = store.add("attempts", 1) - 1
        tickets = _admit(store, attempt, range(1, size), timeout_s)
        if attempt > 0:
            _clear(store, attempt, tickets)
        return attempt
    ticket = uuid.uuid4().hex
    store.append("asks", f"{ticket} ")  # type: ignore[attr-defined]
    try:
        store.wait([f"admitted/{ticket}"], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise StallError(f"rank {rank} has waited {timeout_s:g} s for rank 0 to start: {error}") from error
    attempt = int(store.get(f"admitted/{ticket}"))
    store.append(f"joined/{attempt}", f"{rank} ")  # type: ignore[attr-defined]
    return attempt


def _admit(store: dist.Store, attempt: int, ranks: range, timeout_s: float) -> list[str]:
    """Sends the attempt's number to all tickets until every rank has confirmed it. Returns these tickets.

    Some tickets may come from an earlier attempt. Only ranks of this attempt confirm.
    """
    admitted: list[str] = []
    begin = time.monotonic()
    while missing := sorted({*ranks} - {*map(int, _listed(store, f"joined/{attempt}"))}):
        if tickets := _listed(store, "asks")[len(admitted) :]:
            store.multi_set([f"admitted/{ticket}" for ticket in tickets], [str(attempt)] * len(tickets))  # type: ignore[attr-defined]
            admitted += tickets
        waited_s = time.monotonic() - begin
        if waited_s > timeout_s:
            raise StallError(f"ranks {missing} have not started within {timeout_s:g} s")
        time.sleep(max(POLL_S, waited_s * POLL_SHARE))
    return admitted


def _clear(store: dist.Store, attempt: int, admitted: list[str]) -> None:
    """Deletes the tickets and their answers, unless another rank has asked in the meantime.

    Also deletes the keys of attempts before the last one, since none of their ranks can exist any more. Old versions of
    torch cannot list keys. There they stay.
    """
    store.compare_set("asks", "".join(f"{ticket} " for ticket in admitted), "")
    for ticket in admitted:
        store.delete_key(f"admitted/{ticket}")
    keys = store.list_keys() if attempt > 1 and hasattr(store, "list_keys") else []
    for key in keys:
        name, _, rest = key.partition("/")
        number = rest if name == "joined" else name.removeprefix("attempt")
        if number.isdecimal() and int(number) < attempt - 1:
            store.delete_key(key)


def _listed(store: dist.Store, key: str) -> list[str]:
    """Returns the items of a list in the store."""
    return store.get(key).decode().split() if store.check([key]) else []


# The address and the network interface of this node as seen from other nodes.

SIOCGIFADDR = 0x8915
LONGEST_NAME_BYTES = 15
ADDRESS_IN_REPLY = slice(20, 24)
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
SECOND_NODE = "second_node"


def address_among_nodes(store: dist.Store, rank: int, begins_second: bool, master: str, timeout_s: float) -> str:
    """Returns this node's address on the route to `master`, the name of the first node.

    The first node's own route to itself is loopback. It uses its route to the second node instead. The first rank of
    the second node (`begins_second`) leaves its address in `store`. Raises StallError if it is missing after
    `timeout_s`. Collective over: all ranks of a job over several nodes.
    """
    address = own_address(master)
    if begins_second:
        store.set(SECOND_NODE, address)
    if not ipaddress.ip_address(address).is_loopback:
        return address
    try:
        store.wait([SECOND_NODE], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise StallError(
            f"rank {rank} has waited {timeout_s:g} s for the address of the second node: {error}"
        ) from error
    return own_address(store.get(SECOND_NODE).decode())


def own_address(peer: str) -> str:
    """Returns the source address of packets to `peer`, a name or address. Sends nothing."""
    found = socket.getaddrinfo(peer, 1, type=socket.SOCK_DGRAM)
    family, _, _, _, there = min(found, key=lambda one: one[0] != socket.AF_INET)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def interface_with(address: str) -> str | None:
    """Returns the name of this node's interface with `address`, or None if there is none."""
    if ":" in address:
        digits = ipaddress.IPv6Address(address).exploded.replace(":", "")
        lines = IPV6_ADDRESSES.read_text().splitlines() if IPV6_ADDRESSES.exists() else []
        return next((line.split()[-1] for line in lines if line.startswith(digits)), None)
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _ipv4_address(name) == address), None)


def address_of(interface: str) -> str | None:
    """Returns the IPv4 address of the interface, or None if it has none. Of several names it takes the first."""
    return _ipv4_address(interface.split(",")[0])


def _ipv4_address(interface: str) -> str | None:
    name = struct.pack("256s", interface.encode()[:LONGEST_NAME_BYTES])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name)[ADDRESS_IN_REPLY])
        except OSError:  # no address
            return None


# This process in the job: rank, device, and the key-value store of all ranks.

logger = logging.getLogger(__name__)

TRANSPORT_TIMEOUT_S = 7 * 24 * 3600.0
"""Timeout of process groups, in seconds. It is longer than any limit in `timeouts`.

A group's own timeout also counts time in which the awaited rank makes progress. It breaks the group and names no rank.
The watchdog and Waiter must end the job first.
"""

LOOPBACK = "127.0.0.1"
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclass(frozen=True)
class World:
    """One torchrun job. `store` is the rendezvous store. Each use of it has a prefix for its keys."""

    rank: int
    size: int
    local_rank: int
    ranks_per_node: int
    device: torch.device
    store: dist.Store
    timeout_s: float
    """Limit in seconds for setup: the meeting in the store, and the first connections of process groups."""
    timeouts: Timeouts = Timeouts()
    restarted: bool = False
    """Whether torchrun has restarted the job after a failed attempt."""
    address: str = LOOPBACK
    """Address of this node for other nodes. Unused if there is one node."""
    node: int = 0
    """Index of this node in the order of torchrun's agents, as in the ranks and in `node:` of a placement."""
    num_nodes: int = 1
    has_store_in_rank_0: bool = False
    """Whether rank 0 has the store, so that it ends with rank 0 (TORCH_DISABLE_SHARE_RDZV_TCP_STORE). Else an agent has
    it."""

    @cached_property
    def background(self) -> dist.Store:
        """The store, over a connection for all threads except the main one. The main thread's waits block its own
        connection.

        Calls must be short. The server holds one connection for every client of every rank.
        """
        return self.store.clone()  # type: ignore[attr-defined,no-any-return]

    @property
    def ranks_on_node(self) -> range:
        """The ranks on this node."""
        first = self.rank - self.local_rank
        return range(first, first + self.ranks_per_node)

    def visible_gpus(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Returns the GPUs of ranks of a node as names for CUDA_VISIBLE_DEVICES of a child process. Empty on CPU."""
        if self.device.type != "cuda":
            return ()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return tuple(names[rank % self.ranks_per_node] for rank in ranks)

    @property
    def backend(self) -> str:
        """The backend of groups for device tensors."""
        return "nccl" if self.device.type == "cuda" else "gloo"


def join_world(timeout_s: float) -> World:
    """Meets the other ranks in torchrun's store and returns the world. Creates no process group. Collective over: all
    ranks."""
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
    """Initialises torch.distributed over the whole world. Collective over: all ranks.

    Ranks of a gloo group connect to each other with their first message. If all connected at once, each would ask the
    store for the addresses of all others. The first sender waits until the other side receives. In a collective both
    arrive at the same time.
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
    """Sets GLOO_SOCKET_IFNAME to the interface of this node's address, unless the user has set it.

    By default gloo takes the interface of the host's name. If the name does not resolve, it takes loopback, and other
    nodes cannot be reached.
    """
    if world.size == world.ranks_per_node or GLOO_INTERFACE in os.environ:
        return
    name = interface_with(world.address)
    if name is not None:
        os.environ[GLOO_INTERFACE] = name
    if world.rank == 0:
        chosen = f"{name} (on this node, by its route to the others)" if name else "an interface that gloo chooses"
        logger.warning("gloo reaches other nodes over %s; set %s to choose another", chosen, GLOO_INTERFACE)
