"""SkyRL-Gym's text environments: an instance per episode, with init(prompt), step(action) and close()."""

from collections.abc import Mapping
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, as_messages, parameters_of
from rltrain.environments.interface import Action, Environment, Observation, Opening, Row, StepResult
from rltrain.environments.one_by_one import one_by_one


def recognises(thing: Any) -> bool:
    return len(parameters_of(thing, "init") or ()) == 1 and len(parameters_of(thing, "step") or ()) == 1


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    return one_by_one(lambda: SkyRLGym(build, factory))


class SkyRLGym:
    """`env.options` are the environment's env_config; `extras` are the row's columns, with max_turns of the options."""

    def __init__(self, build: Build, factory: EnvironmentFactory) -> None:
        self.build = build
        self.options = dict(factory.options)
        self.prompt_key = factory.prompt_key
        self.parameters = parameters_of(build) or ()
        self.environment: Any = None

    def reset(self, row: Row, seed: int) -> Opening:
        self.close()
        self.environment = self.build(**self._arguments(row))
        messages = as_messages(row[self.prompt_key])
        first, _ = self.environment.init([dict(message) for message in messages])
        return None if first == messages else first

    def _arguments(self, row: Row) -> Mapping[str, Any]:
        extras = {**row, **{key: self.options[key] for key in ("max_turns",) if key in self.options}}
        given = {"env_config": AttributeDict(self.options), "extras": extras}
        takes_any = "kwargs" in self.parameters
        return {name: value for name, value in given.items() if takes_any or name in self.parameters}

    def step(self, action: Action) -> StepResult:
        output = self.environment.step(action.text)
        metadata = dict(output.get("metadata") or {})
        if output["done"] and hasattr(self.environment, "get_metrics"):
            metadata |= self.environment.get_metrics()
        observations: Observation = [dict(message) for message in output["observations"]]
        return StepResult(observations, output["reward"], output["done"], metadata)

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()
            self.environment = None


class AttributeDict(dict[str, Any]):
    """Whose keys are attributes as well, as those of the config that SkyRL-Gym's environments expect."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return AttributeDict(value) if isinstance(value, dict) else value
