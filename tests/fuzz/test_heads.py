"""Pieces of requests, garbled and very long, on one connection of the server.

Nothing escapes, what is answered is HTTP, and what a connection holds stays within its bounds.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from mmkv.server.connections import Connection, ConnectionLimits, Guard
from tests.fuzz.trial import Wrong, examples, trial

_HEAD = 2**12  # bytes that a head may have here
_PIECE = 2**15  # that come at once
_LINES = (
    b"GET / HTTP/1.1",
    b"POST / HTTP/1.1",
    b"HEAD /a%20b?c=d HTTP/1.0",
    b"Host: x",
    b"Content-Length: 5",
    b"Transfer-Encoding: chunked",
    b"Expect: 100-continue",
    b"Connection: close",
    b"Connection: keep-alive, upgrade",
    b"Upgrade: websocket",
    b"X: y",
    b" folded",
    b"",
    b"",
    b"5\r\nhello",
    b"0",
    b"hello",
)
_ENDS = (b"\r\n", b"\r\n", b"\r\n", b"\r\n\r\n", b"\n", b"")
_ANSWER = re.compile(rb"HTTP/1\.1 (1\d\d|2\d\d|4\d\d|503) ")


@st.composite
def _lines(draw: st.DrawFn) -> bytes:
    line = draw(st.sampled_from(_LINES))
    what = draw(st.integers(0, 9))
    if what == 0:
        line += draw(st.sampled_from(b"a:, \t\0\x80")).to_bytes() * draw(
            st.sampled_from((10, 4000, 5000, 100_000))
        )
    elif what == 1:
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.binary(min_size=1, max_size=2)) + line[at:]
    return (line + draw(st.sampled_from(_ENDS))) * draw(st.sampled_from((1, 1, 1, 1, 2, 50)))


@st.composite
def _pieces(draw: st.DrawFn) -> list[bytes]:
    """Draw lines of requests, cut anywhere."""
    whole = b"".join(draw(st.lists(_lines(), min_size=1, max_size=12)))[:400_000]
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=3)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


class _Transport(asyncio.Transport):
    """Takes what a connection writes, and notes whether it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed, self.reads = bytearray(), False, True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answer at once, or after the body, by the path."""
    while not scope["path"].startswith("/early") and (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"ok"})


class Connections:
    """Makes connections as the server does, guarded for heads of ``_HEAD`` bytes."""

    def __init__(self) -> None:
        self._guard = Guard(ConnectionLimits(head_bytes=_HEAD))
        # uvicorn takes a class, so the guard is an attribute of one (mmkv.server.connections).
        self._made = type("GuardedConnection", (Connection,), {"guard": self._guard})
        self._config = Config(_app, http=self._made, log_config=None, lifespan="off")
        self._config.load()
        self._state, self.runner = ServerState(), asyncio.Runner()

    async def feed(self, pieces: list[bytes], eof: bool) -> None:
        """Send pieces to a connection of its own. Raises Wrong where that does harm."""
        loop, failed = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        transport = _Transport()
        made: Any = self._made(self._config, self._state, {}, loop)
        made.connection_made(transport)
        for content in pieces:
            for at in range(0, len(content), _PIECE):
                if transport.closed or not transport.reads:
                    break
                made.data_received(content[at : at + _PIECE])
                held = sum(len(one) + len(two) for one, two in made.headers or ())
                if held > _HEAD or made._head > _HEAD + _PIECE or len(made.pipeline) > 16:
                    raise Wrong(f"{held} bytes of headers, {len(made.pipeline)} requests wait")
                await asyncio.sleep(0)
        if eof and not transport.closed:
            made.eof_received()
        for _ in range(8):
            await asyncio.sleep(0)
        transport.closed = True
        made.connection_lost(None)
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.sleep(0)
        if failed:
            raise failed[0].get("exception") or Wrong(failed[0]["message"])
        if transport.written and not _ANSWER.match(transport.written):
            raise Wrong(f"it answers {bytes(transport.written[:80])!r}")
        if self._guard.open:
            raise Wrong("a connection is left")


@pytest.fixture(scope="module")
def connections() -> Connections:
    return Connections()


@examples(80)
@given(pieces=_pieces(), eof=st.booleans())
def test_heads(connections: Connections, pieces: list[bytes], eof: bool) -> None:
    with trial() as made:
        connections.runner.run(connections.feed(pieces, eof))
    if made.refusal:  # none is one here
        raise Wrong(str(made.refusal)) from made.refusal
