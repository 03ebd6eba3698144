"""Tests of the commands of rltrain, of their output on ranks, and of the Python functions for the same tasks."""

import functools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import rltrain
from rltrain import Config as PublicConfig
from rltrain import Placement, UserError, dry_run, run
from rltrain.checkpoint.run_folder import way_on
from rltrain.cli.completion import script
from rltrain.cli.main import SUBCOMMANDS, main, run_script
from rltrain.cli.python_interface import read_config
from rltrain.cli.ranks import RANK_MODULE, possible_worlds, torchrun_command, torchrun_options
from rltrain.cli.ranks import main as ranks_main
from rltrain.config import key_reference
from rltrain.config.explain import all_keys
from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import USER_ERROR, ConfigError, PlacementError
from rltrain.planning import description
from rltrain.planning.options import DryRunOptions
from rltrain.rewards.locating import locate
from tests.support import user_rewards

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
QUICKSTART_CONFIG = REPOSITORY / "configs/quickstart.yaml"
OF_QUICKSTART = ["--config", str(QUICKSTART_CONFIG)]
QUICKSTART = [*OF_QUICKSTART, f"model.path={REPOSITORY / 'tests/warmed_up'}"]
AT_4 = ["train", "--nproc-per-node=4", *QUICKSTART]


def python(*arguments: str | Path, folder: Path = REPOSITORY, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs another interpreter outside of any job, with this repository's packages."""
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=check)


def test_every_subcommand_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in SUBCOMMANDS)
    for name in SUBCOMMANDS:
        with pytest.raises(SystemExit) as stopped:
            main([name, "--help"])
        helped = capsys.readouterr().out
        assert stopped.value.code == 0 and f"usage: rltrain {name} " in helped
        assert ("--nproc-per-node" in helped) == (name in ("train", "dry-run", "evaluate", "doctor"))


def test_an_unknown_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "expected one of train, dry-run" in capsys.readouterr().err


def test_the_dry_run_is_that_of_launch_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dry-run", *OF_QUICKSTART, "--world-size", "4"]) == 0
    assert "no deadlock" in capsys.readouterr().out
    assert main(["train", *OF_QUICKSTART, "--dry-run", "--world-size", "3"]) == 2


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
    status = main(["train", *OF_QUICKSTART, "--dry-run", *ranks, "steps=2"])
    said = capsys.readouterr()
    assert told in said.out + said.err and status == (0 if told in said.out else 2)
    assert not said.err or said.err.startswith("rltrain train: refused: ")


def test_usage_and_refusals_name_the_script_that_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["launch/train.py"])
    arguments = [*OF_QUICKSTART, "--dry-run"]
    assert run_script("train", [*arguments, "--nproc-per-node=4"]) == 2
    assert capsys.readouterr().err.startswith("train.py: refused: --nproc-per-node and --nnodes")
    with pytest.raises(SystemExit):
        run_script("train", [*arguments, "--stepz=4"])
    assert capsys.readouterr().err.startswith("train.py: error: unrecognized arguments: --stepz=4")


