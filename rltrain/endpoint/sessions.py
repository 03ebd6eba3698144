"""All sessions of an endpoint: who may use which, and how many there are."""

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from rltrain.endpoint.limits import Limits
from rltrain.endpoint.refused import Refused
from rltrain.endpoint.session import Session
from rltrain.endpoint.trajectory import RecordedSession, SampleIds
from rltrain.endpoint.turn import Turns
from rltrain.rollout.sample import Status, request_seed


@dataclass(frozen=True)
class Opened:
    """What a client needs of a new session. The token is known to nobody else."""

    id: str
    token: str


class Sessions:
    """Lives in the server's event loop. `token` opens sessions and may use all of them; None: everybody may.

    `on_end` is called once for every session that was recorded.
    """

    def __init__(
        self,
        turns: Turns,
        limits: Limits,
        *,
        token: str | None,
        seed: int = 0,
        first_sample_id: int = 0,
        on_end: Callable[[RecordedSession], None] = lambda _: None,
    ) -> None:
        self._turns, self._limits, self._seed, self._on_end = turns, limits, seed, on_end
        self._token_digest = None if token is None else _digest(token)
        self._ids = SampleIds(first_sample_id)
        self._open: dict[str, Session] = {}
        self._by_token: dict[bytes, tuple[bytes, Session]] = {}
        """Under a hash of each token, which takes as long to look up whatever of it is right."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, metadata: object = None, seed: int | None = None) -> Opened:
        """Raises Refused where there are as many as may be."""
        if len(self._open) >= self._limits.max_sessions:
            raise Refused(HTTPStatus.TOO_MANY_REQUESTS, f"{self._limits.max_sessions} sessions are open", code="busy")
        opened = Opened("session_" + secrets.token_hex(8), "sk-" + secrets.token_urlsafe(32))
        session = self._new(opened.id, metadata, seed, is_recorded=True)
        self._open[opened.id] = session
        digest = _digest(opened.token)
        self._by_token[digest] = digest, session
        loop = asyncio.get_running_loop()
        self._timers[opened.id] = loop.call_later(self._limits.session_timeout_s, self._expire, opened.id)
        return opened

    def passing(self) -> Session:
        """One for a single request of somebody who has no session."""
        return self._new("", None, None, is_recorded=False)

    def is_owner(self, credential: str | None) -> bool:
        """Whether it opens sessions."""
        if self._token_digest is None:
            return True
        return credential is not None and hmac.compare_digest(_digest(credential), self._token_digest)

    def of_token(self, credential: str | None) -> Session | None:
        """The open session whose token this is."""
        if credential is None:
            return None
        digest = _digest(credential)
        known, session = self._by_token.get(digest, (b"", None))
        return session if hmac.compare_digest(known, digest) else None

    def of_id(self, number: str, credential: str | None) -> Session:
        """The session, for who may use it. Raises Refused."""
        session = self._open.get(number)
        if session is not None and (self.is_owner(credential) or self.of_token(credential) is session):
            return session
        if self.is_owner(credential):
            raise Refused(HTTPStatus.NOT_FOUND, f"there is no open session {number!r}", code="session_not_found")
        raise Refused(HTTPStatus.UNAUTHORIZED, "the token is not this session's", code="invalid_api_key")

    def end(self, session: Session, by: str, status: Status | None = None) -> RecordedSession:
        """Raises Refused where it has ended before."""
        if self._open.pop(session.id, None) is None:
            raise Refused(HTTPStatus.GONE, f"this session has ended: {session.ended_by}", code="session_ended")
        self._by_token = {digest: known for digest, known in self._by_token.items() if known[1] is not session}
        self._timers.pop(session.id).cancel()
        recorded = session.end(by, status)
        self._on_end(recorded)
        return recorded

    def end_all(self, by: str) -> None:
        for session in [*self._open.values()]:
            self.end(session, by, Status.ABORTED)

    def find(self, number: str) -> Session | None:
        return self._open.get(number)

    def _new(self, number: str, metadata: object, seed: int | None, *, is_recorded: bool) -> Session:
        own = request_seed(self._seed, 0, 0, self._num_opened) if seed is None else seed
        self._num_opened += 1
        return Session(
            number, self._turns, self._limits, self._ids, seed=own, metadata=metadata, is_recorded=is_recorded
        )

    def _expire(self, number: str) -> None:
        if (session := self._open.get(number)) is not None:
            self.end(session, f"its time of {self._limits.session_timeout_s:g} s is over", Status.ABORTED)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
