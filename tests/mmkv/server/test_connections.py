"""What a connection may take before anybody knows who asks; slow bodies, and a full queue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest
from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from mmkv import Engine
from mmkv.engine.errors import InputError
from mmkv.server import connections, guard
from mmkv.server.connections import OncePerMinute, WebServer
from mmkv.server.guard import (
    CheckHost,
    LimitBody,
    allowed_hosts,
    release_body,
)
from mmkv.server.metrics import Metrics
from mmkv.server.schema import ChatRequest
from mmkv.server.settings import (
    FEW,
    RequestBounds,
    ServerSettings,
    host_names,
    most_connections,
)
from mmkv.server.state import BodyRoom, digest_of_key
from tests.support.chat_models import save_qwen3_vl
from tests.support.servers import Server, serving, stopped, until

MOST = 4
GET = b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n"


class App:
    """Answers at once; on /wait when it is told to, on /flood without an end."""

    def __init__(self) -> None:
        self.waiting = self.left = self.done = 0
        self.told, self.requests = asyncio.Event(), 0
        self.loop: asyncio.AbstractEventLoop | None = None

    def tell(self, end: bool = True) -> None:
        """Let requests for /wait end, or wait again; from another thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.told.set if end else self.told.clear)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        self.requests += 1
        self.headers = dict(scope["headers"])
        self.loop = asyncio.get_running_loop()
        path, start = scope["path"], {"type": "http.response.start", "status": 200}
        if path == "/early":  # without a look at the body
            await send(start | {"headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})
            return
        while (await receive()).get("more_body", False):
            pass
        gone = asyncio.ensure_future(receive())
        if path == "/wait":
            self.waiting += 1
            told = asyncio.ensure_future(self.told.wait())
            await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
        await send(start | {"headers": []})
        piece = {"type": "http.response.body", "body": b"x" * 2**16, "more_body": True}
        while path == "/flood" and not gone.done():
            await send(piece)
        self.left += gone.done()
        gone.cancel()
        whole = b"ok" * (2**22 if path == "/large" else 1)
        await send({"type": "http.response.body", "body": whole})
        self.done += path == "/large"


class Running:
    """A server with an app, and connections to it."""

    def __init__(self, web: WebServer, app: App) -> None:
        self.web, self.app = web, app
        self.address = web.servers[0].sockets[0].getsockname()

    def connect(self, sent: bytes = b"") -> socket.socket:
        made = socket.create_connection(self.address, timeout=20)
        made.sendall(sent)
        return made

    def ask(self, sent: bytes = GET % b"") -> bytes:
        with self.connect(sent) as made:
            return made.recv(4096)


def rest(made: socket.socket) -> bytes:
    """Return what comes until the server closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while piece := made.recv(2**16):
            found += piece
    return found


def rest_of(made: socket.socket, size: int) -> bytes:
    """Return what comes, at least ``size`` bytes unless the server closes."""
    found = bytearray()
    with contextlib.suppress(ConnectionError):
        while len(found) < size and (piece := made.recv(2**16)):
            found += piece
    return bytes(found)


@contextlib.contextmanager
def running(keys: tuple[str, ...] = (), **settings: Any) -> Iterator[Running]:
    given = {"connections": MOST, "head_seconds": 60, "stall_seconds": 60} | settings
    made = ServerSettings(name="m", **given)
    state: Any = SimpleNamespace(settings=made, bodies=BodyRoom(made.body))
    app = App()
    asked: Any = guard.CheckKey(app, keys) if keys else app
    web = WebServer(state, asked, "127.0.0.1", 0, lifespan="off", log_level="error")
    thread = threading.Thread(target=web.run)
    thread.start()
    try:
        until(lambda: web.started)
        yield Running(web, app)
    finally:
        web.should_exit = web.force_exit = True
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as made:
        yield made


def answer(made: socket.socket) -> bytes:
    """Return an answer of the app, after which the connection stays."""
    found = b""
    while not found.endswith((b"ok", b"ok\r\n0\r\n\r\n")):
        piece = made.recv(4096)
        assert piece, found
        found += piece
    return found


def refused(made: socket.socket) -> tuple[int, str]:
    """Return the status and code of an answer after which the connection is closed."""
    head, _, body = rest(made).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("size", [1, 1000, 2**16])
def test_a_head_has_a_bound(server: Running, size: int) -> None:
    made = server.connect(b"GET / HTTP/1.1\r\nHost: x\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 2**22:
            made.sendall(b"X-%d: " % sent + b"a" * size + b"\r\n")
            sent += size
    # Much is in the buffers of the loopback; 4 MiB are not.
    assert sent < 2**22 or size == 1
    with contextlib.suppress(ConnectionError):
        found = made.recv(4096)
        assert not found or found.startswith(b"HTTP/1.1 431 ")
    assert server.ask().startswith(b"HTTP/1.1 200")


def test_the_bound_is_exact(server: Running) -> None:
    base = len(GET % b"") + len(b"X: \r\n")
    for more, status in ((0, b"200"), (1, b"431")):
        head = (GET % b"")[:-2] + b"X: " + b"a" * (2**15 - base + more) + b"\r\n\r\n"
        assert server.ask(head).split()[1] == status
    with server.connect(head) as made:
        assert refused(made) == (431, "head")


_CODED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: %b\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
_SIZED = b"POST / HTTP/1.1\r\nHost: x\r\n%b\r\n\r\n{}"
# Heads, and what RFC 9112 has a server say to them.
HEADS: list[tuple[bytes, int]] = [
    (b"GET / HTTP/1.1\r\n\r\n", 400),  # 3.2
    (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
    (b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: a/b@c\r\n\r\n", 400),
    (b"GET http://a@b/ HTTP/1.1\r\nHost: b\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", 200),
    (b"GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n", 200),
    (b"GET / HTTP/1.0\r\n\r\n", 200),
    (b"GET http://x/ HTTP/1.1\r\nHost: evil\r\n\r\n", 200),  # 3.2.2: the target counts
    (b"GET /#a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 505),  # 2.5
    (b"GET /\r\n\r\n", 505),
    (_CODED % b"chunked", 200),
    (_CODED % b"CHUNKED", 200),
    (_CODED % b"gzip, chunked", 501),  # 6.1
    (_CODED % b"gzip\r\nTransfer-Encoding: chunked", 501),
    (_CODED % b"gzip", 400),  # 6.3
    (_CODED % b"identity", 400),
    (_CODED % b"xchunked", 400),
    (_CODED % b"chunked, identity", 400),
    (_CODED % b"chunked, chunked", 400),
    (_CODED % b"chunked\r\nContent-Length: 2", 400),
    (_CODED.replace(b"1.1", b"1.0") % b"chunked", 400),
    (_CODED.replace(b"\r\n2\r", b"\r\n2;a=b\r") % b"chunked", 200),  # 7.1.1
    (_CODED.replace(b"\r\n2\r", b"\r\n2 \r") % b"chunked", 400),
    (_CODED.replace(b"\r\n2\r", b"\r\n+2\r") % b"chunked", 400),
    (_CODED.replace(b"2\r\n{}\r\n0\r\n", b"2\n{}\n0\n") % b"chunked", 400),
    (_SIZED % b"Content-Length: 2", 200),
    (_SIZED % b"Content-Length: 2\r\nContent-Length: 2", 400),
    (_SIZED % b"Content-Length: 2, 2", 400),
    (_SIZED % b"Content-Length: +2", 400),
    (_SIZED % b"Content-Length : 2", 400),  # 5.1
    (_SIZED % b"X: a\r\n b", 400),  # 5.2
    (_SIZED % b"X: a\nContent-Length: 2", 400),  # 2.2
    (_SIZED % b"X: a\rb", 400),
]


@pytest.mark.parametrize(("head", "status"), HEADS, ids=lambda one: str(one)[:90])
def test_heads_that_could_be_read_in_two_ways_are_refused(
    server: Running, head: bytes, status: int
) -> None:
    with server.connect(head) as made:
        found = made.recv(4096)
        assert int(found.split()[1]) == status
        if status == 200:
            assert server.app.headers.get(b"host") != b"evil"
        else:
            assert b"Connection: close" in found and json.loads(found.split(b"\r\n\r\n")[1])


@pytest.mark.parametrize("path", [b"", b"early", b"large"])
def test_answers_in_http_1_0_are_not_in_chunks(server: Running, path: bytes) -> None:
    """Their end is that of the connection, also where a client would like to keep it."""
    head = b"GET /%b HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" % path
    with server.connect(head) as made:
        start, _, body = rest(made).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in start.lower() and b"connection: close" in start.lower()
    assert body == b"ok" * (2**22 if path == b"large" else 1)


@pytest.mark.parametrize("end", [b"", b"\r\nX: "])
def test_trailers_have_a_bound(server: Running, end: bytes) -> None:
    head = b"POST /wait HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: "
    with server.connect(head) as made, contextlib.suppress(ConnectionError):
        for _ in range(200):
            made.sendall(b"a" * 1000 + end)
        assert rest(made).split()[1] in (b"400", b"431")
    until(lambda: not server.web.guard.open)


def test_requests_before_an_answer_have_a_bound(server: Running) -> None:
    before = server.app.requests
    with server.connect(GET % b"wait" * 100) as made:
        assert b"HTTP/1.1 400" in rest(made)
    assert server.app.requests - before <= 1


def test_a_long_body_is_no_head(server: Running) -> None:
    body = b"a" * 2**20
    head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with server.connect(head + body) as made:
        answer(made)
        made.sendall(GET % b"")
        assert answer(made).startswith(b"HTTP/1.1 200")
    chunks = b"1\r\na\r\n" * 2**14 + b"0\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert server.ask(head + chunks).startswith(b"HTTP/1.1 200")


def test_connections_that_say_nothing_make_way(server: Running) -> None:
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect(b"GET /" * (at % 2))) for at in range(40)]
        assert server.ask().startswith(b"HTTP/1.1 200")
        assert len(server.web.guard.open) <= MOST
        assert rest(silent[0]) == b""


def test_clients_that_ask_again_stay_before_those_that_never_asked(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_GRACE", 0)
    with server.connect(GET % b"") as good, contextlib.ExitStack() as stack:
        answer(good)
        for _ in range(20):
            stack.enter_context(server.connect())
        until(lambda: len(server.web.guard.open) == MOST)
        good.sendall(GET % b"")
        assert answer(good).startswith(b"HTTP/1.1 200")


def test_one_more_than_can_be_served_is_told(server: Running) -> None:
    before = server.app.waiting
    with contextlib.ExitStack() as stack:
        for _ in range(MOST):
            stack.enter_context(server.connect(GET % b"wait"))
        until(lambda: server.app.waiting == before + MOST)
        with server.connect() as made:
            assert refused(made) == (503, "connections")
        assert len(server.web.guard.open) == MOST
    until(lambda: not server.web.guard.open)


def test_a_request_whose_client_closes_its_side_is_answered(server: Running) -> None:
    with server.connect(GET % b"wait") as made:
        made.shutdown(socket.SHUT_WR)
        assert made.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        time.sleep(0.2)  # a few looks at whether it is there
        server.app.tell()
        found = rest(made)
        server.app.tell(False)
        assert found.startswith(b"HTTP/1.1 200") and found.endswith(b"ok\r\n0\r\n\r\n")
    half = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc"
    with server.connect(half) as made:
        made.shutdown(socket.SHUT_WR)
        assert rest(made) == b""


def test_a_request_whose_client_has_gone_is_ended(server: Running) -> None:
    left = server.app.left
    server.connect(GET % b"wait").close()
    until(lambda: server.app.left == left + 1)


def test_a_late_head_is_given_up() -> None:
    with running(head_seconds=0.2) as server:
        with server.connect(b"GET / HT") as made:
            assert refused(made) == (408, "head")
        with server.connect() as made:
            assert rest(made) == b""
        # What comes after an early answer is no reason to stay.
        head = b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n"
        with server.connect(head) as made, contextlib.suppress(ConnectionError):
            assert made.recv(4096)
            for _ in range(1000):
                made.sendall(b"a")
                time.sleep(0.02)
            pytest.fail("a body that drips keeps a connection for ever")


def reading_little(server: Running, size: int) -> socket.socket:
    """Return a connection whose receiving buffer is small."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    made.connect(server.address)
    return made


def test_a_client_that_does_not_read_is_dropped() -> None:
    """In the middle of an answer, and behind one that its app has written to the end."""
    with running(stall_seconds=0.3) as server:
        with reading_little(server, 4096) as made:
            made.sendall(GET % b"flood")
            until(lambda: server.app.left == 1)
            assert not server.web.guard.open
        with reading_little(server, 4096) as made:
            made.sendall(GET % b"large")
            until(lambda: server.app.done == 1)
            until(lambda: not server.web.guard.open)


def test_answers_that_nobody_reads_have_a_bound_together() -> None:
    """Of four answers of 8 MiB two and a half may wait: the first two are dropped."""
    with (
        running(bounds=RequestBounds(answers=20 * 2**20)) as server,
        contextlib.ExitStack() as opened,
    ):
        clients = []
        for at in range(4):
            clients.append(opened.enter_context(server.connect(GET % b"large")))
            until(lambda done=at + 1: server.app.done == done)
        until(lambda: len(server.web.guard.open) == 2)
        whole = [len(rest_of(one, 2**23)) for one in clients]
        assert [size >= 2**23 for size in whole] == [False, False, True, True]


def test_a_slow_reader_stays() -> None:
    with running(stall_seconds=1) as server, reading_little(server, 2**14) as made:
        made.sendall(GET % b"flood")
        for _ in range(50):
            assert made.recv(2**13)
            time.sleep(0.03)
        assert server.app.left == 0


def test_a_websocket_that_is_refused_leaves_the_guard() -> None:
    """Its connection has taken the place of one of HTTP there."""
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with running() as made, made.connect((GET % b"")[:-2] + upgrade) as asking:
        assert rest(asking).startswith(b"HTTP/1.1 400")
        until(lambda: not made.web.guard.open)


def test_descriptors_bound_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="descriptors are bounded on Unix alone")
    for soft, there, most in ((128, 30, 50), (64, 40, 8), (20_000, 30, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        monkeypatch.setattr("os.listdir", lambda _, there=there: range(there))
        assert most_connections() == most
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_connections() == 1024


def test_warnings_that_clients_cause_are_written_seldom() -> None:
    seldom, name = OncePerMinute(), "x"

    def passes(level: int, message: str, error: Any = None) -> bool:
        record = logging.LogRecord(name, level, "", 0, message, (), error)
        return seldom.filter(record)

    assert [passes(logging.WARNING, "a") for _ in range(3)] == [True, False, False]
    assert passes(logging.WARNING, "b")
    assert all(passes(logging.ERROR, "a") for _ in range(2))
    known = (ValueError, ValueError(), None)
    assert all(passes(logging.WARNING, "a", known) for _ in range(2))


# Bodies that are slow or many, and names that are not this server's.


BODIES_MOST = 100


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Read a body whole, as routes do."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class Client:
    """Sends pieces of one body, and notes the answer."""

    def __init__(
        self, to: Any, host: bytes = b"x", kind: bytes = b"application/json", coding: bytes = b""
    ) -> None:
        self.pieces: asyncio.Queue[Message] = asyncio.Queue()
        self.status, self.body = 0, b""
        headers = [(b"host", host), (b"content-type", kind)]
        headers += [(b"content-encoding", coding)] if coding else []
        scope = {"type": "http", "headers": headers, "method": "POST", "path": "/"}
        self.task = asyncio.ensure_future(to(scope, self.pieces.get, self.take))

    async def send(self, what: int | bytes, more: bool = True) -> None:
        piece = b" " * what if isinstance(what, int) else what
        self.pieces.put_nowait({"type": "http.request", "body": piece, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    async def take(self, message: Message) -> None:
        self.status = message.get("status", self.status)
        self.body += message.get("body", b"")

    async def code(self) -> str | None:
        await self.task
        return json.loads(self.body).get("error", {}).get("code")


def test_bodies_that_are_arriving_have_a_bound_together() -> None:
    async def run() -> None:
        limit = LimitBody(app, BODIES_MOST, 60)
        clients = [Client(limit) for _ in range(RequestBounds.bodies + 2)]
        for one in clients[: RequestBounds.bodies]:
            await one.send(BODIES_MOST)
        assert limit.room.bytes == RequestBounds.bodies * BODIES_MOST
        await clients[-1].send(1)
        assert (await clients[-1].code(), clients[-1].status) == ("bodies_arriving", 503)
        clients[1].task.cancel()
        await clients[0].send(0, more=False)
        assert await clients[0].code() is None and clients[0].status == 200
        await clients[-2].send(BODIES_MOST, more=False)
        assert await clients[-2].code() is None
        await clients[2].send(1)
        assert (await clients[2].code(), clients[2].status) == ("request_too_large", 413)
        for one in clients[3 : RequestBounds.bodies]:
            await one.send(0, more=False)
            assert await one.code() is None
        assert limit.room.bytes == 0

    asyncio.run(run())


def test_bodies_count_until_their_requests_end_or_let_them_go() -> None:
    told, go = asyncio.Event(), []

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if go:
            release_body()
        await told.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def run() -> None:
        limit = LimitBody(slow, BODIES_MOST, 60)
        first = Client(limit)
        await first.send(BODIES_MOST, more=False)
        assert limit.room.bytes == BODIES_MOST
        go.append(True)
        second = Client(limit)
        await second.send(BODIES_MOST, more=False)
        assert limit.room.bytes == BODIES_MOST
        told.set()
        assert await first.code() is None and await second.code() is None
        assert limit.room.bytes == 0

    asyncio.run(run())


def test_a_small_body_is_taken_however_many_there_are() -> None:
    async def run() -> None:
        limit = LimitBody(app, 512 * 10, 60)
        large = [Client(limit) for _ in range(RequestBounds.bodies)]
        for one in large:
            await one.send(512 * 10)
        small, medium = Client(limit), Client(limit)
        await small.send(10, more=False)
        assert await small.code() is None and small.status == 200
        await medium.send(11, more=False)
        assert await medium.code() == "bodies_arriving"
        for one in large:
            one.task.cancel()

    asyncio.run(run())


def test_values_of_all_bodies_have_a_bound_together() -> None:
    """They count until the request is over; a body with few is taken all the same."""

    async def run() -> None:
        room = BodyRoom(10**6, RequestBounds(values=1000))
        limit = LimitBody(app, 10**6, 60, room)

        def body(values: int) -> bytes:
            return b"[" + b",".join([b"1"] * (values - 1))

        first, second, small = Client(limit), Client(limit), Client(limit)
        await first.send(body(900))
        await second.send(body(200), more=False)
        assert await second.code() == "bodies_arriving"
        await first.send(body(90))
        assert first.status == 0
        await small.send(body(FEW) + b"]", more=False)
        assert await small.code() is None
        await first.send(b"]", more=False)
        assert await first.code() is None and (room.bytes, room.values) == (0, 0)

    asyncio.run(run())


def cut(text: bytes, size: int) -> list[bytes]:
    return [text[at : at + size] for at in range(0, len(text), size)] or [b""]


async def told(*pieces: bytes, kind: bytes = b"application/json", coding: bytes = b"") -> Any:
    """Return the status and code that a body is answered with."""
    client = Client(LimitBody(app, 10**6, 60), kind=kind, coding=coding)
    for piece in pieces:
        await client.send(piece)
    await client.send(b"", more=False)
    return client.status, await client.code()


VALUES_IN = {
    b"1": 1,
    b"[]": 2,  # the bracket may hold one
    b"[1,2,3]": 4,
    b'{"a": [{}, {"b": null}]}': 6,
    b'"a, b [c] {d}"': 1,
    rb'["\\", "\"", ",,\",,", "\\\\\",", [1, 2]]': 8,
    '["ä,", "•,", "🙂,"]'.encode(): 4,
}


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", VALUES_IN)
def test_values_are_counted_outside_of_strings(
    text: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    json.loads(text)
    for most, answer in (
        (VALUES_IN[text], (200, None)),
        (VALUES_IN[text] - 1, (400, "too_many_values")),
    ):
        monkeypatch.setattr(guard, "VALUES", most)
        assert asyncio.run(told(*cut(text, size))) == answer


@pytest.mark.parametrize(
    ("coding", "kind", "text", "answer"),
    [
        (b"gzip", b"application/json", b"{}", (415, "unsupported_media_type")),
        (b"identity", b"Application/JSON; charset=utf-8", b"{}", (200, None)),
        (b"", b"application/problem+json", b"{}", (200, None)),
        (b"", b"", b"{}", (415, "unsupported_media_type")),
        (b"", b"text/plain", b"{}", (415, "unsupported_media_type")),
        (b"", b"", b"", (200, None)),
        (b"", b"application/json", b"\xe4", (200, None)),  # half a character: the parser says so
        (b"", b"application/json", '"ä"'.encode("latin-1"), (400, "invalid_request")),
        (b"", b"application/json", "{}".encode("utf-16"), (400, "invalid_request")),
        (b"", b"application/json", "{}".encode("utf-32-be"), (400, "invalid_request")),
        (b"", b"application/json", '"ä€"'.encode(), (200, None)),
    ],
)
@pytest.mark.parametrize("size", [1, 100])
def test_what_is_no_json_is_told_why(
    coding: bytes, kind: bytes, text: bytes, answer: Any, size: int
) -> None:
    assert asyncio.run(told(*cut(text, size), kind=kind, coding=coding)) == answer


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def run() -> None:
        limit = LimitBody(app, BODIES_MOST, 0)
        client = Client(limit)
        assert (await client.code(), client.status) == ("request_timeout", 408)
        assert limit.room.bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        ("127.0.0.1", b"localhost:8000", 200),
        ("127.0.0.1", b"LOCALHOST", 200),
        ("localhost", b"127.0.0.1:1", 200),
        ("::1", b"[::1]:8000", 200),
        ("127.0.0.9", b"127.0.0.9:8000", 200),
        ("127.0.0.1", b"evil.example:8000", 403),
        ("127.0.0.1", b"localhost.evil.example", 403),
        ("localhost", b"127.0.0.1.evil.example:80", 403),
        ("localhost", b"", 403),
        ("0.0.0.0", b"evil.example", 200),
    ],
)
def test_a_server_of_this_machine_answers_to_its_names(
    host: str, header: bytes, status: int
) -> None:
    async def run() -> None:
        client = Client(CheckHost(app, allowed_hosts(host)), header)
        await client.send(0, more=False)
        code = await client.code()
        assert (client.status, code) == (status, "host_refused" if status == 403 else None)

    asyncio.run(run())


@pytest.mark.parametrize("host, keyed", [("127.0.0.1", False), ("0.0.0.0", False), ("::", True)])
def test_names_that_are_given_stand_beside_this_machine_s(host: str, keyed: bool) -> None:
    names = host_names(["Chat.Example.", "::1", "[FE80::1]", "10.0.0.1"])
    found = allowed_hosts(host, keyed, names)
    assert found is not None
    assert {"chat.example", "localhost", "[::1]", "[fe80::1]", "10.0.0.1"} <= found
    assert "evil.example" not in found
    assert (allowed_hosts(host, keyed) is None) == (host != "127.0.0.1" or keyed)
    assert allowed_hosts("127.0.0.1", keyed=True) is None


@pytest.mark.parametrize("name", ["", " ", "a.example:80", "http://a.example", "*", "a b", "-a"])
def test_what_is_no_name_of_a_host_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is no name"):
        host_names([name])


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{}] * 1000}]},
        {"messages": [{"role": "user", "content": "?"}], "stop": [1] * 1000},
    ],
)
def test_very_many_parts_that_are_wrong_are_few_errors(fields: dict[str, Any]) -> None:
    """Each error takes a kilobyte and a part has one for each of its types."""
    with pytest.raises(ValidationError) as found:
        ChatRequest.model_validate({"model": "m"} | fields)
    assert found.value.error_count() < 20


