"""The server: bodies, paths and methods of requests changed, heads of requests as bytes, and a
store that fails under it.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import logging
import os
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import httpx

from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import save_vision_model, small_engine
from benchmarks.fuzz.target import Case, Target, Wrong, as_bytes, as_text
from mmkv.engine.errors import MmkvError
from mmkv.resources import asset

MODEL = "small"
ANSWERED_ID = "$ID"  # stands for the session or response that was made before
_METHODS = ("GET", "DELETE", "PUT", "HEAD", "OPTIONS", "POST", "PATCH", "BREW")
_TYPES = ("application/json",) * 20 + ("", "text/plain", "multipart/form-data; boundary=", "a/b;c")


class HttpBodies(Target):
    """A request to the whole application, most of them with a body that was whole once.

    Answers are JSON or a stream of events, an error is an object of OpenAI's shape, and 503 is the
    only status from 500 on.
    """

    name = "HTTP bodies"
    memory = 2**20  # bytes of the cache

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        from mmkv.server.app import make_app
        from mmkv.server.engine_thread import EngineCore, EngineThread
        from mmkv.server.media.resolver import MediaResolver
        from mmkv.server.metrics import Metrics
        from mmkv.server.settings import ServerSettings
        from mmkv.server.state import ServerState

        model = self._save_model(folder / "model")
        settings = ServerSettings(
            name=MODEL, max_tokens=2, session_folder=folder / "saved", body=2**17
        )
        metrics = Metrics()

        def start() -> EngineCore:
            return EngineCore(small_engine(model, kv_limit=self.memory), settings, metrics, 2.0)

        self._thread = EngineThread(start)
        self._thread.start()
        facts = self._thread.facts()
        self._state = ServerState(
            settings, facts, self._thread, metrics, MediaResolver(rules=facts.rules)
        )
        self._app = make_app(self._state)
        self._runner = asyncio.Runner()
        self._logged = _Errors()
        log = logging.getLogger("mmkv.server")
        log.handlers, log.propagate = [self._logged], False
        picture = base64.b64encode(asset("scene.png").read_bytes()).decode()
        self._wholes = self._bodies(f"data:image/png;base64,{picture}")

    def _save_model(self, folder: Path) -> Path:
        return save_vision_model(folder)

    def _bodies(self, picture: str) -> dict[str, list[Any]]:
        """Return whole bodies, by the path they are posted to."""
        return _wholes(picture)

    def _options(self, path: str) -> dict[str, tuple[Any, ...]]:
        """Return what may be added to a body, with its values."""
        return OPTIONS if path.endswith("completions") else RESPONSE_OPTIONS

    def make(self, rng: Random) -> Case:
        path = rng.choice(sorted(self._wholes))
        body: Any = copy.deepcopy(rng.choice(self._wholes[path]))
        if isinstance(body, dict):
            options = self._options(path)
            chosen = rng.sample(sorted(options), rng.randrange(4)) if "model" in body else []
            body |= {name: rng.choice(options[name]) for name in chosen}
        if rng.random() < 0.95:
            body = mutate.edit(rng, body)
        method = "POST"
        if rng.random() < 0.1:
            method, path = rng.choice(_METHODS), rng.choice((path, rng.choice(_PATHS)))
            if rng.random() < 0.3:
                path += mutate.text(rng)[:200]
        return {
            "method": method,
            "path": path,
            "type": rng.choice(_TYPES),
            "body": as_text(mutate.dump(rng, body)),
        }

    def run(self, case: Case) -> None:
        self._logged.errors.clear()
        try:
            self._runner.run(self._ask(case))
        except (Wrong, BaseExceptionGroup):
            raise
        except (MmkvError, TypeError, ValueError) as error:
            # Elsewhere these are refusals: here the application let one out.
            raise Wrong(f"{type(error).__name__}: {error}") from error
        if self._logged.errors:
            raise self._logged.errors[0]

    async def _ask(self, case: Case) -> None:
        transport = httpx.ASGITransport(self._app)
        # A name that stands nowhere: nothing is looked up.
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            name = await self._made_before(client, case["path"] + case["body"])
            path = case["path"].replace(ANSWERED_ID, name)
            url = httpx.URL("http://server").copy_with(raw_path=_raw(path))
            body = as_bytes(case["body"].replace(ANSWERED_ID, name))
            kind = {"Content-Type": case["type"]} if case["type"] else {}
            try:
                answer = await client.request(case["method"], url, content=body, headers=kind)
                check_answer(answer)
                self._check_reply(answer)
            finally:
                await self._clean(client, name)

    def _check_reply(self, answer: httpx.Response) -> None:
        """Raise Wrong for a reply that does not fit its request."""

    async def _made_before(self, client: httpx.AsyncClient, text: str) -> str:
        if ANSWERED_ID not in text:
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

    async def _clean(self, client: httpx.AsyncClient, name: str) -> None:
        for one in (await client.get("/v1/sessions")).json()["data"]:
            if one["busy"]:  # a turn in the background, which goes on without its client
                await client.delete(f"/v1/sessions/{one['id']}/turn")
            await client.delete(f"/v1/sessions/{one['id']}")
        if name.startswith("resp_"):
            await client.delete(f"/v1/responses/{name}")

    def leaked(self) -> str | None:
        def look() -> str | None:
            core = self._thread.core
            assert core is not None
            scheduler = core.scheduler
            scheduler.turn()  # what was cancelled ends
            while scheduler.residents.copies:
                scheduler.residents.drop_oldest_copy()
            # Stored responses that were asked for, and not deleted, are nobody's leak.
            for session in [one for one in scheduler.sessions if one.resident]:
                scheduler.hibernate(session)
            pool = core.engine.cache.pool
            held = pool.num_pages - pool.free_pages
            if held or scheduler.ledger.committed:
                return f"{held} pages are held, {scheduler.ledger.committed} committed"
            try:
                core.engine.cache.check()
            except AssertionError as error:
                return f"the cache is not consistent: {error}"
            return None

        return self._thread.post(look).result(60)


class _Errors(logging.Handler):
    """Keeps what the server logs as an error of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.errors.append(record.exc_info[1])


