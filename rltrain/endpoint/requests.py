"""Limits and sampling rules of requests, and the error for refused ones."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal

from rltrain.rollout.engine import SamplingParams

# Refusals of requests, for all APIs.


class RequestRefused(Exception):  # noqa: N818 - names what happened
    """A refused request. `status` is the HTTP status, `param` the field's name, and `code` a reason for programs."""

    def __init__(self, status: HTTPStatus, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def invalid(message: str, param: str | None = None, code: str | None = None) -> RequestRefused:
    """Returns the refusal of a request that is wrong at any time."""
    return RequestRefused(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def object_in(part: object, where: str) -> Mapping[str, Any]:
    """Returns `part`, an element of a JSON list. Raises RequestRefused if it is not an object."""
    if not isinstance(part, Mapping):
        raise invalid(f"{where}: got {str(part)[:80]!r}; expected an object", where)
    return part


def text_in(part: Mapping[str, Any], where: str) -> str:
    """Returns the text of a message's part, or "" if it has none. Raises RequestRefused if the text is not a string."""
    text = part.get("text") or ""
    if not isinstance(text, str):
        raise invalid(f"{where}: got {str(text)[:80]!r} as text; expected a string", where)
    return text


def unsupported(param: str, given: object, expected: str) -> RequestRefused:
    """Returns the refusal of a field with an effect that this server does not support."""
    message = f"{param}: got {given!r}, which this server does not support; expected {expected}"
    return invalid(message, param, "unsupported_value")


# Limits of the endpoint.


@dataclass(frozen=True)
class RequestLimits:
    """Limits of the endpoint. A request above one is refused with a 4xx status and a message about the limit."""

    max_context_tokens: int
    """Most tokens of prompt and response together."""
    vocab_size: int
    """Exclusive upper limit of token ids in prompts. Includes ids without a token; the model can generate these too."""
    max_sessions: int = 1024
    """Most open sessions."""
    max_turns: int = 1024
    """Most turns under way in all sessions, running or queued."""
    max_session_tokens: int = 1_000_000
    """Most tokens generated in one session, over all its trajectories."""
    max_session_turns: int = 1000
    max_choices: int = 64
    """Most choices of one request (`n`)."""
    max_body_bytes: int = 16 * 2**20
    session_timeout_s: float = 3600.0
    """Time after which a session ends, even if it is in use."""
    repeat_within_s: float = 10.0
    """Time to continue a turn after its client has left. Clients repeat a request after a lost connection."""


# Precedence between the run's sampling parameters and the request's.

Policy = Literal["override", "refuse", "request"]


@dataclass(frozen=True)
class AskedSampling:
    """Sampling parameters of a request. None if the request does not have one."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class SamplingRules:
    """The run's `own` sampling parameters, and their precedence over a request's.

    - override: `own` holds for all turns.
    - refuse: a request is refused if it asks for other values.
    - request: `own` are the defaults.
    """

    own: SamplingParams
    policy: Policy

    def sampling_for(self, asked: AskedSampling) -> SamplingParams:
        """Returns the sampling parameters for a request. Raises RequestRefused."""
        given = {name: value for name, value in vars(asked).items() if value is not None}
        if self.policy == "request":
            return replace(self.own, **given)
        for name, value in given.items():
            if self.policy == "refuse" and value != (own := getattr(self.own, name)):
                raise invalid(
                    f"{name}: got {value}, but responses use the run's own {name} = {own}; leave it out, or "
                    "set rollout.endpoint.sampling: override",
                    name,
                )
        return self.own

    def refuse_unless_overridden(self, param: str, given: object, expected: str) -> None:
        """Refuses a sampling field without support in the engines, unless the run's sampling overrides requests.

        Raises RequestRefused.
        """
        if self.policy != "override":
            raise unsupported(param, given, expected)
