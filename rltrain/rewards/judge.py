"""A remote judge: a reward function at a URL."""

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rltrain.errors import ConfigError
from rltrain.rewards.answers import Message, PlainError, TookTooLongError, time_limit
from rltrain.runtime.json_text import parse_json

if TYPE_CHECKING:
    import httpx  # slow to import, so only workers of judges import it

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
MAX_SHOWN_CHARS = 200
SCORE_KEYS = ("score", "reward")
TOO_MANY_REQUESTS = 429


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


class RemoteJudge:
    """A reward function at a URL.

    It posts {"prompt", "response", "label", "messages", "row"} and the fields of `payload` to `url` as JSON.

    The answer is JSON: a number, or an object with "score" or "reward". Its other numbers become metrics. Each request
    may take `timeout_s` seconds. Refused connections and the answers 429 and 5xx are retried up to `retries` times,
    after pauses of doubling length. `token_env` names an environment variable with the bearer token.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        retries: int,
        token_env: str | None = None,
        payload: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self.timeout_s = timeout_s
        self.retries = retries
        self.payload = dict(payload or {})
        self._headers = {"Authorization": f"Bearer {_token(token_env)}"} if token_env else {}
        self._client: httpx.AsyncClient | None = None

    @property
    def longest_s(self) -> float:
        """Seconds of all requests for one sample, including the pauses."""
        return (self.retries + 1) * self.timeout_s + sum(_longest_pause(number) for number in range(self.retries))

    async def __call__(
        self, *, prompt: str, response: str, label: str, messages: Sequence[Message], row: Mapping[str, Any]
    ) -> Any:
        sample = {"prompt": prompt, "response": response, "label": label, "messages": messages, "row": row}
        for number in range(self.retries):
            try:
                return await self._ask({**self.payload, **sample})
            except _Unavailable:
                await asyncio.sleep(_longest_pause(number) * random.uniform(0.5, 1))
        try:
            return await self._ask({**self.payload, **sample})
        except _Unavailable as error:
            times = "once" if self.retries == 0 else f"{self.retries + 1} times"
            raise PlainError(f"{self.url}, asked {times}, {error}") from error

    async def _ask(self, sample: Mapping[str, Any]) -> Any:
        import httpx

        if self._client is None:  # made inside its event loop
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            self._client = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits)
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._client.post(self.url, json=sample)
        except TimeoutError as error:
            raise TookTooLongError(time_limit(self.timeout_s), self.url) from error
        except httpx.TransportError as error:
            raise _Unavailable(f"cannot be reached ({type(error).__name__}: {error})") from error
        except ValueError as error:
            raise PlainError(f"the sample cannot be written as JSON: {error}") from error
        return self._read(answer)

    def _read(self, answer: "httpx.Response") -> Any:
        text = answer.text[:MAX_SHOWN_CHARS]
        if answer.status_code == TOO_MANY_REQUESTS or answer.is_server_error:
            raise _Unavailable(f"answered {answer.status_code}: {text}")
        if answer.has_redirect_location:
            to = answer.headers["location"]
            raise PlainError(
                f"{self.url} redirects to {to}, but redirects are not followed; set reward.function to the final URL"
            )
        if not answer.is_success:
            raise PlainError(f"{self.url} answered {answer.status_code}: {text}")
        try:
            return self._score(parse_json(answer.content))
        except ValueError:
            raise PlainError(
                f'{self.url} answered {text!r}; expected JSON: a number, or {{"score": number}} or {{"reward": number}}'
            ) from None

    def _score(self, answer: Any) -> Any:
        if isinstance(answer, (int, float)):
            return answer
        key = next((key for key in SCORE_KEYS if isinstance(answer, dict) and key in answer), None)
        if key is None:
            raise ValueError
        return {"score": answer[key]} | {name: value for name, value in answer.items() if name not in SCORE_KEYS}


class _Unavailable(Exception):  # noqa: N818 - it may be temporary
    """The judge is unavailable. Another request may succeed."""


def _longest_pause(number: int) -> float:
    return float(min(FIRST_PAUSE_S * 2**number, LONGEST_PAUSE_S))


def _token(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        raise ConfigError(f"reward.options.token_env: there is no environment variable {variable!r} on this rank")
    return value
