"""What one key made is nothing to another: every route that takes a name, and every list."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mmkv import Engine
from tests.support.chat_models import picture, save_qwen3_vl
from tests.support.servers import MODEL, Server, asked, picture_part, serving

KEYS = ("first-key", "second-key")
SECRET = "the word is periwinkle"
SCENE = picture_part(picture("red", (48, 40)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


def load(folder: Path) -> Engine:
    return Engine.from_pretrained(folder, policy="streamingllm", budget=64, dtype="float32")


@pytest.fixture(scope="module", params=[False, True], ids=["in memory", "lasting"])
def server(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Server]:
    saved = tmp_path_factory.mktemp("saved")
    options: dict[str, Any] = {"session_folder": saved, "keep_sessions": request.param}
    with serving(lambda: load(folder), api_keys=KEYS, **options) as made:
        yield made


@contextmanager
def asking(server: Server, key: str) -> Iterator[httpx.Client]:
    before, server.client.headers = server.client.headers, {"Authorization": f"Bearer {key}"}
    try:
        yield server.client
    finally:
        server.client.headers = before


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def make_all(client: httpx.Client) -> dict[str, str]:
    """Make one of each thing that stays; the names by the path that lists or holds them."""
    session = ok(client.post("/v1/sessions", json={}))["id"]
    ok(client.post(f"/v1/sessions/{session}/chat/completions", json=asked(SECRET)))
    ok(client.post(f"/v1/sessions/{session}/save", json={"name": "notes"}))
    question = [SCENE, {"type": "text", "text": SECRET}]
    shown = {"role": "user", "content": [{"type": "input_text", "text": SECRET}]}
    stored = ok(client.post("/v1/responses", json={"model": MODEL, "input": [shown]}))["id"]
    ok(client.post("/v1/chat/completions", json=asked({"role": "user", "content": question})))
    return {"sessions": session, "saved_sessions": "notes", "responses": stored}


def state(client: httpx.Client, names: dict[str, str]) -> list[Any]:
    """Return all that a key sees of its own."""
    session, response = names["sessions"], names["responses"]
    paths = ["sessions", "saved_sessions", f"sessions/{session}", f"sessions/{session}/messages"]
    paths += [f"sessions/{session}/memory", f"responses/{response}"]
    return [ok(client.get(f"/v1/{p}")) for p in [*paths, f"responses/{response}/input_items"]]


def test_no_route_reaches_what_another_key_made(server: Server) -> None:
    with asking(server, KEYS[0]) as client:
        names = make_all(client)
        before = state(client, names)
        assert SECRET in json.dumps(before)
    with asking(server, KEYS[1]) as client:
        for kind in ("sessions", "saved_sessions"):
            assert ok(client.get(f"/v1/{kind}"))["data"] == []
        routes = ok(client.get("/openapi.json"))["paths"]
        tried = []
        for path, operations in routes.items():
            kind = path.removeprefix("/v1/").partition("/")[0]
            if "{" not in path or kind == "models":
                continue
            there = path[: path.index("{")] + names[kind] + path[path.index("}") + 1 :]
            for method in operations:
                body = asked("tell me") if path.endswith("completions") else {"name": "notes"}
                given = {"json": body} if method == "post" else {}
                answer = client.request(method, there, **given)
                assert answer.status_code == 404, (method, path, answer.text)
                assert "periwinkle" not in answer.text
                # As if it had never been.
                never = there.replace(names[kind], names[kind][:-2] + "zz")
                other = client.request(method, never, **given)
                assert other.status_code == 404
                names_it = names[kind][:-2] + "zz"
                assert other.text.replace(names_it, names[kind]) == answer.text
                tried.append((method, path))
        assert len(tried) >= 11, tried  # sessions have eight, responses three, saved ones one
        assert client.post("/v1/sessions", json={"file": "notes"}).status_code == 404
        going_on = {"model": MODEL, "input": "go on", "previous_response_id": names["responses"]}
        answer = client.post("/v1/responses", json=going_on)
        assert answer.json()["error"]["code"] == "previous_response_not_found", answer.text
        question = {"role": "user", "content": [SCENE, {"type": "text", "text": SECRET}]}
        for message in (question, SECRET):
            used = ok(client.post("/v1/chat/completions", json=asked(message)))["usage"]
            assert used["mmkv"]["resumed"] == 0
    with asking(server, KEYS[0]) as client:
        assert state(client, names) == before
        ok(client.delete(f"/v1/sessions/{names['sessions']}"))


def test_the_same_names_of_two_keys_are_two_things(server: Server) -> None:
    """A saved session of each under one name; that of one goes, the other's stays."""
    texts = ("alpha alpha", "beta")
    sizes = []
    for key, text in zip(KEYS, texts, strict=True):
        with asking(server, key) as client:
            session = ok(client.post("/v1/sessions", json={}))["id"]
            ok(client.post(f"/v1/sessions/{session}/chat/completions", json=asked(text)))
            ok(client.post(f"/v1/sessions/{session}/save", json={"name": "same"}))
            ok(client.delete(f"/v1/sessions/{session}"))
            sizes.append(len(ok(client.get("/v1/saved_sessions"))["data"]))
    for key, text in zip(KEYS, texts, strict=True):
        with asking(server, key) as client:
            session = ok(client.post("/v1/sessions", json={"file": "same"}))["id"]
            said = json.dumps(ok(client.get(f"/v1/sessions/{session}/messages")))
            assert text in said and not any(t in said for t in texts if t != text)
            ok(client.delete(f"/v1/sessions/{session}"))
    with asking(server, KEYS[1]) as client:
        ok(client.delete("/v1/saved_sessions/same"))
    with asking(server, KEYS[0]) as client:
        data = ok(client.get("/v1/saved_sessions"))["data"]
        assert "same" in [one["id"] for one in data] and len(data) == sizes[0]


