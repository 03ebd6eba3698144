"""How long tasks and steps take, in words."""

from collections.abc import Mapping

from rltrain.dry_run.sizes import digits, seconds
from rltrain.dry_run.table import table
from rltrain.estimate.step_time import StepTime
from rltrain.estimate.workload import Workload


def describe_time(step: StepTime, workload: Workload, calibrated: str | None) -> list[str]:
    """A line per task of a step in the middle of the run, the step, and how long each role's ranks wait."""
    source = f"as {calibrated} measured them" if calibrated else "efficiencies assumed: rltrain/estimate/hardware.py"
    lines = [
        f"assumed: prompts of {digits(workload.prompt)} tokens, responses of {digits(workload.response)}, the longest "
        f"of {digits(workload.longest_response)}; {source}"
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
        f"of it ranks wait: {', '.join(f'{role} {idle:.0%}' for role, idle in _idle(step.busy).items())}",
    ]


def _idle(busy: Mapping[str, float]) -> dict[str, float]:
    return {role: 1 - share for role, share in busy.items()}
