"""Turns in the background: they go on without a client, and end where one wants."""

from __future__ import annotations

import asyncio
import base64
import contextvars
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmkv import Engine
from mmkv.server.errors import ApiError
from mmkv.server.guard import LimitBody, keep_body, release_body
from mmkv.server.schema import ChatRequest
from mmkv.server.state import Caller, release
from mmkv.server.store import SessionRecord, SessionStore
from mmkv.server.turns import ServerSession, SessionTurn
from tests.support.chat_models import picture
from tests.support.servers import (
    Server,
    asked,
    paused_in_a_reply,
    picture_part,
    serving,
    stopped,
    until,
)


def load(folder: Path) -> Engine:
    options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
    return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder)) as made:
        yield made


def turn(*messages: Any, **more: Any) -> dict[str, Any]:
    body = asked(*messages, stream=True, stream_options={"include_usage": True}, **more)
    return body | {"mmkv": {"background": True}}


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.read()
    lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" or "error" in lines[-1]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said(found: list[dict[str, Any]]) -> str:
    return "".join(one["choices"][0]["delta"].get("content", "") for one in found if one["choices"])


def begin(server: Server, path: str, body: dict[str, Any]) -> None:
    """Send a turn and leave once the reply has begun."""
    with server.client.stream("POST", f"{path}/chat/completions", json=body) as answer:
        assert answer.status_code == 200, answer.read()
        next(answer.iter_lines())


def opened(server: Server, **fields: Any) -> str:
    return f"/v1/sessions/{server.client.post('/v1/sessions', json=fields).json()['id']}"


def messages(server: Server, path: str) -> list[dict[str, Any]]:
    return server.client.get(f"{path}/messages").json()["data"]


def test_a_turn_goes_on_when_its_client_leaves_and_can_be_rejoined(server: Server) -> None:
    path, alone = opened(server), opened(server)
    body = turn("what is red?", max_tokens=24)
    plain = asked("what is red?", max_tokens=24)
    wanted = server.client.post(f"{alone}/chat/completions", json=plain).json()["choices"][0]
    with paused_in_a_reply(server) as reached:
        begin(server, path, body)
        assert reached.wait(60)
        assert server.client.get(path).json()["busy"]
        again = server.client.post(f"{path}/chat/completions", json=body)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "session_busy")
        rejoined = server.client.stream("GET", f"{path}/turn")
        answer = rejoined.__enter__()
    found = events(answer)
    rejoined.__exit__(None, None, None)
    assert found[0]["mmkv"]["asked"] == [
        {"role": "user", "content": [{"type": "text", "text": "what is red?"}]}
    ]
    assert said(found) == wanted["message"]["content"]
    # What the memory holds is told while the reply grows.
    (held, *_) = [one["mmkv"]["memory"] for one in found if "memory" in one.get("mmkv", {})]
    assert 0 < held["entries"] <= held["most_entries"]
    assert [len(one["media"]) for one in held["kept_by_message"]] == [0, 0]
    assert found[-2]["choices"][0]["finish_reason"] == wanted["finish_reason"] == "length"
    assert found[-1]["usage"]["completion_tokens"] == 24
    assert found[-1]["mmkv"]["seconds"] > 0
    assert [one["role"] for one in messages(server, path)] == ["user", "assistant"]
    gone = server.client.get(f"{path}/turn")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "no_turn")


def test_a_turn_that_is_stopped_keeps_what_came(server: Server) -> None:
    path = opened(server)
    with paused_in_a_reply(server) as reached:
        begin(server, path, turn("a long one", max_tokens=200))
        assert reached.wait(60)
        answers: list[httpx.Response] = []

        def end() -> None:
            answers.append(server.client.delete(f"{path}/turn"))

        stop = threading.Thread(target=end)
        stop.start()
        until(lambda: not server.state.engine_thread._commands.empty())
    stop.join()
    assert answers[0].json()["kept"] is True
    first, second = messages(server, path)
    assert first["role"] == "user" and second["role"] == "assistant"
    record = server.client.get(path).json()
    assert (record["turns"], record["busy"], record["failed"]) == (1, False, False)
    # It can go on from there.
    more = server.client.post(f"{path}/chat/completions", json=asked("and then?"))
    assert more.json()["usage"]["mmkv"]["resumed"] > 0