def test_plainly_started_training_is_one_rank_under_torchrun() -> None:
    arguments = ["--config", "c.yaml", "steps=3"]
    started = torchrun_command("train", arguments)
    assert started[:4] == [sys.executable, "-m", "rltrain.cli.ranks", "--standalone"]
    assert started[4:] == ["--nproc-per-node=1", "-m", "rltrain.cli.main", "train", *arguments]
    several = torchrun_command("evaluate", ["--nproc-per-node", "8", "--nnodes=2", "--node-rank", "1", "a.b=c"])
    assert several[3:6] == ["--nproc-per-node=8", "--nnodes=2", "--node-rank=1"] and several[-1] == "a.b=c"


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns a list of the commands passed to `os.execv`. They are not run."""
    commands: list[list[str]] = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    return commands


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


def test_ranks_are_started_once_and_only_by_the_command(
    became: list[list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[object] = []
    monkeypatch.setattr("rltrain.cli.train.run", lambda arguments: ran.append(arguments) or 0)
    assert run_script("train", QUICKSTART) == 0 and len(ran) == 1
    monkeypatch.setenv("RANK", "0")
    assert main(["train", *QUICKSTART]) == 0 and len(ran) == 2
    for command in (["train", "--nproc-per-node=4", *QUICKSTART], ["doctor", "--nnodes", "2"]):
        assert main(command) == 2
        told = capsys.readouterr().err
        assert f"`rltrain` only; expected torchrun --nproc-per-node N rltrain {command[0]}" in told
    assert len(ran) == 2 and not became


REFUSED = {
    "a key": (["train", *QUICKSTART, "rollout.sampling.temprature=1"], "nearest valid key is rollout.sampling.temp"),
    "keys together": ([*AT_4, "data.solved_rate={low: 0.6, high: 0.5}"], "data.solved_rate.low: got 0.6"),
    "one rank": (["train", *QUICKSTART], "rank 1 does not exist; expected ranks in 0-0 (1 in this world). Start more"),
    "nodes": (["train", "--nproc-per-node=2", "--nnodes=2", *QUICKSTART, "placement.actor=4"], "expected ranks in 0-3"),
    "every world": (["train", "--nnodes=1:3", *QUICKSTART], "rank 3 does not exist; expected ranks in 0-2"),
    "a layout": ([*AT_4, "actor.parallel.tp=4"], "one copy of its model takes tp 4"),
    "a schedule": ([*AT_4, "schedule.sync_every=2"], "schedule.sync_every: got 2"),
    "a model": ([*AT_4, "model.path=/none"], "/none/config.json does not exist"),
    "a reward": ([*AT_4, "reward.function=no.py:f"], "there is no file 'no.py'"),
    "an agent": (
        [*AT_4, "placement.env=0", "env.agent={command: [python3, no.py]}"],
        "env.agent.command: got ['python3', 'no.py']: there is no file 'no.py'",
    ),
    "no node": (["train", "--nnodes=0", *QUICKSTART], "--nnodes: got 0; expected a number of at least 1"),
    "nodes backwards": (["train", "--nnodes=3:2", *QUICKSTART], "expected 2:3"),
    "ranks": (["train", "--nproc-per-node=four", *QUICKSTART], "got four; expected a number of at least 1, gpu, cpu"),
    "the dry run's": (["train", "--gpu", "h100", *QUICKSTART], "--gpu: only valid with --dry-run"),
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
        (["serve", "--port", "x"], "argument --port: invalid int value: 'x'; see rltrain serve --help"),
        (["report"], "arguments are required: RUN; see rltrain report --help"),
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
    arguments = [*AT_4, "schedule.sync_every=2"]
    program = f"import sys; from rltrain.cli.main import main; print(main({arguments}), 'torch' in sys.modules)"
    assert python("-c", program).stdout == "2 False\n"


def test_the_worlds_are_those_that_torchrun_may_make() -> None:
    def worlds(*arguments: str, **environment: str) -> list[tuple[int, int]]:
        return possible_worlds(torchrun_options(arguments)[0], environment)

    assert worlds() == [(1, 1)]
    assert worlds("--nproc-per-node=8", "--nnodes", "2") == worlds("--nproc-per-node=8", PET_NNODES="2") == [(16, 8)]
    assert worlds("--nproc_per_node=4", "--nnodes=1:3", PET_NNODES="2") == [(12, 4), (8, 4), (4, 4)]
    assert worlds("--nproc-per-node=cpu") == [(os.cpu_count(), os.cpu_count())]
    assert worlds("--nproc-per-node=auto") == worlds("--nproc-per-node=gpu", "--nnodes=2") == []


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_command_says_that_packages_are_missing(name: str) -> None:
    """Runs Python with only its standard library and the working directory."""
    arguments = ["--config", "c.yaml"] if name in ("train", "dry-run") else []
    done = python("-S", "-E", "-m", "rltrain", name, *arguments, check=False)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    if name in ("train", "dry-run", "import-config", "convert", "serve", "report", "make-quickstart", "schema"):
        assert done.stderr.count("\n") == 1 and "No module named" in done.stderr
        assert "lacks torch, megatron-core" in done.stderr and "bash launch/quickstart.sh" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash for its completions")
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
    assert stored == key_reference.text(), "rltrain schema > configs/schema.json"


def test_the_schema_has_every_key_with_its_words() -> None:
    schema = json.loads(key_reference.text())
    named = set(schema["properties"])
    for definition in schema["$defs"].values():
        named |= set(definition.get("properties", {}))
    assert {key.rpartition(".")[2] for key in all_keys()} <= named
    assert "weight sync" in schema["$defs"]["Schedule"]["properties"]["sync_every"]["description"]
    assert schema["$defs"]["Actor"]["properties"]["distributed_optimizer"]["description"], (
        "inherited keys have a description"
    )
    assert schema["additionalProperties"] is False and "steps" in schema["required"]
    assert set(schema["properties"]) == set(Config.model_fields)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_name_the_schema(path: Path) -> None:
    assert "# yaml-language-server: $schema=schema.json\n" in path.read_text()


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
    assert run_script("train", [*CALL, *given, "steps=2"]) == USER_ERROR
    assert set(named.split(", ")) == set(capsys.readouterr().err.split(": ")[2].split(", "))


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("train", [], "arguments are required: --config"),
        ("train", [*CALL, "--steps=5"], "config keys are given without dashes"),
        ("train", [*CALL, "--gpu", "h100"], "--gpu: only valid with --dry-run"),
        ("evaluate", [], "arguments are required: --checkpoint, --config"),
        ("evaluate", ["--checkpoint", ".", "--config", "nope.yaml"], "nope.yaml: the config file does not exist"),
    ],
)
def test_a_rank_that_refuses_its_call_leaves_the_reason_for_torchrun(
    name: str,
    arguments: list[str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Only one rank of a node prints the message."""
    monkeypatch.setattr("rltrain.cli.evaluate.begin_as_rank", lambda: None)
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / f"{rank}.json"))
        try:
            status: object = run_script(name, arguments)
        except SystemExit as ended:
            status = ended.code
        assert status == USER_ERROR
        left = json.loads((tmp_path / f"{rank}.json").read_text())["message"]["message"]
        assert told in left and capsys.readouterr().err == ("" if rank else f"{left}\n")


