"""Calls to one server, and one sample that it draws."""

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx

from rltrain.errors import EngineError
from rltrain.rollout.engine import SamplingParams
from rltrain.rollout.sample import Sample, Status
from rltrain.rollout.servers.sglang_session import count_finite
from rltrain.rollout.stop_strings import StopCut
from rltrain.runtime.json_text import parse_json

# Calls to one server: what it answers, what it streams, and in which words it fails.

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


# One sample at servers: what one of them has drawn of it, and what that makes of it.


@dataclass
class Drawing:
    """A sample as it was sent, and what has come of it since: tokens with their log-probs."""

    sample: Sample
    limit: int
    """How many tokens the response may have, those of `sample` included."""
    version: int = 0
    """Of the weights that it was sent to."""
    name: str = ""
    """Of the request."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    num_certain: int = 0
    """So many of them are known to be of these weights."""
    end: str | None = None
    """Why the server has ended it, in its own words; None: it has not."""
    failures: int = 0
    """Times in a row that it was sent in vain."""

    @property
    def num_left(self) -> int:
        """Tokens that the server may draw."""
        return self.limit - len(self.sample.tokens)

    def add(self, tokens: Sequence[int], logprobs: Sequence[float | None], total: int | None = None) -> None:
        """Of `total` tokens that the server has drawn the last ones; None: those that follow the ones that are
        known."""
        if len(tokens) != len(logprobs):
            raise EngineError(
                f"a server returned {len(tokens)} tokens and {len(logprobs)} log-probs for sample {self.sample.id}; "
                "expected one of each"
            )
        begin = len(self.tokens) if total is None else total - len(tokens)
        self.tokens[begin:] = tokens
        self.logprobs[begin:] = logprobs

    def known(self) -> Sample:
        """The sample with all that is certain, and something left to draw: the last token, where a server has ended
        it."""
        most = len(self.tokens) - 1 if self.end is not None else self.num_left - 1
        certain = self.logprobs[: min(self.num_certain, max(0, most))]
        return self._drawn(count_finite(certain), Status.PENDING)

    def ended(self, sampling: SamplingParams, cut: StopCut | None) -> Sample:
        """The sample as its server has ended it; pending where it has more to draw.

        It has failed, and ends before the first log-prob that is not finite, if there is one.
        """
        num_finite = count_finite(self.logprobs)
        if num_finite < len(self.logprobs):
            return self._drawn(num_finite, Status.FAILED)
        count = cut(self.sample.turn_tokens, self.tokens) if cut else None
        if count is not None:
            return self._drawn(count, Status.STOPPED)
        if self.tokens and self.tokens[-1] in sampling.stop_token_ids:
            return self._drawn(len(self.tokens), Status.STOPPED)
        is_full = len(self.tokens) >= self.num_left
        return self._drawn(min(len(self.tokens), self.num_left), Status.TRUNCATED if is_full else Status.PENDING)

    def again(self, sample: Sample) -> "Drawing":
        """To be sent once more, as `sample`."""
        failures = 0 if len(sample.tokens) > len(self.sample.tokens) else self.failures
        return Drawing(sample, self.limit, failures=failures)

    def _drawn(self, count: int, status: Status) -> Sample:
        logprobs = [math.nan if value is None else value for value in self.logprobs[:count]]
        return self.sample.drawn(self.tokens[:count], logprobs, [self.version] * count, status)
