"""The server: paths, methods and bodies of requests, clients that leave, and a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.bodies import SAID, SHOWN, WHOLE, options, whole
from tests.fuzz.server import (
    MADE,
    MODEL,
    Service,
    check_answer,
    cleaned,
    made_before,
    scope,
    service,
)
from tests.fuzz.strategies import edited, json_files, texts
from tests.fuzz.trial import Wrong, examples
from tests.support.tool_templates import save_seeing_tool_model

_METHODS = ("GET", "DELETE", "PUT", "HEAD", "OPTIONS", "POST", "PATCH", "BREW")
_TYPES = ("application/json",) * 12 + ("", "text/plain", "multipart/form-data; boundary=", "a/b;c")
_JSON = "application/json"
_ODD_PATHS = ("/", "/docs", "/v1/models/%2e%2e/x", "/v1/responses/compact")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    model = save_seeing_tool_model(tmp_path_factory.mktemp("model"))
    with service(model, tmp_path_factory.mktemp("saved"), 2**20) as made:
        yield made


def asked(server: Service, method: str, path: str, kind: str, body: bytes) -> None:
    """Send a request, and check its answer."""

    async def ask(client: httpx.AsyncClient) -> None:
        name = await made_before(client, path + body.decode("latin-1"))
        url = httpx.URL("http://server").copy_with(raw_path=_raw(path.replace(MADE, name)))
        content = body.replace(MADE.encode(), name.encode())
        headers = {"Content-Type": kind} if kind else {}
        try:
            answer = await client.request(method, url, content=content, headers=headers)
            check_answer(answer)
            _check_calls(answer)
        finally:
            await cleaned(client, name)

    server.run(ask)


def _raw(path: str) -> bytes:
    """Return a path as a client could send it: one line of printable ASCII."""
    safe = "/?&=%.-_~:@!$'()*+,;"
    return quote("/" + path.lstrip("/").encode("utf-8", "replace").decode(), safe=safe).encode()


def _check_calls(answer: httpx.Response) -> None:
    """Raise Wrong for a call that names no tool of the request, or whose arguments are no JSON."""
    kind = answer.headers.get("content-type", "")
    request = answer.request
    if answer.status_code != 200 or request.method != "POST" or not kind.startswith(_JSON):
        return
    asked = json.loads(request.content or b"{}") or {}
    tools = [one for one in asked.get("tools") or () if isinstance(one, dict)]
    known = {(one.get("function") or one).get("name") for one in tools}
    for name, arguments, cut_off in _calls(answer.json()):
        if name not in known:
            raise Wrong(f"it calls {name!r}, which is no tool of {sorted(map(str, known))}")
        if not cut_off and not isinstance(json.loads(arguments), dict):
            raise Wrong(f"arguments that are no object: {arguments[:100]!r}")


def _calls(made: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield the calls of an answer: name, arguments, and whether the reply was cut off."""
    for choice in made.get("choices") or ():
        calls = choice.get("message", {}).get("tool_calls") or ()
        whole = choice["finish_reason"] == "tool_calls"
        if whole and not calls:
            raise Wrong("finish_reason is tool_calls, and there are none")
        for call in calls:
            yield call["function"]["name"], call["function"]["arguments"], not whole
    for item in made.get("output") or ():
        if item["type"] == "function_call":
            yield item["name"], item["arguments"], made["status"] != "completed"
    for block in made["content"] if made.get("type") == "message" else ():
        if block["type"] == "tool_use":
            yield block["name"], json.dumps(block["input"]), False


# Requests as the API's own description has them, and as it forbids them.


_Operation = schemathesis.Case


@pytest.fixture(scope="module")
def described(server: Service) -> st.SearchStrategy[_Operation]:
    schema = schemathesis.openapi.from_dict(server.app.openapi())
    return st.one_of(
        found.ok().as_strategy(generation_mode=mode)
        for found in schema.get_all_operations()
        for mode in schemathesis.GenerationMode
    )


def _short(body: Any) -> Any:
    """Name the model, and ask for few and short replies."""
    if isinstance(body, dict):
        body = body | ({"model": MODEL} if isinstance(body.get("model"), str) else {})
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
            if isinstance(body.get(name), int):
                body[name] = min(body[name], 3)
    return body


@examples(6)
@given(data=st.data(), known=st.booleans())
def test_requests_of_the_description(
    server: Service, described: st.SearchStrategy[_Operation], data: st.DataObject, known: bool
) -> None:
    case = data.draw(described)
    path = case.path
    for name, value in case.path_parameters.items():
        path = path.replace(f"{{{name}}}", MADE if known and name == "name" else quote(str(value)))
    if case.query:
        path += "?" + str(httpx.QueryParams({key: str(value) for key, value in case.query.items()}))
    body = case.body
    if isinstance(body, schemathesis.core.NotSet):
        body = b""
    elif not isinstance(body, bytes):
        body = json.dumps(_short(body)).encode()
    asked(server, case.method, path, case.media_type or "", body)


# Requests that were whole, with up to three values changed; now and then another method or path.


@st.composite
def _bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(WHOLE)))
    return path, draw(json_files(whole(path).flatmap(edited)))


@examples(20)
@given(given=_bodies(), kind=st.sampled_from(_TYPES))
def test_changed_bodies(server: Service, given: tuple[str, bytes], kind: str) -> None:
    path, body = given
    asked(server, "POST", path, kind, body)


