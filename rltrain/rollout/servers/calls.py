"""HTTP calls to one server: answers, streams, and errors."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

import httpx

from rltrain.errors import EngineError, EngineLost
from rltrain.runtime.json_text import parse_json
from rltrain.runtime.machine import JobThread

# Calls inside an event loop.

T = TypeVar("T")

SHOWN_CHARACTERS = 2000
"""Most characters of a server's answer in messages."""
CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""Limit for calls that need no work by the server."""
_PREFIX, _DONE = b"data:", b"[DONE]"


class ServerGone(Exception):  # noqa: N818 - names what happened
    """The server cannot be reached, reports a failure of its own, or has other weights than expected."""


class StreamCut(ServerGone):
    """A stream ended before the server announced its end."""


class ServerRefuses(Exception):  # noqa: N818
    """The server refuses the request. It would refuse it later too."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerBusy(Exception):  # noqa: N818
    """The server is too busy for the request at the moment."""


@dataclass(frozen=True)
class Access:
    """Access to servers. `token` None sends no token. `ca_file` None uses the system's certificates."""

    token: str | None = None
    ca_file: str | None = None
    connect_timeout_s: float = CONNECT_TIMEOUT_S

    def client(self, url: str) -> httpx.AsyncClient:
        """Returns a client for the server at `url`. It ignores the proxies of the environment."""
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
    """Calls to the server at `url`. Messages call the server `name`. All methods belong to one event loop.

    They raise ServerGone without an answer in time or for a status of 500 and above, ServerBusy for 429, and
    ServerRefuses for any other status except 200.
    """

    def __init__(self, url: str, access: Access, name: str | None = None) -> None:
        self.url, self.name = url, name or url
        self._http = access.client(url)

    async def get(self, path: str, limit_s: float = CALL_TIMEOUT_S) -> Any:
        """Returns the server's answer: the parsed value if it is JSON, else its text."""
        return await self._call("GET", path, None, limit_s)

    async def post(
        self, path: str, body: Mapping[str, Any], limit_s: float = CALL_TIMEOUT_S, *, alone: bool = False
    ) -> Any:
        """Returns the server's answer to a POST of `body` as JSON, in the form of `get`.

        With `alone` no other call uses the same connection. A server may close one after its own failure.
        """
        return await self._call("POST", path, body, limit_s, {"Connection": "close"} if alone else None)

    async def stream(self, path: str, body: Mapping[str, Any], limit_s: float | None) -> AsyncGenerator[dict[str, Any]]:
        """Yields the events of the answer to a POST.

        Raises ServerGone if no data arrives for `limit_s` seconds, and StreamCut if the stream ends unannounced.
        """
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
            raise ServerGone(f"{path} of {self.name}: no data for {limit_s:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ServerGone(f"{path} of {self.name}: {words(error)}") from error
        raise StreamCut(f"{path} of {self.name}: its answer ended in the middle")

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.request(method, path, json=body, headers=headers)
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
    """Yields the lines of an answer without line ends."""
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
    """Returns an error's class and message."""
    return f"{type(error).__name__} {error}".strip()


class LoopThread:
    """A thread with an event loop, for coroutines started by other threads."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = JobThread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Starts `work` in the loop and returns a future for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, timeout_s: float) -> None:
        """Ends the thread. It should be idle. A thread that does not end in time is left alone."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()


# Calls from threads without an event loop, to the server of one engine. They block until the answer is there.

_GRACE_S = 5.0
"""Time for the thread to cancel a call past its limit, or to end."""
SEE_LOG = "Its log is in the run folder."
NOBODY = "no SGLang server is connected"


class Client:
    """A client of the server named last in `connect`. `call` and `ask` are thread-safe; all other methods belong to one
    thread.

    `limit_s` bounds every call. `run` has no limit.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._calls: Calls | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = LoopThread("sglang client")

    @property
    def calls(self) -> Calls:
        """Calls to the server, for coroutines of `run`. Raises EngineLost if no server is connected."""
        if self._calls is None:
            raise EngineLost(NOBODY)
        return self._calls

    @property
    def is_closed(self) -> bool:
        return self._thread.is_closed

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` in the client's event loop and returns its result."""
        return self._thread.start(work).result()

    def connect(self, url: str, token: str) -> None:
        """Leaves the current server and uses the server at `url`."""
        self.disconnect()
        self._calls = Calls(url, Access(token, connect_timeout_s=self._limit_s), "the SGLang server")

    def call(self, path: str, body: Mapping[str, Any] | None = None, limit_s: float | None = None) -> Any:
        """Returns the server's answer to a POST of `body`, or to a GET without a body: parsed JSON or text. Raises as
        `ask` does."""
        limit_s = limit_s or self._limit_s

        def asked(calls: Calls) -> Coroutine[Any, Any, Any]:
            return calls.get(path, limit_s) if body is None else calls.post(path, body, limit_s)

        return self.ask(asked, path, limit_s)

    def ask(self, asked: Callable[[Calls], Coroutine[Any, Any, T]], what: str, limit_s: float) -> T:
        """Runs `asked` for the server and returns its result. Messages call it `what`.

        Raises EngineLost if it takes longer than `limit_s` or the server reports a failure of its own. Raises
        EngineError if the server refuses.
        """
        work = self._ended_by_disconnect(asked(self.calls))
        result: T = self._wait(work, f"{what} of the SGLang server", limit_s)
        return result

    def disconnect(self) -> None:
        """Ends all calls and connections. The server may be in any state.

        A `call` in another thread then raises EngineLost. Raises EngineLost if the connections take longer than 2 *
        _GRACE_S seconds to close.
        """
        calls, self._calls = self._calls, None
        if calls is not None:
            self._wait(self._leave(calls), "closing the connections to the SGLang server", _GRACE_S)

    def close(self) -> None:
        """Disconnects and ends the thread."""
        if not self._thread.is_closed:
            self.disconnect()
            self._thread.close(_GRACE_S)

    def _wait(self, work: Coroutine[Any, Any, Any], what: str, limit_s: float) -> Any:
        future = self._thread.start(work)
        try:
            return future.result(limit_s + _GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise EngineLost(f"{what}: no answer within {limit_s:g} s") from error
        except CancelledError as error:
            raise EngineLost(f"{what}: the server was disconnected") from error
        except (ServerGone, ServerBusy, ServerRefuses) as error:
            raise _of_engine(error) from error

    async def _ended_by_disconnect(self, work: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await task

    async def _leave(self, calls: Calls) -> None:
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await calls.close()


def _of_engine(error: Exception) -> EngineLost | EngineError:
    """Returns a server's failure as an error of its engine."""
    return EngineLost(str(error)) if isinstance(error, ServerGone) else EngineError(f"{error}. {SEE_LOG}")
