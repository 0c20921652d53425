"""The web application: routes, keys, limits, errors in OpenAI's shape, the page at ``/docs``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from html import escape
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from mmkv import __version__
from mmkv.engine.errors import MmkvError
from mmkv.server.chat import add_chats
from mmkv.server.errors import ApiError, invalid, nearest
from mmkv.server.footprint import return_memory
from mmkv.server.guard import BodyRoute, CheckHost, CheckKey, LimitBody, RefuseWhenFull
from mmkv.server.media.limits import FORMATS
from mmkv.server.messages import add_messages
from mmkv.server.metrics import CONTENT_TYPE
from mmkv.server.page import HEADERS, page_router
from mmkv.server.reply import error_response, event_line
from mmkv.server.responses import ResponseTable, responses_router
from mmkv.server.schema import StrictModel
from mmkv.server.sessions import SessionTable, saved_router, sessions_router
from mmkv.server.state import ServerState
from mmkv.server.websocket import socket_route

_PAGE = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>mmkv: routes</title></head>
<body>
<h1>Routes</h1>
<p>Their fields are in <a href="/openapi.json">/openapi.json</a>.</p>
<table>
{rows}
</table>
</body>
</html>
"""
_ROW = "<tr><td>{}</td><td><code>{}</code></td><td>{}</td></tr>"


def _page(schema: dict[str, Any]) -> str:
    rows = [
        _ROW.format(method.upper(), escape(path), escape(route.get("summary", "")))
        for path, methods in schema["paths"].items()
        for method, route in methods.items()
    ]
    return _PAGE.format(rows="\n".join(rows))


