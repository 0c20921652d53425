"""What clients, proxies and browsers ask of a server beside chats."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmkv import Engine
from mmkv.sampling import Sampler
from mmkv.scheduler import Scheduler
from mmkv.server.engine_thread import EngineThread, Request
from mmkv.server.work import ChatWork
from tests.support.chat_models import picture
from tests.support.servers import Server, SocketClient, asked, picture_part, serving, until

ORIGIN = "https://chat.example"
PART = picture_part(picture("red", (48, 40)))
URL: str = PART["image_url"]["url"]
PLAIN = URL.partition(",")[2]


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="streamingllm", budget=24, dtype="float32")


@pytest.fixture(scope="module")
def open_server(folder: Path) -> Iterator[Server]:
    with serving(lambda: load(folder), cors=(ORIGIN,), api_keys=("one", "two")) as made:
        yield made


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    whole = server.client.get(path)
    head = server.client.head(path)
    assert head.status_code == whole.status_code == 200 and head.content == b""
    assert head.headers["Content-Length"] == whole.headers["Content-Length"]
    assert server.client.head("/v1/chat/completions").status_code == 405


def preflight(server: Server, origin: str) -> httpx.Response:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-session-id",
    }
    return server.client.options("/v1/chat/completions", headers=headers)


def test_a_web_page_may_ask_where_its_origin_is_named(server: Server, open_server: Server) -> None:
    assert preflight(server, ORIGIN).status_code == 405
    assert "Access-Control-Allow-Origin" not in preflight(server, ORIGIN).headers
    answer = preflight(open_server, ORIGIN)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == ORIGIN
    allowed = answer.headers["Access-Control-Allow-Headers"].lower()
    assert "authorization" in allowed and "x-session-id" in allowed
    assert preflight(open_server, "https://evil.example").status_code == 400
    stranger = open_server.client.get("/v1/models", headers={"Origin": ORIGIN})
    assert stranger.status_code == 401, "the key is asked for all the same"
    assert stranger.headers["Access-Control-Allow-Origin"] == ORIGIN


def test_a_page_from_elsewhere_changes_nothing(server: Server) -> None:
    """By no route, though a browser asks nobody before it POSTs what a form could."""
    own = str(server.client.base_url).rstrip("/")
    paths = server.client.get("/openapi.json").json()["paths"]
    changing = [(m, path) for path, methods in paths.items() for m in methods if m != "get"]
    assert ("post", "/v1/sessions/{name}/fork") in changing and len(changing) > 12
    for method, path in changing:
        answer = server.client.request(method, path.format(name="none"), headers={"Origin": ORIGIN})
        assert answer.status_code == 403 and "origin" in answer.text, (method, path)
    for method in ("POST", "DELETE"):
        path = "/v1/sessions/none" + "/fork" * (method == "POST")
        for headers, refused in (
            ({"Origin": "null"}, True),
            ({"Origin": ORIGIN, "Content-Type": "text/plain"}, True),
            ({"Origin": own, "Sec-Fetch-Site": "cross-site"}, True),
            ({"Sec-Fetch-Site": "same-site"}, True),
            ({"Origin": own}, False),
            ({"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}, False),  # behind a proxy
            ({}, False),
        ):
            answer = server.client.request(method, path, headers=headers)
            assert (answer.status_code == 403) == refused, (method, path, headers)
            assert not refused or "origin" in answer.text


def test_a_page_that_is_named_changes_what_it_may(open_server: Server) -> None:
    headers = {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site", "Authorization": "Bearer one"}
    made = open_server.client.post("/v1/sessions", json={}, headers=headers)
    assert made.status_code == 200
    path = f"/v1/sessions/{made.json()['id']}"
    assert open_server.client.post(f"{path}/fork", headers=headers).status_code == 200
    assert open_server.client.delete(path, headers=headers).status_code == 200


def test_who_waits_for_a_reply_is_told_that_the_server_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each API's words, after the time that replies have to end."""
    turn = Scheduler.turn

    def slow(self: Any) -> Any:
        time.sleep(0.01)
        return turn(self)

    monkeypatch.setattr(Scheduler, "turn", slow)
    monkeypatch.setattr(Sampler, "draw", lambda *_: 70)  # without an end
    long: dict[str, Any] = {"model": "small", "stream": True}
    said = {"messages": [{"role": "user", "content": "q"}]}
    bodies = {
        "chat/completions": long | said | {"max_tokens": 400},
        "completions": long | {"prompt": "q", "max_tokens": 400},
        "messages": long | said | {"max_tokens": 400},
        "responses": long | {"input": "q", "max_output_tokens": 400},
        "chat/completions?whole": long | said | {"max_tokens": 400, "stream": False},
    }
    found: dict[str, Any] = {}
    with serving(lambda: load(folder), drain=0.3, max_running=8) as server:
        name = server.client.post("/v1/sessions", json={}).json()["id"]

        def ask(path: str) -> None:
            answer = server.client.post(f"/v1/{path}", json=bodies[path])
            lines = [one for one in answer.text.splitlines() if one.startswith("data: {")]
            found[path] = len(lines), json.loads(lines[-1][6:] if lines else answer.text)

        threads = [threading.Thread(target=ask, args=[path]) for path in bodies]
        for one in threads:
            one.start()
        with SocketClient(server, name) as client:
            client.send(type="ask", **said, max_tokens=400)
            assert "choices" in client.receive()
            until(lambda: server.inside(lambda core: len(core.scheduler.decoding)) == 6)
            server.web.should_exit = True
            while "error" not in (last := client.receive()):
                assert "choices" in last
            assert last["error"]["code"] == "shutdown" and client.receive() == {"closed": 1012}
        for one in threads:
            one.join(30)
    assert {path for path, (count, _) in found.items() if count > 1} == bodies.keys() - {
        "chat/completions?whole"
    }
    shown = {path: last for path, (_, last) in found.items()}
    for path in ("chat/completions", "completions", "chat/completions?whole"):
        assert shown[path]["error"]["code"] == "shutdown", path
    assert shown["messages"]["error"]["type"] == "overloaded_error"
    failed = shown["responses"]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert "shutting down" in failed["response"]["error"]["message"]


