"""How `rltrain train` ends: in a line with the reason, and with the exit status that its callers expect."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from rltrain.checkpoint.run_folder import way_on
from rltrain.cli.ranks import RANK_MODULE, main
from rltrain.config.schema import Config

CONFIG = """\
steps: 10
placement: {'actor, reference, rollout, reward': 0}
model: {path: models/tiny}
data: {train: {path: train.jsonl}}
"""


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a job whose torchrun ends by an error. Returns the exit status and the last line."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")

    def run(error: Exception, name: str = "train") -> tuple[int, str]:
        def end(arguments: Any) -> None:
            raise error

        monkeypatch.setattr(torchrun, "run", end)
        of_rank = ["--config", f"{tmp_path}/config.yaml", f"output_dir={tmp_path}/run"]
        status = main(["--standalone", "-m", RANK_MODULE, name, *of_rank])
        return status, capsys.readouterr().err.splitlines()[-1]

    return run


def failure(status: int, message: str = "", folder: Path | None = None, time_s: int = 1) -> ProcessFailure:
    """Of a rank that has left `message`."""
    if folder is None:
        return ProcessFailure(0, 1234, status, "nowhere")
    content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(time_s)}}
    (folder / "error.json").write_text(json.dumps({"message": content}))
    return ProcessFailure(0, 1234, status, str(folder / "error.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_status_and_the_way_on(ends: Any, tmp_path: Path, number: signal.Signals) -> None:
    stopped = SignalException("Process 1 got signal", number)
    way = "the same command begins anew, as no checkpoint was saved"
    assert ends(stopped) == (128 + number, f"rltrain train: stopped by {number.name}; {way}")
    (tmp_path / "run/checkpoints/step_0000004").mkdir(parents=True)
    way = "the same command goes on from step 4"
    assert ends(stopped) == (128 + number, f"rltrain train: stopped by {number.name}; {way}")
    assert ends(stopped, "evaluate") == (128 + number, f"rltrain evaluate: stopped by {number.name}")


def test_the_way_on_is_that_of_the_config(tmp_path: Path) -> None:
    def way(**checkpoint: object) -> str:
        made = yaml.safe_load(CONFIG) | {"output_dir": str(tmp_path), "checkpoint": checkpoint}
        return way_on(Config.model_validate(made))

    assert way(memory={}).startswith("the same command goes on from the nodes' memory where that holds a later")
    assert way(memory={}).endswith("and else begins anew, as no checkpoint was saved")
    assert way(resume="none") == "the same command begins anew, as no checkpoint was saved"
    (tmp_path / "checkpoints/step_0000012").mkdir(parents=True)
    assert way(resume="none") == "the same command with checkpoint.resume=auto goes on from step 12"


def test_the_last_line_is_the_message_of_the_rank_that_failed(ends: Any, tmp_path: Path) -> None:
    failures = {0: failure(-signal.SIGKILL), 1: failure(2, "steps: got many\n  on rank 1", tmp_path, time_s=2**32)}
    assert ends(ChildFailedError("train", failures)) == (2, "rltrain train: steps: got many on rank 1")
    assert ends(ChildFailedError("train", {1: failure(1, "rank 1 failed", tmp_path)}))[0] == 1


def test_a_rank_that_was_killed_or_left_no_message_is_named(ends: Any) -> None:
    status, told = ends(ChildFailedError("train", {3: failure(-signal.SIGKILL)}))
    assert status == 1 and told.startswith("rltrain train: rank 3 was killed by SIGKILL")
    assert told.endswith("the same command begins anew, as no checkpoint was saved")
    status, told = ends(ChildFailedError("train", {3: failure(7)}))
    assert (status, told) == (
        1,
        "rltrain train: rank 3 ended with exit status 7 without a message; its output is above",
    )
