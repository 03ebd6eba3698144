"""What reward functions are given and what they returned, checked."""

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple, TypedDict

from rltrain.runtime.machine import describe_raised

logger = logging.getLogger(__name__)

# The numbers that a reward can be: those that a float32 tensor holds.

MAX_REWARD = float.fromhex("0x1.fffffep127")
EXPECTED_REWARD = f"expected a finite number from {-MAX_REWARD:.3g} to {MAX_REWARD:.3g}, which float32 can hold"


def is_reward(number: float) -> bool:
    """Returns whether `number`, which may be an int of any size, is finite in float32."""
    return abs(number) <= MAX_REWARD


# What a reward function returned for a sample, as rewards and metrics or as what was wrong with it.

SCORE, TURNS = "score", "turns"
EXPECTED = "expected a number, or a dict whose 'score' is one"


@dataclass(frozen=True)
class Answer:
    """What came of a sample: its score, or an error; neither of them where the function is not for it."""

    score: float | None = None
    error: str | None = None
    timeout: bool = False
    """The error is that it took too long."""
    traceback: str = ""
    turns: Sequence[float] | None = None
    """The rewards of its turns, where the function rewarded them one by one."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the function said in numbers."""

    @property
    def is_skipped(self) -> bool:
        """Whether the function is not for this sample."""
        return self.score is None and self.error is None


class PlainError(Exception):
    """One whose message says it all: it is told without place and traceback."""


class TookTooLongError(PlainError):
    """Counts as a time-out."""

    def __init__(self, limit: str, who: str = "") -> None:
        super().__init__(f"{who} took longer than {limit}".lstrip())


def time_limit(limit_s: float, *, batched: bool = False) -> str:
    """Returns what a sample may take, in words."""
    return f"reward.timeout_s = {limit_s:g}{' for each sample of its batch' * batched}"


def as_error(error: BaseException, own_files: Collection[str] = ()) -> Answer:
    """What was raised, the innermost place of the function's file, and the traceback without frames of `own_files`."""
    if isinstance(error, PlainError):
        return Answer(error=str(error), timeout=isinstance(error, TookTooLongError))
    what, traceback = describe_raised(error, own_files)
    return Answer(error=what, traceback=traceback)


def as_answer(returned: Any, num_turns: int = 1, score_key: str = SCORE) -> Answer:
    """Of a number, a truth value or whatever converts to float by itself; of a list of as many as there are turns; or
    of a dict with one of either under `score_key` and "turns", whose other numbers are metrics.

    The reward is the sum over turns. A score beside them belongs to the last one.
    """
    if isinstance(returned, float) and is_reward(returned):
        return Answer(float(returned))  # most by far
    try:
        if isinstance(returned, Mapping):
            return _of_mapping(returned, num_turns, score_key)
        if isinstance(returned, (list, tuple)):
            total, turns = _of_turns(returned, num_turns)
            return Answer(total, turns=turns)
        return Answer(_reward(returned))
    except PlainError as wrong:
        return Answer(error=str(wrong))


def _reward(returned: Any, place: str = "") -> float:
    """Returns it as a number that a reward can be. Raises PlainError."""
    number = _number(returned)
    if number is None:
        raise PlainError(f"returned {type(returned).__name__} {returned!r:.100}{place}; {EXPECTED}")
    if not is_reward(number):
        raise PlainError(f"returned {number}{place}; {EXPECTED_REWARD}")
    return number


def _number(value: Any) -> float | None:
    if hasattr(type(value), "__float__"):
        with suppress(Exception):
            return float(value)
    return None


def _of_turns(rewards: Sequence[Any], num_turns: int) -> tuple[float, list[float]]:
    """Returns their sum, and each of them. Raises PlainError."""
    if len(rewards) != num_turns:
        returned = f"returned a list of {len(rewards)} rewards"
        raise PlainError(f"{returned}; expected one for each of {num_turns} turns, or a number")
    turns = [_reward(reward, f" for turn {turn}") for turn, reward in enumerate(rewards)]
    return _reward(sum(turns), " as the sum over turns"), turns


