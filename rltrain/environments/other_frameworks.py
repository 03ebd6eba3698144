"""Adapters for environments written for NeMo-RL, SkyRL-Gym and TRL. None of these packages is imported."""

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, as_messages, parameters_of
from rltrain.environments.interface import (
    Action,
    Environment,
    Message,
    Observation,
    Opening,
    Row,
    StepResult,
    ToolCall,
)
from rltrain.environments.one_by_one import one_by_one

# NeMo-RL: step(message_log_batch, metadata) of whole conversations, in batches.

OWN_OPTIONS = ("metadata_key",)


class NemoRl:
    """A NeMo-RL environment. `env.options` are its cfg, except for `metadata_key`. That is the column with an episode's
    first metadata (default "extra_env_info"). Without this column it is the whole row."""

    @staticmethod
    def recognises(thing: Any) -> bool:
        return (parameters_of(thing, "step") or ())[:2] == ("message_log_batch", "metadata")

    @staticmethod
    def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
        return NemoRl(build, factory)

    def __init__(self, build: Build, factory: EnvironmentFactory) -> None:
        options = {key: value for key, value in factory.options.items() if key not in OWN_OPTIONS}
        self.environment = build(options) if len(parameters_of(build) or ()) == 1 else build(**options)
        self.metadata_key = factory.options.get("metadata_key", "extra_env_info")
        self.prompt_key = factory.prompt_key
        self.logs: list[list[Message]] = []
        self.metadata: list[Any] = []

    def reset(self, rows: Sequence[Row], seeds: Sequence[int]) -> Sequence[None]:
        """Begins the episodes. Their first observations are the prompts of the rows."""
        prompts = [row[self.prompt_key] for row in rows]
        self.logs = [as_messages(prompt) for prompt in prompts]
        self.metadata = [row.get(self.metadata_key, row) for row in rows]
        return [None] * len(rows)

    def step(self, actions: Sequence[Action | None]) -> Sequence[StepResult | None]:
        acting = [index for index, action in enumerate(actions) if action is not None]
        for index in acting:
            action = actions[index]
            assert action is not None
            self.logs[index].append({"role": "assistant", "content": action.text})
        returned = self.environment.step([self.logs[i] for i in acting], [self.metadata[i] for i in acting])
        rewards, ends = _summed(returned.rewards), _plain(returned.terminateds)
        results: list[StepResult | None] = [None] * len(actions)
        for place, index in enumerate(acting):
            observation = returned.observations[place]
            self.logs[index].append(observation)
            self.metadata[index] = returned.metadata[place]
            results[index] = StepResult([observation], float(rewards[place]), bool(ends[place]))
        return results

    def close(self) -> None:
        if hasattr(self.environment, "shutdown"):
            self.environment.shutdown()

    def get_state(self) -> Any:
        return [self.logs, self.metadata]

    def load_state(self, state: Any) -> None:
        self.logs, self.metadata = state


def _plain(values: Any) -> Sequence[Any]:
    plain: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return plain


def _summed(rewards: Any) -> Sequence[float]:
    """Returns the sum of rewards given by name."""
    if isinstance(rewards, Mapping):
        return [sum(parts) for parts in zip(*map(_plain, rewards.values()), strict=True)]
    return _plain(rewards)


# SkyRL-Gym: an instance per episode, with init(prompt), step(action) and close().


