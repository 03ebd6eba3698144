"""The page of a run."""

import base64
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from rltrain.cli import report_run
from rltrain.cli.main import run_script
from rltrain.cli.report import (
    COLOURS,
    LABEL,
    MAX_RANKS,
    NUM_TASK_COLOURS,
    WIDTH,
    chosen_samples,
    colours_of,
    embedded_json,
    picture,
    render,
    shortened,
    timeline,
)
from rltrain.cli.report_run import (
    MAIN_THREAD,
    RankTrace,
    TimelineSpan,
    documentation,
    facts,
    readable,
    sections,
    thinned,
)
from rltrain.data.images import source_of, thumbnail
from rltrain.errors import DataError
from rltrain.observability.names import METRICS
from rltrain.observability.trace import TraceFile
from rltrain.tasks.roles import kinds_of_tasks
from tests.forked.popen import PYTHON_PATH
from tests.support.run_folders import HOSTED, HOSTILE, RankLog, write_metrics, write_run, write_samples, write_traces
from tools.report import report

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> report_run.Run:
    return report_run.read_run(write_run(tmp_path_factory.mktemp("runs") / "a <b>run</b>", num_steps=20))


class TestReading:
    def test_a_whole_run(self, run: report_run.Run) -> None:
        assert [record["step"] for record in run.records] == list(range(20))
        assert len(run.samples) == 80
        assert {rank.rank: rank.roles for rank in run.ranks} == HOSTED
        assert run.notes == []

    def test_samples_of_evaluations_stand_among_those_of_their_step(self, tmp_path: Path) -> None:
        write_samples(tmp_path, 2, per_step=1)
        (tmp_path / "evaluation_samples").mkdir()
        for rank in range(2):
            of_rank = [{"set": "hard", "step": step, "response": str(rank)} for step in (0, 1)]
            lines = "".join(json.dumps(sample) + "\n" for sample in of_rank)
            (tmp_path / f"evaluation_samples/rank{rank}.jsonl").write_text(lines)
        samples = report_run.read_run(tmp_path).samples
        assert [(sample["step"], sample.get("set")) for sample in samples] == [
            *[(0, None), (0, "hard"), (0, "hard"), (1, None), (1, "hard"), (1, "hard")]
        ]
        assert shortened(samples[1])["set"] == "hard"

    @pytest.mark.parametrize("write", [write_metrics, write_traces, write_samples])
    def test_any_file_alone_is_enough(self, tmp_path: Path, write: Any) -> None:
        write(tmp_path, 3)
        found = report_run.read_run(tmp_path)
        assert len(found.notes) == 2
        assert sum(map(bool, (found.records, found.ranks, found.samples))) == 1

    def test_a_folder_without_any_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="nothing to report: expected the output_dir of a run"):
            report_run.read_run(tmp_path)

    def test_a_line_torn_by_a_kill_is_left_out_and_said(self, tmp_path: Path) -> None:
        write_run(tmp_path, num_steps=4)
        for name in ("metrics.jsonl", "samples.jsonl", "trace/rank2.json"):
            path = tmp_path / name
            path.write_text(path.read_text().rstrip("\n]")[:-9])
        found = report_run.read_run(tmp_path)
        assert len(found.records) == 3 and len(found.samples) == 15 and len(found.ranks) == 4
        assert [note.split(":")[0] for note in found.notes] == ["metrics.jsonl", "samples.jsonl", "rank2.json"]

    def test_steps_that_a_restart_repeats_count_once(self) -> None:
        written = [
            {"step": step, "start": start} for start, steps in ((0, range(5)), (1, range(3, 7))) for step in steps
        ]
        kept = report_run.one_record_per_step([*written, {"step": None}])
        assert [(record["step"], record["start"]) for record in kept] == [
            (0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1),
        ]  # fmt: skip

    def test_an_evaluation_that_came_later_stands_at_its_step(self) -> None:
        written = [{"step": step, "time_s": step, "loss": 1.0} for step in range(3)]
        kept = report_run.one_record_per_step([*written, {"step": 0, "time_s": 9.0, "eval/score": 0.5}])
        assert kept == [{**written[0], "eval/score": 0.5}, *written[1:]]

    def test_a_trace_of_an_earlier_run_in_the_folder_is_left_out(self, tmp_path: Path) -> None:
        write_traces(tmp_path, 3)
        old = RankLog(tmp_path / "trace", 9, ("actor",))
        for i in range(len(old.lines)):
            old.lines[i] = json.dumps({**json.loads(old.lines[i]), "ts": 1.0})
        old.write()
        found = report_run.read_run(tmp_path)
        assert [rank.rank for rank in found.ranks] == [0, 1, 2, 3]
        assert any("ranks 9 are of an earlier run" in note for note in found.notes)

    def test_an_unfinished_span_lasts_to_the_end_of_its_rank(self, tmp_path: Path) -> None:
        log = RankLog(tmp_path / "trace", 0, ("actor",))
        log.event("B", "update", cat="task", args={"step": 3})
        log.span("part", "part", 2.0)
        log.write(closed=False)
        (rank,) = report_run.read_run(tmp_path).ranks
        assert [(s.name, s.depth, s.end_us - s.start_us, s.is_unfinished) for s in rank.spans] == [
            ("update", 0, 2e6, True),
            ("part", 1, 2e6, False),
        ]

    def test_what_a_trace_wrote_is_read(self, tmp_path: Path) -> None:
        trace = TraceFile(tmp_path, 2, ("actor", "critic"))
        with trace.span("update", step=1, role="actor"), trace.span("scored", "wait"):
            pass
        trace.counter("running", 3)
        trace.close()
        (rank,) = report_run.read_run(tmp_path).ranks
        assert rank.roles == ("actor", "critic")
        assert [(s.name, s.category, s.depth, s.thread) for s in rank.spans] == [
            ("update", "task", 0, report_run.MAIN_THREAD),
            ("scored", "wait", 1, report_run.MAIN_THREAD),
        ]
        assert rank.spans[0].arguments == {"step": 1, "role": "actor"}
        assert [value for _, value in rank.counters["running"]] == [3.0]

    def test_the_merged_trace_is_strict_json_with_every_event(self, run: report_run.Run) -> None:
        merged = json.loads(report_run.merged_trace(run.ranks))["traceEvents"]
        assert merged == [event for rank in run.ranks for event in rank.events]


