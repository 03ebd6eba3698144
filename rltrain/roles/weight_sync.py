"""Weight sync: the actor's parameters, resharded into the rollout's. A task that both roles' ranks join."""

import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from rltrain.cluster.world import TRANSPORT_TIMEOUT_S
from rltrain.reshard.check.full_gather import full_gather_sync
from rltrain.reshard.check.verify import verify
from rltrain.reshard.execute.report import SyncReport, total
from rltrain.reshard.execute.resharding import Resharding
from rltrain.reshard.fp8.block_scales import BlockScales, BlockTable
from rltrain.reshard.plan.planner import plan
from rltrain.roles.actor import Actor
from rltrain.roles.role import Job, Metrics
from rltrain.roles.rollout import Rollout
from rltrain.rollout.layout import EnginePart, engine_parts

Tensors = Mapping[str, Tensor] | None


class WeightSync:
    """Built on every rank that hosts either role. Collective over: the union of both roles' ranks."""

    def __init__(self, job: Job, actor: Actor | None, rollout: Rollout | None) -> None:
        self.actor, self.engine = actor, rollout.engine if rollout else None
        self.config = job.config.weight_sync
        parts = engine_parts(job.config, job.architecture, job.grids["rollout"])
        self.parts = [_Part(job, part) for part in parts]

    def weight_sync(self, step: int, chunk: int) -> Metrics:
        """The rollout has the weights of version `step` afterwards, or no version at all where this raises SyncError.

        Collective over: the union of both roles' ranks.
        """
        if self.engine:
            self.engine.begin_update()
        source = self.actor.model.parameters if self.actor else None
        reports, verify_s = [], 0.0
        for number, part in enumerate(self.parts):
            destination = self.engine.incoming(number) if self.engine else None
            if self.config.transport == "planned":
                reports.append(part.resharding.run(source, destination))
            else:
                part.gather_fully(source, destination)
            if self.config.verify:
                verify_s += part.verify(source, destination)
            if self.engine:
                self.engine.arrived(number)
        if self.engine:
            self.engine.end_update(step)
        metrics = metrics_of(total(reports)) if reports else {}
        return {**metrics, "perf/weight_sync_verify_s": verify_s} if self.config.verify else metrics


class _Part:
    """What an engine receives at a time. Its methods are collective over: the union of both roles' ranks."""

    def __init__(self, job: Job, part: EnginePart) -> None:
        world = job.world
        union = tuple(sorted({*job.grids["actor"].ranks, *job.grids["rollout"].ranks}))
        layouts = part.filled_from(job.training_layout("actor"))
        self.source, self.destination = layouts.source, layouts.destination
        self.blocks = BlockTable(layouts, world.rank) if part.quantized.any() else None
        self.group, self.cpu_group = job.groups[union], job.groups.cpu[union]
        self.waiting = job.heartbeat.task_clock.waiting
        self.resharding = Resharding(
            plan(self.source, self.destination, world.rank, world.ranks_per_node),
            group=self.group,
            cpu_group=self.cpu_group,
            bucket_bytes=job.config.weight_sync.bucket_mb * 2**20,
            device=world.device,
            ranks_per_node=world.ranks_per_node,
            magnitudes=BlockScales(self.blocks, world.device) if self.blocks else None,
            timeout_s=TRANSPORT_TIMEOUT_S,
            waiting=self.waiting,
        )

    def gather_fully(self, source: Tensors, destination: Tensors) -> None:
        """Assemble every tensor on every rank: slow, and shares only the layouts with the planned way."""
        timeout = timedelta(seconds=TRANSPORT_TIMEOUT_S)
        # Before, so that a rank that does not come is named; after, so that no version is served before all have it.
        with self.waiting("the others to come to a reshard"):
            dist.monitored_barrier(self.cpu_group, timeout=timeout)
        full_gather_sync(self.source, self.destination, source, destination, self.group)
        dist.monitored_barrier(self.cpu_group, timeout=timeout)

    def verify(self, source: Tensors, destination: Tensors) -> float:
        """Seconds that it took to compare what both sides hold. Raises SyncMismatchError."""
        start = time.perf_counter()
        plan = self.resharding.plan
        verify(plan, self.source, self.destination, source, destination, group=self.cpu_group, blocks=self.blocks)
        return time.perf_counter() - start


def metrics_of(report: SyncReport) -> Metrics:
    return {
        "perf/weight_sync_bytes": report.bytes_moved,
        "perf/weight_sync_local_bytes": report.bytes_local,
        "perf/weight_sync_node_bytes": report.bytes_node,
        "perf/weight_sync_network_bytes": report.bytes_network,
        "perf/weight_sync_network_ratio": report.network_ratio,
        "perf/weight_sync_gb_per_s": report.bandwidth_bytes_per_s / 1e9,
        "perf/weight_sync_copy_s": report.copy_seconds,
        "perf/weight_sync_pack_s": report.pack_seconds,
        "perf/weight_sync_wire_s": report.wire_seconds,
        "perf/weight_sync_unpack_s": report.unpack_seconds,
        "perf/weight_sync_launches": report.num_launches,
        "perf/weight_sync_rounds": report.num_rounds,
        "perf/weight_sync_staging_bytes": report.peak_staging_bytes,
    }
