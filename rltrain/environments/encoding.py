"""JSON messages between a rank and its workers: rows, actions, and the checked answers of environments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rltrain.environments.image_urls import with_urls
from rltrain.environments.interface import Action, Observation, Opening, StepResult, TokenIds, ToolCall, Trajectory
from rltrain.errors import DataError
from rltrain.rewards.answers import EXPECTED_REWARD, is_reward
from rltrain.runtime.json_text import lone_surrogate

Json = Any


class BadAnswer(Exception):  # noqa: N818 - a finding about a user's environment
    """An environment returned a wrong value."""


def to_line(message: Json, *, exactly: bool = False) -> bytes:
    """Returns the message as one line of JSON. Numbers and arrays of numpy become plain ones, and unknown objects
    become text. With `exactly` such values raise TypeError."""
    return json.dumps(message, default=None if exactly else _plain).encode() + b"\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return list(value)
    return str(value)


def encode_action(action: Action | None) -> Json:
    return None if action is None else asdict(action)


def decode_action(message: Json) -> Action | None:
    if message is None:
        return None
    calls = tuple(ToolCall(**call) for call in message["tool_calls"])
    ids, logprobs = tuple(message["ids"]), tuple(message["logprobs"])
    return Action(**{**message, "tool_calls": calls, "ids": ids, "logprobs": logprobs})


def encode_observation(observation: Observation | None) -> Json:
    """Returns the observation as JSON, with data URLs for images in parts of messages.

    Raises BadAnswer if it is no observation, not valid Unicode, or has an image that cannot be used.
    """
    if isinstance(observation, str | Sequence) and (half := lone_surrogate(_plain_texts(observation))) is not None:
        raise BadAnswer(f"returned an observation with {half!r}, half of a surrogate pair; expected Unicode")
    if observation is None or isinstance(observation, str):
        return observation
    if isinstance(observation, TokenIds):
        return {"ids": [int(number) for number in observation.ids], "sampling": dict(observation.sampling)}
    if isinstance(observation, Sequence) and all(_is_message(message) for message in observation):
        return [_encoded(message) for message in observation if not isinstance(message, str)]
    raise BadAnswer(f"returned the observation {_shown(observation)}; expected a text, chat messages or TokenIds")


def _plain_texts(observation: Any) -> Any:
    return observation if isinstance(observation, str) else [dict(m) for m in observation if isinstance(m, Mapping)]


def _encoded(message: Mapping[str, Any]) -> Json:
    try:
        return with_urls(message)
    except DataError as error:
        raise BadAnswer(f"returned an observation in which {error}") from None


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def decode_observation(message: Json) -> Observation | None:
    if isinstance(message, dict):
        return TokenIds(tuple(message["ids"]), message["sampling"])
    return message


def encode_openings(openings: Sequence[Opening], count: int) -> Json:
    """Returns {"observation"} or a whole result for each episode. Raises BadAnswer if the list is wrong."""
    return [
        encode_result(opening) if isinstance(opening, StepResult) else {"observation": encode_observation(opening)}
        for opening in _as_many(openings, count, "reset", "an observation")
    ]


def encode_results(results: Sequence[StepResult | None], live: Sequence[bool]) -> Json:
    """Returns each result as JSON, and None for episodes that are not live. Raises BadAnswer if the list is wrong."""
    return [
        encode_result(result) if is_live else None
        for result, is_live in zip(_as_many(results, len(live), "step", "a StepResult"), live, strict=True)
    ]


def _as_many(values: Any, count: int, method: str, what: str) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise BadAnswer(f"{method} returned {_shown(values)}; expected a list with {what} for each of {count} episodes")
    return values


def encode_result(result: Any) -> Json:
    if not isinstance(result, StepResult):
        raise BadAnswer(f"step returned {_shown(result)} for an unfinished episode; expected a StepResult")
    return {
        "observation": None if result.done else encode_observation(result.observation),
        "reward": _number(result.reward),
        "done": bool(result.done),
        "info": dict(result.info),
        "trajectories": [asdict(trajectory) for trajectory in result.trajectories],
    }


def _number(reward: Any) -> float:
    try:
        number = float(reward)
    except (TypeError, ValueError) as error:
        raise BadAnswer(f"returned the reward {_shown(reward)}; expected a number") from error
    if not is_reward(number):
        raise BadAnswer(f"returned the reward {number}; {EXPECTED_REWARD}")
    return number


def decode_trajectory(message: Json) -> Trajectory:
    lists = {key: None if message[key] is None else tuple(message[key]) for key in ("ids", "loss_mask", "logprobs")}
    return Trajectory(**{**message, **lists})


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.100}"
