"""Reports on a run: prints a summary, and writes a page and a merged trace.

    rltrain report RUN [--output DIR]

RUN is the output_dir of a finished or running job. DIR (default: RUN/report) receives two files. report.html is a
single file and needs no network. trace.json has all ranks, for https://ui.perfetto.dev. It needs logging.trace.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rltrain.cli.report_run import (
    MAIN_THREAD,
    PURPOSES,
    Fact,
    Occupation,
    Panel,
    RankTrace,
    Record,
    ReportSection,
    Run,
    TimelineSpan,
    column,
    documentation,
    facts,
    merged_trace,
    occupations,
    read_run,
    readable,
    sections,
    task_seconds,
)
from rltrain.errors import DataError, UserError
from rltrain.planning.sizes import numbered
from rltrain.tasks.roles import OTHER, kinds_of_tasks

# The spans of all ranks in lanes, for the page and the picture.

MAX_SPANS = 100_000
MAX_RANKS = 64
MAX_DEPTH = 3

NUM_TASK_COLOURS = 12
"""Number of task colours in page.css. Further kinds of tasks reuse the first ones."""


def colours_of(kinds_of_work: Iterable[str]) -> dict[str, str]:
    """Returns the colour in page.css of each kind of span."""
    tasks = dict.fromkeys(kind for kind in kinds_of_work if kind != OTHER)
    return {
        **{kind: f"--task{i % NUM_TASK_COLOURS}" for i, kind in enumerate(tasks)},
        "memory move": "--move",
        "wait": "--wait",
        "post": "--post",
        OTHER: "--other",
    }


_KIND_OF_TASK = kinds_of_tasks()
COLOURS = colours_of(_KIND_OF_TASK.values())
"""Colours by kind of span. Undeclared tasks have the last kind."""

_KIND_OF_CATEGORY = {
    "wait": "wait",
    "post": "post",
    "offload": "memory move",
    "onload": "memory move",
    "prefetch": "memory move",
    "sync": "weight sync",
}


@dataclass
class Lane:
    """Spans without overlap. `label` is the name of the thread, or empty for the main thread.

    A lane with `shades` is drawn over the lane before it. It has the waits inside that lane's spans.
    """

    label: str
    depth: int
    shades: bool = False
    spans: list[TimelineSpan] = field(default_factory=list)


@dataclass
class TimelineRow:
    """The lanes of one rank."""

    rank: int
    roles: tuple[str, ...]
    lanes: list[Lane]


@dataclass
class Timeline:
    """The data of the timeline. Times are microseconds of wall-clock time.

    `steps` has (step, start, end) for each step. `notes` lists omitted spans and ranks.
    """

    start_us: float
    end_us: float
    rows: list[TimelineRow]
    steps: list[tuple[int, float, float]]
    notes: list[str]


def kind_of(span: TimelineSpan) -> str:
    """Returns the kind of a span, a key of COLOURS."""
    return _KIND_OF_CATEGORY.get(span.category) or kind_of_task(span.name)


def kind_of_task(name: str) -> str:
    """Returns the kind of a task, a key of COLOURS."""
    return _KIND_OF_TASK.get(name, OTHER)


def description(span: TimelineSpan) -> str:
    """Returns the details of a span, without its name and times."""
    parts = [f"{key} {value}" for key, value in span.arguments.items()]
    return " · ".join([span.category, *parts, *(["not finished"] if span.is_unfinished else [])])


def timeline(ranks: list[RankTrace], max_spans: int = MAX_SPANS) -> Timeline | None:
    """Returns the timeline, or None without spans.

    Of more than `max_spans` spans the short ones are left out, except in the middle of the run.
    """
    ranks = [rank for rank in ranks if rank.spans]
    if not ranks:
        return None
    notes = []
    if len(ranks) > MAX_RANKS:
        notes.append(f"The first {MAX_RANKS} of {len(ranks)} ranks are shown; trace.json has all of them.")
    shown = ranks[:MAX_RANKS]
    spans = [span for rank in shown for span in rank.spans if _depth(span) < MAX_DEPTH]
    origin_us = min(span.start_us for span in spans)
    detail = _detail(spans, max_spans) if len(spans) > max_spans else Detail()
    if len(spans) > max_spans:
        first_s, last_s = (detail.from_us - origin_us) / 1e6, (detail.to_us - origin_us) / 1e6
        notes.append(
            f"Spans shorter than {detail.shortest_us / 1e3:.3g} ms are shown from {first_s:.0f} s to {last_s:.0f} s "
            "only; trace.json has all of them."
        )
    return Timeline(
        start_us=origin_us,
        end_us=max(span.end_us for span in spans),
        rows=[TimelineRow(rank.rank, rank.roles, _lanes(rank.spans, detail)) for rank in shown],
        steps=_steps(spans),
        notes=notes,
    )


@dataclass(frozen=True)
class Detail:
    """Selects the spans to draw: all that start between the two times, and elsewhere those of at least
    `shortest_us`."""

    from_us: float = 0.0
    to_us: float = 0.0
    shortest_us: float = 0.0

    def keeps(self, span: TimelineSpan) -> bool:
        """Returns whether to draw the span."""
        return self.from_us <= span.start_us <= self.to_us or span.end_us - span.start_us >= self.shortest_us


def _detail(spans: list[TimelineSpan], max_spans: int) -> Detail:
    """Selects half of the spans from the middle of the run, and for the other half the longest of the rest."""
    by_start = sorted(spans, key=lambda span: span.start_us)
    num_whole = max_spans // 2
    first = (len(spans) - num_whole) // 2
    middle = by_start[first : first + num_whole]
    rest = by_start[:first] + by_start[first + num_whole :]
    durations = sorted((span.end_us - span.start_us for span in rest), reverse=True)
    return Detail(middle[0].start_us, middle[-1].start_us, durations[max_spans - num_whole - 1])


def _lanes(spans: list[TimelineSpan], detail: Detail) -> list[Lane]:
    lanes: dict[tuple[bool, str, int, bool], Lane] = {}
    for span in spans:
        depth, shades = _depth(span), _shades(span)
        if depth < MAX_DEPTH and detail.keeps(span):
            is_main = span.thread == MAIN_THREAD
            key = (not is_main, span.thread, depth, shades)
            lanes.setdefault(key, Lane("" if is_main else span.thread, depth, shades)).spans.append(span)
    return [lanes[key] for key in sorted(lanes)]


def _shades(span: TimelineSpan) -> bool:
    """Returns whether the span is a wait inside another span. It is then drawn over that span."""
    return span.category == "wait" and span.depth > 0


def _depth(span: TimelineSpan) -> int:
    """Returns the depth of the span's lane."""
    return span.depth - _shades(span)


