"""The web application: routes, their description, errors in one form. What a route does is in `service`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from slipstream import __version__
from slipstream.api import Session
from slipstream.core.command_options import ServeOptions
from slipstream.serve.errors import ApiError
from slipstream.serve.fields import ChatFields, TextFields
from slipstream.serve.service import Service, error_response

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    400: "a field cannot be honoured; `param` names it",
    401: "the API key is missing or wrong",
    404: "there is no such model",
    408: "the body did not come in time",
    413: "the body is too long",
    415: "the body is not application/json",
    429: "the queue is full",
    500: "the engine failed",
    503: "the server is stopping",
    504: "the request took too long",
}


def create_app(session: Session, options: ServeOptions = ServeOptions()) -> FastAPI:
    """The application; its `state.service` holds what it works with.

    Args:
        session: target and drafter; nobody else may decode with them meanwhile.
        options: of the server.

    Raises:
        InputError: buffers for the rows do not fit into memory.
    """
    service = Service(session, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.close()

    # Pages of API documentation would load scripts from elsewhere.
    app = FastAPI(title="Slipstream", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            expose_headers=["Server-Timing", "X-Request-Id"],
        )
    _add_routes(app, service)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ApiError, _api_error)
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    posts: tuple[tuple[str, Callable[..., Any], type], ...] = (
        ("/v1/chat/completions", service.chat, ChatFields),
        ("/v1/completions", service.text, TextFields),
    )
    responses: dict[int | str, dict[str, Any]] = {
        status: {"description": text, "content": {"application/json": {"schema": _error_schema()}}}
        for status, text in _ERRORS.items()
    }
    for path, route, kind in posts:
        schema = {"$ref": _REFERENCE.format(model=kind.__name__)}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        app.add_api_route(
            *(path, route),
            methods=["POST"],
            response_class=JSONResponse,
            response_model=None,
            responses=responses,
            openapi_extra={"requestBody": body},
        )
    gets = (
        ("/v1/models", service.models),
        ("/v1/models/{model:path}", service.model),
        ("/health", service.health),
        ("/version", service.version),
        ("/metrics", service.numbers),
    )
    for path, route in gets:
        app.add_api_route(path, route, methods=["GET"], response_model=None, responses=_few(responses))
    app.add_api_route("/", _page, methods=["GET"], include_in_schema=False, response_model=None)


def _few(responses: dict[int | str, dict[str, Any]]) -> dict[int | str, dict[str, Any]]:
    return {status: responses[status] for status in (401, 404, 503)}


async def _page() -> Response:
    """The page for people."""
    text = (files("slipstream") / "serve" / "page.html").read_text(encoding="utf-8")
    # Nothing from elsewhere is loaded, and no other page may hold this one in a frame.
    policy = "default-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy})


def _error_schema() -> dict[str, Any]:
    error = {
        "type": "object",
        "required": ["message", "type", "param", "code"],
        "properties": {
            "message": {"type": "string"},
            "type": {"type": "string"},
            "param": {"type": ["string", "null"]},
            "code": {"type": "integer"},
        },
    }
    return {"type": "object", "required": ["error"], "properties": {"error": error}}


def _description(app: FastAPI) -> dict[str, Any]:
    """OpenAPI, with the fields of the requests as they are read."""
    if app.openapi_schema is None:
        document = FastAPI.openapi(app)
        kinds = [(ChatFields, "validation"), (TextFields, "validation")]
        _, schemas = models_json_schema(kinds, ref_template=_REFERENCE)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        app.openapi_schema = document
    return app.openapi_schema


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = error_response(ApiError(error.status_code, str(error.detail)))
    response.headers.update(error.headers or {})
    return response


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)