# A stretch of a rank's time: (category, role, its seconds or its parts).
PLAN = st.recursive(
    st.tuples(
        st.sampled_from(["task", "wait", "onload", "part"]), st.sampled_from(["a", "a+b", "b"]), st.integers(1, 4)
    ),
    lambda inner: st.tuples(
        st.sampled_from(["task", "wait", "part"]), st.sampled_from(["a", "b"]), st.lists(inner, max_size=3)
    ),
    max_leaves=6,
)


def play(log: RankLog, plan: tuple[str, str, Any], outer: str, seconds: list[str]) -> None:
    """Writes `plan` to `log`. For each second it appends to `seconds` the occupation of role a."""
    category, roles, rest = plan
    purpose = {"wait": report_run.WAITING, "onload": report_run.MEMORY, "part": outer}.get(category)
    if purpose is None:
        purpose = report_run.OWN if "a" in roles.split("+") else report_run.OTHER
    log.event("B", "x", cat=category, args={"role": roles} if category == "task" else {})
    if isinstance(rest, int):
        seconds += [purpose] * rest
        log.now += rest
    else:
        for inner in rest:
            play(log, inner, purpose, seconds)
            seconds.append(purpose)
            log.now += 1
    log.event("E", "x", cat=category)


class TestOccupation:
    @settings(max_examples=30)
    @given(plans=st.lists(PLAN, min_size=1, max_size=4))
    def test_every_second_counts_once_to_what_surrounds_it_most_closely(
        self, tmp_path_factory: pytest.TempPathFactory, plans: list[Any]
    ) -> None:
        log = RankLog(tmp_path_factory.mktemp("plan"), 0, ("a", "b"))
        seconds: list[str] = []
        log.span("frame", "wait", 1.0)
        for plan in plans:
            play(log, plan, report_run.IDLE, seconds)
        log.span("frame", "wait", 1.0)
        rank = report_run.pair_events(0, [json.loads(line) for line in log.lines])
        rank.roles = ("a", "b")
        found = report_run.occupations([rank])[0].seconds
        expected = {purpose: float(seconds.count(purpose)) for purpose in report_run.PURPOSES}
        expected[report_run.WAITING] += 2.0
        assert found == pytest.approx(expected, abs=1e-3)

    def test_idle_is_waiting_and_nothing_over_all_ranks_of_the_role(self, tmp_path: Path) -> None:
        busy, idle = (RankLog(tmp_path / "trace", rank, ("actor",)) for rank in range(2))
        busy.span("update", "task", 8.0, role="actor")
        idle.span("update", "task", 2.0, role="actor")
        idle.span("scored", "wait", 3.0)
        for log in (busy, idle):
            log.write()
        (found,) = report_run.occupations(report_run.read_run(tmp_path).ranks)
        assert found.ranks == (0, 1)
        assert found.idle_fraction == pytest.approx((3 + 3) / 16)

    def test_seconds_by_task_are_work_wherever_the_task_is_done(self, tmp_path: Path) -> None:
        """An example is an engine that joins a sync in the middle of its generate."""
        log = RankLog(tmp_path / "trace", 0, ("rollout",))
        log.event("B", "generate", cat="task", args={"role": "rollout"})
        log.now += 5.0
        log.event("B", "weight_sync", cat="task", args={"role": "rollout"})
        log.span("the others", "wait", 30.0)
        log.span("a round", "part", 2.0)
        log.event("E", "weight_sync", cat="task")
        log.span("the last groups", "wait", 70.0)
        log.event("E", "generate", cat="task")
        log.event("B", "leaving", cat="part")
        log.span("generate", "task", 1.0, role="rollout")
        log.event("E", "leaving", cat="part")
        log.write()
        ranks = report_run.read_run(tmp_path).ranks
        assert report_run.task_seconds(ranks) == {"generate": pytest.approx(6.0), "weight_sync": pytest.approx(2.0)}
        (rollout,) = report_run.occupations(ranks)
        assert rollout.seconds[report_run.WAITING] == pytest.approx(100.0)
        assert rollout.seconds[report_run.OWN] == pytest.approx(8.0)


