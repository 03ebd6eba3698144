"""Tasks with one tool. The tool answers turns that call it. A turn without a call has the final answer."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rltrain.environments.interface import Action, Message, Row, StepResult, ToolCall
from rltrain.rewards.math import math


@dataclass(frozen=True)
class Tool:
    """A tool with one text argument. The model calls it in the form of the chat template, or by a text between
    marks."""

    name: str
    description: str
    argument: str
    argument_description: str
    marked: re.Pattern[str]
    """The pattern of a call in a text. Its first group is the argument."""
    answer_format: str
    """The format of the observation after a marked text. {} is the tool's result."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema in OpenAI's form."""
        properties = {self.argument: {"type": "string", "description": self.argument_description}}
        parameters = {"type": "object", "properties": properties, "required": [self.argument]}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class ToolFailed(Exception):  # noqa: N818 - a finding about the model's text
    """The tool cannot perform a call. The model sees the message."""


class ToolTask:
    """One episode. The reward is 1 if the final answer equals the row's label, compared by the reward function `math`.
    Errors of a call are its answer."""

    def __init__(self, tool: Tool, *, max_turns: int, label_key: str) -> None:
        self.tool = tool
        self.max_turns = max_turns
        self.label_key = label_key
        self.tools: Sequence[Mapping[str, Any]] = (tool.schema,)
        self.label = ""
        self.num_turns = self.num_calls = self.num_errors = 0

    def use(self, argument: str) -> str:
        """Returns the tool's result. Raises ToolFailed if there is none."""
        raise NotImplementedError

    def reset(self, row: Row, seed: int) -> None:
        """Begins an episode. The first observation is the row's prompt."""
        self.label = str(row[self.label_key])
        self.num_turns = self.num_calls = self.num_errors = 0

    def step(self, action: Action) -> StepResult:
        self.num_turns += 1
        marked = self.tool.marked.findall(action.text)
        answer: str | list[Message]
        if action.tool_calls:
            answer = [self._called(call) for call in action.tool_calls]
        elif marked:
            answer = self.tool.answer_format.format(self._said(marked[-1]))
        else:
            return self._end(math("", action.text, self.label))
        return self._end(0.0) if self.num_turns == self.max_turns else StepResult(answer)

    def _called(self, call: ToolCall) -> Message:
        argument = call.arguments.get(self.tool.argument)
        if call.name != self.tool.name:
            content = self._wrong(f"there is no tool {call.name!r}; there is {self.tool.name}")
        elif not isinstance(argument, str):
            content = self._wrong(f"{self.tool.name} needs {self.tool.argument}, a text")
        else:
            content = self._said(argument)
        return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}

    def _said(self, argument: str) -> str:
        self.num_calls += 1
        try:
            return self.use(argument)
        except ToolFailed as problem:
            return self._wrong(str(problem))

    def _wrong(self, why: str) -> str:
        self.num_errors += 1
        return f"error: {why}"

    def _end(self, reward: float) -> StepResult:
        return StepResult(reward=reward, done=True, info={"calls": self.num_calls, "call_errors": self.num_errors})

    def get_state(self) -> Any:
        return [self.label, self.num_turns, self.num_calls, self.num_errors]

    def load_state(self, state: Any) -> None:
        self.label, self.num_turns, self.num_calls, self.num_errors = state