def _of_mapping(returned: Mapping[Any, Any], num_turns: int, score_key: str) -> Answer:
    """Raises PlainError."""
    parts = [_reward(returned[score_key], f" under {score_key!r}")] if score_key in returned else []
    turns = None
    if isinstance(returned.get(TURNS), (list, tuple)):
        of_turns, turns = _of_turns(returned[TURNS], num_turns)
        parts.append(of_turns)
    if not parts:
        keys = ", ".join(map(repr, returned)) or "none"
        raise PlainError(f"returned a dict without {score_key!r}, its keys are {keys:.200}; {EXPECTED}")
    score = _reward(sum(parts), f" as the sum of {score_key!r} and turns")
    if turns is not None:
        turns[-1] = turns[-1] + score - parts[-1]
    metrics = {str(key): _number(value) for key, value in returned.items() if key != score_key}
    finite = {key: number for key, number in metrics.items() if number is not None and isfinite(number)}
    return Answer(score, turns=turns, metrics=finite)


# What reward functions can be given of a sample.

Message = Mapping[str, Any]
"""A chat message as OpenAI writes it: role and content, and where they apply tool_calls, tool_call_id and name."""


class Turn(TypedDict):
    """What the model said in one turn of a conversation, and what came of it."""

    message: Message
    """The assistant's."""
    replies: Sequence[Message]
    """What the environment answered, before the next turn."""
    reward: float
    """The environment's, for this turn."""


class Scorable(NamedTuple):
    """A sample. All but the first three fields are filled where a function asks for them, see `RewardFunction.fields`;
    JSON can write all of them."""

    prompt: str
    """As text: a chat's messages are joined by blank lines."""
    response: str
    """Text without special tokens."""
    label: str
    messages: Sequence[Message] = ()
    """The prompt's, where its row has chat messages."""
    label_value: Any = None
    """The label as it stands in its row, which need not be a text."""
    row: Mapping[str, Any] = {}  # one for all samples without columns: nobody changes it
    """The columns that functions ask for, by name."""
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    """All tokens behind the prompt."""
    response_mask: Sequence[bool] = ()
    """Which of them the model drew."""
    truncated: bool = False
    group: int = 0
    """Samples of one prompt have the same number and stand together."""
    sample_id: int = 0
    step: int = 0
    turns: Sequence[Turn] = ()
    """Of a conversation with several; nothing where there was one."""
    env_reward: float = 0.0
    """The environment's, of all turns together; 0 without an environment."""

    @property
    def num_turns(self) -> int:
        return len(self.turns) or 1

    def completion(self) -> list[Message]:
        """The chat messages behind the prompt's."""
        if not self.turns:
            return [{"role": "assistant", "content": self.response}]
        return [message for turn in self.turns for message in (turn["message"], *turn["replies"])]

    def conversation(self) -> list[Message]:
        """All of it as chat messages; a prompt without any is the user's."""
        prompt = self.messages or [{"role": "user", "content": self.prompt}]
        return [*prompt, *self.completion()]

    def message(self, fields: Collection[str]) -> dict[str, Any]:
        """Prompt, response, label and these fields, for a worker process: Scorable(**message) there."""
        values: dict[str, Any] = {"prompt": self.prompt, "response": self.response, "label": self.label}
        for name in fields:
            values[name] = getattr(self, name)
        return values


# The first samples that could not be scored are told of in the log.

MAX_LOGGED_FAILURES = 10


class FailureLog:
    """Warns of the samples that `who` has failed on, until there are too many."""

    def __init__(self, who: str) -> None:
        self.who, self.num_failures = who, 0

    def add(self, sample: Scorable, reason: str) -> None:
        """Warns of one more, unless there have been too many."""
        self.num_failures += 1
        if self.num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self.num_failures == MAX_LOGGED_FAILURES else ""
            logger.warning("%s on response %.80r: %s%s", self.who, sample.response, reason, last)
