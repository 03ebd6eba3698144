"""A checkpoint's chat template: messages in, text out. It is rendered nowhere else."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rltrain.environments.interface import Message
from rltrain.errors import DataError
from rltrain.runtime.json_text import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOOL_ROLES = ("tool", "function", "ipython")


class RenderError(Exception):
    """The template refuses these messages, in its own words."""


class ChatTemplate:
    """The tokenizer's template with the tools and options of a job."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase", tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> None:
        """`options` are variables of the template, enable_thinking for instance."""
        self.tokenizer = tokenizer
        self.tools: list[Any] = [dict(tool) for tool in tools]
        self.options = dict(options)

    @property
    def source(self) -> str:
        """The template's own text; of several that a tokenizer has, the one that is rendered."""
        return str(self.tokenizer.get_chat_template(tools=self.tools or None))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """The text of `messages`, by default up to where the model's turn begins. Raises RenderError."""
        return self._render([self._as_the_template_takes_it(message) for message in messages], generation_prompt)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of `text` alone: nothing is put around it, and special tokens in it become what they stand for."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.options,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise RenderError(str(error)) from error
        return str(text)

    def _as_the_template_takes_it(self, message: Message) -> dict[str, Any]:
        taken = dict(message)
        if isinstance(taken.get("content"), list | tuple):
            taken["content"] = text_of(taken["content"])
        if taken.get("tool_calls"):
            taken["tool_calls"] = [self._call(call) for call in taken["tool_calls"]]
        return taken

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = arguments_of(function.get("arguments"))
        function["arguments"] = arguments if self._takes_objects else as_text(arguments)
        return {"type": "function", **call, "function": function}

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the template writes a call's arguments from an object; others want the text that OpenAI sends."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"argument": "x"}}}
        for content in (None, ""):
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                text = self._render([{"role": "user", "content": "."}, answer], generation_prompt=False)
            except RenderError:
                continue
            return "'argument'" not in text  # as Python writes an object that was taken for a text
        return False


def text_of(content: Any) -> str:
    """A message's content as text. Raises DataError for pictures, sound and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content))


def _texts(parts: Sequence[Any]) -> Iterator[str]:
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise DataError(f"a message's content has a part of type {kind!r}; expected text or parts of type 'text'")
        yield text


def arguments_of(arguments: Any) -> Any:
    """A call's arguments as an object, where they are one written as text; else as they are."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return parse_json(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
