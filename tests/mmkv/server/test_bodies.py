"""Bodies that are slow or many, and names that are not this server's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.types import Message, Receive, Scope, Send

from mmkv.engine.errors import InputError
from mmkv.server import guard
from mmkv.server.guard import (
    TOGETHER,
    CheckHost,
    LimitBody,
    allowed_hosts,
    release_body,
)
from mmkv.server.schema import ChatRequest
from mmkv.server.settings import host_names

MOST = 100


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
        limit = LimitBody(app, MOST, 60)
        clients = [Client(limit) for _ in range(TOGETHER + 2)]
        for one in clients[:TOGETHER]:
            await one.send(MOST)
        assert limit._held == TOGETHER * MOST
        await clients[-1].send(1)
        assert (await clients[-1].code(), clients[-1].status) == ("bodies_arriving", 503)
        clients[1].task.cancel()
        await clients[0].send(0, more=False)
        assert await clients[0].code() is None and clients[0].status == 200
        await clients[-2].send(MOST, more=False)
        assert await clients[-2].code() is None
        await clients[2].send(1)
        assert (await clients[2].code(), clients[2].status) == ("request_too_large", 413)
        for one in clients[3:TOGETHER]:
            await one.send(0, more=False)
            assert await one.code() is None
        assert limit._held == 0

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
        limit = LimitBody(slow, MOST, 60)
        first = Client(limit)
        await first.send(MOST, more=False)
        assert limit._held == MOST
        go.append(True)
        second = Client(limit)
        await second.send(MOST, more=False)
        assert limit._held == MOST
        told.set()
        assert await first.code() is None and await second.code() is None
        assert limit._held == 0

    asyncio.run(run())


def test_a_small_body_is_taken_however_many_there_are() -> None:
    async def run() -> None:
        limit = LimitBody(app, 512 * 10, 60)
        large = [Client(limit) for _ in range(TOGETHER)]
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
        limit = LimitBody(app, MOST, 0)
        client = Client(limit)
        assert (await client.code(), client.status) == ("request_timeout", 408)
        assert limit._held == 0

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
