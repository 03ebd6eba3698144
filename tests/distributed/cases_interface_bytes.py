"""Cases for test_interface_bytes.py: traffic of hosts' interfaces during weight syncs and exchanges."""

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from rltrain.data.experience import Experience, assign_groups
from rltrain.exchange.exchange import Exchange, Route, Shipment
from rltrain.exchange.transport import Transport
from rltrain.reshard.megatron_layout import megatron_layout
from rltrain.reshard.plan import traffic
from rltrain.rollout.layout import engine_layout
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.world import GLOO_INTERFACE, join_world, own_address
from tests.distributed.cases_reshard import Settings, resharding_of, shards
from tests.support.hosts import NETWORK
from tests.support.model_shards import full_tensors, tiny_architecture

INTERFACE, CLONE_NEWNET = "eth0", 0x40000000
RANKS_PER_NODE = 2
ARCHITECTURE = tiny_architecture("llama", hidden_size=128, ffn_hidden_size=512, vocab_size=2048, num_layers=4)
TRAINING, ENGINES = Grid((0, 1, 2, 3), tp=2), Grid((4, 5, 6, 7))
"""A replica on each of the first two hosts; two engines on each of the others."""
ACROSS_NODES = Grid((0, 1, 2, 3), tp=2, pp=2)
FIELDS = ("group_ids", "lengths", "tokens", "rollout_logprobs")
NUM_GROUPS, SAMPLES_PER_GROUP, LENGTH_TOKENS = 8, 4, 4096

Bytes = dict[str, list[int]]
"""Measured or expected bytes of every host, received and sent."""


def every_way(hosts: list[list[str]]) -> dict[str, dict[str, Bytes]]:
    """Returns the measured and expected bytes of a weight sync and of exchanges, by host.

    `hosts` are the beginnings of commands that run in the hosts' networks.
    """
    rank, node = dist.get_rank(), dist.get_rank() // RANKS_PER_NODE
    job_store = JobStore(join_world(60.0))
    assert job_store.world.background, "the store connects before this rank changes its network"
    enter_network(hosts[node][-1])
    group = dist.new_group()

    def counted(move: Callable[[], None]) -> Bytes:
        before = interface_bytes(hosts[node])
        dist.barrier()  # over an older group: its bytes use no interface of the hosts
        move()
        dist.barrier()
        mine = [now - then for now, then in zip(interface_bytes(hosts[node]), before, strict=True)]
        by_rank: list[list[int]] = [[]] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
        of_hosts = by_rank[::RANKS_PER_NODE]
        return {"received": [received for received, _ in of_hosts], "sent": [sent for _, sent in of_hosts]}

    found = {"weights": {"counted": counted(prepared_sync(group)), "due": weights_due(len(hosts))}}
    waiter = Waiter(job_store)
    world = job_store.world
    transport = Transport(rank, own_address(f"{NETWORK}.1"), world.store, world.background)
    exchange, to_each_rank = (Exchange(rank, transport, waiter, size) for size in (RANKS_PER_NODE, 1))
    ways = {
        "a replica on each node": (exchange, TRAINING),
        "a replica on two nodes": (exchange, ACROSS_NODES),
        "every rank as if on a node of its own": (to_each_rank, TRAINING),
    }
    for position, (name, (of_way, destination)) in enumerate(ways.items()):
        route = Route(name, ENGINES, destination, FIELDS, position)
        moved = counted(lambda route=route, of_way=of_way: move_experience(of_way, route))  # type: ignore[misc]
        found[name] = {"counted": moved, "due": experience_due(destination, len(hosts))}
    return found


