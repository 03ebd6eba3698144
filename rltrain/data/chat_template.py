"""A checkpoint's chat template, and where the model's turn ends in it."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from rltrain.environments.interface import Message
from rltrain.errors import DataError
from rltrain.runtime.json_text import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A checkpoint's chat template: messages in, text out. It is rendered nowhere else.

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


# Where the model's turn ends in the template, and what of its closing a drawn turn lacks.

PLACEHOLDER = "rltrainsturn"


@dataclass(frozen=True)
class TurnEnd:
    """The tokens by which a turn can end.

    A template closes a turn by text such as "<|im_end|>\\n". Of a turn that was cut all of it is missing; of one that
    the model ended, only what follows its end token. Where the model ended its turn by another of its end tokens, that
    one stands for the template's, because what was drawn is never changed.
    """

    closing: tuple[int, ...]
    """How the template closes a turn, through the token that ends it; empty: by text alone, or not at all."""
    tokens: frozenset[int]
    """Every token that ends a turn when it is drawn."""
    added: frozenset[int]
    """Tokens that stand for themselves in a text: special ones, and others that were added to the vocabulary."""
    last: int | None
    """The token that ends a turn behind which nothing or a message of the user follows; None: none is known."""

    @classmethod
    def of(cls, template: ChatTemplate, end_tokens: Collection[int]) -> "TurnEnd":
        """As the template closes a short conversation; `end_tokens` are others of the model's.

        Some templates write no token that ends a turn. There the mark of the next message ends it, if the checkpoint
        names that mark among its end tokens.
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
        """Whether the model ended `turn`; otherwise a limit cut it."""
        return bool(turn) and turn[-1] in self.tokens

    def missing(self, turn: Sequence[int], following: Sequence[int]) -> Sequence[int]:
        """Of `following`, what the template writes after a turn, all but what `turn` ends with already."""
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
    """Returns every token that ends what a model says, for all who draw it or read it.

    These are `end_tokens`, which its checkpoint names, the tokenizer's eos_token and, where chats are rendered, the
    token by which the template closes a turn.
    """
    if template is not None:
        return TurnEnd.of(template, end_tokens).tokens
    eos = tokenizer.eos_token_id
    return frozenset(end_tokens) | ({eos} if isinstance(eos, int) else frozenset())


def _behind_turns(template: ChatTemplate) -> list[tuple[int, ...]]:
    """Returns what the template writes behind a turn, first where nothing follows, then before a user's message."""
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
