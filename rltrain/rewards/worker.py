"""The process that runs an untrusted reward function: `python -m rltrain.rewards.worker`, started by the scorer.

It reads JSON lines from standard input. The first is {"function", "options", "score_key", "timeout_s", ...}, as in the
Each of the others asks for rewards: of one sample, {"prompt", "response", "label"} with the fields that the function
needs besides, or of several calls with a list of samples each, {"calls", "limit_s"}, which are awaited together where
the function is asynchronous. It answers each line with one of its own: an Answer of answers.py, or {"answers"}, a list
for each call, with "seconds", the time that the calls took. The answer to the first says that the function is ready. It
ends quietly when nobody reads them any more.
"""

import asyncio
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rltrain.config import schema
from rltrain.rewards.answers import Answer
from rltrain.rewards.calling import await_calls, call
from rltrain.rewards.registry import RewardFunction, load_reward
from rltrain.rewards.scorable import Scorable
from rltrain.runtime.machine import become_worker


def answers_to(requests: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """One for each line of `requests`. Ends with them, or with a line that its writer did not live to complete."""
    function = None
    with asyncio.Runner() as loop:  # one for all calls: a function may keep connections between them
        for line in requests:
            if not line.endswith(b"\n"):
                return
            message = json.loads(line)
            if function is None:
                function = load_reward(schema.Reward(**message))
                yield {"value": 0.0}
                continue
            start = time.monotonic()
            answer = _answer(function, message, loop)
            yield {**answer, "seconds": time.monotonic() - start}


def _answer(function: RewardFunction, message: dict[str, Any], loop: asyncio.Runner) -> Answer:
    if "calls" not in message:
        return call(function, [Scorable(**message)])[0]
    calls = [[Scorable(**sample) for sample in samples] for samples in message["calls"]]
    if function.asynchronous:
        return {"answers": loop.run(await_calls(function, calls, message["limit_s"]))}
    return {"answers": [call(function, samples) for samples in calls]}


def main() -> None:
    requests, answers = become_worker()
    for answer in answers_to(requests):
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            return


if __name__ == "__main__":
    main()
