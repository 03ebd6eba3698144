"""The endpoint's web server and its routes."""

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rltrain.config.section import TokenCount, TokenId
from rltrain.endpoint.answer import Answer, Choice
from rltrain.endpoint.anthropic_messages import anthropic_error, count_tokens, messages
from rltrain.endpoint.openai import (
    MAX_STOP_TOKENS,
    chat_completions,
    completions,
    ends_of_turns,
    openai_error,
    responses,
    stop_strings_of,
)
from rltrain.endpoint.opening import RecordedSession
from rltrain.endpoint.request_images import RequestImages
from rltrain.endpoint.requests import AskedSampling, RequestLimits, RequestRefused, SamplingRules, invalid, unsupported
from rltrain.endpoint.served_engine import Reloads
from rltrain.endpoint.service import (
    Body,
    ClientGone,
    DrawingBody,
    SamplingFields,
    Service,
    answer_to,
    model_info,
    read_json,
    repetition,
    require_owner,
    session_of,
    update_weights_from_disk,
    wait_for,
)
from rltrain.endpoint.session import Asked, Opened, Sessions, summary
from rltrain.errors import ConfigError
from rltrain.rollout.engine_feed import EngineMailbox
from rltrain.rollout.sample import Status
from rltrain.runtime.machine import JobThread
from rltrain.runtime.messages import family_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Routes for sessions: open, show, reward and finish.

MAX_SMALL_BODY_BYTES = 2**20


class OpenRequest(Body):
    """The body of POST /sessions."""

    metadata: Any = None
    seed: int | None = None


class RewardRequest(Body):
    """The body of POST /sessions/{session}/reward."""

    reward: float
    """The reward of the episode. It is that of one turn if `turn` or `trajectory` is given."""
    turn: int | None = None
    trajectory: int | None = None


class FinishRequest(Body):
    """The body of POST /sessions/{session}/finish."""

    reward: float | None = None
    status: Literal["completed", "aborted", "failed"] = "completed"


STATUS = {"completed": None, "aborted": Status.ABORTED, "failed": Status.FAILED}


async def open_session(service: Service, request: Request) -> Response:
    """POST /sessions: opens a session and returns its id, token and URLs. Needs the server's own token."""
    require_owner(service, request)
    asked, _ = await read_json(request, OpenRequest, MAX_SMALL_BODY_BYTES)
    opened = service.sessions.open(asked.metadata, asked.seed)
    url = str(request.base_url).rstrip("/") + f"/sessions/{opened.id}"
    return JSONResponse({"id": opened.id, "token": opened.token, "url": url, "base_url": f"{url}/v1"}, 201)


async def show_session(service: Service, request: Request) -> Response:
    """GET /sessions/{session}, or POST /sessions/{session}/samples: returns the record so far."""
    session = session_of(service, request)
    return JSONResponse(summary(session.record()))


async def set_reward(service: Service, request: Request) -> Response:
    """POST /sessions/{session}/reward: sets the reward of the episode or of a turn."""
    session = session_of(service, request)
    asked, _ = await read_json(request, RewardRequest, MAX_SMALL_BODY_BYTES)
    session.set_reward(asked.reward, trajectory=asked.trajectory, turn=asked.turn)
    return JSONResponse({"id": session.id, "reward": asked.reward})


async def finish_session(service: Service, request: Request) -> Response:
    """POST /sessions/{session}/finish: ends the session and returns its record."""
    session = session_of(service, request)
    asked, _ = await read_json(request, FinishRequest, MAX_SMALL_BODY_BYTES)
    if asked.reward is not None:
        session.set_reward(asked.reward)
    return JSONResponse(summary(service.sessions.end(session, "finish", STATUS[asked.status])))


async def delete_session(service: Service, request: Request) -> Response:
    """DELETE /sessions/{session}: ends the session as aborted."""
    session = session_of(service, request)
    service.sessions.end(session, "DELETE", Status.ABORTED)
    return Response(status_code=204)