# A full queue refuses before the body is read, whatever the engine's thread does.


@pytest.fixture(scope="module")
def full_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_qwen3_vl(tmp_path_factory.mktemp("qwen"))

    def load() -> Engine:
        return Engine.from_pretrained(folder, policy="streamingllm", budget=24, dtype="float32")

    with serving(load, max_running=1, max_queue=2) as made:
        yield made


def begun(server: Server, path: str) -> socket.socket:
    """Send the head of a request, and nothing of its body."""
    parts = urlsplit(server.url)
    made = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)
    kind = "Content-Type: application/json\r\nContent-Length: 100000"
    made.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\n{kind}\r\n\r\n".encode())
    return made


def on_the_way(server: Server) -> int:
    worker = server.state.engine_thread
    return worker._sent - worker._taken


def rejected(metrics: Metrics) -> float:
    return metrics.rejected.labels("queue")._value.get()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/sessions/any/chat/completions",
    ],
)
def test_what_there_is_no_place_for_is_refused_by_its_head(full_server: Server, path: str) -> None:
    """Three requests are on their way to a thread that does not look: one to run, two to wait."""
    before = rejected(full_server.state.metrics)
    with ThreadPoolExecutor(3) as clients:
        with stopped(full_server):
            sent = [clients.submit(full_server.chat, f"{path} {at}") for at in range(3)]
            until(lambda: on_the_way(full_server) == 3)
            with closing(begun(full_server, path)) as made:
                found = b""
                while b'"limit"' not in found:
                    piece = made.recv(4096)
                    assert piece, found
                    found += piece
            assert full_server.client.get("/v1/models").status_code == 200
        assert [one.result().status_code for one in sent] == [200] * 3
    head, _, said = found.partition(b"\r\n\r\n")
    assert b" 503 " in head and b"retry-after: 1" in head.lower()
    error = json.loads(said[: said.rindex(b"}") + 1])["error"]
    assert (error["type"], error["code"]) == ("overloaded_error", "no_room")
    assert (error["unit"], error["limit"], error["committed"]) == ("requests", 2, 2)
    assert rejected(full_server.state.metrics) == before + 1
    assert full_server.chat("there is a place again").status_code == 200


