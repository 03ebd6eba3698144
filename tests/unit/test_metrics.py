"""Metrics: their files and services, the reports of ranks, the progress bar."""

import ast
import io
import json
import logging
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.observability.names import ALIASES, METRICS, document, documented
from rltrain.observability.progress import Progress, checkpoints_of, format_duration
from rltrain.observability.reporter import Reporter
from rltrain.observability.sinks import Sinks

REPOSITORY = Path(__file__).resolve().parents[2]


def config(output_dir: Path, **logging_keys: Any) -> Config:
    return progress_config(3, output_dir=output_dir, logging=logging_keys)


def records(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_one_line_per_step_is_on_disk_at_once(tmp_path: Path) -> None:
    with Sinks(config(tmp_path / "new" / "run")) as writer:
        writer.write(0, {"train/loss": 0.5, "rollout/reward_errors": 2})
        first = records(tmp_path / "new" / "run")
        writer.write(1, {"train/loss": 0.25})
    assert [(r["step"], r["train/loss"]) for r in first] == [(0, 0.5)]
    assert first[0]["rollout/reward_errors"] == 2
    both = records(tmp_path / "new" / "run")
    assert [r["step"] for r in both] == [0, 1]
    assert 0 <= both[0]["time_s"] <= both[1]["time_s"]


def test_time_goes_on_after_the_last_record_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time_s": 100.0}\n{"step": 1, "time_s": 345.5}\n')
    with Sinks(config(tmp_path)) as writer:
        writer.write(2, {"train/loss": 1.0})
    assert 345.5 <= records(tmp_path)[-1]["time_s"] < 400


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (0, 1):
        with Sinks(config(tmp_path)) as writer:
            writer.write(step, {"train/loss": 1.0})
    assert [r["step"] for r in records(tmp_path)] == [0, 1]


def test_numbers_of_torch_and_numpy_become_plain_ones(tmp_path: Path) -> None:
    with Sinks(config(tmp_path)) as writer:
        writer.write(0, {"a": torch.tensor(1.5), "b": np.float32(0.25), "c": np.int64(3)})  # type: ignore[dict-item]
    assert {k: records(tmp_path)[0][k] for k in "abc"} == {"a": 1.5, "b": 0.25, "c": 3}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_null_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    with caplog.at_level(logging.WARNING), Sinks(config(tmp_path)) as writer:
        writer.write(7, {"train/loss": value, "train/lr": 0.1})
    assert records(tmp_path)[0]["train/loss"] is None
    assert records(tmp_path)[0]["train/lr"] == 0.1
    assert "train/loss" in caplog.text and "step 7" in caplog.text


def test_an_output_dir_that_cannot_be_written_names_its_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output_dir"):
        Sinks(config(tmp_path / "file"))


def test_metrics_that_cannot_be_written_any_more_name_their_file(tmp_path: Path) -> None:
    writer, path = Sinks(config(tmp_path)), tmp_path / "metrics.jsonl"
    writer.write(0, {"train/loss": 0.5})
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(
        ConfigError, match=f"output_dir: cannot write {tmp_path}/metrics.jsonl: No space left on device"
    ):
        writer.write(1, {"train/loss": 0.5})
    writer.close()


class FakeWandb(SimpleNamespace):
    """A record of the calls of wandb."""

    Error = RuntimeError

    def __init__(self, *, has_key: bool, fails: bool = False) -> None:
        super().__init__(has_key=has_key, fails=fails, started=None, logged=[], finished=False, id="run1")

    def login(self, **_: Any) -> bool:
        return self.has_key

    def Settings(self, **settings: Any) -> dict[str, Any]:  # noqa: N802
        return settings

    def init(self, **arguments: Any) -> "FakeWandb":
        if self.fails:
            raise self.Error("no such entity")
        self.started = arguments
        return self

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self) -> None:
        self.finished = True


