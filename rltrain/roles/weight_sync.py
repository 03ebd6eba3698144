"""The actor's weights for engines and other roles: resharded whole, merged with adapters, or as changes."""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.errors import SyncMismatchError
from rltrain.models import canonical_tensors
from rltrain.models.families import ROUTER_BIAS
from rltrain.models.lora import matrix_of
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.delta import DeltaSettings
from rltrain.reshard.delta_turns import DeltaTurn, DeltaTurns
from rltrain.reshard.execute import Resharding, SyncReport, total
from rltrain.reshard.fp8_blocks import QuantizedLayouts
from rltrain.reshard.fp8_scales import BlockScales, BlockTable
from rltrain.reshard.layout import MADE_BYTES, BoolArray, Layout, holding, tensor_groups
from rltrain.reshard.plan import plan
from rltrain.reshard.verify import full_gather_sync, verify
from rltrain.roles.actor import ActorRole
from rltrain.roles.evaluation import EvaluationRole
from rltrain.roles.reference import InferenceRole, ReferenceRole, uses_actor_modules
from rltrain.roles.role import Job, Metrics, Role
from rltrain.roles.rollout import RolloutRole
from rltrain.rollout.embedded.parameters import allocate_parameters
from rltrain.rollout.layout import ARRIVING_BYTES, EnginePart, engine_parts, in_parts, whole_engine
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S
from rltrain.training.trainable import RoleModel

# The actor's parameters, resharded into those of another role.

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
        self, source: Tensors, destination: Tensors, turn: DeltaTurn = DeltaTurn.PLAIN, *, compares: bool = False
    ) -> tuple[SyncReport | None, float]:
        """Fill `destination`; what the planned way has to report, and seconds that it took to compare both sides.

        `turn` is the same on all ranks; in one of CHANGES `destination` has what the last run left there. Raises
        SyncMismatchError where a comparison, which weight_sync.verify or `compares` asks for, finds a difference.
        """
        report = None
        if self.config.transport != "planned":
            self._gather_fully(source, destination)
        elif turn is DeltaTurn.PLAIN or self.remembering is None:
            report = self.plain.run(source, destination)
        else:
            report = self.remembering.run(source, destination, whole=turn is DeltaTurn.WHOLE)
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


# The weights of an actor that are made when they are asked for, merged with low-rank adapters or brought from the
# host, resharded into another role's: some layers at a time, so that never more of them are there than those.

Group = tuple[Layout, Layout, QuantizedLayouts | None]
"""Source, destination, and of those that quantise the blocks."""


class MergedResharding:
    """As RoleResharding, of `groups` one after the other, and of `frozen` ones, to which adapters add nothing; all
    together have each tensor of `destination` once.

    Building and running it are collective over: the union of both roles' ranks.
    """

    def __init__(
        self,
        job: Job,
        role: str,
        destination: Layout,
        groups: Sequence[Group],
        frozen: Sequence[Group],
        delta: WeightDelta | None = None,
    ) -> None:
        self.destination, self._rank = destination, job.world.rank
        self._groups = [RoleResharding(job, role, *group, delta) for group in groups]
        self._frozen = [RoleResharding(job, role, *group) for group in frozen]
        self.is_frozen = not groups
        """Whether nothing of `destination` ever changes."""

    def run(
        self, source: Tensors, destination: Tensors, turn: DeltaTurn = DeltaTurn.PLAIN, *, compares: bool = False
    ) -> tuple[SyncReport | None, float]:
        """Fill `destination`. What is read of `source` is read group by group, and forgotten after its group. In a turn
        of CHANGES what is frozen is neither sent nor read, unless to be compared."""
        reports, verify_s = [], 0.0
        for group in self._groups:
            report, seconds = group.run(self._held(group.source, source), destination, turn, compares=compares)
            reports += [report] if report else []
            verify_s += seconds
        for group in self._frozen:
            held = self._held(group.source, source)
            if turn is not DeltaTurn.CHANGES:
                report, seconds = group.run(held, destination, compares=compares)
                reports += [report] if report else []
                verify_s += seconds
            elif compares or group.config.verify:
                verify_s += group.verify(held, destination)
        return total(reports) if reports else None, verify_s

    def _held(self, layout: Layout, source: Tensors) -> Mapping[str, Tensor] | None:
        if source is None:
            return None
        # The rest is what a reshard that quantises computes itself.
        return {name: source[name] for name, _ in layout.on(self._rank).parameters if name in source}


