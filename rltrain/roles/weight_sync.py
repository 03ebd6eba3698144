"""Syncs of the actor's weights to engines and other roles: full, merged with adapters, or as changes."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, cast

import numpy as np
import torch.distributed as dist
from torch import Tensor

from rltrain.config.schema import WeightDelta
from rltrain.errors import SyncMismatchError
from rltrain.models import adapted_tensors
from rltrain.models.families import ROUTER_BIAS
from rltrain.reshard.agreement import Agreement
from rltrain.reshard.copy_table import allocate_parameters
from rltrain.reshard.delta import DeltaSettings, DeltaTurn, DeltaTurns
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
from rltrain.rollout.layout import ARRIVING_BYTES, EnginePart, engine_parts, in_parts, whole_engine
from rltrain.runtime.world import TRANSPORT_TIMEOUT_S
from rltrain.schedule.order import SYNC_EVALUATION, WEIGHT_SYNC, Order
from rltrain.tasks.roles import SYNCED
from rltrain.training.trainable import RoleModel

# Resharding of the actor's parameters into another role's.

Tensors = Mapping[str, Tensor] | None


def both_roles(job: Job, role: str) -> tuple[int, ...]:
    """Returns the ranks of the actor and of `role`, ascending."""
    return tuple(sorted({*job.grids["actor"].ranks, *job.grids[role].ranks}))


class RoleResharding:
    """A reshard of tensors from the actor's layout `source` into the layout `destination` of `role`.

    The config section `weight_sync` sets how. `is_frozen` marks tensors without changes in training. Built on every
    rank of either role. Building and running it are collective over: the union of both roles' ranks.
    """

    def __init__(
        self,
        job: Job,
        role: str,
        source: Layout,
        destination: Layout,
        blocks: QuantizedLayouts | None = None,
        delta: WeightDelta | None = None,
        *,
        is_frozen: bool = False,
    ) -> None:
        world, union = job.world, both_roles(job, role)
        self.config, self.world = job.config.weight_sync, world
        self.source, self.destination, self.is_frozen = source, destination, is_frozen
        self.blocks = BlockTable(blocks, world.rank) if blocks else None
        self.magnitudes = BlockScales(self.blocks, world.device) if self.blocks else None
        self.group, self.cpu_group = job.groups[union], job.groups.cpu[union]
        self.waiting = job.heartbeat.task_clock.waiting
        self.plan = plan(source, destination, world.rank, world.ranks_per_node)
        remembers = None if delta is None or is_frozen else DeltaSettings(delta.keep_on, delta.in_shared_memory)
        self.remembering = self._resharding(remembers) if remembers else None
        if self.remembering is None:
            self.plain  # noqa: B018 - made here, so ranks that disagree fail before the first step

    @cached_property
    def plain(self) -> Resharding:
        """The resharding that sends everything and keeps no copy for deltas. Collective over: both roles' ranks."""
        return self._resharding(None)

    def run(
        self, source: Tensors, destination: Tensors, turn: DeltaTurn = DeltaTurn.PLAIN, *, compares: bool = False
    ) -> tuple[SyncReport | None, float]:
        """Fills `destination`. Returns the report of the planned transport and the seconds spent on comparing both
        sides.

        `turn` is the same on all ranks. With CHANGES, `destination` must still hold the result of the last run. Frozen
        tensors are then neither sent nor read, except for a comparison. Only this layout's tensors of `source` are
        read, and none are kept. Raises SyncMismatchError if a comparison finds a difference. `weight_sync.verify` and
        `compares` ask for one.
        """
        compares, is_there = compares or self.config.verify, self.is_frozen and turn is DeltaTurn.CHANGES
        if is_there and not compares:
            return None, 0.0
        if source is not None:
            # The missing names are scales. A quantising reshard computes them itself.
            names = [name for name, _ in self.source.on(self.world.rank).parameters]
            source = {name: source[name] for name in names if name in source}
        report = None if is_there else self._send(source, destination, turn)
        return report, self.verify(source, destination) if compares else 0.0

    def verify(self, source: Tensors, destination: Tensors) -> float:
        """Compares both sides and returns the seconds it took. Raises SyncMismatchError if they differ."""
        start = time.perf_counter()
        layouts = self.source, self.destination
        verify(self.plan, *layouts, source, destination, group=self.cpu_group, blocks=self.blocks)
        return time.perf_counter() - start

    def _send(self, source: Tensors, destination: Tensors, turn: DeltaTurn) -> SyncReport | None:
        if self.config.transport != "planned":
            self._gather_fully(source, destination)
            return None
        if turn is DeltaTurn.PLAIN or self.remembering is None:
            return self.plain.run(source, destination)
        return self.remembering.run(source, destination, whole=turn is DeltaTurn.WHOLE)

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
        """Assembles every tensor on every rank. This is slow, and has only the layouts in common with the planned
        transport."""
        timeout = timedelta(seconds=TRANSPORT_TIMEOUT_S)
        # The first barrier names a rank that does not come. The second keeps a version from being served before all
        # have it.
        with self.waiting("the others to come to a reshard"):
            dist.monitored_barrier(self.cpu_group, timeout=timeout)
        full_gather_sync(self.source, self.destination, source, destination, self.group)
        dist.monitored_barrier(self.cpu_group, timeout=timeout)