@pytest.mark.parametrize(
    ("keys", "has_key", "mode"), [({}, False, "offline"), ({}, True, "online"), ({"mode": "offline"}, True, "offline")]
)
def test_wandb_gets_every_step_and_is_offline_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str], has_key: bool, mode: str
) -> None:
    fake = FakeWandb(has_key=has_key)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Sinks(config(tmp_path, wandb={"project": "p", "name": "n", **keys})) as writer:
        writer.write(0, {"train/loss": 0.5})
        writer.write(1, {"train/loss": 0.4})
        writer.write(0, {"eval/score": 0.3})
    assert (fake.started["project"], fake.started["name"], fake.started["mode"]) == ("p", "n", mode)
    assert fake.started["config"]["steps"] == 3
    late = (1, {"eval/score": 0.3})
    assert fake.logged == [(0, {"train/loss": 0.5}), (1, {"train/loss": 0.4}), late], "wandb's steps never decrease"
    assert fake.finished


def test_a_run_that_goes_on_does_so_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb(has_key=True)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    settings = config(tmp_path, wandb={"project": "p"})
    ids = []
    for goes_on in (False, True, False):
        Sinks(settings, goes_on=goes_on).close()
        ids.append(fake.started["id"])
    assert ids == [None, "run1", None]


def test_wandb_is_not_imported_unless_a_project_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Sinks(config(tmp_path)) as writer:
        writer.write(0, {"train/loss": 0.5})
    with pytest.raises(ConfigError, match=r"logging\.wandb\.project .*not installed"):
        Sinks(config(tmp_path, wandb={"project": "p"}))


def test_a_wandb_that_does_not_start_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(has_key=True, fails=True))
    with pytest.raises(ConfigError, match="no such entity.*logging.wandb.mode: offline"):
        Sinks(config(tmp_path, wandb={"project": "p"}))


def test_a_folder_that_wandb_cannot_write_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(has_key=True))
    (tmp_path / "wandb_id").mkdir()
    for goes_on in (False, True):
        with pytest.raises(ConfigError, match=f"wandb.project: cannot write {tmp_path}/wandb_id: Is a directory"):
            Sinks(config(tmp_path, wandb={"project": "p"}), goes_on=goes_on)


@pytest.mark.slow  # earlier tests use a stand-in
def test_the_real_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    with Sinks(config(tmp_path, wandb={"project": "p", "mode": "offline"})) as writer:
        writer.write(0, {"train/loss": 0.5})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert records(tmp_path)[0]["train/loss"] == 0.5


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the (step, value) pairs of each scalar in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_every_step_once_also_of_a_run_that_went_back(tmp_path: Path) -> None:
    settings = config(tmp_path, tensorboard=True)
    with Sinks(settings) as sinks:
        for step in range(4):
            sinks.write(step, {"train/loss": 4.0 - step, "eval/score": math.nan})
    with Sinks(settings, goes_on=True, first_step=2) as sinks:
        sinks.write(2, {"train/loss": 7.0})
    shown = scalars(tmp_path / "tensorboard")
    assert shown["train/loss"] == [(0, 4.0), (1, 3.0), (2, 7.0)]
    assert len(shown["eval/score"]) == 2


def test_tensorboard_is_asked_for_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"logging\.tensorboard is true, .* not installed"):
        Sinks(config(tmp_path, tensorboard=True))


def test_the_document_is_the_table() -> None:
    assert (REPOSITORY / "docs" / "metrics.md").read_text() == document() + "\n", (
        "run: python -m rltrain.observability.names > docs/metrics.md"
    )


def test_names_are_unique_and_match_only_themselves() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert documented("train/ppo_kl") and documented("perf/weight_sync_s")
    assert not documented("train/ppo_kl_") and not documented("perf/_s") and not documented("loss")


