"""Reads the files in a run's folder, and derives facts, curves and occupations."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rltrain.errors import DataError
from rltrain.observability.names import documented, waiting_task, working_task
from rltrain.observability.progress import format_duration

# Files of a run: metrics.jsonl, trace/rank*.json, samples.jsonl and evaluation_samples/rank*.jsonl. Each may be
# missing.

Record = dict[str, Any]

MAIN_THREAD = "MainThread"
"""Python's name of the thread with a rank's tasks."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """A span of a thread. Times are microseconds of wall-clock time. `depth` counts the enclosing spans."""

    name: str
    category: str
    start_us: float
    end_us: float
    thread: str
    depth: int
    arguments: Record
    is_unfinished: bool = False
    """True if the rank ended before the span. `end_us` is then the time of the rank's last event."""


@dataclass
class RankTrace:
    """The contents of one trace file."""

    rank: int
    roles: tuple[str, ...] = ()
    spans: list[TimelineSpan] = field(default_factory=list)
    """Spans by start. Of spans with the same start the outer one comes first."""
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(time in microseconds, value) by name."""
    events: list[Record] = field(default_factory=list)
    """The events of the file, unchanged."""

    @property
    def start_us(self) -> float:
        return min((event["ts"] for event in self.events), default=0.0)

    @property
    def end_us(self) -> float:
        return max((event["ts"] for event in self.events), default=0.0)


@dataclass
class Run:
    """A run folder. `notes` lists missing and unreadable parts."""

    path: Path
    records: list[Record]
    """Records of metrics.jsonl, one per step, in the order of steps."""
    samples: list[Record]
    ranks: list[RankTrace]
    notes: list[str]


def read_run(path: Path) -> Run:
    """Reads a run folder. Raises DataError if it has nothing to report."""
    notes: list[str] = []
    records = one_record_per_step(_read_lines(path / "metrics.jsonl", notes))
    samples = _read_samples(path, notes)
    ranks = _read_traces(path / "trace", notes)
    if not records and not samples and not ranks:
        raise DataError(
            f"{path} has nothing to report: expected the output_dir of a run, with metrics.jsonl, trace/rank*.json "
            "(logging.trace: true) or samples.jsonl"
        )
    return Run(path, records, samples, ranks, notes)


def _read_samples(path: Path, notes: list[str]) -> list[Record]:
    """Returns the samples of training and of evaluations by step. Only the latter have a "set"."""
    of_evaluations = sorted((path / "evaluation_samples").glob("rank*.jsonl"))
    lines = [line for file in (path / "samples.jsonl", *of_evaluations) for line in _read_lines(file, notes)]
    return sorted((line for line in lines if "response" in line), key=lambda sample: sample.get("step", 0))


OF_EVERY_RECORD = frozenset({"step", "time_s"})


def one_record_per_step(records: list[Record]) -> list[Record]:
    """Merges records so that every step has one.

    A resumed run repeats steps, and the later record counts. An evaluation in parallel with training has a separate
    record. It is merged into the record of its step.
    """
    kept: list[Record] = []
    for record in records:
        if not isinstance(record.get("step"), int):
            continue
        of_step = next((late for late in reversed(kept) if late["step"] == record["step"]), None)
        if of_step and of_step.keys() & record.keys() <= OF_EVERY_RECORD:
            of_step |= {**record, **of_step}
            continue
        while kept and kept[-1]["step"] >= record["step"]:
            kept.pop()
        kept.append(record)
    return kept


def _read_lines(path: Path, notes: list[str]) -> list[Record]:
    if not path.is_file():
        notes.append(f"no {path.name}")
        return []
    with path.open(encoding="utf-8", errors="replace") as lines:
        values, num_bad = _objects(lines)
    if num_bad:
        notes.append(f"{path.name}: {num_bad} unreadable line(s) left out")
    return values


def _objects(lines: Iterator[str]) -> tuple[list[Record], int]:
    """Returns the JSON objects of `lines`, one per line, and the number of other lines."""
    values, num_bad = [], 0
    for line in lines:
        text = line.strip().rstrip(",")
        if text in ("", "[", "]"):
            continue
        try:
            value = json.loads(text, parse_constant=lambda _: None)
        except ValueError:
            value = None
        if isinstance(value, dict):
            values.append(value)
        else:
            num_bad += 1
    return values, num_bad


def _read_traces(folder: Path, notes: list[str]) -> list[RankTrace]:
    numbered = [
        (int(match[1]), path) for path in folder.glob("rank*.json") if (match := _RANK_FILE.fullmatch(path.name))
    ]
    ranks = [_read_trace(rank, path, notes) for rank, path in sorted(numbered)]
    ranks = [rank for rank in ranks if rank.events]
    if not ranks:
        notes.append("no trace: set logging.trace: true for a timeline")
        return []
    newest_start_us = max(rank.start_us for rank in ranks)
    earlier = [rank.rank for rank in ranks if rank.end_us < newest_start_us]
    if earlier:
        notes.append(f"traces of ranks {', '.join(map(str, earlier))} are of an earlier run; left out")
    return [rank for rank in ranks if rank.rank not in earlier]


_RANK_FILE = re.compile(r"rank(\d+)\.json")


def _read_trace(rank: int, path: Path, notes: list[str]) -> RankTrace:
    with path.open(encoding="utf-8", errors="replace") as lines:
        values, num_bad = _objects(lines)
    events = [event for event in values if isinstance(event.get("ts"), int | float) and "ph" in event]
    if num_bad + len(values) - len(events):
        notes.append(f"{path.name}: {num_bad + len(values) - len(events)} unreadable event(s) left out")
    return pair_events(rank, events)


def pair_events(rank: int, events: list[Record]) -> RankTrace:
    """Pairs begin and end events of each thread to spans. A span without an end lasts until the last event."""
    trace = RankTrace(rank, events=events)
    threads: dict[int, str] = {}
    open_spans: dict[int, list[Record]] = {}
    for event in events:
        phase, thread = event["ph"], event.get("tid", 0)
        arguments = event.get("args") or {}
        if phase == "M" and event["name"] == "thread_name":
            threads[thread] = str(arguments.get("name"))
        elif phase == "M" and event["name"] == "process_name":
            roles = str(arguments.get("name", "")).partition(": ")[2]
            trace.roles = tuple(role for role in roles.split(", ") if role)
        elif phase == "C":
            trace.counters.setdefault(event["name"], []).append((event["ts"], float(arguments["value"])))
        elif phase == "B":
            open_spans.setdefault(thread, []).append(event)
        elif phase == "E" and open_spans.get(thread):
            started = open_spans[thread].pop()
            merged = {**event, "args": {**(started.get("args") or {}), **arguments}}
            trace.spans.append(_span(started, merged, threads, len(open_spans[thread])))
    last = {"ts": trace.end_us}
    for stack in open_spans.values():
        trace.spans += [_span(event, last, threads, depth, is_unfinished=True) for depth, event in enumerate(stack)]
    trace.spans.sort(key=lambda span: (span.start_us, span.depth))
    return trace


def _span(
    started: Record, ended: Record, threads: dict[int, str], depth: int, is_unfinished: bool = False
) -> TimelineSpan:
    return TimelineSpan(
        name=str(started["name"]),
        category=str(started.get("cat", "")),
        start_us=started["ts"],
        end_us=ended["ts"],
        thread=threads.get(started.get("tid", 0), "thread"),
        depth=depth,
        arguments=ended.get("args") or started.get("args") or {},
        is_unfinished=is_unfinished,
    )


def merged_trace(ranks: list[RankTrace]) -> str:
    """Returns all ranks' events as one strict JSON document for Perfetto."""
    events = (json.dumps(event, separators=(",", ":")) for rank in ranks for event in rank.events)
    return '{"traceEvents":[\n' + ",\n".join(events) + "\n]}\n"


