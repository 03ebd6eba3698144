"""Weight sync: the actor's parameters, resharded into the rollout's. A task that both roles' ranks join."""

import logging
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.errors import SyncMismatchError
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.delta_turns import Turn, Turns
from rltrain.reshard.execute import SyncReport, total
from rltrain.roles.actor import Actor
from rltrain.roles.merged_resharding import MergedResharding, merged_into_part
from rltrain.roles.role import Job, Metrics
from rltrain.roles.role_resharding import RoleResharding
from rltrain.roles.rollout import Rollout
from rltrain.rollout.layout import EnginePart, engine_parts
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S
from rltrain.training.backend import AdaptedModel, Model, served_weights

logger = logging.getLogger(__name__)


class SyncedPart(NamedTuple):
    resharding: RoleResharding | MergedResharding
    content: str
    """As EnginePart says."""


class WeightSync:
    """Built on every rank that hosts either role. Collective over: the union of both roles' ranks."""

    def __init__(self, job: Job, actor: Actor | None, rollout: Rollout | None) -> None:
        self.actor, self.engine = actor, rollout.engine if rollout else None
        self.config, delta = job.config.weight_sync, job.config.synced_delta
        self.compared_every = job.config.checks.replicas
        self.weights = rollout.parts["weights"] if rollout and delta else None
        self.left: tuple[int, int, int] | None = None
        """The version that the last sync gave this rank's engine, how often its memory had been emptied by then, and
        its process been started anew."""
        self.base = rollout.parts["base"] if rollout else None
        self.parts = [
            SyncedPart(resharding_into(job, "rollout", part, delta), part.content)
            for part in engine_parts(job.config, job.architecture, job.grids["rollout"])
        ]
        self.has_base = False
        """Whether engines have what an earlier sync of this process brought once: nothing takes it from them."""
        self.turns = Turns(delta.full_every, delta.check_every) if delta else None
        union = tuple(sorted({*job.grids["actor"].ranks, *job.grids["rollout"].ranks}))
        waiting = job.heartbeat.task_clock.waiting
        self.agreement = Agreement(job.groups.cpu[union], job.world.rank, TRANSPORT_TIMEOUT_S, waiting)

    def __call__(self, step: int, chunk: int) -> Metrics:
        """The rollout has the weights of version `step` afterwards, or no version at all where this raises SyncError.

        Collective over: the union of both roles' ranks.
        """
        lost, restarts = self.has_lost_weights(), self.engine.num_restarts if self.engine else 0
        if self.engine:
            self.engine.begin_update()
        turn = self._turn(lost)
        is_due = self.compared_every > 0 and step % self.compared_every == 0
        try:
            report, verify_s = self._send(turn, is_due=is_due)
        except SyncMismatchError as drifted:
            if turn is not Turn.CHANGES or self.turns is None:
                raise
            turn = self._begin_anew(drifted)
            report, verify_s = self._send(turn, is_due=is_due)
        if self.engine:
            self.engine.end_update(step)
            self.left = step, self.weights.times_emptied if self.weights else 0, restarts
        metrics = metrics_of(report) if report else {}
        if report and self.turns:
            self.turns.finished(turn, sent_share_of(report))
            metrics |= delta_metrics_of(report, turn)
        compares = is_due or self.turns or self.config.verify
        return {**metrics, "perf/weight_sync_verify_s": verify_s} if compares else metrics

    def has_lost_weights(self) -> bool:
        """Whether this rank's engine no longer has what the last sync left there, or may not."""
        if self.engine is None:
            return False
        emptied = self.weights.times_emptied if self.weights else 0
        return self.left != (self.engine.policy_version, emptied, self.engine.num_restarts)

    def _turn(self, lost: bool) -> Turn:
        if self.turns is None:
            return Turn.PLAIN
        self.agreement.meet()
        return self.turns.next(lost=self.agreement.total([int(lost)])[0] > 0)

    def _begin_anew(self, drifted: SyncMismatchError) -> Turn:
        assert self.turns is not None, "it was a sync of changes"
        if self.agreement.rank == self.agreement.ranks[0]:
            logger.warning(
                "A weight sync of what changed left an engine with other weights than the actor's, so that everything "
                "is sent now, and every later sync is compared (weight_sync.delta): %s",
                drifted,
            )
        self.turns.differed()
        return Turn.WHOLE

    def _send(self, turn: Turn, *, is_due: bool) -> tuple[SyncReport | None, float]:
        """All parts, and seconds that it took to compare both sides, as is done where it `is_due`."""
        is_kept, compares = turn is Turn.CHANGES, is_due or (self.turns is not None and self.turns.compares)
        reports, verify_s = [], 0.0
        for number, part in enumerate(self.parts):
            is_known = part.resharding.is_frozen and is_kept and not (compares or self.config.verify)
            if is_known or (part.content == "base" and self.has_base):
                continue
            source = _held_by(self.actor.model, part.content) if self.actor else None
            destination = self.engine.incoming(number, is_kept=is_kept) if self.engine else None
            report, seconds = part.resharding.run(source, destination, turn, compares=compares)
            reports += [report] if report else []
            verify_s += seconds
            if self.engine:
                self.engine.arrived(number)
            if part.content == "base" and self.base:
                self.base.changed()
        self.has_base = True
        return total(reports) if reports else None, verify_s


def resharding_into(
    job: Job, role: str, part: EnginePart, delta: WeightDelta | None = None
) -> RoleResharding | MergedResharding:
    """From the actor's layout to a part of what engines of `role` hold."""
    if part.content == "adapters":
        return RoleResharding(job, role, job.adapters_layout(), part.layout)
    if job.config.makes_served_weights and part.content == "weights":
        return merged_into_part(job, role, part, delta)
    layouts = part.filled_from(job.training_layout("actor"))
    blocks = layouts if part.quantized.any() else None
    return RoleResharding(job, role, layouts.source, layouts.destination, blocks, delta)


def _held_by(model: Model, content: str) -> Mapping[str, Tensor]:
    """What is sent of a trained model for a part of this content."""
    if content == "weights":
        return served_weights(model)
    if content == "base":
        return model.parameters
    assert isinstance(model, AdaptedModel), "only a model with adapters has any to send"
    return model.adapters


def sent_share_of(report: SyncReport) -> float:
    """Of the bytes that were compared; 1 where none were."""
    return report.bytes_encoded / report.bytes_compared if report.bytes_compared else 1.0


def delta_metrics_of(report: SyncReport, turn: Turn) -> Metrics:
    found = {"perf/weight_sync_is_full": float(turn is not Turn.CHANGES)}
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
