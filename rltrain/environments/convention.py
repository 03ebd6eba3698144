"""A way in which environments are written, and the signatures by which it is recognised."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.interface import Environment, Message
from rltrain.errors import ConfigError, one_of

# A way in which environments are written, by which the registry knows them and plays them.

Build = Callable[..., Any]
"""What env.function names: a class, or a function that returns an environment."""


class EnvironmentConvention(Protocol):
    """A module that has these two."""

    def recognises(self, thing: Any) -> bool:
        """Of a class, of what a function returned, or of a function that is itself an episode."""
        ...

    def adapt(self, build: Build, factory: EnvironmentFactory) -> Environment:
        """A new environment."""
        ...


# By the parameters of its methods an environment of another framework is told from the rest.


def parameters_of(owner: Any, method: str | None = None) -> tuple[str, ...] | None:
    """Names of the parameters of a function, or of a method of a class or of an instance, without the instance's own.
    None where there is no such method, or nothing is known of it."""
    function = owner if method is None else getattr(owner, method, None)
    if not callable(function):
        return None
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    is_unbound = inspect.isclass(owner) and not inspect.ismethod(function) and method is not None
    return names[1:] if is_unbound else names


# What environments of other frameworks make of a row's prompt and of env.options.


def as_messages(prompt: str | Sequence[Message]) -> list[Message]:
    """Returns the prompt as chat messages: a text is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]


def with_shown(prompt: str | Sequence[Message], shown: str) -> str | list[Message]:
    """Returns the prompt, and behind it what the environment shows first."""
    return f"{prompt}\n{shown}" if isinstance(prompt, str) else [*prompt, *as_messages(shown)]


def refuse_unknown_options(options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError for a key of env.options that is not `known`."""
    if unknown := sorted(options.keys() - {*known}):
        raise ConfigError(f"env.options: {', '.join(unknown)} unknown; expected {one_of(unknown[0], known)}")
