"""The environments of rltrain: a calculator, a Python interpreter, a game."""

import ast
import json
import random
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.calculator import MAX_BITS, Calculator, NoValue, evaluate, shown
from rltrain.environments.guess_number import GuessNumber
from rltrain.environments.host import EnvironmentHost
from rltrain.environments.interface import Action, StepResult, ToolCall

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import make_text_game  # noqa: E402

numbers = st.integers(-99, 99)
expressions = st.recursive(
    numbers.map(lambda number: f"({number})"),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "//", "%"]), inner).map(
        lambda parts: f"({''.join(parts)})"
    ),
    max_leaves=8,
)


@given(expressions)
def test_values_are_those_of_fractions(expression: str) -> None:
    fractions = ast.fix_missing_locations(FractionOf().visit(ast.parse(expression, mode="eval")))
    try:
        expected = eval(compile(fractions, "<test>", "eval"), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(NoValue, match="division by zero"):
            evaluate(expression)
    else:
        assert evaluate(expression) == expected


class FractionOf(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:  # noqa: N802 - the name that ast calls
        return ast.Call(ast.Name("Fraction", ast.Load()), [node], [])

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:  # noqa: N802
        """Wraps a result of //, since it is an int and its / would round."""
        return ast.Call(ast.Name("Fraction", ast.Load()), [self.generic_visit(node)], [])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2^10", "1024"),
        ("1,234 * 2", "2468"),
        ("0.1 + 0.2", "0.3"),
        ("1/3", "0.333333333333"),
        ("2**-2", "0.25"),
        ("(-1)**1001", "-1"),
        ("10**400 / 3 // 1", "3" * 400),
    ],
)
def test_known_values(expression: str, value: str) -> None:
    assert shown(evaluate(expression)) == value


NO_VALUES = (
    *("", "x", "__import__('os')", "9**9**9", "2**0.5", "1/0"),
    *("0**-1", "1 if 1 else 2", "'a'*9", "True", "(" * 150, "1e999"),
)


@pytest.mark.parametrize("expression", NO_VALUES)
def test_what_has_no_value(expression: str) -> None:
    with pytest.raises(NoValue):
        evaluate(expression)


@given(st.text("0123456789+-*/%^(). e", max_size=200))
def test_no_text_takes_long_or_much(text: str) -> None:
    try:
        value = evaluate(text)
    except NoValue:
        return
    assert max(value.numerator.bit_length(), value.denominator.bit_length()) <= MAX_BITS


def test_calculator_by_tool_calls() -> None:
    calculator = Calculator()
    assert calculator.reset({"label": "84"}, 0) is None
    calls = (ToolCall("calculate", {"expression": "7*12"}, "a"), ToolCall("calculate", {"expression": "1/0"}, "b"))
    result = calculator.step(Action("Let me see.", (*calls, ToolCall("search", {}), ToolCall("calculate", {}))))
    assert [message["content"] for message in result.observation if not isinstance(message, str)] == [
        "84",
        "error: division by zero",
        "error: there is no tool 'search'; there is calculate",
        "error: calculate needs expression, a text",
    ]
    end = calculator.step(Action("It is 84."))
    assert end == StepResult(reward=1.0, done=True, info={"calls": 2, "call_errors": 3})
    assert calculator.tools[0]["function"]["name"] == "calculate"


def test_calculator_by_marks_and_its_limit_of_turns() -> None:
    calculator = Calculator(max_turns=2)
    calculator.reset({"label": 5}, 0)
    assert calculator.step(Action("I need <calc>2+3</calc>")).observation == "=5\n"
    assert calculator.step(Action("<calc>2+3</calc>")).done
    calculator.reset({"label": 5}, 0)
    assert calculator.step(Action("6")) == StepResult(reward=0.0, done=True, info={"calls": 0, "call_errors": 0})


@given(secret=st.integers(0, 9), guesses=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_the_game_tells_where_the_number_lies(secret: int, guesses: list[int]) -> None:
    game = GuessNumber()
    game.reset({"label": str(secret)}, 0)
    for number, guess in enumerate(guesses, start=1):
        result = game.step(Action(f"I say {guess}"))
        assert result.reward == (guess == secret)
        assert result.done == (guess == secret or number == 4)
        if result.done:
            break
        assert result.observation == ("higher" if secret > guess else "lower")


def test_the_game_goes_on_from_its_state() -> None:
    game, other = GuessNumber(), GuessNumber()
    game.reset({"label": "3"}, 0)
    game.step(Action("9"))
    assert game.step(Action("what?")).observation == "that is no number"
    other.load_state(json.loads(json.dumps(game.get_state())))
    game.step(Action("4"))
    assert other.step(Action("4")) == StepResult("lower", info={"found": 0.0, "guesses": 3})


def play(host: EnvironmentHost, secrets: list[int], choose: Any) -> float:
    """Returns the share of won games if the player guesses choose(lowest, highest possible number)."""
    bounds = {episode: (0, 9) for episode in range(len(secrets))}
    for episode, secret in enumerate(secrets):
        host.begin(episode, make_text_game.game_of(secret), seed=0)
    said: dict[int, int] = {}
    won = 0.0
    while bounds:
        assert host.wait(60.0)
        for event in host.events():
            assert event.failure is None
            won += event.reward
            if event.done:
                del bounds[event.episode]
                continue
            low, high = bounds[event.episode]
            if event.episode in said:
                guess = said[event.episode]
                low, high = (guess + 1, high) if event.observation == "+" else (low, guess - 1)
            bounds[event.episode] = low, high
            said[event.episode] = choose(low, high)
            host.act(event.episode, Action(str(said[event.episode])))
    return won / len(secrets)


def test_players_of_the_text_game() -> None:
    chance = random.Random(0)
    factory = EnvironmentFactory("guess_number", make_text_game.GAME)
    with EnvironmentHost(factory, num_workers=2, batch_size=16) as host:
        secrets = [chance.randint(0, 9) for _ in range(400)]
        assert play(host, secrets, lambda low, high: (low + high) // 2) == 1.0
        assert 0.25 < play(host, secrets, lambda low, high: chance.randint(0, 9)) < 0.45


def test_the_warm_up_shows_turns_of_the_game(tmp_path: Path) -> None:
    chance = random.Random(1)
    games = [list(make_text_game.warm_up_turns(chance)) for _ in range(500)]
    assert all(game[0]["prompt"] == "0,9=" and len(game) <= 4 for game in games)
    tokenizer = make_text_game.character_tokenizer()
    for turn in (turn for game in games for turn in game):
        ids = tokenizer.encode(turn["prompt"]).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == turn["prompt"] and len(turn["response"]) == 1
        answers = turn["prompt"].removeprefix("0,9=").split("<eos>")[1:]
        assert all(answer[0] in "+," for answer in answers)
    attentive = sum(len({turn["response"] for turn in game}) == len(game) for game in games)
    assert attentive > 300, "a player that uses the answers never repeats a guess"