def make_app(state: ServerState, hosts: frozenset[str] | None = None) -> FastAPI:
    """Return the application; the engine thread has to run.

    Args:
        hosts: the names that it answers to, by the Host header; None: all.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if state.settings.warm and state.facts.sees:
            await state.media.warm()
        returning = asyncio.ensure_future(return_memory(lambda: state.engine_thread.busy))
        yield
        returning.cancel()
        for turn in state.background:
            turn.cancel()
        await state.media.aclose()
        await asyncio.to_thread(state.engine_thread.stop)

    app = FastAPI(
        title="mmkv",
        version=__version__,
        description="Vision-language decoding with a bounded KV cache; OpenAI-compatible.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.server = state
    most, seconds = state.settings.body, state.settings.body_seconds
    app.add_middleware(LimitBody, most=most, seconds=seconds, room=state.bodies)
    app.add_middleware(RefuseWhenFull, state=state)
    keys, open_metrics = state.settings.api_keys, state.settings.open_metrics
    app.add_middleware(CheckKey, keys=keys, open_metrics=open_metrics)  # before the body is counted
    if state.settings.cors:  # before the key: a browser asks without one whether it may
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.settings.cors,
            allow_methods=["DELETE", "GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Mmkv-Ignored", "X-Mmkv-Replica"],
        )
    app.add_middleware(CheckHost, hosts=hosts, origins=state.settings.cors)
    app.add_middleware(HeadAsGet)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(MmkvError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_error)
    # The schemes stand here for the OpenAPI page; CheckKey looks at the key.
    schemes = HTTPBearer(auto_error=False), APIKeyHeader(name="x-api-key", auto_error=False)
    shown = [Depends(one) for one in schemes]
    keyed = APIRouter(prefix="/v1", dependencies=shown, route_class=BodyRoute)
    add_chats(keyed, state)
    _add_keyed(keyed, state)
    responses = ResponseTable(state)
    add_messages(keyed, state, responses)
    sessions = SessionTable(state)
    keyed.include_router(sessions_router(state, sessions))
    keyed.include_router(saved_router(state))
    keyed.include_router(responses_router(state, responses))
    app.include_router(keyed)
    app.router.routes.append(socket_route(state, sessions))
    _add_open(app, state)
    if state.settings.page:
        app.include_router(page_router(keyed=bool(state.settings.api_keys)))
    return app


class LoadRequest(StrictModel):
    """A model that has to be there before a chat begins: the one that is served is."""

    model: str


def _add_keyed(router: APIRouter, state: ServerState) -> None:
    settings = state.settings

    @router.get("/models", summary="The model that is served")
    async def models() -> dict[str, Any]:
        ends = dict.fromkeys(("first_id", "last_id"), settings.name)
        return {"object": "list", "data": [_model(state)], "has_more": False, **ends}

    @router.get("/models/{name:path}", summary="One model")
    async def model(name: str) -> dict[str, Any]:
        if name != settings.name:
            raise ApiError(404, f"the model {name[:100]!r} is not served here", "model_not_found")
        return _model(state)


def _add_open(app: FastAPI, state: ServerState) -> None:
    @app.post("/load_model", include_in_schema=False)  # what transformers chat asks for first
    async def load(asked: LoadRequest) -> Response:
        name = state.settings.name
        found: dict[str, Any] = {"status": "ready", "model": asked.model, "cached": True}
        if asked.model != name:
            message = f"the model {asked.model[:100]!r} is not served here; ask for {name!r}"
            found = {"status": "error", "model": asked.model, "message": message}
        return Response(event_line(found), media_type="text/event-stream")

    @app.get("/health", summary="Whether the engine runs")
    async def health() -> Response:
        alive = state.engine_thread.is_alive() and not state.engine_thread.failed
        shown: dict[str, Any] = {"status": "ok" if alive else "the engine has stopped"}
        if (trouble := state.engine_thread.core.folder.trouble) is not None:
            shown["warnings"] = [trouble]
        return JSONResponse(shown, 200 if alive else 503)

    @app.get("/metrics", summary="Numbers in Prometheus' format")
    async def metrics() -> Response:
        thread = state.engine_thread
        if not thread.failed:
            await thread.call(lambda: thread.core.report())
        return Response(state.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(_page(app.openapi()), headers=HEADERS, media_type="text/html")


def _model(state: ServerState) -> dict[str, Any]:
    """Return the model as OpenAI's API shows one and as Anthropic's does, in one object."""
    facts = state.facts
    own = {
        "policy": facts.policy,
        "budget": facts.bound,
        "shared_budget": facts.shared,
        "lookahead": facts.lookahead,
        "images": facts.sees,
        "picture_formats": FORMATS,
        "videos": facts.watches,
        "trained_context": facts.context,
        "saved_sessions": state.settings.session_folder is not None,
        "note": facts.note,
    }
    most = facts.most_tokens(facts.budget)
    return {
        "id": state.settings.name,
        "object": "model",
        "created": state.started,
        "owned_by": "mmkv",
        "type": "model",
        "display_name": state.settings.name,
        "created_at": datetime.fromtimestamp(state.started, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": most,
        "max_model_len": most,
        "mmkv": own,
    }


class HeadAsGet:
    """Handles HEAD as GET; uvicorn leaves the body out, and a stream ends at once."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", "mmkv.head": True}
        await self._app(scope, receive, send)


async def _on_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = nearest(error.errors())
    if first["type"] == "json_invalid":
        what = f"the body is no valid JSON: {first['ctx']['error']}"
        what += f" at character {first['loc'][-1]}; send a JSON object"
        return error_response(ApiError(400, what, "invalid_request"))
    if first["type"] == "missing" and len(first["loc"]) == 1:
        what = "the request has no body; send a JSON object"
        return error_response(ApiError(400, what, "invalid_request"))
    return error_response(invalid([{**first, "loc": first["loc"][1:]}]))


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = error_response(ApiError(error.status_code, str(error.detail)))
    answer.headers.update(error.headers or {})
    if error.status_code == 405:
        answer.headers["Allow"] = ", ".join(_methods(request))
    return answer


def _methods(request: Request) -> list[str]:
    """Return the methods of a path, each of which is a route of its own."""
    return [
        method
        for method in ("DELETE", "GET", "PATCH", "POST", "PUT")
        if any(
            route.matches({**request.scope, "method": method})[0] == Match.FULL
            for route in request.app.routes
        )
    ]
