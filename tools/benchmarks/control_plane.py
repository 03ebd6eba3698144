"""Measures the control code of a job at 64 to 4,096 ranks: seconds, memory, store traffic, messages, communicators.

    python tools/benchmarks/control_plane.py [--ranks 64 256 1024 4096] [--output FILE]

The classes are those of a real job, with all ranks in this process. Only the store, process groups and transports are
replaced, by objects that count (`counted.py`). The job is GRPO in asynchronous order with syncs in flight. Actor and
reference are on the first half of the ranks with TP=8. Engines of TP=2 and the reward are on the other half, with eight
ranks per node. Work of a single rank is timed on a few ranks. Store traffic is counted on all of them. `growth` is the
exponent between the last two sizes; 1 is proportional to the number of ranks. The last line is one JSON object.
"""

import argparse
import json
import math
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from counted import Messages, SharedStore, Traffic, counted_messages

from rltrain.checkpoint.run_files import FileRecord
from rltrain.checkpoint.run_writer import Written
from rltrain.config.schema import Config
from rltrain.data.experience import Experience
from rltrain.exchange.exchange import Exchange, Route, Shipment
from rltrain.exchange.transport import Transport
from rltrain.planning.validation_schedule import check_schedule
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.plan import TRANSFER
from rltrain.reshard.rounds import STAGES, StageStreams, streams
from rltrain.roles.checkpointing import Checkpointing, RunControl
from rltrain.roles.resuming import claim_folders, find_checkpoint
from rltrain.rollout.in_flight_sync import InFlightSync
from rltrain.runtime.ending import Ending
from rltrain.runtime.grid import job_leader
from rltrain.runtime.job_store import JobStore, Waiter
from rltrain.runtime.placement import group_lists, placement_of, role_grids
from rltrain.runtime.process_groups import ProcessGroups
from rltrain.runtime.watchdog import Watchdog
from rltrain.runtime.world import World, join_attempt, start_process_groups
from rltrain.schedule.iterations import build_order
from rltrain.schedule.order import WEIGHT_SYNC
from rltrain.schedule.replay import check
from rltrain.tasks.roles import TRANSFERS
from rltrain.trainer import Trainer, listen_for_stop

RANKS_PER_NODE = 8
TP, ENGINE_TP = 8, 2
STEPS = 1000
NOTHING = streams(np.zeros(0, TRANSFER), np.zeros(0, np.uint8))
NOTHING_EXCHANGED = tuple(StageStreams(kind, NOTHING, NOTHING, NOTHING, np.zeros(0, int)) for kind in STAGES)
WATCHED_S = 2.0
LOOKS_BEFORE, LOOKS = 3, 8
"""Looks until the first ranks of nodes know each other, and looks that are counted."""
WAITED_S = 5.0


@dataclass(frozen=True)
class Cost:
    """The cost of one phase. 0 means that it was not measured."""

    seconds: float = 0.0
    """On the slowest of the timed ranks."""
    megabytes: float = 0.0
    """Peak of Python's objects on one rank."""
    store_calls: float = 0.0
    """Mean over all ranks."""
    most_store_calls: int = 0
    """Maximum over all ranks."""
    all_store_calls: int = 0
    all_store_bytes: int = 0
    messages: int = 0
    """Messages of the rank that sends most."""
    message_bytes: int = 0
    peers: int = 0
    received: int = 0
    """Messages of the rank that receives most, among the timed ones."""
    least_received: int = 0
    passed_on: int = 0
    """Messages to other ranks of the node."""
    passed_on_bytes: int = 0
    communicators: int = 0
    per_second: bool = False
    """Whether calls are per second and not for the whole phase."""

    def __str__(self) -> str:
        found = [f"{name} {value:.4g}" for name, value in self.as_json().items() if name != "per_second"]
        return ", ".join(found) + (" (per second)" if self.per_second else "")

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value}


