"""Finds the reward function a config names."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rltrain.config import schema
from rltrain.errors import ConfigError

BUILT_IN = {"exact_match": "rltrain.rewards.exact_match:exact_match", "math": "rltrain.rewards.math:math"}
# Cannot hang or raise on any text, so that they need no process of their own.
TRUSTED = frozenset({"exact_match"})
# Would compare a label that is an object or a list as JSON text.
COMPARES_TEXT = frozenset({"exact_match"})

ARGUMENTS = ("prompt", "response", "label")
# What a parameter of such a name is meant to get, so that a function written for another trainer is not called with
# something else. None: nothing that reward functions get here.
MEANT_BY_NAME: Mapping[str, str | None] = {
    **{name: name for name in ARGUMENTS},
    **dict.fromkeys(("completion", "solution_str"), "response"),
    "ground_truth": "label",
    **dict.fromkeys(("data_source", "extra_info", "prompts", "responses", "completions", "labels")),
}


@dataclass(frozen=True)
class RewardFunction:
    """A resolved reward function: (prompt, response, label) -> float."""

    name: str
    """As in the config: a built-in's name, or "module:function"."""
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trusted(self) -> bool:
        """Safe to run in this process, without a time limit."""
        return self.name in TRUSTED

    @property
    def place(self) -> str:
        """Its name, and the file and line where it is defined if it is written in Python."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return f"{self.name!r}" + (f" ({code.co_filename}, line {code.co_firstlineno})" if code else "")

    def __call__(self, prompt: str, response: str, label: str) -> Any:
        """Whatever the function returns."""
        return self.function(prompt, response, label, **self.options)


def load_reward(settings: schema.Reward) -> RewardFunction:
    """The function reward.function names, called with reward.options as keyword arguments.

    A user's module is looked for in the working directory too. Raises ConfigError where it cannot be imported, is
    asynchronous, or does not take the arguments.
    """
    module_name, separator, function_name = BUILT_IN.get(settings.function, settings.function).partition(":")
    if not (module_name and separator and function_name):
        raise ConfigError(
            f'reward.function: {settings.function!r} is unknown; expected {", ".join(BUILT_IN)} or "module:function"'
        )
    function = getattr(_import(module_name, settings.function), function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.function: {settings.function!r}: {module_name} has no function {function_name!r}")
    if any(inspect.iscoroutinefunction(called) for called in (function, type(function).__call__)):
        raise ConfigError(
            f"reward.function: {settings.function!r} is asynchronous (async def); expected a plain function that "
            "returns a number. It may wait: reward.num_workers calls run beside each other"
        )
    _check_arguments(function, settings)
    return RewardFunction(settings.function, function, settings.options)


def _import(module_name: str, given: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.function: {given!r}: cannot import {module_name} ({type(error).__name__}: {error}); "
            f"it is looked for in {os.getcwd()} and where Python finds installed packages"
        ) from error


def _check_arguments(function: Callable[..., Any], settings: schema.Reward) -> None:
    expected = f"({', '.join(ARGUMENTS)})"
    try:
        signature = inspect.signature(function)
        signature.bind(*ARGUMENTS, **settings.options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"reward.function: {settings.function!r} cannot be called with {expected} and "
            f"reward.options {settings.options}: {error}"
        ) from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in signature.parameters.values() if parameter.kind in positional]
    for name, argument in zip(names, ARGUMENTS, strict=False):
        if MEANT_BY_NAME.get(name, argument) != argument:
            raise ConfigError(
                f"reward.function: {settings.function!r} takes ({', '.join(names)}) and would get the {argument} as "
                f"{name!r}; expected a function that takes {expected}, all texts: write one that calls this one"
            )
