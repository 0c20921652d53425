"""Bound what connections take before anybody knows who asks: heads, idle ones, unread answers.

uvicorn has no bound for the head of a request, for the time before its first byte, nor for an
answer that nobody reads, and asyncio accepts connections until no file descriptor is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import uvicorn
import wsproto.events
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.wsproto_impl import WSProtocol

from mmkv.server.errors import RETRY_AFTER, ApiError
from mmkv.server.metrics import AccessLog, size_of
from mmkv.server.settings import MOST_CONNECTIONS, RequestBounds, most_connections
from mmkv.server.state import BodyRoom

if TYPE_CHECKING:
    from mmkv.server.state import ServerState

log = logging.getLogger("mmkv.server")
_AT_ONCE = 8  # connections that are accepted before the loop looks at them
_WAITING = 1024  # connections that the system holds meanwhile
_GRACE = 0.5  # seconds for a first request to come
_SENT = 64 * 2**10  # bytes of an answer that the system holds, or twice as many
_PIPELINED = 16  # requests of one connection that were sent before an answer
_LARGE = 2**20  # bytes of an answer, of which few are under way
_PROBE = 0.05  # seconds
_LAST_WORDS = 2  # seconds for the errors of replies that the end of the server cuts off
_PROBES = 100  # of them until a half-closed connection is written to again
# RFC 9110, 7.2, and RFC 3986: the name of a host, an address, with or without a port.
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(:\d*)?")
_ABSOLUTE = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?]*)")


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of connections.

    Attributes:
        most: connections; head_bytes: of a request's line and headers, and of its trailers.
        head_seconds: for a head, from the connection or its first byte on.
        stall_seconds: after which a client that reads nothing of its answer is dropped.
        message_bytes: of a message of a WebSocket, which has to arrive in message_seconds.
        answers: bytes of all answers that wait for their clients.
    """

    most: int = MOST_CONNECTIONS
    head_bytes: int = 32 * 2**10
    head_seconds: float = 20.0
    stall_seconds: float = 30.0
    message_bytes: int = 2**26
    message_seconds: float = 60.0
    answers: int = RequestBounds.answers


class Guard:
    """The connections of one server, within their limits; all methods run in the event loop."""

    def __init__(self, limits: ConnectionLimits, bodies: BodyRoom | None = None) -> None:
        self.limits, self.bodies = limits, bodies or BodyRoom(limits.message_bytes)
        self.open: set[Connection | SocketConnection] = set()
        self.refused: Callable[[Any, int, int], None] = lambda *_: None  # logs what no app sees
        self._sweeping = False
        self._every = min(1.0, limits.head_seconds / 4, limits.stall_seconds / 4)

    def opened(self, one: Connection | SocketConnection) -> bool:
        """Register a connection; whether it may stay. The longest idle one is closed for it."""
        self.open.add(one)
        if not self._sweeping:
            self._sweeping = True
            one.loop.call_later(self._every, self._sweep, one.loop)
        if len(self.open) <= self.limits.most:
            return True
        idle = [other for other in self.open if other is not one and other.idle]
        log.warning(
            "%d connections are open, as many as the file descriptors and --max-connections allow; "
            "idle ones make way",
            self.limits.most,
        )
        if not idle:
            return False
        # Those that never asked for anything, in time, go before clients that may ask again.
        now = one.loop.time()
        oldest = min(
            idle,
            key=lambda other: (bool(other.served or now - other.since < _GRACE), other.since),
        )
        self.open.discard(oldest)
        oldest.transport.abort()
        return True

    def answered(self) -> None:
        """Drop clients while too much waits for all; whose answer is complete for longest first."""
        sizes = {one: one.transport.get_write_buffer_size() for one in self.open}
        unsent = sum(sizes.values())
        large = [one for one, size in sizes.items() if size > _LARGE]
        for one in sorted(large, key=lambda one: one.since)[:-1]:
            if unsent <= self.limits.answers:
                return
            unsent -= sizes[one]
            one.transport.abort()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for one in list(self.open):
            one.look(now)
        self._sweeping = bool(self.open)
        if self._sweeping:
            loop.call_later(self._every, self._sweep, loop)


