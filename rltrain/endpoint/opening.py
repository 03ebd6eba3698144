"""What a request gives the model to go on from, and what is read out of the turn that it draws."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rltrain.data.assistant_turn import before_marks
from rltrain.data.chat_format import ChatFormat
from rltrain.endpoint.history import ChatKey, History, chat_keys, next_key
from rltrain.endpoint.refused import invalid
from rltrain.endpoint.token_text import TokenText
from rltrain.endpoint.trajectory import TurnEnd
from rltrain.environments.interface import Message, ToolCall
from rltrain.errors import DataError


@dataclass(frozen=True)
class Reply:
    """What a turn says."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    stop: str | None = None
    """The request's own stop string that ended it; the text ends before it."""


class Opening(Protocol):
    """A prompt in the form of one kind of request."""

    def begin(self, history: History) -> tuple[TurnEnd | None, tuple[int, ...]]:
        """(the turn that it goes on from, the tokens that follow its end); (None, all tokens) where it is a new one."""
        ...

    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        """What the turn's tokens say so far. No two turns have one `mark`."""
        ...

    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Returns the beginning of an unfinished turn's text that `read` will begin with, whatever is drawn next."""
        ...

    def remember(self, history: History, end: TurnEnd, reply: Reply) -> None:
        """The turn that ended at `end` answered it with `reply`."""
        ...


@dataclass(frozen=True)
class ChatOpening:
    """Chat messages, with the format of the tools that the request offers."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    format: ChatFormat

    @cached_property
    def keys(self) -> list[ChatKey]:
        return chat_keys(self.tools, self.messages)

    @cached_property
    def call_ids(self) -> frozenset[str]:
        """The ids of the calls in the messages."""
        calls = (call for message in self.messages for call in message.get("tool_calls") or ())
        return frozenset(id for call in calls if isinstance(id := call.get("id"), str))

    def begin(self, history: History) -> tuple[TurnEnd | None, tuple[int, ...]]:
        end, count = history.after_messages(self.keys)
        if end is not None:
            with suppress(DataError):  # the template has no place for these messages behind a turn: it is begun anew
                return end, self.format.continuation(end.turn_tokens, self.messages[count:])
        try:
            return None, self.format.prompt(self.messages)
        except DataError as error:
            raise invalid(str(error), "messages") from error

    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        said = self.format.message_of(tokens, mark=mark, taken_ids=self.call_ids)
        text, found = cut_at(said.content, stop)
        return Reply(text, said.tool_calls, said.reasoning or "", found)

    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        return before_marks(self.format.standing_content(tokens), stop).rstrip()

    def remember(self, history: History, end: TurnEnd, reply: Reply) -> None:
        calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
        message = {"role": "assistant", "content": reply.text, "tool_calls": calls}
        history.add(end, key=next_key(self.keys[-1], message))


@dataclass(frozen=True)
class TextOpening:
    """A text as it is."""

    text: str
    tokens: TokenText

    def begin(self, history: History) -> tuple[TurnEnd | None, tuple[int, ...]]:
        end, length = history.after_text(self.text)
        return end, self.tokens.encode(self.text[length:], begins=end is None)

    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        text, found = cut_at(self.tokens.decode(tokens), stop)
        return Reply(text, stop=found)

    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        return before_marks(self.tokens.standing(tokens), stop).rstrip()

    def remember(self, history: History, end: TurnEnd, reply: Reply) -> None:
        history.add(end, text=self.text + reply.text)


@dataclass(frozen=True)
class IdsOpening:
    """Token ids."""

    ids: tuple[int, ...]
    tokens: TokenText

    def begin(self, history: History) -> tuple[TurnEnd | None, tuple[int, ...]]:
        end, length = history.after_ids(self.ids)
        return end, self.ids[length:]

    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        text, found = cut_at(self.tokens.decode(tokens), stop)
        return Reply(text, stop=found)

    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        return before_marks(self.tokens.standing(tokens), stop).rstrip()

    def remember(self, history: History, end: TurnEnd, reply: Reply) -> None:
        history.add(end)


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """(`text` up to the first of the `stop` strings, which one that is)."""
    places = [(place, string) for string in stop if (place := text.find(string)) >= 0]
    if not places:
        return text, None
    place, string = min(places)
    return text[:place], string
