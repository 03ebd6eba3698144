"""The command `rltrain`: subcommands, ranks, completion, and the schema that editors read."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rltrain.cli.train
from rltrain.cli.completion import script
from rltrain.cli.main import SUBCOMMANDS, main
from rltrain.cli.ranks import possible_worlds, torchrun_command, torchrun_options, wants_ranks
from rltrain.config import json_schema
from rltrain.config.explain import all_keys
from rltrain.config.schema import Config

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SUBCOMMANDS)
    for name in set(SUBCOMMANDS) - {"schema"}:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        helped = capsys.readouterr().out
        assert stopped.value.code == 0 and f"usage: rltrain {name} " in helped
        assert ("--nproc-per-node" in helped) == (name in ("train", "dry-run", "evaluate", "doctor"))


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "expected one of train, dry-run" in capsys.readouterr().err


def test_the_dry_run_is_that_of_launch_train(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(REPOSITORY / "configs" / "quickstart.yaml")
    assert main(["dry-run", "--config", config, "--world-size", "4"]) == 0
    assert "no deadlock" in capsys.readouterr().out
    assert main(["train", "--config", config, "--dry-run", "--world-size", "3"]) == 2


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        (["--nproc-per-node", "4"], "Ranks: 4, 4 per node"),
        (["--nproc_per_node=2", "--nnodes=2", "--node-rank=0", "--max-restarts=3"], "Ranks: 4, 2 per node"),
        (["--nproc-per-node=4", "--world-size=4"], "Ranks: 4, 4 per node"),
        (["--nproc-per-node=4", "--world-size=8"], "--world-size: got 8, but --nproc-per-node and --nnodes make 4"),
        (["--nproc-per-node=gpu"], "--nproc-per-node: got gpu with --dry-run"),
    ],
)
def test_the_dry_run_takes_the_world_of_torchruns_options(
    ranks: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(REPOSITORY / "configs" / "quickstart.yaml")
    status = main(["train", "--config", config, "--dry-run", *ranks, "steps=2"])
    said = capsys.readouterr()
    assert told in said.out + said.err and status == (0 if told in said.out else 2)
    assert not said.err or said.err.startswith("rltrain train: refused: ")


def test_usage_and_refusals_name_the_script_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch/train.py"])
    arguments = ["--config", str(REPOSITORY / "configs" / "quickstart.yaml"), "--dry-run"]
    assert rltrain.cli.train.main([*arguments, "--nproc-per-node=4"]) == 2
    assert capsys.readouterr().err.startswith("train.py: refused: --nproc-per-node and --nnodes")
    with pytest.raises(SystemExit):
        rltrain.cli.train.main([*arguments, "--stepz=4"])
    assert capsys.readouterr().err.startswith("train.py: error: unrecognized arguments: --stepz=4")


def test_plainly_started_training_is_one_rank_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    arguments = ["--config", "c.yaml", "steps=3"]
    assert wants_ranks(arguments) and not wants_ranks([*arguments, "--dry-run"])
    started = torchrun_command("train", arguments)
    assert started[:4] == [sys.executable, "-m", "rltrain.cli.ranks", "--standalone"]
    assert started[4:] == ["--nproc-per-node=1", "-m", "rltrain.cli.main", "train", *arguments]
    several = torchrun_command("evaluate", ["--nproc-per-node", "8", "--nnodes=2", "--node-rank", "1", "a.b=c"])
    assert several[3:6] == ["--nproc-per-node=8", "--nnodes=2", "--node-rank=1"] and several[-1] == "a.b=c"
    monkeypatch.setenv("RANK", "0")
    assert not wants_ranks(arguments)


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a process would have become."""
    commands: list[list[str]] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    return commands


QUICKSTART = [
    "--config",
    str(REPOSITORY / "configs" / "quickstart.yaml"),
    f"model.path={REPOSITORY / 'tests/warmed_up'}",
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--nproc-per-node", "4"],
        ["train", "--nproc_per_node=2", "--nnodes=1:3"],
        ["train", "--nproc-per-node=gpu"],
        ["train", "--nproc-per-node=4", "--nnodes=1:1000"],
        ["evaluate", "--checkpoint", str(REPOSITORY / "tests" / "warmed_up")],
    ],
)
def test_the_ranks_become_torchrun(arguments: list[str], became: list[list[str]]) -> None:
    main([*arguments, *QUICKSTART])
    assert became[0][0] == sys.executable and became[0][-len(QUICKSTART) :] == QUICKSTART


