"""One HTML file with the whole report: no network, no library, everything that a run wrote shown as text."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rltrain.tools.report.curves import Panel, Section
from rltrain.tools.report.facts import Fact
from rltrain.tools.report.occupation import PURPOSES, Occupation
from rltrain.tools.report.run_folder import Record, Run
from rltrain.tools.report.timeline import COLOURS, Row, Timeline, description, kind_of, kind_of_task

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
SAMPLE_KEYS = (*OF_ALL, "set", "rendered_prompt")

_FOLDER = Path(__file__).parent
_KIND_NUMBERS = {kind: i for i, kind in enumerate(COLOURS)}


def render(
    run: Run,
    facts: Sequence[Fact],
    occupations: Sequence[Occupation],
    timeline: Timeline | None,
    sections: Sequence[Section],
) -> str:
    """The text of report.html."""
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
    """JSON that can stand in a script element whatever its strings hold."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chosen_samples(samples: Sequence[Record], max_samples: int = MAX_SAMPLES) -> list[Record]:
    """All, or `max_samples` spread evenly over the run, the first and the last among them."""
    if len(samples) <= max_samples:
        return list(samples)
    return [samples[i * (len(samples) - 1) // (max_samples - 1)] for i in range(max_samples)]


def shortened(sample: Record) -> Record:
    """What the page shows of a sample, its texts cut at MAX_CHARACTERS."""
    shown: Record = {key: sample[key] for key in SAMPLE_KEYS if sample.get(key) is not None}
    for key in ("prompt", "rendered_prompt", "response", "label"):
        if key in shown:
            shown[key] = _cut(shown[key] if isinstance(shown[key], str) else json.dumps(shown[key], ensure_ascii=False))
    if sample.get("turns"):
        shown["turns"] = [*_conversation(sample["turns"])]
    return shown


def _conversation(turns: Sequence[Record]) -> Iterator[tuple[str, str]]:
    """(who, what was said), one after the other."""
    for number, turn in enumerate(turns, 1):
        reward = f", reward {turn['reward']:g}" if turn.get("reward") else ""
        yield f"turn {number}{reward}", _cut(str(turn["message"].get("content") or ""))
        for reply in turn["replies"]:
            yield "environment", _cut(str(reply.get("content") or ""))


def _cut(text: str) -> str:
    left_out = len(text) - MAX_CHARACTERS
    return text if left_out <= 0 else f"{text[:MAX_CHARACTERS]}… ({left_out} more characters)"


def _policy(script: str) -> str:
    """Nothing is loaded from anywhere, and only this script runs."""
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
 aria-label="What every rank did from when to when"></canvas></div>
<p class="hint" id="picked">Drag to move; pinch, Ctrl+wheel or a double click to zoom; point at a span to read it.
Where a rank waits within a task, only a line of the task’s colour is left.
trace.json beside this page opens in ui.perfetto.dev.</p>
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
        rows.append(
            f'<tr><th scope="row">{escape(occupation.role)}<small>{escape(_ranks(occupation.ranks))}</small></th>'
            f'<td class="stack"><div>{parts}</div></td><td class="figure">{occupation.idle_fraction:.1%}</td></tr>'
        )
    return (
        f'<section id="occupation"><h2>Where the ranks’ time goes</h2><ul class="legend">{legend}</ul>'
        '<table><thead><tr><th scope="col">role</th><th scope="col">share of the run</th>'
        f'<th scope="col" class="figure">idle</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
        '<p class="hint">Idle is waiting or nothing, of all the time of the role’s ranks.</p></section>'
    )


def _ranks(ranks: Sequence[int]) -> str:
    """rank 3, ranks 0-3, ranks 0-1, 4."""
    stretches: list[list[int]] = []
    for rank in sorted(ranks):
        if stretches and stretches[-1][1] == rank - 1:
            stretches[-1][1] = rank
        else:
            stretches.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in stretches)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _curve_sections(sections: Sequence[Section]) -> str:
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
<label>order <select id="sample_order"><option value="run">as drawn</option><option value="best">best first</option>
<option value="worst">worst first</option></select></label><output id="sample_count"></output></div>
<div id="cards"></div><button id="more" hidden>show more</button></section>
"""


def _timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Spans as flat lists of start, duration (both in microseconds), name, kind and detail, the texts by index."""
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


def _row_data(row: Row, origin_us: float, names: dict[str, int], details: dict[str, int]) -> dict[str, Any]:
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