# Groups of tensors to be sent together. Merged weights, and weights from the host, are made some layers at a time. This
# limits the memory that they take.


def reshardings_into(job: Job, role: str, part: EnginePart, delta: WeightDelta | None = None) -> list[RoleResharding]:
    """Returns the reshardings that fill one part of the engines of `role`. Each tensor is in one of them."""
    if part.content == "adapters":
        return [RoleResharding(job, role, job.adapters_layout(), part.layout)]
    source = job.training_layout("actor")
    found = [(source, part, part.is_frozen)]
    if job.config.makes_served_weights and part.content == "weights":
        found = [
            (holding(source, held), EnginePart(holding(part.plain, held), part.quantized & held), is_frozen)
            for group, is_frozen in groups_of(job, source)
            if (held := _held_by_any(part.plain, group)).any()
        ]
    made = []
    for of_actor, some, is_frozen in found:
        layouts = some.filled_from(of_actor)
        blocks = layouts if some.quantized.any() else None
        made.append(RoleResharding(job, role, layouts.source, layouts.destination, blocks, delta, is_frozen=is_frozen))
    return made


def reshardings_into_model(job: Job, role: str) -> list[RoleResharding]:
    """Returns the reshardings that fill the model of `role` in the training backend."""
    source, destination = job.training_layout("actor"), job.training_layout(role)
    if not job.config.makes_actor_weights:
        return [RoleResharding(job, role, source, destination)]
    return [
        RoleResharding(job, role, holding(source, group), holding(destination, group), is_frozen=is_frozen)
        for group, is_frozen in groups_of(job, source)
    ]


def groups_of(job: Job, source: Layout, max_bytes: int = MADE_BYTES) -> list[tuple[BoolArray, bool]]:
    """Returns groups of tensors as (mask of shape [tensors], is_frozen).

    The groups of trained tensors hold some layers each. The last group has all frozen tensors. Without adapters no
    tensor is frozen. Router biases follow the experts' load, so they count as trained.
    """
    lora, groups = job.config.model.lora, [*tensor_groups(source.tensors, source.types, max_bytes)]
    if lora is None:
        return [(group, False) for group in groups]
    adapters = job.architecture.adapted(lora.rank, lora.targets, vision=lora.vision)
    bias = ROUTER_BIAS.parts[0].name.rpartition(".")[2]
    changing = {*adapted_tensors(adapters), *(name for name in source.tensors.names if name.endswith(bias))}
    adapted = np.isin(source.tensors.names, sorted(changing))
    found = [(group & adapted, False) for group in groups] + [(~adapted, True)]
    return [(group, is_frozen) for group, is_frozen in found if group.any()]


