"""Prompts of requests, and the earlier turns that they continue."""

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
from rltrain.data.chat_template import arguments_of
from rltrain.data.image_parts import images_of
from rltrain.data.images import Context, ImageSource
from rltrain.endpoint.request_images import shared_content
from rltrain.endpoint.requests import invalid
from rltrain.environments.interface import Message, ToolCall
from rltrain.errors import DataError
from rltrain.rollout.sample import Sample, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Conversion between texts and token ids, outside of chats.


class TokenText:
    """A tokenizer for plain text. Implements `rollout.engine.Tokenizer` too."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, begins: bool) -> tuple[int, ...]:
        """Returns the token ids of `text`. `begins` adds the special tokens that the tokenizer puts before a text."""
        return tuple(self._tokenizer(text, add_special_tokens=begins)["input_ids"])

    def decode(self, token_ids: Sequence[int], /) -> str:
        """Returns the text of the ids without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def standing(self, token_ids: Sequence[int]) -> str:
        """Returns the beginning of the text that further tokens cannot change."""
        return self.decode(settled(self._tokenizer, token_ids, self._special)).rstrip(UNFINISHED_CHARACTER)

    @cached_property
    def _special(self) -> frozenset[int]:
        return special_tokens(self._tokenizer)

    def spelling(self, token: int) -> str:
        """Returns the text of a single token, even a special one."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))


# The record of a session, as trajectories of token ids. A trajectory branches if its conversation does.


@dataclass(frozen=True)
class PlaceOfTurn:
    """The end of turn number `turn` (from 0) of a trajectory."""

    trajectory: "SessionTrajectory"
    turn: int

    @property
    def num_tokens(self) -> int:
        """Number of response tokens up to here."""
        return self.trajectory.sample.turns[self.turn]

    @property
    def context(self) -> tuple[int, ...]:
        """Prompt and response tokens up to here."""
        return self.trajectory.sample.prompt + self.trajectory.sample.tokens[: self.num_tokens]

    @property
    def turn_tokens(self) -> tuple[int, ...]:
        """The tokens that the model generated in this turn."""
        return self.sample().last_turn

    @property
    def is_tip(self) -> bool:
        """Whether this is the trajectory's last turn."""
        return self.turn == len(self.trajectory.sample.turns) - 1

    def sample(self) -> Sample:
        """Returns the sample at the end of this turn, without later turns."""
        whole, turn = self.trajectory.sample, self.turn + 1
        cut = whole.first(self.num_tokens)
        return replace(cut, turns=whole.turns[:turn], turn_rewards=whole.turn_rewards[:turn])


@dataclass(eq=False)
class SessionTrajectory:
    """A trajectory of a session. Between turns `sample` has the status of its last turn."""

    sample: Sample
    parent: int | None = None
    """Sample id of the parent trajectory, or None."""
    num_shared_tokens: int = 0
    """Number of response tokens shared with the parent. Only the parent trains on these."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Rewards by turn."""

    @property
    def id(self) -> int:
        return self.sample.id

    @property
    def num_drawn_tokens(self) -> int:
        """Number of tokens generated in this trajectory, without those shared with the parent."""
        return sum(self.sample.loss_mask[self.num_shared_tokens :])

    def finished(self, status: Status | None = None) -> "RecordedTrajectory":
        """Returns the trajectory for training. Every generated token is in the loss mask of exactly one trajectory.

        `status` replaces the sample's own.
        """
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
    """A finished trajectory. Its sample is never pending. The first `num_shared_tokens` response tokens belong to
    `parent`, a sample id."""

    sample: Sample
    parent: int | None
    num_shared_tokens: int


@dataclass(frozen=True)
class RecordedSession:
    """The record of an episode."""

    id: str
    metadata: object
    """The metadata given when the session was opened."""
    trajectories: tuple[RecordedTrajectory, ...]
    """Trajectories in the order of their beginnings. Empty if no turn was finished."""
    reward: float | None
    """Reward of the episode, in addition to rewards of turns. None if none was set."""
    ended_by: str
    """The reason for the end, such as "finish", "DELETE" or a limit."""


class SampleIds:
    """A counter for ids of samples."""

    def __init__(self, first: int = 0) -> None:
        self._numbers = count(first)

    def take(self) -> int:
        return next(self._numbers)


# The index of a session's turns. A request finds the turn there that it continues.

ChatKey = bytes


