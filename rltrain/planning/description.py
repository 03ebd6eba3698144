"""Writes the text of a dry run: order, overlaps, ranks, memory, evaluations and time."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.evaluation import SHORT_FORM
from rltrain.config.loader import load_config
from rltrain.config.schema import Config, EvaluationPlan
from rltrain.data.hub import with_cached_copies
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits
from rltrain.errors import ConfigError
from rltrain.models import Architecture
from rltrain.planning.doubts import doubts, doubts_about_models, doubts_about_variables, obstacle_to_repeating
from rltrain.planning.hardware import GB, Gpu, gpu_named
from rltrain.planning.memory import (
    CHANGED_SHARE,
    RankMemory,
    cache_bytes,
    changed_share,
    keeping,
    kept_bytes,
    largest,
    rank_memories,
)
from rltrain.planning.options import (
    Change,
    DryRunOptions,
    best_changes,
    calibration_of,
    is_legal,
    proposals,
    sizes_of_micro_batches,
    with_keys,
    with_shipped_shapes,
)
from rltrain.planning.planned import PlannedJob, Workload
from rltrain.planning.rows_and_rewards import describe_environment, describe_reward, describe_rows
from rltrain.planning.sizes import digits, numbered, seconds, size, sizes, table, wrapped
from rltrain.planning.step_time import Calibration, Clock, StepTime
from rltrain.planning.sync_time import PlannedSync
from rltrain.planning.task_time import evaluating
from rltrain.planning.validation import check_config
from rltrain.planning.validation_schedule import place_config
from rltrain.reshard.plan import traffic
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, format_ranks, group_lists
from rltrain.schedule.iterations import fullest_step, steady_order
from rltrain.schedule.memory_plan import MemoryPlan, Place, leaving_roles, ranks_left_by_engines
from rltrain.schedule.order import CHECKPOINT, Entry, Order
from rltrain.schedule.replay import overlapping_tasks
from rltrain.schedule.shape import RunShape
from rltrain.tasks.declaration import Key
from rltrain.tasks.roles import TRAINED_PARTS, device_roles, model_tasks

# The order of tasks, and their overlaps.


def describe_mode(config: Config) -> str:
    """Returns the mode with the schedule settings that affect it."""
    schedule, shape = config.schedule, RunShape.of(config)
    words = [schedule.mode, f"chunks {shape.num_chunks}", f"max_staleness {schedule.max_staleness}"]
    if shape.lead:
        ahead = f"generation {shape.lead} step{'s' * (shape.lead > 1)} ahead"
        words += [ahead, "weight syncs in flight" if shape.syncs_in_flight else "weight syncs between generate tasks"]
    if schedule.sync_every > 1:
        words.append(f"sync_every {schedule.sync_every}")
    if schedule.partial_rollouts:
        words.append(f"partial rollouts, {schedule.oversampling:.0%} oversampled")
    return ", ".join(words)


def describe_order(order: Order, config: Config) -> list[str]:
    """Returns the entries of a step in the middle without an evaluation, for its first and last chunk.

    Then follow the further kinds of entries in the first step and after the last one.
    """
    middle, last_chunk = fullest_step(order), RunShape.of(config).num_chunks - 1
    lines: list[str] = []
    shown: set[tuple[str, str, tuple[str, ...]]] = set()
    for step in sorted({0, middle, config.steps}, key=lambda step: step != middle):
        entries = [*enumerate(entry for _, entry in order.of_step(step))]
        told = [f"{i:3d}  {e}" for i, e in entries if e.chunk in (0, last_chunk) and _alike(e) not in shown]
        lines += [*([""] if lines and told else []), *told]
        shown |= {_alike(entry) for _, entry in entries}
    return lines


def _alike(entry: Entry) -> tuple[str, str, tuple[str, ...]]:
    """Returns the kind of an entry, equal for all steps and chunks."""
    return entry.kind, entry.name, entry.roles


def describe_overlaps(order: Order, config: Config, placement: Placement) -> list[str]:
    """Returns tasks with their possible overlaps. Checkpoints are left out, because they overlap with all tasks."""
    found = overlapping_tasks(order, placement, syncs_in_flight=RunShape.of(config).syncs_in_flight)
    pairs = [pair for pair in found if not any(task.startswith(f"{CHECKPOINT} ") for task in pair)]
    if not pairs:
        return ["none: every task needs the result or the ranks of the one before it"]
    lines = (f"{task} beside {', '.join(sorted(others))}" for task, others in by_task(pairs))
    return [part for line in lines for part in wrapped(line)]


def by_task(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, set[str]]]:
    """Yields each task with its partners, every pair once. The task with the most remaining partners comes first."""
    partners: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        partners[one].add(other)
        partners[other].add(one)
    while any(partners.values()):
        task = max(sorted(partners), key=lambda task: len(partners[task]))
        others = partners.pop(task)
        for other in others:
            partners[other].discard(task)
        yield task, others


# The roles of the ranks, for equal ranks together or rank by rank.


def describe_ranks(placement: Placement, ranks_per_node: int) -> list[str]:
    """Returns one line per set of roles."""
    alike: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in range(placement.world_size):
        alike[placement.hosts(rank)].append(rank)
    lines = []
    for roles, ranks in alike.items():
        nodes = sorted({rank // ranks_per_node for rank in ranks})
        where = f"{numbered('rank', ranks)} ({numbered('node', nodes)})"
        lines.append(f"{where}: {', '.join(roles) or 'nothing'}")
    return lines


def rank_map(placement: Placement, grids: Mapping[str, Grid], ranks_per_node: int) -> list[str]:
    """Returns one line per rank: its node, and its coordinates in each of its roles."""
    rows = [["rank", "node", *placement.roles]]
    for rank in range(placement.world_size):
        cells = [coordinates(grids[role], rank) for role in placement.roles]
        rows.append([str(rank), str(rank // ranks_per_node), *cells])
    return table(rows)


def coordinates(grid: Grid, rank: int) -> str:
    if rank not in grid.ranks:
        return "-"
    place = grid.coordinates(rank)
    parts = {"dp": (place.dp, grid.dp), "pp": (place.pp, grid.pp), "cp": (place.cp, grid.cp), "tp": (place.tp, grid.tp)}
    return " ".join(f"{name}{index}" for name, (index, size) in parts.items() if size > 1) or "alone"


# The evaluations, their ranks and their time.

PROMPTS = 100
"""Number of prompts in the estimated seconds. The size of the file is not read."""

SecondsOfSet = Callable[[EvaluationPlan], float]


def describe_evaluation(
    config: Config, grids: Mapping[str, Grid], estimate: tuple[str, SecondsOfSet] | None
) -> list[str]:
    """Returns the lines about evaluations, none if there are none. `estimate` is the result of `estimator_of_sets`."""
    if config.scores_held_out:
        plans = [plan for plan in config.evaluations if plan.name == SHORT_FORM]
        intervals = [f" and every {plan.interval} steps" if plan.interval else "" for plan in plans]
        when = "before the first and after the last step"
        return [f"the loss of data.eval under the actor, {when}{interval}" for interval in intervals]
    role = "evaluation" if "evaluation" in grids else "rollout"
    if not config.evaluations or role not in grids:
        return []
    grid = grids[role]
    engines = f"{grid.dp} engine{'s' * (grid.dp > 1)} of tp {grid.tp} on ranks {format_ranks(grid.ranks)}"
    if role == "evaluation":
        lines = [f"by role evaluation, {engines}, in parallel with training and generation, which do not wait for it"]
    elif RunShape.of(config).lead:
        lines = [f"by the rollout, {engines}, while training continues; generation and weight syncs come after it"]
    else:
        lines = [f"by the rollout, {engines}, while all other roles wait"]
    rows = [["set", "before the first and after the last step", "samples per prompt"]]
    for plan in config.evaluations:
        every = f"and every {plan.interval} steps" if plan.interval else ""
        rows.append([plan.name, every, str(plan.samples_per_prompt)])
    if estimate is not None:
        sync, seconds_of = estimate
        rows = [[*row, f"{PROMPTS} prompts" if not i else ""] for i, row in enumerate(rows)]
        for row, plan in zip(rows[1:], config.evaluations, strict=True):
            row[-1] = seconds(seconds_of(plan))
        lines += [sync] if sync else []
    return [*lines, *table(rows)]


def estimator_of_sets(job: PlannedJob, options: DryRunOptions) -> tuple[str, SecondsOfSet]:
    """Returns the cost of the weights for training, in words, and a function for the seconds of PROMPTS prompts of a
    set."""
    gpu = gpu_named(options.gpu)
    workload = Workload.of(job.config, options.prompt_tokens, options.response_tokens, job.images)
    role = "evaluation" if "evaluation" in job.grids else "rollout"
    room = cache_bytes(rank_memories(job, gpu), role)
    sync = ""
    if role == "evaluation":
        planned = PlannedSync(job, role)
        moved = planned.planner.traffic
        on_wire = size(moved.node + moved.network_minimum)
        sync = f"each takes {on_wire} of weights from the actor in {seconds(planned.seconds(gpu))}, kept on the host"
    return sync, lambda plan: evaluating(job, gpu, workload, plan, room, PROMPTS)


# The times of tasks and steps in words.


def describe_time(job: PlannedJob, step: StepTime, workload: Workload, calibrated: str | None) -> list[str]:
    """Returns a line per task of a step in the middle of the run, then the step, and the waiting share of each role's
    ranks."""
    measured = f", as measured in {workload.images.num_rows} rows" if workload.images else ""
    images = f" ({digits(workload.image_tokens)} of images{measured})" if workload.image_tokens else ""
    source = f"measured by {calibrated}" if calibrated else "assumed efficiencies: rltrain/planning/hardware.py"
    lines = [
        f"assumed: prompts of {digits(workload.prompt)} tokens{images}, responses of {digits(workload.response)}, the "
        f"longest of {digits(workload.longest_response)}; {source}",
        *describe_sharing(job, {task for (task, _), taken in step.tasks.items() if taken}, workload),
    ]
    rows = [["task", "on", "of a step"]]
    for (task, roles), taken in step.tasks.items():
        if taken:
            rows.append([task, "+".join(roles), seconds(taken)])
    if step.moves_s:
        rows.append(["memory moves", "", seconds(step.moves_s)])
    return [
        *lines,
        *table(rows),
        f"a step: {seconds(step.step_s)}, {digits(step.tokens_per_s)} tokens/s/GPU",
        f"waiting share: {', '.join(f'{role} {1 - busy:.0%}' for role, busy in step.busy.items())}",
    ]


def describe_sharing(job: PlannedJob, tasks: Collection[str], workload: Workload) -> list[str]:
    """Returns a line with the share of tokens that each task computes with another sample's. None if it is nothing."""
    sharing: dict[str, list[str]] = defaultdict(list)
    for task, (role, trains) in model_tasks().items():
        saved = 1 - job.computed(role, workload.prompt, workload.response, trains=trains).share if task in tasks else 0
        if saved > 0:
            sharing[f"{saved:.0%}"].append(task)
    told = ", ".join(f"{share} of {' and '.join(names)}" for share, names in sharing.items())
    return [f"tokens computed with another sample's (share_prefixes): {told}"] if told else []