def test_who_leaves_on_the_way_leaves_a_place(full_server: Server) -> None:
    """A request whose client goes before the thread has seen it does not count for ever."""
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hello"}]})
    with stopped(full_server):
        clients = [begun(full_server, "/v1/chat/completions") for _ in range(3)]
        for one in clients:
            one.sendall(body.encode().ljust(100000))
        until(lambda: on_the_way(full_server) == 3)
        for one in clients:
            one.close()
        until(lambda: not full_server.state.busy)  # the handlers have ended
    full_server.wait_for(lambda _: on_the_way(full_server) == 0)
    assert full_server.chat("there is a place again").status_code == 200


# Logstash's COMBINEDAPACHELOG, which takes what Apache and NGINX write.
COMBINED = re.compile(
    r"(?P<client>\S+) (?P<ident>\S+) (?P<user>\S+) "
    r"\[(?P<time>\d\d/\w{3}/\d{4}(?::\d\d){3} [+-]\d{4})\] "
    r'"(?:(?P<verb>\w+) (?P<request>\S+)(?: HTTP/(?P<version>[\d.]+))?|-)" (?P<status>\d+) '
    r'(?P<bytes>\d+|-) "(?P<referer>(?:[^"\\]|\\.)*)" "(?P<agent>(?:[^"\\]|\\.)*)"'
)
SECRET = "sk-very-secret"
LOGGED = {  # request line and headers -> status, bytes, path, what stands for the user agent
    "GET /v1/a?api_key=KEY HTTP/1.1\r\nAuthorization: Bearer KEY": (200, 2, "/v1/a", ""),
    "HEAD /v1/b HTTP/1.1\r\nx-api-key: KEY\r\nUser-Agent: curl/8\r\n"
    "Referer: http://a/b?token=KEY\r\nX-Request-Id: mine": (200, 0, "/v1/b", "curl/8"),
    "POST /v1/c HTTP/1.1\r\nContent-Length: 0": (401, None, "/v1/c", ""),
    'GET /%0a%22 HTTP/1.1\r\nx-api-key: KEY\r\nUser-Agent: a"b\\c\tå\x9b': (
        200,
        2,
        "/%0a%22",
        'a"b\\c\t\\xe5\\x9b',
    ),
    "GET /\xff HTTP/1.1\r\nx-api-key: KEY": (400, None, "", ""),
    f"GET /{'a' * 2**16} HTTP/1.1": (431, None, "", ""),
}