def test_every_metric_named_in_the_code_is_documented() -> None:
    pattern = re.compile(r"(train|critic|rollout|eval|perf|memory)/[a-z_]*[a-z]")
    named = {
        node.value
        for path in (REPOSITORY / "rltrain").rglob("*.py")
        if path.name != "names.py"  # names.py documents the metrics
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    assert named
    assert {name for name in named if not documented(name)} == set()


def test_every_metric_that_other_trainers_name_is_one() -> None:
    assert ALIASES.keys() <= {metric.name for metric in METRICS} | {name for name in ALIASES if documented(name)}


class FakeBulletin:
    """One process's view of a dictionary shared by all ranks."""

    def __init__(self, shared: dict[str, str], rank: int):
        self.shared, self.world = shared, SimpleNamespace(rank=rank)

    def put(self, key, value):
        self.shared[key] = json.dumps(value)

    def has(self, *keys):
        return all(key in self.shared for key in keys)

    def get(self, key, waiting_for):
        assert key in self.shared, f"would wait for {waiting_for}"
        return json.loads(self.shared[key])

    def forget(self, key):
        del self.shared[key]


class FakeSink:
    def __init__(self, written: list):
        self.written = written

    def write(self, step, metrics):
        self.written.append((step, metrics))

    def close(self):
        self.written.append("closed")


@pytest.fixture
def reporters():
    """Returns the reporters of two ranks and the written records. Rank 0 logs and adds two tasks per step. Rank 1 adds
    one."""
    shared: dict[str, str] = {}
    counts = Counter({0: 2, 1: 1})
    written: list[tuple[int, dict]] = []
    sinks = [[FakeSink(written)], []]
    ranks = [
        Reporter(FakeBulletin(shared, rank), lambda step: counts, range(3), [0, 1], 0, sinks[rank]) for rank in range(2)
    ]
    return ranks, written, shared


def test_a_step_is_written_once_all_ranks_have_published_it(reporters):
    (first, second), written, _ = reporters
    second.add(0, {"reward": 0.5})
    first.add(0, {"loss": 1.0})
    assert written == []
    first.add(0, {"lr": 0.1})
    assert [step for step, _ in written] == [0]
    assert written[0][1].keys() == {"reward", "loss", "lr", "perf/step_time_s"}


def test_a_slow_rank_delays_the_record_and_not_the_run(reporters):
    (first, second), written, _ = reporters
    for step in range(2):
        first.add(step, {"loss": 1.0})
        first.add(step, {"lr": 0.1})
    assert written == []
    second.add(0, {"reward": 0.0})
    second.add(1, {"reward": 1.0})
    first.add(2, {"loss": 2.0})
    assert [(step, metrics["reward"]) for step, metrics in written] == [(0, 0.0), (1, 1.0)]


def test_no_step_waits_for_a_late_rank_whose_metrics_come_by_themselves():
    """Late metrics join the others' record if they arrive in time."""
    shared: dict[str, str] = {}
    counts = {0: Counter({0: 1, 1: 1}), 1: Counter({0: 1}), 2: Counter({0: 1, 1: 1})}
    written: list[tuple[int, dict]] = []
    first, late = (
        Reporter(FakeBulletin(shared, rank), counts.__getitem__, range(3), [0, 1], 0, [FakeSink(written)], late=[1])
        for rank in range(2)
    )
    for step in range(2):
        first.add(step, {"loss": 1.0})
    assert [(step, "score" in metrics) for step, metrics in written] == [(0, False), (1, False)]
    late.add(0, {"score": 0.25})
    late.add(2, {"score": 0.5})
    first.add(2, {"loss": 1.0})
    assert [(step, metrics.get("score"), "loss" in metrics) for step, metrics in written[2:]] == [
        (2, 0.5, True),
        (0, 0.25, False),
    ]
    late.close()
    first.close()
    assert not [key for key in shared if "closed" not in key], "the store still has keys"


def test_closing_writes_steps_that_ended_early_and_leaves_nothing_behind(reporters):
    (first, second), written, shared = reporters
    first.add(0, {"loss": 1.0})
    second.add(0, {"reward": 0.5})
    second.close()
    first.close()
    assert written[0][0] == 0
    assert written[1:] == ["closed"]
    assert not [key for key in shared if "closed" not in key]


def test_seconds_of_a_task_that_comes_in_parts_add_up_and_the_rest_is_the_last_one(reporters):
    (first, second), written, _ = reporters
    second.add(0, {"reward": 0.5})
    first.add(0, {"perf/score_s": 1.5, "perf/score_wait_s": 4.0, "perf/train_tokens_per_s": 100.0, "loss": 3.0})
    first.add(0, {"perf/score_s": 0.25, "perf/score_wait_s": 3.0, "perf/train_tokens_per_s": 50.0, "loss": 2.0})
    metrics = written[0][1]
    assert (metrics["perf/score_s"], metrics["perf/score_wait_s"]) == (1.75, 7.0)
    assert (metrics["perf/train_tokens_per_s"], metrics["loss"]) == (50.0, 2.0)


def test_what_is_asked_for_at_publishing_is_asked_once_a_step():
    calls: list[int] = []

    def at_publish() -> dict[str, float]:
        calls.append(1)
        return {"memory/host_bytes": len(calls)}

    written: list = []
    counts = Counter({0: 2})
    reporter = Reporter(FakeBulletin({}, 0), lambda step: counts, range(2), [0], 0, [FakeSink(written)], at_publish)
    for step in (0, 0, 1, 1):
        reporter.add(step, {"loss": 1.0})
    assert [metrics["memory/host_bytes"] for _, metrics in written] == [1, 2]


def test_a_rank_without_a_role_waits_for_the_logging_rank_to_close(reporters):
    (first, second), _, _ = reporters
    with pytest.raises(AssertionError, match="would wait for the end of the run"):
        second.await_end()
    second.close()
    first.close()
    second.await_end()


def test_of_a_task_that_several_ranks_time_the_longest_counts(reporters):
    (first, second), written, _ = reporters
    second.add(0, {"perf/checkpoint_s": 0.0, "reward": 1.0})
    first.add(0, {"perf/checkpoint_s": 7.0, "reward": 2.0})
    first.add(0, {})
    assert written[0][1]["perf/checkpoint_s"] == 7.0
    second.add(1, {"perf/checkpoint_s": 8.0, "reward": 1.0})
    first.add(1, {"perf/checkpoint_s": 0.0, "reward": 2.0})
    first.add(1, {})
    assert (written[1][1]["perf/checkpoint_s"], written[1][1]["reward"]) == (8.0, 1.0)


def test_of_a_step_in_which_no_task_had_anything_to_tell_there_is_no_record():
    """An example is the last boundary of a run if nothing is saved there."""
    shared: dict[str, str] = {}
    written: list[tuple[int, dict]] = []
    tells, is_empty = [{"loss": 1.0}, {}], Counter({0: 1})
    reporter = Reporter(
        FakeBulletin(shared, 0), lambda step: is_empty, range(2), [0], 0, [FakeSink(written)], lambda: {"memory": 1.0}
    )
    for step, metrics in enumerate(tells):
        reporter.add(step, metrics)
    reporter.close()
    assert [record[0] for record in written[:-1]] == [0] and written[-1] == "closed"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def progress_config(steps: int = 4, output_dir: object = "nowhere", **sections: object) -> Config:
    required = {"placement": {"actor": 0}, "model": {"path": "model"}, "data": {"train": {"path": "train.jsonl"}}}
    return Config.model_validate({"steps": steps, "output_dir": str(output_dir), **required, **sections})


def run(progress: Progress, clock: Clock, num_steps: int, step_s: float) -> None:
    for step in range(num_steps):
        clock.now += step_s
        progress.write(
            step,
            {"rollout/reward_mean": 0.1 * step, "perf/rollout_tokens_per_s": 12345.6, "perf/generate_s": step_s / 2}
            | {"perf/actor_tokens_per_gpu_s": 7.0},
        )


def test_plain_lines_come_at_intervals_and_at_the_end() -> None:
    output, clock = io.StringIO(), Clock()
    with Progress(progress_config(steps=30), console=Console(file=output), interval_s=10, clock=clock) as progress:
        run(progress, clock, num_steps=30, step_s=1.0)
    lines = output.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == ["step 10/30", "step 20/30", "step 30/30"]
    assert lines[0] == "step 10/30  reward 0.900  rollout tokens/s 12,346  left 0:20"
    assert lines[-1] == "seconds by task: generate 15.0; waiting in them 0.0; whole run 30.0"


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [
        ({}, "every 600 s, and when the run is stopped, in nowhere/checkpoints; the same command continues"),
        ({"save_interval": 2, "dir": "there"}, "every 2 steps, every 600 s, and when the run is stopped, in there;"),
        ({"save_interval": 2, "save_every_s": None}, "every 2 steps, and when the run is stopped,"),
        ({"save_every_s": 0, "memory": {"interval": 3}}, "checkpoints: every 3 steps in the nodes' memory; the same"),
        ({"save_every_s": 0}, "checkpoint.save_interval and checkpoint.save_every_s are 0; an interrupted run starts"),
    ],
)
def test_the_first_line_says_what_an_interrupted_run_goes_on_from(checkpoint: dict[str, object], said: str) -> None:
    output = io.StringIO()
    with Progress(progress_config(checkpoint=checkpoint), console=Console(file=output)) as progress:
        progress.say(checkpoints_of(progress.config))
    assert said in output.getvalue()