# POST /generate: token ids in and out, with the fields of SGLang's server that users' generate functions read.

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default."""


class GenerateSampling(SamplingFields):
    """The field sampling_params of POST /generate."""

    max_new_tokens: TokenCount | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None
    n: TokenCount = 1


class GenerateRequest(DrawingBody):
    """The body of POST /generate."""

    input_ids: Annotated[list[int], Field(min_length=1)] | None = None
    text: str | None = None
    sampling_params: GenerateSampling = GenerateSampling()
    return_logprob: bool = False
    stream: bool = False

    def prompt(self) -> str | list[int]:
        """Returns the text or token ids of the prompt.

        Raises RequestRefused if `stream` is set, or unless exactly one of `input_ids` and `text` is given.
        """
        if self.stream:
            raise unsupported("stream", True, "false")
        if (self.input_ids is None) == (self.text is None):
            raise invalid("expected either input_ids or text", "input_ids")
        return self.input_ids if self.input_ids is not None else self.text or ""

    def asked(self, service: Service) -> Asked:
        """Returns the settings of the turns. Raises RequestRefused."""
        params, rules = self.sampling_params, service.rules
        self.refuse_unknown(rules)
        params.refuse_unknown(rules, "sampling_params.")
        ends = ends_of_turns(rules.own.stop_token_ids, params.stop_token_ids, ignore_eos=params.ignore_eos)
        return Asked(
            rules.sampling_for(AskedSampling(params.temperature, params.top_p, params.top_k, ends)),
            num_choices=params.n,
            max_tokens=params.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            stop=stop_strings_of(params.stop, "sampling_params.stop"),
            seed=params.sampling_seed,
        )


async def generate(service: Service, request: Request) -> Response:
    """POST /generate: returns one result per choice, with token ids and, if asked for, log-probs."""
    session = session_of(service, request)
    asked, body = await read_json(request, GenerateRequest, service.limits.max_body_bytes)
    answer = await answer_to(session, service.prompt(asked.prompt()), asked.asked(service), repetition(request, body))
    with answer.attached():
        await wait_for(request, [answer])
    results = [_result(answer, choice, asked, service) for choice in answer.choices]
    return JSONResponse(results[0] if asked.sampling_params.n == 1 else results)


def _result(answer: Answer, choice: Choice, asked: GenerateRequest, service: Service) -> dict[str, Any]:
    reply = choice.read(answer.opening)
    truncated = choice.sample.status.name == "TRUNCATED"
    versions = choice.sample.policy_versions[choice.start :]
    meta: dict[str, Any] = {
        "id": secrets.token_hex(12),
        "finish_reason": {"type": "length" if truncated else "stop", "matched": reply.stop},
        "prompt_tokens": len(choice.context),
        "completion_tokens": len(choice.tokens),
        "cached_tokens": 0,
        "weight_version": str(versions[-1]) if versions else None,
        "weight_versions": versions,
        **service.weight_version(versions[-1:]),
    }
    if asked.return_logprob:
        pairs = zip(choice.logprobs, choice.tokens, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
    return {"text": reply.text, "output_ids": choice.tokens, "meta_info": meta}


# All routes, and the responses for errors.

logger = logging.getLogger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response]]
CLIENT_CLOSED_REQUEST = 499
"""The status that proxies log for a closed connection. No client reads it."""
RETRY_AFTER_S = 1
OF_ANTHROPIC = "anthropic-version"
"""The header by which Anthropic's clients are recognized."""

OF_SESSIONS: tuple[tuple[str, Handler], ...] = (
    ("/v1/chat/completions", chat_completions),
    ("/v1/completions", completions),
    ("/v1/responses", responses),
    ("/v1/messages", messages),
    ("/v1/messages/count_tokens", count_tokens),
    ("/generate", generate),
)
"""POST routes. The session comes from the request's token, or from the path below /sessions/{session}."""


def build_app(service: Service) -> Starlette:
    """Returns the application. It must be served in a single event loop."""

    def route(path: str, handler: Handler, method: str = "POST") -> Route:
        return Route(path, partial(handler, service), methods=[method])

    routes = [
        route("/healthz", health, "GET"),
        route("/health", health, "GET"),
        route("/sessions", open_session),
        route("/sessions/{session}", show_session, "GET"),
        route("/sessions/{session}", delete_session, "DELETE"),
        route("/sessions/{session}/samples", show_session),
        route("/sessions/{session}/reward", set_reward),
        route("/sessions/{session}/finish", finish_session),
    ]
    for prefix in ("", "/sessions/{session}"):
        routes += [route(prefix + path, handler) for path, handler in OF_SESSIONS]
        routes.append(route(prefix + "/v1/models", models, "GET"))
        routes.append(route(prefix + "/v1/models/{model:path}", one_model, "GET"))
    if (control := service.control) is not None:
        routes += [
            Route("/model_info", partial(model_info, service, control), methods=["GET"]),
            Route("/update_weights_from_disk", partial(update_weights_from_disk, service, control), methods=["POST"]),
        ]
    handlers = {RequestRefused: _refuse, HTTPException: _refuse_http, ClientGone: _nobody, Exception: _fail}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


