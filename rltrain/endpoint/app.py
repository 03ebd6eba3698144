"""The routes of the endpoint, and what becomes of requests that are refused."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

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
    context = {"max_model_len": service.limits.max_context_tokens}
    model = {"id": service.model, "object": "model", "created": 0, "owned_by": "rltrain", **context}
    return JSONResponse({"object": "list", "data": [model]})


async def _refuse(request: Request, refused: Refused) -> Response:
    error_of = anthropic_error if "/v1/messages" in request.url.path else openai_error
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
