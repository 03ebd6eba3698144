"""Traces and logs of a run."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.observability.run_logs import LOGS, METRICS_FILE, forget_steps, logs_in, shorten
from rltrain.observability.trace import TraceFile, start_trace
from tests.unit.test_metrics import progress_config

ROLES = ("actor", "rollout")


def closed_events(trace: TraceFile) -> list[dict[str, Any]]:
    trace.close()
    return json.loads(trace.path.read_text())


def phases(events: list[dict[str, Any]], wanted: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] in wanted]


def test_spans_and_counters_are_events_of_the_rank(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, 3, ROLES)
    with trace.span("update", role="actor", step=2):
        with trace.span("scored", "wait"):
            pass
        trace.counter("running", 5)
    events = closed_events(trace)
    assert trace.path == tmp_path / "trace/rank3.json"
    assert {event["pid"] for event in events} == {3}
    names = {event["name"]: event["args"] for event in phases(events, "M")}
    assert names["process_name"] == {"name": "rank 3: actor, rollout"}
    assert names["thread_name"] == {"name": "MainThread"}
    happened = phases(events, "BEiC")
    assert [(event["ph"], event["name"]) for event in happened] == [
        ("B", "update"),
        ("B", "scored"),
        ("E", "scored"),
        ("C", "running"),
        ("E", "update"),
    ]
    assert happened[0]["cat"] == "task" and happened[0]["args"] == {"role": "actor", "step": 2}
    assert happened[1]["cat"] == "wait" and "args" not in happened[1]
    assert happened[3]["args"] == {"value": 5.0}
    times = [event["ts"] for event in happened]
    assert times == sorted(times)


def test_an_error_within_a_span_ends_it_and_goes_on(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, 0, ROLES)
    with pytest.raises(KeyError), trace.span("update"):
        raise KeyError("x")
    (end,) = phases(closed_events(trace), "E")
    assert end["args"] == {"error": "KeyError"}


def test_what_json_cannot_hold_is_written_as_text_or_left_out(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, 0, ROLES)
    trace.counter("kl", math.nan)
    trace.counter("kl", math.inf)
    trace.counter("kl", 0.5)
    with trace.span('quo"te\n', path=Path("a/b"), loss=math.nan, ok=True, nothing=None):
        pass
    events = closed_events(trace)
    assert [event["args"] for event in phases(events, "C")] == [{"value": 0.5}]
    (begin,) = phases(events, "B")
    assert begin["name"] == 'quo"te\n'
    assert begin["args"] == {"path": "a/b", "loss": "nan", "ok": True, "nothing": None}


def test_threads_have_tracks_of_their_own_and_lose_nothing(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, 0, ROLES)
    everybody_is_there = threading.Barrier(4)

    def work(number: int) -> None:
        everybody_is_there.wait()
        for i in range(300):
            with trace.span(f"outer {number}", step=i), trace.span(f"inner {number}"):
                pass

    threads = [threading.Thread(target=work, args=(i,), name=f"worker {i}") for i in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.7)  # a write happens while the threads live and have names
    for thread in threads:
        thread.join()
    events = closed_events(trace)
    for number in range(4):
        mine = [event for event in phases(events, "BE") if event["name"].endswith(str(number))]
        assert len({event["tid"] for event in mine}) == 1
        nested = [
            ("B", f"outer {number}"),
            ("B", f"inner {number}"),
            ("E", f"inner {number}"),
            ("E", f"outer {number}"),
        ]
        assert [(event["ph"], event["name"]) for event in mine] == nested * 300


KILLED = """
import sys, time
from rltrain.observability.trace import TraceFile
trace = TraceFile(sys.argv[1], 1, ["actor"])
with trace.span("weight_sync"):
    pass
with trace.span("update", step=4):
    time.sleep(1.5)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_a_killed_rank_leaves_what_it_was_doing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGKILL)
    text = (tmp_path / "trace/rank1.json").read_text()
    events = json.loads(text + "]")  # the format allows a missing "]"
    assert [(e["ph"], e["name"]) for e in phases(events, "BE")] == [
        ("B", "weight_sync"),
        ("E", "weight_sync"),
        ("B", "update"),
    ]


