"""The rows of files of preferences, checked when they are read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rltrain.config import schema
from rltrain.data.files import BadRow, Row, look_up, read_rows
from rltrain.data.prompts import MAX_KEPT_PROBLEMS, DroppedRows
from rltrain.data.tokenizer import Message, Prompt, PromptEncoder, prompt_text
from rltrain.errors import DataError


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model says, and the messages that answer it before its next turn."""

    said: str
    answered_by: tuple[Message, ...] = ()


Response = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    prompt: Prompt
    chosen: Response
    rejected: Response
    margin: float
    """0 where rows have none."""
    number: int
    """Its place among the usable rows."""
    origin: str
    """File and line, for messages."""

    @property
    def size(self) -> int:
        """Characters of both samples: how long a pair is, where its tokens are not known."""
        both = [text for response in (self.chosen, self.rejected) for turn in response for text in _texts(turn)]
        return 2 * len(prompt_text(self.prompt)) + sum(map(len, both))


def _texts(turn: Turn) -> list[str]:
    return [turn.said, *(message["content"] for message in turn.answered_by)]


def load_preferences(
    file: schema.PromptFile, data: schema.Data, encoder: PromptEncoder, *, config_key: str
) -> tuple[list[PreferenceRow], DroppedRows]:
    """The usable rows of `file`, which stands in the config as `config_key`, and what was left out.

    A bad row raises DataError with its place, or is skipped and counted, as data.on_bad_row says. Prompts of more than
    data.max_prompt_tokens are dropped and counted. Raises DataError where no row is left.
    """
    keys = {file.prompt_key, file.chosen_key, file.rejected_key, *((file.margin_key,) if file.margin_key else ())}
    rows: list[PreferenceRow] = []
    num_bad = num_too_long = 0
    problems: list[str] = []
    for origin, values in read_rows(Path(file.path), keys, f"{config_key}.path"):
        if len(rows) == file.max_rows:
            break
        try:
            row = _parse(values, len(rows), origin, file, encoder)
        except BadRow as problem:
            if data.on_bad_row == "refuse":
                raise DataError(
                    f"{origin}: the row {problem} ({config_key}; to leave such rows out: data.on_bad_row=skip)"
                ) from None
            num_bad += 1
            problems.append(f"{origin}: the row {problem}")
            continue
        longest = data.max_prompt_tokens
        if encoder.length_bound(row.prompt) > longest and len(encoder.encode(row.prompt)) > longest:
            num_too_long += 1
        else:
            rows.append(row)
    dropped = DroppedRows(num_bad, num_too_long, tuple(problems[:MAX_KEPT_PROBLEMS]))
    if not rows:
        limit = f"data.max_prompt_tokens: {data.max_prompt_tokens}"
        raise DataError(f"{config_key}: {file.path!r} has no usable row ({limit}): {dropped}")
    return rows, dropped


def _parse(
    values: Row | BadRow, number: int, origin: str, file: schema.PromptFile, encoder: PromptEncoder
) -> PreferenceRow:
    if isinstance(values, BadRow):
        raise values
    chosen, rejected = (_parse_side(look_up(values, key), key, encoder) for key in (file.chosen_key, file.rejected_key))
    if chosen == rejected:
        raise BadRow(f"has the same under {file.chosen_key!r} and {file.rejected_key!r}; expected two responses")
    whole = [side[0]["role"] != "assistant" for side in (chosen, rejected)]
    if any(whole) and not all(whole):
        raise BadRow(
            f"has a whole conversation under one of {file.chosen_key!r} and {file.rejected_key!r}, and a response "
            "under the other; expected the same of both"
        )
    prompt: Prompt
    if all(whole):
        prompt, chosen, rejected = _split(chosen, rejected, file)
    else:
        given = look_up(values, file.prompt_key)
        prompt = given if isinstance(given, str) and given else _parse_messages(given, file.prompt_key, encoder)
    margin = 0.0 if file.margin_key is None else _parse_margin(look_up(values, file.margin_key), file.margin_key)
    return PreferenceRow(prompt, _turns(chosen), _turns(rejected), margin, number, origin)


def _parse_side(value: Any, key: str, encoder: PromptEncoder) -> list[Message]:
    """A response, or a conversation that ends with one."""
    if isinstance(value, str) and value:
        return [{"role": "assistant", "content": value}]
    messages = _parse_messages(value, key, encoder)
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"has a {messages[-1]['role']!r} message at the end of {key!r}; expected the assistant's")
    return messages


def _parse_messages(value: Any, key: str, encoder: PromptEncoder) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"has {_shown(value)} under {key!r}; expected a text or a list of chat messages, not empty")
    if not encoder.uses_template:
        raise BadRow(f"has chat messages under {key!r}, but {encoder.without_template}; expected a text")
    messages = []
    for message in value:
        role, content = (message.get(name) if isinstance(message, dict) else None for name in ("role", "content"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise BadRow(f"has the chat message {_shown(message)} under {key!r}; expected role and content, both texts")
        messages.append({"role": role, "content": content})
    return messages


def _parse_margin(value: Any, key: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise BadRow(f"has {_shown(value)} under {key!r}; expected a finite number")


def _split(
    chosen: list[Message], rejected: list[Message], file: schema.PromptFile
) -> tuple[list[Message], list[Message], list[Message]]:
    """What two whole conversations have in common at the beginning, and the rest of each."""
    common = 0
    while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
        common += 1
    rests = chosen[common:], rejected[common:]
    if common == 0 or any(not rest or rest[0]["role"] != "assistant" for rest in rests):
        raise BadRow(
            f"has conversations under {file.chosen_key!r} and {file.rejected_key!r} that first differ in message "
            f"{common + 1}; expected them to differ from a message of the assistant on, and to have a prompt in common"
        )
    return chosen[:common], *rests


def _turns(messages: Sequence[Message]) -> Response:
    """`messages` of which the first and the last are the assistant's."""
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*places[1:], len(messages)]
    if any(end == place + 1 for place, end in zip(places[:-1], places[1:], strict=True)):
        raise BadRow("has two messages of the assistant in a row; expected one, or messages between them")
    return tuple(
        Turn(messages[place]["content"], tuple(messages[place + 1 : end]))
        for place, end in zip(places, ends, strict=True)
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