@pytest.mark.parametrize(
    "given",
    ["first-ke", "first-key2", "FIRST-KEY", "first-key second-key", "irst-key", "first\u00adkey"],
)
def test_what_is_nearly_a_key_is_none(server: Server, given: str) -> None:
    head = {"Authorization": f"Bearer {given}".encode()}
    for path in ("/v1/models", "/v1/sessions", "/v1/saved_sessions", "/v1/responses/x"):
        answer = server.client.get(path, headers=head)  # type: ignore[arg-type]
        assert answer.status_code == 401 and "key" not in answer.json().get("data", "")
    body = asked("hello")
    answer = server.client.post("/v1/chat/completions", json=body, headers=head)  # type: ignore[arg-type]
    assert answer.status_code == 401
    for wrong in ("Basic first-key", "Bearer: first-key", "Bearer", "first-key"):
        answer = server.client.get("/v1/models", headers={"Authorization": wrong})
        assert answer.status_code == 401, wrong
    for right in ("Bearer first-key", "bearer  second-key"):
        assert server.client.get("/v1/models", headers={"Authorization": right}).status_code == 200


def test_no_key_learns_that_another_sent_the_same_picture(server: Server) -> None:
    """Its features are computed anew for each key and cache_salt, as its prompt is."""
    shown = picture_part(picture("blue", (56, 40)))
    passes: list[None] = []
    tower = server.inside(lambda core: core.engine.family.hf.model.visual)
    hook = tower.register_forward_hook(lambda *_: passes.append(None))
    told = []
    try:
        for key, salt in itertools.product(KEYS, (None, "salt")):
            with asking(server, key) as client:
                for number in range(2):
                    parts = [shown, {"type": "text", "text": f"{number}?"}]
                    fields = {} if salt is None else {"cache_salt": salt}
                    asked_for = asked({"role": "user", "content": parts}, **fields)
                    told.append(ok(client.post("/v1/chat/completions", json=asked_for)))
                    assert told[-1]["usage"]["mmkv"]["resumed"] == 0
            assert len(passes) == len(told) // 2
    finally:
        hook.remove()
    texts = [one["choices"][0]["message"]["content"] for one in told]
    assert texts[:2] * 4 == texts
