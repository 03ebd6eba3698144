"""Conventions of environments, and the signatures to recognise them by."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.interface import Environment, Message
from rltrain.errors import ConfigError, one_of

# The interface of a convention. The worker uses it to recognise and build environments.

Build = Callable[..., Any]
"""The object named by env.function: a class, or a function that returns an environment."""


class EnvironmentConvention(Protocol):
    """A module or class with two functions for one form of environments."""

    def recognises(self, thing: Any) -> bool:
        """Returns whether `thing` has this form. It is a class, the result of a function, or a function that plays a
        whole episode."""
        ...

    def adapt(self, build: Build, factory: EnvironmentFactory) -> Environment:
        """Returns a new environment."""
        ...


# Signatures of methods. They distinguish the frameworks.


def parameters_of(owner: Any, method: str | None = None) -> tuple[str, ...] | None:
    """Returns the parameter names of a function, or of a method of a class or instance, without `self`. Returns None if
    there is no such method or its signature is unknown."""
    function = owner if method is None else getattr(owner, method, None)
    if not callable(function):
        return None
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    is_unbound = inspect.isclass(owner) and not inspect.ismethod(function) and method is not None
    return names[1:] if is_unbound else names


# Prompts and options for adapters of other frameworks.


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """Returns the prompt as chat messages. A text becomes a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def with_shown(prompt: str | Sequence[Message], shown: str) -> str | list[Message]:
    """Returns the prompt followed by the environment's first observation."""
    return f"{prompt}\n{shown}" if isinstance(prompt, str) else [*prompt, *as_messages(shown)]


def refuse_unknown_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError if `options` (env.options) has a key outside `known`."""
    if unknown := sorted(options.keys() - {*known}):
        raise ConfigError(f"env.options: {', '.join(unknown)} unknown; expected {one_of(unknown[0], known)}")