class History:
    """The ends of a session's turns, by messages, text and ids. Of equal ones the first is kept."""

    def __init__(self) -> None:
        self._ends: list[PlaceOfTurn] = []
        self._by_messages: dict[ChatKey, PlaceOfTurn] = {}
        self._by_text: dict[str, PlaceOfTurn] = {}

    def add(self, end: PlaceOfTurn, *, key: ChatKey | None = None, text: str | None = None) -> None:
        """Adds the end of a turn. It is found by its ids, and also by `key` of its messages or by `text` if given."""
        self._ends.append(end)
        if key is not None:
            self._by_messages.setdefault(key, end)
        if text is not None:
            self._by_text.setdefault(text, end)

    def after_messages(self, keys: Sequence[ChatKey]) -> tuple[PlaceOfTurn | None, int]:
        """Returns the last turn among these messages and the number of messages up to it."""
        for length in range(len(keys) - 1, 0, -1):
            if (end := self._by_messages.get(keys[length])) is not None:
                return end, length
        return None, 0

    def after_text(self, text: str) -> tuple[PlaceOfTurn | None, int]:
        """Returns the turn with the longest text that is a prefix of `text`, and the length of that text."""
        found = max((known for known in self._by_text if text.startswith(known)), key=len, default=None)
        return (None, 0) if found is None else (self._by_text[found], len(found))

    def after_ids(self, ids: Sequence[int]) -> tuple[PlaceOfTurn | None, int]:
        """Returns the turn with the most ids that are a prefix of `ids`, and their number."""
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
    """Returns a key for each prefix of the messages, from length 0. Equivalent conversations have equal keys."""
    keys = [_digest(b"", list(tools))]
    for message in messages:
        keys.append(next_key(keys[-1], message))
    return keys


def next_key(key: ChatKey, message: Message) -> ChatKey:
    """Returns the key of a prefix from the key of the messages before its last one."""
    return _digest(key, _canonical(message))


def _digest(before: ChatKey, value: object) -> ChatKey:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
    return hashlib.sha256(before + text.encode(errors="surrogatepass")).digest()


def _canonical(message: Message) -> list[object]:
    """Returns the parts of a message that clients leave unchanged when they send it back."""
    role, content = message.get("role"), shared_content(message.get("content"))
    if role != "assistant":
        return [role, content, message.get("name")]
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [role, content.strip(), [[call.get("name"), arguments_of(call.get("arguments"))] for call in calls]]


# Prompts of all kinds of requests, and the reading of the turns generated for them.


@dataclass(frozen=True)
class Reply:
    """The parsed content of a turn."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    stop: str | None = None
    """The request's stop string that ended the turn, or None. The text ends before it."""


class Opening(ABC):
    """The prompt of a request, in one of several forms."""

    @property
    def sources(self) -> tuple[ImageSource, ...]:
        """The images of the whole prompt."""
        return ()

    @abstractmethod
    def begin(self, history: History) -> tuple[PlaceOfTurn | None, Context]:
        """Returns the turn to continue and the tokens to append, with the images among them.

        Returns (None, all tokens) for a new trajectory.
        """

    @abstractmethod
    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        """Returns the content of the turn's tokens so far. `mark` is unique to the turn."""

    @abstractmethod
    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Returns the beginning of an unfinished turn's text that further tokens cannot change."""

    @abstractmethod
    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        """Records in `history` that the turn ending at `end` answered this prompt with `reply`."""


@dataclass(frozen=True)
class ChatOpening(Opening):
    """Chat messages, with the chat format for the request's tools."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    format: ChatFormat

    @cached_property
    def keys(self) -> list[ChatKey]:
        """A key for each prefix of the messages."""
        return chat_keys(self.tools, self.messages)

    @cached_property
    def sources(self) -> tuple[ImageSource, ...]:
        """The images of the messages."""
        return images_of(self.messages)

    @cached_property
    def call_ids(self) -> frozenset[str]:
        """The ids of tool calls in the messages."""
        calls = (call for message in self.messages for call in message.get("tool_calls") or ())
        return frozenset(id for call in calls if isinstance(id := call.get("id"), str))

    def begin(self, history: History) -> tuple[PlaceOfTurn | None, Context]:
        end, count = history.after_messages(self.keys)
        if end is not None:
            with suppress(DataError):  # the template cannot continue this turn, so start again
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
    """A prompt without a chat template. The generated tokens are read as plain text."""

    tokens: TokenText

    def read(self, tokens: Sequence[int], stop: Sequence[str], mark: str) -> Reply:
        text, found = cut_at(self.tokens.decode(tokens), stop)
        return Reply(text, stop=found)

    def standing(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        return before_marks(self.tokens.standing(tokens), stop).rstrip()


@dataclass(frozen=True)
class TextOpening(PlainOpening):
    """A plain text prompt."""

    text: str

    def begin(self, history: History) -> tuple[PlaceOfTurn | None, Context]:
        end, length = history.after_text(self.text)
        return end, Context(self.tokens.encode(self.text[length:], begins=end is None))

    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        history.add(end, text=self.text + reply.text)


@dataclass(frozen=True)
class IdsOpening(PlainOpening):
    """A prompt of token ids."""

    ids: tuple[int, ...]

    def begin(self, history: History) -> tuple[PlaceOfTurn | None, Context]:
        end, length = history.after_ids(self.ids)
        return end, Context(self.ids[length:])

    def remember(self, history: History, end: PlaceOfTurn, reply: Reply) -> None:
        history.add(end)


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Returns `text` up to the first of the `stop` strings, and this string or None."""
    places = [(place, string) for string in stop if (place := text.find(string)) >= 0]
    if not places:
        return text, None
    place, string = min(places)
    return text[:place], string
