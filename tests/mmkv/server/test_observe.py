"""What a session observes over HTTP: frames and texts that are read without a reply."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wsproto.events
from PIL import Image

from mmkv import Engine, Sampling, Session
from tests.support.chat_models import picture
from tests.support.servers import (
    Server,
    SocketClient,
    asked,
    paused_in_a_reply,
    picture_part,
    serving,
    until,
)

FEW = {"max_tokens": 8, "temperature": 0}
RED, BLUE = picture("red", (64, 32)), picture("blue", (64, 32))
# More than a still picture keeps of its pixels, and than a frame of a video does.
LARGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8))


def load(folder: Path) -> Engine:
    options = {"policy": "full", "dtype": "float32", "kv_limit": 2**24}
    return Engine.from_pretrained(folder, max_pixels=RED.width * RED.height, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def server(folder: Path, saved: Path) -> Iterator[Server]:
    with serving(lambda: load(folder), session_folder=saved, max_sessions=8) as made:
        yield made


def created(server: Server, **fields: Any) -> str:
    answer = server.client.post("/v1/sessions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def observe(server: Server, name: str, *content: Any, **fields: Any) -> dict[str, Any]:
    given = content[0] if isinstance(content[0], str) else list(content)
    answer = server.client.post(f"/v1/sessions/{name}/observe", json={"content": given} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: Server, name: str, *messages: Any) -> dict[str, Any]:
    body = asked(*messages, max_tokens=8, logprobs=True)
    answer = server.client.post(f"/v1/sessions/{name}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_session_over_http_reads_what_one_in_python_reads(
    server: Server, folder: Path, saved: Path
) -> None:
    """Before a reply and after one; a file in between is a session of Python's, too."""
    engine = load(folder)
    name = created(server)
    with engine.session() as session:
        for turn in range(2):
            for what, at in ((RED, 1.5), ("a door opens", 2), (LARGE, 3)):
                given = what if isinstance(what, str) else picture_part(what)
                ours = observe(server, name, given, at=at)
                same = session.observe(what, at=at)
                assert (ours["tokens"], ours["next_position"]) == (
                    same.tokens,
                    same.next_position,
                )
                assert (ours["frames"], ours["notes"]) == (same.frames, same.notes)
            saving = {"name": "a", "overwrite": True}
            assert server.client.post(f"/v1/sessions/{name}/save", json=saving).status_code == 200
            (path,) = saved.rglob("a.mmkv")
            with Session.load(engine, path) as loaded:
                assert (loaded.history, loaded.seen) == (session.history, session.seen)
            again = created(server, file="a")
            answers = [ask(server, one, "what?") for one in (name, again)]
            list(session.send("what?", sampling=Sampling.greedy(max_new_tokens=8)))
            assert session.last is not None
            for answer in answers:
                assert answer["choices"][0]["message"]["content"] == session.last.text
                read = answer["usage"]["prompt_tokens"]
                assert read == session.seen + len(session.unfed) - len(session.last.token_ids)
                assert answer["session"]["turns"] == (turn + 1 if answer is answers[0] else 1)
            server.client.delete(f"/v1/sessions/{again}")
    shown = server.client.get(f"/v1/sessions/{name}/messages").json()["data"]
    assert [one["role"] for one in shown] == [*["user"] * 4, "assistant"] * 2
    memory = server.client.get(f"/v1/sessions/{name}/memory").json()
    assert [one["kept"] for one in memory["kept_by_message"]] == [1.0] * 10


