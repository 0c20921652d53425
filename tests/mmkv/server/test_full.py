"""A full queue refuses before the body is read, whatever the engine's thread does."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from urllib.parse import urlsplit

import pytest

from mmkv import Engine
from mmkv.server.metrics import Metrics
from tests.support.chat_models import save_qwen3_vl
from tests.support.servers import Server, serving, stopped, until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
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
    "path", ["/v1/chat/completions", "/v1/responses", "/v1/sessions/any/chat/completions"]
)
def test_what_there_is_no_place_for_is_refused_by_its_head(server: Server, path: str) -> None:
    """Three requests are on their way to a thread that does not look: one to run, two to wait."""
    before = rejected(server.state.metrics)
    with ThreadPoolExecutor(3) as clients:
        with stopped(server):
            sent = [clients.submit(server.chat, f"{path} {at}") for at in range(3)]
            until(lambda: on_the_way(server) == 3)
            with closing(begun(server, path)) as made:
                found = b""
                while b'"limit"' not in found:
                    piece = made.recv(4096)
                    assert piece, found
                    found += piece
            assert server.client.get("/v1/models").status_code == 200
        assert [one.result().status_code for one in sent] == [200] * 3
    head, _, said = found.partition(b"\r\n\r\n")
    assert b" 503 " in head and b"retry-after: 1" in head.lower()
    error = json.loads(said[: said.rindex(b"}") + 1])["error"]
    assert (error["type"], error["code"]) == ("overloaded_error", "no_room")
    assert (error["unit"], error["limit"], error["committed"]) == ("requests", 2, 2)
    assert rejected(server.state.metrics) == before + 1
    assert server.chat("there is a place again").status_code == 200


def test_who_leaves_on_the_way_leaves_a_place(server: Server) -> None:
    """A request whose client goes before the thread has seen it does not count for ever."""
    body = json.dumps({"model": "small", "messages": [{"role": "user", "content": "hello"}]})
    with stopped(server):
        clients = [begun(server, "/v1/chat/completions") for _ in range(3)]
        for one in clients:
            one.sendall(body.encode().ljust(100000))
        until(lambda: on_the_way(server) == 3)
        for one in clients:
            one.close()
        until(lambda: not server.state.busy)  # the handlers have ended
    server.wait_for(lambda _: on_the_way(server) == 0)
    assert server.chat("there is a place again").status_code == 200