# Use of time by the ranks of each role, from their traces.

OWN, OTHER, MEMORY, WAITING, IDLE = "own tasks", "other roles' tasks", "memory moves", "waiting", "nothing"
PURPOSES = (OWN, OTHER, MEMORY, WAITING, IDLE)

_PURPOSE_OF_CATEGORY = {"wait": WAITING, "post": WAITING, "offload": MEMORY, "onload": MEMORY, "prefetch": MEMORY}
_WORK = ("task", "sync")


@dataclass(frozen=True)
class Occupation:
    """The use of time by the ranks of `role`. Seconds by purpose are summed over its ranks."""

    role: str
    ranks: tuple[int, ...]
    seconds: dict[str, float]

    def fraction(self, purpose: str) -> float:
        """Returns the share of `purpose` in the time of the ranks."""
        total_s = sum(self.seconds.values())
        return self.seconds[purpose] / total_s if total_s else 0.0

    @property
    def idle_fraction(self) -> float:
        """Returns the share of the ranks' time spent waiting or without any work."""
        return self.fraction(WAITING) + self.fraction(IDLE)


def occupations(ranks: list[RankTrace]) -> list[Occupation]:
    """Returns the occupations by role, in the order of first ranks.

    The time between the first and the last task, wait or memory move of the run is divided. Each moment counts for the
    innermost span of the rank's main thread. A wait within a task is waiting. The span's argument `role` names the
    owners of a task, joined by "+". Spans of other categories and spans without this argument count for the enclosing
    span.
    """
    relevant = [span for rank in ranks for span in rank.spans if span.category in (*_WORK, *_PURPOSE_OF_CATEGORY)]
    if not relevant:
        return []
    run_s = (max(span.end_us for span in relevant) - min(span.start_us for span in relevant)) / 1e6
    hosts: dict[str, list[RankTrace]] = {}
    for rank in ranks:
        for role in rank.roles:
            hosts.setdefault(role, []).append(rank)
    return [
        Occupation(role, tuple(rank.rank for rank in hosting), _total(role, hosting, run_s))
        for role, hosting in hosts.items()
    ]