def test_an_evaluation_is_always_shown_and_stays() -> None:
    output, clock = io.StringIO(), Clock()
    progress = Progress(progress_config(steps=100), console=Console(file=output), interval_s=10, clock=clock)
    clock.now += 1
    progress.write(0, {"eval/score": 0.314159})
    clock.now += 10
    progress.write(1, {"rollout/reward_mean": 0.5})
    first, second = output.getvalue().splitlines()
    assert first.startswith("step 1/100  held-out 0.314")
    assert "reward 0.500" in second and "held-out 0.314" in second


def test_a_run_that_stops_early_says_at_which_step_and_why() -> None:
    output = io.StringIO()
    early = progress_config(
        steps=400, evaluation={"stop_at": 0.35, "sets": [{"name": "held", "data": {"path": "x.jsonl"}}], "interval": 1}
    )
    with Progress(early, console=Console(file=output)) as progress:
        for step in range(186):
            progress.write(step, {"rollout/reward_mean": 0.1})
        progress.write(185, {"eval/held/score": 0.352})
        progress.write(400, {"perf/save_hf_s": 1.0})
    *_, last, stopped, seconds = output.getvalue().splitlines()
    assert last.startswith("step 186/400  ") and seconds.startswith("seconds by task")
    assert stopped == "stopped after step 186 of 400: eval/held/score 0.352 reached evaluation.stop_at 0.35"