def test_near_duplicates_are_counted_and_a_refused_one_changes_nothing(server: Server) -> None:
    name = created(server)
    first = observe(server, name, picture_part(RED), picture_part(RED), at=0, skip_similar=2)
    assert (first["frames"], first["skipped"]) == (1, 1)
    again = observe(server, name, picture_part(RED), at=1, skip_similar=2)
    assert (again["tokens"], again["frames"], again["frames_skipped"]) == (0, 0, 2)
    # A fork counts for itself, and a file has the count of the session that was saved.
    fork = server.client.post(f"/v1/sessions/{name}/fork").json()["id"]
    counts = []
    for one in (fork, fork, name):
        seen = observe(server, one, picture_part(RED), at=1, skip_similar=2)
        counts.append(seen["frames_skipped"])
    assert counts == [3, 4, 3]
    saving = {"name": "forked", "overwrite": True}
    assert server.client.post(f"/v1/sessions/{fork}/save", json=saving).status_code == 200
    loaded = created(server, file="forked")
    seen = observe(server, loaded, picture_part(RED), at=1, skip_similar=2)
    assert seen["frames_skipped"] == 5
    for one in (fork, loaded):
        server.client.delete(f"/v1/sessions/{one}")
    text = {"type": "text", "text": "still red"}
    behind = observe(server, name, picture_part(RED), text, at=2, skip_similar=2)
    assert behind["tokens"] == observe(server, name, text)["tokens"] > 0  # the frame has the time
    seen = observe(server, name, picture_part(RED), at=2, skip_similar=2)
    assert (seen["frames_skipped"], seen["skipped"]) == (5, 1)
    before = server.client.get(f"/v1/sessions/{name}/memory").json()
    film = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    inside = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
    sized = {"type": "image_url", "image_url": {"url": "data:,a", "max_pixels": 99}}
    for status, body in [
        (400, {"content": [film]}),
        (422, {"content": [broken]}),
        (400, {"content": [sized], "at": 1}),
        (400, {"content": " "}),
        (400, {"content": "a", "at": -1}),
        (400, {"content": "a", "fps": 1}),
        (400, {"content": "a", "system": "be kind"}),
        (400, {"content": "a", "other": 1}),
        (403, {"content": [inside]}),
    ]:
        answer = server.client.post(f"/v1/sessions/{name}/observe", json=body)
        assert answer.status_code == status, (body, answer.text)
        assert "\n" not in answer.json()["error"]["message"]
    after = server.client.get(f"/v1/sessions/{name}/memory").json()
    assert after == before
    missing = server.client.post("/v1/sessions/none/observe", json={"content": "a"})
    assert missing.status_code == 404


