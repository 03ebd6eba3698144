"""Reward functions are found in files, in modules and by dots."""

import sys
from pathlib import Path

import pytest

from rltrain.config import schema
from rltrain.errors import ConfigError
from rltrain.rewards.answers import Scorable
from rltrain.rewards.functions import load_reward
from tests.unit.one_function import OneFunction

SOURCE = """\
from dataclasses import dataclass
import beside_the_reward

@dataclass
class Weight:
    value: float = beside_the_reward.WEIGHT

def score(prompt, response, label):
    return Weight().value * len(response)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file math.py, a name that many modules have, and one that it imports."""
    (tmp_path / "math.py").write_text(SOURCE)
    (tmp_path / "beside_the_reward.py").write_text("WEIGHT = 2.0\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_file_is_found_by_its_path_with_the_modules_beside_it(folder: Path) -> None:
    function = load_reward(schema.Reward(function=f"{folder}/math.py:score"))
    assert function.place == f"'{folder}/math.py:score' ({folder}/math.py, line 8)"
    with OneFunction(function, timeout_s=60, num_workers=1) as scorer:
        assert scorer.score([Scorable("p", "abc", "l")]).rewards == [6.0]


def test_a_file_may_be_named_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_reward(schema.Reward(function="math.py:score")).function("p", "abc", "l") == 6.0
    assert load_reward(schema.Reward(function="./math.py:score")).function("p", "a", "l") == 2.0


@pytest.mark.parametrize("name", ["tests.unit.user_rewards:whole", "tests.unit.user_rewards.whole"])
def test_a_function_of_a_module(name: str) -> None:
    assert load_reward(schema.Reward(function=name)).function("a", "a|b", "b") == 1.0


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        ("def score(prompt, response, label): ...", "missing", "reward.py has no function 'missing'"),
        ("1 / 0", "score", "reward.py (ZeroDivisionError: division by zero)"),
        ("import sys; sys.exit(3)", "score", "reward.py (SystemExit: 3)"),
    ],
)
def test_what_is_wrong_with_a_file_is_told(tmp_path: Path, source: str, function: str, message: str) -> None:
    (tmp_path / "reward.py").write_text(source)
    with pytest.raises(ConfigError) as refusal:
        load_reward(schema.Reward(function=f"{tmp_path}/reward.py:{function}"))
    assert message in str(refusal.value) and str(refusal.value).startswith("reward.function: ")
