"""Heads of requests as bytes on a connection, and a store that fails under a server."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import httpx

from mmkv.eval.fuzz.target import Case, Target, Wrong, as_bytes
from mmkv.eval.fuzz.targets.http import _MODEL, HttpBodies, _check

_HEAD = 2**12  # bytes that a head may have here
_PIECE = 2**15  # that come at once
_LINES = (
    "GET / HTTP/1.1",
    "POST / HTTP/1.1",
    "HEAD /a%20b?c=d HTTP/1.0",
    "Host: x",
    "Content-Length: 5",
    "Transfer-Encoding: chunked",
    "Expect: 100-continue",
    "Connection: close",
    "Connection: keep-alive, upgrade",
    "Upgrade: websocket",
    "X: y",
    " folded",
    "",
    "",
    "5\r\nhello",
    "0",
    "hello",
)
_ANSWER = re.compile(rb"HTTP/1\.1 (1\d\d|2\d\d|4\d\d|503) ")


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


class Heads(Target):
    """Pieces of requests, garbled and very long, on one connection.

    Nothing escapes, what is answered is HTTP, and what a connection holds stays within its bounds.
    """

    name = "HTTP heads"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        from mmkv.server.connections import Connection, ConnectionLimits, Guard

        self._guard = Guard(ConnectionLimits(head_bytes=_HEAD))
        made = type("GuardedConnection", (Connection,), {"guard": self._guard})
        self._config = Config(_app, http=made, log_config=None, lifespan="off")
        self._config.load()
        self._made, self._state = made, ServerState()
        self._runner = asyncio.Runner()

    def make(self, rng: Random) -> Case:
        parts = []
        for _ in range(rng.randrange(1, 12)):
            line = rng.choice(_LINES)
            if rng.random() < 0.15:
                line += rng.choice("a:, \t\0\x80") * rng.choice((10, 4000, 5000, 100_000))
            if rng.random() < 0.1:
                at = rng.randrange(len(line) + 1)
                line = line[:at] + chr(rng.randrange(256)) + line[at:]
            ends = ("\r\n", "\r\n", "\r\n", "\r\n\r\n", "\n", "")
            parts.append((line + rng.choice(ends)) * rng.choice((1, 1, 1, 1, 2, 50)))
        text = "".join(parts)[:400_000]
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(4)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        return {"pieces": pieces, "eof": rng.random() < 0.3}

    def run(self, case: Case) -> None:
        try:
            self._runner.run(self._feed(case))
        except Wrong:
            raise
        except Exception as error:  # none is a refusal here
            raise Wrong(f"{type(error).__name__}: {error}") from error

    async def _feed(self, case: Case) -> None:
        loop, failed = asyncio.get_running_loop(), list[Any]()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        transport = _Transport()
        made: Any = self._made(self._config, self._state, {}, loop)
        made.connection_made(transport)
        for text in case["pieces"]:
            content = as_bytes(text)
            for at in range(0, len(content), _PIECE):
                if transport.closed or not transport.reads:
                    break
                made.data_received(content[at : at + _PIECE])
                held = sum(len(one) + len(two) for one, two in made.headers or ())
                if held > _HEAD or made._head > _HEAD + _PIECE or len(made.pipeline) > 16:
                    raise Wrong(f"{held} bytes of headers, {len(made.pipeline)} requests wait")
                await asyncio.sleep(0)
        if case["eof"] and not transport.closed:
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


_STEPS = (
    *("respond", "respond", "go on", "chat", "turn", "turn", "session"),
    *("remove", "block", "block", "clear", "lose", "damage", "close", "respond", "chat"),
)


class StoreFaults(HttpBodies):
    """Chats, responses and sessions while the folder of idle memories comes to harm.

    Chats and responses are answered as long as sessions leave room, whatever happens to the folder;
    a memory that is gone is refused in mmkv's own words.
    """

    name = "store faults"
    memory = 600 * 2**10

    def make(self, rng: Random) -> Case:
        return {
            "steps": [[rng.choice(_STEPS), rng.randrange(4)] for _ in range(rng.randrange(4, 20))]
        }

    def run(self, case: Case) -> None:
        self._logged.errors.clear()
        self._place = self.folder / "saved"
        _clear(self._place)
        try:
            self._runner.run(self._steps(case["steps"]))
        finally:
            _clear(self._place)
        if self._logged.errors:
            raise self._logged.errors[0]

    async def _steps(self, steps: list[list[Any]]) -> None:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            names: list[str] = []
            sessions: list[str] = []
            for kind, number in steps:
                answer = await self._step(client, kind, number, names, sessions)
                if answer is None:
                    continue
                _check(answer)
                status = answer.status_code
                full = status == 503 and len(sessions) > 0
                lost = kind in ("go on", "turn") and status in (400, 409)
                if status != 200 and not (full or lost):
                    raise Wrong(f"{kind}: {status} {answer.text[:200]}")
                if str(self.folder) in answer.text:
                    raise Wrong(f"it says where files lie: {answer.text[:300]}")
            if (await client.get("/health")).status_code != 200:
                raise Wrong("the engine has stopped")
            _clear(self._place)
            for one in sessions:
                await client.delete(f"/v1/sessions/{one}")
            for one in names:
                await client.delete(f"/v1/responses/{one}")

    async def _step(
        self,
        client: httpx.AsyncClient,
        kind: str,
        number: int,
        names: list[str],
        sessions: list[str],
    ) -> httpx.Response | None:
        body: dict[str, Any] = {"model": _MODEL}
        said = [{"role": "user", "content": f"what is {number}?"}]
        if kind in ("respond", "go on"):
            body |= {"input": f"what is {number}?", "max_output_tokens": 2}
            if kind == "go on" and names:
                body["previous_response_id"] = names[number % len(names)]
            answer = await client.post("/v1/responses", json=body)
            names += [answer.json()["id"]] if answer.status_code == 200 else []
            return answer
        body |= {"messages": said, "max_tokens": 2}
        if kind == "chat":
            return await client.post("/v1/chat/completions", json=body)
        if kind == "session":
            answer = await client.post("/v1/sessions", json={})
            sessions += [answer.json()["id"]] if answer.status_code == 200 else []
            return answer
        if kind == "turn":
            if not sessions:
                return None
            path = f"/v1/sessions/{sessions[number % len(sessions)]}"
            return await client.post(f"{path}/chat/completions", json=body)
        if kind == "close" and sessions:
            return await client.delete(f"/v1/sessions/{sessions.pop()}")
        self._harm(kind, number)
        return None

    def _harm(self, kind: str, number: int) -> None:
        place = self._place
        files = sorted(place.glob(".hibernated-*/*.mmkv")) if place.is_dir() else []
        if kind == "clear":
            _clear(place)
        elif kind in ("remove", "block"):
            shutil.rmtree(place, ignore_errors=True)
            if kind == "block" and not place.exists():
                place.write_text("in the way")
        elif files and kind == "lose":
            files[number % len(files)].unlink()
        elif files and kind == "damage":
            os.truncate(files[number % len(files)], 100 * number)


def _clear(place: Path) -> None:
    """Remove what stands in the way of a folder."""
    if place.is_file():
        place.unlink()