# The peaks of the ranks, and the message if they are too high.


def describe_fit(memories: Sequence[RankMemory], gpu: Gpu, ranks_per_node: int) -> list[str]:
    """Returns, for ranks with the same roles, the pipeline stage with the highest peak, and the peaks of the others."""
    alike: dict[tuple[str, ...], list[RankMemory]] = {}
    for memory in memories:
        alike.setdefault(memory.kind.device_roles, []).append(memory)
    found = []
    for stages in alike.values():
        worst = largest(stages)
        peak = f"peak {size(worst.peak.total)} of {size(gpu.memory_gb * GB)} at {worst.peak.task}"
        found += wrapped(f"{numbered('rank', worst.ranks)}: {peak}: {sizes(worst.peak.bytes_of)}")
        if worst.host:
            found += wrapped(f"  pinned on the host: {sizes(worst.host)}")
        others = [f"{size(stage.peak.total)} on {numbered('rank', stage.ranks)}" for stage in stages if stage != worst]
        if others:
            found += wrapped(f"  other stages: {', '.join(others)}")
    of_node: Counter[int] = Counter()
    for memory in memories:
        for rank in memory.ranks:
            of_node[rank // ranks_per_node] += sum(memory.host.values())
    most, there_is = max(of_node.values(), default=0), gpu.host_memory_gb * GB * ranks_per_node
    if most > there_is:
        found.append(f"a node would pin {size(most)}, but its host has only {size(there_is)}: offload fewer roles")
    return found


def refuse_what_does_not_fit(memories: Sequence[RankMemory], gpu: Gpu, name: str, changes: Sequence[Change]) -> None:
    """Raises ConfigError with the ranks of the highest peak, and the changes of the config that would save most."""
    worst = largest(memories)
    lines = [
        f"{numbered('rank', worst.ranks)} ({', '.join(worst.kind.device_roles)}) would "
        f"hold {size(worst.peak.total)} at {worst.peak.task}; expected at most {size(gpu.usable_bytes)} of the "
        f"{size(gpu.memory_gb * GB)} of --gpu {name}: {sizes(worst.peak.bytes_of)}"
    ]
    for change in changes:
        peak = change.memory.peak
        verdict = "fits" if change.memory.fits(gpu) else "still too much"
        lines.append(f"  {change.text}: {size(peak.total)} at {peak.task}, {verdict}")
    if changes:
        lines.insert(1, "The changes that save most, each alone:")
    raise ConfigError("\n".join(lines))


# The memory parts on the device during each task, for each kind of rank.

PARTS = (*TRAINED_PARTS, "kv_cache")
"""Parts in the order of their columns. Models with fp32 weights have no master weights."""

LEGEND = (
    "used: needed by the task; stays: on the device without being needed",
    "host: copied to the host; dropped: freed, because it is rewritten before it is read again",
    "without a GPU only roles with offload: true leave the device",
)


def describe_memory(
    order: Order, config: Config, placement: Placement, guests: Collection[str], sharing: Collection[str] = ()
) -> list[str]:
    """Returns the memory of a step of `order` in the middle of the run, per set of ranks with the same roles.

    `guests` are roles whose weights temporarily replace the actor's. `sharing` are roles that use the actor's base
    weights.
    """
    lines: list[str] = []
    parts = [part for part in PARTS if part != "master_weights" or config.model.dtype != "float32"]
    parts += ["base"] if config.keeps_adapters_apart("rollout") else []
    for hosted, ranks in _kinds_of_ranks(placement).items():
        mine = [role for role in guests if role in hosted]
        same = [role for role in sharing if role in hosted]
        offload = {role: getattr(config, role).offload for role in hosted}
        leaving = leaving_roles(offload, [*mine, *same])
        overlays = {(role, "weights"): ("actor", "weights") for role in mine}
        plan = MemoryPlan(order, hosted, sharing=same)
        steps = _places_by_task(order, plan, plan.places(leaving, overlays))
        said = {role: f"{role} (in the actor's modules)" for role in mine}
        said |= {role: f"{role} (the actor without adapters)" for role in same}
        inside = [said.get(role, role) for role in hosted]
        where = f"{numbered('rank', ranks)}: {', '.join(inside)}"
        if all(cell in ("used", "stays") for cells in steps.values() for cell in cells.values()):
            lines.append(f"{where}: everything stays on the device")
        else:
            lines += [where, *(f"  {line}" for line in _table(steps, hosted, parts))]
    if any("host" in line or "dropped" in line for line in lines):
        lines += [*LEGEND, f"communicators of roles that leave: {config.residency.communicators}"]
    return lines


def _kinds_of_ranks(placement: Placement) -> dict[tuple[str, ...], list[int]]:
    """Returns ranks by their roles with something on the device."""
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in range(placement.world_size):
        hosted = tuple(role for role in placement.hosts(rank) if role in device_roles())
        if hosted:
            kinds[hosted].append(rank)
    return kinds


Cells = dict[Key, str]


def _places_by_task(
    order: Order, plan: MemoryPlan, places: Iterable[tuple[int, Mapping[Key, Place]]]
) -> dict[str, Cells]:
    """Returns the cell of every part during every task of the step. Chunks get separate rows if they differ."""
    step = fullest_step(order)
    found: dict[str, list[tuple[int, Cells]]] = defaultdict(list)
    for position, place_of in places:
        entry = order[position]
        if entry.step == step:
            needed = plan.needs(position).parts
            on_device = {key: "used" if key in needed else "stays" for key in place_of}
            cells = {key: on_device[key] if place == "device" else place for key, place in place_of.items()}
            found[entry.name].append((entry.chunk, cells))
    rows: dict[str, Cells] = {}
    for name, tasks in found.items():
        for _, cells in tasks:
            alike = [chunk for chunk, others in tasks if others == cells]
            rows[name if len(alike) == len(tasks) else f"{name}, {numbered('chunk', alike)}"] = cells
    return rows


def _table(rows: Mapping[str, Cells], hosted: Collection[str], parts: Collection[str]) -> list[str]:
    keys = [(role, part) for role in hosted for part in parts if all((role, part) in cells for cells in rows.values())]
    roles = [role if i == 0 or keys[i - 1][0] != role else "" for i, (role, _) in enumerate(keys)]
    header = [["", *roles], ["", *(part for _, part in keys)]]
    return table([*header, *([name, *(cells[key] for key in keys)] for name, cells in rows.items())])


# The proposals of --search in words.


def describe_proposals(job: PlannedJob, gpu: Gpu, workload: Workload, calibration: Calibration) -> list[str]:
    """Returns a line for each proposal, fastest first: its estimates and its config keys."""
    rows = [["a step", "tokens/s/GPU", "peak", "keys"]]
    for made in proposals(job, gpu, workload, calibration, is_legal):
        keys = " ".join(f"{key}={_value(value)}" for key, value in made.keys.items())
        numbers = [seconds(made.step.step_s), digits(made.step.tokens_per_s), size(made.memory.peak.total)]
        rows.append([*numbers, keys])
    if len(rows) == 1:
        return ["none: no legal placement fits"]
    return table(rows)


def _value(value: object) -> str:
    """Returns a value in the form of a command-line override."""
    if isinstance(value, dict):
        inside = ", ".join(f"'{key}': {ranks}" for key, ranks in value.items())
        return f'"{{{inside}}}"'
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# The description of a job, computed from the config alone, without torchrun, GPU or weights.

CONFIG_FILE = "config.json"
Sections = dict[str, list[str]]


def describe_job(config_path: Path, overrides: Sequence[str], options: DryRunOptions) -> str:
    """Returns the whole description. Raises the UserError of a job that would be refused or does not fit."""
    return describe(load_config(config_path, overrides), options)


def describe(config: Config, options: DryRunOptions) -> str:
    """Returns the description of a loaded config. Raises UserError like `describe_job`."""
    config = with_cached_copies(config)
    check_config(config)
    world_size, ranks_per_node = options.world_size, min(options.ranks_per_node, options.world_size)
    shaped, not_there = with_shipped_shapes(config)
    placed = place_config(
        shaped, world_size, ranks_per_node, reads_models=Path(shaped.model.path, CONFIG_FILE).exists()
    )
    placement, grids, architectures, order = placed.placement, placed.grids, placed.architectures, placed.order
    rows, images = describe_rows(config, model_limits(architectures))
    job: PlannedJob | None = None
    sized: dict[str, int] = {}
    if architectures and algorithm_of(config).trains:
        job = PlannedJob(shaped, placement, grids, architectures, ranks_per_node, images)
        sized = sizes_of_micro_batches(job, gpu_named(options.gpu))
        job = replace(job, config=with_keys(shaped, sized))
    steady = steady_order(config, placement)
    guests, sharing = (job.guests, job.sharing) if job else ((), ())
    of_ranks = rank_map(placement, grids, ranks_per_node) if options.every_rank else []
    evaluation = describe_evaluation(config, grids, estimator_of_sets(job, options) if job else None)
    sections = {
        **({"Models": not_there} if not_there else {}),
        **({"Micro-batches": [f"{key}: auto is {tokens}" for key, tokens in sized.items()]} if sized else {}),
        f"Ranks: {world_size}, {ranks_per_node} per node": [*describe_ranks(placement, ranks_per_node), *of_ranks],
        "Pairs of roles": pair_modes(placement),
        "Parallel grids": [describe_grid(role, grid, architectures.get(role)) for role, grid in grids.items()],
        "Process groups": describe_groups(grids, world_size),
        f"Schedule: {describe_mode(config)}; {order.num_entries()} entries, no deadlock": describe_order(order, config),
        **({"Evaluation": evaluation} if evaluation else {}),
        "Repeats": [describe_repeating(config, grids)],
        "Overlaps": describe_overlaps(steady, config, placement),
        "Memory": describe_memory(steady, config, placement, guests, sharing),
        **(estimates(job, options) if job else unknown(config, "rollout" in grids)),
        "Rows": rows,
        **({"Environment": answers} if "env" in grids and (answers := describe_environment(config)) else {}),
        **({"Reward": reward} if (reward := describe_reward(config)) and "reward" in grids else {}),
    }
    of_models = doubts_about_models(config, architectures)
    if found := [*doubts(config, placement), *of_models, *doubts_about_variables(os.environ)]:
        sections["Warnings"] = found
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def model_limits(architectures: Mapping[str, Architecture]) -> ModelLimits:
    """Returns the limits of the policy's model. They are unknown if its config.json was not read."""
    policy = architectures.get("actor")
    return ModelLimits(policy.vocab_size, policy.max_positions) if policy else UNKNOWN_MODEL


def estimates(job: PlannedJob, options: DryRunOptions) -> Sections:
    """Returns bytes and seconds. Raises ConfigError if the job does not fit, except with --search."""
    gpu = gpu_named(options.gpu)
    workload = Workload.of(job.config, options.prompt_tokens, options.response_tokens, job.images)
    calibration = calibration_of([options.calibrate], gpu) if options.calibrate else Calibration()
    memories = rank_memories(job, gpu)
    fits = all(memory.fits(gpu) for memory in memories)
    if not fits and not options.search:
        refuse_what_does_not_fit(memories, gpu, options.gpu, best_changes(job, gpu, is_legal))
    clock = Clock(job, gpu, workload, calibration)
    peaks = describe_fit(memories, gpu, job.ranks_per_node)
    source = str(options.calibrate) if options.calibrate else None
    found = {
        f"Bytes, estimated for {options.gpu}": peaks if fits else [*peaks, "does not fit"],
        f"Seconds, estimated for {options.gpu}": describe_time(job, clock.step(), workload, source),
        "Weight sync": describe_weight_sync(job, clock.sync, gpu, options.every_rank),
    }
    if options.search:
        found["Fastest placements"] = describe_proposals(job, gpu, workload, calibration)
    return found


def unknown(config: Config, has_rollout: bool) -> Sections:
    """Returns the section for a model without config.json, or for an algorithm without training."""
    if not algorithm_of(config).trains:
        return {"Weight sync": ["none: engines read model.path; bytes and seconds are estimated for training only"]}
    missing = f"{Path(config.model.path, CONFIG_FILE)} does not exist yet (model.path)"
    return {"Weight sync": [f"bytes unknown: {missing}" if has_rollout else "none: no rollout is placed"]}


def pair_modes(placement: Placement) -> list[str]:
    pairs = combinations(placement.roles, 2)
    return table([[first, second, placement.mode(first, second)] for first, second in pairs])


def describe_grid(role: str, grid: Grid, architecture: Architecture | None) -> str:
    sizes = f"tp {grid.tp} x pp {grid.pp} x cp {grid.cp} x ep {grid.ep} x dp {grid.dp}"
    if grid.etp not in (None, grid.tp):
        sizes += f" (experts: etp {grid.etp})"
    stages = ""
    if grid.pp > 1 and architecture is not None:
        layers = grid.layers_of_chunks(architecture.num_layers)
        kind = f"{grid.vpp} interleaved chunks of each stage" if grid.vpp > 1 else "stages"
        stages = f"; layers of the {kind}: {', '.join(map(str, layers))}"
    return f"{role}: {sizes} on ranks {format_ranks(grid.ranks)}{stages}"


def describe_groups(grids: Mapping[str, Grid], world_size: int) -> list[str]:
    lists = group_lists(grids)
    of_rank = [0] * world_size
    for group in lists:
        for rank in group:
            of_rank[rank] += 1
    return [f"{len(lists)} in the job, at most {max(of_rank)} on one rank; equal rank lists share one"]


def describe_repeating(config: Config, grids: Mapping[str, Grid]) -> str:
    """Returns whether another run of the same config gives equal results, with the reason."""
    obstacle = obstacle_to_repeating(config, grids)
    return (
        f"no: {obstacle}"
        if obstacle
        else "yes, on CPUs bit for bit: samples and the weights that generate them do not depend on timing"
    )


def describe_weight_sync(job: PlannedJob, sync: PlannedSync, gpu: Gpu, every_pair: bool) -> list[str]:
    if "rollout" not in job.grids:
        return ["none: no rollout is placed"]
    moved, predicted = sync.planner.traffic, sync.prediction(gpu)
    on_wire = moved.node + moved.network_minimum
    lines = [
        f"{on_wire:,} bytes on the wire per sync: {size(moved.network_minimum)} between nodes, {size(moved.node)} "
        f"within them; {size(moved.local)} copied within ranks",
        f"busiest between nodes: sends {size(predicted.busiest_sender_bytes)}, receives "
        f"{size(predicted.busiest_receiver_bytes)}; {seconds(predicted.network)} between nodes, at least "
        f"{seconds(predicted.network_bound)} by any plan, {seconds(predicted.node)} within",
    ]
    in_files, where = job.config.synced_delta is None, keeping(job)
    if where and not in_files and ranks_left_by_engines(job.config, job.placement):
        lines.append("sends everything every time: see weight_sync.delta under Warnings")
    elif where:
        role, what = ("rollout", "writes files of") if in_files else ("actor", "sends only")
        kept = max(kept_bytes(job, rank) for rank in job.grids[role].ranks)
        lines.append(
            f"{what} changed elements: {100 * changed_share(job):.1f}% of these bytes on average, if a step changes "
            f"{100 * CHANGED_SHARE:g}% of 16-bit elements and all wider ones; a rank of the {role} keeps "
            f"{size(kept)} on its {where}"
        )
    return [*lines, *traffic_of_pairs(job, sync)] if every_pair else lines


def traffic_of_pairs(job: PlannedJob, sync: PlannedSync) -> list[str]:
    """Returns the bytes from every rank to every other rank."""
    rows = [["from", "to", "bytes", "over"]]
    moved = traffic(sync.planner.source, sync.planner.destination, job.ranks_per_node)
    for (sender, receiver), num_bytes in sorted(moved.items()):
        same_node = sender // job.ranks_per_node == receiver // job.ranks_per_node
        path = "memory" if sender == receiver else "node" if same_node else "network"
        rows.append([str(sender), str(receiver), f"{num_bytes:,}", path])
    return table(rows)
