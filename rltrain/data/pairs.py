"""One row of a file of pairs: a prompt and two responses, one of them preferred."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

from rltrain.config import schema
from rltrain.data.rows import BadRow, Row, look_up
from rltrain.data.tokenizer import Message, Prompt, shown

Response = str | Sequence[Message]
"""A text, or messages. The first and the last message are the assistant's."""


@dataclass(frozen=True, slots=True)
class Pair:
    prompt: Prompt
    chosen: Response
    rejected: Response
    margin: float


def parse_pair(
    values: Row,
    source: schema.PromptSource,
    parse: Callable[[Any, str], Prompt],
    with_images: Callable[[Prompt], Prompt] = lambda prompt: prompt,
) -> Pair:
    """Parses a row of pairs. `parse(value, key)` makes a text or messages from a value. `with_images` adds the row's
    images to a prompt or a whole conversation. Raises BadRow.

    chosen_key and rejected_key have texts, or messages beginning with the assistant's, as responses to the prompt under
    prompt_key. Or they have whole conversations, and the common beginning of both is the prompt.
    """
    keys = source.chosen_key, source.rejected_key
    chosen, rejected = (parse(look_up(values, key), key) for key in keys)
    if chosen == rejected:
        raise BadRow(f"has the same under {keys[0]!r} and {keys[1]!r}; expected two responses")
    margin = 0.0 if source.margin_key is None else _margin(look_up(values, source.margin_key), source.margin_key)
    if _is_whole(chosen) != _is_whole(rejected):
        raise BadRow(
            f"has a whole conversation under one of {keys[0]!r} and {keys[1]!r}, and a response under the other; "
            "expected the same of both"
        )
    prompt: Prompt
    if not isinstance(chosen, str) and not isinstance(rejected, str) and _is_whole(chosen):
        chosen, rejected = with_images(chosen), with_images(rejected)
        assert not isinstance(chosen, str) and not isinstance(rejected, str), "messages stay messages"
        common = _num_equal(chosen, rejected)
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
        if not prompt or any(not side or side[0]["role"] != "assistant" for side in (chosen, rejected)):
            raise BadRow(
                f"has conversations under {keys[0]!r} and {keys[1]!r} that first differ in message {common + 1}; "
                "expected a prompt that they have in common, and then turns of the assistant in which they differ"
            )
    else:
        prompt = with_images(parse(look_up(values, source.prompt_key), source.prompt_key))
    _check_turns(chosen, keys[0])
    _check_turns(rejected, keys[1])
    return Pair(prompt, chosen, rejected, margin)


def _is_whole(side: Prompt) -> bool:
    """Returns whether it is a conversation from its beginning."""
    return not isinstance(side, str) and side[0]["role"] != "assistant"


def _num_equal(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Returns the number of equal messages at the beginning of both."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _check_turns(response: Response, key: str) -> None:
    roles = [] if isinstance(response, str) else [message["role"] for message in response]
    if roles and roles[-1] != "assistant":
        raise BadRow(f"has a message of role {roles[-1]!r} at the end of {key!r}; expected the assistant's")
    if ("assistant", "assistant") in pairwise(roles):
        raise BadRow(f"has two turns of the assistant one after the other under {key!r}; expected one between them")


def _margin(value: Any, key: str) -> float:
    if isinstance(value, (int, float, Decimal)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise BadRow(f"has {shown(value)} under {key!r}; expected a finite number (margin_key)")
