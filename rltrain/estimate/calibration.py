"""What a run took, over what was foretold of it: factors by which the seconds of other jobs are foretold."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from rltrain.cluster.placement import placement_of
from rltrain.config.schema import Config
from rltrain.errors import DataError
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.planned import PlannedJob, plan_job
from rltrain.estimate.step_time import Clock, Factors
from rltrain.estimate.workload import Workload
from rltrain.models.of_roles import role_architectures
from rltrain.observability.run_logs import JOB_FILE, METRICS_FILE
from rltrain.schedule.steady import fullest_step

WARM_UP_STEPS = 2
"""Steps at the start that are not looked at, where there are more."""

Record = dict[str, Any]


def factors_of(run: Path, gpu: Gpu, typical: Callable[[Iterable[float]], float] = median) -> Factors:
    """By task, what is `typical` of its seconds in `run`, an output_dir, over those foretold for that run on `gpu`.

    Tasks that the run did not have are left out. DataError where the folder lacks what a run writes.
    """
    job, records = read_measured(run)
    clock = Clock(job, gpu, measured_workload(job, records))
    tasks = [entry for _, entry in job.order.of_step(fullest_step(job.order)) if entry.kind == "task"]
    foretold: dict[str, float] = defaultdict(float)
    for entry in tasks:
        foretold[entry.name] += max(clock.task(entry.name, role) for role in entry.roles)
    took = {task: values_of(records, f"perf/{task}_s") for task in foretold}
    return {task: typical(took[task]) / seconds for task, seconds in foretold.items() if seconds and took[task]}


def measured_workload(job: PlannedJob, records: list[Record]) -> Workload:
    """Lengths of a run's texts: of responses as they were drawn, of prompts by the tokens that were trained on."""
    assumed = Workload.of(job.config)
    response = values_of(records, "rollout/response_length_mean")
    longest = values_of(records, "rollout/response_length_max")
    if not response or not longest:
        return assumed
    trained = values_of(records, "train/tokens")
    prompt = median(trained) / job.samples_per_step - median(response) if trained else assumed.prompt
    prompt = min(max(prompt, 1.0), job.config.data.max_prompt_tokens)
    return Workload(prompt, median(response), median(longest))


def values_of(records: list[Record], metric: str) -> list[float]:
    """Of every record that has it."""
    return [record[metric] for record in records if record.get(metric) is not None]


def read_measured(run: Path) -> tuple[PlannedJob, list[Record]]:
    """A run's job and the metrics of its steps but the first ones. DataError where `run` is no run's output_dir."""
    expected = f"expected the output_dir of a run, with {METRICS_FILE} and {JOB_FILE}"
    try:
        records = [json.loads(line) for line in (run / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
        saved = json.loads((run / JOB_FILE).read_text(encoding="utf-8"))
        config = Config.model_validate_json(json.dumps(saved["config"]))
        world_size, ranks_per_node = int(saved["world_size"]), int(saved["ranks_per_node"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise DataError(f"option --calibrate: {run}: {error}; {expected}") from error
    steps = [record for record in records if "perf/step_time_s" in record]
    if not steps:
        raise DataError(f"option --calibrate: {run}: {METRICS_FILE} has no step that was timed; {expected}")
    placement = placement_of(config, world_size, ranks_per_node)
    job = plan_job(config, placement, role_architectures(config, placement.roles), ranks_per_node)
    return job, steps[WARM_UP_STEPS:] or steps