def _held_by_any(layout: Layout, tensors: np.ndarray) -> np.ndarray:
    held = np.zeros_like(tensors)
    numbers = set(chain.from_iterable(layout.part(share).pieces["tensor"].tolist() for share in set(layout.parts)))
    held[sorted(numbers)] = True
    return held & tensors


# The tasks that give another role the actor's weights. Ranks of both roles join them.

logger = logging.getLogger(__name__)


class SyncedPart(NamedTuple):
    """A part of the destination: the reshardings that fill it, and the kind of weights in it.

    `content` is that of an EnginePart. Other models in training get "published".
    """

    reshardings: Sequence[RoleResharding]
    content: Literal["weights", "base", "adapters", "published"]

    @property
    def is_frozen(self) -> bool:
        """Whether training changes none of its tensors."""
        return all(resharding.is_frozen for resharding in self.reshardings)


class ActorSync:
    """The base class of syncs from the actor to another role, part by part.

    Built on every rank of either role. `actor` is None on ranks without the actor. Building and calling it are
    collective over: the union of both roles' ranks.
    """

    parts: Sequence[SyncedPart]

    def __init__(self, actor: Role | None) -> None:
        self.actor = cast(ActorRole | None, actor)
        self.moved_bytes: dict[int, int] = {}
        """Bytes moved between ranks for each part when it was last sent."""

    def receiving(self, number: int, *, is_kept: bool) -> AbstractContextManager[Tensors]:
        """Returns a context with the tensors to fill for a part, or None on a rank without any of them.

        The part has arrived when the context ends. With `is_kept` the tensors hold the result of the last sync.
        """
        raise NotImplementedError

    def send(
        self, numbers: Iterable[int] | None = None, turn: DeltaTurn = DeltaTurn.PLAIN, *, compares: bool = False
    ) -> tuple[SyncReport | None, float]:
        """Sends the given parts, or all. Returns the report, if any, and the seconds spent on comparing both sides."""
        reports, verify_s = list[SyncReport](), 0.0
        for number in range(len(self.parts)) if numbers is None else numbers:
            part = self.parts[number]
            source = _held_by(self.actor.model, part.content) if self.actor else None
            first = len(reports)
            with self.receiving(number, is_kept=turn is DeltaTurn.CHANGES) as destination:
                for resharding in part.reshardings:
                    report, seconds = resharding.run(source, destination, turn, compares=compares)
                    reports += [report] if report else []
                    verify_s += seconds
            if reports[first:]:
                self.moved_bytes[number] = sum(report.bytes_moved for report in reports[first:])
        return total(reports) if reports else None, verify_s


def _held_by(model: RoleModel, content: str) -> Mapping[str, Tensor]:
    """Returns the tensors of a trained model to send for a part of this content."""
    if content == "adapters":
        assert model.adapted, "only a model with adapters has any to send"
        return model.adapted.parameters
    if content == "published":
        return model.published
    return model.served if content == "weights" else model.parameters


