"""TRL's environment_factory: an object per episode with reset(**row), methods that are tools, and a reward."""

import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rltrain.environments.batch import EnvironmentFactory
from rltrain.environments.convention import Build, parameters_of
from rltrain.environments.interface import Action, Environment, Message, Opening, Row, StepResult, ToolCall
from rltrain.environments.one_by_one import one_by_one

NO_TOOLS = ("reset", "get_reward", "close", "get_state", "load_state", "offload", "onload")
JSON_TYPES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


def recognises(thing: Any) -> bool:
    """By a reset that takes any columns, no step, and a tool or a reward."""
    parameters = parameters_of(thing, "reset")
    if parameters is None or hasattr(thing, "step") or hasattr(thing, "init"):
        return False
    return bool(_tool_names(thing)) or hasattr(thing, "get_reward")


def adapt(build: Build, factory: EnvironmentFactory) -> Environment:
    return one_by_one(lambda: TrlEnvironment(build, factory))


class TrlEnvironment:
    """A turn that calls tools is answered by what they return; one that does not ends the episode. Its reward is then
    `get_reward()`, or the attribute `reward`. An error of a tool is its answer."""

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
        """What its reset returns is added to the row's prompt."""
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
    """As OpenAI writes it, from the types of the parameters and the docstring, whose lines "name: meaning" or "name
    (type): meaning" describe the parameters."""
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