def test_a_run_that_stops_at_a_held_out_loss_says_so() -> None:
    output = io.StringIO()
    evaluated = {"data": {"train": {"path": "t"}, "eval": {"path": "e"}}, "evaluation": {"stop_at": 0.5}}
    sft = progress_config(steps=9, algorithm="sft", **evaluated)
    with Progress(sft, console=Console(file=output)) as progress:
        progress.write(0, {"eval/loss": 0.75})
        progress.write(1, {"eval/loss": 0.25})
        progress.write(9, {"perf/save_hf_s": 1.0})
    said = output.getvalue()
    assert "held-out loss 0.7500" in said and "eval/loss 0.25 reached evaluation.stop_at 0.5" in said


def test_a_run_names_what_it_has_left(tmp_path: Path) -> None:
    output = io.StringIO()
    (tmp_path / "hf").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    with Progress(progress_config(output_dir=tmp_path), console=Console(file=output)) as progress:
        progress.write(0, {"perf/update_s": 1.0})
    said = f"results in {tmp_path}: model hf, metrics metrics.jsonl. To see them: rltrain report {tmp_path}"
    assert output.getvalue().splitlines()[-1] == said


def test_evaluation_sets_are_shown_by_their_names() -> None:
    output, clock = io.StringIO(), Clock()
    sets = {"sets": [{"name": "hard", "data": {"path": "h"}}]}
    with_sets = progress_config(evaluation=sets)
    Progress(with_sets, console=Console(file=output), clock=clock).write(0, {"eval/hard/score": 0.25})
    assert output.getvalue().startswith("step 1/4  hard 0.250")