def test_a_turn_that_is_stopped_before_its_reply_is_taken_back(server: Server) -> None:
    path, answers = opened(server), []

    def send() -> None:
        answers.append(server.client.post(f"{path}/chat/completions", json=turn("what?")))

    sending = threading.Thread(target=send)
    with stopped(server):
        sending.start()
        until(lambda: server.client.get(path).json()["busy"])
        assert server.client.delete(f"{path}/turn").json()["kept"] is False
    sending.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "turn_stopped")
    record = server.client.get(path).json()
    assert (record["turns"], record["busy"], record["failed"]) == (0, False, False)


def test_a_turn_from_a_state_that_is_past_is_refused(server: Server) -> None:
    """Two are asked for at once; the first is over before the second begins."""
    session = ServerSession("s", "", server.state.facts.budget, {})
    request = [ChatRequest.model_validate(asked("hello")) for _ in range(2)]

    async def commit(*_: Any) -> None:
        pass

    async def both() -> None:
        given = server.state, commit, lambda _: None, session
        first, second = (SessionTurn(*given, one, Caller("", "")) for one in request)
        await first.whole()
        with pytest.raises(ApiError) as error:
            await second.whole()
        assert (error.value.status, error.value.code, session.turns) == (409, "conflict", 1)

    asyncio.run(both())
    assert session.conversation is not None
    release(server.state, session.conversation)


def test_the_body_of_a_turn_that_goes_on_counts_until_it_is_read() -> None:
    contexts: list[contextvars.Context] = []

    async def keeping(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        keep_body()
        contexts.append(contextvars.copy_context())

    limit = LimitBody(keeping, most=1000, seconds=5)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b'"12345"'}

    async def send(_: Any) -> None:
        raise AssertionError("nothing is answered here")

    asyncio.run(limit(scope, receive, send))
    assert limit.room.bytes == 7
    for _ in range(2):
        contexts[0].run(release_body)
        assert limit.room.bytes == 0


def test_pictures_can_be_asked_for_again_until_their_session_goes(server: Server) -> None:
    red = picture_part(picture("red", (48, 40)))
    content = base64.b64decode(red["image_url"]["url"].partition(",")[2])
    digest = hashlib.sha256(content).hexdigest()
    path = opened(server)
    question = {"role": "user", "content": [red, {"type": "text", "text": "what?"}]}
    with server.client.stream("POST", f"{path}/chat/completions", json=turn(question)) as answer:
        events(answer)
    shown = messages(server, path)[0]["content"]
    assert shown == [{"type": "image", "digest": digest}, {"type": "text", "text": "what?"}]
    named = {"metadata": {"title": "another"}}
    forked = server.client.post(f"{path}/fork", json=named).json()
    assert forked["metadata"] == named["metadata"]
    fork = f"/v1/sessions/{forked['id']}"
    other = opened(server)
    for place, status in ((path, 200), (fork, 200), (other, 404)):
        found = server.client.get(f"{place}/media/{digest}")
        assert found.status_code == status
    found = server.client.get(f"{fork}/media/{digest}")
    assert (found.content, found.headers["Content-Type"]) == (content, "image/png")
    assert found.headers["Content-Security-Policy"] == "default-src 'none'; sandbox"
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    assert found.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert found.headers["Cache-Control"] == "no-store"
    memory = server.client.get(f"{fork}/memory").json()
    kept = memory["kept_by_message"]
    assert [len(one["media"]) for one in kept] == [1, 0]
    assert kept[0]["media"] == memory["pictures"]
    # Each entry is of one message: the shares add up to what is held.
    assert 0 < memory["entries"] <= memory["most_entries"]
    server.client.delete(path)
    assert server.client.get(f"{fork}/media/{digest}").status_code == 200
    server.client.delete(fork)
    folder = server.inside(lambda core: core.folder.path / ".media")
    assert list(folder.iterdir()) == []


