"""The placements and parallel sizes by which a job would step fastest, of those that fit."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rltrain.config.schema import Config
from rltrain.errors import UserError
from rltrain.estimate.changes import with_keys
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.peak import RankMemory, largest, rank_memories
from rltrain.estimate.planned import PlannedJob, plan_job
from rltrain.estimate.step_time import Calibration, Clock, StepTime
from rltrain.estimate.workload import Workload
from rltrain.runtime.placement import format_ranks, placement_of
from rltrain.tasks.roles import DECLARED, model_roles

TENSOR_SIZES = (1, 2, 4, 8)
PIPELINE_SIZES = (1, 2, 4, 8)
CONTEXT_SIZES = (1, 2, 4, 8)
"""Within a node, beside tensor parallelism."""
ENGINE_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
"""Of all ranks, for the rollout where it has its own."""
BEST = 5


@dataclass(frozen=True)
class Proposal:
    """`keys` are what to write in a config, by dotted name."""

    keys: Mapping[str, object]
    memory: RankMemory
    step: StepTime


def proposals(
    job: PlannedJob,
    gpu: Gpu,
    workload: Workload,
    calibration: Calibration,
    is_legal: Callable[[PlannedJob], bool],
) -> list[Proposal]:
    """The best few, fastest step first; of equal ones that with the lowest peak. Deterministic. The schedule's mode
    stays, except that asynchronous runs and pipelined ones, which need ranks of their own for the rollout, are tried
    step by step as well where everything shares the ranks."""
    found = []
    for keys, candidate in _candidates(job, is_legal):
        memory = largest(rank_memories(candidate, gpu))
        if memory.fits(gpu):
            found.append(
                (Clock(candidate, gpu, workload, calibration, exact_sync=False).step(), memory, keys, candidate)
            )
    found.sort(key=lambda made: (made[0].step_s, made[1].peak.total, str(made[2])))
    exact = [
        Proposal(keys, memory, Clock(candidate, gpu, workload, calibration).step())
        for _, memory, keys, candidate in found[:BEST]
    ]
    return sorted(exact, key=lambda made: (made.step.step_s, made.memory.peak.total, str(made.keys)))


def _candidates(
    job: PlannedJob, is_legal: Callable[[PlannedJob], bool]
) -> Iterator[tuple[dict[str, object], PlannedJob]]:
    world_size = job.placement.world_size
    within = [(tp, cp) for tp in TENSOR_SIZES for cp in CONTEXT_SIZES if tp * cp <= job.ranks_per_node]
    sizes = [(tp, pp, cp) for tp, cp in within for pp in PIPELINE_SIZES]
    engines = [tp for tp in TENSOR_SIZES if tp <= job.ranks_per_node] if "rollout" in job.grids else [1]
    for placed in _placements(job, world_size):
        for tp, pp, cp in sizes:
            for engine_tp in engines:
                keys: dict[str, object] = {**placed, "actor.parallel.tp": tp, "actor.parallel.pp": pp}
                if cp > 1 or job.config.actor.parallel.cp > 1:
                    keys["actor.parallel.cp"] = cp
                if "rollout" in job.grids:
                    keys["rollout.parallel.tp"] = engine_tp
                candidate = _planned(job, keys)
                if candidate is not None and is_legal(candidate):
                    yield keys, candidate


def _planned(job: PlannedJob, keys: Mapping[str, object]) -> PlannedJob | None:
    """None where sizes do not divide ranks or layers."""
    config = _with_sizes(job.config, keys)
    try:
        placement = placement_of(config, job.placement.world_size, job.ranks_per_node)
        return plan_job(config, placement, job.architectures, job.ranks_per_node)
    except (UserError, ValueError):
        return None


def _with_sizes(config: Config, keys: Mapping[str, object]) -> Config:
    """Other models of the training backend take the actor's sizes; what was split by sequence with it goes on so."""
    plain = {key.replace(".", "__"): value for key, value in keys.items()}
    inheriting = {f"{role}__parallel": None for role in model_roles() if role != "actor"}
    plain |= {"actor__parallel__vpp": 1, "actor__parallel__layers_per_stage": None}
    changed = with_keys(config, **plain, **inheriting)
    if changed.actor.parallel.tp == 1:
        changed = with_keys(changed, actor__parallel__sequence_parallel=False)
    return changed


def _placements(job: PlannedJob, world_size: int) -> Iterator[dict[str, object]]:
    """Everything on all ranks; and the rollout with the reward behind the others. Whoever evaluates beside them all has
    as many ranks as it has, the last ones."""
    roles = [role for role in job.placement.roles if not DECLARED[role].beside_steps]
    apart = [role for role in job.placement.roles if role not in roles]
    world_size, end = world_size - sum(len(job.placement.ranks(role)) for role in apart), world_size
    kept = {role: format_ranks(range(world_size, end)) for role in apart}
    schedule = job.config.schedule
    everywhere = format_ranks(range(world_size)) if apart else "all"
    together: dict[str, object] = {"placement": {", ".join(roles): everywhere, **kept}}
    if schedule.mode == "sequential":
        yield together
    else:
        steps = {"mode": "sequential", "chunks": None, "max_staleness": 0, "sync_every": 1, "partial_rollouts": False}
        yield {**together, **{f"schedule.{key}": value for key, value in steps.items()}}
    behind = [role for role in ("rollout", "reward") if role in roles]
    if "rollout" not in roles:
        return
    training = [role for role in roles if role not in behind]
    for count in sorted({round(world_size * share) for share in ENGINE_SHARES} - {0, world_size}):
        first = format_ranks(range(world_size - count))
        last = format_ranks(range(world_size - count, world_size))
        yield {"placement": {", ".join(training): first, ", ".join(behind): last, **kept}}
