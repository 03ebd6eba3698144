"""The few numbers that say how a run went, for the head of the page and the terminal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rltrain.observability.progress import format_duration
from rltrain.tools.report.occupation import Occupation
from rltrain.tools.report.run_folder import Record, Run


@dataclass(frozen=True)
class Fact:
    """`note` puts the value into relation, such as what it started from."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


def facts(run: Run, occupations: Sequence[Occupation]) -> list[Fact]:
    """What is known; a run without metrics has fewer."""
    found: list[Fact] = []
    if run.records:
        trained = [record for record in run.records if record.keys() & {"train/loss", "perf/update_s"}]
        seconds = run.records[-1].get("time_s")
        duration = f"in {format_duration(seconds)}" if isinstance(seconds, int | float) else ""
        found.append(Fact("Steps", str(len(trained) or len(run.records)), note=duration))
    found += [
        *_from_to(run.records, "rollout/reward_mean", "Reward"),
        *_from_to(run.records, "eval/score", "Held-out score"),
        *_from_to(run.records, "rollout/response_length_mean", "Response length", unit="tokens"),
        *_average(run.records, "perf/step_time_s", "Step time", "s"),
        *_average(run.records, "perf/rollout_tokens_per_s", "Rollout", "tokens/s"),
        *_average(run.records, "perf/train_tokens_per_s", "Training", "tokens/s"),
    ]
    staleness = column(run.records, "train/staleness_max")
    if staleness:
        found.append(Fact("Staleness", number(max(staleness)), "steps", "at most"))
    if occupations:
        idlest = max(occupations, key=lambda occupation: occupation.idle_fraction)
        found.append(Fact("Most idle role", f"{idlest.idle_fraction:.0%}", "idle", idlest.role))
    return found


def column(records: Sequence[Record], name: str) -> list[float]:
    """The finite values of a metric."""
    values = (record.get(name) for record in records)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def number(value: float, unit: str = "") -> str:
    """Short, with the prefixes people use: 1.23k, 4.5M; bytes in powers of 1024."""
    if unit == "bytes":
        for prefix, num_bytes in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if abs(value) >= num_bytes:
                return f"{value / num_bytes:.3g} {prefix}"
        return f"{value:.0f} B"
    for letter, at_least, size in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e4, 1e3)):
        if abs(value) >= at_least:
            return f"{value / size:.3g}{letter}"
    if abs(value) >= 1000:
        return f"{value:.0f}"
    return f"{value:.3g}"


def _from_to(records: Sequence[Record], name: str, label: str, unit: str = "") -> list[Fact]:
    values = column(records, name)
    if not values:
        return []
    return [Fact(label, number(values[-1]), unit, f"from {number(values[0])}, at most {number(max(values))}")]


def _average(records: Sequence[Record], name: str, label: str, unit: str) -> list[Fact]:
    """The median: the first step is slower than the others."""
    values = sorted(column(records, name))
    return [Fact(label, number(values[len(values) // 2]), unit, "median of the steps")] if values else []