def _total(role: str, hosting: list[RankTrace], run_s: float) -> dict[str, float]:
    total = dict.fromkeys(PURPOSES, 0.0)
    for rank in hosting:
        seconds = _seconds_by_purpose(rank.spans, role)
        seconds[IDLE] = max(run_s - sum(seconds[purpose] for purpose in PURPOSES if purpose != IDLE), 0.0)
        for purpose in PURPOSES:
            total[purpose] += seconds[purpose]
    return total


def _seconds_by_purpose(spans: Iterable[TimelineSpan], role: str) -> dict[str, float]:
    """Returns the seconds by purpose on one rank's main thread."""
    seconds = dict.fromkeys(PURPOSES, 0.0)
    for span, own_s in own_seconds(spans, lambda span: _purpose(span, role) is not None):
        seconds[_purpose(span, role) or IDLE] += own_s
    return seconds


def own_seconds(
    spans: Iterable[TimelineSpan], counts: Callable[[TimelineSpan], bool]
) -> Iterator[tuple[TimelineSpan, float]]:
    """Yields the counted spans of a rank's main thread with their own seconds. Counted spans inside them are
    subtracted."""
    around: list[tuple[TimelineSpan, float]] = []
    for span in spans:
        if span.thread != MAIN_THREAD or not counts(span):
            continue
        while around and around[-1][0].end_us <= span.start_us:
            yield around.pop()
        seconds = (span.end_us - span.start_us) / 1e6
        if around:
            outer, own_s = around.pop()
            around.append((outer, own_s - seconds))
        around.append((span, seconds))
    yield from around


def _purpose(span: TimelineSpan, role: str) -> str | None:
    """Returns the purpose of a span, or None if it has that of the enclosing span."""
    if span.category in _WORK and "role" in span.arguments:
        return OWN if role in str(span.arguments["role"]).split("+") else OTHER
    return _PURPOSE_OF_CATEGORY.get(span.category)


def task_seconds(ranks: list[RankTrace]) -> dict[str, float]:
    """Returns the seconds of work by task over all ranks, longest first. Waits, memory moves and inner tasks are
    excluded."""
    seconds: dict[str, float] = {}
    for rank in ranks:
        for span, own_s in own_seconds(rank.spans, lambda span: span.category in ("task", *_PURPOSE_OF_CATEGORY)):
            if span.category == "task":
                seconds[span.name] = seconds.get(span.name, 0.0) + own_s
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


