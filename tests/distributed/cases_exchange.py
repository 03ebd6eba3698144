"""Cases for test_exchange.py, run on four ranks."""

import logging
import random
import time

import torch
import torch.distributed as dist

from rltrain.data.experience import assign_groups
from rltrain.errors import StallError
from rltrain.exchange.exchange import Exchange, Route, Shipment
from rltrain.exchange.transport import Transport
from rltrain.runtime.grid import Grid
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.world import LOOPBACK, join_world
from tests.unit.test_exchange import make_experience

FIELDS = ("group_ids", "prompt_ids", "lengths", "tokens", "response_mask", "rollout_logprobs", "reward_parts")
SAMPLES_PER_GROUP = 2
RANKS_PER_NODE = (4, 2, 1)


def make_exchange(timeout_s=60.0, stall_report_s=30.0, ranks_per_node=4):
    job_store = JobStore(join_world(timeout_s))
    world, waiter = job_store.world, Waiter(job_store, stall_report_s)
    transport = Transport(world.rank, LOOPBACK, world.store, world.background)
    return Exchange(world.rank, transport, waiter, ranks_per_node), job_store


def random_grid(rng: random.Random) -> Grid:
    ranks = sorted(rng.sample(range(4), rng.choice([1, 2, 4])))
    tp = rng.choice([size for size in (1, 2, 4) if len(ranks) % size == 0])
    pp = rng.choice([size for size in (1, 2) if (len(ranks) // tp) % size == 0])
    return Grid(tuple(ranks), tp=tp, pp=pp)


def assert_equal(found: Shipment, expected: Shipment) -> None:
    """Compares all FIELDS, even empty ones."""
    for name in FIELDS:
        assert torch.equal(getattr(found.experience, name), getattr(expected.experience, name)), name
    assert torch.equal(found.group_tokens, expected.group_tokens) and torch.equal(found.holders, expected.holders)


def random_routes(num_transfers: int, seed: int = 0) -> dict:
    """Posts many transfers between random grids before waiting for any, on nodes of one, two and four ranks.

    Every group must arrive once and whole.
    """
    exchange, _ = make_exchange()
    rng = random.Random(seed)
    transfers = []
    for position in range(num_transfers):
        source, destination = random_grid(rng), random_grid(rng)
        num_groups = rng.randint(max(source.dp, destination.dp), 9)
        lengths = [rng.randint(1, 30) for _ in range(num_groups * SAMPLES_PER_GROUP)]
        groups = [i // SAMPLES_PER_GROUP for i in range(len(lengths))]
        whole = make_experience(lengths, groups, seed=position)
        group_tokens = torch.tensor(lengths).view(-1, SAMPLES_PER_GROUP).sum(1)
        route = Route(f"transfer {position}", source, destination, FIELDS, position)
        holders = torch.tensor([rng.randrange(source.dp) for _ in range(num_groups)])
        transfers.append((route, whole, group_tokens))
        exchange.ranks_per_node = RANKS_PER_NODE[position % len(RANKS_PER_NODE)]
        if exchange.rank in source.ranks:
            mine = holders[whole.group_ids] == source.coordinates(exchange.rank).dp
            shipment = Shipment(whole.select(mine.nonzero().flatten()), group_tokens, holders)
            exchange.post(route, shipment)
            if exchange.rank in source.owners():
                assert_equal(exchange.posted(position), shipment)
    num_received = num_relayed = 0
    for route, whole, group_tokens in transfers:
        exchange.ranks_per_node = RANKS_PER_NODE[route.position % len(RANKS_PER_NODE)]
        if exchange.rank in route.destination.ranks:
            dp = route.destination.coordinates(exchange.rank).dp
            due = assign_groups(group_tokens, route.destination.dp)[whole.group_ids] == dp
            expected = whole.select(due.nonzero().flatten())
            received = exchange.wait(route)
            assert torch.equal(received.group_tokens, group_tokens)
            assert torch.equal(received.holders, assign_groups(group_tokens, route.destination.dp))
            assert {*received.experience.present()} == {*FIELDS}, (
                "only the fields of the route arrive, even from this rank"
            )
            for name in FIELDS:
                assert torch.equal(getattr(received.experience, name), getattr(expected, name)), (route, name)
            num_received += 1
            num_relayed += any(sent.route is route for sent in exchange.relayed)
            assert len(exchange.relayed) <= 1, "forwarded data is released after it has been received"
    exchange.retire(list(exchange.outbox))
    exchange.finish()
    kept = len(exchange.to_self) + len(exchange.outbox) + len(exchange.relayed)
    return {"received": num_received, "relayed": num_relayed, "kept": kept}


def late_source() -> dict:
    """Rank 0 posts late: rank 1 reports the stall with rank 0's task, and still receives."""
    exchange, job_store = make_exchange(timeout_s=30, stall_report_s=0.3)
    route = Route("samples[0]", Grid((0,)), Grid((1,)), FIELDS, 0)
    shipment = Shipment(make_experience([3, 4]), torch.tensor([3, 4]), torch.tensor([0, 0]))
    job_store.heartbeat.begin("generate[0]")
    job_store.heartbeat.start()
    dist.barrier()
    if exchange.rank == 0:
        time.sleep(1.0)
        exchange.post(route, shipment)
        exchange.retire([0])
    if exchange.rank == 1:
        reports: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: reports.append(record.getMessage())
        logging.getLogger("rltrain.runtime.job_store").addHandler(handler)
        received = exchange.wait(route)
        return {"reports": reports, "tokens": received.experience.tokens.tolist()}
    return {"tokens": shipment.experience.tokens.tolist()}


def missing_ranks() -> str:
    """Rank 0 never posts, and rank 2 does not forward the data of its replica.

    Ranks 1 and 3 must give up in time and report the missing ranks with their tasks.
    """
    waits = dist.get_rank() in (1, 3)
    exchange, job_store = make_exchange(1.0 if waits else 30.0, stall_report_s=0.4, ranks_per_node=2)
    job_store.heartbeat.begin("generate[7] (rollout)")
    job_store.heartbeat.start()
    dist.barrier()
    message = "no error"
    destination = Grid((1,)) if exchange.rank == 1 else Grid((2, 3), tp=2)
    if waits:
        start = time.monotonic()
        try:
            exchange.wait(Route("samples[7]", Grid((0,)), destination, FIELDS, 0))
        except StallError as error:
            message = f"{error} after {time.monotonic() - start:.0f} s"
    job_store.put(f"done/{exchange.rank}", True)
    for rank in (1, 3):
        job_store.get(f"done/{rank}", waiting_for=f"rank {rank}")
    return message