def _steps(spans: list[TimelineSpan]) -> list[tuple[int, float, float]]:
    """Returns the first start and the last end of each step's tasks. Steps may overlap."""
    found: dict[int, tuple[float, float]] = {}
    for span in spans:
        step = span.arguments.get("step")
        if span.category == "task" and isinstance(step, int):
            start_us, end_us = found.get(step, (span.start_us, span.end_us))
            found[step] = (min(start_us, span.start_us), max(end_us, span.end_us))
    return [(step, *times) for step, times in sorted(found.items())]


# One HTML file with the whole report. It uses no network and no library, and shows all content of the run as plain
# text.

MAX_SAMPLES = 400
MAX_CHARACTERS = 8000
OF_ALL = (
    "step",
    "prompt",
    "response",
    "label",
    "reward",
    "length",
    "policy_version_min",
    "policy_version_max",
)
SAMPLE_KEYS = (*OF_ALL, "set", "rendered_prompt", "images")

_FOLDER = Path(__file__).parent
_KIND_NUMBERS = {kind: i for i, kind in enumerate(COLOURS)}


def render(
    run: Run,
    facts: Sequence[Fact],
    occupations: Sequence[Occupation],
    timeline: Timeline | None,
    sections: Sequence[ReportSection],
) -> str:
    """Returns the text of report.html."""
    data = {
        "timeline": None if timeline is None else _timeline_data(timeline),
        "panels": [_panel_data(panel) for section in sections for panel in section.panels],
        "samples": [shortened(sample) for sample in chosen_samples(run.samples)],
    }
    script = (_FOLDER / "page.js").read_text(encoding="utf-8")
    body = [
        _header(run, facts),
        _timeline_section(timeline) if timeline else "",
        _occupation_section(occupations) if occupations else "",
        _curve_sections(sections),
        _samples_section(run.samples) if run.samples else "",
    ]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(run.path.name)} – rltrain</title>
