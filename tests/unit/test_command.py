"""What launch/train.py makes of its command line before anything is loaded."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rltrain.cli.evaluate import main as evaluate
from rltrain.cli.train import main
from rltrain.errors import USER_ERROR
from rltrain.planning import description
from rltrain.planning.options import DryRunOptions

CALL = ["--config", "c.yaml"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--gpu", "h100"], "--gpu"),
        (["--search", "--ranks"], "--ranks, --search"),
        (["--world-size", "8", "--calibrate", "runs/default"], "--world-size, --calibrate"),
    ],
)
def test_options_of_the_dry_run_are_refused_without_it(
    given: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main([*CALL, *given, "steps=2"]) == USER_ERROR
    assert set(named.split(", ")) == set(capsys.readouterr().err.split(": ")[2].split(", "))


@pytest.mark.parametrize(
    ("call", "arguments", "told"),
    [
        (main, [], "arguments are required: --config"),
        (main, [*CALL, "--steps=5"], "config keys are given without dashes"),
        (main, [*CALL, "--gpu", "h100"], "--gpu: for --dry-run alone"),
        (evaluate, [], "arguments are required: --checkpoint, --config"),
        (evaluate, ["--checkpoint", ".", "--config", "nope.yaml"], "nope.yaml: the config file does not exist"),
    ],
)
def test_a_rank_that_refuses_its_call_leaves_the_reason_for_torchrun(
    call: Callable[[list[str]], int],
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """One of a node's ranks says it on the screen."""
    monkeypatch.setattr("rltrain.cli.evaluate.begin_as_rank", lambda: None)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        try:
            status: object = call(arguments)
        except SystemExit as ended:
            status = ended.code
        assert status == USER_ERROR
        left = json.loads((tmp_path / f"{rank}.json").read_text())["message"]["message"]
        assert told in left and capsys.readouterr().err == ("" if rank else f"{left}\n")


def test_what_is_not_asked_of_a_dry_run_is_as_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DryRunOptions] = []
    monkeypatch.setattr(description, "describe_job", lambda config, overrides, options: asked.append(options))
    assert main([*CALL, "--dry-run"]) == 0
    assert main([*CALL, "--dry-run", "--ranks", "--world-size", "8", "--prompt-tokens", "100", "steps=2"]) == 0
    assert asked == [DryRunOptions(), DryRunOptions(world_size=8, every_rank=True, prompt_tokens=100.0)]