def test_what_is_not_asked_of_a_dry_run_is_as_its_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[DryRunOptions] = []
    monkeypatch.setattr(description, "describe_job", lambda config, overrides, options: asked.append(options))
    assert run_script("train", [*CALL, "--dry-run"]) == 0
    several = ["--dry-run", "--ranks", "--world-size", "8", "--prompt-tokens", "100", "steps=2"]
    assert run_script("train", [*CALL, *several]) == 0
    assert asked == [DryRunOptions(), DryRunOptions(world_size=8, every_rank=True, prompt_tokens=100.0)]


def test_importing_it_loads_nothing_heavy(tmp_path: Path) -> None:
    """A dry run loads transformers and torch only to encode rows. This config has neither rows nor a checkpoint."""
    program = "import sys, rltrain; assert not {'torch', 'pydantic', 'yaml', 'numpy'} & sys.modules.keys()\n"
    program += "from rltrain import Config, Placement, UserError, dry_run, run\n"
    program += "assert not {'torch', 'transformers', 'megatron'} & sys.modules.keys()\n"
    program += f"told = dry_run(Config.from_file({str(QUICKSTART_CONFIG)!r}), world_size=4)\n"
    program += "assert 'torch' not in sys.modules and 'no deadlock' in told"
    done = python("-c", program, folder=tmp_path, check=False)
    assert done.returncode == 0, done.stderr


def test_its_names_are_those_of_the_page() -> None:
    page = (REPOSITORY / "docs/python.md").read_text()
    names = {line.split("`")[1].split("(")[0] for line in page.splitlines() if line.startswith("| `")}
    of_placement = (f"Placement.{name}" for name in ("of", "roles", "ranks", "hosts", "idle", "mode"))
    assert names == {*rltrain.__all__, "Config.from_file", *of_placement}
    assert all(getattr(rltrain, name) is not None for name in rltrain.__all__)
    assert (REPOSITORY / "examples/own_functions.py").read_text() in page


def test_a_config_made_in_python_is_that_of_the_file() -> None:
    expected = load_config(QUICKSTART_CONFIG, ["steps=3", "placement.actor=0"]).model_dump()
    made = PublicConfig.from_file(QUICKSTART_CONFIG, {"steps": 3, "placement.actor": 0})
    of_both = PublicConfig.from_file(str(QUICKSTART_CONFIG), "steps=3", {"placement.actor": 0})
    assert made.model_dump() == of_both.model_dump() == expected
    assert PublicConfig(**made.model_dump()).model_dump() == expected