@pytest.mark.parametrize("form", ["combined", "json"])
def test_the_log_of_requests(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one line that others read; no client ends it, and no key stands in it."""
    names = []
    with running((SECRET,), access_log=form) as made:
        for asked in LOGGED:
            sent = asked.replace("KEY", SECRET).encode("latin-1")
            with made.connect(sent + b"\r\nHost: x\r\nConnection: close\r\n\r\n") as client:
                names += [re.findall(rb"x-request-id: (\w+)", rest(client))]
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) == len(LOGGED) and text.isascii() and SECRET not in text
    for line, name, (asked, wanted) in zip(lines, names, LOGGED.items(), strict=True):
        status, size, path, agent = wanted
        if form == "json":
            found = json.loads(line)
            assert (found["path"], found["remote_addr"]) == (path, "127.0.0.1")
            assert [found["request_id"].encode()] == (name or [b""])
            assert (found["request_id"] == "mine") == ("mine" in asked)
            assert found["user_agent"] == agent and found["seconds"] >= 0
            assert found["tenant"] == (digest_of_key(SECRET).hex()[:32] if status == 200 else "")
        else:
            matched = COMBINED.fullmatch(line)
            assert matched, line
            found = matched.groupdict()
            assert (found["request"] or "", found["client"]) == (path, "127.0.0.1"), line
            assert (found["user"] == digest_of_key(SECRET).hex()[:32]) == (status == 200)
            assert found["referer"] == ("http://a/b" if "Referer" in asked else "-")
            if "a" in agent:
                assert found["agent"] == r"a\x22b\x5Cc\x09\xE5\x9B"
        assert int(found["status"]) == status and size in (None, int(found["bytes"])), asked


def test_a_server_is_set_up_as_its_settings_say(server: Running) -> None:
    settings, made = server.web._state.settings, server.web.config
    assert made.timeout_graceful_shutdown > settings.drain  # errors are told within that
    assert made.ws_max_size == settings.body and not made.ws_per_message_deflate
    assert not made.proxy_headers and not made.server_header
    limits = server.web.guard.limits
    assert (limits.message_bytes, limits.message_seconds) == (settings.body, settings.body_seconds)
    assert (limits.head_seconds, limits.stall_seconds) == (60, 60)


def test_connections_that_cannot_be_accepted_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "log", log := mock.Mock())
    loop, error = mock.Mock(), OSError(24, "Too many open files")
    for at, message in enumerate(("socket.accept() out of system resource", "Task exception")):
        connections._on_loop_error(loop, {"message": message, "exception": error})
        assert (log.warning.call_count, loop.default_exception_handler.call_count) == (1, at)
    assert log.warning.call_args[0][1] is error


def test_times_are_counted_up_to_the_longest_that_is_usual() -> None:
    bounds: dict[str, float] = {}
    for one in Metrics().registry.collect():
        edges = [float(sample.labels["le"]) for sample in one.samples if "le" in sample.labels]
        bounds |= {one.name.removeprefix("mmkv_"): edges[-2]} if edges else {}
    assert bounds.pop("inter_token_latency_seconds") == 10
    assert len(bounds) == 5 and {*bounds.values()} == {300}
