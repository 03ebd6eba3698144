"""The phases that control_plane.py measures: each calls what a job calls, for some or all of its ranks."""

import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from control_plane_job import RANKS_PER_NODE, Cost, JobAtSize, cost_of, timed
from counted_messages import Messages, counted_messages
from counted_store import Traffic

from rltrain.checkpoint.run_files import FileRecord
from rltrain.checkpoint.run_writer import Written
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
from rltrain.runtime.world import join_attempt, start_process_groups
from rltrain.schedule.order import WEIGHT_SYNC
from rltrain.schedule.replay import check
from rltrain.schedule.steps import build_order
from rltrain.tasks.roles import TRANSFERS
from rltrain.trainer import Trainer, listen_for_stop

NOTHING = streams(np.zeros(0, TRANSFER), np.zeros(0, np.uint8))
NOTHING_EXCHANGED = tuple(StageStreams(kind, NOTHING, NOTHING, NOTHING, np.zeros(0, int)) for kind in STAGES)
WATCHED_S = 2.0
LOOKS_BEFORE, LOOKS = 3, 8
"""Until the first ranks of nodes know the others, and those that are counted."""
WAITED_S = 5.0


def derive(job: JobAtSize) -> Cost:
    """Placement, grids, the check of the order, the order and its hash, rank lists: what every rank does alone."""

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
    """All ranks come to the store at once and agree on the attempt."""
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
    """The connections that a rank's threads have of their own, the rank's own among them."""
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
    """Folders, the checkpoint to go on from, and the order, over the store."""
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
    """The bookkeeping of process groups: what each costs beside the connections themselves."""
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
    """Heartbeats and watchdogs, as their threads call them: traffic per second, seconds of the rank that judges."""
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
    """All ranks wait for what one has yet to leave in the store. One of them is watched, and stands for all."""
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
    """The samples of a step, from every engine to every replica: what owners send, and what ranks of the first replica
    receive and pass on."""
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
        for rank in destination.replica(0):  # who passes on comes first
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
    """Every engine has drawn as many groups, of eight samples of four tokens. Groups are said to be of many lengths, so
    that an engine's go to many replicas."""
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
    """Ranks of a weight sync meet and compare their plans: what the first and the last rank send."""
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
    """All ranks of all engines come to a generate task together and join a sync that the actor announces."""
    syncs = _in_flight_syncs(job)
    announcer = _in_flight_sync(job, 0, [0])
    job.shared.take()
    announcer.announce()
    for engine in syncs:
        for one in reversed(engine):  # the leader enters once all have come
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
    """Engines decode and look for syncs between their steps: one of them is watched, and stands for all."""
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
    """The store's side of a checkpoint, and the leader's, which completes it."""
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
    """Of all ranks, by engine."""
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
