"""A stretch of a run's timeline as one picture for a page of documentation."""

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from rltrain.tools.report.run_folder import RankTrace, Span
from rltrain.tools.report.timeline import COLOURS, Row, kind_of, timeline

WIDTH, LABEL, ROW, GAP, AXIS, LEGEND = 960, 132, 26, 8, 26, 24
MIN_TEXT = 7.2
"""Pixels that a letter takes: no name is written into a narrower span."""


def picture(ranks: list[RankTrace], first_step: int, last_step: int) -> str:
    """SVG of what every rank's main thread did from the last update before training step `first_step` to the last one
    of `last_step`: tasks and waits in their colours of the report. ValueError where the traces have no such step."""
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
    """When the last rank had made the updates of a step, or where the trace begins."""
    ends = [
        span.end_us
        for rank in ranks
        for span in rank.spans
        if span.name == "update" and span.category == "task" and span.arguments.get("step") == step
    ]
    return max(ends, default=min(span.start_us for rank in ranks for span in rank.spans))


def _main(row: Row) -> Iterator[Span]:
    """Tasks and what else stands by itself, then the waits inside them."""
    for shades in (False, True):
        for lane in row.lanes:
            if not lane.label and lane.depth == 0 and lane.shades == shades:
                yield from lane.spans


def _bar(span: Span, x: float, top: float, width: float, colour: str) -> str:
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
    """Those of the report's page by daylight."""
    css = (Path(__file__).with_name("page.css")).read_text(encoding="utf-8").split("@media")[0]
    return dict(re.findall(r"(--[a-z0-9-]+): (#[0-9a-f]{6})", css))
