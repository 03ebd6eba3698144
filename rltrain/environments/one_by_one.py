"""Environments that are written for one episode at a time, as a batch of them."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rltrain.environments import own
from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of
from rltrain.environments.interface import Action, Environment, Opening, Row, StepResult


class SingleEnvironment(Protocol):
    """One episode. Both methods may be coroutine functions."""

    def reset(self, row: Row, seed: int) -> Opening: ...

    def step(self, action: Action) -> StepResult:
        """Or a tuple, as of StepResult's first fields: (observation, reward, done) or (..., info)."""
        ...


def recognises(thing: Any) -> bool:
    """By a reset that takes a task and a seed, whatever they are called."""
    begun_with = parameters_of(thing, "reset") or ()
    is_another = begun_with == own.BEGUN_WITH or "options" in begun_with  # which is Gymnasium's
    return len(begun_with) == 2 and not is_another and len(parameters_of(thing, "step") or ()) == 1


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    return one_by_one(lambda: build(**factory.options))


class OneByOne:
    """An Environment of environments for one episode each, built as they are needed. `close` is theirs if they have it,
    as are `get_state`, `load_state`, `offload`, `onload` and `tools`."""

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
        """Those of the first `count` episodes."""
        self.num_episodes = count
        self.singles += [self.build() for _ in range(count - len(self.singles))]
        return self.singles[:count]


class AwaitedOneByOne(OneByOne):
    """The same of environments whose methods are coroutine functions; those of a batch are awaited together."""

    async def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[Opening]:  # type: ignore[override]
        needed = zip(self._needed(len(rows)), rows, seeds, strict=True)
        return await asyncio.gather(*(single.reset(row, seed) for single, row, seed in needed))

    async def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:  # type: ignore[override]
        async def turn(single: Any, action: Action | None) -> StepResult | None:
            return None if action is None else as_result(await single.step(action))

        needed = zip(self._needed(len(actions)), actions, strict=True)
        return await asyncio.gather(*(turn(single, action) for single, action in needed))


def one_by_one(build: Callable[[], Any]) -> Environment:
    """For what builds environments for one episode."""
    spare = [build()]
    kind = AwaitedOneByOne if inspect.iscoroutinefunction(spare[0].step) else OneByOne
    return kind(lambda: spare.pop() if spare else build())


def as_result(returned: Any) -> Any:
    """A StepResult of a tuple of its fields; anything else as it is."""
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
