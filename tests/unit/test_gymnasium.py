"""Gymnasium's environments are played in texts: real ones, one by one and vectorised."""

import re
from typing import Any

import pytest

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.gymnasium_adapter import default_parse, observation_text, without_colours
from rltrain.environments.interface import Action, Environment, StepResult
from rltrain.environments.worker import load_environment
from rltrain.errors import ConfigError

DOWN, RIGHT = 1, 2
WAY_OVER_THE_LAKE = (DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT)


def environment(function: str, **options: Any) -> Environment:
    return load_environment(EnvironmentFactory(function, options))()


def step(played: Environment, *texts: str | None) -> list[StepResult | None]:
    return list(played.step([None if text is None else Action(text) for text in texts]))


def one(played: Environment, text: str) -> StepResult:
    (result,) = step(played, text)
    assert result is not None
    return result


def test_frozen_lake_is_won_by_numbers() -> None:
    lake = environment("gymnasium:FrozenLake-v1", make={"is_slippery": False})
    (first,) = lake.reset([{}], [0])
    assert first == "[S]FFF\nFHFH\nFFFH\nHFFG\nAnswer with a number from 0 to 3."
    results = [one(lake, f"I take {action}.") for action in WAY_OVER_THE_LAKE]
    assert [result.done for result in results] == [False] * 5 + [True]
    assert results[0].observation == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert sum(result.reward for result in results) == 1.0
    lake.close()


def test_frozen_lake_is_lost_by_names() -> None:
    names = ["left", "down", "right", "up"]
    lake = environment("gymnasium:FrozenLake-v1", make={"is_slippery": False}, action_names=names)
    (first,) = lake.reset([{"prompt": "You are on a lake."}], [0])
    assert str(first).startswith("You are on a lake.\n[S]FFF")
    assert not one(lake, "not left but Down").done
    lost = one(lake, "right")
    assert (lost.done, lost.reward) == (True, 0.0)


def test_what_is_no_action_is_asked_for_again_or_ends_the_episode() -> None:
    lake = environment("gymnasium:FrozenLake-v1")
    lake.reset([{}], [0])
    for text in ("nowhere", "7", "-1", "1.5"):
        assert one(lake, text) == StepResult("Answer with a number from 0 to 3.", info={"invalid_actions": 1})
    strict = environment("gymnasium:FrozenLake-v1", on_invalid="end")
    strict.reset([{}], [0])
    assert one(strict, "nowhere").done


@pytest.mark.parametrize("vectorization", ["sync", "vector_entry_point"])
def test_a_batch_is_one_vector_environment(vectorization: str) -> None:
    poles = environment("gymnasium:CartPole-v1", vectorization=vectorization)
    seeds_each = vectorization == "sync"
    first = poles.reset([{}, {}, {"seed": 1}], [1, 2, 3])
    numbers = [list(map(float, re.findall(r"-?\d[\d.e-]*", str(text).splitlines()[0]))) for text in first]
    assert [len(state) for state in numbers] == [4, 4, 4]
    assert (first[0] == first[2]) == seeds_each and first[0] != first[1]
    results = step(poles, "0", "pass", "0")
    assert (results[0] == results[2]) == seeds_each and results[0] is not None and results[0].reward == 1.0
    assert results[1] is not None and results[1].done, "a vector environment cannot wait for one of its episodes"
    for _ in range(30):
        results = step(poles, "0", None, "1")
        if results[0] is not None and results[0].done:
            break
    assert results[1] is None and results[2] is not None and not results[2].done, "pushed to one side it falls"
    again = poles.reset([{}] * 3, [1, 2, 1])
    assert again == first
    assert len(poles.reset([{}], [1])) == 1, "the last batch may be smaller"
    poles.close()


def test_numbers_are_actions_where_a_space_has_them() -> None:
    pendulum = environment("gymnasium:Pendulum-v1")
    (first,) = pendulum.reset([{}], [3])
    assert str(first).endswith("\nAnswer with 1 numbers.")
    assert one(pendulum, "I push with -1.5").observation != first
    assert one(pendulum, "9").info == {"invalid_actions": 1}, "beyond the space's bounds"


def shout(observation: Any) -> str:
    return f"AT {observation}!"


def read_backwards(text: str) -> int | None:
    return int(text[::-1]) if text.isdigit() else None


class Corridor:
    """As gymnasium.Env has it, without gymnasium."""

    metadata = {"render_modes": []}

    def __init__(self, length: int = 2) -> None:
        self.length = length
        self.action_space = type("Choice", (), {"n": 11})()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        self.place = (options or {}).get("place", 0)
        return self.place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.place += action
        return self.place, 0.5, self.place >= self.length, False, {"place": self.place, "what": object()}

    def close(self) -> None: ...


def test_a_users_class_with_functions_of_the_user() -> None:
    names = {"render": f"{__name__}:shout", "parse": f"{__name__}:read_backwards"}
    corridor = environment(f"{__name__}:Corridor", make={"length": 12}, **names)
    (first,) = corridor.reset([{"prompt": [{"role": "user", "content": "Go."}], "reset_options": {"place": 1}}], [0])
    assert first == [{"role": "user", "content": "Go."}, {"role": "user", "content": "AT 1!"}]
    assert one(corridor, "01") == StepResult("AT 11!", 0.5, False, {"invalid_actions": 0, "place": 11})
    assert one(corridor, "1").done


@pytest.mark.parametrize(
    ("function", "options", "expected"),
    [
        ("gymnasium:NoSuchThing-v1", {}, "env.function: 'gymnasium:NoSuchThing-v1': Environment `NoSuchThing`"),
        ("gymnasium:CartPole-v1", {"colour": 1}, "env.options: colour unknown; expected one of make, vectorization"),
        ("gymnasium:CartPole-v1", {"parse": "nowhere:f"}, "env.options.parse: 'nowhere:f': cannot import nowhere"),
    ],
)
def test_refusals(function: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}"):
        environment(function, **options)


def test_texts_of_observations() -> None:
    import numpy as np

    assert observation_text(np.float32(0.12345678)) == "0.1235"
    assert observation_text({"a": np.arange(3), "b": (1, np.array([0.5]))}) == "a: 0, 1, 2\nb: 1, 0.5"
    assert observation_text(np.eye(2)) == "1, 0\n0, 1"
    assert without_colours("a\x1b[41mb\x1b[0mc\n") == "a[b]c"
    parse = default_parse(type("Choice", (), {"n": 3, "start": 5})())
    assert [parse(text) for text in ("5", "from 6 to 7", "8", "")] == [5, 7, None, None]
