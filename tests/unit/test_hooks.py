"""Tests of the user functions on the page of hooks, called like in a job."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import tensor

from rltrain.algorithms.policy_loss import PACKED, own_policy_loss
from rltrain.algorithms.reinforcement import OwnAdvantages, OwnFunction
from rltrain.config.loader import Source, validated
from rltrain.config.schema import Config
from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.host import EnvironmentHost
from rltrain.environments.interface import Action
from rltrain.rewards.answers import Scorable
from rltrain.rewards.functions import call, load_reward
from rltrain.rewards.group_filter import UNNAMED, load_group_filter
from rltrain.rewards.scorer import Scores, verdict_parser
from tests.unit.test_documentation import DOCS, configs_of, folder, of_language, read, write_files  # noqa: F401

PAGE = "docs/hooks.md"
SAMPLE = Scorable("1+1=", "2", "2")


def reward(config: Config) -> None:
    (answer,) = call(load_reward(config.reward), [SAMPLE])
    assert answer.score == 0.999 and answer.metrics == {"right": 1.0}


def verdict(config: Config) -> None:
    assert [*map(verdict_parser(config.judge), ("Yes", "There is no sum"))] == [1.0, 0.0]


def groups(config: Config) -> None:
    assert config.batch.dynamic_sampling is not None
    dropped_for = load_group_filter(config.batch.dynamic_sampling)
    found = [dropped_for([SAMPLE, SAMPLE], Scores(rewards)) for rewards in ([0.0, 0.0], [1.0, 1.0], [1.0, 0.0])]
    assert found == ["nobody_solves_it", UNNAMED, None]


def game(config: Config) -> None:
    assert config.env.function is not None
    with EnvironmentHost(EnvironmentFactory(config.env.function), num_workers=1) as host:
        host.begin(0, {"level": 1}, seed=0)
        assert host.wait(120) and host.events()[0].observation == "Say 'next' 1 times, once a turn."
        host.act(0, Action("next"))
        assert host.wait(120)
        (event,) = host.events()
    assert (event.reward, event.done, event.failure) == (1.0, True, None)


def advantages(config: Config) -> None:
    given: dict[str, Any] = {"rewards": tensor([1.0, 0.0, 3.0]), "groups": tensor([0, 0, 1])}
    assert OwnAdvantages(config).function.call(given).tolist() == [0.5, -0.5, 0.0]


def loss(config: Config) -> None:
    assert own_policy_loss(config.loss)
    function = OwnFunction.of(config.loss.function or "", "loss.function")
    given = dict(zip(PACKED, tensor([[0.0, 3.0], [0.0, 0.0], [1.0, 1.0]]), strict=True))
    assert function.call(given).tolist() == [-1.0, -2.0]


CALLED: tuple[Callable[[Config], None], ...] = (reward, verdict, groups, game, advantages, loss)
"""Each has the name of its file on the page. The agent is an episode in test_documentation.py."""


@pytest.mark.parametrize("check", CALLED)
def test_a_hook_of_the_page_does_what_it_says(check: Callable[[Config], None], folder: Path) -> None:  # noqa: F811
    write_files(PAGE, folder)
    (example,) = (one for one in of_language("yaml") if f"hooks/{check.__name__}.py" in one.text)
    check(validated(Source(next(configs_of(example, read)), example.title)))


def test_the_page_has_every_key_that_names_a_function() -> None:
    reference = (DOCS / "config.md").read_text().partition("\n## Names elsewhere")[0]
    keys = re.findall(r"^\| `([\w.\[\]]+)` \|.*module:", reference, re.MULTILINE)
    assert len(keys) >= 8 and not [key for key in keys if f"`{key}`" not in (DOCS / "hooks.md").read_text()]
    shown = {Path(one.file).stem for one in of_language("python") if one.page == PAGE and one.file}
    assert shown == {*(check.__name__ for check in CALLED), "agent"}
