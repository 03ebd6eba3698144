"""Weight sync: the actor's parameters, resharded into the rollout's. A task that both roles' ranks join."""

import torch.distributed as dist

from rltrain.reshard.execute import execute
from rltrain.reshard.plan import plan
from rltrain.roles.actor import Actor
from rltrain.roles.role import Job, Metrics
from rltrain.roles.rollout import Rollout
from rltrain.rollout.layout import engine_layout


class WeightSync:
    """Built on every rank that hosts either role."""

    def __init__(self, job: Job, actor: Actor | None, rollout: Rollout | None) -> None:
        self.actor, self.rollout = actor, rollout
        self.bucket_bytes = job.config.weight_sync.bucket_mb * 2**20
        source = job.megatron_layout("actor")
        destination = engine_layout(job.architecture, job.grids["rollout"])
        self.plan = plan(source, destination, job.world.rank, job.world.ranks_per_node)
        union = tuple(sorted({*job.grids["actor"].ranks, *job.grids["rollout"].ranks}))
        self.group, self.cpu_group = job.groups[union], job.groups.cpu[union]

    def weight_sync(self, step: int) -> Metrics:
        """The rollout has the weights of version `step` afterwards. Collective over: the union of both roles' ranks."""
        # Before any transfer, so that a rank that does not come is named and holds no device.
        dist.monitored_barrier(self.cpu_group)
        report = execute(
            self.plan,
            self.actor.parameters if self.actor else None,
            self.rollout.parameters if self.rollout else None,
            group=self.group,
            bucket_bytes=self.bucket_bytes,
        )
        if self.rollout:
            self.rollout.engine.policy_version = step
        return {
            "perf/weight_sync_gb_per_s": report.bandwidth_bytes_per_s / 1e9,
            "perf/weight_sync_bytes": report.bytes_moved,
        }