class TestCurves:
    @settings(max_examples=25)
    @given(st.lists(st.text("abc_/<>", min_size=1, max_size=12), max_size=5))
    def test_every_metric_is_drawn_exactly_once(self, others: list[str]) -> None:
        documented = [re.sub(r"<\w+>", "actor", metric.name) for metric in METRICS]
        values = {name: float(i) for i, name in enumerate({*documented, *others} - {"step", "time_s"}, start=1)}
        found = sections([{"step": 0, "time_s": 1.0, **values}])
        drawn = [s.points[0][1] for section in found for panel in section.panels for s in panel.series]
        assert sorted(value for value in drawn if value is not None) == sorted(values.values())

    def test_what_is_compared_shares_a_panel(self) -> None:
        records = [{"step": 0, "perf/generate_s": 1.0, "perf/weight_sync_s": 2.0, "perf/step_time_s": 4.0,
                    "perf/generate_wait_s": 1.0, "perf/weight_sync_wait_s": 2.0, "perf/decode_step_max_s": 0.1,
                    "rollout/response_length_mean": 9.0, "eval/response_length_mean": 8.0,
                    "perf/weight_sync_wire_s": 3.0, "memory/actor_resident_bytes": 5, "memory/critic_resident_bytes": 6,
                    "mine/a": 1, "mine/b": 2, "lonely/c": 3}]  # fmt: skip
        panels = {
            (section.title, panel.title): [s.label for s in panel.series]
            for section in sections(records)
            for panel in section.panels
        }
        assert panels["Speed", "Seconds by task"] == ["generate", "weight sync"]
        assert panels["Speed", "Seconds of waiting by task"] == ["generate", "weight sync"]
        assert panels["Speed", "Longest decode step"] == ["longest"]
        assert panels["Learning", "Response length"] == ["training, mean", "held-out, mean"]
        assert panels["Speed", "Step time"] == ["step"]
        assert panels["Weight sync", "Seconds by part"] == ["wire"]
        assert panels["Memory", "Peak per role"] == ["actor", "critic"]
        assert ("mine", "A") in panels and ("mine", "B") in panels and ("Other", "lonely/c") in panels

    def test_what_is_zero_throughout_is_named_and_not_drawn(self) -> None:
        names = ("rollout/reward_errors", "perf/update_wait_s", "perf/generate_wait_s", "eval/score", "train/loss")
        records = [
            {"step": step, **dict(zip(names, values, strict=True))}
            for step, values in enumerate([(0, 0.0, 0.0, 0.0, None), (0, 0.0, 2.0, 0.1, None)])
        ]
        found = {section.title: section for section in sections(records)}
        assert found["Rollout"].panels == () and found["Rollout"].zeros == ("Reward errors",)
        assert found["Speed"].zeros == ("Seconds of waiting by task (update)",)
        assert [panel.title for panel in found["Speed"].panels] == ["Seconds of waiting by task: generate"]
        assert {panel.title for panel in found["Learning"].panels} == {"Reward", "Loss"}
        assert found["Learning"].zeros == ()

    def test_a_null_is_a_gap_and_a_missing_value_is_none(self) -> None:
        records = [{"step": 0, "x": 1}, {"step": 1, "x": None}, {"step": 2}, {"step": 3, "x": 4}]
        (section,) = sections(records)
        assert section.panels[0].series[0].points == [(0, 1.0), (1, None), (3, 4.0)]

    @settings(max_examples=30)
    @given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(4, 20))
    def test_thinning_keeps_ends_and_extremes(self, values: list[float | None], limit: int) -> None:
        points = list(enumerate(values * 4))
        kept = thinned([(float(x), y) for x, y in points], limit)
        assert len(kept) <= limit + 2 and kept == sorted(kept, key=lambda point: point[0])
        assert kept[0] == points[0] and kept[-1] == points[-1]
        finite = [y for y in values if y is not None]
        if finite:
            shown = [y for _, y in kept if y is not None]
            assert (min(shown), max(shown)) == (min(finite), max(finite))

    def test_units_come_from_the_table_or_from_the_name(self) -> None:
        assert documentation("perf/weight_sync_gb_per_s")[0] == "GB/s"
        assert documentation("perf/generate_s")[1].startswith("work on one task of the step")
        assert documentation("perf/generate_wait_s")[1].startswith("waiting for others within the task")
        assert documentation("new/thing_bytes") == ("bytes", "")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0, "", "0"), (0.123456, "", "0.123"), (1234.5, "", "1234"), (45678, "", "45.7k"), (3.2e6, "", "3.2M"),
     (7e9, "", "7G"), (-2e-5, "", "-2e-05"), (512, "bytes", "512 B"), (61e9, "bytes", "56.8 GiB"),
     (3072, "bytes", "3 KiB")],
)  # fmt: skip
def test_numbers_are_short(value: float, unit: str, text: str) -> None:
    assert readable(value, unit) == text