def cost_of(traffic: dict[int, Traffic], num_ranks: int, seconds: float = 0.0, per_s: float | None = None) -> Cost:
    """Returns the cost of the traffic. With `per_s` it is the traffic of that many seconds."""
    scale = 1.0 if per_s is None else 1 / per_s
    calls = [one.num_operations * scale for one in traffic.values()]
    return Cost(
        seconds=seconds,
        store_calls=sum(calls) / num_ranks,
        most_store_calls=round(max(calls, default=0)),
        all_store_calls=round(sum(calls)),
        all_store_bytes=round(sum(one.num_bytes for one in traffic.values()) * scale),
        per_second=per_s is not None,
    )


class JobAtSize:
    """A job of `num_ranks`, with all ranks in this process."""

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self.size, self.folder = num_ranks, folder
        self.shared = SharedStore()

    @cached_property
    def config(self) -> Config:
        half, last = self.size // 2, self.size - 1
        return Config.model_validate(
            {
                "steps": STEPS,
                "output_dir": str(self.folder),
                "placement": {"actor,reference": f"0-{half - 1}", "rollout,reward": f"{half}-{last}"},
                "model": {"path": "model"},
                "data": {"train": {"path": "train"}},
                "actor": {"parallel": {"tp": TP}},
                "reference": {"parallel": {"tp": TP}},
                "rollout": {"parallel": {"tp": ENGINE_TP}},
                "schedule": {"mode": "asynchronous", "max_staleness": 1},
                "batch": {"prompts_per_step": self.size, "samples_per_prompt": 8},
                "checkpoint": {"save_interval": 100},
            }
        )

    def __getattr__(self, name: str) -> Any:
        """Derives placement, grids and order once for all ranks."""
        if name not in ("placement", "grids", "order"):
            raise AttributeError(name)
        self.placement = placement_of(self.config, self.size, RANKS_PER_NODE)
        self.grids = role_grids(self.config, self.placement)
        self.order = build_order(self.config, self.placement)
        return self.__dict__[name]

    def world(self, rank: int) -> World:
        return World(
            rank,
            self.size,
            rank % RANKS_PER_NODE,
            RANKS_PER_NODE,
            torch.device("cpu"),
            dist.PrefixStore("attempt0", self.shared.client(rank)),
            timeout_s=300.0,
            timeouts=self.config.timeouts,
            node=rank // RANKS_PER_NODE,
            num_nodes=self.size // RANKS_PER_NODE,
        )

    @cached_property
    def job_stores(self) -> list[JobStore]:
        """Job stores by rank."""
        return [JobStore(self.world(rank), guarded=True) for rank in range(self.size)]

    @cached_property
    def watchdogs(self) -> list[Watchdog]:
        """Watchdogs by rank, not started."""
        return [
            Watchdog(store.heartbeat, store.observer, store.world.background, self.folder, beats=store.beats)
            for store in self.job_stores
        ]

    def rank_first(self, rank: int) -> list[int]:
        """Returns all ranks, beginning with `rank`. The others wait for it."""
        return [rank, *(other for other in range(self.size) if other != rank)]


@contextmanager
def timed() -> Iterator[Callable[[], float]]:
    """Yields a function that returns the seconds since the beginning."""
    begin = time.perf_counter()
    yield lambda: time.perf_counter() - begin


def derive(job: JobAtSize) -> Cost:
    """Derives placement, grids, the order, its check and hash, and rank lists, as every rank does alone."""

    def once() -> None:
        placement = placement_of(job.config, job.size, RANKS_PER_NODE)
        grids = role_grids(job.config, placement)
        check_schedule(job.config, placement, grids)
        order = build_order(job.config, placement)
        check(order.excerpt(), placement)
        order.digest()
        group_lists(grids)

    with timed() as since:
        once()
        seconds = since()
    tracemalloc.start()
    once()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return Cost(seconds=seconds, megabytes=peak / 1e6)


def meet(job: JobAtSize) -> Cost:
    """All ranks reach the store at once and agree on the attempt."""
    threading.stack_size(256 * 1024)
    stores = [job.shared.client(rank) for rank in range(job.size)]
    try:
        with timed() as since, ThreadPoolExecutor(job.size) as pool:
            joined = pool.map(lambda rank: join_attempt(stores[rank], rank, job.size, timeout_s=600.0), range(job.size))
            assert set(joined) == {0}
            seconds = since()
    finally:
        threading.stack_size(0)
    return cost_of(job.shared.take(), job.size, seconds)