class Connection(HttpToolsProtocol):
    """A connection of uvicorn's within the limits of its guard.

    Attributes:
        since: when it began to wait for a head, or its answer was complete; served: answers.
    """

    guard: Guard  # of a subclass, see guarded()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it while all others are served."""
        super().connection_made(transport)
        # What the system holds is memory, too, and progress that nobody sees: with its usual
        # megabytes a slow reader looks like one that does not read.
        with contextlib.suppress(OSError, AttributeError):
            made = transport.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT)
        self.since = self._took = self.loop.time()
        self.served = self._head = self._aside = self._unsent = 0
        self._in_body = self._half_closed = self._upgraded = False
        if not self.guard.opened(self):
            self._refuse(503, "the server has no connection left; try again", "connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.guard.open.discard(self)
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is under way; half a head, or what follows an answer, is none."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def data_received(self, data: bytes) -> None:
        """Read on, within the bound on heads and on all that is no body."""
        most = self.guard.limits.head_bytes
        if self.idle and not self._head and not self._in_body:
            self.since = self.loop.time()
        while data and not self.transport.is_closing() and not self._upgraded:
            piece, data = data, b""
            if not self._in_body:
                left = most - self._head
                if left <= 0:
                    self._refuse_head(431, f"the head of the request has over {most:,} bytes")
                    return
                piece, data = piece[:left], piece[left:]
                self._head += len(piece)
                super().data_received(piece)
                continue
            self._aside += len(piece)  # on_body begins to count anew
            super().data_received(piece)
            if self._in_body and self._aside > most + len(piece):
                self._refuse_head(431, f"the trailers of the request have over {most:,} bytes")
                return

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to a WebSocket, which takes its place in the guard."""
        self._upgraded = True
        self.guard.open.discard(self)
        super().handle_websocket_upgrade()

    def on_headers_complete(self) -> None:
        """Begin with what follows a head."""
        self._in_body, self._head, self._aside = True, 0, 0
        if len(self.pipeline) >= _PIPELINED:
            raise ValueError("too many requests before an answer")  # a 400 of the parser
        if (wrong := self._wrong_head()) is not None:
            self._refuse(*wrong, "invalid_request")
            raise ValueError(wrong[1])
        super().on_headers_complete()

    def _wrong_head(self) -> tuple[int, str] | None:
        """Return the status and what is wrong with a head that RFC 9112 has a server refuse.

        Of what it says, the parser refuses the rest: two lengths, or one beside chunks, folded
        lines, spaces before colons, lines that end without CR LF.
        """
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return 505, f"HTTP/{version} is not spoken here; use HTTP/1.1"
        hosts = [value for name, value in self.headers if name == b"host"]
        if (target := _ABSOLUTE.match(self.url)) is not None:  # it counts, and Host does not
            hosts = [*hosts[1:], target[1]]
            self.headers[:] = [one for one in self.headers if one[0] != b"host"]
            self.headers.append((b"host", target[1]))
        if len(hosts) != 1 and (hosts or version == "1.1"):
            return 400, f"the request has {len(hosts)} Host headers; send one"
        if any(_HOST.fullmatch(one) is None for one in hosts) or b"#" in self.url:
            return 400, "the host or the target of the request cannot be; send a name and a path"
        return self._wrong_coding(version)

    def _wrong_coding(self, version: str) -> tuple[int, str] | None:
        coded = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        codings = [one.strip() for value in coded for one in value.split(b",")]
        if codings and (version == "1.0" or codings[-1] != b"chunked"):
            return (
                400,
                "nothing tells where the body ends; send Content-Length, or chunks last",
            )
        if codings and codings != [b"chunked"]:
            return 501, "of transfer codings only chunked is read; send the body in it, or plain"
        return None

    def send_400_response(self, msg: str) -> None:
        """Answer what the parser cannot read, unless it was answered already."""
        if not self.transport.is_closing():
            what = "this is no HTTP/1.1; check the head, the length and the chunks of the request"
            self._refuse(400, what, "invalid_request")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin to answer; HTTP/1.0 knows no chunks, so that its answers end with the connection.

        (Without this uvicorn chunks what has no Content-Length, whoever asks.)
        """
        if cycle.scope["http_version"] != "1.0":
            super()._start_asgi_task(cycle, app)
            return
        cycle.chunked_encoding = False

        async def unchunked(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                cycle.expected_content_length = len(message.get("body", b""))
                await send(message)

            await app(scope, receive, sending)

        super()._start_asgi_task(cycle, unchunked)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer, within the bound of both."""
        if self._in_body:
            self._head += len(name) + len(value)
            if self._head > self.guard.limits.head_bytes:
                raise ValueError("the trailers are too long")
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        self._aside = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next head."""
        self._in_body, self._head = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, unless none can come."""
        self.since = self.loop.time()
        self.served += 1
        if self.transport.get_write_buffer_size() > _LARGE:
            self.guard.answered()
        super().on_response_complete()
        if self._half_closed and not self.pipeline:
            self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer a whole request although nothing more can come; a client that left is dropped.

        The end of a half-closed connection looks like that of a closed one until something is
        written: an interim answer, which every client of HTTP/1.1 has to skip.
        """
        cycle = self.cycle
        if self.idle or cycle.more_body or not hasattr(select, "poll"):
            return None
        if self.scope["http_version"] != "1.1" and not cycle.response_started:
            return None  # HTTP/1.0 has no interim answers
        if not self._half_closed:
            self._half_closed = True
            self._probe(0)
        return True

    def _probe(self, count: int) -> None:
        if self.transport.is_closing() or self.idle:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        if poll.poll(0):  # nothing was asked for: an error, or both ends are closed
            self.transport.abort()
            return
        if count % _PROBES == 0 and not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(_PROBE, self._probe, count + 1)

    def look(self, now: float) -> None:
        """Drop a client that is late with a head, or does not read its answer."""
        limits, waiting = (
            self.guard.limits,
            self.idle and (not self.served or self._head or self._in_body),
        )
        if self.transport.is_closing() and not self.transport.get_write_buffer_size():
            return
        if waiting and now - self.since > limits.head_seconds:
            if self._head and not self._in_body:
                self._refuse_head(408, f"the head did not arrive within {limits.head_seconds:g} s")
            else:
                self.transport.abort()
            return
        unsent = self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._took = now
        self._unsent = unsent
        if now - self._took > limits.stall_seconds:
            self.transport.abort()

    def _refuse_head(self, status: int, message: str) -> None:
        self._refuse(status, f"{message}; send fewer or shorter headers", "head")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Answer without the application, and close."""
        body = json.dumps(ApiError(status, message, code).body()).encode()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            "Connection: close",
            *([f"Retry-After: {RETRY_AFTER}"] if status == 503 else []),
        ]
        self.guard.refused(self.client, status, len(body))
        self.transport.write("\r\n".join([*lines, "", ""]).encode() + body)
        self.transport.close()


class SocketConnection(WSProtocol):
    """A WebSocket of uvicorn's within the limits of its guard.

    Attributes:
        since: when it was opened, or its latest answer was complete; served: see Connection.
    """

    guard: Guard  # of a subclass, see WebServer
    served = 1
    _ends = False  # whether the server does

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over a connection whose head was read."""
        super().connection_made(transport)
        self.since = self._took = self._begun = self.loop.time()
        self._unsent = self._counted = self._waiting = 0
        if not self.guard.opened(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.guard.open.discard(self)
        self.guard.bodies.bytes -= self._counted
        self._counted = 0
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no message has arrived, or is arriving, that is not answered."""
        return not self._counted

    def handle_connect(self, event: wsproto.events.Request) -> None:
        """Pass on who asks."""
        super().handle_connect(event)
        self.scope["mmkv.connection"] = self  # type: ignore[typeddict-unknown-key]

    def handle_message(
        self, event: wsproto.events.TextMessage | wsproto.events.BytesMessage
    ) -> None:
        """Take a piece of a message, within the bounds on one and on all."""
        if not self.buffer.length:
            self._begun = self.loop.time()
        size = size_of(event.data)
        self._counted += size
        self.guard.bodies.bytes += size
        self._waiting += event.message_finished
        super().handle_message(event)
        if self.guard.bodies.full(self._counted, 0):
            self._end(1013, "messages of other clients take all the room; send it later")
        elif self._waiting > _PIPELINED:
            self._end(1008, "too many messages before an answer")

    def release(self, size: int) -> None:
        """Stop counting a message of ``size`` bytes: it is answered."""
        size = min(size, self._counted)
        self._counted -= size
        self.guard.bodies.bytes -= size
        self._waiting -= 1
        self.since = self.loop.time()
        if self._ends:
            self.shutdown()

    def shutdown(self) -> None:
        """Close, as the server ends: once what is asked for is answered."""
        self._ends = True
        if self.idle:
            super().shutdown()

    def handle_ping(self, event: wsproto.events.Ping) -> None:
        """Answer; who sends these and reads nothing is dropped."""
        if self.transport.get_write_buffer_size() > _LARGE:
            self.transport.abort()
        else:
            super().handle_ping(event)

    def look(self, now: float) -> None:
        """Drop a client that is late with a message, or does not read its answer."""
        limits, unsent = self.guard.limits, self.transport.get_write_buffer_size()
        if not unsent or unsent < self._unsent:
            self._took = now
        self._unsent = unsent
        if now - self._took > limits.stall_seconds:
            self.transport.abort()
        elif self.buffer.length and now - self._begun > limits.message_seconds:
            self._end(1008, f"the message did not arrive within {limits.message_seconds:g} s")

    def _end(self, code: int, reason: str) -> None:
        """Close, with a reason."""
        if self.close_sent or self.transport.is_closing():
            return
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        closing = wsproto.events.CloseConnection(code=code, reason=reason)
        self.transport.write(self.conn.send(closing))
        self.transport.close()


class OncePerMinute(logging.Filter):
    """Lets a warning without a traceback pass once a minute: clients can cause any number."""

    def __init__(self, seconds: float = 60.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._latest: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        if record.levelno > logging.WARNING or record.exc_info:
            return True
        now, key = time.monotonic(), str(record.msg)
        if now - self._latest.get(key, -self._seconds) < self._seconds:
            return False
        self._latest[key] = now
        return True


class WebServer(uvicorn.Server):
    """uvicorn with bounded connections.

    Args:
        app: the application; options: uvicorn's.
        ready: called with the port once it listens.
    """

    def __init__(
        self,
        state: ServerState,
        app: Any,
        host: str,
        port: int,
        ready: Callable[[int], None] = lambda _: None,
        **options: Any,
    ) -> None:
        settings, self._ready = state.settings, ready
        limits = ConnectionLimits(
            settings.connections or most_connections(),
            head_seconds=settings.head_seconds,
            stall_seconds=settings.stall_seconds,
            message_bytes=settings.body,
            message_seconds=settings.body_seconds,
            answers=settings.bounds.answers,
        )
        self.guard, self._state = Guard(limits, state.bodies), state
        if settings.access_log is not None:
            app = AccessLog(app, settings.access_log)
            self.guard.refused = app.refused
        guarded = type("GuardedConnection", (Connection,), {"guard": self.guard})
        sockets = type("GuardedSocket", (SocketConnection,), {"guard": self.guard})
        config = uvicorn.Config(
            app,
            host,
            port,
            http=guarded,
            ws=sockets,  # any other would leave the guard
            ws_max_size=settings.body,
            ws_per_message_deflate=False,  # a short message could unpack to any length
            # asyncio accepts as many in one go before any of them is counted.
            backlog=_AT_ONCE,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=round(settings.drain) + _LAST_WORDS,
            # uvicorn by itself believes whoever connects from this machine.
            proxy_headers=bool(settings.proxies),
            forwarded_allow_ips=list(settings.proxies),
            server_header=False,
            **options,
        )
        super().__init__(config)
        for name in ("uvicorn.error", "mmkv.server"):
            logger = logging.getLogger(name)
            if not any(isinstance(one, OncePerMinute) for one in logger.filters):
                logger.addFilter(OncePerMinute())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; more connections may wait than are accepted in one go."""
        asyncio.get_running_loop().set_exception_handler(_on_loop_error)
        await super().startup(sockets)
        for server in getattr(self, "servers", ()):
            for one in server.sockets:
                with socket.fromfd(one.fileno(), one.family, one.type) as same:
                    same.listen(_WAITING)
                    port = same.getsockname()[1]
        if self.started:
            self._ready(port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End; who still waits for a reply after ``--drain`` seconds is told so."""
        loop, drain = asyncio.get_running_loop(), self._state.settings.drain
        ending = loop.call_later(drain, lambda: self._state.engine_thread.end_requests())
        await super().shutdown(sockets)
        ending.cancel()


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say in one line, and seldom, that no connection can be accepted; pass on all else."""
    if "accept" not in context.get("message", ""):
        loop.default_exception_handler(context)
        return
    with contextlib.suppress(Exception):
        log.warning("no connection can be accepted: %s", context.get("exception"))