async def health(service: Service, request: Request) -> Response:
    """GET /health and /healthz: reports that the server runs, and the number of open sessions."""
    return JSONResponse({"status": "ok", "sessions": len(service.sessions)})


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models: returns a list of the one model."""
    session_of(service, request)
    data = [_model(service, request)]
    if OF_ANTHROPIC in request.headers:
        return JSONResponse({"data": data, "has_more": False, "first_id": service.model, "last_id": service.model})
    return JSONResponse({"object": "list", "data": data})


async def one_model(service: Service, request: Request) -> Response:
    """GET /v1/models/{model}: returns the model. Raises RequestRefused for another name."""
    session_of(service, request)
    name = request.path_params["model"]
    if name != service.model:
        raise RequestRefused(HTTPStatus.NOT_FOUND, f"model: got {name!r}; expected {service.model!r}", param="model")
    return JSONResponse(_model(service, request))


def _model(service: Service, request: Request) -> dict[str, Any]:
    """Describes the model in the form of Anthropic's API if the request has its version header, else in OpenAI's."""
    if OF_ANTHROPIC in request.headers:
        of_anthropic = {"type": "model", "display_name": service.model, "created_at": "1970-01-01T00:00:00Z"}
        return {"id": service.model, **of_anthropic, "max_input_tokens": service.limits.max_context_tokens}
    context = {"max_model_len": service.limits.max_context_tokens}
    return {"id": service.model, "object": "model", "created": 0, "owned_by": "rltrain", **context}


async def _refuse(request: Request, refused: RequestRefused) -> Response:
    is_anthropics = "/v1/messages" in request.url.path or OF_ANTHROPIC in request.headers
    error_of = anthropic_error if is_anthropics else openai_error
    retry = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == HTTPStatus.TOO_MANY_REQUESTS else {}
    return JSONResponse(error_of(refused), refused.status, headers=retry)


async def _refuse_http(request: Request, error: HTTPException) -> Response:
    """Answers a request for an unknown path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refuse(request, RequestRefused(HTTPStatus(error.status_code), message))


async def _nobody(request: Request, error: ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _fail(request: Request, error: Exception) -> Response:
    return await _refuse(
        request, RequestRefused(HTTPStatus.INTERNAL_SERVER_ERROR, "an error of the server; see its log")
    )


# The web server. It has its own thread, beside the thread of the engine.

START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10
"""Seconds for requests that are being answered when the server stops."""
T = TypeVar("T")


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of an endpoint. `token` opens sessions and gives access to all. None gives it to every client."""

    rules: SamplingRules
    limits: RequestLimits
    model: str
    token: str | None
    host: str = "127.0.0.1"
    port: int = 0
    """TCP port. 0 takes a free one."""
    answers_passers_by: bool = False
    """Whether requests outside of a session are answered, for clients that may open sessions."""
    seed: int = 0
    first_sample_id: int = 0
    end_tokens: Collection[int] = ()
    """Further tokens that end a turn in chats, in addition to those of the tokenizer and its template."""


class EndpointServer:
    """Serves `turns` over HTTP from `start` to `stop`. Methods may be called from all threads except the server's own.

    `on_end` receives every ended session, in the server's thread. With `control` a client with `settings.token` may
    have the engine load other weights. With `images` requests may have images.
    """

    def __init__(
        self,
        turns: EngineMailbox,
        tokenizer: "PreTrainedTokenizerBase",
        settings: EndpointSettings,
        on_end: Callable[[RecordedSession], None] = lambda _: None,
        control: Reloads | None = None,
        images: RequestImages | None = None,
    ) -> None:
        self._sessions = Sessions(
            turns,
            settings.limits,
            token=settings.token,
            seed=settings.seed,
            first_sample_id=settings.first_sample_id,
            on_end=on_end,
            images=images,
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
            images,
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
        """The server's base URL."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        """Starts the thread. Returns once requests are answered."""
        self._thread.start()
        if not self._is_listening.wait(START_TIMEOUT_S):
            raise RuntimeError(f"the endpoint's server has not started within {START_TIMEOUT_S:g} s")

    def open_session(self, metadata: object = None, seed: int | None = None) -> Opened:
        """Opens a session. Raises RequestRefused if too many are open."""
        return self._call(lambda: self._sessions.open(metadata, seed))

    def end_session(self, number: str, by: str, status: Status | None = None, reward: float | None = None) -> None:
        """Ends the session if it is open. `on_end` receives it."""

        def end() -> None:
            if (session := self._sessions.find(number)) is not None:
                if reward is not None:
                    session.set_reward(reward)
                self._sessions.end(session, by, status)

        self._call(end)

    def stop(self) -> None:
        """Ends all sessions and the thread."""
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
        """Runs `action` in the server's thread and returns its result."""
        if self._loop is None or not self._thread.is_alive():
            raise RuntimeError("the endpoint's server is not running")
        result: Future[T] = Future()

        def act() -> None:
            try:
                result.set_result(action())
            except Exception as error:  # noqa: BLE001 - it is raised again in the caller's thread
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
            "and a free port, or 0 to take any"
        ) from error