class TestTimeline:
    def test_lanes_hold_spans_that_do_not_overlap(self, run: report_run.Run) -> None:
        drawn = timeline(run.ranks)
        assert drawn is not None and drawn.notes == []
        assert sum(len(lane.spans) for row in drawn.rows for lane in row.lanes) == sum(len(r.spans) for r in run.ranks)
        for lane in (lane for row in drawn.rows for lane in row.lanes):
            for before, after in zip(lane.spans, lane.spans[1:], strict=False):
                assert before.end_us <= after.start_us
        assert [step for step, _, _ in drawn.steps] == list(range(20))

    def test_a_wait_within_a_task_shades_the_lane_of_the_task(self, tmp_path: Path) -> None:
        log = RankLog(tmp_path / "trace", 0, ("rollout",))
        log.span("samples", "wait", 1.0)
        log.event("B", "generate", cat="task")
        log.event("B", "weight_sync", cat="task")
        log.span("the others", "wait", 1.0)
        log.event("E", "weight_sync", cat="task")
        log.span("the last groups", "wait", 1.0)
        log.event("E", "generate", cat="task")
        log.write()
        drawn = timeline(report_run.read_run(tmp_path).ranks)
        assert drawn is not None
        assert [(lane.depth, lane.shades, [span.name for span in lane.spans]) for lane in drawn.rows[0].lanes] == [
            (0, False, ["samples", "generate"]),
            (0, True, ["the last groups"]),
            (1, False, ["weight_sync"]),
            (1, True, ["the others"]),
        ]

    def test_a_page_that_would_be_too_large_lacks_short_spans_but_none_in_the_middle(self, run: report_run.Run) -> None:
        drawn = timeline(run.ranks, max_spans=100)
        assert drawn is not None and "only; trace.json has all of them" in drawn.notes[0]
        shown = {id(span) for row in drawn.rows for lane in row.lanes for span in lane.spans}
        everything = sorted((span for rank in run.ranks for span in rank.spans), key=lambda span: span.start_us)
        assert 100 <= len(shown) < 150 < len(everything) / 2  # spans of equal length stay together
        num_before = (len(everything) - 50) // 2
        middle = everything[num_before : num_before + 50]
        assert all(id(span) in shown for span in middle)
        outside = [s for s in everything if not middle[0].start_us <= s.start_us <= middle[-1].start_us]
        duration = {id(span): span.end_us - span.start_us for span in outside}
        longest_missing = max(length for key, length in duration.items() if key not in shown)
        assert longest_missing < min(length for key, length in duration.items() if key in shown)

    def test_many_ranks(self, run: report_run.Run) -> None:
        drawn = timeline(run.ranks[:1] * (MAX_RANKS + 1))
        assert drawn is not None and len(drawn.rows) == MAX_RANKS and drawn.notes


