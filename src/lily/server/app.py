"""The ASGI application."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import lily
from lily.model import Model
from lily.server.chat_completions import chat_completions
from lily.server.completions import completions
from lily.server.errors import ApiError, api_error
from lily.server.exchange import Server, json_response
from lily.server.messages_api import count_tokens, messages
from lily.server.metrics import CONTENT_TYPE
from lily.server.pages import page
from lily.server.responses import responses
from lily.server.security import Gate
from lily.server.settings import Settings
from lily.server.tokenize import tokenize

_log = logging.getLogger("lily.server")


def create_app(model: Model, settings: Settings) -> Starlette:
    """The application around a loaded model; `app.state.server` is what its endpoints share."""
    routes = [
        Route("/v1/chat/completions", chat_completions, methods=["POST"]),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/responses", responses, methods=["POST"]),
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/tokenize", tokenize, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", one_model, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    if settings.page:
        routes += [Route("/", page, methods=["GET"]), Route("/page/{name}", page, methods=["GET"])]
    middleware = [Middleware(_Counting)]
    if settings.cors_origins:
        # Outside the gate, so that its refusals can be read by the page that caused them.
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"])
        )
    middleware.append(Middleware(Gate, settings=settings))
    app = Starlette(
        routes=routes, middleware=middleware, lifespan=_lifespan,
        exception_handlers={ApiError: _failed, HTTPException: _failed, Exception: _failed},
    )  # fmt: skip
    app.state.server = Server(model, settings)
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    yield
    app.state.server.scheduler.close()


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        what = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
        error = ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=dict(error.headers or {}))
    found = api_error(error)
    return json_response(found.body(request.url.path), found.status, found.headers)


async def models(request: Request) -> Response:
    """GET /v1/models: every name that the loaded model answers to."""
    server: Server = request.app.state.server
    return json_response({"object": "list", "data": [_model(server, name) for name in server.names.listed]})


async def one_model(request: Request) -> Response:
    """GET /v1/models/NAME."""
    server: Server = request.app.state.server
    return json_response(_model(server, server.names.check(request.path_params["name"])))


def _model(server: Server, name: str) -> dict[str, Any]:
    model = server.model
    defaults = model.defaults if server.settings.sampling is None else server.settings.sampling.over(model.defaults)
    return {
        "id": name, "object": "model", "created": server.created, "owned_by": "lily", "type": "model", "display_name": name,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(server.created)),
        "context_length": model.max_context, "max_model_len": model.max_context, "default_max_tokens": None,
        "sampling": {key: value for key, value in defaults.to_dict().items() if value is not None},
    }  # fmt: skip


async def health(request: Request) -> Response:
    """GET /health: 200, or 503 while the server shuts down."""
    server: Server = request.app.state.server
    scheduler = server.scheduler
    state = {
        "status": "shutting down" if scheduler.draining else "ok", "model": server.names.own, "version": lily.__version__,
        "active_requests": scheduler.active, "queued_requests": scheduler.queued,
    }  # fmt: skip
    return json_response(state, 503 if scheduler.draining else 200)


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    return Response(request.app.state.server.metrics.page(), media_type=CONTENT_TYPE)


class _Counting:
    """ASGI middleware: each answer by endpoint and status."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                server: Server = scope["app"].state.server
                server.metrics.requests.labels(route.path if route is not None else "other", str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counted)