def test_a_process_that_just_ends_leaves_a_closed_file(tmp_path: Path) -> None:
    program = (
        "from rltrain.observability.trace import TraceFile as T; import sys; T(sys.argv[1], 0, []).counter('last', 1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert json.loads((tmp_path / "trace/rank0.json").read_text())[-1]["name"] == "last"


def test_ranks_of_a_machine_share_a_clock(tmp_path: Path) -> None:
    first, second = TraceFile(tmp_path, 0, ROLES), TraceFile(tmp_path, 1, ROLES)
    for _ in range(200):
        first.counter("a", 1)
        second.counter("b", 1)
    ours, theirs = ([e["ts"] for e in phases(closed_events(trace), "C")] for trace in (first, second))
    lags = [b - a for a, b in zip(ours, theirs, strict=True)]
    assert sorted(lags)[100] < 100, "two events right after each other are less than 100 us apart"
    assert min(lags) > -100
    assert abs(ours[-1] / 1e6 - time.time()) < 5


def test_a_span_costs_less_than_five_microseconds(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, 0, ROLES)
    batches = []
    for _ in range(60):
        start = time.perf_counter()
        for step in range(200):
            with trace.span("generate", "task", step=step):
                pass
        batches.append((time.perf_counter() - start) / 200)
    trace.close()
    assert min(batches) < 5e-6, "the quickest of 60 batches, so that a busy machine does not decide"


def test_nothing_is_kept_after_the_end(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path, 0, ROLES)
    trace.close()
    size = trace.path.stat().st_size
    trace.counter("late", 1)
    trace.close()
    assert trace.path.stat().st_size == size


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    (folder / "rank0.json").symlink_to("/dev/full")
    trace = TraceFile(tmp_path, 0, ROLES)
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            with trace.span("generate"):
                time.sleep(0.03)
    trace.close()
    (warning,) = caplog.records
    assert "its trace ends here" in warning.message and "No space left" in warning.message


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("a file is in the way")
    with pytest.raises(ConfigError, match="logging.trace: cannot write"):
        TraceFile(tmp_path, 0, ROLES)


def test_without_logging_trace_nothing_is_written(tmp_path: Path) -> None:
    trace = start_trace(progress_config(output_dir=tmp_path, logging={"trace": False}), 0, ROLES)
    with trace.span("update", "task", step=1), trace.span("inner"):
        trace.counter("n", 1)
    trace.close()
    assert not isinstance(trace, TraceFile) and list(tmp_path.iterdir()) == []


def test_with_logging_trace_the_rank_gets_its_file(tmp_path: Path) -> None:
    trace = start_trace(progress_config(output_dir=tmp_path, logging={"trace": True}), 5, ROLES)
    trace.close()
    assert (tmp_path / "trace/rank5.json").exists()


@given(st.lists(st.integers(0, 9)), st.integers(0, 10), st.integers(0, 20))
def test_later_steps_are_taken_out_of_the_metrics(steps: list[int], first: int, cut: int) -> None:
    """Steps may come in any order, and a crash may have cut the last line."""
    whole = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in steps)
    text = whole[: len(whole) - cut]
    kept = [step for step in steps[: text.count("\n")] if step < first]
    with TemporaryDirectory() as folder:
        path = Path(folder, METRICS_FILE)
        path.write_text(text)
        forget_steps(Path(folder), first)
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept
        assert path.read_text() == "" or path.read_text().endswith("\n")


@pytest.mark.parametrize("line", ["\n", "half a rec\n", "[3]\n", '{"step": null}\n', "\ufffd\x85\n"])
def test_lines_that_are_no_records_are_taken_out_too(tmp_path: Path, line: str) -> None:
    path = tmp_path / METRICS_FILE
    path.write_text('{"step": 1}\n' + line + '{"step": 2}\n')
    with path.open("ab") as file:
        file.write(b"\xff\xfe\n")
    forget_steps(tmp_path, 2)
    assert path.read_text() == '{"step": 1}\n'


def test_metrics_that_cannot_be_rewritten_are_named(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).mkdir()
    with pytest.raises(ConfigError, match=f"output_dir: cannot write {tmp_path}/{METRICS_FILE}: Is a directory"):
        forget_steps(tmp_path, 2)


def test_logs_are_found_where_any_of_them_holds_something(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).touch()
    (tmp_path / "stalls").mkdir()
    assert logs_in(tmp_path, LOGS) == []
    (tmp_path / "stalls" / "rank0.txt").write_text("stacks")
    (tmp_path / "mine.txt").write_text("not the run's")
    assert logs_in(tmp_path, LOGS) == [tmp_path / METRICS_FILE, tmp_path / "stalls"]


def test_a_run_without_logs_has_nothing_to_forget(tmp_path: Path) -> None:
    forget_steps(tmp_path, 3)
    shorten(tmp_path, {"samples.jsonl": 10})
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_appended_to_get_their_size_back(tmp_path: Path) -> None:
    names = ["samples.jsonl", "sample_ids/rank0.jsonl", "sample_ids/rank1.jsonl"]
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("before\nafter\n")
    (tmp_path / "other.jsonl").write_text("mine")
    shorten(tmp_path, {names[0]: len("before\n"), names[1]: 10**6})
    assert [(tmp_path / name).read_text() for name in names] == ["before\n", "before\nafter\n", "before\nafter\n"]