@pytest.mark.parametrize("after_the_last", [None, {"eval/score": 0.75}, {"perf/save_hf_s": 1.0}])
def test_one_line_is_for_the_last_step_and_the_record_that_may_follow_it(after_the_last) -> None:
    output, clock = io.StringIO(), Clock()
    with Progress(progress_config(steps=2), console=Console(file=output), interval_s=1, clock=clock) as progress:
        for step in range(2):
            clock.now += 1
            progress.write(step, {"eval/score": 0.5})
        if after_the_last:
            progress.write(2, after_the_last)
    lines = [line for line in output.getvalue().splitlines() if line.startswith("step")]
    last_score = 0.75 if after_the_last and "eval/score" in after_the_last else 0.5
    assert lines == ["step 1/2  held-out 0.500  left 0:01", f"step 2/2  held-out {last_score:.3f}  left 0:00"]


def test_a_terminal_gets_a_bar_that_is_taken_down() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True, width=160)
    progress = Progress(progress_config(steps=4), console=console, clock=clock)
    run(progress, clock, num_steps=2, step_s=3.0)
    progress.close()
    progress.close()
    text = output.getvalue()
    assert "2/4" in text and "reward 0.100" in text and "left 0:06" in text
    hide_cursor, show_cursor = "\x1b[?25l", "\x1b[?25h"
    assert text.count(hide_cursor) == text.count(show_cursor) == 1
    assert text.count("seconds by task") == 1


ALL_VALUES = {
    "rollout/reward_mean": 0.5,
    "eval/score": 0.25,
    "train/loss": 0.01,
    "perf/rollout_tokens_per_s": 123456.0,
    "perf/train_tokens_per_s": 33333.0,
}


def bar_of_width(width: int) -> str:
    """Returns the last line of a bar in a terminal of `width` columns."""
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True, width=width)
    with Progress(progress_config(steps=1600), console=console, clock=clock) as progress:
        clock.now += 3600
        progress.write(799, ALL_VALUES)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    return next(line for line in reversed(re.split(r"[\r\n]+", shown)) if line.startswith("step")).rstrip()


@pytest.mark.parametrize(
    ("width", "values"),
    [
        (160, ["reward 0.500", "held-out 0.250", "loss 0.0100", "rollout tokens/s 123,456", "train tokens/s 33,333"]),
        (80, ["reward 0.500", "held-out 0.250"]),
        (60, ["reward 0.500"]),
        (40, []),
    ],
)
def test_on_a_narrow_terminal_step_bar_and_time_left_stay_and_values_go_whole(width: int, values: list[str]) -> None:
    bar = bar_of_width(width)
    assert len(bar) <= width
    match = re.fullmatch(r"step +800/1600 ([━╸╺]+) left 1:00:00 ?(.*)", bar)
    assert match, bar
    assert len(match[1]) >= 4
    assert match[2] == "  ".join(values)


def test_the_bar_is_taken_down_when_the_run_fails() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=160)
    with pytest.raises(RuntimeError), Progress(progress_config(), console=console):
        raise RuntimeError
    assert "\x1b[?25h" in output.getvalue()


def test_nothing_is_printed_when_progress_is_off() -> None:
    output, clock = io.StringIO(), Clock()
    console = Console(file=output, force_terminal=True)
    with Progress(progress_config(logging={"progress": False}), console=console, clock=clock) as progress:
        run(progress, clock, num_steps=4, step_s=60.0)
    assert output.getvalue() == ""


def test_only_task_times_are_summed() -> None:
    output, clock = io.StringIO(), Clock()
    metrics = {
        "perf/update_s": 2.0,
        "perf/step_time_s": 9.0,
        "perf/weight_sync_wire_s": 5.0,
        "perf/rollout_tokens_per_s": 5.0,
        "perf/weight_sync_s": 3.0,
        "perf/weight_sync_wait_s": 40.0,
        "perf/update_wait_s": 0.5,
    }
    with Progress(progress_config(), console=Console(file=output), clock=clock) as progress:
        progress.write(0, metrics)
        progress.write(1, metrics)
    expected = "seconds by task: weight_sync 6.0, update 4.0; waiting in them 81.0; whole run 0.0"
    assert output.getvalue().splitlines()[-1] == expected


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (3723, "1:02:03")])
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
