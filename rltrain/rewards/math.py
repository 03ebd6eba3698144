"""Reward 1 for a response if its final answer is mathematically equal to the label's."""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

from math_verify import parse, verify

MAX_ANSWER_CHARS = 300
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
GSM8K_MARK = "####"
LAST_NUMBER = re.compile(r"(?<![\w.)])-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?|\d[\d,]*(?:\.\d+)?(?:/\d+)?")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")
TYPESET_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\!|\\[,;:]|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
"""Separators between groups of three digits: LaTeX's commas and thin spaces, and Unicode's."""
SPACED_NUMBER = re.compile(r"[-+]?\d{1,3}(?:\\? \d{3})+(?:\.\d+)?")
"""A whole answer with plain spaces between groups of three digits. Inside a sentence these could be two numbers."""
EMPTY_SET = re.compile(r"\\varnothing(?![A-Za-z])")
NUMBER_WITH_UNIT = re.compile(
    r"([-+]?\$?\d[\d,]*(?:\.\d+)?)\$?((?: +(?:[A-Za-z]{3,}|ft|in|mi|km|cm|mm|kg|mg|lb|oz|hr|ml|sq|of|an?)\.?)+)"
)
NOT_UNITS = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|score|half|halves|thirds?|quarters?|fourths?|squared|cubed|"
    r"plus|minus|times|over|divided|point|and|sqrt|sin|cos|tan|log|exp|mod)\b",
    re.IGNORECASE,
)
"""Words that change the value of the number before them."""

# math_verify warns that its time limits are off. They need the main thread and miss hangs in C. The scorer has its own
# limit.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(prompt: str, response: str, label: str, *, last_number: bool = True, after: Sequence[str] = ()) -> float:
    r"""Returns 1 if the final answers of response and label are equal, else 0.

    A final answer is the last \boxed{...}, else the text after the last "####" on its line. Without either, the whole
    label is its answer. The response's answer is then its last number, if `last_number`. After "####" a number with a
    unit equals the number, as in GSM8K: "#### 18 dollars" is 18.

    With `after`, only the text after one of these marks counts, such as "</think>". The reward is 0 without a mark.
    """
    if after:
        mark = next((mark for mark in after if mark in response), None)
        if mark is None:
            return 0.0
        response = response.rpartition(mark)[2]
    answer = marked_answer(response)
    if answer is None and last_number:
        answer = _last_number(response)
    if answer is None:
        return 0.0
    marked = marked_answer(label)
    expected = label.strip() if marked is None else marked
    if equivalent(answer, expected):
        return 1.0
    numbers = _number_with_unit(response), _number_with_unit(label)
    return float(numbers != (None, None) and equivalent(numbers[0] or answer, numbers[1] or expected))


def marked_answer(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, else the text after the last "####" on its line, else None."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, found, rest = text.rpartition(GSM8K_MARK)
    return rest.strip().split("\n")[0].strip() if found else None


def _number_with_unit(text: str) -> str | None:
    """Returns the number after the last "####" if only a unit follows it, else None."""
    if _last_boxed(text) is not None or (answer := marked_answer(text)) is None:
        return None
    match = NUMBER_WITH_UNIT.fullmatch(_trimmed(answer))
    return match[1] if match and not NOT_UNITS.search(match[2]) else None


def equivalent(answer: str, expected: str) -> bool:
    """Returns whether two answers in LaTeX or plain text are equal. Hostile input can take long."""
    answer, expected = _trimmed(answer), _trimmed(expected)
    if answer == expected:
        return bool(answer)
    if not 0 < len(answer) <= MAX_ANSWER_CHARS or not expected:
        return False
    number, expected_number = _plain_number(answer), _plain_number(expected)
    if number is not None and expected_number is not None:
        return number == expected_number
    gold, given = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (expected, answer))
    return bool(gold and given) and verify(gold, given, timeout_seconds=None)


def _last_boxed(text: str) -> str | None:
    for match in reversed(list(BOXED.finditer(text))):
        depth = 1
        for position in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[match.end() : position].strip()
    return None


def _last_number(text: str) -> str | None:
    numbers = LAST_NUMBER.findall(TYPESET_SEPARATOR.sub("", text))
    return numbers[-1].rstrip(",") if numbers else None


def _trimmed(answer: str) -> str:
    trimmed = answer.strip().strip("$").removesuffix(".").strip()
    trimmed = EMPTY_SET.sub(r"\\emptyset", TYPESET_SEPARATOR.sub("", trimmed))
    return re.sub(r"\\? ", "", trimmed) if SPACED_NUMBER.fullmatch(trimmed) else trimmed


def _plain_number(answer: str) -> Fraction | None:
    if not PLAIN_NUMBER.fullmatch(answer):
        return None
    numerator, _, denominator = answer.replace(",", "").partition("/")
    return Fraction(Decimal(numerator)) / Fraction(Decimal(denominator or 1))  # Decimal reads any number of digits
