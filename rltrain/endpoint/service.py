"""Shared parts of the endpoint's routes: reading requests, sessions, and the weight updates of the server's owner."""

import asyncio
import hashlib
import importlib.metadata
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
from rltrain.endpoint.answer import Answer
from rltrain.endpoint.opening import ChatOpening, IdsOpening, Opening, TextOpening, TokenText
from rltrain.endpoint.request_images import RequestImages, content_of
from rltrain.endpoint.requests import RequestLimits, RequestRefused, SamplingRules, invalid, unsupported
from rltrain.endpoint.served_engine import Reloads
from rltrain.endpoint.session import Asked, Repetition, Session, Sessions
from rltrain.environments.interface import Message
from rltrain.errors import ConfigError, DataError, UserError
from rltrain.rollout.delta_form import form

# Unknown fields of requests. Harmless ones are ignored and all others are refused by name.

HARMLESS = frozenset({
    "cache_control", "cache_salt", "client_metadata", "inference_geo", "log_metrics", "max_tool_calls", "metadata",
    "moderation", "parallel_tool_calls", "prediction", "priority", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "rid", "safety_identifier", "service_tier", "speed", "store",
    "stream_interval", "stream_options", "user", "user_profile_id",
})  # fmt: skip
"""Fields without effect on the generated tokens and on the answer."""
WISHES = frozenset({
    "allowed_token_ids", "bad_words", "custom_logit_processor", "custom_params", "frequency_penalty",
    "length_penalty", "logit_bias", "logits_processors", "min_new_tokens", "min_p", "min_tokens", "presence_penalty",
    "reasoning", "reasoning_effort", "repetition_penalty", "thinking_token_budget", "use_beam_search", "verbosity",
})  # fmt: skip
"""Fields that change how tokens are sampled. They are ignored if the run's own sampling overrides requests."""
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
"""Values that ask for the only behaviour of the engines here."""


def refuse_unknown(fields: Mapping[str, Any], rules: SamplingRules, where: str = "") -> None:
    """Refuses the first field that would change the generated tokens or the answer. `where` is a prefix for its name.

    Null, false and empty values ask for nothing, except those of TRUE_BY_DEFAULT. Raises RequestRefused.
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


# Chat messages, in one form for all APIs.


class FunctionFields(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(BaseModel):
    model_config = ConfigDict(extra="allow")
    function: FunctionFields


class ChatMessage(BaseModel):
    """A chat message. Further fields are passed on to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[str | dict[str, Any]] | None = None
    tool_calls: list[CallFields] | None = None
    name: str | None = None


_MESSAGES = TypeAdapter(list[ChatMessage])


def checked(messages: Sequence[Mapping[str, Any]], *, sees: bool = False) -> tuple[Message, ...]:
    """Returns the messages with the content of `content_of`, and role `system` for `developer`.

    Raises RequestRefused, also for images unless the model `sees`.
    """
    try:
        _MESSAGES.validate_python(list(messages))
        made = [{**message, "content": content_of(message, sees=sees)} for message in messages]
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

# The state shared by all routes.

KEPT_FORMATS = 64
"""Most chat formats kept, one per set of tools and template options."""


