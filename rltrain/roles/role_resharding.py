"""The actor's parameters, resharded into those of another role."""

import time
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from rltrain.cluster.world import TRANSPORT_TIMEOUT_S
from rltrain.config.schema import WeightDelta
from rltrain.reshard.check.full_gather import full_gather_sync
from rltrain.reshard.check.verify import verify
from rltrain.reshard.delta.coder import DeltaSettings
from rltrain.reshard.execute.report import SyncReport
from rltrain.reshard.execute.resharding import Resharding
from rltrain.reshard.fp8.block_scales import BlockScales, BlockTable
from rltrain.reshard.fp8.blocks import QuantizedLayouts
from rltrain.reshard.layout import Layout
from rltrain.reshard.plan.planner import plan
from rltrain.roles.role import Job

Tensors = Mapping[str, Tensor] | None


class RoleResharding:
    """From `source`, the actor's layout, to `destination`, that of `role`, as the config section weight_sync says.

    Built on every rank that hosts either. Building and running it are collective over: the union of both roles' ranks.
    """

    def __init__(
        self,
        job: Job,
        role: str,
        source: Layout,
        destination: Layout,
        blocks: QuantizedLayouts | None = None,
        delta: WeightDelta | None = None,
    ) -> None:
        world = job.world
        union = tuple(sorted({*job.grids["actor"].ranks, *job.grids[role].ranks}))
        self.config, self.delta = job.config.weight_sync, delta
        self.num_unchecked = 0
        self.source, self.destination = source, destination
        self.blocks = BlockTable(blocks, world.rank) if blocks else None
        self.group, self.cpu_group = job.groups[union], job.groups.cpu[union]
        self.waiting = job.heartbeat.task_clock.waiting
        self.resharding = Resharding(
            plan(source, destination, world.rank, world.ranks_per_node),
            group=self.group,
            cpu_group=self.cpu_group,
            bucket_bytes=self.config.bucket_mb * 2**20,
            device=world.device,
            ranks_per_node=world.ranks_per_node,
            magnitudes=BlockScales(self.blocks, world.device) if self.blocks else None,
            delta=DeltaSettings(delta.full_every, delta.keep_on, delta.in_shared_memory) if delta else None,
            timeout_s=TRANSPORT_TIMEOUT_S,
            waiting=self.waiting,
        )

    def run(self, source: Tensors, destination: Tensors, *, lost: bool = False) -> tuple[SyncReport | None, float]:
        """Fill `destination`; what the planned way has to report, and seconds that it took to compare both sides.

        With a delta, `lost` says that this rank's `destination` is not what the last run left there. Raises
        SyncMismatchError where weight_sync.verify, or weight_sync.delta.check_every, finds a difference.
        """
        report = None
        if self.config.transport == "planned":
            report = self.resharding.run(source, destination, lost=lost)
        else:
            self._gather_fully(source, destination)
        compares = self.config.verify or self._is_due(report)
        return report, self._verify(source, destination) if compares else 0.0

    def _is_due(self, report: SyncReport | None) -> bool:
        """Whether what changed has been sent so often without a look. The same on all ranks."""
        if report is None or self.delta is None or not self.delta.check_every or report.num_whole:
            return False
        self.num_unchecked = (self.num_unchecked + 1) % self.delta.check_every
        return self.num_unchecked == 0

    def _gather_fully(self, source: Tensors, destination: Tensors) -> None:
        """Assemble every tensor on every rank: slow, and shares only the layouts with the planned way."""
        timeout = timedelta(seconds=TRANSPORT_TIMEOUT_S)
        # Before, so that a rank that does not come is named; after, so that no version is served before all have it.
        with self.waiting("the others to come to a reshard"):
            dist.monitored_barrier(self.cpu_group, timeout=timeout)
        full_gather_sync(self.source, self.destination, source, destination, self.group)
        dist.monitored_barrier(self.cpu_group, timeout=timeout)

    def _verify(self, source: Tensors, destination: Tensors) -> float:
        start = time.perf_counter()
        plan = self.resharding.plan
        verify(plan, self.source, self.destination, source, destination, group=self.cpu_group, blocks=self.blocks)
        return time.perf_counter() - start
