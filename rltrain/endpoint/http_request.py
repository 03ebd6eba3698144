"""From an HTTP request to what it asks for, and its client while it waits."""

import asyncio
import hashlib
from collections.abc import Sequence
from http import HTTPStatus
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from rltrain.config.section import Temperature, TopK, TopP
from rltrain.endpoint.answer import Answer
from rltrain.endpoint.opening import Opening
from rltrain.endpoint.refused import Refused, invalid
from rltrain.endpoint.sampling_rules import SamplingRules
from rltrain.endpoint.service import Service
from rltrain.endpoint.session import Asked, Repetition, Session
from rltrain.endpoint.unknown_fields import refuse_unknown


class Body(BaseModel):
    """Fields that nobody reads are harmless: clients send many."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class DrawingBody(Body):
    """A request for which tokens are drawn. It keeps unknown fields until `refuse_unknown` has looked at them."""

    model_config = ConfigDict(extra="allow")

    def refuse_unknown(self, rules: SamplingRules, where: str = "") -> None:
        """Raises Refused for a field that cannot be obeyed; `where` precedes its name."""
        refuse_unknown(self.model_extra or {}, rules, where)


class SamplingFields(DrawingBody):
    """The sampling fields that have the same name in all APIs. Numbers that no engine can draw with are refused."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None


T = TypeVar("T", bound=BaseModel)

BODY_TIMEOUT_S = 60.0
NOTICE_S = 0.05
"""In which the server reads what has arrived before."""


class ClientGone(Exception):  # noqa: N818 - names what happened
    """Nobody is there to answer to."""


async def read_body(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Raises Refused where it is larger, and where it does not come."""
    too_large = Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {max_bytes} bytes")
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError as error:
        raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the body has not come within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


async def read_json(request: Request, kind: type[T], max_bytes: int) -> tuple[T, bytes]:
    """The body as `kind`, and as it came. Raises Refused where it is none."""
    body = await read_body(request, max_bytes)
    try:
        return kind.model_validate_json(body or b"{}"), body
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        given = "" if param is None or first["type"] == "missing" else f", got {str(first['input'])[:80]!r}"
        raise invalid(f"{param or 'the body'}: {first['msg']}{given}", param) from error


def credential(request: Request) -> str | None:
    """A bearer token, or what Anthropic's clients send instead."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key")


def session_of(service: Service, request: Request) -> Session:
    """The one that a request's path names, else the one whose token it brings. Raises Refused."""
    token = credential(request)
    if "session" in request.path_params:
        return service.sessions.of_id(request.path_params["session"], token)
    if (session := service.sessions.of_token(token)) is not None:
        return session
    if service.answers_passers_by and service.sessions.is_owner(token):
        return service.sessions.passing()
    expected = "a session's token as bearer token or x-api-key; POST /sessions opens one"
    raise Refused(
        HTTPStatus.UNAUTHORIZED, f"the request has no valid token; expected {expected}", code="invalid_api_key"
    )


def require_owner(service: Service, request: Request) -> None:
    """Raises Refused for who may not open sessions."""
    if not service.sessions.is_owner(credential(request)):
        raise Refused(HTTPStatus.UNAUTHORIZED, "expected the server's token as bearer token", code="invalid_api_key")


def repetition(request: Request, body: bytes, part: int = 0) -> Repetition:
    """Clients made of OpenAI's and Anthropic's libraries count their attempts in a header."""
    digest = hashlib.sha256(f"{request.url.path}\n{part}\n".encode() + body).digest()
    attempt = request.headers.get("x-stainless-retry-count", "0")
    key = request.headers.get("idempotency-key")
    return Repetition(digest, None if key is None else f"{key} {part}", attempt.isdigit() and int(attempt) > 0)


async def answer_to(session: Session, opening: Opening, asked: Asked, repetition: Repetition) -> Answer:
    """The session's. Raises Refused.

    A client that breaks a connection and asks again may be read before the end of its first connection is.
    """
    if session.is_drawing(repetition):
        await asyncio.sleep(NOTICE_S)
    return session.answer(opening, asked, repetition)


async def wait_for(request: Request, answers: Sequence[Answer]) -> None:
    """Until all are whole. Raises Refused, and ClientGone where their client does not wait for them."""
    gone = asyncio.ensure_future(_disconnected(request))
    drawn = asyncio.ensure_future(_whole(answers))
    try:
        await asyncio.wait({gone, drawn}, return_when=asyncio.FIRST_COMPLETED)
        if not drawn.done():
            raise ClientGone
        drawn.result()
    finally:
        gone.cancel()
        drawn.cancel()


async def _whole(answers: Sequence[Answer]) -> None:
    for answer in answers:
        await answer.whole()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
