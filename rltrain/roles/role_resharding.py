"""The actor's parameters, resharded into those of another role."""

import time
from collections.abc import Mapping
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.reshard.delta import DeltaSettings
from rltrain.reshard.delta_turns import Turn
from rltrain.reshard.execute import Resharding, SyncReport
from rltrain.reshard.fp8_blocks import QuantizedLayouts
from rltrain.reshard.fp8_scales import BlockScales, BlockTable
from rltrain.reshard.layout import Layout
from rltrain.reshard.plan import plan
from rltrain.reshard.verify import full_gather_sync, verify
from rltrain.roles.role import Job
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S

Tensors = Mapping[str, Tensor] | None


class RoleResharding:
    """From `source`, the actor's layout, to `destination`, that of `role`, as the config section weight_sync says.

    Built on every rank that hosts either. Building and running it are collective over: the union of both roles' ranks.
    """

    is_frozen = False
    """Whether nothing of `destination` ever changes."""

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
        self.config, self.world = job.config.weight_sync, world
        self.source, self.destination = source, destination
        self.blocks = BlockTable(blocks, world.rank) if blocks else None
        self.magnitudes = BlockScales(self.blocks, world.device) if self.blocks else None
        self.group, self.cpu_group = job.groups[union], job.groups.cpu[union]
        self.waiting = job.heartbeat.task_clock.waiting
        self.plan = plan(source, destination, world.rank, world.ranks_per_node)
        self.remembering = self._resharding(DeltaSettings(delta.keep_on, delta.in_shared_memory)) if delta else None
        if delta is None:
            self.plain  # noqa: B018 - made here, where ranks that disagree say so before the first step

    @cached_property
    def plain(self) -> Resharding:
        """What sends everything and remembers nothing. Collective over: both roles' ranks."""
        return self._resharding(None)

    def run(
        self, source: Tensors, destination: Tensors, turn: Turn = Turn.PLAIN, *, compares: bool = False
    ) -> tuple[SyncReport | None, float]:
        """Fill `destination`; what the planned way has to report, and seconds that it took to compare both sides.

        `turn` is the same on all ranks; in one of CHANGES `destination` has what the last run left there. Raises
        SyncMismatchError where a comparison, which weight_sync.verify or `compares` asks for, finds a difference.
        """
        report = None
        if self.config.transport != "planned":
            self._gather_fully(source, destination)
        elif turn is Turn.PLAIN or self.remembering is None:
            report = self.plain.run(source, destination)
        else:
            report = self.remembering.run(source, destination, whole=turn is Turn.WHOLE)
        return report, self.verify(source, destination) if compares or self.config.verify else 0.0

    def verify(self, source: Tensors, destination: Tensors) -> float:
        """Seconds that it took to compare both sides. SyncMismatchError where they differ."""
        start = time.perf_counter()
        layouts = self.source, self.destination
        verify(self.plan, *layouts, source, destination, group=self.cpu_group, blocks=self.blocks)
        return time.perf_counter() - start

    def _resharding(self, delta: DeltaSettings | None) -> Resharding:
        return Resharding(
            self.plan,
            group=self.group,
            cpu_group=self.cpu_group,
            bucket_bytes=self.config.bucket_mb * 2**20,
            device=self.world.device,
            ranks_per_node=self.world.ranks_per_node,
            magnitudes=self.magnitudes,
            delta=delta,
            timeout_s=TRANSPORT_TIMEOUT_S,
            waiting=self.waiting,
        )

    def _gather_fully(self, source: Tensors, destination: Tensors) -> None:
        """Assemble every tensor on every rank: slow, and shares only the layouts with the planned way."""
        timeout = timedelta(seconds=TRANSPORT_TIMEOUT_S)
        # Before, so that a rank that does not come is named; after, so that no version is served before all have it.
        with self.waiting("the others to come to a reshard"):
            dist.monitored_barrier(self.cpu_group, timeout=timeout)
        full_gather_sync(self.source, self.destination, source, destination, self.group)
        dist.monitored_barrier(self.cpu_group, timeout=timeout)