<style>
{(_FOLDER / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
{"".join(body)}
<script type="application/json" id="data">{embedded_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def embedded_json(data: Any) -> str:
    """Returns JSON that is safe inside a script element for any strings."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chosen_samples(samples: Sequence[Record], max_samples: int = MAX_SAMPLES) -> list[Record]:
    """Returns all samples, or `max_samples` spread evenly over the run, with the first and the last."""
    if len(samples) <= max_samples:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (max_samples - 1)] for i in range(max_samples)]


def shortened(sample: Record) -> Record:
    """Returns the displayed keys of a sample, with texts cut at MAX_CHARACTERS."""
    shown: Record = {key: sample[key] for key in SAMPLE_KEYS if sample.get(key) is not None}
    for key in ("prompt", "rendered_prompt", "response", "label"):
        if key in shown:
            shown[key] = _cut(shown[key] if isinstance(shown[key], str) else json.dumps(shown[key], ensure_ascii=False))
    if "images" in shown:
        shown["images"] = _small_copies(shown["images"])
    if sample.get("turns"):
        shown["turns"] = [*_conversation(sample["turns"])]
    return shown


def _conversation(turns: Sequence[Record]) -> Iterator[tuple[str, str, list[str]]]:
    """Yields (speaker, text, small copies of images) for each message in order."""
    for number, turn in enumerate(turns, 1):
        reward = f", reward {turn['reward']:g}" if turn.get("reward") else ""
        yield f"turn {number}{reward}", _cut(str(turn["message"].get("content") or "")), []
        for reply in turn["replies"]:
            yield "environment", _cut(str(reply.get("content") or "")), _small_copies(reply.get("images", ()))


def _small_copies(images: Iterable[Any]) -> list[str]:
    """Returns the images that are in the page itself. Nothing else may be loaded."""
    return [image for image in images if str(image).startswith("data:image/jpeg;base64,")]


def _cut(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}… ({left_out} more characters)"


def _policy(script: str) -> str:
    """Returns a content security policy. It allows no loading and no other script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _header(run: Run, facts: Sequence[Fact]) -> str:
    tiles = "".join(
        f'<div class="tile"><dt>{escape(fact.label)}</dt>'
        f"<dd>{escape(fact.value)} <small>{escape(fact.unit)}</small></dd>"
        f'<dd class="note">{escape(fact.note)}</dd></div>'
        for fact in facts
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return (
        f'<header><p class="brand">rltrain run report</p><h1>{escape(run.path.name)}</h1></header><main>'
        f'<dl class="tiles">{tiles}</dl>' + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def _timeline_section(timeline: Timeline) -> str:
    used = {kind_of(span) for row in timeline.rows for lane in row.lanes for span in lane.spans}
    legend = "".join(
        f'<li><i data-colour="{colour}"></i>{escape(kind)}</li>' for kind, colour in COLOURS.items() if kind in used
    )
    notes = "".join(f'<p class="hint">{escape(note)}</p>' for note in timeline.notes)
    return f"""<section id="timeline"><h2>Timeline</h2>
<div class="bar"><div class="buttons">
<button data-do="out" aria-label="zoom out">−</button><button data-do="in" aria-label="zoom in">+</button>
<button data-do="left" aria-label="earlier">◀</button><button data-do="right" aria-label="later">▶</button>
<button data-do="whole">whole run</button></div>
<label>step <input type="number" id="step" inputmode="numeric"></label><output id="window"></output></div>
<ul class="legend">{legend}</ul>
<div class="lanes"><canvas id="axis"></canvas><canvas id="spans" tabindex="0" role="img"
 aria-label="Tasks of every rank over time"></canvas></div>
<p class="hint" id="picked">Drag to move; pinch, Ctrl+wheel or a double click to zoom; point at a span to read it.
A wait within a task leaves only a line in the task’s colour.
Open trace.json, next to this page, in ui.perfetto.dev.</p>
{notes}</section>
"""


def _occupation_section(occupations: Sequence[Occupation]) -> str:
    legend = "".join(f'<li><i class="purpose{i}"></i>{escape(name)}</li>' for i, name in enumerate(PURPOSES))
    rows = []
    for occupation in occupations:
        parts = "".join(
            f'<i class="purpose{i}" style="flex-grow:{occupation.fraction(purpose):.4f}"'
            f' title="{escape(purpose)} {occupation.fraction(purpose):.1%}"></i>'
            for i, purpose in enumerate(PURPOSES)
        )
        ranks = numbered("rank", occupation.ranks).replace(",", ", ")
        rows.append(
            f'<tr><th scope="row">{escape(occupation.role)}<small>{escape(ranks)}</small></th>'
            f'<td class="stack"><div>{parts}</div></td><td class="figure">{occupation.idle_fraction:.1%}</td></tr>'
        )
    return (
        f'<section id="occupation"><h2>Where the ranks’ time goes</h2><ul class="legend">{legend}</ul>'
        '<table><thead><tr><th scope="col">role</th><th scope="col">share of the run</th>'
        f'<th scope="col" class="figure">idle</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        '<p class="hint">Idle is the share of the ranks’ time without work, with all waits.</p></section>'
    )


def _curve_sections(sections: Sequence[ReportSection]) -> str:
    text, index = [], 0
    for section in sections:
        figures = []
        for panel in section.panels:
            figures.append(
                f'<figure data-panel="{index}"><figcaption>{escape(panel.title)}'
                f"{f'<small>{escape(panel.unit)}</small>' if panel.unit else ''}</figcaption>"
                + (f'<p class="hint">{escape(panel.meaning)}</p>' if panel.meaning else "")
                + "</figure>"
            )
            index += 1
        zeros = f'<p class="hint">Zero throughout: {escape("; ".join(section.zeros))}.</p>' if section.zeros else ""
        drawn = f"<div>{''.join(figures)}</div>{zeros}"
        text.append(f'<section class="curves"><h2>{escape(section.title)}</h2>{drawn}</section>')
    return "".join(text)


def _samples_section(samples: Sequence[Record]) -> str:
    left_out = len(samples) - MAX_SAMPLES
    hint = f'<p class="hint">{MAX_SAMPLES} of {len(samples)} samples, spread over the run.</p>' if left_out > 0 else ""
    return f"""<section id="samples"><h2>Samples</h2>{hint}
<div class="bar"><label>step <select id="sample_step"></select></label>
<label>order <select id="sample_order"><option value="run">as sampled</option><option value="best">best first</option>
<option value="worst">worst first</option></select></label><output id="sample_count"></output></div>
<div id="cards"></div><button id="more" hidden>show more</button></section>
"""


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Returns the timeline for page.js. Spans are flat lists of start, duration (both in microseconds), name, kind and
    detail. Texts are given by index."""
    names: dict[str, int] = {}
    details: dict[str, int] = {}
    return {
        "duration": _rounded(timeline.end_us - timeline.start_us),
        "rows": [_row_data(row, timeline.start_us, names, details) for row in timeline.rows],
        "names": list(names),
        "details": list(details),
        "colours": [*COLOURS.values()],
        "steps": [
            [step, _rounded(start - timeline.start_us), _rounded(end - timeline.start_us)]
            for step, start, end in timeline.steps
        ],
    }


def _row_data(row: TimelineRow, origin_us: float, names: dict[str, int], details: dict[str, int]) -> dict[str, Any]:
    lanes = []
    for lane in row.lanes:
        flat: list[float] = []
        for span in lane.spans:
            flat += (
                _rounded(span.start_us - origin_us),
                _rounded(span.end_us - span.start_us),
                names.setdefault(span.name, len(names)),
                _KIND_NUMBERS[kind_of(span)],
                details.setdefault(description(span), len(details)),
            )
        lanes.append({"label": lane.label, "depth": lane.depth, "shades": lane.shades, "spans": flat})
    return {"label": f"rank {row.rank}", "roles": ", ".join(row.roles), "lanes": lanes}


def _rounded(microseconds: float) -> float:
    return round(microseconds, 1)


def _panel_data(panel: Panel) -> dict[str, Any]:
    return {
        "title": panel.title,
        "unit": panel.unit,
        "x": panel.x,
        "series": [
            {
                "label": series.label,
                "colour": series.task and COLOURS[kind_of_task(series.task)],
                "x": [float(f"{x:.6g}") if panel.x != "step" else x for x, _ in series.points],
                "y": [None if y is None else float(f"{y:.5g}") for _, y in series.points],
            }
            for series in panel.series
        ],
    }


# A part of a run's timeline as a picture for the documentation.

WIDTH, LABEL, ROW, GAP, AXIS, LEGEND = 960, 132, 26, 8, 26, 24
MIN_TEXT = 7.2
"""Pixels per letter. Narrower spans get no name."""


def picture(ranks: list[RankTrace], first_step: int, last_step: int) -> str:
    """Returns an SVG of tasks and waits on every rank's main thread, in the colours of the report.

    It begins with the last update before training step `first_step` and ends with the last one of `last_step`. Raises
    ValueError if the traces do not have these steps.
    """
    found = timeline(ranks)
    steps = {step: times for step, *times in found.steps} if found else {}
    if found is None or not steps.keys() >= {first_step, last_step}:
        raise ValueError(f"the traces have no steps {first_step} to {last_step}")
    start_us, end_us = _updates(ranks, first_step - 1), _updates(ranks, last_step)
    scale = (WIDTH - LABEL) / (end_us - start_us)
    colours, kinds, body = _colours(), dict[str, None](), []
    for number, row in enumerate(found.rows):
        top = AXIS + number * (ROW + GAP)
        body.append(
            _text(8, top + 11, f"rank {row.rank}", 12) + _text(8, top + 23, ", ".join(row.roles), 10, soft=True)
        )
        for span in _main(row):
            left, right = max(span.start_us, start_us), min(span.end_us, end_us)
            if left < right:
                kinds.setdefault(kind_of(span))
                x, width = LABEL + (left - start_us) * scale, max((right - left) * scale, 0.5)
                body.append(_bar(span, x, top, width, colours[COLOURS[kind_of(span)]]))
    height = AXIS + len(found.rows) * (ROW + GAP) + LEGEND
    legend = _legend(kinds, colours, height - LEGEND + 16)
    axis = _axis((end_us - start_us) / 1e6, height - LEGEND)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{colours["--card"]}"/>',
            *axis,
            *body,
            *legend,
            "</svg>\n",
        ]
    )


def _updates(ranks: list[RankTrace], step: int) -> float:
    """Returns the end of a step's update on the last rank, or the start of the trace if there is none."""
    ends = [
        span.end_us
        for rank in ranks
        for span in rank.spans
        if span.name == "update" and span.category == "task" and span.arguments.get("step") == step
    ]
    return max(ends, default=min(span.start_us for rank in ranks for span in rank.spans))


def _main(row: TimelineRow) -> Iterator[TimelineSpan]:
    """Yields tasks and other outer spans, then the waits inside them."""
    for shades in (False, True):
        for lane in row.lanes:
            if not lane.label and lane.depth == 0 and lane.shades == shades:
                yield from lane.spans


def _bar(span: TimelineSpan, x: float, top: float, width: float, colour: str) -> str:
    title = f"{span.name}: {(span.end_us - span.start_us) / 1e3:.0f} ms"
    bar = (
        f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{colour}">'
        f"<title>{escape(title)}</title></rect>"
    )
    if span.category == "task" and width > MIN_TEXT * len(span.name):
        bar += _text(x + 4, top + 17, span.name, 11, colour="#ffffff")
    return bar


def _axis(seconds: float, bottom: float) -> Iterator[str]:
    tick = next(tick for tick in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300) if seconds / tick <= 10)
    for number in range(int(seconds / tick) + 1):
        x = LABEL + number * tick / seconds * (WIDTH - LABEL)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{AXIS - 6}" y2="{bottom}" stroke="#e9ecf1"/>'
        yield _text(x + 2, AXIS - 10, f"{number * tick:.4g} s", 10, soft=True)


def _legend(kinds: dict[str, None], colours: dict[str, str], y: float) -> Iterator[str]:
    x = float(LABEL)
    for kind in (kind for kind in COLOURS if kind in kinds):
        yield f'<rect x="{x:.1f}" y="{y - 9}" width="11" height="11" fill="{colours[COLOURS[kind]]}"/>'
        yield _text(x + 15, y, kind, 11, soft=True)
        x += 32 + 6.2 * len(kind)


def _text(x: float, y: float, text: str, size: int, *, soft: bool = False, colour: str | None = None) -> str:
    fill = colour or ("#5c6576" if soft else "#1a1f2b")
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}">{escape(text)}</text>'


def _colours() -> dict[str, str]:
    """Returns the colours of the report's page in light mode."""
    css = (Path(__file__).with_name("page.css")).read_text(encoding="utf-8").split("@media")[0]
    return dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6})", css))


# The report in the terminal.

# Metrics of the table, if the run has them.
SHOWN = (
    "rollout/reward_mean",
    "eval/score",
    "rollout/response_length_mean",
    "train/loss",
    "train/reference_kl",
    "train/entropy",
    "train/grad_norm",
    "train/staleness_max",
    "critic/loss",
    "critic/explained_variance",
    "perf/step_time_s",
    "perf/weight_sync_s",
    "perf/weight_sync_gb_per_s",
)


def print_summary(
    console: Console,
    run: Run,
    facts: Sequence[Fact],
    occupations: Sequence[Occupation],
    task_seconds: Mapping[str, float],
) -> None:
    """Prints facts, metrics, the use of time and unreadable parts."""
    console.print(Text(f"Run {run.path}", style="bold"))
    for fact in facts:
        console.print(
            Text(f"  {fact.label}: {fact.value} {fact.unit} {f'({fact.note})' if fact.note else ''}".rstrip())
        )
    if run.records:
        console.print(_metrics_table(run))
    if occupations:
        console.print(_occupation_table(occupations))
        longest = ", ".join(f"{name} {seconds:.1f}" for name, seconds in task_seconds.items())
        console.print(Text(f"seconds of work by task, all ranks: {longest}"))
    for note in run.notes:
        console.print(Text(f"note: {note}"))


def _metrics_table(run: Run) -> Table:
    table = Table("metric", "first", "last", "least", "most")
    for name in SHOWN:
        if values := column(run.records, name):
            unit = documentation(name)[0]
            shown = (values[0], values[-1], min(values), max(values))
            table.add_row(Text(f"{name} [{unit}]" if unit else name), *(readable(value, unit) for value in shown))
    return table


def _occupation_table(occupations: Sequence[Occupation]) -> Table:
    table = Table("role", "ranks", *PURPOSES, "idle")
    for occupation in occupations:
        shares = [f"{occupation.fraction(purpose):.1%}" for purpose in PURPOSES]
        ranks = str(len(occupation.ranks))
        table.add_row(Text(occupation.role), ranks, *shares, f"{occupation.idle_fraction:.1%}")
    return table


def report(path: Path, output: Path, console: Console) -> list[Path]:
    """Prints the summary and writes the files. Returns their paths. Raises DataError if the run cannot be read or
    `output` cannot be written."""
    run = read_run(path)
    roles, rows, curves = occupations(run.ranks), timeline(run.ranks), sections(run.records, run.ranks)
    known = facts(run, roles)
    print_summary(console, run, known, roles, task_seconds(run.ranks))
    try:
        output.mkdir(parents=True, exist_ok=True)
        made = [output / "report.html"]
        made[0].write_text(render(run, known, roles, rows, curves), encoding="utf-8")
        if run.ranks:
            made.append(output / "trace.json")
            made[1].write_text(merged_trace(run.ranks), encoding="utf-8")
    except OSError as error:
        raise DataError(f"--output {output}: cannot write to the folder: {error.strerror}") from error
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the description and the arguments of the command to the parser."""
    parser.description = __doc__
    parser.add_argument("run", type=Path, metavar="RUN", help="output_dir of the run")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the files (default: RUN/report)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status: 0 for success, 1 if the run cannot be read."""
    console = Console()
    try:
        made = report(arguments.run.resolve(), arguments.output or arguments.run / "report", console)
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    for path in made:
        console.print(str(path), markup=False, highlight=False, soft_wrap=True)
    return 0
