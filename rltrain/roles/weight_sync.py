"""Weight sync: the actor's parameters, resharded into the rollout's. A task that both roles' ranks join."""

from rltrain.reshard.execute import Resharding
from rltrain.reshard.planner import plan
from rltrain.reshard.report import SyncReport
from rltrain.roles.actor import Actor
from rltrain.roles.role import Job, Metrics
from rltrain.roles.rollout import Rollout
from rltrain.rollout.layout import engine_layout

BUCKET_MB = {"cpu": 16, "cuda": 64}
"""Where the config leaves it open."""


class WeightSync:
    """Built on every rank that hosts either role. Collective over: the union of both roles' ranks."""

    def __init__(self, job: Job, actor: Actor | None, rollout: Rollout | None) -> None:
        self.actor, self.rollout = actor, rollout
        world = job.world
        source = job.megatron_layout("actor")
        destination = engine_layout(job.architecture, job.grids["rollout"], dtype=job.config.model.dtype)
        union = tuple(sorted({*job.grids["actor"].ranks, *job.grids["rollout"].ranks}))
        self.resharding = Resharding(
            plan(source, destination, world.rank, world.ranks_per_node),
            group=job.groups[union],
            cpu_group=job.groups.cpu[union],
            bucket_bytes=(job.config.weight_sync.bucket_mb or BUCKET_MB[world.device.type]) * 2**20,
            device=world.device,
            ranks_per_node=world.ranks_per_node,
            timeout_s=job.config.cluster.timeout_s,
        )

    def weight_sync(self, step: int) -> Metrics:
        """The rollout has the weights of version `step` afterwards, or no version at all where this raises SyncError.

        Collective over: the union of both roles' ranks.
        """
        if self.rollout:
            self.rollout.engine.begin_update()
        report = self.resharding.run(
            self.actor.parameters if self.actor else None, self.rollout.parameters if self.rollout else None
        )
        if self.rollout:
            self.rollout.engine.policy_version = step
        return metrics_of(report)


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
