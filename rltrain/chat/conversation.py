"""A conversation as the engine sees it: ids, and which of them the model drew."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from rltrain.chat.assistant_turn import AssistantTurn
from rltrain.environments.interface import Message

if TYPE_CHECKING:
    from rltrain.chat.chat_format import ChatFormat


@dataclass(frozen=True)
class Conversation:
    """A record that only grows: what was drawn and what was observed are appended, and no id of it ever changes.

    Every step gives a new record and leaves the old one as it is, so that a conversation can branch at any of them.
    """

    format: "ChatFormat" = field(repr=False, compare=False)
    ids: tuple[int, ...]
    """Everything that the engine was given or drew."""
    turns: tuple[tuple[int, int], ...]
    """Where in `ids` each turn of the model begins and ends, its end token included."""
    messages: tuple[Message, ...]
    """The same as messages; those of the model as `ChatFormat.message_of` understood them."""

    @classmethod
    def begin(cls, format: "ChatFormat", messages: Sequence[Message]) -> "Conversation":
        """Up to where the model's first turn begins. Raises DataError where the template refuses `messages`."""
        return cls(format, format.prompt(messages), (), tuple(messages))

    @property
    def awaits_model(self) -> bool:
        """Whether the next turn is the model's; otherwise it has spoken last."""
        return not self.turns or self.turns[-1][1] < len(self.ids)

    @cached_property
    def drawn_mask(self) -> tuple[bool, ...]:
        """Of each id, whether the model drew it."""
        mask = [False] * len(self.ids)
        for begin, end in self.turns:
            mask[begin:end] = [True] * (end - begin)
        return tuple(mask)

    @property
    def last_turn(self) -> tuple[int, ...]:
        """The ids that the model drew last."""
        begin, end = self.turns[-1]
        return self.ids[begin:end]

    def drawn(self, tokens: Sequence[int]) -> "Conversation":
        """With a whole turn of the model; raises ValueError where it is not the model's turn, or `tokens` are none."""
        if not self.awaits_model or not tokens:
            raise ValueError("a turn needs tokens, and messages between it and the turn before")
        said = self.format.message_of(tokens, mark=len(self.turns)).message()
        turn = (len(self.ids), len(self.ids) + len(tokens))
        return Conversation(self.format, (*self.ids, *tokens), (*self.turns, turn), (*self.messages, said))

    def observed(self, messages: Sequence[Message]) -> "Conversation":
        """With what answers the last turn, up to where the next one begins.

        Raises ValueError where the model has not spoken, DataError where the template has no place for `messages`.
        """
        if self.awaits_model:
            raise ValueError("the model speaks first: nothing was drawn since the last messages")
        following = self.format.continuation(self.last_turn, messages)
        return Conversation(self.format, (*self.ids, *following), self.turns, (*self.messages, *messages))

    def said(self, turn: int) -> AssistantTurn:
        """What the model said in its `turn`-th turn."""
        begin, end = self.turns[turn]
        return self.format.message_of(self.ids[begin:end], mark=turn % len(self.turns))
