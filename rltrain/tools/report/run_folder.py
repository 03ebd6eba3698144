"""Reads what a run left in its folder: metrics.jsonl, trace/rank*.json, samples.jsonl, evaluation_samples/rank*.jsonl;
any of them may be missing."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rltrain.errors import DataError

Record = dict[str, Any]

MAIN_THREAD = "MainThread"
"""What Python calls the thread that executes a rank's tasks."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a thread. Times in microseconds of wall-clock time; `depth` counts the spans around it."""

    name: str
    category: str
    start_us: float
    end_us: float
    thread: str
    depth: int
    arguments: Record
    is_unfinished: bool = False
    """Its rank ended before it did; `end_us` is then the last time that the rank wrote."""


@dataclass
class RankTrace:
    """Everything of one trace file."""

    rank: int
    roles: tuple[str, ...] = ()
    spans: list[Span] = field(default_factory=list)
    """By start; where two start together the outer one comes first."""
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """(time in microseconds, value) by name."""
    events: list[Record] = field(default_factory=list)
    """As they stand in the file."""

    @property
    def start_us(self) -> float:
        return min((event["ts"] for event in self.events), default=0.0)

    @property
    def end_us(self) -> float:
        return max((event["ts"] for event in self.events), default=0.0)


@dataclass
class Run:
    """A run folder. `notes` say what was missing or could not be read."""

    path: Path
    records: list[Record]
    """metrics.jsonl by step, one record a step."""
    samples: list[Record]
    ranks: list[RankTrace]
    notes: list[str]


def read_run(path: Path) -> Run:
    """Errors: DataError where the folder holds nothing to report."""
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
    """Of training, and those of evaluations, which have a "set"; by step."""
    of_evaluations = sorted((path / "evaluation_samples").glob("rank*.jsonl"))
    lines = [line for file in (path / "samples.jsonl", *of_evaluations) for line in _read_lines(file, notes)]
    return sorted((line for line in lines if "response" in line), key=lambda sample: sample.get("step", 0))


OF_EVERY_RECORD = frozenset({"step", "time_s"})


def one_record_per_step(records: list[Record]) -> list[Record]:
    """A run that was started again from a step repeats steps: what was written later counts. An evaluation that went on
    beside training has a record of its own, which is put to that of its step."""
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
    """The JSON objects of `lines`, one a line, and the number of lines that are none."""
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
        notes.append(f"traces of ranks {', '.join(map(str, earlier))} are of an earlier run and left out")
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
    """The spans that begin and end events make, in their threads; one without an end lasts to the last event."""
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


def _span(started: Record, ended: Record, threads: dict[int, str], depth: int, is_unfinished: bool = False) -> Span:
    return Span(
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
    """One strict JSON document of all ranks' events, for Perfetto."""
    events = (json.dumps(event, separators=(",", ":")) for rank in ranks for event in rank.events)
    return '{"traceEvents":[\n' + ",\n".join(events) + "\n]}\n"
