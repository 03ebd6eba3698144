"""Batches of environments for a single episode each."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rltrain.environments import own
from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of
from rltrain.environments.interface import Action, Environment, Opening, Row, StepResult


class SingleEnvironment(Protocol):
    """An environment for one episode. Both methods may be coroutine functions."""

    def reset(self, row: Row, seed: int) -> Opening: ...

    def step(self, action: Action) -> StepResult:
        """Plays one turn. It may also return a tuple with StepResult's first fields: (observation, reward, done) or
        (..., info)."""
        ...


def recognises(thing: Any) -> bool:
    """Recognises a reset with two parameters, a task and a seed, of any name."""
    begun_with = parameters_of(thing, "reset") or ()
    is_another = begun_with == own.BEGUN_WITH or "options" in begun_with  # Gymnasium's
    return len(begun_with) == 2 and not is_another and len(parameters_of(thing, "step") or ()) == 1


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    return one_by_one(lambda: build(**factory.options))


class OneByOne:
    """A batch of single environments, built on demand. It has `close`, `get_state`, `load_state`, `offload`, `onload`
    and `tools` if the single ones have them."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build
        self.singles = [build()]
        self.num_episodes = 0
        for name, of_all in _BESIDES.items():
            if hasattr(self.singles[0], name):
                setattr(self, name, of_all(self))

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:
        return [single.reset(row, seed) for single, row, seed in zip(self._needed(len(rows)), rows, seeds, strict=True)]

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        return [
            None if action is None else as_result(single.step(action))
            for single, action in zip(self._needed(len(actions)), actions, strict=True)
        ]

    def close(self) -> None:
        for single in self.singles:
            if hasattr(single, "close"):
                single.close()

    def _needed(self, count: int) -> Sequence[Any]:
        """Returns the environments of the first `count` episodes."""
        self.num_episodes = count
        self.singles += [self.build() for _ in range(count - len(self.singles))]
        return self.singles[:count]


class AwaitedOneByOne(OneByOne):
    """A batch of single environments with coroutine functions. It awaits them concurrently."""

    async def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:  # type: ignore[override]
        needed = zip(self._needed(len(rows)), rows, seeds, strict=True)
        return await asyncio.gather(*(single.reset(row, seed) for single, row, seed in needed))

    async def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:  # type: ignore[override]
        async def turn(single: Any, action: Action | None) -> StepResult | None:
            return None if action is None else as_result(await single.step(action))

        needed = zip(self._needed(len(actions)), actions, strict=True)
        return await asyncio.gather(*(turn(single, action) for single, action in needed))


def one_by_one(build: Callable[[], Any]) -> Environment:
    """Returns a batch of the single environments made by `build`."""
    spare = [build()]
    kind = AwaitedOneByOne if inspect.iscoroutinefunction(spare[0].step) else OneByOne
    return kind(lambda: spare.pop() if spare else build())


def as_result(returned: Any) -> Any:
    """Returns a StepResult for a tuple of its fields, and any other value unchanged."""
    return StepResult(*returned) if isinstance(returned, tuple) and 2 <= len(returned) <= 4 else returned


def _get_state(environment: OneByOne) -> Callable[[], Any]:
    return lambda: [single.get_state() for single in environment.singles[: environment.num_episodes]]


def _load_state(environment: OneByOne) -> Callable[[Any], None]:
    def load_state(states: Sequence[Any]) -> None:
        for single, state in zip(environment._needed(len(states)), states, strict=True):
            single.load_state(state)

    return load_state


def _each(name: str) -> Callable[[OneByOne], Callable[[], Any]]:
    return lambda environment: lambda: [getattr(single, name)() for single in environment.singles]


_BESIDES: Mapping[str, Callable[[OneByOne], Any]] = {
    "get_state": _get_state,
    "load_state": _load_state,
    "offload": _each("offload"),
    "onload": _each("onload"),
    "tools": lambda environment: environment.singles[0].tools,
}
