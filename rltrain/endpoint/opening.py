"""What a request goes on from: a turn in a session's trajectories, or the beginning of one."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

from rltrain.data.assistant_turn import UNFINISHED_CHARACTER, before_marks, settled, special_tokens
from rltrain.data.chat_format import ChatFormat
from rltrain.data.chat_template import arguments_of, text_of
from rltrain.endpoint.requests import invalid
from rltrain.environments.interface import Message, ToolCall
from rltrain.errors import DataError
from rltrain.rollout.sample import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts of tokens and tokens of texts, outside of chats.


class TokenText:
    """Implements `rollout.stop_strings.Tokenizer` as well."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """`begins`: with what the tokenizer puts before a text, if anything."""
        return tuple(self._tokenizer(text, add_special_tokens=begins)["input_ids"])

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def standing(self, token_ids: Sequence[int]) -> str:
        """Returns the beginning of the text that stays, whatever tokens follow."""
        return self.decode(settled(self._tokenizer, token_ids, self._special)).rstrip(UNFINISHED_CHARACTER)

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_tokens(self._tokenizer)

    def spelling(self, token: int) -> str:
        """Of one token by itself, special or not."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


# What was said in a session, token by token: trajectories that branch where a conversation does.


@dataclass(frozen=True)
class PlaceOfTurn:
    """The place behind a trajectory's turn number `turn`, of 0, 1, ..."""

    trajectory: "SessionTrajectory"
    turn: int

    @property
    def num_tokens(self) -> int:
        """Response tokens up to here."""
        return self.trajectory.sample.turns[self.turn]

    @property
    def context(self) -> tuple[int, ...]:
        return self.trajectory.sample.prompt + self.trajectory.sample.tokens[: self.num_tokens]

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """What the model drew in this turn."""
        return self.sample().last_turn

    @property
    def is_tip(self) -> bool:
        return self.turn == len(self.trajectory.sample.turns) - 1

    def sample(self) -> Sample:
        """As it stood here, the turn ended; whatever followed is left out."""
        whole, turn = self.trajectory.sample, self.turn + 1
        cut = whole.first(self.num_tokens)
        return replace(cut, turns=whole.turns[:turn], turn_rewards=whole.turn_rewards[:turn])


@dataclass(eq=False)
class SessionTrajectory:
    """`sample` holds its ids, masks, log-probs, versions and turns; between turns it has the status of the last one."""

    sample: Sample
    parent: int | None = None
    """The id of the trajectory's sample that it branches from."""
    num_shared_tokens: int = 0
    """Response tokens that the parent has as well; they count as drawn there alone."""
    rewards: dict[int, float] = field(default_factory=dict)
    """By turn."""

    @property
    def id(self) -> int:
        return self.sample.id

    @property
    def num_drawn_tokens(self) -> int:
        """Here, not in a parent."""
        return sum(self.sample.loss_mask[self.num_shared_tokens :])

    def finished(self, status: Status | None = None) -> "RecordedTrajectory":
        """As it is to be trained on: every token that was drawn is masked in at the one trajectory that drew it."""
        sample = self.sample
        mask = (*[False] * self.num_shared_tokens, *sample.loss_mask[self.num_shared_tokens :])
        num_rewarded = max(self.rewards, default=-1) + 1
        rewards = tuple(self.rewards.get(turn, 0.0) for turn in range(num_rewarded))
        recorded = replace(
            sample,
            loss_mask=mask,
            turn_rewards=rewards,
            status=sample.status if status is None else status,
            turn_limit=None,
            goes_on=False,
        )
        return RecordedTrajectory(recorded, self.parent, self.num_shared_tokens)


@dataclass(frozen=True)
class RecordedTrajectory:
    """`sample` is never pending. `num_shared_tokens` of its response are its parent's, by the sample's id."""

    sample: Sample
    parent: int | None
    num_shared_tokens: int


@dataclass(frozen=True)
class RecordedSession:
    """What became of an episode."""

    id: str
    metadata: object
    """What it was opened with."""
    trajectories: tuple[RecordedTrajectory, ...]
    """In the order in which they began. None: nothing was drawn to its end."""
    reward: float | None
    """Of the episode, beside the turns' own; None: nobody has said."""
    ended_by: str
    """finish, close, or the limit that it ran into."""


class SampleIds:
    """Numbers of samples, each given once."""

    def __init__(self, first: int = 0) -> None:
        self._numbers = count(first)

    def take(self) -> int:
        return next(self._numbers)


# What a session has seen, so that a request finds the turn that it goes on from.

ChatKey = bytes