@examples(10)
@given(
    method=st.sampled_from(_METHODS),
    path=st.sampled_from((*WHOLE, *_ODD_PATHS)),
    more=st.just("") | texts,
    given=_bodies(),
)
def test_odd_methods_and_paths(
    server: Service, method: str, path: str, more: str, given: tuple[str, bytes]
) -> None:
    asked(server, method, path + more[:200], _JSON, given[1])


# A client goes away in the middle of its request or of a streamed reply: every page comes back, and
# the next request is answered.


@st.composite
def _streams(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from([one for one in sorted(WHOLE) if "model" in WHOLE[one][0]]))
    body = draw(whole(path)) | {"stream": bool(draw(st.integers(0, 9)))}
    return path, json.dumps(body if draw(st.integers(0, 9)) else draw(edited(body))).encode()


@examples(10)
@given(
    given=_streams(),
    # Pieces of the answer after which it is gone; below 0: before its request is whole.
    cut=st.sampled_from((-1, 0, 1, 2, 3)) | st.integers(4, 60),
    again=st.booleans(),
)
def test_clients_that_leave(
    server: Service, given: tuple[str, bytes], cut: int, again: bool
) -> None:
    async def leave(client: httpx.AsyncClient) -> None:
        path, body = given
        name = await made_before(client, path + body.decode())
        path, body = path.replace(MADE, name), body.replace(MADE.encode(), name.encode())
        try:
            tries = [_cut(server, path, body, cut)]
            if again:  # the same, at once, beside it
                tries.append(_cut(server, path, body, cut + 5))
            await asyncio.gather(*tries)
            answer = await client.post(
                "/v1/chat/completions", json={"model": MODEL, "messages": SAID}
            )
            check_answer(answer)
            if answer.status_code != 200:
                raise Wrong(f"the next one is answered with {answer.status_code}")
        finally:
            await cleaned(client, name)

    server.run(leave)


async def _cut(server: Service, path: str, content: bytes, cut: int) -> None:
    """Send a request, and go away after ``cut`` pieces of its answer."""
    gone, come = asyncio.Event(), 0
    body = content[:-1] if cut < 0 else content
    coming = [{"type": "http.request", "body": body, "more_body": cut < 0}]

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop()
        if cut > 0:
            await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal come
        if message["type"] == "http.response.body":
            come += 1
            if come >= cut or not message.get("more_body"):
                gone.set()
        await asyncio.sleep(0)

    await server.app(scope("http", path, (b"content-type", b"application/json")), receive, send)


# Messages to a session, sent at once; each is answered, with events that end with what was read or
# with the session's turn, or with one error. Who leaves is noticed, and the session is idle then.


_OBSERVED: tuple[dict[str, Any], ...] = (
    {"content": "a door opens", "at": 1},
    {"content": [SHOWN, SHOWN], "at": 1.5, "fps": 2},
    {"content": [SHOWN], "at": 2, "skip_similar": 3},
    {"content": "it is red", "system": "be brief"},
)
_ASKED: tuple[dict[str, Any], ...] = (
    {"messages": SAID, "max_tokens": 2},
    {"messages": SAID, "max_tokens": 2, "stream_options": {"include_usage": True}},
    {"messages": [{"role": "user", "content": [SHOWN]}], "max_tokens": 2},
)


@st.composite
def _sent(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a message as a client sends it."""
    kind = draw(st.sampled_from(("observe", "observe", "ask")))
    body: Any = {"type": kind} | draw(st.sampled_from(_OBSERVED if kind == "observe" else _ASKED))
    if kind == "ask":
        body |= draw(options("chat")) | {"max_tokens": 2}
    if draw(st.booleans()):
        body = draw(edited(body))
        if isinstance(body, dict) and draw(st.integers(0, 4)):
            body["type"] = kind
    content = draw(json_files(st.just(body)))
    return (
        {"text": content.decode("utf-8", "replace")}
        if draw(st.integers(0, 19))
        else {"bytes": content}
    )


@examples(12)
@given(
    sent=st.lists(_sent(), min_size=1, max_size=6),
    leaves=st.sampled_from((None, None, None, 0, 1, 2, 5)),
)
def test_messages_of_a_websocket(
    server: Service, sent: list[dict[str, Any]], leaves: int | None
) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        name = (await client.post("/v1/sessions", json={})).json()["id"]
        try:
            await _connected(server, f"/v1/sessions/{name}/socket", sent, leaves)
            if (await client.get(f"/v1/sessions/{name}")).json()["busy"]:
                raise Wrong("a turn goes on without its client")
        finally:
            await cleaned(client, name)

    server.run(talk)


async def _connected(
    server: Service, path: str, sent: list[dict[str, Any]], leaves: int | None
) -> None:
    """Send messages, and read answers until all or ``leaves`` of them have come."""
    coming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    for one in ({"type": "websocket.connect"}, *({"type": "websocket.receive"} | m for m in sent)):
        coming.put_nowait(one)
    answers, left, wrong = 0, len(sent), list[str]()

    async def send(message: Any) -> None:  # what it raises would be answered as an error
        nonlocal answers, left
        if message["type"] == "websocket.send":
            made = json.loads(message["text"])
            error = made.get("error")
            if error is not None and (not error["message"] or "\n" in error["message"]):
                wrong.append(f"an error without a line: {made}")
            answers += 1
            ends = ("session.observation", "session.turn")
            left -= error is not None or made.get("object") in ends
        elif message["type"] != "websocket.accept":
            wrong.append(f"the server ends it: {message}")
        if answers == leaves or not left:
            coming.put_nowait({"type": "websocket.disconnect", "code": 1000})

    await server.app(scope("websocket", path), coming.get, send)
    if wrong:
        raise Wrong(wrong[0])
