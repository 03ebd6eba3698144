"""The command `rltrain`: subcommands, ranks, completion, and the schema that editors read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rltrain.commands.completion import script
from rltrain.commands.main import SUBCOMMANDS, main
from rltrain.commands.ranks import torchrun_command, wants_ranks
from rltrain.config import json_schema
from rltrain.config.explain import all_keys
from rltrain.config.schema import Config

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SUBCOMMANDS)
    for name in ("train", "dry-run", "import-config", "convert", "report", "doctor", "make-quickstart", "completion"):
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        assert stopped.value.code == 0 and "usage" in capsys.readouterr().out


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "expected one of train, dry-run" in capsys.readouterr().err


def test_the_dry_run_is_that_of_launch_train(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "configs" / "quickstart.yaml")
    assert main(["dry-run", "--config", config, "--world-size", "4"]) == 0
    assert "no deadlock" in capsys.readouterr().out
    assert main(["train", "--config", config, "--dry-run", "--world-size", "3"]) == 2


def test_plainly_started_training_is_one_rank_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    arguments = ["--config", "c.yaml", "steps=3"]
    assert wants_ranks(arguments) and not wants_ranks([*arguments, "--dry-run"])
    started = torchrun_command("train", arguments)
    assert started[:4] == [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    assert started[4:] == ["--nproc-per-node=1", "-m", "rltrain.commands.main", "train", *arguments]
    several = torchrun_command("evaluate", ["--nproc-per-node", "8", "--nnodes=2", "--node-rank", "1", "a.b=c"])
    assert several[3:6] == ["--nproc-per-node=8", "--nnodes=2", "--node-rank=1"] and several[-1] == "a.b=c"
    monkeypatch.setenv("RANK", "0")
    assert not wants_ranks(arguments)


def test_the_ranks_become_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    became = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", lambda path, command: became.append((path, command)))
    main(["train", "--nproc-per-node", "2", "--config", "c.yaml"])
    assert became[0][0] == sys.executable and "--nproc-per-node=2" in became[0][1]


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to complete for")
@pytest.mark.parametrize(
    ("words", "expected"),
    [(["rltrain", "imp"], "import-config"), (["rltrain", "train", "actor.parallel.t"], "actor.parallel.tp=")],
)
def test_bash_completes_subcommands_and_keys(words: list[str], expected: str) -> None:
    asked = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; _rltrain 2>/dev/null; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", f"{script('bash')}\n{asked}"], capture_output=True, text=True, check=True)
    assert expected in done.stdout.split()


def test_other_shells_know_all_keys() -> None:
    for shell in ("zsh", "fish"):
        text = script(shell)
        assert "weight_sync.verify=" in text and "make-quickstart" in text


def test_the_schema_in_the_repository_is_that_of_the_code() -> None:
    stored = (REPOSITORY / "configs" / "schema.json").read_text(encoding="utf-8")
    assert stored == json_schema.text(), "rltrain schema > configs/schema.json"


def test_the_schema_has_every_key_with_its_words() -> None:
    schema = json.loads(json_schema.text())
    named = set(schema["properties"])
    for definition in schema["$defs"].values():
        named |= set(definition.get("properties", {}))
    assert {key.rpartition(".")[2] for key in all_keys()} <= named
    assert "weight sync" in schema["$defs"]["Schedule"]["properties"]["sync_every"]["description"]
    assert schema["$defs"]["Actor"]["properties"]["distributed_optimizer"]["description"], "inherited keys have theirs"
    assert schema["additionalProperties"] is False and "steps" in schema["required"]
    assert set(schema["properties"]) == set(Config.model_fields)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_name_the_schema(path: Path) -> None:
    assert "# yaml-language-server: $schema=schema.json\n" in path.read_text()
