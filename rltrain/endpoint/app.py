"""The routes of the endpoint, and what becomes of requests that are refused."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rltrain.endpoint import session_routes
from rltrain.endpoint.anthropic_messages import anthropic_error, count_tokens, messages
from rltrain.endpoint.control import model_info, update_weights_from_disk
from rltrain.endpoint.http_request import ClientGone, session_of
from rltrain.endpoint.openai_chat import chat_completions
from rltrain.endpoint.openai_completions import completions
from rltrain.endpoint.openai_fields import openai_error
from rltrain.endpoint.openai_responses import responses
from rltrain.endpoint.refused import Refused
from rltrain.endpoint.service import Service
from rltrain.endpoint.sglang_generate import generate

logger = logging.getLogger(__name__)

Handler = Callable[[Service, Request], Awaitable[Response]]
CLIENT_CLOSED_REQUEST = 499
"""Nobody reads it; what proxies write into their logs."""
RETRY_AFTER_S = 1
OF_ANTHROPIC = "anthropic-version"
"""The header that Anthropic's clients send."""

OF_SESSIONS: tuple[tuple[str, Handler], ...] = (
    ("/v1/chat/completions", chat_completions),
    ("/v1/completions", completions),
    ("/v1/responses", responses),
    ("/v1/messages", messages),
    ("/v1/messages/count_tokens", count_tokens),
    ("/generate", generate),
)
"""POST, of the session whose token a request brings; under /sessions/{session}, of that."""


def build_app(service: Service) -> Starlette:
    """Of the one event loop that it is served in."""

    def route(path: str, handler: Handler, method: str = "POST") -> Route:
        return Route(path, partial(handler, service), methods=[method])

    routes = [
        route("/healthz", health, "GET"),
        route("/health", health, "GET"),
        route("/sessions", session_routes.open_session),
        route("/sessions/{session}", session_routes.show_session, "GET"),
        route("/sessions/{session}", session_routes.delete_session, "DELETE"),
        route("/sessions/{session}/samples", session_routes.show_session),
        route("/sessions/{session}/reward", session_routes.set_reward),
        route("/sessions/{session}/finish", session_routes.finish_session),
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
    handlers = {Refused: _refuse, HTTPException: _refuse_http, ClientGone: _nobody, Exception: _fail}
    return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]


async def health(service: Service, request: Request) -> Response:
    return JSONResponse({"status": "ok", "sessions": len(service.sessions)})


async def models(service: Service, request: Request) -> Response:
    session_of(service, request)
    data = [_model(service, request)]
    if OF_ANTHROPIC in request.headers:
        return JSONResponse({"data": data, "has_more": False, "first_id": service.model, "last_id": service.model})
    return JSONResponse({"object": "list", "data": data})


async def one_model(service: Service, request: Request) -> Response:
    session_of(service, request)
    name = request.path_params["model"]
    if name != service.model:
        raise Refused(HTTPStatus.NOT_FOUND, f"model: got {name!r}; expected {service.model!r}", param="model")
    return JSONResponse(_model(service, request))


def _model(service: Service, request: Request) -> dict[str, Any]:
    """Describes the model as Anthropic's API does where its version header asks, else as OpenAI's."""
    if OF_ANTHROPIC in request.headers:
        of_anthropic = {"type": "model", "display_name": service.model, "created_at": "1970-01-01T00:00:00Z"}
        return {"id": service.model, **of_anthropic, "max_input_tokens": service.limits.max_context_tokens}
    context = {"max_model_len": service.limits.max_context_tokens}
    return {"id": service.model, "object": "model", "created": 0, "owned_by": "rltrain", **context}


async def _refuse(request: Request, refused: Refused) -> Response:
    is_anthropics = "/v1/messages" in request.url.path or OF_ANTHROPIC in request.headers
    error_of = anthropic_error if is_anthropics else openai_error
    retry = {"Retry-After": str(RETRY_AFTER_S)} if refused.status == HTTPStatus.TOO_MANY_REQUESTS else {}
    return JSONResponse(error_of(refused), refused.status, headers=retry)


async def _refuse_http(request: Request, error: HTTPException) -> Response:
    """Of a path that there is not, or a method that it has not."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refuse(request, Refused(HTTPStatus(error.status_code), message))


async def _nobody(request: Request, error: ClientGone) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _fail(request: Request, error: Exception) -> Response:
    return await _refuse(request, Refused(HTTPStatus.INTERNAL_SERVER_ERROR, "an error of the server; see its log"))
