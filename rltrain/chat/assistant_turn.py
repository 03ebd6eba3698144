"""What a turn of the model says: its text, its reasoning and the tools that it calls."""

import hashlib
import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rltrain.chat.template import as_text
from rltrain.environments.interface import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
ID_LETTERS = 9
"""Mistral's templates take no other length."""
ID_FORM = re.compile(rf"[A-Za-z0-9]{{{ID_LETTERS}}}")


@dataclass(frozen=True)
class AssistantTurn:
    """A turn as those read it who do not read ids. It is never made into ids again."""

    text: str
    """What was said before the first tool call, reasoning included, without special tokens."""
    content: str
    """`text` without its reasoning."""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    """What stands between the family's marks of reasoning; None: the family has none, or the turn."""
    malformed: bool = False
    """Whether something that begins like a tool call is none; it is part of `text` then."""
    ended: bool = True
    """Whether the model ended the turn; otherwise a limit cut it."""

    def message(self) -> dict[str, Any]:
        """The turn as OpenAI writes it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": as_text(call.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class DrawnText:
    """Text of drawn ids that knows which stretches of it are special tokens, and which only look like them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], special: frozenset[int]) -> None:
        self.text = ""
        self._said: list[tuple[int, int]] = []
        for is_special, run in _runs(tokens, special):
            begin = len(self.text)
            self.text += str(tokenizer.decode(run, skip_special_tokens=False))
            if not is_special:
                self._said.append((begin, len(self.text)))

    def said(self, begin: int, end: int) -> str:
        """The text from `begin` to `end` without special tokens."""
        stretches = ((max(first, begin), min(last, end)) for first, last in self._said)
        return "".join(self.text[first:last] for first, last in stretches if first < last)


def _runs(tokens: Sequence[int], special: frozenset[int]) -> list[tuple[bool, list[int]]]:
    runs: list[tuple[bool, list[int]]] = []
    for token in tokens:
        if runs and not runs[-1][0] and token not in special:
            runs[-1][1].append(token)
        else:
            runs.append((token in special, [token]))
    return runs


@dataclass(frozen=True)
class Reasoning:
    """How a family marks what its model thinks before it answers."""

    opening: str
    closing: str
    begun: bool
    """Whether the prompt opens the reasoning, so that the model's turn begins inside it."""

    @classmethod
    def of(cls, template: str, generation_prompt: str) -> "Reasoning | None":
        """As told by a template's source and the text that it lets the model go on from."""
        for opening, closing in REASONING_MARKS:
            if closing in template:
                return cls(opening, closing, generation_prompt.rstrip().endswith(opening))
        return None

    def end(self, text: str, *, ended: bool) -> int | None:
        """Where in a turn's text the answer begins; None: the turn has no reasoning.

        Where the mark that closes it is missing, a turn that the model ended is an answer all the same if only the
        prompt began its reasoning: results of tools may be followed by no such prompt.
        """
        place = text.find(self.closing)
        if place >= 0:
            return place + len(self.closing)
        begins = re.match(rf"\s*{re.escape(self.opening)}", text) is not None
        return len(text) if begins or (self.begun and not ended) else None

    def inside(self, text: str) -> str:
        """The thought in `text`, which has its marks or was cut before them."""
        return text.strip().removeprefix(self.opening).removesuffix(self.closing).strip("\n")


def with_ids(
    calls: Sequence[ToolCall], turn: Sequence[int], mark: int | str, taken: Collection[str] = ()
) -> tuple[ToolCall, ...]:
    """Returns the calls, each with an id that no other has and that every template takes.

    An id that the model wrote is kept where it is one of these. The others are made of the turn and its mark, so equal
    turns with equal marks get equal ids. `taken` are ids of earlier calls.
    """
    digest = hashlib.sha256(repr((tuple(turn), mark)).encode()).hexdigest()
    made = (hashlib.sha256(f"{digest}{number}".encode()).hexdigest()[:ID_LETTERS] for number in itertools.count())
    used, named = set(taken), []
    for call in calls:
        is_usable = ID_FORM.fullmatch(call.id) is not None and call.id not in used
        id = call.id if is_usable else next(id for id in made if id not in used)
        used.add(id)
        named.append(replace(call, id=id))
    return tuple(named)
