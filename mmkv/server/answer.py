"""A response that ends its work when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from mmkv.engine.errors import STOPS
from mmkv.server.errors import api_error
from mmkv.server.reply_json import rendered

log = logging.getLogger("mmkv.server")
_STREAM = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Answer(Response):
    """Runs a request's work beside a task that waits for the client's end.

    Args:
        work: its JSON, or an iterator of a stream's events; cancelled when the client goes.
        keep_alive: seconds without an event after which a stream sends a comment.
    """

    def __init__(
        self,
        work: Callable[[], Awaitable[dict[str, Any]]] | Callable[[], AsyncIterator[Any]],
        stream: bool,
        keep_alive: float,
    ) -> None:
        self._work, self._stream, self._keep_alive = work, stream, keep_alive
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""

        async def sending(message: Message) -> None:
            try:
                await send(message)
            except OSError as error:
                raise _GoneError from error

        working = asyncio.ensure_future(self._answer(scope, receive, sending))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                return
            with contextlib.suppress(_GoneError):
                await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._stream:
            await self._send_stream(scope, receive, send)
            return
        try:
            made = rendered(await self._work())  # type: ignore[misc]
            response = Response(made, media_type="application/json")
        except (asyncio.CancelledError, *STOPS):
            raise
        except BaseException as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events; an error before the first one is an HTTP status, later an event."""
        events: AsyncIterator[Any] = self._work()  # type: ignore[assignment]
        lines = _Lines(send)
        try:
            async with lines.commented(self._keep_alive), contextlib.aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    await lines.write(event_line(event))
        except (asyncio.CancelledError, _GoneError, *STOPS):
            raise
        except BaseException as error:
            if not lines.started:
                await error_response(error)(scope, receive, send)
                return
            await lines.write(event_line(api_error(error).body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _GoneError(Exception):
    """The client went while the answer was written."""


class _Lines:
    """Writes a stream of events over ASGI; two tasks may write.

    Attributes:
        started: whether the status and the headers are sent.
    """

    def __init__(self, send: Send) -> None:
        self._send, self._turn = send, asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self._latest = self._clock()
        self.started = False

    async def write(self, line: bytes) -> None:
        """Send a line, after the status and the headers if it is the first."""
        async with self._turn:
            self._latest = self._clock()
            if not self.started:
                await self._send(_start())
                self.started = True
            await self._send({"type": "http.response.body", "body": line, "more_body": True})

    @contextlib.asynccontextmanager
    async def commented(self, every: float) -> AsyncIterator[None]:
        """Send a comment whenever nothing was written for ``every`` seconds.

        One task for the whole stream: one for each event took a tenth of the server's time.
        """
        commenting = asyncio.ensure_future(self._comment(every))
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)

    async def _comment(self, every: float) -> None:
        while True:
            left = self._latest + every - self._clock()
            if left > 0:
                await asyncio.sleep(left)
            else:
                await self.write(b": keep-alive\n\n")


def error_response(error: BaseException) -> JSONResponse:
    """Return the answer to a request that failed."""
    shown = api_error(error)
    if shown.code == "no_descriptors":
        log.warning("as many files are open as may be; raise the limit (ulimit -n)")
    elif isinstance(error, OSError):  # of this server's files: nobody else says so
        log.error("a request failed", exc_info=error)
    return JSONResponse(shown.body(), shown.status, shown.headers)


def event_line(data: dict[str, Any] | str | bytes) -> bytes:
    """Return a server-sent event; one that has a type names it before the data, too.

    Bytes are one already.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, str):
        return f"data: {data}\n\n".encode()
    kind = f"event: {data['type']}\n" if "type" in data else ""
    return kind.encode() + b"data: " + rendered(data, ascii=True) + b"\n\n"


def _start() -> dict[str, Any]:
    headers = {"Content-Type": "text/event-stream; charset=utf-8"} | _STREAM
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": pairs}


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
