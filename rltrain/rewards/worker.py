"""The process that runs an untrusted reward function: `python -m rltrain.rewards.worker`, started by the scorer.

It reads JSON lines from standard input: first {"function", "options"}, then one {"prompt", "response", "label"} per
sample. It answers each with one JSON line, an Answer; the answer to the first says that the function is ready. It ends
quietly when nobody reads them any more.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import isfinite
from typing import IO, Any

from rltrain.config import schema
from rltrain.rewards.registry import RewardFunction, load_reward

PR_SET_PDEATHSIG = 1
MAX_TRACEBACK_FRAMES = 20
MAX_ERROR_CHARS = 1000
MAX_TRACEBACK_CHARS = 8000
Answer = dict[str, Any]
"""{"value": float} or {"error": text}, with "traceback": text where the function raised. Those of a process also have
"seconds", the time that the call took."""
OWN_FILES = {__file__, RewardFunction.__call__.__code__.co_filename}


def score_one(function: RewardFunction, sample: dict[str, str]) -> Answer:
    """The answer for one sample; an error if the function raises or returns no finite number."""
    try:
        value = function(sample["prompt"], sample["response"], sample["label"])
    except BaseException as error:  # a user's sys.exit() costs a sample, not the process
        return _as_error(error)
    return as_reward(value)


def _as_error(error: BaseException) -> Answer:
    """What was raised, the innermost place of the function's file, and the traceback without frames of rltrain."""
    raised = traceback.TracebackException.from_exception(error)
    while raised.stack and raised.stack[0].filename in OWN_FILES:
        del raised.stack[0]
    what = "".join(raised.format_exception_only()).strip()[:MAX_ERROR_CHARS]
    if not raised.stack:
        return {"error": what}
    own = next(frame for frame in reversed(raised.stack) if frame.filename == raised.stack[0].filename)
    place = f"{own.filename}, line {own.lineno}"
    raised.stack = traceback.StackSummary.from_list(raised.stack[-MAX_TRACEBACK_FRAMES:])
    return {"error": f"{what} ({place})", "traceback": "".join(raised.format()).strip()[-MAX_TRACEBACK_CHARS:]}


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


def claim_standard_streams() -> tuple[IO[bytes], IO[bytes]]:
    """(requests, answers) on private descriptors; what the function reads is empty, what it prints goes to stderr.

    Answers are not buffered, so that none is left to be written where nobody reads them.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def answers_to(requests: Iterable[bytes]) -> Iterator[Answer]:
    """One for each line of `requests`. Ends with them, or with a line that its writer did not live to complete."""
    function = None
    for line in requests:
        if not line.endswith(b"\n"):
            return
        message = json.loads(line)
        if function is None:
            function = load_reward(schema.Reward(**message))
            yield {"value": 0.0}
            continue
        start = time.monotonic()
        answer = score_one(function, message)
        yield {**answer, "seconds": time.monotonic() - start}


def main() -> None:
    # A launcher sends them to the rank's whole process group; the rank may still have samples to score before it ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    requests, answers = claim_standard_streams()
    for answer in answers_to(requests):
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