def _raw(path: str) -> bytes:
    """Return a path as a client could send it: one line of printable ASCII."""
    safe = "/?&=%.-_~:@!$'()*+,;"
    return quote("/" + path.lstrip("/").encode("utf-8", "replace").decode(), safe=safe).encode()


def check_answer(answer: httpx.Response) -> None:
    """Raise Wrong for an answer that the API does not have."""
    status = answer.status_code
    if status >= 500 and status != 503:
        raise Wrong(f"the status is {status}: {answer.text[:200]}")
    kind = answer.headers.get("content-type", "")
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


def _wholes(picture: str) -> dict[str, list[Any]]:
    """Return whole bodies, by the path they are posted to."""
    shown = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": "it?"}]
    seen = [{"type": "input_image", "image_url": picture}, {"type": "input_text", "text": "it?"}]
    chats: list[Any] = [
        {"model": MODEL, "messages": messages}
        for messages in (
            [{"role": "user", "content": "what is red?"}],
            [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "what?"},
                {"role": "assistant", "content": "red"},
                {"role": "user", "content": [{"type": "text", "text": "and?"}]},
            ],
            [{"role": "user", "content": shown}],
        )
    ]
    answers: list[Any] = [
        {"model": MODEL, "input": "what?", "instructions": "be brief"},
        {"model": MODEL, "input": [{"role": "user", "content": seen}]},
        {"model": MODEL, "input": "and?", "previous_response_id": ANSWERED_ID},
    ]
    return {
        "/v1/chat/completions": chats,
        "/v1/responses": answers,
        "/v1/sessions": [{}, {"budget": 16, "metadata": {"a": "b"}}, {"file": "saved"}],
        f"/v1/sessions/{ANSWERED_ID}/chat/completions": [
            *chats,
            *(one | {"stream": True, "mmkv": {"background": True}} for one in chats),
        ],
        f"/v1/sessions/{ANSWERED_ID}/fork": [{}, {"metadata": {"a": "b"}}],
        f"/v1/sessions/{ANSWERED_ID}/save": [{"name": "saved", "overwrite": True}],
    }


_FORMATS = (
    {"type": "json_object"},
    {"type": "text"},
    {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}},
    },
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "stream": (True, True, False),
    "stream_options": ({"include_usage": True},),
    "n": (1, 2, 3),
    "logprobs": (True,),
    "top_logprobs": (0, 2),
    "logit_bias": ({"3": 5}, {"642": -100}),
    "stop": ("a", ["b", "\n"]),
    "seed": (1, -5),
    "temperature": (0, 0.5, 2),
    "top_p": (0.1, 1),
    "top_k": (1, 5),
    "presence_penalty": (-2, 1.5),
    "frequency_penalty": (2,),
    "response_format": _FORMATS,
    "user": ("ann",),
    "cache_salt": ("x",),
    "mmkv": (
        {"resume": "never"},
        {"resume": "required"},
        {"budget": 16},
        {"budget": "64KiB"},
        {"background": True},
    ),
    "max_tokens": (1, 4),
    "max_completion_tokens": (2,),
}
RESPONSE_OPTIONS: dict[str, tuple[Any, ...]] = {
    "stream": (True, True, False),
    "store": (False, True),
    "include": (["message.output_text.logprobs"],),
    "top_logprobs": (1,),
    "max_output_tokens": (1, 3),
    "temperature": (0, 1.5),
    "text": ({"format": {"type": "json_object"}}, {"format": {"type": "text"}}),
    "metadata": ({"a": "b"},),
    "truncation": ("auto",),
    "mmkv": ({"budget": 16},),
}
_PATHS = (
    "/",
    "/health",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/models/small",
    "/v1/models/%2e%2e/x",
    "/v1/sessions",
    f"/v1/sessions/{ANSWERED_ID}",
    f"/v1/sessions/{ANSWERED_ID}/memory",
    f"/v1/sessions/{ANSWERED_ID}/messages",
    f"/v1/sessions/{ANSWERED_ID}/turn",
    f"/v1/sessions/{ANSWERED_ID}/media/{'0' * 64}",
    f"/v1/responses/{ANSWERED_ID}",
    f"/v1/responses/{ANSWERED_ID}/input_items",
    "/v1/responses/compact",
)