def test_metrics_tell_nothing_to_strangers(folder: Path, open_server: Server) -> None:
    client = open_server.client
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer one"}).status_code == 200
    with serving(lambda: load(folder), api_keys=("one",), open_metrics=True) as made:
        assert made.client.get("/metrics").status_code == 200
        assert made.client.get("/v1/models").status_code == 401


def test_a_request_has_as_many_replies_as_the_server_allows(folder: Path) -> None:
    with serving(lambda: load(folder), max_choices=2) as server:
        assert server.chat("what?", n=2).status_code == 200
        assert server.chat("what?", n=3).json()["error"]["param"] == "n"


@pytest.mark.parametrize("asks", [True, False])
def test_pieces_of_a_stream_have_the_usage_that_was_asked_for(server: Server, asks: bool) -> None:
    """OpenAI: all other chunks will also include a usage field, but with a null value."""
    answer = server.chat("what?", stream=True, stream_options={"include_usage": asks})
    pieces = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line[:7] == "data: {"]
    assert len(pieces) > 2
    if not asks:
        assert not any("usage" in one for one in pieces)
        return
    assert [one["usage"] for one in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1]["usage"]["total_tokens"] > 0 and pieces[-1]["choices"] == []


def test_a_user_of_another_key_is_another_user(
    open_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns are taken by key and ``user``: one name under two keys has two."""
    users, submit = [], EngineThread.submit

    async def noted(self: EngineThread, work: ChatWork, user: str) -> Request:
        users.append(user)
        return await submit(self, work, user)

    monkeypatch.setattr(EngineThread, "submit", noted)
    for key, user in (("one", "ann"), ("two", "ann"), ("one", "bob"), ("one", "ann")):
        headers = {"Authorization": f"Bearer {key}"}
        body = asked("what?", user=user, max_tokens=1)
        answer = open_server.client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200
    assert len(set(users[:3])) == 3 and users[3] == users[0]


def shown(server: Server, url: str) -> httpx.Response:
    part = {"type": "image_url", "image_url": {"url": url}}
    return server.chat({"role": "user", "content": [part, {"type": "text", "text": "what?"}]})


@pytest.mark.parametrize(
    "url",
    [
        f"DATA:image/png;base64,{PLAIN}",
        f"data:image/png;BASE64,{PLAIN}",
        f"Data:;Base64,{PLAIN.rstrip('=')}",
        f"data:image/png;base64,{PLAIN.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{PLAIN[:40]}\n{PLAIN[40:]}",
        "data:image/png," + "".join(f"%{byte:02x}" for byte in base64.b64decode(PLAIN)),
    ],
)
def test_a_picture_is_read_however_its_url_is_spelled(server: Server, url: str) -> None:
    wanted, answer = shown(server, URL), shown(server, url)
    assert answer.status_code == 200, answer.text
    one, two = wanted.json(), answer.json()
    assert one["choices"] == two["choices"]
    assert one["usage"]["prompt_tokens"] == two["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (PLAIN, "put data:image/png;base64, "),
        (base64.b64encode(bytes(range(256)) * 50).decode(), "put data:image/png;base64, "),
        (f"image/png;base64,{PLAIN}", "put data: before it"),
        (f"data:image/png;base64{PLAIN}", "comma"),
        (f"data:image/png;base64,{PLAIN[:60]}!{PLAIN[60:]}", "not valid base64"),
        (f"data:image/png;base64,{PLAIN[:61]}", ""),
    ],
)
def test_what_a_url_lacks_is_told_without_the_picture(server: Server, url: str, says: str) -> None:
    answer = shown(server, url)
    assert answer.status_code in (400, 422)
    assert says in answer.json()["error"]["message"]
    assert PLAIN[20:40] not in answer.text


def test_what_kind_of_body_is_wanted_is_told(server: Server) -> None:
    text = json.dumps(asked("gr\u00fc\u00df dich"), ensure_ascii=False)
    kind = {"Content-Type": "application/json"}
    for headers, content, says in (
        ({}, text.encode(), "Content-Type: application/json"),
        (kind | {"Content-Encoding": "gzip"}, b"\x1f\x8b\x08", "without Content-Encoding"),
        (kind, text.encode("latin-1"), "not in UTF-8"),
        (kind, text.encode("utf-16"), "not in UTF-8"),
    ):
        given: dict[str, Any] = {"content": content, "headers": headers}
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/sessions"):
            answer = server.client.post(path, **given)
            assert answer.status_code in (400, 415) and says in answer.json()["error"]["message"]
    assert server.client.post(
        "/v1/chat/completions", content=text.encode(), headers=kind
    ).is_success
