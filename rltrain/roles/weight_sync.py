"""Weight sync: the actor's parameters, resharded into the rollout's. A task that both roles' ranks join."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.reshard.execute.report import SyncReport, total
from rltrain.roles.actor import Actor
from rltrain.roles.merged_resharding import MergedResharding, merged_into_part
from rltrain.roles.role import Job, Metrics
from rltrain.roles.role_resharding import RoleResharding
from rltrain.roles.rollout import Rollout
from rltrain.rollout.layout import EnginePart, engine_parts
from rltrain.training.backend import AdaptedModel, Model, published_weights


class SyncedPart(NamedTuple):
    resharding: RoleResharding | MergedResharding
    content: str
    """As EnginePart says."""


class WeightSync:
    """Built on every rank that hosts either role. Collective over: the union of both roles' ranks."""

    def __init__(self, job: Job, actor: Actor | None, rollout: Rollout | None) -> None:
        self.actor, self.engine = actor, rollout.engine if rollout else None
        self.config = job.config.weight_sync
        self.weights = rollout.parts["weights"] if rollout and self.config.delta else None
        self.left: tuple[int, int] | None = None
        """The version that the last sync gave this rank's engine, and how often its memory had been emptied by then."""
        self.base = rollout.parts["base"] if rollout else None
        self.parts = [
            SyncedPart(resharding_into(job, "rollout", part, job.config.weight_sync.delta), part.content)
            for part in engine_parts(job.config, job.architecture, job.grids["rollout"])
        ]
        self.has_base = False
        """Whether engines have what an earlier sync of this process brought once: nothing takes it from them."""

    def __call__(self, step: int, chunk: int) -> Metrics:
        """The rollout has the weights of version `step` afterwards, or no version at all where this raises SyncError.

        Collective over: the union of both roles' ranks.
        """
        lost = self.has_lost_weights()
        if self.engine:
            self.engine.begin_update()
        reports, verify_s = [], 0.0
        for number, part in enumerate(self.parts):
            if part.content == "base" and self.has_base:
                continue
            source = _held_by(self.actor.model, part.content) if self.actor else None
            destination = self.engine.incoming(number) if self.engine else None
            report, seconds = part.resharding.run(source, destination, lost=lost)
            reports += [report] if report else []
            verify_s += seconds
            if self.engine:
                self.engine.arrived(number)
            if part.content == "base" and self.base:
                self.base.changed()
        self.has_base = True
        if self.engine:
            self.engine.end_update(step)
            self.left = step, self.weights.times_emptied if self.weights else 0
        metrics = metrics_of(total(reports)) if reports else {}
        if reports and self.config.delta:
            metrics |= delta_metrics_of(total(reports))
        checks = self.config.verify or bool(self.config.delta and self.config.delta.check_every)
        return {**metrics, "perf/weight_sync_verify_s": verify_s} if checks else metrics

    def has_lost_weights(self) -> bool:
        """Whether this rank's engine no longer has what the last sync left there."""
        if self.engine is None:
            return False
        emptied = self.weights.times_emptied if self.weights else 0
        return self.left is None or self.left != (self.engine.policy_version, emptied)


def resharding_into(
    job: Job, role: str, part: EnginePart, delta: WeightDelta | None = None
) -> RoleResharding | MergedResharding:
    """From the actor's layout to a part of what engines of `role` hold."""
    if part.content == "adapters":
        return RoleResharding(job, role, job.adapters_layout(), part.layout)
    if job.config.makes_actor_weights and part.content == "weights":
        return merged_into_part(job, role, part, delta)
    layouts = part.filled_from(job.training_layout("actor"))
    blocks = layouts if part.quantized.any() else None
    return RoleResharding(job, role, layouts.source, layouts.destination, blocks, delta)


def _held_by(model: Model, content: str) -> Mapping[str, Tensor]:
    """What is sent of a trained model for a part of this content."""
    if content == "weights":
        return published_weights(model)
    if content == "base":
        return model.parameters
    assert isinstance(model, AdaptedModel), "only a model with adapters has any to send"
    return model.adapters


def delta_metrics_of(report: SyncReport) -> Metrics:
    found = {"perf/weight_sync_is_full": float(bool(report.num_whole))}
    if report.bytes_compared:
        found["perf/weight_sync_changed_share"] = report.bytes_changed / report.bytes_compared
    return found


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
