"""A real server on the loopback, and what its engine's thread knows."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import uvicorn
import wsproto.events
from PIL.Image import Image
from wsproto import ConnectionType, WSConnection

from mmkv import Engine
from mmkv.server.app import make_app
from mmkv.server.connections import WebServer
from mmkv.server.engine_thread import EngineCore
from mmkv.server.run import opened
from mmkv.server.settings import ServerSettings
from mmkv.server.state import ServerState

T = TypeVar("T")
MODEL = "small"


class Server:
    """A server that runs; ``client`` speaks to it."""

    def __init__(self, state: ServerState, url: str, web: uvicorn.Server) -> None:
        self.state, self.url, self.web = state, url, web
        self.client = httpx.Client(base_url=url, timeout=60, trust_env=False)

    def inside(self, call: Callable[[EngineCore], T]) -> T:
        """Call something on the engine's thread, between two turns."""
        thread = self.state.engine_thread
        return thread.post(lambda: call(thread.core)).result(timeout=60)

    def chat(self, *messages: Any, **fields: Any) -> httpx.Response:
        """Ask for a reply; texts are the user's and the assistant's in turn."""
        body = json.dumps(asked(*messages, **fields))  # in ASCII: also what UTF-8 cannot write
        kind = {"Content-Type": "application/json"}
        return self.client.post("/v1/chat/completions", content=body, headers=kind)

    def wait_for(self, what: Callable[[EngineCore], bool]) -> None:
        """Wait until something holds on the engine's thread; a minute at most."""
        until = time.monotonic() + 60
        while not self.inside(what):
            assert time.monotonic() < until, "not within a minute"
            time.sleep(0.002)

    @property
    def held(self) -> int:
        """Count the pages that requests hold; snapshots are not counted."""
        return self.inside(held_pages)


def held_pages(core: EngineCore) -> int:
    """Count the pages that requests hold; snapshots are not counted."""
    pool = core.engine.cache.pool
    return pool.num_pages - pool.free_pages - core.scheduler.residents.copy_pages


def asked(*messages: Any, **fields: Any) -> dict[str, Any]:
    """Return a request's body; texts are the user's and the assistant's in turn."""
    given: list[dict[str, Any]] = []
    for one in messages:
        role = "assistant" if given and given[-1]["role"] == "user" else "user"
        given.append({"role": role, "content": one} if isinstance(one, str) else one)
    return {"model": MODEL, "messages": given, "temperature": 0, "max_tokens": 5} | fields


def picture_part(picture: Image) -> dict[str, Any]:
    """Return the part of a message that shows a picture."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


class SocketClient:
    """A WebSocket to a session; ``rejected``: the status where the server refuses it."""

    def __init__(self, server: Server, name: str, **headers: str) -> None:
        url = urlsplit(str(server.client.base_url))
        self.socket = socket.create_connection((url.hostname, url.port), timeout=30)
        self._events = WSConnection(ConnectionType.CLIENT)
        more = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
        target = f"/v1/sessions/{name}/socket"
        self.write(wsproto.events.Request(url.netloc, target, extra_headers=more))
        self._incoming = self._received()
        answer = next(self._incoming)
        self.rejected = getattr(answer, "status_code", None)

    def __enter__(self) -> SocketClient:
        assert self.rejected is None
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def write(self, event: wsproto.events.Event) -> None:
        self.socket.sendall(self._events.send(event))

    def send(self, **fields: Any) -> None:
        self.write(wsproto.events.TextMessage(json.dumps(fields)))

    def _received(self) -> Iterator[Any]:
        while True:
            data = self.socket.recv(2**16)
            self._events.receive_data(data or None)
            yield from self._events.events()

    def receive(self) -> dict[str, Any]:
        """Return the next message; a closing as {"closed": its code}."""
        text = ""
        for event in self._incoming:
            if isinstance(event, wsproto.events.CloseConnection):
                return {"closed": event.code}
            if isinstance(event, wsproto.events.TextMessage):
                text += event.data
                if event.message_finished:
                    return json.loads(text)
        raise AssertionError


@contextmanager
def serving(load: Callable[[], Engine], **settings: Any) -> Iterator[Server]:
    """Serve on a free port of the loopback; in the end nothing may be held."""
    with opened(load, ServerSettings(**{"name": MODEL} | settings)) as state:
        ports: list[int] = []
        app = make_app(state)
        server = WebServer(state, app, "127.0.0.1", 0, ports.append, log_level="error")
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not ports:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.005)
            made = Server(state, f"http://127.0.0.1:{ports[0]}", server)
            yield made
            made.client.close()
        finally:
            server.should_exit = True
            thread.join()
    core = state.engine_thread.core
    pool = core.engine.cache.pool
    assert pool.free_pages == pool.num_pages, "pages are held by nobody"
    assert core.scheduler.ledger.committed == 0


@contextmanager
def paused_in_a_reply(server: Server) -> Iterator[threading.Event]:
    """Stop the engine's thread after the first tokens of a reply, until the end.

    The event that is given is set then.
    """
    reached, over = threading.Event(), threading.Event()

    def hold(core: EngineCore) -> None:
        turn = core.scheduler.turn

        def held() -> None:
            if core.scheduler.decoding:
                reached.set()
                over.wait(60)
            turn()

        core.scheduler.turn = held  # type: ignore[method-assign]

    def release(core: EngineCore) -> None:
        del core.scheduler.turn

    server.inside(hold)
    try:
        yield reached
    finally:
        over.set()
        server.inside(release)


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    """Let the engine's thread take no commands meanwhile."""
    stands, over = threading.Event(), threading.Event()

    def wait() -> None:
        stands.set()
        assert over.wait(60)

    waiting = server.state.engine_thread.post(wait)
    assert stands.wait(60)
    try:
        yield
    finally:
        over.set()
        waiting.result(60)


def until(what: Callable[[], bool]) -> None:
    """Wait for the event loop, while the engine's thread stands; a minute at most."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline, "not within a minute"
        time.sleep(0.002)