class WeightSyncTask(ActorSync):
    """The sync of the weights of a step, or of their changes only, to the engines of the rollout."""

    def __init__(self, job: Job, actor: Role | None, rollout: Role | None) -> None:
        super().__init__(actor)
        follower = cast(RolloutRole | None, rollout)
        self.engine = follower.engine if follower else None
        self.config, delta = job.config.weight_sync, job.config.synced_delta
        self.compared_every = job.config.checks.replicas
        self.left: tuple[int, int, int] | None = None
        """State of this rank's engine after the last sync: version, times its memory was emptied, restarts of its
        process."""
        self.base = follower.parts["base"] if follower else None
        self.parts = [
            SyncedPart(reshardings_into(job, "rollout", part, delta), part.content)
            for part in engine_parts(job.config, job.architecture, job.grids["rollout"])
        ]
        keeps_frozen = job.config.served("rollout").engine != "http" and any(part.is_frozen for part in self.parts)
        self.notices_losses = delta is not None or keeps_frozen
        """Whether a sync depends on what the engines still have. Files for servers at URLs need all tensors."""
        self.weights = follower.parts["weights"] if follower and self.notices_losses else None
        self.has_base = False
        """Whether the engines have the base weights from an earlier sync of this process. They never lose them."""
        self.turns = DeltaTurns(delta.full_every, delta.check_every) if delta else None
        cpu_group, waiting = job.groups.cpu[both_roles(job, "rollout")], job.heartbeat.task_clock.waiting
        self.agreement = Agreement(cpu_group, job.world.rank, TRANSPORT_TIMEOUT_S, waiting)

    def __call__(self, step: int, chunk: int) -> Metrics:
        """Gives the rollout the weights of version `step`. If this raises SyncError, the rollout has no valid version.

        Collective over: the union of both roles' ranks.
        """
        lost, restarts = self.has_lost_weights(), self.engine.num_restarts if self.engine else 0
        if self.engine:
            self.engine.begin_update()
        is_lost = self._is_lost_by_any(lost)
        turn = self.turns.next(lost=is_lost) if self.turns else DeltaTurn.PLAIN
        is_due = self.compared_every > 0 and step % self.compared_every == 0
        try:
            report, verify_s, kept = self._send_due(turn, is_lost=is_lost, is_due=is_due)
        except SyncMismatchError as drifted:
            if turn is not DeltaTurn.CHANGES or self.turns is None:
                raise
            turn = self._begin_anew(drifted)
            report, verify_s, kept = self._send_due(turn, is_lost=is_lost, is_due=is_due)
        if self.engine:
            self.engine.end_update(step)
            self.left = step, self.weights.times_emptied if self.weights else 0, restarts
        metrics = metrics_of(report) if report else {}
        if report and any(part.is_frozen for part in self.parts):
            metrics["perf/weight_sync_kept_bytes"] = sum(self.moved_bytes[number] for number in kept)
        if report and self.turns:
            self.turns.finished(turn, sent_share_of(report))
            metrics |= delta_metrics_of(report, turn)
        compares = is_due or self.turns or self.config.verify
        return {**metrics, "perf/weight_sync_verify_s": verify_s} if compares else metrics

    def has_lost_weights(self) -> bool:
        """Returns whether this rank's engine has lost the result of the last sync, or may have lost it."""
        if self.engine is None:
            return False
        emptied = self.weights.times_emptied if self.weights else 0
        return self.left != (self.engine.policy_version, emptied, self.engine.num_restarts)

    def _is_lost_by_any(self, lost: bool) -> bool:
        """Returns whether any engine has lost the result of the last sync. It counts as lost if no part depends on
        it."""
        if not self.notices_losses:
            return True
        self.agreement.meet()
        return self.agreement.total([int(lost)])[0] > 0

    def _begin_anew(self, drifted: SyncMismatchError) -> DeltaTurn:
        assert self.turns is not None, "it was a sync of changes"
        if self.agreement.rank == self.agreement.ranks[0]:
            logger.warning(
                "After a sync of changes (weight_sync.delta) an engine's weights differ from the actor's. So "
                "everything is sent now, and every later sync is compared: %s",
                drifted,
            )
        self.turns.differed()
        return DeltaTurn.WHOLE

    def _send_due(
        self, turn: DeltaTurn, *, is_lost: bool, is_due: bool
    ) -> tuple[SyncReport | None, float, Collection[int]]:
        """Sends the parts that the engines lack. Compares both sides if `is_due`. Returns the results of `send`, and
        the parts that the engines have."""
        compares = is_due or (self.turns is not None and self.turns.compares)
        has_frozen = not is_lost and turn is not DeltaTurn.WHOLE and not (compares or self.config.verify)
        kept = {
            number
            for number, part in enumerate(self.parts)
            if (part.is_frozen and has_frozen) or (part.content == "base" and self.has_base)
        }
        sent = self.send([number for number in range(len(self.parts)) if number not in kept], turn, compares=compares)
        self.has_base = True
        return *sent, kept

    @contextmanager
    def receiving(self, number: int, *, is_kept: bool) -> Iterator[Tensors]:
        yield self.engine.incoming(number, is_kept=is_kept) if self.engine else None
        if self.engine:
            self.engine.arrived(number)
        if self.parts[number].content == "base" and self.base:
            self.base.changed()