def test_a_mistake_is_a_user_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match="Config: .*stps: unknown key"):
        PublicConfig(**{**PublicConfig.from_file(QUICKSTART_CONFIG).model_dump(), "stps": 3})
    with pytest.raises(ConfigError, match='override of actor.parallel.tp: actor.parallel.tp: got "two"'):
        PublicConfig.from_file(QUICKSTART_CONFIG, {"actor.parallel.tp": "two"})


def test_functions_and_classes_are_found_again_by_the_names_that_they_get() -> None:
    function = user_rewards.__dict__[next(name for name in vars(user_rewards) if callable(vars(user_rewards)[name]))]
    given = {"reward": {"function": math.sqrt}, "output_dir": Path("runs/x")}
    config = PublicConfig.from_file(QUICKSTART_CONFIG, given)
    assert (config.reward.function, config.output_dir) == ("math:sqrt", "runs/x")
    of_parts = PublicConfig.from_file(QUICKSTART_CONFIG, {"reward": {"functions": [{"function": function}]}})
    assert locate(of_parts.reward.functions[0].function, "reward") is function


def test_a_function_of_a_script_has_the_file_in_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import beside\nfrom rltrain.cli.python_interface import name_of\n"
        "def mine(prompt, response, label): return 1.0\n"
        "print(name_of(mine, 'reward'), name_of(beside.other, 'reward'))\n"
    )
    (tmp_path / "beside.py").write_text("def other(): ...\n")
    assert python(script).stdout.split() == [f"{script}:mine", f"{tmp_path}/beside.py:other"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda prompt: 1.0, "a lambda has no name"),
        (functools.partial(math.pow, 2), "has no name"),
        ([].append, "has no name|it is not"),
        (json.JSONEncoder.encode, "it is not JSONEncoder.encode at the top level"),
    ],
)
def test_what_other_processes_could_not_find_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function: got .*({reason}).*; expected a function"):
        PublicConfig.from_file(QUICKSTART_CONFIG, {"reward": {"function": function}})


def test_a_function_inside_another_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(ConfigError, match="env.function: got .*inside another function"):
        PublicConfig.from_file(QUICKSTART_CONFIG, {"env.function": inner})


def test_the_placement_is_asked_by_role() -> None:
    placement = Placement.of(PublicConfig.from_file(QUICKSTART_CONFIG), world_size=5)
    assert placement.ranks("actor") == (0, 1) and placement.hosts(2) == ("rollout", "reward")
    assert (placement.mode("actor", "rollout"), placement.idle) == ("disaggregated", (4,))
    with pytest.raises(PlacementError, match="critic: the role is not placed"):
        placement.ranks("critic")


def test_a_dry_run_refuses_what_the_job_would() -> None:
    with pytest.raises(UserError, match="rank 3 does not exist"):
        dry_run(PublicConfig.from_file(QUICKSTART_CONFIG), world_size=3)


ONE_RANK = {
    "placement": {"actor, reference, rollout, reward": 0},
    "model.path": REPOSITORY / "tests/warmed_up",
    "actor.parallel.tp": 1,
}


