"""Who evaluates what, beside whom, and how long it takes."""

from collections.abc import Callable, Mapping

from rltrain.config.evaluation import SHORT_FORM
from rltrain.config.schema import Config, EvaluationPlan
from rltrain.dry_run.options import DryRunOptions
from rltrain.dry_run.sizes import seconds, size
from rltrain.dry_run.table import table
from rltrain.estimate.hardware import gpu_named
from rltrain.estimate.peak import cache_bytes, rank_memories
from rltrain.estimate.planned import PlannedJob
from rltrain.estimate.rollout_time import evaluating
from rltrain.estimate.sync_time import PlannedSync
from rltrain.estimate.workload import Workload
from rltrain.runtime.grid import Grid
from rltrain.runtime.placement import format_ranks
from rltrain.schedule.shape import RunShape

PROMPTS = 100
"""Of which the seconds are told: how many a file has, nobody has read."""

SecondsOfSet = Callable[[EvaluationPlan], float]


def describe_evaluation(
    config: Config, grids: Mapping[str, Grid], estimate: tuple[str, SecondsOfSet] | None
) -> list[str]:
    """Returns nothing where nothing is evaluated. `estimate` is what `estimator_of_sets` gives."""
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
        lines = [f"by role evaluation, {engines}, beside training and generation, which wait for none of it"]
    elif RunShape.of(config).lead:
        lines = [f"by the rollout, {engines}, while training goes on; engines draw, and take weights, when it is done"]
    else:
        lines = [f"by the rollout, {engines}, while all others wait"]
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
    """What its weights cost training, in words, and the seconds of drawing PROMPTS prompts of a set."""
    gpu = gpu_named(options.gpu)
    workload = Workload.of(job.config, options.prompt_tokens, options.response_tokens)
    role = "evaluation" if "evaluation" in job.grids else "rollout"
    room = cache_bytes(rank_memories(job, gpu), role)
    sync = ""
    if role == "evaluation":
        planned = PlannedSync(job, role)
        moved = planned.planner.traffic
        on_wire = size(moved.node + moved.network_minimum)
        sync = f"each takes {on_wire} of weights from the actor in {seconds(planned.seconds(gpu))}, kept on the host"
    return sync, lambda plan: evaluating(job, gpu, workload, plan, room, PROMPTS)