REFUSED = {
    "a key": (["train", *QUICKSTART, "rollout.sampling.temprature=1"], "nearest valid key is rollout.sampling.temp"),
    "keys together": (["train", "--nproc-per-node=4", *QUICKSTART, "data.min_prompt_tokens=99"], "data.min_prompt_tok"),
    "one rank": (["train", *QUICKSTART], "rank 1 does not exist; expected ranks in 0-0 (1 in this world). More ranks"),
    "nodes": (["train", "--nproc-per-node=2", "--nnodes=2", *QUICKSTART, "placement.actor=4"], "expected ranks in 0-3"),
    "every world": (["train", "--nnodes=1:3", *QUICKSTART], "rank 3 does not exist; expected ranks in 0-2"),
    "a layout": (
        ["train", "--nproc-per-node=4", *QUICKSTART, "actor.parallel.tp=4"],
        "one copy of its model takes tp 4",
    ),
    "a schedule": (["train", "--nproc-per-node=4", *QUICKSTART, "schedule.sync_every=2"], "schedule.sync_every: got 2"),
    "a model": (["train", "--nproc-per-node=4", *QUICKSTART, "model.path=/none"], "/none/config.json does not exist"),
    "a reward": (["train", "--nproc-per-node=4", *QUICKSTART, "reward.function=no.py:f"], "there is no file 'no.py'"),
    "an agent": (
        ["train", "--nproc-per-node=4", *QUICKSTART, "placement.env=0", "env.agent={command: [python3, no.py]}"],
        "env.agent.command: got ['python3', 'no.py']: there is no file 'no.py'",
    ),
    "no node": (["train", "--nnodes=0", *QUICKSTART], "--nnodes: got 0; expected a number of at least 1"),
    "nodes backwards": (["train", "--nnodes=3:2", *QUICKSTART], "expected 2:3"),
    "ranks": (["train", "--nproc-per-node=four", *QUICKSTART], "got four; expected a number of at least 1, gpu, cpu"),
    "the dry run's": (["train", "--gpu", "h100", *QUICKSTART], "--gpu: for --dry-run alone"),
    "a config": (["evaluate", "--checkpoint", str(REPOSITORY), "--config", "nope.yaml"], "nope.yaml: the config file"),
    "a checkpoint": (["evaluate", "--checkpoint", "/none", *QUICKSTART], "--checkpoint: there is no folder"),
    "an evaluation": (["evaluate", "--checkpoint", str(REPOSITORY), *QUICKSTART], "config.json does not exist"),
}


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_a_mistake_is_one_line_before_any_rank_is_started(
    arguments: list[str], told: str, became: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert told in said and said.startswith(f"rltrain {arguments[0]}: refused: ") and said.count("\n") == 1
    assert not became


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["train"], "arguments are required: --config"),
        (["train", *QUICKSTART, "--steps=5"], "arguments: --steps=5; config keys are given without dashes"),
        (["evaluate", *QUICKSTART], "arguments are required: --checkpoint; see rltrain evaluate --help"),
        (["dry-run"], "arguments are required: --config; see rltrain dry-run --help"),
    ],
)
def test_a_wrong_call_is_one_line_too(
    arguments: list[str], told: str, became: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and not became
    assert said.startswith(f"rltrain {arguments[0]}: error: ") and told in said


def test_what_is_refused_is_refused_without_torch() -> None:
    arguments = ["train", "--nproc-per-node=4", *QUICKSTART, "schedule.sync_every=2"]
    program = f"import sys; from rltrain.cli.main import main; print(main({arguments}), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2 False\n"


def test_the_worlds_are_those_that_torchrun_may_make() -> None:
    def worlds(*arguments: str, **environment: str) -> list[tuple[int, int]]:
        return possible_worlds(torchrun_options(arguments)[0], environment)

    assert worlds() == [(1, 1)]
    assert worlds("--nproc-per-node=8", "--nnodes", "2") == worlds("--nproc-per-node=8", PET_NNODES="2") == [(16, 8)]
    assert worlds("--nproc_per_node=4", "--nnodes=1:3", PET_NNODES="2") == [(12, 4), (8, 4), (4, 4)]
    assert worlds("--nproc-per-node=cpu") == [(os.cpu_count(), os.cpu_count())]
    assert worlds("--nproc-per-node=auto") == worlds("--nproc-per-node=gpu", "--nnodes=2") == []


WITHOUT_PACKAGES = [sys.executable, "-S", "-E"]
"""Python with the standard library alone, and what lies in its working directory."""


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_says_that_packages_are_missing(name: str) -> None:
    arguments = ["--config", "c.yaml"] if name in ("train", "dry-run") else []
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [*WITHOUT_PACKAGES, "-m", "rltrain", name, *arguments],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    if name in ("train", "dry-run", "import-config", "convert", "serve", "report", "make-quickstart", "schema"):
        assert done.stderr.count("\n") == 1 and "No module named" in done.stderr
        assert "lacks torch, megatron-core" in done.stderr and "bash launch/quickstart.sh" in done.stderr


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
