"""The whole application in this process, for fuzz tests: what it may answer, and what it leaves."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from hypothesis import event

from mmkv import Engine
from mmkv.server.app import make_app
from mmkv.server.run import opened
from mmkv.server.settings import ServerSettings
from tests.fuzz.trial import Wrong, trial

MODEL = "small"
MADE = "$ID"  # stands in paths and bodies for the session or response that was made before


class Service:
    """An application, and a client of it that no network sees."""

    def __init__(self, state: Any) -> None:
        self._thread, self.app = state.engine_thread, make_app(state)
        self._runner, self._logged = asyncio.Runner(), _Errors()

    @contextmanager
    def _logs(self) -> Iterator[None]:
        log = logging.getLogger("mmkv.server")
        before = log.handlers, log.propagate
        log.handlers, log.propagate = [self._logged], False
        try:
            yield
        finally:
            log.handlers, log.propagate = before

    def run(self, talk: Callable[[httpx.AsyncClient], Awaitable[None]], pages: bool = True) -> None:
        """Have a client talk to the application.

        Raises:
            Wrong: that fails, or pages are held (unless these are not to be counted).
        """
        self._logged.errors.clear()
        with self._logs(), trial() as made:
            self._runner.run(self._talk(talk))
        for error in (made.refusal, *self._logged.errors):
            if error is not None:  # elsewhere a refusal; here the application let one out
                raise Wrong(f"{type(error).__name__}: {error}") from error
        if pages and (held := self._thread.post(self._held).result(60)):
            raise Wrong(held)

    async def _talk(self, talk: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        # A name that stands nowhere: nothing is looked up.
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await talk(client)

    def _held(self) -> str:
        core = self._thread.core
        scheduler, pool = core.scheduler, core.engine.cache.pool
        scheduler.turn()  # what was cancelled ends
        while scheduler.residents.copies:
            scheduler.residents.drop_oldest_copy()
        # Stored responses that were asked for, and not deleted, are nobody's leak.
        for session in [one for one in scheduler.sessions if one.resident]:
            scheduler.hibernate(session)
        held, committed = pool.num_pages - pool.free_pages, scheduler.ledger.committed
        core.engine.cache.check()
        return f"{held} pages are held, {committed} committed" if held or committed else ""


class _Errors(logging.Handler):
    """Keeps what the server logs as an error of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


@contextmanager
def service(model: Path, saved: Path, kv_limit: int) -> Iterator[Service]:
    """Serve a checkpoint, its idle memories in the folder ``saved``."""

    def load() -> Engine:
        return Engine.from_pretrained(model, budget=24, page_size=4, kv_limit=kv_limit)

    settings = ServerSettings(name=MODEL, max_tokens=2, session_folder=saved, body=2**17)
    with opened(load, settings) as state:
        yield Service(state)


async def made_before(client: httpx.AsyncClient, text: str) -> str:
    """Make the session or the response that a request speaks of, and return its name."""
    if MADE not in text:
        return ""
    if "sessions" in text:
        answer = await client.post("/v1/sessions", json={})
    else:
        given = {"model": MODEL, "input": "what?", "max_output_tokens": 1}
        answer = await client.post("/v1/responses", json=given)
    if answer.status_code != 200:
        raise Wrong(f"a whole request was answered with {answer.status_code}")
    made: str = answer.json()["id"]
    return made


async def cleaned(client: httpx.AsyncClient, name: str) -> None:
    """Close every session, and delete the response ``name``."""
    for one in (await client.get("/v1/sessions")).json()["data"]:
        if one["busy"]:  # a turn in the background, which goes on without its client
            await client.delete(f"/v1/sessions/{one['id']}/turn")
        await client.delete(f"/v1/sessions/{one['id']}")
    if name.startswith("resp_"):
        await client.delete(f"/v1/responses/{name}")


def scope(kind: str, path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """Return what an application is told of a connection of a kind, ``http`` or ``websocket``."""
    return {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "ws" if kind == "websocket" else "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"server"), *headers],
        "client": ("127.0.0.1", 1),
        "server": ("server", 80),
        "subprotocols": [],
        "state": {},
    }


def check_answer(answer: httpx.Response) -> None:
    """Raise Wrong for an answer that the API does not have."""
    status, kind = answer.status_code, answer.headers.get("content-type", "")
    event(f"{answer.request.method} {status}")
    if status >= 500 and status != 503:
        raise Wrong(f"the status is {status}: {answer.text[:200]}")
    if answer.request.method == "HEAD" or status in (204, 304) or kind.startswith("text/html"):
        return
    if kind.startswith("text/event-stream"):
        lines = [line for line in answer.content.decode().split("\n\n") if line]
        for line in lines:
            data = line.partition("data: ")[2]
            if not line.startswith(":") and data != "[DONE]":
                json.loads(data)
        ends = ("data: [DONE]", 'event: message_stop\ndata: {"type":"message_stop"}')
        if lines[-1] not in ends and '"error"' not in lines[-1]:
            raise Wrong(f"a stream ends with {lines[-1][:100]}")
    elif kind.startswith("application/json"):
        made = json.loads(answer.content.decode())
        if status >= 400 and not (
            made["error"]["message"] and "\n" not in made["error"]["message"]
        ):
            raise Wrong(f"an error without a line: {made}")
