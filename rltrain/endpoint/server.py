"""The endpoint's web server, in a thread of its own beside the one that steps the engine."""

import asyncio
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import uvicorn

from rltrain.endpoint.app import build_app
from rltrain.endpoint.control import EngineControl
from rltrain.endpoint.limits import Limits
from rltrain.endpoint.sampling_rules import SamplingRules
from rltrain.endpoint.service import Service
from rltrain.endpoint.sessions import Opened, Sessions
from rltrain.endpoint.trajectory import RecordedSession
from rltrain.endpoint.turn import Turns
from rltrain.errors import ConfigError
from rltrain.rollout.sample import Status
from rltrain.runtime.machine import JobThread
from rltrain.runtime.messages import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10
"""For requests that are being answered when the server stops."""
T = TypeVar("T")


@dataclass(frozen=True)
class EndpointSettings:
    """`token` opens sessions and uses all of them; None: whoever reaches the port may."""

    rules: SamplingRules
    limits: Limits
    model: str
    token: str | None
    host: str = "127.0.0.1"
    port: int = 0
    """0: one that is free."""
    answers_passers_by: bool = False
    """Whether requests outside of a session are answered, from whoever may open sessions."""
    seed: int = 0
    first_sample_id: int = 0
    end_tokens: Collection[int] = ()
    """What ends a turn in chats, beside what the tokenizer and its template say."""


class EndpointServer:
    """Serves `turns` over HTTP from `start` to `stop`. All methods may be called from any thread but its own.

    `on_end` gets every session when it has ended, in the server's thread. With `control` the owner of `settings.token`
    may have the engine load other weights.
    """

    def __init__(
        self,
        turns: Turns,
        tokenizer: "PreTrainedTokenizerBase",
        settings: EndpointSettings,
        on_end: Callable[[RecordedSession], None] = lambda _: None,
        control: EngineControl | None = None,
    ) -> None:
        self._sessions = Sessions(
            turns,
            settings.limits,
            token=settings.token,
            seed=settings.seed,
            first_sample_id=settings.first_sample_id,
            on_end=on_end,
        )
        self._service = Service(
            self._sessions,
            settings.rules,
            settings.limits,
            tokenizer,
            settings.model,
            settings.answers_passers_by,
            control,
            settings.end_tokens,
        )
        self._socket = _listen(settings.host, settings.port)
        self._host = settings.host
        config = uvicorn.Config(
            build_app(self._service),
            log_level="warning",
            access_log=False,
            lifespan="off",
            limit_concurrency=4 * settings.limits.max_turns + 64,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_listening = threading.Event()
        self._thread = JobThread(target=self._run, name="endpoint", daemon=True)

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        """Returns once requests are answered."""
        self._thread.start()
        if not self._is_listening.wait(START_TIMEOUT_S):
            raise RuntimeError(f"the endpoint's server has not started within {START_TIMEOUT_S:g} s")

    def open_session(self, metadata: object = None, seed: int | None = None) -> Opened:
        """Raises Refused where there are as many as may be."""
        return self._call(lambda: self._sessions.open(metadata, seed))

    def end_session(self, number: str, by: str, status: Status | None = None, reward: float | None = None) -> None:
        """Where it is open still; `on_end` gets it."""

        def end() -> None:
            if (session := self._sessions.find(number)) is not None:
                if reward is not None:
                    session.set_reward(reward)
                self._sessions.end(session, by, status)

        self._call(end)

    def stop(self) -> None:
        """Ends all sessions, and the thread."""
        if self._thread.is_alive():
            self._call(lambda: self._sessions.end_all("the server stops"))
            self._server.should_exit = True
            self._thread.join(STOP_TIMEOUT_S + CALL_TIMEOUT_S)
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._is_listening.set)
        await self._server.serve(sockets=[self._socket])

    def _call(self, action: Callable[[], T]) -> T:
        """`action` in the server's thread."""
        if self._loop is None or not self._thread.is_alive():
            raise RuntimeError("the endpoint's server does not run")
        result: Future[T] = Future()

        def act() -> None:
            try:
                result.set_result(action())
            except Exception as error:  # noqa: BLE001 - it is raised again where `action` was asked for
                result.set_exception(error)

        self._loop.call_soon_threadsafe(act)
        return result.result(CALL_TIMEOUT_S)


def _listen(host: str, port: int) -> socket.socket:
    family = family_of(host)
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(
            f"the endpoint cannot listen at {host}, port {port}: {error.strerror}; expected an address of this machine "
            "and a port that nobody uses, or 0 for one that is free"
        ) from error
