"""The worker of environments answers lines of JSON: results as JSON, and errors that cost one environment."""

import asyncio
import json
import os
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.encoding import BadAnswer, encode_action, encode_observation, encode_results, to_line
from rltrain.environments.interface import Action, StepResult, TokenIds
from rltrain.environments.worker import CallServer, WorkerEnvironments, load_environment

MODULE = "tests.support.user_environments"
Call = dict[str, Any]


def environments(name: str, **options: Any) -> WorkerEnvironments:
    return WorkerEnvironments(load_environment(EnvironmentFactory(f"{MODULE}:{name}", options)))


def lines(calls: Sequence[Call]) -> list[bytes]:
    return [to_line({"call": number, "environment": 0, **call}) for number, call in enumerate(calls)]


def answers(served: WorkerEnvironments, *calls: Call, after: bytes = b"") -> list[Call]:
    """Returns the answers to the calls, which are numbered from 0."""
    written: list[bytes] = []
    CallServer(served, written.append).serve([*lines(calls), after] if after else lines(calls))
    found = [json.loads(line) for line in written]
    assert [one["call"] for one in found] == [*range(len(found))]
    assert all(one["seconds"] >= 0 for one in found)
    return found


def step(*texts: str | None) -> Call:
    return {"do": "step", "actions": [encode_action(None if text is None else Action(text)) for text in texts]}


RESET: Call = {"do": "reset", "rows": [{"name": "a"}, {"name": "b"}], "seeds": [1, 2]}


def test_calls_are_answered_in_order() -> None:
    found = answers(environments("Remembering"), RESET, step("xy", None), {"do": "get_state"})
    assert found[0]["result"] == [{"observation": "hello a 1 of 2"}, {"observation": "hello b 2 of 2"}]
    of_first, of_second = found[1]["result"]
    assert (of_first["observation"], of_first["reward"], of_first["done"]) == ("xy 1", 2.0, False)
    assert of_first["info"] == {"turns": 1} and of_second is None
    assert found[2]["result"] == [1, 0]


def test_half_a_line_is_the_end() -> None:
    assert len(answers(environments("Counting"), RESET, after=b'{"call": 1, "do": "clo')) == 1


def test_a_function_gets_the_options() -> None:
    (found,) = answers(environments("counting_of", word="hi"), RESET)
    assert found["result"][0] == {"observation": "hi a 1 of 2"}


def test_states_continue_in_another_environment() -> None:
    served = environments("Remembering")
    load: Call = {"do": "load_state", "state": [4], "environment": 7}
    loaded, stepped = answers(served, load, step("a") | {"environment": 7})
    assert loaded["result"] is None and stepped["result"][0]["info"] == {"turns": 5}
    assert set(served.built) == {0, 7}
    (closed,) = answers(served, {"do": "close"})
    assert closed["result"] is None and not served.built


def test_episodes_of_the_calculator_are_saved_one_by_one() -> None:
    served = WorkerEnvironments(load_environment(EnvironmentFactory("calculator")))
    row = {"prompt": "2 + 3?", "label": "5"}
    opened: Call = {"do": "reset", "rows": [row, {**row, "label": "6"}], "seeds": [0, 0]}
    _, stepped, saved = answers(served, opened, step("<calc>2 + 3</calc>", None), {"do": "get_state"})
    assert "5" in stepped["result"][0]["observation"] and not stepped["result"][0]["done"]
    _, ended = answers(
        served, {"do": "load_state", "state": saved["result"], "environment": 1}, {**step("5", "5"), "environment": 1}
    )
    assert [(one["done"], one["reward"]) for one in ended["result"]] == [(True, 1.0), (True, 0.0)]
    assert [one["info"]["calls"] for one in ended["result"]] == [1, 0]