@dataclass
class Service:
    """The state shared by all routes. `model` is the model name in answers, for any name in requests.

    With `answers_passers_by` the owner may also send requests outside of sessions. These are not recorded.
    """

    sessions: Sessions
    rules: SamplingRules
    limits: RequestLimits
    tokenizer: "PreTrainedTokenizerBase"
    model: str
    answers_passers_by: bool
    control: Reloads | None = None
    """Weight updates of the engine. None if they are not allowed."""
    end_tokens: Collection[int] = ()
    """Further tokens that end a turn in chats, in addition to those of the tokenizer and its template."""
    images: RequestImages | None = None
    """The images of requests. None if the model sees none."""

    def __post_init__(self) -> None:
        self.tokens = TokenText(self.tokenizer)
        self._formats: OrderedDict[str, ChatFormat] = OrderedDict()

    def weight_version(self, policy_versions: Sequence[int]) -> dict[str, str]:
        """Returns the answer field with the labels of the weights of these tokens. Empty if weights have no labels."""
        if self.control is None or not policy_versions:
            return {}
        return {"weight_version": ", ".join(dict.fromkeys(map(self.control.label, policy_versions)))}

    def chat(
        self, given: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> ChatOpening:
        """Returns a chat as the prompt of a turn.

        Raises RequestRefused if the checkpoint has no chat template or cannot answer these messages.
        """
        if self.tokenizer.chat_template is None:
            raise invalid("this checkpoint's tokenizer has no chat template; send a text to /v1/completions")
        messages = checked(given, sees=self.images is not None)
        if self.images is not None:
            messages = tuple(map(self.images.shared, messages))
        if not messages:
            raise invalid("messages: got none with content; expected at least one", "messages")
        if messages[-1].get("role") == "assistant":
            raise invalid("messages: the last one is the assistant's; expected one for it to answer", "messages")
        key = json.dumps([list(tools), dict(options)], sort_keys=True)
        made = self._formats.get(key) or self._format(tools, options)
        self._formats[key] = made
        self._formats.move_to_end(key)
        if len(self._formats) > KEPT_FORMATS:
            self._formats.popitem(last=False)
        return ChatOpening(messages, (*tools, dict(options)), made)

    def _format(self, tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> ChatFormat:
        """Raises RequestRefused if the checkpoint's chat template does not support the tools."""
        try:
            made = ChatFormat(
                self.tokenizer,
                tools=tools,
                template_options=options,
                end_tokens=self.end_tokens,
                images=None if self.images is None else self.images.rules,
            )
            made.require_tools()
        except (ConfigError, DataError) as error:
            raise invalid(f"tools: {error}", "tools") from error
        return made

    def prompt(self, given: str | Sequence[int]) -> TextOpening | IdsOpening:
        """Returns a text or token ids as the prompt of a turn."""
        if isinstance(given, str):
            return TextOpening(self.tokens, given)
        return IdsOpening(self.tokens, tuple(given))


# Reading of HTTP requests, and waiting for their answers.


class Body(BaseModel):
    """A request body. Unknown fields are ignored, because clients send many."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class DrawingBody(Body):
    """The body of a request for tokens. It keeps unknown fields for `refuse_unknown`."""

    model_config = ConfigDict(extra="allow")

    def refuse_unknown(self, rules: SamplingRules, where: str = "") -> None:
        """Raises RequestRefused for an unknown field with an effect. `where` is a prefix for its name."""
        refuse_unknown(self.model_extra or {}, rules, where)


class SamplingFields(DrawingBody):
    """The sampling fields with the same name in all APIs. Values outside the range of the engines are refused."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None


T = TypeVar("T", bound=BaseModel)

BODY_TIMEOUT_S = 60.0
NOTICE_S = 0.05
"""Time for the server to notice that an earlier connection is closed."""


class ClientGone(Exception):  # noqa: N818 - names what happened
    """The client has closed its connection."""


async def read_body(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Returns the body. Raises RequestRefused if it is too large or late, and ClientGone if the client has
    disconnected."""
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
        raise RequestRefused(HTTPStatus.REQUEST_TIMEOUT, f"the body has not arrived within {timeout_s:g} s") from error
    except ClientDisconnect as error:
        raise ClientGone from error
    return bytes(body)


async def read_json(request: Request, kind: type[T], max_bytes: int) -> tuple[T, bytes]:
    """Returns the body parsed as `kind`, and its bytes. Raises RequestRefused if it is not valid."""
    body = await read_body(request, max_bytes)
    try:
        return kind.model_validate_json(body or b"{}"), body
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        given = "" if param is None or first["type"] == "missing" else f", got {str(first['input'])[:80]!r}"
        raise invalid(f"{param or 'the body'}: {first['msg']}{given}", param) from error


def credential(request: Request) -> str | None:
    """Returns the bearer token, or the x-api-key that Anthropic's clients send."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer" and token:
        return token.strip()
    return request.headers.get("x-api-key")


def session_of(service: Service, request: Request) -> Session:
    """Returns the session in the request's path, else that of its token. Raises RequestRefused if there is none."""
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
    """Raises RequestRefused if the request does not have the server's own token."""
    if not service.sessions.is_owner(credential(request)):
        raise RequestRefused(
            HTTPStatus.UNAUTHORIZED, "expected the server's token as bearer token", code="invalid_api_key"
        )


def repetition(request: Request, body: bytes, part: int = 0) -> Repetition:
    """Returns the marks by which a repeated request is recognized. `part` numbers the prompts of one request.

    Clients built on OpenAI's and Anthropic's libraries count their attempts in a header.
    """
    digest = hashlib.sha256(f"{request.url.path}\n{part}\n".encode() + body).digest()
    attempt = request.headers.get("x-stainless-retry-count", "0")
    key = request.headers.get("idempotency-key")
    return Repetition(digest, None if key is None else f"{key} {part}", attempt.isdigit() and int(attempt) > 0)


async def answer_to(session: Session, opening: Opening, asked: Asked, repetition: Repetition) -> Answer:
    """Returns the session's answer, after the images of its prompt are decoded. Raises RequestRefused.

    If the same request is under way, waits briefly first. A client that reconnects may be read before the end of its
    first connection is noticed.
    """
    try:
        await session.keep_images(opening)
        if session.is_drawing(repetition):
            await asyncio.sleep(NOTICE_S)
        return session.answer(opening, asked, repetition)
    except RequestRefused:
        session.drop_images()
        raise


async def wait_for(request: Request, answers: Sequence[Answer]) -> None:
    """Waits until all answers are complete. Raises RequestRefused if one fails, and ClientGone if the client
    disconnects."""
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


# Weight updates by the server's owner. Paths and fields are those of SGLang's server.


class DiskUpdate(Body):
    """The body of POST /update_weights_from_disk."""

    model_path: str = Field(min_length=1)
    weight_version: str | None = None


async def model_info(service: Service, control: Reloads, request: Request) -> Response:
    """GET /model_info: returns the checkpoint, its version, the supported delta format and the release of rltrain."""
    require_owner(service, request)
    return JSONResponse(_info(control))


async def update_weights_from_disk(service: Service, control: Reloads, request: Request) -> Response:
    """POST /update_weights_from_disk: loads a checkpoint or a delta. Needs the server's own token."""
    require_owner(service, request)
    asked, _ = await read_json(request, DiskUpdate, service.limits.max_body_bytes)
    try:
        await control.reload(Path(asked.model_path), asked.weight_version)
    except UserError as error:
        raise invalid(str(error), "model_path") from error
    return JSONResponse({"success": True, "message": f"serves {asked.model_path}", **_info(control)})


def _release() -> str | None:
    """Returns the release of rltrain, or None in a checkout that was not installed."""
    try:
        return importlib.metadata.version("rltrain")
    except importlib.metadata.PackageNotFoundError:
        return None


def _info(control: Reloads) -> dict[str, Any]:
    return {
        "version": _release(),
        "model_path": str(control.checkpoint),
        "weight_version": control.label(),
        form.FORMAT_KEY: form.FORMAT,
    }