class Elements(HTMLParser):
    """The elements of a page with their attributes, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, text: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += text


def page_colours(text: str) -> dict[str, str]:
    """Returns for each purpose of ranks' time the kind of task with the same colour in the timeline, or ""."""
    used = re.findall(r"\.purpose(\d) \{ background: var\(--(\w+)\); \}", text)
    kinds = {colour: kind for kind, colour in COLOURS.items()}
    return {report_run.PURPOSES[int(number)]: kinds.get(f"--{colour}", "") for number, colour in used}


@pytest.fixture(scope="module")
def text(run: report_run.Run) -> str:
    """Returns the page of `run`."""
    roles = report_run.occupations(run.ranks)
    return render(run, facts(run, roles), roles, timeline(run.ranks), sections(run.records, run.ranks))


class TestPage:
    def test_nothing_that_a_run_wrote_becomes_markup(self, text: str) -> None:
        elements = Elements(text)
        assert [attributes for tag, attributes in elements.found if tag == "script"] == [
            {"type": "application/json", "id": "data"},
            {},
        ]
        assert not [tag for tag, _ in elements.found if tag in ("img", "b", "iframe", "object", "form")]
        assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
        data = json.loads(elements.scripts[0])
        assert any(sample["response"].startswith(HOSTILE) for sample in data["samples"])

    def test_what_is_zero_throughout_is_said(self, text: str) -> None:
        assert "Zero throughout: Reward errors." in text
        assert "Zero throughout: Seconds of waiting by task (update)." in text

    def test_a_colour_means_one_thing(self, text: str) -> None:
        """A task has the same colour in timeline and curves. Shares of the run have other colours, except waits and
        moves."""
        assert {name: shared for name, shared in page_colours(text).items() if shared} == {
            "waiting": "wait",
            "memory moves": "memory move",
        }
        panels = json.loads(Elements(text).scripts[0])["panels"]
        (seconds,) = [panel for panel in panels if panel["title"] == "Seconds by task"]
        drawn = {series["label"]: series["colour"] for series in seconds["series"]}
        kinds = {"generate": "generate", "update": "actor update", "weight sync": "weight sync"}
        assert drawn == {label: COLOURS[kind] for label, kind in kinds.items()}
        assert {series["colour"] for panel in panels if panel["title"] == "Reward" for series in panel["series"]} == {
            None
        }

    def test_every_declared_task_has_a_colour_of_the_page(self) -> None:
        kinds = kinds_of_tasks()
        assert set(kinds.values()) <= COLOURS.keys()
        assert (COLOURS["generate"], COLOURS["actor update"]) == (COLOURS[kinds["generate"]], COLOURS[kinds["update"]])
        of_a_new_role = colours_of([*kinds.values(), "teacher logprobs"])
        assert of_a_new_role.keys() - COLOURS.keys() == {"teacher logprobs"}
        assert len({*of_a_new_role.values()}) == len(of_a_new_role)
        light, dark = (REPOSITORY / "rltrain/cli/page.css").read_text().split("@media (prefers-color-scheme: dark)")
        many = colours_of(map(str, range(NUM_TASK_COLOURS + 1)))
        assert many["0"] == many[str(NUM_TASK_COLOURS)]
        for colour in many.values():
            assert f" {colour}: #" in light and f" {colour}: #" in dark

    def test_nothing_is_loaded(self, text: str) -> None:
        loading = [(tag, attributes) for tag, attributes in Elements(text).found if {"src", "href"} & attributes.keys()]
        assert loading == [("link", {"rel": "icon", "href": "data:,"})]
        assert "@import" not in text and "url(" not in text and "fetch(" not in text

    @settings(max_examples=25)
    @given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5))
    def test_embedded_json_has_no_markup_and_says_the_same(self, value: Any) -> None:
        text = embedded_json(value)
        assert not set("<>&") & set(text)
        assert json.loads(text) == value

    def test_long_runs_show_samples_of_the_whole_run(self) -> None:
        samples = [{"step": step, "response": ""} for step in range(1000)]
        chosen = [sample["step"] for sample in chosen_samples(samples, 50)]
        gaps = {after - before for before, after in zip(chosen, chosen[1:], strict=False)}
        assert chosen[0] == 0 and chosen[-1] == 999 and len(chosen) == 50 and gaps <= {20, 21}

    def test_long_texts_are_cut_and_messages_are_shown_as_json(self) -> None:
        shown = shortened({"response": "x" * 9000, "prompt": [{"role": "user"}], "reward": None, "other": 1})
        rendered = shortened({"prompt": "a", "rendered_prompt": "<user>" + "a" * 9000})["rendered_prompt"]
        assert rendered.startswith("<user>aa") and len(rendered) < 9000
        assert shown == {"response": "x" * 8000 + "… (1000 more characters)", "prompt": '[{"role": "user"}]'}

    def test_small_copies_of_images_are_shown_and_no_other_address(self) -> None:
        small = thumbnail(source_of(Image.new("RGB", (400, 200), "red")))
        with Image.open(io.BytesIO(base64.b64decode(small.partition(",")[2]))) as image:
            assert image.format == "JPEG" and image.size == (96, 48)
        assert shortened({"images": [small, "https://example.org/a.png"]})["images"] == [small]

    def test_a_conversation_is_shown_turn_by_turn(self) -> None:
        said = {"message": {"role": "assistant", "content": "5"}, "reward": 0.5}
        turns = [{**said, "replies": [{"role": "user", "content": "higher"}]}, {**said, "replies": [], "reward": 0.0}]
        shown = shortened({"response": "55", "turns": turns})
        expected = [("turn 1, reward 0.5", "5", []), ("environment", "higher", []), ("turn 2", "5", [])]
        assert shown["turns"] == expected


