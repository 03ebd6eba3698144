"""Options of a dry run. They propose changes that save memory, search placements, and calibrate estimates by a run.

Models missing on this machine have shipped shapes."""

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from rltrain.config.schema import Config, Parallel
from rltrain.data.hub import checkpoint_paths, with_checkpoint_paths
from rltrain.errors import DataError, UserError
from rltrain.models.of_roles import role_architectures
from rltrain.observability.run_logs import JOB_FILE, METRICS_FILE
from rltrain.planning.hardware import DEFAULT_GPU, Gpu
from rltrain.planning.memory import RankMemory, largest, rank_memories
from rltrain.planning.planned import PlannedJob, Workload, plan_job
from rltrain.planning.step_time import Calibration, Clock, StepTime
from rltrain.planning.validation import check_config
from rltrain.planning.validation_models import check_against_architecture
from rltrain.planning.validation_schedule import check_schedule
from rltrain.runtime.placement import format_ranks, placement_of
from rltrain.schedule.iterations import fullest_step
from rltrain.tasks.roles import DECLARED, model_roles, model_tasks, trained_roles

# Command-line options of a dry run.


@dataclass(frozen=True)
class DryRunOptions:
    """`gpu` is a name of `rltrain.planning.hardware.GPUS` or a YAML file. `calibrate` is the output_dir of a run."""

    world_size: int = 1
    ranks_per_node: int = 8
    gpu: str = DEFAULT_GPU
    every_rank: bool = False
    search: bool = False
    calibrate: Path | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None


# Checks of configs proposed by a search.


def is_legal(job: PlannedJob) -> bool:
    """Returns whether every check accepts the job."""
    try:
        check_config(job.config)
        check_schedule(job.config, job.placement, job.grids)
        check_against_architecture(job.config, job.grids, job.architectures)
    except UserError:
        return False
    return True


# The changes of a config that save most memory. Each is estimated like the config itself.

MOST = 3


@dataclass(frozen=True)
class Change:
    """A change in the config's form, and the highest peak of any rank with it."""

    text: str
    memory: RankMemory


def best_changes(job: PlannedJob, gpu: Gpu, is_legal: Callable[[PlannedJob], bool]) -> list[Change]:
    """Returns at most three changes that lower the highest peak, lowest peak first."""
    found, before = [], largest(rank_memories(job, gpu)).peak.total
    for key, value in _changes(job.config, gpu.memory_gb):
        try:
            config = with_keys(job.config, {key: value})
            changed = plan_job(config, job.placement, job.architectures, job.ranks_per_node, job.measured)
        except (UserError, ValueError):
            continue
        if is_legal(changed):
            memory = largest(rank_memories(changed, gpu))
            if memory.peak.total < before:
                found.append(Change(f"{key}: {'true' if value is True else value}", memory))
    return sorted(found, key=lambda change: change.memory.peak.total)[:MOST]


def with_keys(config: Config, values: Mapping[str, object]) -> Config:
    """Returns `config` with other values for dotted keys."""
    for key, value in values.items():
        config = _replaced(config, key.split("."), value)
    return config


def _replaced(section: Config, path: Sequence[str], value: object) -> Config:
    first, *rest = path
    inner = _replaced(getattr(section, first), rest, value) if rest else value
    return section.model_copy(update={first: inner})


