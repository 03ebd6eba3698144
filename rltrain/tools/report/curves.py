"""Which metrics are drawn together, under which heading and in which unit."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rltrain.observability.names import METRICS, waiting_task, working_task
from rltrain.tools.report.run_folder import RankTrace, Record

MAX_POINTS = 600

Points = list[tuple[float, float | None]]


@dataclass(frozen=True)
class Series:
    """`points` are (step or seconds, value); None where the value was not finite. `task`: whose seconds they are."""

    label: str
    points: Points
    task: str | None = None

    @property
    def is_zero(self) -> bool:
        """Throughout."""
        return all(value == 0 for _, value in self.points)


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str
    meaning: str
    series: tuple[Series, ...]
    x: str = "step"


@dataclass(frozen=True)
class Section:
    """`zeros` names what is zero throughout, which no panel draws."""

    title: str
    panels: tuple[Panel, ...]
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A panel of the table below. A metric is a pattern: its first group, where it has one, is the label."""

    section: str
    title: str
    metrics: tuple[tuple[str, str], ...]


# Metrics that are compared with each other share a panel; all others get one of their own under their prefix.
DRAWN = (
    Drawn(
        "Learning",
        "Reward",
        (("rollout/reward_mean", "training"), ("eval/score", "held-out"), (r"eval/([\w.-]+)/score", "")),
    ),
    Drawn("Learning", "Passed by one of k samples", ((r"eval/([\w.-]+/pass@\d+)", ""),)),
    Drawn(
        "Learning",
        "Response length",
        (
            ("rollout/response_length_mean", "training, mean"),
            ("rollout/response_length_max", "training, max"),
            ("eval/response_length_mean", "held-out, mean"),
        ),
    ),
    Drawn("Learning", "Loss", (("train/loss", "loss"), ("train/pg_loss", "policy"))),
    Drawn(
        "Learning",
        "KL",
        (("train/reference_kl", "to the reference"), ("train/ppo_kl", "old to new"), ("train/kl_loss", "in the loss")),
    ),
    Drawn("Learning", "Gradient norm", (("train/grad_norm", "actor"), ("critic/grad_norm", "critic"))),
    Drawn("Learning", "Entropy", (("train/entropy", "entropy"),)),
    Drawn("Learning", "Learning rate", (("train/lr", "actor"), ("critic/lr", "critic"))),
    Drawn("Off policy", "Staleness", (("train/staleness_mean", "mean"), ("train/staleness_max", "max"))),
    Drawn("Off policy", "Over the limit", ((r"train/stale_(\w+)", ""),)),
    Drawn(
        "Off policy",
        "Log-probs, actor and engine apart",
        (("train/train_rollout_logprob_abs_diff", "mean"), ("train/train_rollout_logprob_abs_diff_max", "max")),
    ),
    Drawn("Critic", "Value and return", (("critic/value_mean", "value"), ("critic/return_mean", "return"))),
    Drawn("Memory", "Peak per role", ((r"memory/(\w+)_resident_bytes", ""),)),
    Drawn("Memory", "Left after offload", ((r"memory/(\w+)_residue_bytes", ""),)),
    Drawn("Memory", "Moves", (("memory/offload_s", "offload"), ("memory/onload_s", "onload"))),
    Drawn("Speed", "Step time", (("perf/step_time_s", "step"),)),
    Drawn("Speed", "Longest decode step", (("perf/decode_step_max_s", "longest"),)),
    Drawn("Speed", "Seconds by task", ((r"perf/(?!step_time|weight_sync_\w+_s|\w+_wait_s|\w+_per_s)(\w+)_s", ""),)),
    Drawn("Speed", "Seconds of waiting by task", ((r"perf/(\w+)_wait_s", ""),)),
    Drawn(
        "Speed",
        "Throughput",
        (("perf/rollout_tokens_per_s", "rollout"), ("perf/train_tokens_per_s", "training")),
    ),
    Drawn(
        "Weight sync",
        "Bytes",
        (
            ("perf/weight_sync_bytes", "moved"),
            ("perf/weight_sync_local_bytes", "local"),
            ("perf/weight_sync_node_bytes", "within nodes"),
            ("perf/weight_sync_network_bytes", "between nodes"),
        ),
    ),
    Drawn("Weight sync", "Bandwidth", (("perf/weight_sync_gb_per_s", "moved"),)),
    Drawn("Weight sync", "Seconds by part", ((r"perf/weight_sync_(\w+)_s", ""),)),
)

SECTIONS = ("Learning", "Rollout", "Off policy", "Critic", "Speed", "Weight sync", "Memory")
_SECTION_OF_PREFIX = {
    "train": "Learning",
    "eval": "Learning",
    "rollout": "Rollout",
    "critic": "Critic",
    "perf": "Speed",
    "memory": "Memory",
}
_DOCUMENTED = {metric.name: (metric.unit, metric.meaning) for metric in METRICS}
_DOCUMENTED_PATTERNS = [
    (re.compile(r"\w+".join(re.escape(part) for part in re.split(r"<\w+>", name))), entry)
    for name, entry in sorted(_DOCUMENTED.items(), key=lambda item: -len(item[0]))  # <task>_wait_s before <task>_s
    if "<" in name
]


