"""`from rltrain import Config, Placement, dry_run, run`: what it loads, what it takes and what it refuses."""

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rltrain
from rltrain import Config, Placement, UserError, dry_run, run
from rltrain.cli.python_interface import read_config
from rltrain.config.loader import load_config
from rltrain.errors import ConfigError, PlacementError
from rltrain.rewards.locating import locate
from tests.unit import user_rewards

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = REPOSITORY / "configs/quickstart.yaml"


def test_importing_it_loads_nothing_heavy(tmp_path: Path) -> None:
    """A dry run loads transformers, and with it torch, only to encode rows: here are neither rows nor a checkpoint."""
    program = "import sys, rltrain; assert not {'torch', 'pydantic', 'yaml', 'numpy'} & sys.modules.keys()\n"
    program += "from rltrain import Config, Placement, UserError, dry_run, run\n"
    program += "assert not {'torch', 'transformers', 'megatron'} & sys.modules.keys()\n"
    program += f"told = dry_run(Config.from_file({str(QUICKSTART)!r}), world_size=4)\n"
    program += "assert 'torch' not in sys.modules and 'no deadlock' in told"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_its_names_are_those_of_the_page() -> None:
    page = (REPOSITORY / "docs/python.md").read_text()
    assert {line.split("`")[1].split("(")[0] for line in page.splitlines() if line.startswith("| `")} == {
        *rltrain.__all__,
        *(f"Config.{name}" for name in ("from_file",)),
        *(f"Placement.{name}" for name in ("of", "roles", "ranks", "hosts", "idle", "mode")),
    }
    assert all(getattr(rltrain, name) is not None for name in rltrain.__all__)
    assert (REPOSITORY / "examples/own_functions.py").read_text() in page


def test_a_config_made_in_python_is_that_of_the_file() -> None:
    steps, made = load_config(QUICKSTART, ["steps=3", "placement.actor=0"]), {"steps": 3, "placement.actor": 0}
    assert Config.from_file(QUICKSTART, made).model_dump() == steps.model_dump()
    assert Config.from_file(str(QUICKSTART), "steps=3", {"placement.actor": 0}).model_dump() == steps.model_dump()
    assert Config(**Config.from_file(QUICKSTART, made).model_dump()).model_dump() == steps.model_dump()


def test_a_mistake_is_a_user_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match="Config: .*stps: unknown key"):
        Config(**{**Config.from_file(QUICKSTART).model_dump(), "stps": 3})
    with pytest.raises(ConfigError, match='override of actor.parallel.tp: actor.parallel.tp: got "two"'):
        Config.from_file(QUICKSTART, {"actor.parallel.tp": "two"})


def test_functions_and_classes_are_found_again_by_the_names_that_they_get() -> None:
    function = user_rewards.__dict__[next(name for name in vars(user_rewards) if callable(vars(user_rewards)[name]))]
    config = Config.from_file(QUICKSTART, {"reward": {"function": math.sqrt}, "output_dir": Path("runs/x")})
    assert (config.reward.function, config.output_dir) == ("math:sqrt", "runs/x")
    parts = Config.from_file(QUICKSTART, {"reward": {"functions": [{"function": function}]}}).reward.functions
    assert parts and locate(parts[0].function, "reward") is function


def test_a_function_of_a_script_has_the_file_in_its_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import beside\nfrom rltrain.cli.python_interface import name_of\n"
        "def mine(prompt, response, label): return 1.0\n"
        "print(name_of(mine, 'reward'), name_of(beside.other, 'reward'))\n"
    )
    (tmp_path / "beside.py").write_text("def other(): ...\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == [f"{script}:mine", f"{tmp_path}/beside.py:other"]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda prompt: 1.0, "a lambda has no name"),
        (functools.partial(math.pow, 2), "without a name"),
        ([].append, "without a name|not this object"),
        (json.JSONEncoder.encode, "has not this object under the name JSONEncoder.encode"),
    ],
)
def test_what_other_processes_could_not_find_is_refused(function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"reward.function: got .*({reason}).*; expected a function"):
        Config.from_file(QUICKSTART, {"reward": {"function": function}})


def test_a_function_inside_another_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(ConfigError, match="env.function: got .*inside another function"):
        Config.from_file(QUICKSTART, {"env.function": inner})


def test_the_placement_is_asked_by_role() -> None:
    placement = Placement.of(Config.from_file(QUICKSTART), world_size=5)
    assert placement.ranks("actor") == (0, 1) and placement.hosts(2) == ("rollout", "reward")
    assert (placement.mode("actor", "rollout"), placement.idle) == ("disaggregated", (4,))
    with pytest.raises(PlacementError, match="critic: the role is not placed"):
        placement.ranks("critic")


def test_a_dry_run_refuses_what_the_job_would() -> None:
    with pytest.raises(UserError, match="rank 3 does not exist"):
        dry_run(Config.from_file(QUICKSTART), world_size=3)


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
    config = Config.from_file(QUICKSTART, ONE_RANK)
    started: list[Config] = []

    class Started:
        """A job that gets Ctrl-C, and ends after that."""

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
    with pytest.raises(UserError, match=r"rank 1 does not exist.*more are started by torchrun --nproc-per-node N"):
        run(Config.from_file(QUICKSTART))


def test_run_is_refused_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLTRAIN_RUN", "1")
    with pytest.raises(UserError, match="if __name__ == "):
        run(Config.from_file(QUICKSTART))
