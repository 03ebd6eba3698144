"""Finds the environment that env.function names, and how it is played, in a worker process."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rltrain.environments import (
    gymnasium_adapter,
    nemo_rl,
    one_by_one,
    openenv,
    own,
    skyrl_gym,
    slime_generate,
    slime_modules,
    trl_environment,
)
from rltrain.environments.convention import Convention
from rltrain.environments.factory import EnvironmentFactory
from rltrain.environments.interface import Environment
from rltrain.errors import ConfigError
from rltrain.rewards.locating import locate

BUILT_IN = {
    "agent": "rltrain.environments.agent:Agent",
    "calculator": "rltrain.environments.calculator:Calculator",
    "guess_number": "rltrain.environments.guess_number:GuessNumber",
    "python": "rltrain.environments.python_tool:PythonTool",
}
CONVENTIONS: Sequence[Convention] = (
    slime_generate,
    own,
    nemo_rl,
    openenv,
    gymnasium_adapter,
    skyrl_gym,
    one_by_one,
    trl_environment,
)
"""The first that recognises what was named plays it."""
EXPECTED = (
    "a class, or a function that returns an environment, with reset(rows, seeds) and step(actions) for a batch of "
    "episodes or reset(row, seed) and step(action) for one, or another form of docs/environments.md"
)


def load_environment(factory: EnvironmentFactory) -> Callable[[], Environment]:
    """What builds one environment after the other. Raises ConfigError where env.function cannot be found, is nothing
    that can be played, or does not take env.options."""
    function = factory.function
    if function.startswith(gymnasium_adapter.PREFIX):
        return gymnasium_adapter.registered(factory)
    if function.startswith(openenv.SCHEMES):
        return openenv.served(factory)
    slime_modules.provide()
    named = locate(BUILT_IN.get(function, function), "env.function", shown=function, known=[*BUILT_IN])
    convention = _convention_of(named, factory)
    return lambda: convention.adapt(named, factory)


def _convention_of(named: Callable[..., Any], factory: EnvironmentFactory) -> Convention:
    for convention in CONVENTIONS:
        if convention.recognises(named):
            return convention
    if inspect.isclass(named):
        raise ConfigError(f"env.function: {factory.function!r} has {_methods_of(named)}; expected {EXPECTED}")
    built = named(**factory.options)
    for convention in CONVENTIONS:
        if convention.recognises(built):
            return convention
    raise ConfigError(
        f"env.function: {factory.function!r} returned {type(built).__name__}, which has {_methods_of(built)}; expected "
        f"{EXPECTED}"
    )


def _methods_of(thing: Any) -> str:
    signatures = []
    for name in ("reset", "init", "step"):
        method = getattr(thing, name, None)
        if callable(method):
            signatures.append(f"{name}{inspect.signature(method)}")
    return ", ".join(signatures) or "neither reset nor step"
