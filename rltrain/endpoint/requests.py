"""What a request may ask for: limits, sampling parameters, and how it is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal

from rltrain.rollout.engine import SamplingParams

# Requests that are not answered, and why, whichever API they came by.


class RequestRefused(Exception):  # noqa: N818 - names what happened
    """`status` is HTTP's. `param` names the field of the request, `code` the reason in one word for programs."""

    def __init__(self, status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestRefused:
    """The request is wrong, and would be whenever it came."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def object_in(part: object, where: str) -> Mapping[str, Any]:
    """`part` of a list of JSON objects. Raises Refused where it is none."""
    if not isinstance(part, Mapping):
        raise invalid(f"{where}: got {str(part)[:80]!r}; expected an object", where)
    return part


def text_in(part: Mapping[str, Any], where: str) -> str:
    """The text of a part of a message, "" where it has none. Raises Refused where that is no text."""
    text = part.get("text") or ""
    if not isinstance(text, str):
        raise invalid(f"{where}: got {str(text)[:80]!r} as text; expected a string", where)
    return text


def unsupported(param: str, given: object, expected: str) -> RequestRefused:
    """A field that would change what is answered, and that this server does not do."""
    message = f"{param}: got {given!r}, which this server does not support; expected {expected}"
    return invalid(message, param, "unsupported_value")


# What the endpoint takes on at once, and for how long.


@dataclass(frozen=True)
class RequestLimits:
    """Whoever exceeds one gets an answer of status 4xx that names it."""

    max_context_tokens: int
    """Of an engine: prompt and response together."""
    vocab_size: int
    """A prompt may have the ids below it. These include ids that no token has, which the model may draw too."""
    max_sessions: int = 1024
    """Open at one time."""
    max_turns: int = 1024
    """Drawn or waiting to be drawn at one time, in all sessions."""
    max_session_tokens: int = 1_000_000
    """Drawn in one session, over all its trajectories."""
    max_session_turns: int = 1000
    max_choices: int = 64
    """`n` of one request."""
    max_body_bytes: int = 16 * 2**20
    session_timeout_s: float = 3600.0
    """A session that is older ends, whatever it is doing."""
    repeat_within_s: float = 10.0
    """A turn whose client has gone is drawn on for so long: clients repeat a request whose connection was lost."""


# Whose sampling parameters count: the run's or the request's.

Policy = Literal["override", "refuse", "request"]


@dataclass(frozen=True)
class AskedSampling:
    """Of a request; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SamplingRules:
    """`own` holds for all turns (override), or must be what requests ask for if anything (refuse), or is what they get
    that ask for nothing else (request)."""

    own: SamplingParams
    policy: Policy

    def sampling_for(self, asked: AskedSampling) -> SamplingParams:
        """Raises Refused."""
        given = {name: value for name, value in vars(asked).items() if value is not None}
        if self.policy == "request":
            return replace(self.own, **given)
        for name, value in given.items():
            if self.policy == "refuse" and value != (own := getattr(self.own, name)):
                raise invalid(
                    f"{name}: got {value}, but responses are drawn with the run's own {name} = {own}; leave it out, or "
                    "set rollout.endpoint.sampling: override",
                    name,
                )
        return self.own

    def refuse_unless_overridden(self, param: str, given: object, expected: str) -> None:
        """For a wish that no engine here fulfils: where the run's way of drawing overrides requests it is passed over.
        Raises Refused."""
        if self.policy != "override":
            raise unsupported(param, given, expected)