@pytest.mark.parametrize("status", [0, 2, 130])
def test_run_without_torchrun_starts_one_rank_and_ends_with_its_status(
    status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    config = PublicConfig.from_file(QUICKSTART_CONFIG, ONE_RANK)
    started: list[PublicConfig] = []

    class Started:
        """A job that gets Ctrl-C and ends afterwards."""

        def __init__(self, command: list[str], env: dict[str, str]) -> None:
            assert command[1:3] == ["-m", "rltrain.cli.ranks"] and "--nproc-per-node=1" in command
            assert env["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
            started.append(read_config(command[-1]))
            self.waits = iter((KeyboardInterrupt, status))

        def wait(self) -> int:
            if (found := next(self.waits)) is KeyboardInterrupt:
                raise KeyboardInterrupt
            return found  # type: ignore[return-value]

    monkeypatch.setattr(subprocess, "Popen", Started)
    if status:
        with pytest.raises(SystemExit) as ended:
            run(config)
        assert ended.value.code == status
    else:
        run(lambda: config)
    assert started == [config] and started[0].model_fields_set == config.model_fields_set


def test_run_without_torchrun_says_how_to_start_more_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match=r"rank 1 does not exist.*start more with torchrun --nproc-per-node N"):
        run(PublicConfig.from_file(QUICKSTART_CONFIG))


def test_run_is_refused_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTRAIN_RUN", "1")
    with pytest.raises(UserError, match="if __name__ == "):
        run(PublicConfig.from_file(QUICKSTART_CONFIG))


CONFIG = """\
steps: 10
placement: {'actor, reference, rollout, reward': 0}
model: {path: models/tiny}
data: {train: {path: train.jsonl}}
"""


def test_several_ranks_start_without_torchruns_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torchrun.logger, "warning", lambda message, *further: warned.append(message))
    monkeypatch.setattr(torchrun, "run", torchrun.config_from_args)
    assert ranks_main(["--nproc-per-node=2", "-m", RANK_MODULE, "train"]) == 0
    assert not warned and os.environ["OMP_NUM_THREADS"] == "1"


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns a function that runs a job with a failing torchrun. Its result is the exit status and the last line."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")

    def run(error: Exception, name: str = "train") -> tuple[int, str]:
        def end(arguments: Any) -> None:
            raise error

        monkeypatch.setattr(torchrun, "run", end)
        of_rank = ["--config", f"{tmp_path}/config.yaml", f"output_dir={tmp_path}/run"]
        status = ranks_main(["--standalone", "-m", RANK_MODULE, name, *of_rank])
        return status, capsys.readouterr().err.splitlines()[-1]

    return run


def failure(status: int, message: str = "", folder: Path | None = None, time_s: int = 1) -> ProcessFailure:
    """Returns the failure of a rank with `message` in its error file."""
    if folder is None:
        return ProcessFailure(0, 1234, status, "nowhere")
    content = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(time_s)}}
    (folder / "error.json").write_text(json.dumps({"message": content}))
    return ProcessFailure(0, 1234, status, str(folder / "error.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_status_and_the_way_on(ends: Any, tmp_path: Path, number: signal.Signals) -> None:
    stopped = SignalException("Process 1 got signal", number)
    way = "the same command starts at step 0, because no checkpoint was saved"
    assert ends(stopped) == (128 + number, f"rltrain train: stopped by {number.name}; {way}")
    (tmp_path / "run/checkpoints/step_0000004").mkdir(parents=True)
    way = "the same command continues from step 4"
    assert ends(stopped) == (128 + number, f"rltrain train: stopped by {number.name}; {way}")
    assert ends(stopped, "evaluate") == (128 + number, f"rltrain evaluate: stopped by {number.name}")


def test_the_way_on_is_that_of_the_config(tmp_path: Path) -> None:
    def way(**checkpoint: object) -> str:
        made = yaml.safe_load(CONFIG) | {"output_dir": str(tmp_path), "checkpoint": checkpoint}
        return way_on(Config.model_validate(made))

    assert way(memory={}).startswith("the same command continues from a later checkpoint in the nodes' memory")
    assert way(memory={}).endswith("else starts at step 0, because no checkpoint was saved")
    assert way(resume="none") == "the same command starts at step 0, because no checkpoint was saved"
    (tmp_path / "checkpoints/step_0000012").mkdir(parents=True)
    assert way(resume="none") == "the same command with checkpoint.resume=auto continues from step 12"


def test_the_last_line_is_the_message_of_the_rank_that_failed(ends: Any, tmp_path: Path) -> None:
    failures = {0: failure(-signal.SIGKILL), 1: failure(2, "steps: got many\n  on rank 1", tmp_path, time_s=2**32)}
    assert ends(ChildFailedError("train", failures)) == (2, "rltrain train: steps: got many on rank 1")
    assert ends(ChildFailedError("train", {1: failure(1, "rank 1 failed", tmp_path)}))[0] == 1


def test_a_rank_that_was_killed_or_left_no_message_is_named(ends: Any) -> None:
    status, told = ends(ChildFailedError("train", {3: failure(-signal.SIGKILL)}))
    assert status == 1 and told.startswith("rltrain train: rank 3 was killed by SIGKILL")
    assert told.endswith("the same command starts at step 0, because no checkpoint was saved")
    status, told = ends(ChildFailedError("train", {3: failure(7)}))
    assert told == "rltrain train: rank 3 ended with exit status 7 without a message; its output is above"
    assert status == 1
