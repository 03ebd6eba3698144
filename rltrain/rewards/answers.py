"""Inputs of reward functions and their checked answers."""

import base64
import io
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from rltrain.runtime.image_files import FORMATS
from rltrain.runtime.machine import describe_raised

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

# The range of rewards: the finite values of float32.

MAX_REWARD = float.fromhex("0x1.fffffep127")
EXPECTED_REWARD = f"expected a finite number from {-MAX_REWARD:.3g} to {MAX_REWARD:.3g}, which float32 can hold"


def is_reward(number: float) -> bool:
    """Returns whether `number` is finite in float32. It may be an int of any size."""
    return abs(number) <= MAX_REWARD


# Answers of reward functions.

SCORE, TURNS = "score", "turns"
EXPECTED = "expected a number, or a dict whose 'score' is one"


@dataclass(frozen=True)
class Answer:
    """The result for one sample: a score or an error. Without either, the function skips the sample."""

    score: float | None = None
    error: str | None = None
    timeout: bool = False
    """True if the error is a timeout."""
    traceback: str = ""
    turns: Sequence[float] | None = None
    """Rewards per turn, if the function returns them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Other numbers returned by the function."""

    @property
    def is_skipped(self) -> bool:
        """True if the function skips this sample."""
        return self.score is None and self.error is None


class PlainError(Exception):
    """An error with a complete message. It is reported without place and traceback."""


class TookTooLongError(PlainError):
    """A call exceeded its time limit. It counts as a timeout."""

    def __init__(self, limit: str, who: str = "") -> None:
        super().__init__(f"{who} took longer than {limit}".lstrip())


def time_limit(limit_s: float, *, batched: bool = False) -> str:
    """Returns the time limit of a sample in words."""
    return f"reward.timeout_s = {limit_s:g}{' for each sample of its batch' * batched}"


def as_error(error: BaseException, own_files: Collection[str] = ()) -> Answer:
    """Returns the error as an Answer. It has the innermost place in the function's file, and a traceback without frames
    of `own_files`."""
    if isinstance(error, PlainError):
        return Answer(error=str(error), timeout=isinstance(error, TookTooLongError))
    what, traceback = describe_raised(error, own_files)
    return Answer(error=what, traceback=traceback)


def as_answer(returned: Any, num_turns: int = 1, score_key: str = SCORE) -> Answer:
    """Converts a returned value to an Answer. Accepted are:

    - a number, a bool, or an object with `__float__`,
    - a list of one number per turn,
    - a dict with a number under `score_key`, a list under "turns", or both. Its other numbers become metrics.

    The reward is the sum over turns. A score next to turns is added to the last turn.
    """
    if isinstance(returned, float) and is_reward(returned):
        return Answer(float(returned))  # the common case
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
    """Returns the value as a valid reward. Raises PlainError if it is none."""
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
    """Returns the sum of the rewards and the list. Raises PlainError if one is invalid."""
    if len(rewards) != num_turns:
        returned = f"returned a list of {len(rewards)} rewards"
        raise PlainError(f"{returned}; expected one for each of {num_turns} turns, or a number")
    turns = [_reward(reward, f" for turn {turn}") for turn, reward in enumerate(rewards)]
    return _reward(sum(turns), " as the sum over turns"), turns


def _of_mapping(returned: Mapping[Any, Any], num_turns: int, score_key: str) -> Answer:
    """Returns the answer of a dict. Raises PlainError if it has no valid reward."""
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


# Samples as inputs of reward functions.

Message = Mapping[str, Any]
"""A chat message in OpenAI's form: role and content. It can also have tool_calls, tool_call_id and name."""


class Turn(TypedDict):
    """One turn of a conversation: the model's message, the replies and the reward."""

    message: Message
    """The assistant's message."""
    replies: Sequence[Message]
    """The environment's replies before the next turn."""
    reward: float
    """The environment's reward for this turn."""


class Scorable(NamedTuple):
    """A sample to score. All values fit into JSON. Fields after the first three are only filled if a function asks for
    them (see `Wants.fields`)."""

    prompt: str
    """The prompt as text. Messages of a chat are joined by blank lines."""
    response: str
    """The response as text, without special tokens."""
    label: str
    messages: Sequence[Message] = ()
    """Messages of the prompt, if its row has chat messages."""
    label_value: Any = None
    """The label of the row, of any type."""
    row: Mapping[str, Any] = {}  # shared by all samples without columns, and never changed
    """The requested columns of the row, by name."""
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    """All token ids after the prompt."""
    response_mask: Sequence[bool] = ()
    """True for each token of the response sampled by the model."""
    truncated: bool = False
    group: int = 0
    """Number of the prompt group. Samples of one group are adjacent."""
    sample_id: int = 0
    step: int = 0
    turns: Sequence[Turn] = ()
    """Turns of a conversation. Empty if there was only one turn."""
    env_reward: float = 0.0
    """The environment's reward, summed over turns. It is 0 without an environment."""
    images: Sequence[str] = ()
    """Images of the prompt, as paths of files or data URLs."""

    @property
    def num_turns(self) -> int:
        return len(self.turns) or 1

    def completion(self) -> list[Message]:
        """Returns the chat messages after the prompt."""
        if not self.turns:
            return [{"role": "assistant", "content": self.response}]
        return [message for turn in self.turns for message in (turn["message"], *turn["replies"])]

    def conversation(self) -> list[Message]:
        """Returns prompt and completion as chat messages. A prompt without messages becomes a message of the user."""
        prompt = self.messages or [{"role": "user", "content": self.prompt}]
        return [*prompt, *self.completion()]

    def opened_images(self) -> list["Image"]:
        """Returns the images of the prompt in RGB. Raises OSError if a file has no image."""
        return [_opened(image) for image in self.images]

    def message(self, fields: Collection[str]) -> dict[str, Any]:
        """Returns prompt, response, label and `fields` for a worker process. The worker makes Scorable(**message) of
        it."""
        values: dict[str, Any] = {"prompt": self.prompt, "response": self.response, "label": self.label}
        for name in fields:
            values[name] = getattr(self, name)
        return values


def _opened(reference: str) -> "Image":
    from PIL import Image

    _, comma, text = reference.partition(",")
    is_url = reference.startswith("data:") and comma
    with Image.open(io.BytesIO(base64.b64decode(text)) if is_url else reference, formats=FORMATS) as image:
        return image.convert("RGB")


# Warnings about failed samples.

MAX_LOGGED_FAILURES = 10


class FailureLog:
    """A log of the first failures of `who`, as warnings."""

    def __init__(self, who: str) -> None:
        self.who, self.num_failures = who, 0

    def add(self, sample: Scorable, reason: str) -> None:
        """Counts a failure. Logs it unless there were too many."""
        self.num_failures += 1
        if self.num_failures <= MAX_LOGGED_FAILURES:
            last = " (further failures are only counted)" if self.num_failures == MAX_LOGGED_FAILURES else ""
            logger.warning("%s on response %.80r: %s%s", self.who, sample.response, reason, last)
