"""Calls to one server: what it answers, what it streams, and in which words it fails."""

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from queue import SimpleQueue
from typing import Any

import httpx

from rltrain.errors import EngineError, EngineLost
from rltrain.runtime.json_text import parse_json
from rltrain.runtime.machine import JobThread

# Calls to one server: what it answers, what it streams, and in which words it fails.

SHOWN_CHARACTERS = 2000
"""Of a server's answer."""
CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""For calls that no work stands behind."""
_PREFIX, _DONE = b"data:", b"[DONE]"


class ServerGone(Exception):  # noqa: N818 - names what happened
    """It cannot be reached, says that it is broken, or has other weights than it was given."""


class StreamCut(ServerGone):
    """A stream ended before the server said that it was over."""


class ServerRefuses(Exception):  # noqa: N818
    """It will not do what it is asked, now or later."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerBusy(Exception):  # noqa: N818
    """It has too much to do."""


@dataclass(frozen=True)
class Access:
    """How servers are reached. `token` None: without one. `ca_file` None: the system's certificates."""

    token: str | None = None
    ca_file: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S

    def client(self, url: str) -> httpx.AsyncClient:
        """Proxies that the environment names are ignored."""
        is_tls = url.startswith("https:")
        context = ssl.create_default_context(cafile=self.ca_file) if is_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={} if self.token is None else {"Authorization": f"Bearer {self.token}"},
            trust_env=False,
            verify=context,
            timeout=httpx.Timeout(None, connect=self.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )


