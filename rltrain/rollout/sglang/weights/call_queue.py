"""Calls to a server that are made while this rank goes on with something else."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rltrain.errors import EngineError
from rltrain.runtime.machine import JobThread

Call = Callable[[str, dict[str, Any] | None], dict[str, Any]]
"""(path, body) -> the server's answer: a POST, without a body a GET. Blocks; raises EngineError, EngineLost or OSError
where there is no answer or one that says it failed. Called from another thread, one call at a time."""


class CallQueue:
    """Makes calls one after another in a thread of its own. After one has failed the next ones fail as it did."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any] | None, Future[dict[str, Any]]] | None]
        self._queue = queue.SimpleQueue()
        self._last: Future[dict[str, Any]] | None = None
        self._failure: Exception | None = None
        JobThread(target=self._work, name="sglang-delivery", daemon=True).start()

    def send(self, path: str, body: dict[str, Any] | None) -> Future[dict[str, Any]]:
        self._last = Future()
        self._queue.put((path, body, self._last))
        return self._last

    def reset(self) -> None:
        """Forget an earlier failure, after calls under way have ended."""
        if self._last is not None:
            self._last.exception()
        self._failure = None

    def close(self) -> None:
        self._queue.put(None)

    def _work(self) -> None:
        while (order := self._queue.get()) is not None:
            path, body, answer = order
            try:
                if self._failure is not None:
                    raise self._failure
                answer.set_result(self._checked(path, body))
            except Exception as error:
                self._failure = error
                answer.set_exception(error)

    def _checked(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        answer = self._call(path, body)
        if answer.get("success") is False:
            raise EngineError(f"{path} answered: {answer.get('message')}")
        return answer
