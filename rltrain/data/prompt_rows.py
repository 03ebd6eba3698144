"""One row of a prompt file, as it is used."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from rltrain.config import schema
from rltrain.data.messages import Message, parse_messages, parse_tools, shown
from rltrain.data.pair_rows import parse_pair
from rltrain.data.rows import BadRow, Row, look_up
from rltrain.data.tokenizer import UNKNOWN_MODEL, ModelLimits, Prompt, PromptEncoder
from rltrain.runtime.json_text import is_finite

Needs = Literal["label", "plain label", "response", "pair"]


@dataclass(frozen=True, slots=True)
class PromptRow:
    """`label` is set for datasets that need labels and have them, `response` for those that need responses, `rejected`
    beside it for those that need pairs; else they are empty."""

    prompt: Prompt
    label: str
    response: str | Sequence[Message]
    """Of a conversation the messages after the prompt: the first and the last are the assistant's."""
    tools: str
    """JSON text of the tools that the prompt shows; empty: none."""
    place: str
    """What its origin begins with. Shared by the rows of a file, of which there may be millions."""
    number: int
    rejected: str | Sequence[Message] = ""
    """Of a pair the response that was not preferred; `response` is the other one."""
    margin: float = 0.0
    """Of a pair, by how much `response` should at least score higher."""

    @property
    def origin(self) -> str:
        """File and line, for messages."""
        return f"{self.place}{self.number}"


@dataclass(frozen=True)
class RowParser:
    """Of one source's rows."""

    source: schema.PromptSource
    encoder: PromptEncoder
    needs: Needs
    difficulty_key: str | None = None
    model: ModelLimits = UNKNOWN_MODEL
    """Of the model that is trained or evaluated."""

    @property
    def keys(self) -> frozenset[str]:
        """What it looks up."""
        source = self.source
        columns: tuple[str | None, ...] = (source.label_key,)
        if self.needs == "response":
            columns = (source.response_key,)
        elif self.needs == "pair":
            columns = (source.chosen_key, source.rejected_key, source.margin_key)
        keys = (source.prompt_key, *columns, source.tools_key, source.system_key, self.difficulty_key)
        return frozenset(key for key in keys if key is not None)

    def parse(self, values: Row | BadRow, place: str, number: int) -> PromptRow:
        """A row's values; `place` and `number` together are its origin. Raises BadRow."""
        if isinstance(values, BadRow):
            raise values
        source = self.source
        tools = "" if source.tools_key is None else self._tools(values, source.tools_key)
        if self.needs == "pair":
            pair = parse_pair(values, source, self._prompt)
            return PromptRow(pair.prompt, "", pair.chosen, tools, place, number, pair.rejected, pair.margin)
        prompt = self._prompt(look_up(values, source.prompt_key), source.prompt_key)
        if source.system_key is not None:
            prompt = self._with_system(prompt, values, source.system_key)
        label = ""
        response: str | Sequence[Message] = ""
        if self.needs == "response" and source.response_key is not None:
            response = _parse_response(look_up(values, source.response_key), source.response_key)
        elif self.needs == "response":
            prompt, response = split_conversation(prompt, source.prompt_key, source.learnt_turns)
        else:
            label = self._label(values)
        return PromptRow(prompt, label, response, tools, place, number)

    def difficulty(self, values: Row | BadRow) -> float:
        """By which a curriculum sorts; 0 without one. Raises BadRow."""
        if self.difficulty_key is None or isinstance(values, BadRow):
            return 0.0
        value = look_up(values, self.difficulty_key)
        if isinstance(value, (bool, int, float, Decimal)) and math.isfinite(value):
            return float(value)
        raise BadRow(f"has {shown(value)} under {self.difficulty_key!r}; expected a number (data.curriculum.key)")

    def _prompt(self, value: Any, key: str) -> Prompt:
        if isinstance(value, str) and value:
            return value
        if not isinstance(value, list) or not value:
            raise BadRow(f"has {shown(value)} under {key!r}; expected a text or a list of chat messages, not empty")
        if not self.encoder.uses_template:
            raise BadRow(f"has chat messages under {key!r}, but {self.encoder.without_template}; expected a text")
        return parse_messages(value, key)

    def _with_system(self, prompt: Prompt, values: Row, key: str) -> Prompt:
        try:
            said = look_up(values, key)
        except BadRow:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if not said or messages[0]["role"] == "system":
            return prompt
        if not isinstance(said, str) or not self.encoder.uses_template:
            raise BadRow(f"has {shown(said)} under {key!r}; expected a text, and a chat template that writes it")
        return [{"role": "system", "content": said}, *messages]

    def _tools(self, values: Row, key: str) -> str:
        try:
            value = look_up(values, key)
        except BadRow:
            return ""
        tools = sys.intern(parse_tools(value, key))  # which many rows share
        if tools and not self.encoder.uses_template:
            raise BadRow(f"has tools under {key!r}, but {self.encoder.without_template}; expected none")
        return tools

    def _label(self, values: Row) -> str:
        key = self.source.label_key
        if key is None:
            return ""
        try:
            label = look_up(values, key)
        except BadRow as problem:
            raise BadRow(f"{problem} (rows without labels: label_key null)", problem.reason) from None
        if self.needs == "plain label" and isinstance(label, (list, dict)):
            raise BadRow(
                f"has {shown(label)} under {key!r}, which the reward function would compare as JSON text; "
                f"expected a text, a number or a truth value (a field of an object: label_key {key}.FIELD)"
            )
        return _parse_label(label, key)


def split_conversation(
    prompt: Prompt, key: str, learnt: Literal["all", "last"] = "all"
) -> tuple[list[Message], list[Message]]:
    """(what stands before the assistant's first turn that is learnt, the rest up to its last one). Raises BadRow."""
    if isinstance(prompt, str):
        raise BadRow(
            f"has a text under {key!r}; expected a list of chat messages with turns of the assistant, since "
            "response_key is null"
        )
    places = [place for place, message in enumerate(prompt) if message["role"] == "assistant"]
    if not places or not places[0]:
        raise BadRow(
            f"has messages of roles {', '.join(message['role'] for message in prompt)} under {key!r}; expected one of "
            "the user first, and turns of the assistant after it"
        )
    if any(after - before == 1 for before, after in zip(places, places[1:], strict=False)):
        raise BadRow(f"has two turns of the assistant one after the other under {key!r}; expected one between them")
    begin = places[0] if learnt == "all" else places[-1]
    return [*prompt[:begin]], [*prompt[begin : places[-1] + 1]]


def _parse_label(value: Any, key: str) -> str:
    """Texts as they are; numbers and truth values as JSON writes them; lists and objects as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, (bool, int, float, list, dict)) and is_finite(value):
        try:
            return json.dumps(value, ensure_ascii=False)
        except TypeError as error:
            raise BadRow(f"has a label under {key!r} that JSON cannot write: {error}") from error
    raise BadRow(f"has {shown(value)} under {key!r}; expected a label: a text, a finite number, a truth value or JSON")


def _parse_response(value: Any, key: str) -> str:
    if isinstance(value, str) and value:
        return value
    raise BadRow(f"has {shown(value)} under {key!r}; expected the demonstrated response: a text, not empty")
