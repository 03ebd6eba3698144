"""Calls to one server: what it answers, what it streams, and in which words it fails."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from rltrain.runtime.json_text import parse_json

SHOWN_CHARACTERS = 1000
"""Of a server's answer."""
CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""For calls that no work stands behind."""
_PREFIX, _DONE = b"data:", b"[DONE]"


class ServerGone(Exception):  # noqa: N818 - names what happened
    """It cannot be reached, says that it is broken, or has other weights than it was given."""


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

    def client(self, url: str) -> httpx.AsyncClient:
        """Proxies that the environment names are ignored."""
        is_tls = url.startswith("https:")
        context = ssl.create_default_context(cafile=self.ca_file) if is_tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers={} if self.token is None else {"Authorization": f"Bearer {self.token}"},
            trust_env=False,
            verify=context,
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )


class Calls:
    """To the server at `url`. All but `url` within one event loop.

    ServerGone where there is no answer in time or one of status 500 and above, ServerBusy for 429, ServerRefuses for
    any other that is not 200.
    """

    def __init__(self, url: str, access: Access) -> None:
        self.url = url
        self._http = access.client(url)

    async def get(self, path: str, limit_s: float = CALL_TIMEOUT_S) -> Any:
        """What the server answers: parsed where it is JSON, else its text."""
        return await self._call("GET", path, None, limit_s)

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float = CALL_TIMEOUT_S) -> Any:
        return await self._call("POST", path, body, limit_s)

    async def stream(self, path: str, body: Mapping[str, Any], limit_s: float) -> AsyncGenerator[dict[str, Any]]:
        """The events that answer a POST; `limit_s` is for each."""
        try:
            request = self._http.build_request("POST", path, json=body)
            async with asyncio.timeout(limit_s):
                response = await self._http.send(request, stream=True)
            async with aclosing(response):
                if response.status_code != HTTPStatus.OK:
                    async with asyncio.timeout(limit_s):
                        text = (await response.aread()).decode(errors="replace")
                    raise self._failure(path, response.status_code, text)
                lines = response.aiter_lines()
                while (line := await _next(lines, limit_s)) is not None:
                    data = line.encode()
                    if not data.startswith(_PREFIX):
                        continue
                    data = data.removeprefix(_PREFIX).strip()
                    if data == _DONE:
                        return
                    event: dict[str, Any] = parse_json(data)
                    yield event
        except TimeoutError:
            raise ServerGone(f"{path} of {self.url}: nothing has come for {limit_s:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise ServerGone(f"{path} of {self.url}: {words(error)}") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                response = await self._http.request(method, path, json=body)
        except TimeoutError:
            raise ServerGone(f"{path} of {self.url}: no answer within {limit_s:g} s") from None
        except (httpx.HTTPError, OSError) as error:
            raise ServerGone(f"{path} of {self.url}: {words(error)}") from error
        if response.status_code != HTTPStatus.OK:
            raise self._failure(path, response.status_code, response.text)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return parse_json(response.content) if is_json else response.text

    def _failure(self, path: str, status: int, text: str) -> Exception:
        what = f"{path} of {self.url} answered with status {status}: {text[:SHOWN_CHARACTERS]}"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return ServerGone(what)
        return ServerBusy(what) if status == HTTPStatus.TOO_MANY_REQUESTS else ServerRefuses(what, status)


async def _next(lines: AsyncIterator[str], limit_s: float) -> str | None:
    async with asyncio.timeout(limit_s):
        return await anext(lines, None)


def words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()