def enter_network(namespace: str) -> None:
    """Makes this thread, and all threads started later, open their sockets on that host."""
    with Path("/var/run/netns", namespace).open() as of_host:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(of_host.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns into {namespace}")
    os.environ[GLOO_INTERFACE] = INTERFACE


def interface_bytes(host: list[str]) -> tuple[int, int]:
    """Returns (received, sent) bytes so far."""
    files = [f"/sys/class/net/{INTERFACE}/statistics/{way}_bytes" for way in ("rx", "tx")]
    done = subprocess.run([*host, "cat", *files], capture_output=True, text=True, check=True)
    received, sent = map(int, done.stdout.split())
    return received, sent


def prepared_sync(group: dist.ProcessGroup) -> Callable[[], None]:
    source, destination = layouts()
    held, expected = shards(ARCHITECTURE, full_tensors(ARCHITECTURE), TRAINING, ENGINES)
    wanted = expected and {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    resharding = resharding_of(source, destination, group, Settings(2**20, ranks_per_node=RANKS_PER_NODE))

    def sync() -> None:
        resharding.run(held, wanted)
        assert all(torch.equal(wanted[name], tensor) for name, tensor in (expected or {}).items())

    return sync


def layouts():
    return megatron_layout(ARCHITECTURE, TRAINING), engine_layout(ARCHITECTURE, ENGINES, dtype="float32")


def weights_due(num_hosts: int) -> Bytes:
    """Returns the expected bytes: every engine host gets the model once."""
    due: Bytes = {"received": [0] * num_hosts, "sent": [0] * num_hosts}
    for (sender, receiver), num_bytes in traffic(*layouts(), RANKS_PER_NODE).items():
        if sender // RANKS_PER_NODE != receiver // RANKS_PER_NODE:
            due["sent"][sender // RANKS_PER_NODE] += num_bytes
            due["received"][receiver // RANKS_PER_NODE] += num_bytes
    model = sum(values.nbytes for values in full_tensors(ARCHITECTURE).values())
    assert due["received"] == [0, 0, model, model]
    return due


def whole_step() -> Experience:
    num_samples = NUM_GROUPS * SAMPLES_PER_GROUP
    return Experience(
        group_ids=torch.arange(NUM_GROUPS).repeat_interleave(SAMPLES_PER_GROUP),
        lengths=torch.full((num_samples,), LENGTH_TOKENS),
        tokens=torch.arange(num_samples * LENGTH_TOKENS),
        rollout_logprobs=torch.zeros(num_samples * LENGTH_TOKENS),
    )


GROUP_TOKENS = torch.full((NUM_GROUPS,), SAMPLES_PER_GROUP * LENGTH_TOKENS)


def of_engine(engine: int) -> Experience:
    """Returns the engine's samples of the step."""
    step = whole_step()
    return step.select(torch.nonzero(step.group_ids % ENGINES.dp == engine).flatten())


def move_experience(exchange: Exchange, route: Route) -> None:
    if exchange.rank in route.source.ranks:
        engine = route.source.coordinates(exchange.rank).dp
        exchange.post(route, Shipment(of_engine(engine), GROUP_TOKENS, torch.arange(NUM_GROUPS) % ENGINES.dp))
    if exchange.rank in route.destination.ranks:
        received = exchange.wait(route).experience
        replica = route.destination.coordinates(exchange.rank).dp
        due = assign_groups(GROUP_TOKENS, route.destination.dp)[whole_step().group_ids] == replica
        assert torch.equal(received.tokens, whole_step().select(torch.nonzero(due).flatten()).tokens)
    exchange.retire([route.position])
    exchange.finish()


def experience_due(destination: Grid, num_hosts: int) -> Bytes:
    """Returns the expected bytes: every field once for each replica and each of its hosts."""
    due: Bytes = {"received": [0] * num_hosts, "sent": [0] * num_hosts}
    replicas = assign_groups(GROUP_TOKENS, destination.dp)
    for engine, rank in enumerate(ENGINES.owners()):
        drawn = of_engine(engine)
        for dp in range(destination.dp):
            part = drawn.select(torch.nonzero(replicas[drawn.group_ids] == dp).flatten())
            num_bytes = sum(getattr(part, name).nbytes for name in FIELDS)
            for host in {peer // RANKS_PER_NODE for peer in destination.replica(dp)}:
                due["received"][host] += num_bytes
                due["sent"][rank // RANKS_PER_NODE] += num_bytes
    return due