class Calls:
    """To the server at `url`, which messages call `name`. All but `url` within one event loop.

    ServerGone where there is no answer in time or one of status 500 and above, ServerBusy for 429, ServerRefuses for
    any other that is not 200.
    """

    def __init__(self, url: str, access: Access, name: str | None = None) -> None:
        self.url, self.name = url, name or url
        self._http = access.client(url)

    async def get(self, path: str, limit_s: float = CALL_TIMEOUT_S) -> Any:
        """What the server answers: parsed where it is JSON, else its text."""
        return await self._call("GET", path, None, limit_s)

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float = CALL_TIMEOUT_S) -> Any:
        return await self._call("POST", path, body, limit_s)

    async def stream(self, path: str, body: Mapping[str, Any], limit_s: float | None) -> AsyncGenerator[dict[str, Any]]:
        """The events that answer a POST; whenever nothing has come for `limit_s`, ServerGone. StreamCut at an end that
        the server has not announced."""
        try:
            request = self._http.build_request("POST", path, json=body)
            async with asyncio.timeout(limit_s):
                response = await self._http.send(request, stream=True)
            async with aclosing(response):
                if response.status_code != HTTPStatus.OK:
                    async with asyncio.timeout(limit_s):
                        text = (await response.aread()).decode(errors="replace")
                    raise self._failure(path, response.status_code, text)
                async for line in _lines(response, limit_s):
                    if not line.startswith(_PREFIX):
                        continue
                    data = line.removeprefix(_PREFIX).strip()
                    if data == _DONE:
                        return
                    event: dict[str, Any] = parse_json(data)
                    yield event
        except TimeoutError:
            raise ServerGone(f"{path} of {self.name}: nothing has come for {limit_s:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ServerGone(f"{path} of {self.name}: {words(error)}") from error
        raise StreamCut(f"{path} of {self.name}: its answer ended in the middle")

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.request(method, path, json=body)
        except TimeoutError:
            raise ServerGone(f"{path} of {self.name}: no answer within {limit_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise ServerGone(f"{path} of {self.name}: {words(error)}") from error
        if response.status_code != HTTPStatus.OK:
            raise self._failure(path, response.status_code, response.text)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return parse_json(response.content) if is_json else response.text

    def _failure(self, path: str, status: int, text: str) -> Exception:
        what = f"{path} of {self.name} answered with status {status}: {text[:SHOWN_CHARACTERS]}"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ServerGone(what)
        return ServerBusy(what) if status == HTTPStatus.TOO_MANY_REQUESTS else ServerRefuses(what, status)


async def _lines(response: httpx.Response, limit_s: float | None) -> AsyncIterator[bytes]:
    """Each line of an answer, without its end."""
    rest, searched = bytearray(), 0  # an event with the routing of a long sample comes in thousands of chunks
    chunks = response.aiter_bytes()
    while (chunk := await _next(chunks, limit_s)) is not None:
        rest += chunk
        begin = 0
        while (end := rest.find(b"\n", max(begin, searched))) >= 0:
            yield bytes(rest[begin:end])
            begin = end + 1
        del rest[:begin]
        searched = len(rest)
    if rest:
        yield bytes(rest)


async def _next(chunks: AsyncIterator[bytes], limit_s: float | None) -> bytes | None:
    async with asyncio.timeout(limit_s):
        return await anext(chunks, None)


def words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


# Calls from a thread that has no event loop, to the server of one engine: these wait for their answers, and the tokens
# of its streams are collected meanwhile.

_GRACE_S = 5.0
"""For the thread to notice that a call has run past its limit, or that it should end."""
SEE_LOG = "Its log is in the run folder."
NOBODY = "no SGLang server is connected"


@dataclass(frozen=True)
class StreamFailure:
    """How a stream ended before its responses did. `error` is EngineLost, EngineError where the server refused, or what
    nobody expected."""

    error: Exception


Item = dict[str, Any] | StreamFailure
"""What a stream brings: the server's events, and at most one failure."""


class Client:
    """Talks to the server that `connect` named last. `call` may come from any thread, all else from one.

    `limit_s` bounds every call; a stream has no limit of its own, but `last_event_s` tells when anything came last
    (time.monotonic()).
    """

    def __init__(self, limit_s: float) -> None:
        self.inbox: SimpleQueue[Item] = SimpleQueue()
        self.last_event_s = time.monotonic()
        self._limit_s = limit_s
        self._calls: Calls | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = JobThread(target=self._loop.run_forever, name="sglang client", daemon=True)
        self._thread.start()

    def connect(self, url: str, token: str) -> None:
        """Leave the present server, with all that its streams have brought, and talk to the one at `url`."""
        self.disconnect()
        self.inbox, self.last_event_s = SimpleQueue(), time.monotonic()
        self._calls = Calls(url, Access(token, connect_timeout_s=self._limit_s), "the SGLang server")

    def call(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None) -> Any:
        """The server's answer to a POST of `body`, without one to a GET: parsed where it is JSON, else its text.

        Raises EngineLost where there is none within `limit_s`, or one that says that the server is broken; EngineError
        where the server refuses.
        """
        calls, limit_s = self._calls, limit_s or self._limit_s
        if calls is None:
            raise EngineLost(NOBODY)
        asked = calls.get(path, limit_s) if body is None else calls.post(path, body, limit_s)
        return self._wait(self._ended_by_disconnect(asked), f"{path} of the SGLang server", limit_s)

    def generate(self, body: Mapping[str, Any]) -> None:
        """Start a stream, whose events arrive in `inbox`, and a StreamFailure where it ends too early."""
        if self._calls is None:
            self.inbox.put(StreamFailure(EngineLost(NOBODY)))
            return
        self._loop.call_soon_threadsafe(self._task, self._read(self._calls, self.inbox, body))

    def disconnect(self) -> None:
        """End all streams and connections, whatever state the server is in."""
        calls, self._calls = self._calls, None
        if calls is not None:
            self._wait(self._leave(calls), "closing the connections to the SGLang server", _GRACE_S)

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
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s + _GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise EngineLost(f"{what}: no answer within {limit_s:g} s") from error
        except CancelledError as error:
            raise EngineLost(f"{what}: its server was given up") from error
        except (ServerGone, ServerBusy, ServerRefuses) as error:
            raise _of_engine(error) from error

    async def _ended_by_disconnect(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await self._task(work)

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """One that `disconnect` ends."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _read(self, calls: Calls, inbox: SimpleQueue[Item], body: Mapping[str, Any]) -> None:
        try:
            async with aclosing(calls.stream("/generate", body, None)) as events:
                async for event in events:
                    self.last_event_s = time.monotonic()
                    inbox.put(event)
        except (ServerGone, ServerBusy, ServerRefuses) as error:
            inbox.put(StreamFailure(_of_engine(error)))
        except Exception as error:  # a task's error is nobody's: whoever waits for the stream raises this one
            inbox.put(StreamFailure(error))

    async def _leave(self, calls: Calls) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await calls.close()


def _of_engine(error: Exception) -> EngineLost | EngineError:
    """What a server's failure is to whoever started it."""
    return EngineLost(str(error)) if isinstance(error, ServerGone) else EngineError(f"{error}. {SEE_LOG}")
