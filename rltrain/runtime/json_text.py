"""Reads JSON from other sources: checkpoints, rows of data, programs and servers."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_NESTED = 200
"""Most nested objects and lists in a value. Functions that walk a value recurse to this depth."""
TOO_DEEP = f"it is nested too deeply, in more than {MOST_NESTED} objects or lists"
_DECODER = json.JSONDecoder()


def parse_json(text: str | bytes, *, parse_int: Callable[[str], Any] | None = None) -> Any:
    """Returns the value of a JSON text. `parse_int` converts the digits of whole numbers.

    Raises ValueError if it is no JSON, if a number has too many digits, or if it is nested too deeply.
    """
    try:
        value = json.loads(text, parse_int=parse_int)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise (ValueError(too_many_digits()) if type(error) is ValueError else error) from None
    if isinstance(text, bytes):
        return _refuse_depth(value, text.count(b"{") + text.count(b"["))
    return _refuse_depth(value, text.count("{") + text.count("["))


def parse_json_at(text: str, begin: int = 0) -> tuple[Any, int]:
    """Returns the value that begins at position `begin` of the text, and the position after it. Raises ValueError like
    parse_json."""
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise (ValueError(too_many_digits()) if type(error) is ValueError else error) from None
    return _refuse_depth(value, text.count("{", begin, end) + text.count("[", begin, end)), end


def too_many_digits() -> str:
    """Returns the problem with a whole number too long for Python."""
    return f"it has a whole number of more than {sys.get_int_max_str_digits()} digits"


def read_json(file: Path) -> Any:
    """Returns the value in a file. Raises OSError if it cannot be read, and ValueError like parse_json."""
    return parse_json(file.read_text(encoding="utf-8"))


def lone_surrogate(value: Any) -> str | None:
    r"""Returns a lone surrogate in a text of a JSON value, or None if there is none.

    JSON can write one as an escape such as \ud83d, but it is no character, and UTF-8 cannot write it.
    """
    if isinstance(value, str):
        if value.isascii():
            return None
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
        return None
    texts = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((found for text in texts if (found := lone_surrogate(text)) is not None), None)


def with_escapes(value: Any) -> Any:
    r"""Returns a JSON value with each lone surrogate replaced by the six characters of its escape, such as \ud83d."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {with_escapes(name): with_escapes(part) for name, part in value.items()}
    return [with_escapes(part) for part in value] if isinstance(value, list) else value


def is_finite(value: Any) -> bool:
    """Returns whether JSON can write every number of a value. Python also reads NaN, Infinity and 1e999."""
    if isinstance(value, float):
        return math.isfinite(value)
    return all(map(is_finite, _parts(value)))


def _refuse_depth(value: Any, num_openings: int) -> Any:
    """Returns `value` if it is not nested too deeply. `num_openings` is the number of opening brackets in its text."""
    if num_openings <= MOST_NESTED:
        return value
    level = [value]
    for _ in range(MOST_NESTED):
        level = [part for one in level for part in _parts(one) if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError(TOO_DEEP)


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