# Key figures of a run, for the head of the page and the terminal.


@dataclass(frozen=True)
class Fact:
    """A key figure. `note` gives context, such as its first value."""

    label: str
    value: str
    unit: str = ""
    note: str = ""


def facts(run: Run, occupations: Sequence[Occupation]) -> list[Fact]:
    """Returns the known facts. A run without metrics has fewer."""
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
        found.append(Fact("Staleness", readable(max(staleness)), "steps", "at most"))
    if occupations:
        idlest = max(occupations, key=lambda occupation: occupation.idle_fraction)
        found.append(Fact("Most idle role", f"{idlest.idle_fraction:.0%}", "idle", idlest.role))
    return found


def column(records: Sequence[Record], name: str) -> list[float]:
    """Returns the finite values of a metric."""
    values = (record.get(name) for record in records)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def readable(value: float, unit: str = "") -> str:
    """Returns a short number with a prefix: 1.23k, 4.5M. Bytes are in powers of 1024."""
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
    return [Fact(label, readable(values[-1]), unit, f"from {readable(values[0])}, at most {readable(max(values))}")]


def _average(records: Sequence[Record], name: str, label: str, unit: str) -> list[Fact]:
    """Returns the median. The first step is slower than others and would distort the mean."""
    values = sorted(column(records, name))
    return [Fact(label, readable(values[len(values) // 2]), unit, "median of the steps")] if values else []


# The panels of metrics with headings and units.

MAX_POINTS = 600

Points = list[tuple[float, float | None]]


@dataclass(frozen=True)
class Series:
    """A curve. `points` are (step or seconds, value), with None for values that are not finite. `task` is the task of a
    curve of seconds."""

    label: str
    points: Points
    task: str | None = None

    @property
    def is_zero(self) -> bool:
        """Returns whether all values are zero."""
        return all(value == 0 for _, value in self.points)


@dataclass(frozen=True)
class Panel:
    """A chart with one or several curves."""

    title: str
    unit: str
    meaning: str
    series: tuple[Series, ...]
    x: str = "step"


@dataclass(frozen=True)
class ReportSection:
    """A section of the report. `zeros` names curves that are always zero. No panel shows them."""

    title: str
    panels: tuple[Panel, ...]
    zeros: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A panel of the table below. A metric is a pattern. Without a given label its first group is the label."""

    section: str
    title: str
    metrics: tuple[tuple[str, str], ...]


# Metrics to compare share a panel. All others get a panel under their prefix.
DRAWN = (
    Drawn(
        "Learning",
        "Reward",
        (("rollout/reward_mean", "training"), ("eval/score", "held-out"), (r"eval/([\w.-]+)/score", "")),
    ),
    Drawn("Learning", "Evaluation, pass@k", ((r"eval/([\w.-]+/pass@\d+)", ""),)),
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
        "Log-prob difference of actor and engine",
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


def sections(records: Sequence[Record], ranks: Iterable[RankTrace] = ()) -> list[ReportSection]:
    """Returns all metrics of `records` and counters of `ranks` in the order of SECTIONS. Each is in exactly one panel
    or among the zeros of its section."""
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


def _without_zeros(title: str, panels: Sequence[Panel]) -> ReportSection:
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
    return ReportSection(title, tuple(kept), tuple(zeros))


def _place(name: str, num_alike: int) -> tuple[str, str]:
    """Returns (section, title) for a metric with a separate panel. `num_alike` metrics with its prefix are left."""
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
    """Returns the points of a metric. Steps without the metric have no point."""
    return [(record["step"], _number(record[name])) for record in records if name in record]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def documentation(name: str) -> tuple[str, str]:
    """Returns (unit, meaning) of a metric from the table. A missing unit is derived from the name."""
    if metric := documented(name):
        return metric.unit, metric.meaning
    for suffix, unit in (("_bytes", "bytes"), ("_s", "s"), ("_tokens", "tokens")):
        if name.endswith(suffix):
            return unit, ""
    return "", ""


def thinned(points: Points, max_points: int = MAX_POINTS) -> Points:
    """Returns about `max_points` points. It keeps the lowest and the highest of each stretch, so no spike is lost."""
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