class SocketMessages(HttpBodies):
    """Messages to a session over a WebSocket, sent at once; its client may leave before the end.

    Each is answered: with events that end with what was read or the session's turn, or with one
    error. Who leaves is noticed, and the session is idle then.
    """

    name = "socket messages"

    def _bodies(self, picture: str) -> dict[str, list[Any]]:
        shown = {"type": "image_url", "image_url": {"url": picture}}
        said = [{"role": "user", "content": "what?"}]
        few: dict[str, Any] = {"type": "ask", "max_tokens": 2}
        return {
            "observe": [
                {"type": "observe", "content": "a door opens", "at": 1},
                {"type": "observe", "content": [shown, shown], "at": 1.5, "fps": 2},
                {"type": "observe", "content": [shown], "at": 2, "skip_similar": 3},
                {"type": "observe", "content": "it is red", "system": "be brief"},
            ],
            "ask": [
                few | {"messages": said},
                few | {"messages": said, "stream_options": {"include_usage": True}},
                few | {"messages": [{"role": "user", "content": [shown]}]},
            ],
        }

    def make(self, rng: Random) -> Case:
        sent: list[dict[str, Any]] = []
        for _ in range(rng.choice((1, 1, 2, 3, 6))):
            kind = rng.choice(("observe", "observe", "ask"))
            body = copy.deepcopy(rng.choice(self._wholes[kind]))
            if body["type"] == "ask":
                chosen = rng.sample(sorted(OPTIONS), rng.randrange(3))
                body |= {name: rng.choice(OPTIONS[name]) for name in chosen}
            if rng.random() < 0.5:
                body = mutate.edit(rng, body)
                if isinstance(body, dict) and rng.random() < 0.8:
                    body["type"] = kind
            form = "bytes" if rng.random() < 0.03 else "text"
            sent.append({form: as_text(mutate.dump(rng, body))})
        # Answers after which the client leaves; -1: it has all.
        return {"sent": sent, "leaves": rng.choice((-1, -1, -1, 0, 1, 2, 5))}

    async def _ask(self, case: Case) -> None:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            name = (await client.post("/v1/sessions", json={})).json()["id"]
            try:
                await self._connected(name, case)
                busy = (await client.get(f"/v1/sessions/{name}")).json()["busy"]
                if busy:
                    raise Wrong("a turn goes on without its client")
            finally:
                await self._clean(client, name)

    async def _connected(self, name: str, case: Case) -> None:
        """Send the messages of a case, and read answers until its client leaves."""
        coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        coming.put_nowait({"type": "websocket.connect"})
        for one in case["sent"]:
            content = as_bytes("".join(one.values()))
            made: dict[str, Any] = {"bytes": content}
            if "text" in one:
                made = {"text": content.decode("utf-8", "replace")}
            coming.put_nowait({"type": "websocket.receive"} | made)
        answers, left, wrong = 0, len(case["sent"]), list[str]()

        def leave() -> None:
            coming.put_nowait({"type": "websocket.disconnect", "code": 1000})

        async def send(message: Any) -> None:  # what it raises would be answered as an error
            nonlocal answers, left
            if message["type"] == "websocket.accept":
                if not case["leaves"]:
                    leave()
                return
            event = json.loads(message.get("text", "{}"))
            error = event.get("error")
            if message["type"] != "websocket.send":
                wrong.append(f"the server ends it: {message}")
            elif error is not None and (not error["message"] or "\n" in error["message"]):
                wrong.append(f"an error without a line: {event}")
            answers += 1
            ends = ("session.observation", "session.turn")
            left -= error is not None or event.get("object") in ends
            if answers == case["leaves"] or not left:
                leave()

        path = f"/v1/sessions/{name}/socket"
        scope = {
            "type": "websocket",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "ws",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"server")],
            "client": ("127.0.0.1", 1),
            "server": ("server", 80),
            "subprotocols": [],
            "state": {},
        }
        await self._app(scope, coming.get, send)
        if wrong:
            raise Wrong(wrong[0])


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
        """Prepare connections as the server makes them, guarded for heads of ``_HEAD`` bytes."""
        super().prepare(folder)
        from uvicorn.config import Config
        from uvicorn.server import ServerState

        from mmkv.server.connections import Connection, ConnectionLimits, Guard

        self._guard = Guard(ConnectionLimits(head_bytes=_HEAD))
        # uvicorn takes a class, so the guard is an attribute of one (mmkv.server.connections).
        made = type("GuardedConnection", (Connection,), {"guard": self._guard})
        self._config = Config(_app, http=made, log_config=None, lifespan="off")
        self._config.load()
        self._connection_class, self._state = made, ServerState()
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
        made: Any = self._connection_class(self._config, self._state, {}, loop)
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
    memory = 700 * 2**10  # an eighth is for pictures' features

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
                check_answer(answer)
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
        body: dict[str, Any] = {"model": MODEL}
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