class SkyRLGym:
    """A SkyRL-Gym environment. `env.options` are its env_config. Its `extras` are the row's columns and the option
    max_turns."""

    @staticmethod
    def recognises(thing: Any) -> bool:
        return len(parameters_of(thing, "init") or ()) == 1 and len(parameters_of(thing, "step") or ()) == 1

    @staticmethod
    def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
        return one_by_one(lambda: SkyRLGym(build, factory))

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
    """A dict with its keys as attributes, like the config of SkyRL-Gym's environments."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return AttributeDict(value) if isinstance(value, dict) else value


# TRL's environment_factory: an object per episode with reset(**row), tool methods, and a reward.

NO_TOOLS = ("reset", "get_reward", "close", "get_state", "load_state", "offload", "onload")
JSON_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


class TrlEnvironment:
    """A TRL environment. A turn with tool calls is answered with their results, or with the error of a tool. A turn
    without calls ends the episode. Its reward is `get_reward()`, or the attribute `reward`."""

    @staticmethod
    def recognises(thing: Any) -> bool:
        """Recognises objects with a reset, no step, and a tool or a reward."""
        parameters = parameters_of(thing, "reset")
        if parameters is None or hasattr(thing, "step") or hasattr(thing, "init"):
            return False
        return bool(_tool_names(thing)) or hasattr(thing, "get_reward")

    @staticmethod
    def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
        return one_by_one(lambda: TrlEnvironment(build, factory))

    def __init__(self, build: Build, factory: EnvironmentFactory) -> None:
        self.max_turns = factory.options.get("max_turns")
        self.prompt_key = factory.prompt_key
        self.environment = build(**{key: value for key, value in factory.options.items() if key != "max_turns"})
        self.called: dict[str, Callable[..., Any]] = {
            name: getattr(self.environment, name) for name in _tool_names(self.environment)
        }
        self.tools = [tool_schema(name, function) for name, function in self.called.items()]
        self.num_turns = self.num_calls = self.num_errors = 0

    def reset(self, row: Row, seed: int) -> Opening:
        """Begins an episode. The text returned by the environment's reset is appended to the row's prompt."""
        self.num_turns = self.num_calls = self.num_errors = 0
        added = self.environment.reset(**row)
        if not added:
            return None
        prompt = row[self.prompt_key]
        if isinstance(prompt, str):
            return f"{prompt}{added}"
        *before, last = prompt
        return [*before, {**last, "content": f"{last['content']}{added}"}]

    def step(self, action: Action) -> StepResult:
        self.num_turns += 1
        answers = [self._called(call) for call in action.tool_calls]
        if answers and self.num_turns != self.max_turns:
            return StepResult(answers)
        info = {"calls": self.num_calls, "call_errors": self.num_errors}
        return StepResult(reward=self._reward(), done=True, info=info)

    def _called(self, call: ToolCall) -> Message:
        self.num_calls += 1
        try:
            if call.name not in self.called:
                raise LookupError(f"there is no tool {call.name!r}; there is {', '.join(self.called)}")
            returned = self.called[call.name](**call.arguments)
            content = returned if isinstance(returned, str) else json.dumps(returned, default=str)
        except Exception as error:
            self.num_errors += 1
            content = f"error: {error}"
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}

    def _reward(self) -> float:
        if hasattr(self.environment, "get_reward"):
            return float(self.environment.get_reward())
        return float(getattr(self.environment, "reward", 0.0))

    def close(self) -> None:
        if hasattr(self.environment, "close"):
            self.environment.close()


def _tool_names(thing: Any) -> Sequence[str]:
    return [
        name
        for name in dir(thing)
        if not name.startswith("_") and name not in NO_TOOLS and inspect.isroutine(getattr(thing, name, None))
    ]


def tool_schema(name: str, function: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the schema of a tool in OpenAI's form, from the parameter types and the docstring. Docstring lines "name:
    meaning" or "name (type): meaning" describe parameters."""
    lines = [line.strip() for line in (inspect.getdoc(function) or "").splitlines()]
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        meant = next((line for line in lines if line.split(":")[0].split(" ")[0] == parameter.name), "")
        kind = hints.get(parameter.name, str)
        properties[parameter.name] = {
            "type": JSON_TYPES.get(typing.get_origin(kind) or kind, "object"),
            "description": meant.partition(":")[2].strip(),
        }
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": name, "description": lines[0] if lines else "", "parameters": parameters},
    }
