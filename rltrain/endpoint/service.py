"""What all routes of the endpoint share: reading requests, and what the owner may do with the engine."""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from rltrain.config.section import Temperature, TopK, TopP
from rltrain.data.chat_format import ChatFormat
from rltrain.data.chat_template import text_of
from rltrain.endpoint.answer import Answer
from rltrain.endpoint.opening import ChatOpening, IdsOpening, Opening, TextOpening, TokenText
from rltrain.endpoint.requests import RequestLimits, RequestRefused, SamplingRules, invalid, unsupported
from rltrain.endpoint.served_engine import Reloads
from rltrain.endpoint.session import Asked, Repetition, Session, Sessions
from rltrain.environments.interface import Message
from rltrain.errors import ConfigError, DataError, UserError
from rltrain.rollout.delta_form import form

# Fields of requests that this server does not know: harmless ones are taken, all others are refused by name.

HARMLESS = frozenset({
    "cache_control", "cache_salt", "client_metadata", "inference_geo", "log_metrics", "max_tool_calls", "metadata",
    "moderation", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "rid", "safety_identifier", "service_tier", "speed", "store",
    "stream_interval", "stream_options", "user", "user_profile_id",
})  # fmt: skip
"""These change neither what is drawn nor what an answer says."""
WISHES = frozenset({
    "allowed_token_ids", "bad_words", "custom_logit_processor", "custom_params", "frequency_penalty",
    "length_penalty", "logit_bias", "logits_processors", "min_new_tokens", "min_p", "min_tokens", "presence_penalty",
    "reasoning", "reasoning_effort", "repetition_penalty", "thinking_token_budget", "use_beam_search", "verbosity",
})  # fmt: skip
"""These say how tokens are drawn. Where the run's own way of drawing overrides requests, they are passed over."""
TRUE_BY_DEFAULT = frozenset({
    "add_generation_prompt", "detokenize", "include_reasoning", "separate_reasoning", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_reasoning",
})  # fmt: skip
NEUTRAL: Mapping[str, object] = {
    "best_of": 1,
    "chat_template_content_format": "auto",
    "frequency_penalty": 0,
    "function_call": "auto",
    "length_penalty": 1,
    "logprob_start_len": -1,
    "min_new_tokens": 0,
    "min_p": 0,
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "top_logprobs": 0,
    "top_logprobs_num": 0,
    "truncation": "disabled",
}
"""The values that ask for what every engine here does."""


def refuse_unknown(fields: Mapping[str, Any], rules: SamplingRules, where: str = "") -> None:
    """Refuses the first field that would change what is drawn or answered; `where` precedes its name. Raises Refused.

    Null, false and empty values ask for nothing, except those of TRUE_BY_DEFAULT.
    """
    for name, value in fields.items():
        if name in HARMLESS or _asks_for_nothing(name, value):
            continue
        expected = f"{NEUTRAL[name]!r}" if name in NEUTRAL else "true" if name in TRUE_BY_DEFAULT else "none"
        if name in WISHES:
            rules.refuse_unless_overridden(where + name, value, expected)
        else:
            raise unsupported(where + name, value, expected)


def _asks_for_nothing(name: str, value: object) -> bool:
    if name in TRUE_BY_DEFAULT:
        return value is None or value is True
    if name in NEUTRAL and value == NEUTRAL[name] and not isinstance(value, bool):
        return True
    return value is None or value is False or value == "" or value == [] or value == {}


# The form of chat messages, whichever API they come by.