def test_an_error_costs_its_environment_alone() -> None:
    served = environments("Remembering")
    kept = served.built[0]
    failed, unknown = answers(served, {"do": "load_state", "state": [-1], "environment": 1}, {"do": "dance"})
    assert failed["error"].startswith("ValueError: a broken state (") and "load_state" in failed["traceback"]
    assert unknown["error"].startswith("ValueError: unknown call 'dance'")
    assert 1 not in served.built
    (found,) = answers(served, RESET)
    assert found["result"] and served.built[0] is not kept, "the second error was of environment 0"


def test_all_environments_leave_the_device() -> None:
    served = environments("Heavy")
    assert served.describe() == {"concurrent": False, "saved": False, "offloaded": True, "tools": []}
    opened: Call = {"do": "reset", "rows": [{}], "seeds": [0]}
    found = answers(served, opened, {"do": "offload"}, opened, {"do": "onload"}, opened)
    assert [one["result"] for one in found[::2]] == [[{"observation": where}] for where in ("device", "host", "device")]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("exits", "SystemExit: gone ("),
        ("returns nan", "returned the reward nan; expected a finite number from -3.4e+38"),
        ("returns half a character", "returned an observation with '\\ud83d', half of a surrogate pair"),
        ("returns nothing", "step returned NoneType None for an unfinished episode; expected a StepResult"),
        ("returns an odd observation", "returned the observation int 5; expected a text, chat messages or TokenIds"),
    ],
)
def test_wrong_answers_are_named(order: str, expected: str) -> None:
    _, found = answers(environments("Misbehaving"), {"do": "reset", "rows": [{}], "seeds": [0]}, step(order))
    assert found["error"].startswith(expected) and "result" not in found
    assert bool(found["traceback"]) == (order == "exits"), "a wrong answer has no place"


def test_a_list_for_each_episode_is_expected() -> None:
    with pytest.raises(BadAnswer, match="step returned list .*; expected a list with a StepResult for each of 2 epi"):
        encode_results([StepResult("")], [True, True])
    with pytest.raises(BadAnswer, match="returned the reward str 'much'; expected a number"):
        encode_results([StepResult("", reward="much")], [True])  # type: ignore[arg-type]


def test_values_become_json() -> None:
    info = {"array": np.arange(3), "set": {1}, "mapping": MappingProxyType({"a": 1}), "bytes": b"\0", "class": Action}
    line = to_line({"info": info, "number": np.float32(0.5)})
    assert json.loads(line) == {
        "info": {"array": [0, 1, 2], "set": [1], "mapping": {"a": 1}, "bytes": "b'\\x00'", "class": str(Action)},
        "number": 0.5,
    }
    with pytest.raises(TypeError, match="not JSON serializable"):
        to_line({"state": np.arange(3)}, exactly=True)
    asked = TokenIds((np.int64(5),), {"max_new_tokens": 3})  # type: ignore[arg-type]
    assert to_line(encode_observation(asked)) == b'{"ids": [5], "sampling": {"max_new_tokens": 3}}\n'


def test_coroutines_run_together_within_their_limits() -> None:
    served = environments("Awaiting")
    assert served.is_concurrent
    reading, writing = os.pipe()
    found: list[Call] = []

    def write(line: bytes) -> None:
        found.append(json.loads(line))
        if len(found) == 4:  # the end of requests ends the worker
            os.close(writing)

    opened: Call = {"do": "reset", "rows": [{}], "seeds": [3]}
    calls = [step("hang"), step("raise"), step("fine")]
    calls = [opened, *({**call, "environment": number} for number, call in enumerate(calls))]
    for line in lines([{"limit_s": 0.05 if call is calls[1] else 60.0, **call} for call in calls]):
        os.write(writing, line)
    with open(reading, "rb") as requests:
        asyncio.run(CallServer(served, write).serve_concurrently(requests))
    by_call = {one["call"]: one for one in found}
    assert by_call[0]["result"] == [{"observation": {"ids": [1, 2, 3], "sampling": {"max_new_tokens": 3}}}]
    assert by_call[1]["timeout"] is True
    assert by_call[2]["error"].startswith("KeyError: 'no such thing'")
    assert by_call[3]["result"][0]["done"] is True