def test_a_websocket_observes_and_asks_as_the_routes_do(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = created(server), created(server)
    with SocketClient(server, one) as client:
        for what in ([picture_part(RED)], "a door opens"):
            client.send(type="observe", content=what, at=1)
            ours = client.receive()
            theirs = observe(server, other, *([what] if isinstance(what, str) else what), at=1)
            for name in ("id", "session"):
                del ours[name], theirs[name]
            assert ours == theirs
        said, counted = "", {"stream_options": {"include_usage": True}}
        client.send(type="ask", messages=[{"role": "user", "content": "what?"}], **FEW, **counted)
        while (event := client.receive())["object"] != "session.turn":
            said += "".join(one["delta"].get("content") or "" for one in event["choices"])
            usage = event.get("usage")
        assert usage["completion_tokens"] > 0
        assert event["session"]["turns"] == 1 and event["ignored"] is None
        assert said == ask(server, other, "what?")["choices"][0]["message"]["content"]
        # Each is one message, and the socket stays open.
        before = server.client.get(f"/v1/sessions/{one}/memory").json()
        inside = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/a.png"}}
        for fields, code in [
            ({"type": "look"}, "invalid_request"),
            ({"type": "observe"}, "invalid_request"),
            ({"type": "observe", "content": "a", "b": 1}, "invalid_request"),
            ({"type": "observe", "content": [inside]}, "url_not_allowed"),
            ({"type": "observe", "content": "a", "at": [[]] * 2**15}, "too_many_values"),
            ({"type": "ask", "model": "none", "messages": []}, "invalid_request"),
            (
                {"type": "ask", "stream": False, "messages": [{"role": "user", "content": "a"}]},
                "invalid_value",
            ),
        ]:
            client.send(**fields)
            error = client.receive()["error"]
            assert error["code"] == code or code == "url_not_allowed", error
            assert "\n" not in error["message"]
            assert (error["param"] == "type") is (fields["type"] == "look")
        client.write(wsproto.events.TextMessage("[" * 20_000))
        assert client.receive()["error"]["code"] == "invalid_request"
        client.write(wsproto.events.BytesMessage(b"{}"))
        assert client.receive()["error"]["code"] == "invalid_request"
        assert server.client.get(f"/v1/sessions/{one}/memory").json() == before
        with monkeypatch.context() as patch:
            patch.setattr("mmkv.server.websocket.SessionObservation", lambda *_: 1 // 0)
            client.send(type="observe", content="a")
            assert client.receive()["error"]["code"] == "internal"
        assert "ZeroDivisionError" in caplog.text
        server.client.delete(f"/v1/sessions/{one}")
        client.send(type="observe", content="a")
        assert client.receive()["error"]["code"] == "session_not_found"


def test_a_client_that_leaves_its_websocket_takes_its_turn_along(server: Server) -> None:
    name = created(server)
    observe(server, name, "a")
    with paused_in_a_reply(server) as reached:
        with SocketClient(server, name) as client:
            client.send(type="ask", messages=[{"role": "user", "content": "what?"}], **FEW)
            until(lambda: server.client.get(f"/v1/sessions/{name}").json()["busy"])
            blocked = server.client.post(f"/v1/sessions/{name}/observe", json={"content": "b"})
            assert blocked.json()["error"]["code"] == "session_busy"
            assert reached.wait(60)
            for _ in range(5):  # none of which is read before the reply is over
                client.send(type="observe", content="c")
        # Before the thread goes on with the few tokens that are left of the reply.
        (request,) = server.state.engine_thread._requests
        until(lambda: request.ticket is not None and request.ticket.cancel_asked)
    until(lambda: not server.client.get(f"/v1/sessions/{name}").json()["busy"])
    shown = server.client.get(f"/v1/sessions/{name}").json()
    assert (shown["turns"], shown["messages"]) == (0, 1)


def test_a_websocket_is_guarded_as_the_routes_are(server: Server, folder: Path) -> None:
    name = created(server)
    assert SocketClient(server, "none").rejected == 404
    assert SocketClient(server, name, Origin="http://elsewhere.example").rejected == 403
    own = str(server.client.base_url).rstrip("/")
    with SocketClient(server, name, Origin=own), SocketClient(server, name):
        pass
    limits = {"api_keys": ("a" * 20,), "body": 2**16, "body_seconds": 0.5, "connections": 8}
    with serving(lambda: load(folder), **limits) as guarded:
        bearer = {"Authorization": "Bearer " + "a" * 20}
        guarded.client.headers.update(bearer)
        name = created(guarded)
        assert SocketClient(guarded, name).rejected == 401
        assert SocketClient(guarded, name, Authorization="Bearer b").rejected == 401
        with SocketClient(guarded, name, **bearer) as client:
            client.send(type="observe", content="a" * 2**16)
            assert client.receive() == {"closed": 1009}
        with SocketClient(guarded, name, **bearer) as client:  # half a message
            client.write(wsproto.events.TextMessage('{"type"', message_finished=False))
            assert client.receive() == {"closed": 1008}
        with SocketClient(guarded, name, **bearer) as client:
            pings = b"".join([client._events.send(wsproto.events.TextMessage("{}"))] * 64)
            client.socket.sendall(pings)
            while "closed" not in (last := client.receive()):
                assert last["error"]["code"] == "invalid_request"
            assert last == {"closed": 1008}
        until(lambda: guarded.state.bodies.bytes == guarded.state.bodies.values == 0)
        # Idle ones make way for others, as connections do.
        held = [SocketClient(guarded, name, **bearer) for _ in range(9)]
        assert [one.rejected for one in held] == [None] * 9
        until(lambda: len(guarded.web.guard.open) <= 8)
        for one in held:
            one.socket.close()