def connect(job: JobAtSize) -> Cost:
    """Counts the store connections of a rank and its threads."""
    job.shared.num_connections.clear()
    rank = job.size - 1
    world = job.world(rank)
    Ending(world.background, rank, job.size)
    job_store = JobStore(world, guarded=True)
    Watchdog(job_store.heartbeat, job_store.observer, world.background, job.folder)
    listen_for_stop(job_store, job.config).close()
    _checkpointing(job, job_store, rank)
    with mock.patch.object(dist, "init_process_group"):
        start_process_groups(world)
    job.shared.take()
    return Cost(communicators=job.shared.num_connections[rank])


def agree(job: JobAtSize) -> Cost:
    """Ranks agree over the store on folders, on the checkpoint to resume from, and on the order."""
    leader = job_leader(job.grids)
    stores, digest = job.job_stores, job.order.digest()
    order = SimpleNamespace(digest=lambda: digest)
    job.shared.take()
    with timed() as since:
        for rank in job.rank_first(leader):
            claim_folders(job.config, leader, stores[rank])
        for rank in range(job.size):
            find_checkpoint(job.config, stores[rank])
        for rank in range(job.size):
            part = SimpleNamespace(job=SimpleNamespace(job_store=stores[rank]), order=order, rank=rank)
            Trainer._agree_on_order(cast(Trainer, part))
        seconds = since() / job.size
    return cost_of(job.shared.take(), job.size, seconds)


