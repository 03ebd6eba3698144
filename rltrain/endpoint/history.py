"""What a session has seen, so that a request finds the turn that it goes on from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rltrain.data.chat_template import arguments_of, text_of
from rltrain.endpoint.trajectory import TurnEnd
from rltrain.environments.interface import Message

ChatKey = bytes


class History:
    """The ends of a session's turns: by the messages up to there, by the text, by the ids. Of equal ones the first."""

    def __init__(self) -> None:
        self._ends: list[TurnEnd] = []
        self._by_messages: dict[ChatKey, TurnEnd] = {}
        self._by_text: dict[str, TurnEnd] = {}

    def add(self, end: TurnEnd, *, key: ChatKey | None = None, text: str | None = None) -> None:
        """A turn has ended; `key` of the messages up to it, or the `text`, is how it can be found besides by ids."""
        self._ends.append(end)
        if key is not None:
            self._by_messages.setdefault(key, end)
        if text is not None:
            self._by_text.setdefault(text, end)

    def after_messages(self, keys: Sequence[ChatKey]) -> tuple[TurnEnd | None, int]:
        """(the last turn that these messages contain, how many of the messages there are up to it)."""
        for count in range(len(keys) - 1, 0, -1):
            if (end := self._by_messages.get(keys[count])) is not None:
                return end, count
        return None, 0

    def after_text(self, text: str) -> tuple[TurnEnd | None, int]:
        """(the turn whose text is the longest that `text` goes on from, the length of that)."""
        found = max((known for known in self._by_text if text.startswith(known)), key=len, default=None)
        return (None, 0) if found is None else (self._by_text[found], len(found))

    def after_ids(self, ids: Sequence[int]) -> tuple[TurnEnd | None, int]:
        """(the turn whose ids are the most that `ids` go on from, how many these are)."""
        best: tuple[TurnEnd | None, int] = None, 0
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
