"""The convention of rltrain's own interface: reset(rows, seeds) and step(actions)."""

from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of
from rltrain.environments.interface import Environment

BEGUN_WITH = ("rows", "seeds")


def recognises(thing: Any) -> bool:
    return parameters_of(thing, "reset") == BEGUN_WITH and parameters_of(thing, "step") is not None


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    environment: Environment = build(**factory.options)
    return environment