class FunctionFields(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(BaseModel):
    model_config = ConfigDict(extra="allow")
    function: FunctionFields


class ChatMessage(BaseModel):
    """What else there is in it is the chat template's."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[CallFields] | None = None
    name: str | None = None


_MESSAGES = TypeAdapter(list[ChatMessage])


def checked(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """With contents of text alone, and `system` for `developer`. Raises Refused."""
    try:
        _MESSAGES.validate_python(list(messages))
        made = [{**message, "content": text_of(message.get("content"))} for message in messages]
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, ("messages", *first["loc"])))
        raise invalid(f"{place}: {first['msg']}", place) from error
    except DataError as error:
        raise invalid(f"messages: {error}", "messages") from error
    return tuple({**message, "role": "system"} if message["role"] == "developer" else message for message in made)


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    pass

# What all routes of the endpoint share.

KEPT_FORMATS = 64
"""Chat formats of different tools."""


@dataclass
class Service:
    """`model` is the name that answers carry, whatever name requests give. `answers_passers_by`: whoever may open
    sessions may send requests outside of any as well, of which nothing is recorded."""

    sessions: Sessions
    rules: SamplingRules
    limits: RequestLimits
    tokenizer: "PreTrainedTokenizerBase"
    model: str
    answers_passers_by: bool
    control: Reloads | None = None
    """None: nobody may change what the engine serves."""
    end_tokens: Collection[int] = ()
    """What ends a turn in chats, beside what the tokenizer and its template say."""

    def __post_init__(self) -> None:
        self.tokens = TokenText(self.tokenizer)
        self._formats: OrderedDict[str, ChatFormat] = OrderedDict()

    def weight_version(self, policy_versions: Sequence[int]) -> dict[str, str]:
        """A field of answers: what the weights are called that drew these tokens."""
        if self.control is None or not policy_versions:
            return {}
        return {"weight_version": ", ".join(dict.fromkeys(map(self.control.label, policy_versions)))}

    def chat(
        self, given: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ChatOpening:
        """Raises Refused where the checkpoint has no chats, or none like this."""
        if self.tokenizer.chat_template is None:
            raise invalid("this checkpoint's tokenizer has no chat template; send a text to /v1/completions")
        messages = checked(given)
        if not messages:
            raise invalid("messages: got none that says anything; expected at least one", "messages")
        if messages[-1].get("role") == "assistant":
            raise invalid("messages: the last one is the assistant's; expected one that it is to answer", "messages")
        key = json.dumps([list(tools), dict(options)], sort_keys=True)
        made = self._formats.get(key) or self._format(tools, options)
        self._formats[key] = made
        self._formats.move_to_end(key)
        if len(self._formats) > KEPT_FORMATS:
            self._formats.popitem(last=False)
        return ChatOpening(messages, (*tools, dict(options)), made)

    def _format(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> ChatFormat:
        """Raises Refused where the checkpoint's template has no place for the tools."""
        try:
            made = ChatFormat(self.tokenizer, tools=tools, template_options=options, end_tokens=self.end_tokens)
            made.require_tools()
        except (ConfigError, DataError) as error:
            raise invalid(f"tools: {error}", "tools") from error
        return made

    def prompt(self, given: str | Sequence[int]) -> TextOpening | IdsOpening:
        if isinstance(given, str):
            return TextOpening(self.tokens, given)
        return IdsOpening(self.tokens, tuple(given))


# From an HTTP request to what it asks for, and its client while it waits.


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
    too_large = RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {max_bytes} bytes")
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
        raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, f"the body has not come within {timeout_s:g} s") from error
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
    raise RequestRefused(
        HTTPStatus.UNAUTHORIZED, f"the request has no valid token; expected {expected}", code="invalid_api_key"
    )


def require_owner(service: Service, request: Request) -> None:
    """Raises Refused for who may not open sessions."""
    if not service.sessions.is_owner(credential(request)):
        raise RequestRefused(
            HTTPStatus.UNAUTHORIZED, "expected the server's token as bearer token", code="invalid_api_key"
        )


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


# What a server's owner may do with its engine: ask which weights it has, and have it load others. Paths and fields are
# those of SGLang's server.


class DiskUpdate(Body):
    model_path: str = Field(min_length=1)
    weight_version: str | None = None


async def model_info(service: Service, control: Reloads, request: Request) -> Response:
    require_owner(service, request)
    return JSONResponse(_info(control))


async def update_weights_from_disk(service: Service, control: Reloads, request: Request) -> Response:
    require_owner(service, request)
    asked, _ = await read_json(request, DiskUpdate, service.limits.max_body_bytes)
    try:
        await control.reload(Path(asked.model_path), asked.weight_version)
    except UserError as error:
        raise invalid(str(error), "model_path") from error
    return JSONResponse({"success": True, "message": f"serves {asked.model_path}", **_info(control)})


def _info(control: Reloads) -> dict[str, Any]:
    return {
        "model_path": str(control.checkpoint),
        "weight_version": control.label(),
        form.FORMAT_KEY: form.FORMAT,
    }
