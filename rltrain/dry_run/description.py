"""What a job would do, in words: computed from the config alone, without torchrun, GPU or weights."""

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from rltrain.algorithms.registry import algorithm_of
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.data.hub import with_cached_copies
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits
from rltrain.dry_run.evaluation import describe_evaluation, estimator_of_sets
from rltrain.dry_run.fit import describe_fit, refuse_what_does_not_fit
from rltrain.dry_run.legal import is_legal
from rltrain.dry_run.memory import describe_memory
from rltrain.dry_run.options import DryRunOptions
from rltrain.dry_run.proposals import describe_proposals
from rltrain.dry_run.ranks import describe_ranks, rank_map
from rltrain.dry_run.reward import describe_environment, describe_reward
from rltrain.dry_run.rows import describe_rows
from rltrain.dry_run.shapes import with_shipped_shapes
from rltrain.dry_run.sizes import seconds, size
from rltrain.dry_run.steps import describe_mode, describe_order, describe_overlaps
from rltrain.dry_run.table import table
from rltrain.dry_run.time import describe_time
from rltrain.estimate.calibration import calibration_of
from rltrain.estimate.changes import best_changes
from rltrain.estimate.delta import CHANGED_SHARE, changed_share, keeping, kept_bytes
from rltrain.estimate.hardware import Gpu, gpu_named
from rltrain.estimate.peak import rank_memories
from rltrain.estimate.planned import PlannedJob
from rltrain.estimate.step_time import Calibration, Clock
from rltrain.estimate.sync_time import PlannedSync
from rltrain.estimate.workload import Workload
from rltrain.legality.config import check_config
from rltrain.legality.doubts import doubts, doubts_about_models, doubts_about_variables
from rltrain.legality.placed import place_config
from rltrain.legality.repeating import obstacle_to_repeating
from rltrain.models import Architecture
from rltrain.reshard.plan import traffic
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import Placement, format_ranks, group_lists
from rltrain.schedule.memory_plan import ranks_left_by_engines
from rltrain.schedule.steps import steady_order

CONFIG_FILE = "config.json"
Sections = dict[str, list[str]]


def describe_job(config_path: Path, overrides: Sequence[str], options: DryRunOptions) -> str:
    """The whole description; raises the UserError that the job would be refused with, or that it does not fit."""
    return describe(load_config(config_path, overrides), options)


def describe(config: Config, options: DryRunOptions) -> str:
    """`describe_job` of a config that is there."""
    config = with_cached_copies(config)
    check_config(config)
    world_size, ranks_per_node = options.world_size, min(options.ranks_per_node, options.world_size)
    shaped, not_there = with_shipped_shapes(config)
    placed = place_config(
        shaped, world_size, ranks_per_node, reads_models=Path(shaped.model.path, CONFIG_FILE).exists()
    )
    placement, grids, architectures, order = placed.placement, placed.grids, placed.architectures, placed.order
    job: PlannedJob | None = None
    if architectures and algorithm_of(config).trains:
        job = PlannedJob(shaped, placement, grids, architectures, ranks_per_node)
    steady = steady_order(config, placement)
    guests, sharing = (job.guests, job.sharing) if job else ((), ())
    of_ranks = rank_map(placement, grids, ranks_per_node) if options.every_rank else []
    evaluation = describe_evaluation(config, grids, estimator_of_sets(job, options) if job else None)
    sections = {
        **({"Models": not_there} if not_there else {}),
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
        "Rows": describe_rows(config, model_limits(architectures)),
        **({"Environment": answers} if "env" in grids and (answers := describe_environment(config)) else {}),
        **({"Reward": reward} if (reward := describe_reward(config)) and "reward" in grids else {}),
    }
    of_models = doubts_about_models(config, architectures)
    if found := [*doubts(config, placement), *of_models, *doubts_about_variables(os.environ)]:
        sections["Warnings"] = found
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections.items())


def model_limits(architectures: Mapping[str, Architecture]) -> ModelLimits:
    """Returns what the policy has room for; nothing is known of it where its config.json was not read."""
    policy = architectures.get("actor")
    return ModelLimits(policy.vocab_size, policy.max_positions) if policy else UNKNOWN_MODEL


def estimates(job: PlannedJob, options: DryRunOptions) -> Sections:
    """Bytes and seconds. ConfigError where the job does not fit, unless other placements are asked for."""
    gpu = gpu_named(options.gpu)
    workload = Workload.of(job.config, options.prompt_tokens, options.response_tokens)
    calibration = calibration_of([options.calibrate], gpu) if options.calibrate else Calibration()
    memories = rank_memories(job, gpu)
    fits = all(memory.fits(gpu) for memory in memories)
    if not fits and not options.search:
        refuse_what_does_not_fit(memories, gpu, options.gpu, best_changes(job, gpu, is_legal))
    clock = Clock(job, gpu, workload, calibration)
    peaks = describe_fit(memories, gpu, job.ranks_per_node)
    source = str(options.calibrate) if options.calibrate else None
    found = {
        f"Bytes, foretold for {options.gpu}": peaks if fits else [*peaks, "does not fit"],
        f"Seconds, foretold for {options.gpu}": describe_time(clock.step(), workload, source),
        "Weight sync": describe_weight_sync(job, clock.sync, gpu, options.every_rank),
    }
    if options.search:
        found["Placements that would be fastest"] = describe_proposals(job, gpu, workload, calibration)
    return found


def unknown(config: Config, has_rollout: bool) -> Sections:
    """What is said where there is no config.json to read a model's shape from, or nothing is trained."""
    if not algorithm_of(config).trains:
        return {"Weight sync": ["none: engines read model.path; bytes and seconds are foretold of training alone"]}
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
    """Whether another run of the same config gives the same."""
    obstacle = obstacle_to_repeating(config, grids)
    return (
        f"no: {obstacle}"
        if obstacle
        else "yes, on CPUs bit for bit: what is drawn, and by which weights, depends on no clock"
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
        role, what = ("rollout", "writes files of") if in_files else ("actor", "sends")
        kept = max(kept_bytes(job, rank) for rank in job.grids[role].ranks)
        lines.append(
            f"{what} what changed: {100 * changed_share(job):.1f}% of these bytes in the mean, if a step changes "
            f"{100 * CHANGED_SHARE:g}% of elements of 16 bits and all wider ones; a rank of the {role} keeps "
            f"{size(kept)} on its {where}"
        )
    return [*lines, *traffic_of_pairs(job, sync)] if every_pair else lines


def traffic_of_pairs(job: PlannedJob, sync: PlannedSync) -> list[str]:
    """Bytes from every rank to every other one."""
    rows = [["from", "to", "bytes", "over"]]
    moved = traffic(sync.planner.source, sync.planner.destination, job.ranks_per_node)
    for (sender, receiver), num_bytes in sorted(moved.items()):
        same_node = sender // job.ranks_per_node == receiver // job.ranks_per_node
        path = "memory" if sender == receiver else "node" if same_node else "network"
        rows.append([str(sender), str(receiver), f"{num_bytes:,}", path])
    return table(rows)
