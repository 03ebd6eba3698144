"""The logs of a run that goes on from a checkpoint hold nothing that came after it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.errors import ConfigError
from rltrain.observability.run_logs import LOGS, METRICS_FILE, forget_steps, logs_in, shorten


@given(st.lists(st.integers(0, 9)), st.integers(0, 10), st.integers(0, 20))
def test_later_steps_are_taken_out_of_the_metrics(steps: list[int], first: int, cut: int) -> None:
    """Whatever their order, and where the last line was cut short by a crash."""
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
