"""Reward 1 for a response whose final answer is mathematically equal to the label's."""

import logging
import re
from fractions import Fraction

from math_verify import parse, verify

MAX_ANSWER_CHARS = 300
BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
GSM8K_MARK = "####"
LAST_NUMBER = re.compile(r"(?<![\w.)])-?\$?\d[\d,]*(?:\.\d+)?(?:/\d+)?|\d[\d,]*(?:\.\d+)?(?:/\d+)?")
PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/[1-9]\d*)?")

# It warns that its own time limits are off. They need the main thread and miss hangs in C; the scorer's limit holds.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(prompt: str, response: str, label: str, *, last_number: bool = True) -> float:
    """1 if the final answers of response and label are equal, else 0.

    A final answer is the last \\boxed{...}, else what follows the last "####" on its line. Without either, a label is
    itself the answer, and a response's answer is its last number if `last_number`, else missing.
    """
    answer = marked_answer(response)
    if answer is None and last_number:
        answer = _last_number(response)
    expected = marked_answer(label)
    return float(answer is not None and equivalent(answer, label.strip() if expected is None else expected))


def marked_answer(text: str) -> str | None:
    """The last \\boxed{...}'s content, else what follows the last "####" on its line; None without either."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    _, found, rest = text.rpartition(GSM8K_MARK)
    return rest.strip().split("\n")[0].strip() if found else None


def equivalent(answer: str, expected: str) -> bool:
    """Whether two answers, as LaTeX or plain text, are equal. May take long on hostile input."""
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
    numbers = LAST_NUMBER.findall(text)
    return numbers[-1].rstrip(",") if numbers else None


def _trimmed(answer: str) -> str:
    return answer.strip().strip("$").removesuffix(".").strip()


def _plain_number(answer: str) -> Fraction | None:
    if not PLAIN_NUMBER.fullmatch(answer):
        return None
    numerator, _, denominator = answer.replace(",", "").partition("/")
    return Fraction(numerator) / Fraction(denominator or 1)
