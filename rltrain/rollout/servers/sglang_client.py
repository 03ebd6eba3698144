"""HTTP to the server of one engine: calls that wait for their answer, and streams of tokens that a thread collects."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import httpx

from rltrain.errors import EngineError, EngineLost
from rltrain.runtime.machine import JobThread

_GRACE_S = 5.0
"""For the thread to notice that a call has run past its limit, or that it should end."""
_DONE = b"[DONE]"
_ERROR_CHARACTERS = 2000
"""Of a server's answer that are shown."""


@dataclass(frozen=True)
class StreamFailure:
    """How a stream ended before its responses did. `error` is EngineLost, EngineError where the server refused, or what
    nobody expected."""

    error: Exception


Item = dict[str, Any] | StreamFailure
"""What a stream brings: the server's events, and at most one failure."""


class Client:
    """Talks to the server that `connect` named last. `call` may come from any thread, all else from one.

    Proxies that the environment names are ignored: the server listens on this node. `limit_s` bounds every call; a
    stream has no limit of its own, but `last_event_s` tells when anything came last (time.monotonic()).
    """

    def __init__(self, limit_s: float) -> None:
        self.inbox: SimpleQueue[Item] = SimpleQueue()
        self.last_event_s = time.monotonic()
        self._limit_s = limit_s
        self._http: httpx.AsyncClient | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = JobThread(target=self._loop.run_forever, name="sglang client", daemon=True)
        self._thread.start()

    def connect(self, url: str, token: str) -> None:
        """Leave the present server, with all that its streams have brought, and talk to the one at `url`."""
        self.disconnect()
        self.inbox, self.last_event_s = SimpleQueue(), time.monotonic()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # of no use here, and the default reads all certificates
            timeout=httpx.Timeout(None, connect=self._limit_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=8),
        )

    def call(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None) -> Any:
        """The server's answer to a POST of `body`, without one to a GET: parsed where it is JSON, else its text.

        Raises EngineLost where there is none within `limit_s`, or one that says that the server is broken; EngineError
        where the server refuses.
        """
        limit_s = limit_s or self._limit_s
        response = self._wait(self._request(path, body), f"{path} of the SGLang server", limit_s)
        if response.status_code != 200:
            raise _failure(path, response.status_code, response.text)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return response.json() if is_json else response.text

    def generate(self, body: Mapping[str, Any]) -> None:
        """Start a stream, whose events arrive in `inbox`, and a Failure where it ends too early."""
        http, inbox = self._http, self.inbox
        if http is None:
            inbox.put(StreamFailure(EngineLost("no SGLang server is connected")))
            return
        self._loop.call_soon_threadsafe(self._start_stream, http, inbox, body)

    def disconnect(self) -> None:
        """End all streams and connections, whatever state the server is in."""
        http, self._http = self._http, None
        if http is not None:
            self._wait(self._leave(http), "closing the connections to the SGLang server", _GRACE_S)

    def close(self) -> None:
        """Disconnect and end the thread."""
        if self._loop.is_closed():
            return
        self.disconnect()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _wait(self, work: Coroutine[Any, Any, Any], what: str, limit_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, limit_s), self._loop)
        try:
            return future.result(limit_s + _GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise EngineLost(f"{what}: no answer within {limit_s:g} s") from error
        except CancelledError as error:
            raise EngineLost(f"{what}: its server was given up") from error
        except (httpx.HTTPError, OSError) as error:
            raise EngineLost(f"{what}: {_words(error)}") from error

    async def _request(self, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        if self._http is None:
            raise EngineLost("no SGLang server is connected")
        return await self._task(self._http.get(path) if body is None else self._http.post(path, json=body))

    def _start_stream(self, http: httpx.AsyncClient, inbox: SimpleQueue[Item], body: Mapping[str, Any]) -> None:
        self._task(self._read(http, inbox, body))

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """One that `disconnect` ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, http: httpx.AsyncClient, inbox: SimpleQueue[Item], body: Mapping[str, Any]) -> None:
        try:
            async with http.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    inbox.put(StreamFailure(_failure("/generate", response.status_code, text)))
                    return
                async for data in _events(response):
                    self.last_event_s = time.monotonic()
                    if data == _DONE:
                        return
                    inbox.put(json.loads(data))
            inbox.put(StreamFailure(EngineLost("/generate of the SGLang server: its answer ended in the middle")))
        except (httpx.HTTPError, OSError, ValueError) as error:
            inbox.put(StreamFailure(EngineLost(f"/generate of the SGLang server: {_words(error)}")))
        except Exception as error:  # a task's error is nobody's: whoever waits for the stream raises this one
            inbox.put(StreamFailure(error))

    async def _leave(self, http: httpx.AsyncClient) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await http.aclose()


async def _events(response: httpx.Response) -> AsyncIterator[bytes]:
    """The data of each server-sent event."""
    rest, searched = bytearray(), 0  # an event with the routing of a long sample comes in thousands of chunks
    async for chunk in response.aiter_raw():
        rest += chunk
        begin = 0
        while (end := rest.find(b"\n\n", max(begin, searched))) >= 0:
            yield bytes(rest[begin:end]).removeprefix(b"data: ")
            begin = end + 2
        del rest[:begin]
        searched = max(0, len(rest) - 1)


def _failure(path: str, status: int, text: str) -> EngineLost | EngineError:
    what = f"{path} of the SGLang server answered with status {status}: {text[:_ERROR_CHARACTERS]}"
    return EngineLost(what) if status >= 500 else EngineError(f"{what}. Its log is in the run folder.")


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
