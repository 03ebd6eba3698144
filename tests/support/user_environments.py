"""Users' environments, for test_environments.py and test_environment_registry.py."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rltrain.environments.interface import Action, Row, StepResult, TokenIds, Trajectory


class Counting:
    """A batch of episodes. The reward of a turn is its length, and the reply repeats it with its number. "stop" ends
    it."""

    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.num_turns: list[int] = []

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
        self.num_turns = [0] * len(rows)
        return [f"{self.greeting} {row['name']} {seed} of {len(rows)}" for row, seed in zip(rows, seeds, strict=True)]

    def step(self, actions: Sequence[Action | None]) -> list[StepResult | None]:
        return [None if action is None else self.turn(index, action) for index, action in enumerate(actions)]

    def turn(self, index: int, action: Action) -> StepResult:
        self.num_turns[index] += 1
        done = action.text == "stop"
        shown = f"{action.text} {self.num_turns[index]}"
        return StepResult(shown, reward=len(action.text), done=done, info={"turns": self.num_turns[index]})


class Remembering(Counting):
    """Episodes that can continue elsewhere."""

    def get_state(self) -> Any:
        return self.num_turns

    def load_state(self, state: Any) -> None:
        if -1 in state:
            raise ValueError("a broken state")
        self.num_turns = list(state)


class Heavy:
    """One episode of a simulator that can leave the device."""

    def __init__(self) -> None:
        self.place = "device"

    def reset(self, row: Row, seed: int) -> str:
        return self.place

    def step(self, action: Action) -> StepResult:
        return StepResult(self.place)

    def offload(self) -> None:
        if self.place == "host":
            raise RuntimeError("it is away already")
        self.place = "host"

    def onload(self) -> None:
        self.place = "device"


class Misbehaving:
    """One episode that misbehaves on command."""

    def reset(self, row: Row, seed: int) -> str:
        if "reset" in row:
            self.obey(row["reset"], row)
        return "what now"

    def step(self, action: Action) -> Any:
        return self.obey(action.text, {})

    def obey(self, order: str, row: Mapping[str, Any]) -> Any:
        """Calls the method of that name, or plays a usual turn."""
        method = getattr(self, order.replace(" ", "_"), None)
        return method(row) if method else (f"did {order}", 1.0, order == "stop")

    def raises(self, row: Row) -> Any:
        raise KeyError("no such thing")

    def exits(self, row: Row) -> Any:
        sys.exit("gone")

    def dies(self, row: Row) -> Any:
        os._exit(3)

    def hangs(self, row: Row) -> Any:
        time.sleep(1000)

    def hangs_once(self, row: Row) -> Any:
        mark = Path(row["mark"])
        if not mark.exists():
            mark.touch()
            self.hangs(row)

    def sleeps(self, row: Row) -> Any:
        time.sleep(0.6)
        return "slept", 0.0, False

    def spawns(self, row: Row) -> Any:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        return str(child.pid), 0.0, False

    def returns_nan(self, row: Row) -> Any:
        return "", float("nan"), False

    def returns_1e39(self, row: Row) -> Any:
        return "", 1e39, False

    def returns_half_a_character(self, row: Row) -> Any:
        return [{"role": "user", "content": "\ud83d"}], 0.0, False

    def returns_nothing(self, row: Row) -> Any:
        return None

    def returns_an_odd_observation(self, row: Row) -> Any:
        return 5, 0.0, False

    def prints(self, row: Row) -> Any:
        print("to whom it may concern")
        return sys.stdin.readline(), 1.0, True


class Awaiting:
    """An episode of coroutines. The action "first" of one episode waits for the action "second" of another."""

    waiting: asyncio.Event | None = None

    async def reset(self, row: Row, seed: int) -> Any:
        if row.get("over"):
            trajectory = Trajectory((1, 2, 3), 2, 0.5, logprobs=(-0.1, -0.2), info={"from": "elsewhere"})
            return StepResult(reward=0.5, done=True, trajectories=(trajectory,))
        return TokenIds((1, 2, seed), {"max_new_tokens": 3})

    async def step(self, action: Action) -> StepResult:
        if action.text == "hang":
            await asyncio.sleep(1000)
        if action.text == "raise":
            raise KeyError("no such thing")
        if action.text == "first":
            Awaiting.waiting = asyncio.Event()
            await Awaiting.waiting.wait()
        elif action.text == "second":
            assert Awaiting.waiting is not None
            Awaiting.waiting.set()
        return StepResult(reward=sum(action.ids) + sum(action.logprobs), done=True)


class Fails:
    def __init__(self) -> None:
        raise OSError("no simulator here")

    def reset(self, row: Row, seed: int) -> None: ...

    def step(self, action: Action) -> None: ...


def counting_of(word: str) -> Counting:
    return Counting(word)


def returns_a_text() -> str:
    return "no environment"


class HasNoStep:
    def reset(self, row: Row, seed: int) -> None: ...


NUMBER = 5
