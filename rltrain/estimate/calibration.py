"""What a run took beside what was foretold of it, by which the seconds of other jobs are foretold."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import ValidationError

from rltrain.config.schema import Config
from rltrain.errors import DataError
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.planned import PlannedJob, plan_job
from rltrain.estimate.step_time import Calibration, Clock
from rltrain.estimate.workload import Workload
from rltrain.models.checkpoint_model import role_architectures
from rltrain.observability.run_logs import JOB_FILE, METRICS_FILE
from rltrain.runtime.placement import placement_of
from rltrain.schedule.steps import fullest_step

WARM_UP_STEPS = 2
"""Steps at the start that are not looked at, where there are more."""

STEP = "perf/step_time_s"
Record = dict[str, Any]


def calibration_of(runs: Iterable[Path], gpu: Gpu) -> Calibration:
    """By medians of the steps of `runs`, output_dirs of one config, against what is foretold for it on `gpu`.

    Tasks that they did not have are left out. DataError where a folder lacks what a run writes.
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


def read_measured(runs: Iterable[Path]) -> tuple[PlannedJob, list[Record]]:
    """The job of runs of one config, the first one's, and the metrics of all their steps but the first ones. DataError
    where one of `runs` is no run's output_dir."""
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
        raise DataError(f"option --calibrate: {run}: {METRICS_FILE} has no step that was timed; {expected}")
    placement = placement_of(config, world_size, ranks_per_node)
    job = plan_job(config, placement, role_architectures(config, placement.roles), ranks_per_node)
    return job, steps[WARM_UP_STEPS:] or steps
