"""The process that runs an untrusted reward function: `python -m rltrain.rewards.worker`, started by the scorer.

It reads JSON lines from standard input: first {"function", "options"}, then one {"prompt", "response", "label"} per
sample. It answers each with one JSON line, {"value": float} or {"error": text}; the answer to the first says that the
function is ready.
"""

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from math import isfinite
from typing import IO, Any

from rltrain.config import schema
from rltrain.rewards.registry import RewardFunction, load_reward

PR_SET_PDEATHSIG = 1
Answer = dict[str, Any]
"""{"value": float} or {"error": text}."""


def score_one(function: RewardFunction, sample: dict[str, str]) -> Answer:
    """{"value": float} of one sample, or {"error": text} if the function raises or returns no finite number."""
    try:
        value = function(sample["prompt"], sample["response"], sample["label"])
    except BaseException as error:  # a user's sys.exit() costs a sample, not the process
        return {"error": f"{type(error).__name__}: {error}"}
    return as_reward(value)


def as_reward(value: Any) -> Answer:
    """{"value": float} for numbers, truth values and whatever converts to float by itself; else {"error": text}."""
    number = None
    if hasattr(type(value), "__float__"):
        with suppress(Exception):
            number = float(value)
    if number is None:
        return {"error": f"returned {type(value).__name__} {value!r:.100}; expected a number"}
    return {"value": number} if isfinite(number) else {"error": f"returned {number}; expected a finite number"}


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, also in the middle of a call that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def claim_standard_streams() -> tuple[IO[str], IO[str]]:
    """(requests, answers) on private descriptors; what the function reads is empty, what it prints goes to stderr."""
    requests = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def main() -> None:
    # A launcher sends them to the rank's whole process group; the rank may still have samples to score before it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    requests, answers = claim_standard_streams()
    settings = json.loads(requests.readline())
    function = load_reward(schema.Reward(**settings))
    answer: Answer = {"value": 0.0}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        line = requests.readline()
        if not line:
            return
        answer = score_one(function, json.loads(line))


if __name__ == "__main__":
    main()