def sent_share_of(report: SyncReport) -> float:
    """Returns the share of the compared bytes that was sent, or 1 if none were compared."""
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


class EvaluationSync(ActorSync):
    """The sync of the weights of a step to the engines of role evaluation.

    The engines keep them in host memory until their turn. So they can join while they generate an earlier evaluation.
    """

    def __init__(self, job: Job, actor: Role | None, evaluation: Role | None) -> None:
        super().__init__(actor)
        self.world, self.evaluation = job.world, cast(EvaluationRole | None, evaluation)
        whole = whole_engine(job.config, job.architecture, job.grids["evaluation"], "evaluation")
        arriving = in_parts(whole, ARRIVING_BYTES)
        self.layouts = [part.layout for part in arriving]
        self.parts = [SyncedPart(reshardings_into(job, "evaluation", part), "weights") for part in arriving]
        self.received: dict[str, Tensor] = {}

    def __call__(self, step: int, chunk: int) -> None:
        """Gives the evaluation of the step its weights."""
        self.received = {}
        self.send()
        if self.evaluation:
            self.evaluation.weights[step] = self.received

    @contextmanager
    def receiving(self, number: int, *, is_kept: bool) -> Iterator[Tensors]:
        if self.evaluation is None:
            yield None
            return
        arriving = allocate_parameters(self.layouts[number], self.world.rank, device=self.world.device)
        yield arriving
        self.received |= {name: tensor.cpu() for name, tensor in arriving.items()}


class ModelSync(ActorSync):
    """The sync of the actor's published weights to the model of `role` in the training backend."""

    def __init__(self, job: Job, role: str, actor: Role | None, follower: Role | None) -> None:
        super().__init__(actor)
        self.follower = cast(InferenceRole | ReferenceRole | None, follower)
        makes, is_reference = job.config.makes_actor_weights, role == ReferenceRole.name
        self.copies_actor = is_reference and not makes and uses_actor_modules(job)
        """Whether the follower uses the actor's modules and keeps copies of their values."""
        self.parts = [] if self.copies_actor else [SyncedPart(reshardings_into_model(job, role), "published")]

    def __call__(self, step: int, chunk: int) -> None:
        """Gives the follower the actor's weights."""
        if self.copies_actor:
            assert isinstance(self.follower, ReferenceRole), "it has the actor's ranks"
            self.follower.keep_actor_weights()
        self.send()

    @contextmanager
    def receiving(self, number: int, *, is_kept: bool) -> Iterator[Tensors]:
        yield self.follower.model.parameters if self.follower else None


def weight_syncs(job: Job, order: Order, roles: Mapping[str, Role]) -> dict[str, Callable[[int, int], Metrics | None]]:
    """Returns the weight syncs of this rank, by task. `roles` are the roles of this rank.

    Collective over: all ranks.
    """
    tasks = sorted({entry.name for entry in order.distinct()} & SYNCED.keys())
    return {task: _weight_sync(job, task, roles) for task in tasks if roles.keys() & {"actor", SYNCED[task]}}


def _weight_sync(job: Job, task: str, roles: Mapping[str, Role]) -> Callable[[int, int], Metrics | None]:
    actor, follower = roles.get("actor"), roles.get(SYNCED[task])
    if task == WEIGHT_SYNC:
        return WeightSyncTask(job, actor, follower)
    if task == SYNC_EVALUATION:
        return EvaluationSync(job, actor, follower)
    return ModelSync(job, SYNCED[task], actor, follower)
