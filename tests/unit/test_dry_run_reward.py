"""The dry run says which functions the reward is and where they stand, and runs none of their lines."""

import re
from pathlib import Path

import pytest

from rltrain.config.loader import load_config
from rltrain.config.schema import Config
from rltrain.errors import ConfigError
from rltrain.planning.rows_and_rewards import describe_environment, describe_reward

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "quickstart.yaml"


def config(*overrides: str) -> Config:
    return load_config(SHIPPED, overrides)


def test_a_reward_that_is_built_in() -> None:
    assert describe_reward(config()) == ["reward.function: exact_match, built in"]


def test_a_function_is_found_in_its_file_which_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "raise SystemExit('run')\n"
        "from elsewhere import given\n"
        "if True:\n"
        "    def score(prompt, response, label):\n"
        "        within = 1\n"
        "also = score\n"
    )
    for name, line in (("score", 4), ("given", 2), ("also", 6)):
        assert describe_reward(config(f"reward.function=mine.py:{name}")) == [
            f"reward.function: mine.py:{name}, line {line}"
        ]
    with pytest.raises(ConfigError, match=r"reward\.function: 'mine.py:within': mine.py has no function 'within'"):
        describe_reward(config("reward.function=mine.py:within"))
    several = "reward={functions: [{function: math}, {function: 'mine.py:scor', weight: 2}]}"
    with pytest.raises(ConfigError, match=r"reward\.functions\.1\.function: 'mine.py:scor': mine.py has no function"):
        describe_reward(config(several))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.py:score", "'none.py:score': there is no file 'none.py'"),
        ("mine.py", "'mine.py' names no function of the file; expected mine.py:FUNCTION"),
        ("exact_mach", "'exact_mach' is unknown; expected exact_match, math, code, environment, an URL, "),
    ],
)
def test_what_the_job_would_refuse_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(response): return 0\n")
    with pytest.raises(ConfigError, match=re.escape(f"reward.function: {message}")):
        describe_reward(config(f"reward.function={name}"))


def test_a_file_that_is_no_python_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match=r"mine\.py is no Python that can be read"):
        describe_reward(config("reward.function=mine.py:score"))


@pytest.mark.parametrize(
    "name, where",
    [("http://127.0.0.1:1/score", "asked over HTTP"), ("my.module:score", "imported when the job starts")],
)
def test_what_only_the_job_reaches(name: str, where: str) -> None:
    assert describe_reward(config(f"reward.function={name}")) == [f"reward.function: {name}, {where}"]


def test_what_answers_the_model_is_found_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("class Task:\n    pass\n")
    script = tmp_path / "mine.py"
    for given, said in (
        ("{function: 'mine.py:Task'}", "env.function: mine.py:Task, line 1"),
        ("{function: calculator}", "env.function: calculator"),
        ("{agent: {function: 'mine.py:Task'}}", "env.agent.function: mine.py:Task, line 1"),
        ("{agent: {command: [python3, mine.py]}}", f"env.agent.command: python3 {script}"),
    ):
        assert describe_environment(config(f"env={given}")) == [said]
    for given, said in (
        ("{function: 'mine.py:Tusk'}", "env.function: 'mine.py:Tusk': mine.py has no function 'Tusk'"),
        ("{agent: {function: 'no.py:Task'}}", "env.agent.function: 'no.py:Task': there is no file 'no.py'"),
        ("{agent: {command: [python3, no.py]}}", "env.agent.command: got ['python3', 'no.py']: there is no file"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            describe_environment(config(f"env={given}"))
