"""What a judge is asked of a sample, and how a number is read from its answer."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rltrain.config.schema import Judge
from rltrain.errors import ConfigError
from rltrain.rewards.conventions import Columns, Wants
from rltrain.rewards.locating import locate
from rltrain.rewards.reward_range import EXPECTED_REWARD, is_reward
from rltrain.rewards.scorable import Scorable

FIELD = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
RESPONSE, CONVERSATION = "response", "conversation"
VALUES: Mapping[str, Callable[[Scorable], str]] = {
    "prompt": lambda sample: sample.prompt,
    RESPONSE: lambda sample: sample.response,
    "label": lambda sample: sample.label,
    CONVERSATION: lambda sample: "\n\n".join(
        f"{message['role']}: {message.get('content') or ''}" for message in sample.conversation()
    ),
}


class Question(Wants):
    """judge.prompt, with the fields of a sample that it names. Every other name is a column's.

    Raises ConfigError for a template that does not show the response, or a file that cannot be read.
    """

    def __init__(self, prompt: str | None) -> None:
        self.template = _template(prompt)
        names = {name for _, name in FIELD.findall(self.template) if name}
        if not names & {RESPONSE, CONVERSATION}:
            raise ConfigError(
                f"judge.prompt: got {self.template!r:.200}; expected a text with {{{RESPONSE}}} or {{{CONVERSATION}}}: "
                "the judge would not see what it is to judge"
            )
        self.takes_label = "label" in names
        self.columns = Columns(required=frozenset(names - VALUES.keys()))
        self.fields = frozenset({"sample_id", *(("messages", "turns") if CONVERSATION in names else ())})

    def of(self, sample: Scorable) -> str:
        """The question about it."""

        def value(match: re.Match[str]) -> str:
            literal, name = match.groups()
            if literal is not None:
                return f"{{{literal}}}"
            return VALUES[name](sample) if name in VALUES else _shown(sample.row.get(name))

        return FIELD.sub(value, self.template)


def _template(prompt: str | None) -> str:
    """A text without any field is a file's name."""
    if prompt is None:
        raise ConfigError(f"judge.prompt: got null; expected what the judge is asked, a text with {{{RESPONSE}}}")
    if FIELD.search(prompt):
        return prompt
    try:
        return Path(prompt).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"judge.prompt: got {prompt!r:.200}, which has no field such as {{{RESPONSE}}} and is no file that can be "
            f"read: {error}"
        ) from error


def _shown(value: Any) -> str:
    return "" if value is None else str(value)


class NoVerdictError(Exception):
    """Why there is no number in an answer."""


def verdict_parser(settings: Judge) -> Callable[[str], float]:
    """Reads the number from an answer, or raises NoVerdictError. ConfigError where judge.verdict is of no form."""
    if "(" in settings.verdict:
        pattern = _pattern(settings.verdict)
        return lambda answer: _number(_last(pattern, answer))
    function = locate(settings.verdict, "judge.verdict", known=["a regular expression with one group"])
    return lambda answer: _number(_returned(function, answer))


def _pattern(verdict: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(verdict, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"judge.verdict: {verdict!r} is no regular expression: {error}") from error
    if pattern.groups != 1:
        raise ConfigError(
            f"judge.verdict: got {verdict!r} with {pattern.groups} groups; expected one, around the number; (?:...) "
            "groups without one"
        )
    return pattern


def _last(pattern: re.Pattern[str], answer: str) -> str:
    matches = [*pattern.finditer(answer)]
    if not matches:
        raise NoVerdictError("judge.verdict matches nothing")
    return str(matches[-1][1])


def _returned(function: Callable[[str], Any], answer: str) -> Any:
    try:
        return function(answer)
    except Exception as error:  # a user's function, on what a model wrote
        raise NoVerdictError(f"judge.verdict raised {type(error).__name__}: {error}") from error


def _number(value: Any) -> float:
    """As a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise NoVerdictError(f"judge.verdict gives {value!r:.100}, which is no number") from None
    if not is_reward(number):
        raise NoVerdictError(f"judge.verdict gives {number}; {EXPECTED_REWARD}")
    return number