class TestTool:
    def test_it_writes_page_and_trace(self, tmp_path: Path) -> None:
        write_traces(tmp_path / "run", num_steps=9)
        record = {"rollout/reward_mean": 0.5, "train/loss": 1.0, "memory/actor_resident_bytes": 5.0}
        lines = [json.dumps({"step": step, **record}) for step in range(9)]
        (tmp_path / "run/metrics.jsonl").write_text("\n".join(lines))
        output = io.StringIO()
        made = report(tmp_path / "run", tmp_path / "out", Console(file=output, width=160))
        assert [path.name for path in made] == ["report.html", "trace.json"]
        assert all(path.stat().st_size > 0 for path in made)
        printed = output.getvalue()
        assert "Reward: " in printed and "rollout/reward_mean" in printed and "generate" in printed

    def test_metrics_alone_give_a_page_without_a_timeline(self, tmp_path: Path) -> None:
        write_metrics(tmp_path, 3)
        made = report(tmp_path, tmp_path / "report", Console(file=io.StringIO()))
        assert [path.name for path in made] == ["report.html"]
        text = made[0].read_text()
        assert 'id="timeline"' not in text and 'id="samples"' not in text and "no trace: set logging.trace" in text

    def test_the_command_prints_the_files_or_the_reason(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_metrics(tmp_path, 3)
        assert run_script("report", [str(tmp_path)]) == 0
        assert capsys.readouterr().out.endswith(f"{tmp_path}/report/report.html\n")
        taken = tmp_path / "taken"
        taken.touch()
        assert run_script("report", [str(tmp_path), "--output", str(taken)]) == 1
        assert "cannot write to the folder: File exists" in capsys.readouterr().err

    def test_a_folder_that_is_no_run_is_refused_in_one_message(self, tmp_path: Path) -> None:
        done = subprocess.run(
            [sys.executable, "tools/report.py", str(tmp_path)],
            cwd=REPOSITORY, env={"PYTHONPATH": PYTHON_PATH}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and done.stdout == ""
        assert "nothing to report" in done.stderr and "Traceback" not in done.stderr


SVG = "{http://www.w3.org/2000/svg}"
SECOND = 1e6


def task(name: str, step: int, start_s: float, end_s: float) -> TimelineSpan:
    return TimelineSpan(name, "task", start_s * SECOND, end_s * SECOND, MAIN_THREAD, 0, {"step": step, "chunk": 0})


@pytest.fixture
def traces() -> list[RankTrace]:
    """Returns traces with steps of 2 s. One rank generates <&>, another waits for it and trains."""
    drawn = [task("generate", step, 2 * step, 2 * step + 1) for step in range(3)]
    trained = [task("update", step, 2 * step + 1, 2 * step + 2) for step in range(3)]
    waits = [
        TimelineSpan("<samples>", "wait", 2 * step * SECOND, (2 * step + 1) * SECOND, MAIN_THREAD, 0, {})
        for step in range(3)
    ]
    spans = sorted([*trained, *waits], key=lambda span: span.start_us)
    return [RankTrace(0, ("actor",), spans), RankTrace(1, ("rollout",), drawn)]


def bars(drawn: str) -> dict[str, tuple[float, float]]:
    """Returns (begin, end) of every titled bar, as shares of the visible time."""
    found = {}
    for rect in ElementTree.fromstring(drawn).iter(f"{SVG}rect"):
        title = rect.find(f"{SVG}title")
        if title is not None and title.text:
            begin = (float(rect.attrib["x"]) - LABEL) / (WIDTH - LABEL)
            found[title.text] = (begin, begin + float(rect.attrib["width"]) / (WIDTH - LABEL))
    return found


def test_a_step_lasts_from_the_update_before_it_to_its_own(traces: list[RankTrace]) -> None:
    found = bars(picture(traces, 1, 1))
    assert found.keys() == {"<samples>: 1000 ms", "generate: 1000 ms", "update: 1000 ms"}
    assert found["generate: 1000 ms"] == pytest.approx((0, 0.5), abs=1e-3)
    assert found["<samples>: 1000 ms"] == pytest.approx((0, 0.5), abs=1e-3)
    assert found["update: 1000 ms"] == pytest.approx((0.5, 1), abs=1e-3)


def test_ranks_their_roles_and_the_kinds_of_work_are_named(traces: list[RankTrace]) -> None:
    texts = [text.text for text in ElementTree.fromstring(picture(traces, 0, 2)).iter(f"{SVG}text")]
    assert {"rank 0", "actor", "rank 1", "rollout", "generate", "update", "wait", "0 s", "6 s"} <= {*texts}


def test_a_picture_loads_nothing(traces: list[RankTrace]) -> None:
    drawn = picture(traces, 0, 2)
    assert not re.search(r"href|url\(|@import|<script", drawn)


def test_steps_that_were_not_traced_are_an_error(traces: list[RankTrace]) -> None:
    with pytest.raises(ValueError, match="no steps 2 to 3"):
        picture(traces, 2, 3)
