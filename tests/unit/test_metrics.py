"""metrics.jsonl, Weights & Biases, and the table of metric names."""

import ast
import json
import logging
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.observability.names import ALIASES, METRICS, document, documented
from rltrain.observability.sinks import Sinks

REPOSITORY = Path(__file__).resolve().parents[2]


def config(output_dir: Path, **logging_keys: Any) -> Config:
    return Config.model_validate(
        {
            "steps": 3,
            "output_dir": str(output_dir),
            "placement": {"actor": 0},
            "model": {"path": "model"},
            "data": {"train": {"path": "train.jsonl"}},
            "logging": logging_keys,
        }
    )


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
    """Records what wandb would be asked."""

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
    ("keys", "has_key", "mode"),
    [({}, False, "offline"), ({}, True, "online"), ({"mode": "offline"}, True, "offline")],
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
    assert fake.logged == [(0, {"train/loss": 0.5}), (1, {"train/loss": 0.4}), late], "its steps never go back"
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


@pytest.mark.slow  # the tests before it have a stand-in
def test_the_real_wandb_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for variable in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    with Sinks(config(tmp_path, wandb={"project": "p", "mode": "offline"})) as writer:
        writer.write(0, {"train/loss": 0.5})
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert records(tmp_path)[0]["train/loss"] == 0.5


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows."""
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
        if path.name != "names.py"  # which documents them
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    assert named
    assert {name for name in named if not documented(name)} == set()


def test_every_metric_that_other_trainers_name_is_one() -> None:
    assert ALIASES.keys() <= {metric.name for metric in METRICS} | {name for name in ALIASES if documented(name)}