def sections(records: Sequence[Record], ranks: Iterable[RankTrace] = ()) -> list[Section]:
    """All metrics of `records` and counters of `ranks`, each in exactly one panel or among the zeros of its section; in
    the order of SECTIONS."""
    remaining = sorted({name for record in records for name in record} - {"step", "time_s"})
    found: dict[str, list[Panel]] = {section: [] for section in SECTIONS}
    for drawn in DRAWN:
        taken = [(name, label) for name in remaining if (label := _label(drawn, name)) is not None]
        if taken:
            taken.sort(key=lambda item: _position(drawn, item[0]))
            remaining = [name for name in remaining if name not in dict(taken)]
            found[drawn.section].append(_panel(drawn.title, taken, records))
    known_prefixes = Counter(name.rpartition("/")[0] for name in remaining)
    for name in remaining:
        section, title = _place(name, num_alike=known_prefixes[name.rpartition("/")[0]])
        found.setdefault(section, []).append(_panel(title, [(name, name)], records))
    if counters := _counter_panels(list(ranks)):
        found["Over time"] = counters
    return [_without_zeros(title, panels) for title, panels in found.items() if panels]


def _without_zeros(title: str, panels: Sequence[Panel]) -> Section:
    kept, zeros = [], []
    for panel in panels:
        rest = tuple(series for series in panel.series if not series.is_zero)
        left_out = [series.label for series in panel.series if series.is_zero]
        if rest:
            alone = f": {rest[0].label}" if len(rest) == 1 < len(panel.series) else ""  # one line has no legend
            kept.append(replace(panel, title=panel.title + alone, series=rest))
            zeros += [f"{panel.title} ({', '.join(left_out)})"] if left_out else []
        else:
            zeros.append(panel.title)
    return Section(title, tuple(kept), tuple(zeros))


def _place(name: str, num_alike: int) -> tuple[str, str]:
    """(section, title) of a metric that has a panel of its own; `num_alike` are left with its prefix."""
    if name.startswith("perf/weight_sync_"):
        return "Weight sync", _title(name.removeprefix("perf/weight_sync_"))
    prefix, _, rest = name.rpartition("/")
    if prefix in _SECTION_OF_PREFIX:
        return _SECTION_OF_PREFIX[prefix], _title(rest)
    return (prefix, _title(rest)) if prefix and num_alike > 1 else ("Other", name)


def _title(name: str) -> str:
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]


def _label(drawn: Drawn, name: str) -> str | None:
    for pattern, label in drawn.metrics:
        if match := re.fullmatch(pattern, name):
            return label or match[1].replace("_", " ")
    return None


def _position(drawn: Drawn, name: str) -> int:
    return next(i for i, (pattern, _) in enumerate(drawn.metrics) if re.fullmatch(pattern, name))


def _panel(title: str, metrics: list[tuple[str, str]], records: Sequence[Record]) -> Panel:
    series = tuple(
        Series(label, thinned(_points(name, records)), working_task(name) or waiting_task(name))
        for name, label in metrics
    )
    unit, meaning = documentation(metrics[0][0])
    if any(documentation(name)[0] != unit for name, _ in metrics):
        unit = ""
    says_more = len(metrics) == 1 and meaning.lower() != title.lower()
    return Panel(title, unit, meaning if says_more else "", series)


def _points(name: str, records: Sequence[Record]) -> Points:
    """A step without the metric has no point."""
    return [(record["step"], _number(record[name])) for record in records if name in record]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def documentation(name: str) -> tuple[str, str]:
    """(unit, meaning) of a metric, from the table; the unit follows from the name where the table lacks it."""
    if name in _DOCUMENTED:
        return _DOCUMENTED[name]
    for pattern, entry in _DOCUMENTED_PATTERNS:
        if pattern.fullmatch(name):
            return entry
    for suffix, unit in (("_bytes", "bytes"), ("_s", "s"), ("_tokens", "tokens")):
        if name.endswith(suffix):
            return unit, ""
    return "", ""


def thinned(points: Points, max_points: int = MAX_POINTS) -> Points:
    """At most `max_points` and a few: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= max_points:
        return points
    num_stretches = max_points // 2
    kept: set[int] = {0, len(points) - 1}
    for stretch in range(num_stretches):
        indices = range(stretch * len(points) // num_stretches, (stretch + 1) * len(points) // num_stretches)
        finite = [(value, i) for i in indices if (value := points[i][1]) is not None]
        if finite:
            kept |= {min(finite)[1], max(finite)[1]}
    return [points[i] for i in sorted(kept)]


def _counter_panels(ranks: list[RankTrace]) -> list[Panel]:
    names = sorted({name for rank in ranks for name in rank.counters})
    start_us = min((rank.start_us for rank in ranks), default=0.0)
    panels = []
    for name in names:
        series = tuple(
            Series(f"rank {rank.rank}", thinned([((ts - start_us) / 1e6, value) for ts, value in rank.counters[name]]))
            for rank in ranks
            if name in rank.counters
        )
        panels.append(Panel(name, "", "", series, x="s"))
    return panels
