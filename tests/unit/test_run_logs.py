"""The logs of a run that goes on from a checkpoint hold nothing that came after it."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from rltrain.observability.run_logs import METRICS_FILE, forget_steps, sample_logs, shorten


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
    assert sorted(sample_logs(tmp_path)) == sorted(tmp_path / name for name in names)
    shorten(tmp_path, {names[0]: len("before\n"), names[1]: 10**6})
    assert [(tmp_path / name).read_text() for name in names] == ["before\n", "before\nafter\n", "before\nafter\n"]