def make_groups(job: JobAtSize) -> Cost:
    """Measures the bookkeeping of process groups, without connections."""
    lists = group_lists(job.grids)
    slowest, most = 0.0, 0
    with counted_messages(job.size) as messages:
        for rank in (0, job.size // 2, job.size - 1):
            messages.become(rank)
            with timed() as since:
                ProcessGroups(lists, backend="nccl", timeout_s=1.0)
                slowest = max(slowest, since())
            most = max(most, messages.num_groups)
    return Cost(seconds=slowest, communicators=most)


def beat(job: JobAtSize) -> Cost:
    """Heartbeats and watchdogs, called as by their threads. Measures traffic per second and the judging rank's time."""
    heartbeats, watchdogs = [store.heartbeat for store in job.job_stores], job.watchdogs
    for heartbeat in heartbeats:
        heartbeat.begin("update", "actor", 3, position=40)
        heartbeat.publish()
    interval_s = heartbeats[0].interval_s
    for look in range(LOOKS_BEFORE + LOOKS):
        if look == LOOKS_BEFORE:
            job.shared.take()
        for heartbeat, watchdog in zip(heartbeats, watchdogs, strict=True):
            heartbeat.publish()
            watchdog._look()
    traffic = job.shared.take()
    with timed() as since:
        watchdogs[0]._look()
        seconds = since()
    job.shared.take()
    return cost_of(traffic, job.size, seconds, per_s=LOOKS * interval_s)


def wait_for_value(job: JobAtSize) -> Cost:
    """All ranks wait for a value in the store. One rank is measured as an example for all."""
    store = job.job_stores[1]
    key = "left late"

    def leave_late() -> None:
        time.sleep(WAITED_S)
        store.store.set(key, "1")

    job.shared.take()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(leave_late)
        store.get(key, waiting_for="something")
    mine = job.shared.take()[1]
    return cost_of(dict.fromkeys(range(job.size), mine), job.size, per_s=WAITED_S)


def exchange(job: JobAtSize) -> Cost:
    """The samples of a step, from every engine to every replica. Measures the messages of owners, and those received
    and passed on by the first replica."""
    source, destination = job.grids["rollout"], job.grids["actor"]
    route = Route("samples", source, destination, ("group_ids", "lengths", "sample_ids", "tokens"), position=0)
    assert set(route.fields) <= set(TRANSFERS["samples"])
    waiter = cast(Waiter, SimpleNamespace(until=lambda *_: None))
    sent: list[Cost] = []
    passed_on: list[Cost] = []
    received: list[int] = []
    with counted_messages(job.size) as messages:
        messages.kept_for = {*destination.replica(0)}

        def become(rank: int) -> Exchange:
            messages.become(rank)
            return Exchange(rank, cast(Transport, messages), waiter, RANKS_PER_NODE)

        for owner in source.owners():
            end, shipment = become(owner), _samples_of_engine(job, source.coordinates(owner).dp)
            with timed() as since:
                end.post(route, shipment)
                sent.append(_cost_of_messages(messages, since()))
        for rank in destination.replica(0):  # the rank that passes messages on comes first
            end = become(rank)
            with timed() as since:
                assert len(end.wait(route).group_tokens) == job.config.batch.prompts_per_step
                passed_on.append(_cost_of_messages(messages, since()))
            received.append(messages.num_received)
    return replace(
        max(sent, key=lambda cost: (cost.messages, cost.message_bytes)),
        seconds=max(cost.seconds for cost in (*sent, *passed_on)),
        received=max(received),
        least_received=min(received),
        passed_on=max(cost.messages for cost in passed_on),
        passed_on_bytes=max(cost.message_bytes for cost in passed_on),
    )


def _samples_of_engine(job: JobAtSize, engine: int) -> Shipment:
    """Returns an engine's samples. All engines have equally many groups, of eight samples of four tokens. The groups
    claim many lengths, so an engine's groups go to many replicas."""
    num_groups = job.config.batch.prompts_per_step
    samples = [group for group in range(engine, num_groups, job.grids["rollout"].dp) for _ in range(8)]
    experience = Experience(
        group_ids=torch.tensor(samples),
        lengths=torch.full((len(samples),), 4),
        sample_ids=torch.arange(len(samples)),
        tokens=torch.zeros(4 * len(samples), dtype=torch.int64),
    )
    group_tokens = torch.randint(32, 4096, (num_groups,), generator=torch.Generator().manual_seed(0))
    return Shipment(experience, group_tokens, torch.arange(num_groups) % job.grids["rollout"].dp)


def sync(job: JobAtSize) -> Cost:
    """Ranks of a weight sync meet and compare their plans. Measures the messages of the first and the last rank."""
    most = Cost()
    with counted_messages(job.size) as messages:
        for rank in (0, job.size - 1):
            messages.become(rank)
            agreement = Agreement(cast(dist.ProcessGroup, object()), rank, 1.0)
            with timed() as since:
                agreement.meet()
                agreement.rounds(NOTHING_EXCHANGED, 2**25, None)
                most = max(most, _cost_of_messages(messages, since()), key=lambda cost: cost.messages)
    return most


def join_in_flight(job: JobAtSize) -> Cost:
    """All ranks of all engines reach a generate task together and join an announced sync."""
    syncs = _in_flight_syncs(job)
    announcer = _in_flight_sync(job, 0, [0])
    job.shared.take()
    announcer.announce()
    for engine in syncs:
        for one in reversed(engine):  # the leader enters after all others
            one.come()
        assert engine[0].enter_first()
        assert all(one.leader_has_entered() for one in engine)
        for one in engine:
            one.position = one._next[1] if one._next else 0
            one._last_poll = 0.0
            assert one.is_due()
            one.join()
    return cost_of(job.shared.take(), job.size)


def decode(job: JobAtSize) -> Cost:
    """Engines look for syncs between decode steps. One engine is measured as an example for all."""
    engine = _in_flight_syncs(job, num_engines=1)[0]
    leader = engine[0]
    leader.position = leader._next[1] if leader._next else 0
    job.shared.take()
    with timed() as since:
        while since() < WATCHED_S:
            leader.is_due()
            time.sleep(0.0005)
    mine = job.shared.take().get(leader.leader, Traffic())
    leaders = [ranks[0] for ranks in job.grids["rollout"].lists("tp")]
    return cost_of(dict.fromkeys(leaders, mine), job.size, per_s=WATCHED_S)


def save(job: JobAtSize) -> Cost:
    """The store's side of a checkpoint, and its completion by the leader."""
    leader = job_leader(job.grids)
    parts = {rank: _checkpointing(job, job.job_stores[rank], rank) for rank in range(job.size)}
    written = Written({f"ranks/rank_{0:05d}.safetensors": FileRecord(1, 2), "actor/state": FileRecord(3, 4)}, 1.0)
    parts[leader].folder.begin(100)
    parts[leader]._incomplete.append(100)
    job.shared.take()
    for rank in job.rank_first(leader):
        parts[rank]._report(100)(Written({f"{rank}/{name}": of for name, of in written.files.items()}, 1.0))
    with timed() as since:
        parts[leader].look()
        seconds = since()
    return cost_of(job.shared.take(), job.size, seconds)


def _checkpointing(job: JobAtSize, job_store: JobStore, rank: int) -> Checkpointing:
    of_job = SimpleNamespace(
        world=job_store.world,
        config=job.config,
        placement=job.placement,
        leader=job_leader(job.grids),
        resumed=None,
        architectures={},
        job_store=job_store,
        rows=SimpleNamespace(first_step=0),
    )
    reporter = SimpleNamespace(collect=lambda: None)
    control = RunControl({}, cast(Any, None), memory=None)
    return Checkpointing(cast(Any, of_job), job.order, {}, cast(Any, None), cast(Any, reporter), control)


def _in_flight_syncs(job: JobAtSize, num_engines: int | None = None) -> list[list[InFlightSync]]:
    """Returns the syncs of all ranks, by engine."""
    engines = job.grids["rollout"].lists("tp")[:num_engines]
    return [[_in_flight_sync(job, rank, ranks) for rank in ranks] for ranks in engines]


def _in_flight_sync(job: JobAtSize, rank: int, ranks: Sequence[int]) -> InFlightSync:
    return InFlightSync(
        job.order.syncs(WEIGHT_SYNC),
        job.job_stores[rank].world.store,
        leader=ranks[0],
        followers=ranks[1:],
        rank=rank,
        run=lambda position: None,
        num_engines=job.grids["rollout"].dp,
    )


def _cost_of_messages(messages: Messages, seconds: float) -> Cost:
    return Cost(
        seconds=seconds,
        messages=messages.num_messages,
        message_bytes=messages.num_bytes,
        peers=len(messages.peers),
    )


PHASES: dict[str, Callable[[JobAtSize], Cost]] = {
    "derive": derive,
    "meet in the store": meet,
    "connections": connect,
    "agree": agree,
    "make groups": make_groups,
    "heartbeats": beat,
    "wait for a value": wait_for_value,
    "exchange": exchange,
    "meet for a sync": sync,
    "join in flight": join_in_flight,
    "decode": decode,
    "save": save,
}


def measure(num_ranks: int, folder: Path) -> dict[str, Cost]:
    """Returns the cost of every phase."""
    job = JobAtSize(num_ranks, folder / str(num_ranks))
    costs = {}
    for name, phase in PHASES.items():
        costs[name] = phase(job)
        print(f"{num_ranks:6d} ranks  {name:<24}{costs[name]}", flush=True)
    return costs


def growth(measured: dict[int, dict[str, Cost]]) -> dict[str, dict[str, float]]:
    """Returns the exponent of growth between the last two sizes, by phase and quantity."""
    if len(measured) < 2:
        return {}
    before, last = sorted(measured)[-2:]
    found: dict[str, dict[str, float]] = {}
    for name, cost in measured[last].items():
        smaller = measured[before][name].as_json()
        for quantity, value in cost.as_json().items():
            if quantity != "per_second" and quantity in smaller:
                power = math.log(value / smaller[quantity]) / math.log(last / before)
                found.setdefault(name, {})[quantity] = round(power, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--output", type=Path, help="file for the JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = {size: measure(size, Path(folder)) for size in sorted(arguments.ranks)}
    by_size = {size: {name: cost.as_json() for name, cost in costs.items()} for size, costs in measured.items()}
    text = json.dumps({"ranks": by_size, "growth": growth(measured)})
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
