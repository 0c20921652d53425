"""Bodies that are slow or many, and names that are not this server's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.errors import InputError
from mmkv.server.body import TOGETHER, LimitBody
from mmkv.server.hosts import CheckHost, allowed_hosts, host_names

MOST = 100


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Read a body whole, as routes do."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


class Client:
    """Sends pieces of one body, and notes the answer."""

    def __init__(self, to: Any, host: bytes = b"x") -> None:
        self.pieces: asyncio.Queue[Message] = asyncio.Queue()
        self.status, self.body = 0, b""
        scope = {"type": "http", "headers": [(b"host", host)], "method": "POST", "path": "/"}
        self.task = asyncio.ensure_future(to(scope, self.pieces.get, self.take))

    async def send(self, count: int, more: bool = True) -> None:
        self.pieces.put_nowait({"type": "http.request", "body": bytes(count), "more_body": more})
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
        limit = LimitBody(app, MOST, 60)
        clients = [Client(limit) for _ in range(TOGETHER + 2)]
        for one in clients[:TOGETHER]:
            await one.send(MOST)
        assert limit._arriving == TOGETHER * MOST
        await clients[-1].send(1)
        assert (await clients[-1].code(), clients[-1].status) == ("bodies_arriving", 503)
        await clients[0].send(0, more=False)
        clients[1].task.cancel()
        assert await clients[0].code() is None and clients[0].status == 200
        await clients[-2].send(MOST, more=False)
        assert await clients[-2].code() is None
        await clients[2].send(1)
        assert (await clients[2].code(), clients[2].status) == ("request_too_large", 413)
        for one in clients[3:TOGETHER]:
            await one.send(0, more=False)
            assert await one.code() is None
        assert limit._arriving == 0

    asyncio.run(run())


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def run() -> None:
        limit = LimitBody(app, MOST, 0)
        client = Client(limit)
        assert (await client.code(), client.status) == ("request_timeout", 408)
        assert limit._arriving == 0

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
