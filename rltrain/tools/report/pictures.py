"""The timeline and the curves as PNG files, drawn by matplotlib where it is installed."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from rltrain.tools.report.curves import Panel, Section
from rltrain.tools.report.timeline import COLOURS, Timeline, colour, colour_of_task

COLUMNS = 3
MAX_STEPS = 6
"""Steps that the timeline shows, from the middle of the run: more would be too narrow to tell apart."""

LINES = ("#3f7bdc", "#dd6a2e", "#36a058", "#8762d0", "#d060a4", "#159a9a", "#e0a02c", "#8a6a5c", "#ad3268", "#96943a")
_SPAN_COLOURS: tuple[str, ...] = (
    "#3f7bdc",
    "#159a9a",
    "#8762d0",
    "#d060a4",
    "#ad3268",
    "#e0a02c",
    "#96943a",
    "#dd6a2e",
    "#36a058",
)
_SPAN_COLOURS += ("#8a6a5c", "#dfe3ea", "#a5afbe", "#6b7484")
_STYLE = {"labelsize": 8, "length": 3, "color": "#9aa4b5", "labelcolor": "#5c6576"}


def draw_pictures(folder: Path, timeline: Timeline | None, sections: Sequence[Section]) -> list[Path]:
    """timeline.png and a curves_<section>.png for each section; the files made."""
    made = []
    if timeline is not None:
        made.append(folder / "timeline.png")
        _draw_timeline(timeline).savefig(made[-1], dpi=130)
    for section in sections:
        name = "".join(letter if letter.isalnum() else "_" for letter in section.title.lower())
        made.append(folder / f"curves_{name}.png")
        _draw_section(section).savefig(made[-1], dpi=110)
    return made


def _draw_section(section: Section) -> Figure:
    num_rows = -(-len(section.panels) // COLUMNS)
    height = 2.8 * num_rows + 0.5
    figure = Figure(figsize=(4.2 * COLUMNS, height))
    figure.suptitle(section.title, fontweight="bold", x=0.01, y=1 - 0.08 / height, ha="left", va="top")
    figure.subplots_adjust(0.05, 0.5 / height, 0.99, 1 - 0.7 / height, wspace=0.2, hspace=0.45)
    all_axes = list(figure.subplots(num_rows, COLUMNS, squeeze=False).flat)
    for axes, panel in zip(all_axes, section.panels, strict=False):
        _draw_panel(axes, panel)
    for axes in all_axes[len(section.panels) :]:
        axes.set_axis_off()
    return figure


def _draw_panel(axes: Axes, panel: Panel) -> None:
    axes.set_title(f"{panel.title}{f' [{panel.unit}]' if panel.unit else ''}", fontsize=10, loc="left")
    for i, series in enumerate(panel.series):
        xs = [x for x, _ in series.points]
        ys = [float("nan") if y is None else y for _, y in series.points]
        marker = "o" if len(xs) < 3 else ""
        paint, style = _line(panel, i)
        axes.plot(xs, ys, style, color=paint, linewidth=1.4, marker=marker, markersize=3, label=series.label)
    if len(panel.series) > 1:
        axes.legend(fontsize=7, frameon=False)
    _tidy(axes)
    axes.grid(axis="y", color="#e9ecf1")
    axes.set_xlabel("s" if panel.x == "s" else "step", fontsize=8, color="#5c6576")


def _line(panel: Panel, i: int) -> tuple[str, str]:
    """Colour and style of a series: a task's of the timeline, and where tasks share it the later ones are not solid."""
    if not (task := panel.series[i].task):
        return LINES[i % len(LINES)], "-"
    alike = [series for series in panel.series[:i] if series.task and _task_colour(series.task) == _task_colour(task)]
    return _task_colour(task), ("-", "--", ":", "-.")[len(alike) % 4]


def _task_colour(task: str) -> str:
    return _SPAN_COLOURS[[name for name, _ in COLOURS].index(colour_of_task(task))]


def _draw_timeline(timeline: Timeline) -> Figure:
    start_us, end_us = _window(timeline)
    figure = Figure(figsize=(14, 0.6 * len(timeline.rows) + 1.6), layout="constrained")
    axes = figure.subplots()
    boxes: list[list[tuple[float, float]]] = []
    colours, used = [], []
    names = [name for name, _ in COLOURS]
    for i, row in enumerate(timeline.rows):
        shown = [(lane, span) for lane in row.lanes for span in lane.spans if not lane.label and not lane.depth]
        for lane, span in shown:
            left, right = max(span.start_us, start_us), min(span.end_us, end_us)
            if left < right:
                x0, x1 = (left - timeline.start_us) / 1e6, (right - timeline.start_us) / 1e6
                bottom = i + (0.28 if lane.shades else 0.38)
                boxes.append([(x0, i - 0.38), (x1, i - 0.38), (x1, bottom), (x0, bottom)])
                colours.append(_SPAN_COLOURS[names.index(colour(span))])
                used.append(colour(span))
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.2))
    axes.set_xlim((start_us - timeline.start_us) / 1e6, (end_us - timeline.start_us) / 1e6)
    axes.set_ylim(len(timeline.rows) - 0.4, -0.6)
    axes.set_yticks(range(len(timeline.rows)), [f"rank {row.rank}\n{', '.join(row.roles)}" for row in timeline.rows])
    axes.set_xlabel("s", fontsize=8)
    _tidy(axes)
    patches = [Patch(color=_SPAN_COLOURS[i], label=name) for i, name in enumerate(names) if name in used]
    figure.legend(handles=patches, loc="outside upper left", ncols=8, fontsize=8, frameon=False)
    return figure


def _window(timeline: Timeline) -> tuple[float, float]:
    """The whole run, or MAX_STEPS from its middle."""
    if len(timeline.steps) <= MAX_STEPS:
        return timeline.start_us, timeline.end_us
    first = (len(timeline.steps) - MAX_STEPS) // 2
    chosen = timeline.steps[first : first + MAX_STEPS]
    return min(start for _, start, _ in chosen), max(end for _, _, end in chosen)


def _tidy(axes: Axes) -> None:
    axes.tick_params(**_STYLE)  # type: ignore[arg-type]
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom")
        axes.spines[side].set_color("#9aa4b5")
