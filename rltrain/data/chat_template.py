"""A checkpoint's chat template, and the end of the model's turn in it."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rltrain.data.image_parts import IMAGE, kind_of, without_sources
from rltrain.environments.interface import Message
from rltrain.errors import DataError
from rltrain.runtime.json_text import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The chat template: messages in, text out. No other code renders it.

TOOL_ROLES = ("tool", "function", "ipython")


class RenderError(Exception):
    """The template refuses the messages. The error has the template's words."""


class ChatTemplate:
    """The tokenizer's template with the tools and options of a job."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        takes_images: bool = False,
    ) -> None:
        """`options` are variables of the template, for example enable_thinking. With `takes_images` messages may have
        parts of type image."""
        self.tokenizer, self.takes_images = tokenizer, takes_images
        self.tools: list[Any] = [dict(tool) for tool in tools]
        self.options = dict(options)

    @property
    def source(self) -> str:
        """The template's source text. If a tokenizer has several templates, it is the rendered one."""
        return str(self.tokenizer.get_chat_template(tools=self.tools or None))

    def render(self, messages: Sequence[Message], *, generation_prompt: bool = True) -> str:
        """Returns the text of `messages`, by default up to the start of the model's turn. Raises RenderError."""
        return self._render([self._as_the_template_takes_it(message) for message in messages], generation_prompt)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the ids of `text` alone, with nothing added around it. Special tokens in the text
        become their ids."""
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
        taken = self.bare(message)
        if isinstance(taken.get("content"), list | tuple) and not self._takes_parts(taken):
            taken["content"] = text_of(taken["content"])
        if taken.get("tool_calls"):
            taken["tool_calls"] = [self._call(call) for call in taken["tool_calls"]]
        return taken

    def bare(self, message: Message) -> dict[str, Any]:
        """Returns the message without the data of its images. Raises DataError for parts that cannot be used."""
        return without_sources(message) if self._takes_parts(message) else dict(message)

    def _takes_parts(self, message: Message) -> bool:
        return self.takes_images and message["role"] != "assistant"

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        arguments = arguments_of(function.get("arguments"))
        function["arguments"] = arguments if self._takes_objects else as_text(arguments)
        return {"type": "function", **call, "function": function}

    @cached_property
    def _takes_objects(self) -> bool:
        """Whether the template expects a call's arguments as an object. Others expect OpenAI's JSON text."""
        call = {"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"argument": "x"}}}
        for content in (None, ""):
            answer = {"role": "assistant", "content": content, "tool_calls": [call]}
            try:
                text = self._render([{"role": "user", "content": "."}, answer], generation_prompt=False)
            except RenderError:
                continue
            return "'argument'" not in text  # Python's text of an object shows that the template took it for a string
        return False


IMAGE_CURE = "for images: set model.vision"


def text_of(content: Any, cure: str = IMAGE_CURE) -> str:
    """Returns a message's content as text. Raises DataError for images, audio and other parts. The error for an image
    ends with `cure`."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_texts(content, cure))


def _texts(parts: Sequence[Any], cure: str) -> Iterator[str]:
    for part in parts:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            hint = f" ({cure})" if kind_of(part) == IMAGE else ""
            raise DataError(
                f"a message's content has a part of type {kind!r}; expected text or parts of type 'text'{hint}"
            )
        yield text


def arguments_of(arguments: Any) -> Any:
    """Returns a call's arguments as an object if they are an object in JSON text, else unchanged."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        return parse_json(arguments) if arguments.strip() else {}
    except ValueError:
        return arguments


def as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


# The end of the model's turn in the template, and the missing closing of a generated turn.

PLACEHOLDER = "rltrainsturn"


@dataclass(frozen=True)
class TurnEnd:
    r"""The tokens that end a turn.

    A template closes a turn by text such as "<|im_end|>\n". A cut turn lacks all of it. A turn ended by the model only
    lacks the text after its end token. The model may have used another of its end tokens than the template. That token
    then replaces the template's, because generated ids are never changed.
    """

    closing: tuple[int, ...]
    """The template's closing of a turn, up to its end token. Empty if it closes with plain text or not at all."""
    tokens: frozenset[int]
    """All tokens that end a turn when the model generates them."""
    added: frozenset[int]
    """Tokens written as themselves in a text: special tokens and others added to the vocabulary."""
    last: int | None
    """The token that ends a turn before nothing or a user's message. None if no such token is known."""

    @classmethod
    def of(cls, template: ChatTemplate, end_tokens: Collection[int]) -> "TurnEnd":
        """Finds the ends in a short rendered conversation. `end_tokens` are further end tokens of the model.

        Some templates write no end token. Then the mark of the next message ends a turn if the checkpoint names that
        mark among its end tokens.
        """
        added = frozenset(template.tokenizer.added_tokens_decoder) | frozenset(template.tokenizer.all_special_ids)
        eos = template.tokenizer.eos_token_id
        known = frozenset(end_tokens) | ({eos} if isinstance(eos, int) else frozenset())
        ways = _behind_turns(template)
        closing = _beginning_of_all(ways)
        ends = [place for place, token in enumerate(closing) if token in added]
        end = next((place for place in ends if closing[place] in known), ends[0] if ends else -1)
        closing = closing[: end + 1]
        marks = [way[0] for way in ways if way and way[0] in known]
        last = closing[-1] if closing else marks[-1] if marks else eos if isinstance(eos, int) else None
        return cls(closing, known | set(closing[-1:]), added, last)

    def ended(self, turn: Sequence[int]) -> bool:
        """Returns whether the model ended `turn`. Otherwise a limit cut it."""
        return bool(turn) and turn[-1] in self.tokens

    def missing(self, turn: Sequence[int], following: Sequence[int]) -> Sequence[int]:
        """Returns `following`, the template's ids after a turn, without the part that `turn` already ends with."""
        first = next((place for place, token in enumerate(following) if token in self.added), None)
        if first is None or not self.ended(turn):
            return following
        if following[first] == turn[-1]:
            return following[first + 1 :]
        if self.closing and tuple(following[: len(self.closing)]) == self.closing:
            return following[len(self.closing) :]
        closes_otherwise = bool(self.closing) and following[first] in self.tokens
        return following[first + 1 :] if closes_otherwise else following


def ends_of_turns(
    tokenizer: "PreTrainedTokenizerBase", end_tokens: Collection[int], template: ChatTemplate | None
) -> frozenset[int]:
    """Returns all tokens that end a model's turn, for engines and readers alike.

    These are `end_tokens` from the checkpoint, the tokenizer's eos_token and, with a chat template, its closing token
    of a turn.
    """
    if template is not None:
        return TurnEnd.of(template, end_tokens).tokens
    eos = tokenizer.eos_token_id
    return frozenset(end_tokens) | ({eos} if isinstance(eos, int) else frozenset())


def _behind_turns(template: ChatTemplate) -> list[tuple[int, ...]]:
    """Returns the template's ids after a turn: at the end of a conversation, and before a user's message."""
    asked = {"role": "user", "content": "."}
    said = {"role": "assistant", "content": PLACEHOLDER}
    ways = []
    for messages, goes_on in (([asked, said], False), ([asked, said, asked], True)):
        try:
            text = template.render(messages, generation_prompt=goes_on)
        except RenderError:
            continue
        ways.append(template.encode(text.rpartition(PLACEHOLDER)[2]))
    return ways


def _beginning_of_all(ways: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    equal = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ways, strict=False))
    return tuple(tokens[0] for tokens in equal)
