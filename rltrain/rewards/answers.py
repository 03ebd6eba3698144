"""What reward functions are given and what they returned, checked."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, NamedTuple, TypedDict

from rltrain.runtime.machine import describe_raised

# The numbers that a reward can be: those that a float32 tensor holds.

MAX_REWARD = float.fromhex("0x1.fffffep127")
EXPECTED_REWARD = f"expected a finite number from {-MAX_REWARD:.3g} to {MAX_REWARD:.3g}, which float32 can hold"


def is_reward(number: float) -> bool:
    """Returns whether `number`, which may be an int of any size, is finite in float32."""
    return abs(number) <= MAX_REWARD


# What a reward function returned for a sample, as rewards and metrics or as what was wrong with it.

SCORE, TURNS = "score", "turns"
EXPECTED = "expected a number, or a dict whose 'score' is one"

Answer = dict[str, Any]
"""Of one sample. {"value": float}, with "turns": the rewards of its turns, and "metrics": numbers by name, where there
are any; {"skipped": True} where the function is not for this sample; {"error": text}, with "traceback": text where it
raised; {"timeout": text}."""


class PlainError(Exception):
    """One whose message says it all: it is told without place and traceback."""


class TookTooLongError(PlainError):
    """Counts as a time-out."""


def as_error(error: BaseException, own_files: Collection[str]) -> Answer:
    """What was raised, the innermost place of the function's file, and the traceback without frames of `own_files`."""
    if isinstance(error, PlainError):
        return {"timeout" if isinstance(error, TookTooLongError) else "error": str(error)}
    what, traceback = describe_raised(error, own_files)
    return {"error": what, "traceback": traceback} if traceback else {"error": what}


def as_answer(returned: Any, num_turns: int = 1, score_key: str = SCORE) -> Answer:
    """Of a number, a truth value or whatever converts to float by itself; of a list of as many as there are turns; or
    of a dict with one of either under `score_key` and "turns", whose other numbers are metrics.

    The reward is the sum over turns. A score beside them belongs to the last one.
    """
    if isinstance(returned, float) and is_reward(returned):
        return {"value": float(returned)}  # most by far
    if isinstance(returned, Mapping):
        return _of_mapping(returned, num_turns, score_key)
    if isinstance(returned, (list, tuple)):
        return _of_turns(returned, num_turns)
    return _of_number(returned)


def _of_number(returned: Any, place: str = "") -> Answer:
    number = _number(returned)
    if number is None:
        return {"error": f"returned {type(returned).__name__} {returned!r:.100}{place}; {EXPECTED}"}
    return {"value": number} if is_reward(number) else {"error": f"returned {number}{place}; {EXPECTED_REWARD}"}


def _number(value: Any) -> float | None:
    if hasattr(type(value), "__float__"):
        with suppress(Exception):
            return float(value)
    return None


def _of_turns(rewards: Sequence[Any], num_turns: int) -> Answer:
    if len(rewards) != num_turns:
        returned = f"returned a list of {len(rewards)} rewards"
        return {"error": f"{returned}; expected one for each of {num_turns} turns, or a number"}
    turns = [_of_number(reward, f" for turn {turn}") for turn, reward in enumerate(rewards)]
    wrong = next((answer for answer in turns if "error" in answer), None)
    if wrong is not None:
        return wrong
    values = [answer["value"] for answer in turns]
    return {**_of_number(sum(values), " as the sum over turns"), "turns": values}


def _of_mapping(returned: Mapping[Any, Any], num_turns: int, score_key: str) -> Answer:
    parts = [_of_number(returned[score_key], f" under {score_key!r}")] if score_key in returned else []
    if isinstance(returned.get(TURNS), (list, tuple)):
        parts.append(_of_turns(returned[TURNS], num_turns))
    wrong = next((part for part in parts if "error" in part), None)
    if wrong is not None:
        return wrong
    if not parts:
        keys = ", ".join(map(repr, returned)) or "none"
        return {"error": f"returned a dict without {score_key!r}, its keys are {keys:.200}; {EXPECTED}"}
    answer = _of_number(sum(part["value"] for part in parts), f" as the sum of {score_key!r} and turns")
    if "error" in answer:
        return answer
    if "turns" in parts[-1]:
        turns = parts[-1]["turns"]
        answer["turns"] = [*turns[:-1], turns[-1] + answer["value"] - parts[-1]["value"]]
    metrics = {str(key): _number(value) for key, value in returned.items() if key != score_key}
    finite = {key: number for key, number in metrics.items() if number is not None and isfinite(number)}
    return answer | ({"metrics": finite} if finite else {})


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
