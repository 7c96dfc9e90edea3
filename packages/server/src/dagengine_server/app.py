"""`create_app`: the HTTP application around one engine. Owns no process: no signals, no sockets, no files."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from dagengine import DagError
from dagengine.async_engine import EngineThread
from dagengine_core_graph.query import FindFragments

from .auth import Authentication
from .errors import HTTP_CODES, error_response
from .limits import BodyLimit, Gate
from .openapi import describe
from .routes import graphs, openai, ops, queries, states
from .service import Service
from .settings import ServerSettings


def create_app(
    engine: EngineThread, settings: ServerSettings | None = None, *, retriever: FindFragments | None = None
) -> FastAPI:
    """The application. It does not close the engine.

    Args:
        engine: running; it may serve other callers as well.
        retriever: finds the fragments of span queries' retrievals, on several threads; None refuses retrievals.

    Raises:
        DagError: `engine_dead`.
    """
    settings = settings or ServerSettings()
    service = Service(engine, settings, retriever)
    app = FastAPI(
        title="dagengine",
        version=version("dagengine-server"),
        description="OpenAI's API, plus requests that read each other's KV state as a graph.",
        redoc_url=None,
    )
    app.state.service = service
    # They are tried in this order, which is a part of a query's short time to its first token.
    for module in (queries, openai, states, graphs, ops):
        app.include_router(module.router)
    describe(app)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    app.add_middleware(Authentication, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["Authorization", "Content-Type", "X-Client-Request-Id"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Gate, service=service)
    _handle_errors(app, settings)
    return app


def _handle_errors(app: FastAPI, settings: ServerSettings) -> None:
    def refuse(error: DagError) -> Response:
        return error_response(error, retry_after_s=settings.retry_after_s)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, DagError)
        return refuse(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        code = HTTP_CODES.get(error.status_code, "invalid_request")
        answer = refuse(DagError(code, f"{request.method} {request.url.path[:200]}: {error.detail}"))
        answer.headers.update(dict(error.headers or {}))
        return answer

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = error.errors()[0]
        return refuse(DagError("invalid_request", str(found["msg"]), str(found["loc"][-1])))

    async def left(request: Request, error: Exception) -> Response:
        return refuse(DagError("cancelled", "the client has left"))

    app.add_exception_handler(DagError, refused)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, left)