def merged_into_part(
    job: Job, role: str, part: EnginePart, delta: WeightDelta | None = None, max_bytes: int = MADE_BYTES
) -> MergedResharding:
    """From the actor's layout to a part of what engines of `role` hold."""
    source = job.training_layout("actor")

    def held_of(groups: Iterable[BoolArray]) -> list[Group]:
        found: list[Group] = []
        for held in (_held_by_any(part.plain, tensors) for tensors in groups):
            if held.any():
                some = EnginePart(holding(part.plain, held), part.quantized & held)
                layouts = some.filled_from(holding(source, held))
                found.append((layouts.source, layouts.destination, layouts if some.quantized.any() else None))
        return found

    groups, frozen = (held_of(found) for found in _groups_of(job, source, max_bytes))
    return MergedResharding(job, role, part.filled_from(source).destination, groups, frozen, delta)


def merged_into_model(job: Job, role: str, max_bytes: int = MADE_BYTES) -> MergedResharding:
    """From the actor's layout to that of `role`, whose model is the training backend's."""
    source, destination = job.training_layout("actor"), job.training_layout(role)
    groups, frozen = (
        [(holding(source, tensors), holding(destination, tensors), None) for tensors in found]
        for found in _groups_of(job, source, max_bytes)
    )
    return MergedResharding(job, role, destination, groups, frozen)


def _groups_of(job: Job, source: Layout, max_bytes: int) -> tuple[list[BoolArray], list[BoolArray]]:
    """[tensors] of some layers each that training changes, and those that it leaves as they are: without adapters
    none. Biases of routers follow loads, and are with the former."""
    lora, groups = job.config.model.lora, [*tensor_groups(source.tensors, source.types, max_bytes)]
    if lora is None:
        return groups, []
    adapters = canonical_tensors(job.architecture.adapted(lora.rank, lora.targets)).names
    bias = ROUTER_BIAS.parts[0].name.rpartition(".")[2]
    changing = {*map(matrix_of, adapters), *(name for name in source.tensors.names if name.endswith(bias))}
    adapted = np.isin(source.tensors.names, sorted(changing))
    groups = [group & adapted for group in groups]
    return [group for group in groups if group.any()], [~adapted] if not adapted.all() else []


def _held_by_any(layout: Layout, tensors: np.ndarray) -> np.ndarray:
    held = np.zeros_like(tensors)
    numbers = set(chain.from_iterable(layout.part(share).pieces["tensor"].tolist() for share in set(layout.parts)))
    held[sorted(numbers)] = True
    return held & tensors


# Weight sync: the actor's parameters, resharded into the rollout's. A task that both roles' ranks join.

logger = logging.getLogger(__name__)


class SyncedPart(NamedTuple):
    resharding: RoleResharding | MergedResharding
    content: str
    """As EnginePart says."""