def _changes(config: Config, gpu_memory_gb: float) -> Iterator[tuple[str, object]]:
    """Yields (dotted key, another value for it)."""
    yield "model.recompute", "selective"
    yield "model.recompute", "full"
    if config.model.recomputed.granularity == "full":
        yield "model.activation_offload", True
    if vision := config.model.vision:
        yield "model.vision.max_patches", max(vision.max_patches // 4, 1)
        yield "model.vision.recompute", True
    for role in model_roles():
        tokens = getattr(config, role).micro_batch_limit
        yield from ((f"{role}.micro_batch_tokens", fewer) for fewer in (tokens // 2, tokens // 4))
    for role in (*trained_roles(), "rollout"):
        yield from _more_parallel(config, role)
    for role in trained_roles():
        yield f"{role}.distributed_optimizer", True
        yield f"{role}.optimizer.moments_dtype", "bfloat16"
        if getattr(config, role).optimizer.name == "adamw":
            yield f"{role}.optimizer.cpu_offload", True
    for role in (*model_roles(), "rollout"):
        yield f"{role}.offload", True
    for role in ("rollout", "evaluation") if config.evaluates_apart else ("rollout",):
        if config.served(role).engine == "embedded":
            yield f"{role}.kv_cache_gb", round(gpu_memory_gb / 4, 1)
        running = config.served(role).max_running_requests
        yield from ((f"{role}.max_running_requests", max(running // divisor, 1)) for divisor in (2, 4))


def _more_parallel(config: Config, role: str) -> Iterator[tuple[str, object]]:
    parallel: Parallel | None = getattr(config, role).parallel
    if parallel is None:
        return
    for name in ("tp",) if role == "rollout" else ("tp", "pp", "cp", "ep"):
        for factor in (2, 4, 8) if name == "ep" else (2, 4):
            yield f"{role}.parallel.{name}", getattr(parallel, name) * factor
    if parallel.tp > 1 and role != "rollout" and not parallel.sequence_parallel:
        yield f"{role}.parallel.sequence_parallel", True


# The largest micro-batches that fit, for roles with micro_batch_tokens: auto.

STEP_OF_TOKENS = 1024
ROOM = 0.9
"""Share of the usable memory that micro-batches of that size may reach, because an estimate can be too low."""


def sizes_of_micro_batches(job: PlannedJob, gpu: Gpu) -> dict[str, int]:
    """Returns `micro_batch_tokens` by key for the roles that leave it to the job.

    A number is the largest multiple of STEP_OF_TOKENS with which the estimates of the role's tasks leave room, and no
    larger than all samples of a replica. It is STEP_OF_TOKENS if nothing fits.
    """
    found = {f"{role}.micro_batch_tokens": STEP_OF_TOKENS for role in roles_with_auto(job.config, job.grids)}
    for key in found:
        role = key.partition(".")[0]
        most = ceil(job.samples_per_replica(role) * job.longest_tokens / job.grids[role].cp / STEP_OF_TOKENS)
        fits = partial(_leaves_room, job, gpu, found, role)
        found[key] = max(1, bisect_left(range(1, most + 1), True, key=lambda steps: not fits(steps))) * STEP_OF_TOKENS
    return found


def roles_with_auto(config: Config, placed: Collection[str]) -> list[str]:
    """Returns the roles with micro_batch_tokens: auto."""
    return [role for role in model_roles() if role in placed and getattr(config, role).micro_batch_tokens == "auto"]


def _leaves_room(job: PlannedJob, gpu: Gpu, others: Mapping[str, int], role: str, steps: int) -> bool:
    config = with_keys(job.config, {**others, f"{role}.micro_batch_tokens": steps * STEP_OF_TOKENS})
    sized = plan_job(config, job.placement, job.architectures, job.ranks_per_node, job.measured)
    of_role = {task for task, (computing, _) in model_tasks().items() if computing == role}
    tasks = [task for memory in rank_memories(sized, gpu) for task in memory.tasks if task.task in of_role]
    return all(task.total <= ROOM * gpu.usable_bytes for task in tasks)


# The fastest placements and parallel sizes of a job, among those that fit.

TENSOR_SIZES = (1, 2, 4, 8)
PIPELINE_SIZES = (1, 2, 4, 8)
CONTEXT_SIZES = (1, 2, 4, 8)
"""Context parallelism. Together with tensor parallelism it must fit on a node."""
ENGINE_SHARES = (0.25, 0.375, 0.5, 0.625, 0.75)
"""Shares of all ranks for a rollout with separate ranks."""
BEST = 5


@dataclass(frozen=True)
class Proposal:
    """A placement with sizes. `keys` are its config values by dotted name."""

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
    """Returns the best few proposals, fastest step first, equal ones by the lowest peak. Deterministic.

    The schedule's mode stays, with one exception. If all roles share the ranks, asynchronous and pipelined runs are
    tried as sequential ones, because they need separate ranks for the rollout.
    """
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
    """Returns the job with these keys, or None if sizes do not divide ranks or layers."""
    config = _with_sizes(job.config, keys)
    try:
        placement = placement_of(config, job.placement.world_size, job.ranks_per_node)
        return plan_job(config, placement, job.architectures, job.ranks_per_node, job.measured)
    except (UserError, ValueError):
        return None


def _with_sizes(config: Config, keys: Mapping[str, object]) -> Config:
    """Returns the config with other sizes. Further models of the training backend take the actor's sizes.

    Sequence parallelism stays on unless tp is 1.
    """
    inheriting = {f"{role}.parallel": None for role in model_roles() if role != "actor"}
    whole = {"actor.parallel.vpp": 1, "actor.parallel.layers_per_stage": None}
    changed = with_keys(config, {**keys, **whole, **inheriting})
    if changed.actor.parallel.tp == 1:
        changed = with_keys(changed, {"actor.parallel.sequence_parallel": False})
    return changed


def _placements(job: PlannedJob, world_size: int) -> Iterator[dict[str, object]]:
    """Yields placements: all roles on all ranks, and the rollout with the reward on ranks after the others.

    Roles that evaluate beside the steps keep their number of ranks, and get the last ones.
    """
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


# Calibration: measured seconds of a run over estimated ones, applied to the estimates of other jobs.

WARM_UP_STEPS = 2
"""First steps that are left out if there are more."""

STEP = "perf/step_time_s"
Record = dict[str, Any]


def calibration_of(runs: Iterable[Path], gpu: Gpu) -> Calibration:
    """Returns the medians over the steps of `runs`, relative to the estimate for `gpu`. `runs` are output_dirs of one
    config.

    Tasks missing in the runs are left out. Raises DataError if a folder is not a run's output_dir.
    """
    job, records = read_measured(runs)
    workload = measured_workload(job, records)
    factors = _factors(Clock(job, gpu, workload), records)
    of_tasks = Clock(job, gpu, workload, Calibration(factors)).step().step_s
    return Calibration(factors, max(0.0, median(values_of(records, STEP)) - of_tasks))


def _factors(clock: Clock, records: list[Record]) -> dict[str, float]:
    job = clock.job
    tasks = [entry for _, entry in job.order.of_step(fullest_step(job.order)) if entry.kind == "task"]
    foretold: dict[str, float] = defaultdict(float)
    for entry in tasks:
        foretold[entry.name] += max(clock.task(entry.name, role) for role in entry.roles)
    took = {task: values_of(records, f"perf/{task}_s") for task in foretold}
    return {task: median(took[task]) / seconds for task, seconds in foretold.items() if seconds and took[task]}


def measured_workload(job: PlannedJob, records: list[Record]) -> Workload:
    """Returns the text lengths of a run: of responses as generated, of prompts from the tokens in training."""
    assumed = Workload.of(job.config)
    response = values_of(records, "rollout/response_length_mean")
    longest = values_of(records, "rollout/response_length_max")
    if not response or not longest:
        return assumed
    trained = values_of(records, "train/tokens")
    prompt = median(trained) / job.samples_per_step - median(response) if trained else assumed.prompt
    prompt = min(max(prompt, 1.0), job.config.data.max_prompt_tokens)
    images = assumed.image_tokens * prompt / assumed.prompt
    return Workload(prompt, median(response), median(longest), images)


def values_of(records: list[Record], metric: str) -> list[float]:
    """Returns the values of every record with the metric."""
    return [record[metric] for record in records if record.get(metric) is not None]


def read_measured(runs: Iterable[Path]) -> tuple[PlannedJob, list[Record]]:
    """Returns the job of the first run, and the metrics of all steps of all runs without the first steps.

    Raises DataError if one of `runs` is not a run's output_dir.
    """
    found = [_read(run) for run in runs]
    return found[0][0], [record for _, records in found for record in records]


def _read(run: Path) -> tuple[PlannedJob, list[Record]]:
    expected = f"expected the output_dir of a run, with {METRICS_FILE} and {JOB_FILE}"
    try:
        records = [json.loads(line) for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
        saved = json.loads((run / JOB_FILE).read_text(encoding="utf-8"))
        config = Config.model_validate_json(json.dumps(saved["config"]))
        world_size, ranks_per_node = int(saved["world_size"]), int(saved["ranks_per_node"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"option --calibrate: {run}: {error}; {expected}") from error
    steps = [record for record in records if STEP in record]
    if not steps:
        raise DataError(f"option --calibrate: {run}: {METRICS_FILE} has no timed step; {expected}")
    placement = placement_of(config, world_size, ranks_per_node)
    job = plan_job(config, placement, role_architectures(config, placement.roles), ranks_per_node)
    return job, steps[WARM_UP_STEPS:] or steps


# Shapes of models missing on this machine, for a dry run. rltrain ships the models of its configs.

SHIPPED = Path(__file__).parent / "shipped_models"
"""Folders named after models, each with only a config.json."""


def with_shipped_shapes(config: Config) -> tuple[Config, list[str]]:
    """Returns the config with shipped folders in place of folders that do not exist, and a line for each of them."""
    found = {path: folder for path in checkpoint_paths(config).values() if (folder := shipped_folder(path))}
    lines = [
        f"{key}: {path} does not exist yet; its shape is the one in rltrain's config.json of {found[path].name}"
        for key, path in checkpoint_paths(config).items()
        if path in found
    ]
    return with_checkpoint_paths(config, {path: str(folder) for path, folder in found.items()}), lines


def shipped_folder(path: str) -> Path | None:
    """Returns the shipped folder named like the last matching part of `path`. None if `path` exists or nothing matches.

    Examples: models/Qwen3-0.6B, Qwen/Qwen3-0.6B@main, or an output of the quickstart such as runs/quickstart/sft/hf.
    """
    if Path(path).exists():
        return None
    shipped = {folder.name: folder for folder in SHIPPED.iterdir()}
    parts = reversed(Path(path.partition("@")[0]).parts)
    return next((shipped[part] for part in parts if part in shipped), None)
