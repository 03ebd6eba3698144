"""What --search proposes, in words."""

from rltrain.dry_run.legal import is_legal
from rltrain.dry_run.sizes import digits, seconds, size
from rltrain.dry_run.table import table
from rltrain.estimate.hardware import Gpu
from rltrain.estimate.planned import PlannedJob
from rltrain.estimate.search import proposals
from rltrain.estimate.step_time import Calibration
from rltrain.estimate.workload import Workload


def describe_proposals(job: PlannedJob, gpu: Gpu, workload: Workload, calibration: Calibration) -> list[str]:
    """A line for each, fastest first: what to write in the config, and what it would take."""
    rows = [["a step", "tokens/s/GPU", "peak", "keys"]]
    for made in proposals(job, gpu, workload, calibration, is_legal):
        keys = " ".join(f"{key}={_value(value)}" for key, value in made.keys.items())
        numbers = [seconds(made.step.step_s), digits(made.step.tokens_per_s), size(made.memory.peak.total)]
        rows.append([*numbers, keys])
    if len(rows) == 1:
        return ["none: of all placements and sizes that are legal none fits"]
    return table(rows)


def _value(value: object) -> str:
    """As an override of the command line has it."""
    if isinstance(value, dict):
        inside = ", ".join(f"'{key}': {ranks}" for key, ranks in value.items())
        return f'"{{{inside}}}"'
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