class WeightSyncTask:
    """Built on every rank that hosts either role. Collective over: the union of both roles' ranks."""

    def __init__(self, job: Job, actor: ActorRole | None, rollout: RolloutRole | None) -> None:
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
        self.turns = DeltaTurns(delta.full_every, delta.check_every) if delta else None
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
            if turn is not DeltaTurn.CHANGES or self.turns is None:
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

    def _turn(self, lost: bool) -> DeltaTurn:
        if self.turns is None:
            return DeltaTurn.PLAIN
        self.agreement.meet()
        return self.turns.next(lost=self.agreement.total([int(lost)])[0] > 0)

    def _begin_anew(self, drifted: SyncMismatchError) -> DeltaTurn:
        assert self.turns is not None, "it was a sync of changes"
        if self.agreement.rank == self.agreement.ranks[0]:
            logger.warning(
                "A weight sync of what changed left an engine with other weights than the actor's, so that everything "
                "is sent now, and every later sync is compared (weight_sync.delta): %s",
                drifted,
            )
        self.turns.differed()
        return DeltaTurn.WHOLE

    def _send(self, turn: DeltaTurn, *, is_due: bool) -> tuple[SyncReport | None, float]:
        """All parts, and seconds that it took to compare both sides, as is done where it `is_due`."""
        is_kept, compares = turn is DeltaTurn.CHANGES, is_due or (self.turns is not None and self.turns.compares)
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


def _held_by(model: RoleModel, content: str) -> Mapping[str, Tensor]:
    """What is sent of a trained model for a part of this content."""
    if content == "weights":
        return model.served
    if content == "base":
        return model.parameters
    assert model.adapted, "only a model with adapters has any to send"
    return model.adapted.parameters


def sent_share_of(report: SyncReport) -> float:
    """Of the bytes that were compared; 1 where none were."""
    return report.bytes_encoded / report.bytes_compared if report.bytes_compared else 1.0


def delta_metrics_of(report: SyncReport, turn: DeltaTurn) -> Metrics:
    found = {"perf/weight_sync_is_full": float(turn is not DeltaTurn.CHANGES)}
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


# The actor's weights for an evaluation by engines of its own. A task that both roles' ranks join.


class EvaluationSync:
    """Built on every rank that hosts either role; None where this rank has it not.

    Engines keep the weights on the host until their turn, so they join while they draw an evaluation before this one.
    Building and calling it are collective over: the union of both roles' ranks.
    """

    def __init__(self, job: Job, actor: Role | None, evaluation: Role | None) -> None:
        self.job = job
        self.actor = actor if isinstance(actor, ActorRole) else None
        self.evaluation = evaluation if isinstance(evaluation, EvaluationRole) else None
        whole = whole_engine(job.config, job.architecture, job.grids["evaluation"], "evaluation")
        self.parts = [resharding_into(job, "evaluation", part) for part in in_parts(whole, ARRIVING_BYTES)]

    def __call__(self, step: int, chunk: int) -> None:
        """The evaluation of the step has its weights afterwards."""
        source = self.actor.model.served if self.actor else None
        received: dict[str, Tensor] = {}
        for part in self.parts:
            incoming = None
            if self.evaluation:
                incoming = allocate_parameters(part.destination, self.job.world.rank, device=self.job.world.device)
            part.run(source, incoming)
            received |= {name: tensor.cpu() for name, tensor in (incoming or {}).items()}
        if self.evaluation:
            self.evaluation.weights[step] = received


# The actor's weights for another role whose model is the training backend's. A task that both roles' ranks join.


class ModelSync:
    """Built on every rank that hosts the actor or `follower`'s role; None where this rank has it not.

    Building and calling it are collective over: the union of both roles' ranks.
    """

    def __init__(self, job: Job, role: str, actor: Role | None, follower: Role | None) -> None:
        self.actor = actor if isinstance(actor, ActorRole) else None
        self.follower = follower if isinstance(follower, InferenceRole | ReferenceRole) else None
        self.resharding: RoleResharding | MergedResharding | None = None
        if job.config.makes_actor_weights:
            self.resharding = merged_into_model(job, role)
        elif not (role == ReferenceRole.name and uses_actor_modules(job)):
            self.resharding = RoleResharding(job, role, job.training_layout("actor"), job.training_layout(role))

    def __call__(self, step: int, chunk: int) -> None:
        """The follower has the actor's weights afterwards."""
        if self.resharding is None:
            assert isinstance(self.follower, ReferenceRole), "it has the actor's ranks"
            self.follower.keep_actor_weights()
            return
        source = self.actor.model.published if self.actor else None
        self.resharding.run(source, self.follower.model.parameters if self.follower else None)