class History:
    """The ends of a session's turns: by the messages up to there, by the text, by the ids. Of equal ones the first."""

    def __init__(self) -> None:
        self._ends: list[PlaceOfTurn] = []
        self._by_messages: dict[ChatKey, PlaceOfTurn] = {}
        self._by_text: dict[str, PlaceOfTurn] = {}

    def add(self, end: PlaceOfTurn, *, key: ChatKey | None = None, text: str | None = None) -> None:
        """A turn has ended; `key` of the messages up to it, or the `text`, is how it can be found besides by ids."""
        self._ends.append(end)
        if key is not None:
            self._by_messages.setdefault(key, end)
        if text is not None:
            self._by_text.setdefault(text, end)

    def after_messages(self, keys: Sequence[ChatKey]) -> tuple[PlaceOfTurn | None, int]:
        """(the last turn that these messages contain, how many of the messages there are up to it)."""
        for length in range(len(keys) - 1, 0, -1):
            if (end := self._by_messages.get(keys[length])) is not None:
                return end, length
        return None, 0

    def after_text(self, text: str) -> tuple[PlaceOfTurn | None, int]:
        """(the turn whose text is the longest that `text` goes on from, the length of that)."""
        found = max((known for known in self._by_text if text.startswith(known)), key=len, default=None)
        return (None, 0) if found is None else (self._by_text[found], len(found))

    def after_ids(self, ids: Sequence[int]) -> tuple[PlaceOfTurn | None, int]:
        """(the turn whose ids are the most that `ids` go on from, how many these are)."""
        best: tuple[PlaceOfTurn | None, int] = None, 0
        given = tuple(ids)
        for end in self._ends:
            sample, num_tokens = end.trajectory.sample, end.num_tokens
            start = len(sample.prompt)
            length = start + num_tokens
            is_longer = best[1] < length < len(given)
            if is_longer and given[:start] == sample.prompt and given[start:length] == sample.tokens[:num_tokens]:
                best = end, length
        return best


def chat_keys(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[ChatKey]:
    """One for each first 0, 1, ... messages: equal for conversations that mean the same."""
    keys = [_digest(b"", list(tools))]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def next_key(key: ChatKey, message: Message) -> ChatKey:
    return _digest(key, _canonical(message))


def _digest(before: ChatKey, value: object) -> ChatKey:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(before + text.encode(errors="surrogatepass")).digest()


def _canonical(message: Message) -> list[object]:
    """What programs leave as it is when they send a message back to whom it came from."""
    role, content = message.get("role"), text_of(message.get("content"))
    if role != "assistant":
        return [role, content, message.get("name")]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [role, content.strip(), [[call.get("name"), arguments_of(call.get("arguments"))] for call in calls]]


# What a request gives the model to go on from, and what is read out of the turn that it draws.


@dataclass(frozen=True)
class Reply:
    """What a turn says."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    stop: str | None = None
    """The request's own stop string that ended it; the text ends before it."""


class Opening(ABC):
    """A prompt in the form of one kind of request."""

    @abstractmethod
    def begin(self, history: History) -> tuple[PlaceOfTurn | None, tuple[int, ...]]:
        """(the turn that it goes on from, the tokens that follow its end); (None, all tokens) where it is a new one."""

    @abstractmethod
    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        """What the turn's tokens say so far. No two turns have one `mark`."""

    @abstractmethod
    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Returns the beginning of an unfinished turn's text that `read` will begin with, whatever is drawn next."""

    @abstractmethod
    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        """The turn that ended at `end` answered it with `reply`."""


@dataclass(frozen=True)
class ChatOpening(Opening):
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

    def begin(self, history: History) -> tuple[PlaceOfTurn | None, tuple[int, ...]]:
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

    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        calls = [{"name": call.name, "arguments": call.arguments} for call in reply.tool_calls]
        message = {"role": "assistant", "content": reply.text, "tool_calls": calls}
        history.add(end, key=next_key(self.keys[-1], message))


@dataclass(frozen=True)
class PlainOpening(Opening):
    """A prompt that no chat template is applied to: what is drawn is text as it is."""

    tokens: TokenText

    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        text, found = cut_at(self.tokens.decode(tokens), stop)
        return Reply(text, stop=found)

    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        return before_marks(self.tokens.standing(tokens), stop).rstrip()


@dataclass(frozen=True)
class TextOpening(PlainOpening):
    """A text as it is."""

    text: str

    def begin(self, history: History) -> tuple[PlaceOfTurn | None, tuple[int, ...]]:
        end, length = history.after_text(self.text)
        return end, self.tokens.encode(self.text[length:], begins=end is None)

    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        history.add(end, text=self.text + reply.text)


@dataclass(frozen=True)
class IdsOpening(PlainOpening):
    """Token ids."""

    ids: tuple[int, ...]

    def begin(self, history: History) -> tuple[PlaceOfTurn | None, tuple[int, ...]]:
        end, length = history.after_ids(self.ids)
        return end, self.ids[length:]

    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        history.add(end)


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """(`text` up to the first of the `stop` strings, which one that is)."""
    places = [(place, string) for string in stop if (place := text.find(string)) >= 0]
    if not places:
        return text, None
    place, string = min(places)
    return text[:place], string