def test_pictures_of_turns_that_fail_or_are_stopped_go_with_them(server: Server) -> None:
    """Those of other sessions stay, and a failed turn's until the next one."""

    def question(*parts: dict[str, Any]) -> dict[str, Any]:
        return {"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]}

    def send(path: str, body: dict[str, Any]) -> None:
        answers[path] = server.client.post(f"{path}/chat/completions", json=body)

    red = picture_part(picture("red", (48, 40)))
    digest = hashlib.sha256(base64.b64decode(red["image_url"]["url"].split(",")[1])).hexdigest()
    mine, other = opened(server), opened(server)
    answers: dict[str, httpx.Response] = {}
    folder = server.inside(lambda core: core.folder.path / ".media")
    with stopped(server):
        for path in (mine, other):
            alone = [picture_part(picture("blue", (48, 40)))] if path == mine else []
            body = turn(question(red, *alone), max_tokens=2)
            threading.Thread(target=send, args=(path, body)).start()
            until(lambda path=path: server.client.get(path).json()["busy"])
            until(lambda path=path: server.client.get(f"{path}/media/{digest}").status_code == 200)
        assert server.client.delete(f"{mine}/turn").json()["kept"] is False
    until(lambda: len(answers) == 2)
    assert [answers[path].status_code for path in (mine, other)] == [409, 200]
    assert server.client.get(f"{mine}/media/{digest}").status_code == 404
    assert server.client.get(f"{other}/media/{digest}").status_code == 200
    assert [path.name[-64:] for path in folder.iterdir()] == [digest]
    server.client.delete(other)
    assert list(folder.iterdir()) == []
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    with server.client.stream(
        "POST", f"{mine}/chat/completions", json=turn(question(broken))
    ) as it:
        assert it.status_code == 422
    assert not server.client.get(mine).json()["failed"]
    assert server.client.get(f"{mine}/turn").status_code == 404
    refused = hashlib.sha256(b"hello").hexdigest()
    assert server.client.get(f"{mine}/media/{refused}").content == b"hello"
    send(mine, turn("and now?", max_tokens=2))
    assert answers[mine].status_code == 200
    assert list(folder.iterdir()) == []


def test_the_shares_of_messages_add_up_to_the_entries_that_are_held(server: Server) -> None:
    path = opened(server)
    for text in ("one " * 20, "two " * 20):
        server.client.post(f"{path}/chat/completions", json=asked(text))
    memory = server.client.get(f"{path}/memory").json()
    rows = (memory["entries"] + memory["evicted"]) / memory["tokens_seen"]
    (spans,) = server.inside(
        lambda core: [
            one.info.spans
            for one in core.scheduler.sessions
            if sum(one.info.seen) == memory["tokens_seen"]
        ]
    )
    assert spans[0][0] == 0 and spans[-1][1] == memory["tokens_seen"]
    assert all(one[1] == other[0] for one, other in itertools.pairwise(spans))
    held = sum(
        one["kept"] * (stop - start) * rows
        for one, (start, stop) in zip(memory["kept_by_message"], spans, strict=True)
    )
    assert round(held) == memory["entries"]


def test_an_edited_message_goes_on_from_what_an_earlier_turn_left(server: Server) -> None:
    path = opened(server)
    texts = ["one " * 40, "two " * 40, "three"]
    for text in texts:
        with server.client.stream("POST", f"{path}/chat/completions", json=turn(text)) as answer:
            events(answer)
    whole = messages(server, path)
    other = opened(server)
    edited = [*whole[:4], {"role": "user", "content": "another third"}]
    with server.client.stream("POST", f"{other}/chat/completions", json=turn(*edited)) as answer:
        usage = events(answer)[-1]["usage"]
    assert usage["mmkv"]["resumed"] > usage["prompt_tokens"] * 0.8
    assert len(messages(server, other)) == 6 and len(messages(server, path)) == 6


def test_what_a_turn_in_the_background_cannot_be(server: Server) -> None:
    path = opened(server)
    for where, body in (
        (path, asked("a") | {"mmkv": {"background": True}}),
        ("/v1", turn("a")),
    ):
        answer = server.client.post(f"{where}/chat/completions", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "mmkv.background"
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    question = {"role": "user", "content": [broken, {"type": "text", "text": "what?"}]}
    answer = server.client.post(f"{path}/chat/completions", json=turn(question))
    assert answer.status_code == 422
    record = server.client.get(path).json()
    assert (record["turns"], record["busy"], record["failed"]) == (0, False, False)


def test_a_browser_without_a_key_has_sessions_of_its_own(server: Server) -> None:
    def ids(browser: str | None) -> set[str]:
        headers = {} if browser is None else {"X-Mmkv-Browser": browser}
        data = server.client.get("/v1/sessions", headers=headers).json()["data"]
        return {one["id"] for one in data}

    mine, yours = "a" * 32, "b" * 32
    made = server.client.post("/v1/sessions", json={}, headers={"X-Mmkv-Browser": mine}).json()
    assert made["id"] in ids(mine)
    assert made["id"] not in ids(yours) | ids(None)
    for what in ("", "/messages", "/memory", "/turn"):
        stranger = server.client.get(f"/v1/sessions/{made['id']}{what}")
        assert stranger.status_code == 404
    for wrong in ("short", "a" * 129, "a" * 31 + "/", "é" * 40):
        headers = {"X-Mmkv-Browser": wrong.encode()}
        answer = server.client.get("/v1/sessions", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_a_key_decides_whatever_browser_is_named(folder: Path) -> None:
    with serving(lambda: load(folder), api_keys=("one",)) as made:
        headers = {"Authorization": "Bearer one"}
        first = made.client.post(
            "/v1/sessions", json={}, headers=headers | {"X-Mmkv-Browser": "a" * 32}
        ).json()
        data = made.client.get("/v1/sessions", headers=headers).json()["data"]
        assert [one["id"] for one in data] == [first["id"]]
        assert (
            made.client.get("/v1/sessions", headers={"X-Mmkv-Browser": "a" * 32}).status_code == 401
        )
        # What is under way when the server ends leaves nothing behind.
        made.client.headers.update(headers)
        begin(made, f"/v1/sessions/{first['id']}", turn("a long one", max_tokens=1500))


def test_pictures_outlast_the_server_with_their_sessions(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"session_folder": tmp_path, "keep_sessions": True}
    red = picture_part(picture("red", (48, 40)))
    question = {"role": "user", "content": [red, {"type": "text", "text": "what?"}]}
    with serving(lambda: load(folder), **settings) as made:
        path = opened(made)
        with made.client.stream("POST", f"{path}/chat/completions", json=turn(question)) as answer:
            events(answer)
        kept = made.client.get(f"{path}/memory").json()["kept_by_message"]
        fork = f"/v1/sessions/{made.client.post(f'{path}/fork').json()['id']}"
    with serving(lambda: load(folder), **settings) as made:
        digest = messages(made, path)[0]["content"][0]["digest"]
        found = made.client.get(f"{path}/media/{digest}")
        assert hashlib.sha256(found.content).hexdigest() == digest
        assert made.client.get(f"{path}/memory").json()["kept_by_message"] == kept
        made.client.delete(path)  # its fork, which is not open, has the picture, too
        assert made.client.get(f"{fork}/media/{digest}").status_code == 200
        made.client.delete(fork)
        # A stop that comes while the turn is written takes nothing back.
        writes, go_on, commit = threading.Event(), threading.Event(), SessionStore.commit

        def slow(store: SessionStore, tenant: str, record: SessionRecord) -> SessionRecord:
            if record.turns:
                writes.set()
                assert go_on.wait(60)
            return commit(store, tenant, record)

        monkeypatch.setattr(SessionStore, "commit", slow)
        path = opened(made)
        begin(made, path, turn("what?", max_tokens=4))
        assert writes.wait(60)
        with ThreadPoolExecutor(1) as other:
            ended = other.submit(made.client.delete, f"{path}/turn")
            time.sleep(0.2)  # the stop waits for the write by then
            go_on.set()
            assert ended.result(60).json()["kept"] is True
        assert [one["role"] for one in messages(made, path)] == ["user", "assistant"]
    assert list((tmp_path / ".media").iterdir()) == []
