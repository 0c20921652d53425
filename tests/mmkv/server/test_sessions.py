"""/v1/sessions over HTTP: turns, forks, files, hibernation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai.types.chat import ChatCompletion
from safetensors import safe_open

from mmkv import Engine, Sampling
from mmkv.engine.paths import DRAFT
from mmkv.server.engine_thread import EngineCore
from mmkv.server.work import ChatWork
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

SCENE = picture_part(picture("red", (48, 40)))
TURNS: list[Any] = [
    {"role": "user", "content": [SCENE, {"type": "text", "text": "what is red here?"}]},
    "and what is left of it, and right of it?",
    "so how many are there?",
]


def load(folder: Path, memory: int = 8 * 2**20) -> Engine:
    options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
    options["vision_cache"] = 0  # pages have all of the memory
    return Engine.from_pretrained(folder, kv_limit=memory, prefill_chunk=64, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def server(folder: Path, saved: Path) -> Iterator[Server]:
    with serving(lambda: load(folder), session_folder=saved, max_sessions=8) as made:
        yield made


@pytest.fixture(autouse=True)
def _all_deleted(server: Server) -> Iterator[None]:
    yield
    for one in server.client.get("/v1/sessions").json()["data"]:
        assert server.client.delete(f"/v1/sessions/{one['id']}").json()["deleted"]


def created(server: Server, **fields: Any) -> str:
    answer = server.client.post("/v1/sessions", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def post(server: Server, name: str, *messages: Any, **fields: Any) -> httpx.Response:
    path = f"/v1/sessions/{name}/chat/completions"
    return server.client.post(path, json=asked(*messages, **{"max_tokens": 12} | fields))


def turn(server: Server, name: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    """Return the answer to a turn, of OpenAI's type."""
    answer = post(server, name, *messages, **fields)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate(answer.json(), strict=True)
    return answer.json()


def said(server: Server, name: str, *messages: Any, **fields: Any) -> str:
    return turn(server, name, *messages, **fields)["choices"][0]["message"]["content"]


def shown(server: Server, name: str, what: str = "") -> dict[str, Any]:
    return server.client.get(f"/v1/sessions/{name}{what}").json()


def caches(core: EngineCore) -> list[dict[str, torch.Tensor]]:
    """Return what each kept memory holds, those in files too, the one used last at the end."""
    found = []
    for kept in [one for one in core.scheduler.sessions]:  # type: ignore[attr-defined]
        session = kept.fork()  # type: ignore[attr-defined]
        found.append(core.engine.cache.export(session.seq))
        session.close()
    return found


def test_turns_are_those_of_a_chat_that_is_sent_whole(server: Server) -> None:
    name = created(server)
    messages: list[Any] = []
    for asks in TURNS:
        answer = turn(server, name, asks)
        messages.append({"role": "user", "content": asks} if isinstance(asks, str) else asks)
        whole = server.chat(*messages, max_tokens=12).json()
        assert answer["choices"] == whole["choices"]
        own, other = answer["usage"], whole["usage"]
        assert own["prompt_tokens"] == other["prompt_tokens"]
        assert {**own["mmkv"], "resumed": 0} == {**other["mmkv"], "resumed": 0}
        messages.append(whole["choices"][0]["message"])
    assert own["mmkv"]["evicted"] > 0 and own["mmkv"]["resumed"] > 0
    record = shown(server, name)
    assert (record["turns"], record["messages"], record["state"]) == (3, 6, "memory")
    memory = shown(server, name, "/memory")
    assert memory["entries"] == own["mmkv"]["kept"]
    assert sum(memory["seen_by_modality"].values()) == memory["tokens_seen"]
    assert sum(memory["by_modality"].values()) == memory["entries"]


def test_forks_go_on_alone(server: Server) -> None:
    name = created(server, metadata={"of": "ann"})
    said(server, name, TURNS[0])
    other = server.client.post(f"/v1/sessions/{name}/fork").json()
    assert other["turns"] == 1 and other["metadata"] == {"of": "ann"}
    turn(server, other["id"], "something else altogether")
    assert shown(server, name)["turns"] == 1
    fresh = created(server)
    said(server, fresh, TURNS[0])
    assert said(server, name, TURNS[1]) == said(server, fresh, TURNS[1])
    server.client.delete(f"/v1/sessions/{name}")
    assert said(server, other["id"], "go on")
    empty = server.client.post(f"/v1/sessions/{created(server)}/fork").json()
    nothing = {"object": "list", "data": []}
    assert shown(server, empty["id"], "/messages") == nothing and empty["state"] == "empty"
    assert said(server, empty["id"], "begin")


def test_a_saved_session_goes_on_from_its_file(server: Server, saved: Path) -> None:
    name = created(server)
    said(server, name, TURNS[0])
    save = f"/v1/sessions/{name}/save"
    assert server.client.post(save, json={"name": "scene.1"}).json()["file"] == "scene.1"
    assert server.client.post(save, json={"name": "scene.1"}).status_code == 409
    wanted = said(server, name, TURNS[1])
    again = created(server, file="scene.1")
    assert shown(server, again)["messages"] == 2
    assert shown(server, again, "/memory")["seen_by_modality"]["image"] > 0
    assert said(server, again, TURNS[1]) == wanted
    one, two = server.inside(caches)
    assert all(torch.equal(one[key], two[key]) for key in one)
    # The library reads the file, too.
    engine = load(server.inside(lambda core: core.engine._source))
    session, _ = engine.load_session(saved / "public" / "scene.1.mmkv")
    assert "".join(session.send(TURNS[1], sampling=Sampling(max_new_tokens=12)))
    assert len(session.history) == 4
    session.save(saved / "public" / "chat.mmkv")
    session.close()
    opened = created(server, file="chat")
    told = shown(server, opened, "/memory")
    assert sum(told["seen_by_modality"].values()) == told["tokens_seen"]  # which it does not say
    assert said(server, opened, "and now?")


def test_saved_sessions_are_listed_and_removed(folder: Path, tmp_path: Path) -> None:
    """Those of the caller; a session that was opened from one stays."""
    keys = ("first-key", "second-key")
    with serving(lambda: load(folder), api_keys=keys, session_folder=tmp_path) as made:
        made.client.headers = {"Authorization": "Bearer first-key"}
        files = "/v1/saved_sessions"
        assert made.client.get(files).json() == {"object": "list", "data": []}
        name = created(made)
        said(made, name, TURNS[0])
        for saved in ("b", "a.1"):
            made.client.post(f"/v1/sessions/{name}/save", json={"name": saved})
        found = made.client.get(files).json()["data"]
        paths = [*tmp_path.glob("*/a.1.mmkv"), *tmp_path.glob("*/b.mmkv")]
        assert [(one["id"], one["bytes"]) for one in found] == [
            (path.stem, path.stat().st_size) for path in paths
        ]
        again = created(made, file="a.1")
        made.client.headers = {"Authorization": "Bearer second-key"}
        assert made.client.get(files).json()["data"] == []
        assert made.client.delete(f"{files}/a.1").status_code == 404
        made.client.headers = {"Authorization": "Bearer first-key"}
        assert made.client.delete(f"{files}/a.1").json()["deleted"]
        assert made.client.delete(f"{files}/a.1").json()["error"]["code"] == "file_not_found"
        assert [one["id"] for one in made.client.get(files).json()["data"]] == ["b"]
        assert said(made, again, "go on")
        assert made.client.delete(f"{files}/..%2Fb").status_code in (400, 404)
        assert paths[1].exists() and not paths[0].exists()


def test_of_two_saves_under_one_name_one_stands(server: Server, saved: Path) -> None:
    """Both look before either has written."""
    names = [created(server) for _ in range(2)]
    for name in names:
        turn(server, name, f"hello from {name}")
    with ThreadPoolExecutor(2) as clients, stopped(server):
        sent = [
            clients.submit(server.client.post, f"/v1/sessions/{name}/save", json={"name": "twice"})
            for name in names
        ]
        until(lambda: server.state.engine_thread._commands.qsize() == 2)
    answers = [one.result() for one in sent]
    assert sorted(one.status_code for one in answers) == [200, 409]
    refused = next(one for one in answers if one.status_code == 409)
    assert refused.json()["error"]["code"] == "file_exists"
    assert not list((saved / "public").glob(f".*{DRAFT}"))


def test_a_folder_that_cannot_be_made_is_the_disks_fault(folder: Path, tmp_path: Path) -> None:
    with serving(lambda: load(folder), session_folder=tmp_path) as made:
        (tmp_path / "public").write_text("in the way")
        name = created(made)
        turn(made, name, "hello")
        answer = made.client.post(f"/v1/sessions/{name}/save", json={"name": "mine"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "not_written")
        assert str(tmp_path) not in answer.text, "where the files lie"
        assert made.client.delete(f"/v1/sessions/{name}").status_code == 200


OWN = (
    ("media", ["x"]),
    ("media", [None]),
    ("seen", [float("inf")]),
    ("seen", [-1]),
    ("spans", [[0]]),
    ("tools", [7]),
    ("tools", [{"type": "function"}]),
    ("root", 7),
)


def test_a_session_file_is_read_whole_or_not_at_all(server: Server, saved: Path) -> None:
    name = created(server)
    said(server, name, TURNS[0])
    server.client.post(f"/v1/sessions/{name}/save", json={"name": "good"})
    content = (saved / "public" / "good.mmkv").read_bytes()
    held = server.inside(lambda core: core.scheduler.ledger.committed)
    at, bad = len(content) // 2, saved / "public" / "bad.mmkv"

    def require_refused() -> None:
        answer = server.client.post("/v1/sessions", json={"file": "bad"})
        assert answer.status_code == 409 and str(saved) not in answer.text, answer.text

    for wrong in (content[:at], content[:at] + b"x" + content[at + 1 :], b"", b"{}"):
        bad.write_bytes(wrong)
        require_refused()
    good = server.inside(lambda core: core.engine.load_session(saved / "public" / "good.mmkv"))[0]
    for key, value in OWN:  # whole, but no server writes this of its own into it
        good.save(bad, {"mmkv.server": json.dumps({key: value})})
        require_refused()
    server.inside(lambda _: good.close())
    assert server.inside(lambda core: core.scheduler.ledger.committed) == held
    assert len(server.client.get("/v1/sessions").json()["data"]) == 1


def test_a_name_that_is_no_plain_name(server: Server) -> None:
    session = created(server)
    said(server, session, "hello")
    wrong = (
        "../public/good",
        "/etc/passwd",
        "a/b",
        "..",
        ".hidden",
        "",
        "a\0b",
        "a\nb",
        "~",
        "%2e",
    )
    for name in wrong:
        for path, body in (
            ("/v1/sessions", {"file": name}),
            (f"/v1/sessions/{session}/save", {"name": name}),
        ):
            answer = server.client.post(path, json=body)
            assert answer.status_code == 400, (name, answer.text)


def test_what_a_session_refuses(server: Server) -> None:
    name = created(server)
    assert post(server, name, "hello", n=2).status_code == 400
    assert post(server, name, "hello", mmkv={"budget": 8}).status_code == 400
    assert post(server, name, "hello", mmkv={"resume": "never"}).status_code == 400
    assert post(server, "sess_none", "hello").status_code == 404
    save = server.client.post(f"/v1/sessions/{name}/save", json={"name": "empty"})
    assert save.status_code == 400 and "empty" in save.json()["error"]["message"]
    for fields in ({"budget": "no"}, {"budget": 8, "file": "x"}, {"colour": 1}):
        assert server.client.post("/v1/sessions", json=fields).status_code == 400
    assert server.client.post("/v1/sessions", json={"file": "never-saved"}).status_code == 404
    for _ in range(5):  # an address has three quarters of the places
        created(server)
    full = server.client.post("/v1/sessions", json={})
    assert full.status_code == 503 and full.headers["retry-after"]


def test_a_turn_that_is_cut_off_is_taken_back(server: Server) -> None:
    name, control = created(server), created(server)
    for one in (name, control):
        said(server, one, TURNS[0])
    path, held = f"/v1/sessions/{name}/chat/completions", server.held
    never = {str(one): -100 for one in server.inside(lambda core: core.engine.eos_token_ids)}
    body = asked("tell me everything", max_tokens=200, stream=True, logit_bias=never)
    with paused_in_a_reply(server) as reached, server.client.stream("POST", path, json=body):
        assert reached.wait(60) and shown(server, name)["busy"]
        assert post(server, name, "me too").status_code == 409
        path, named = f"/v1/sessions/{name}", {"metadata": {"title": "x"}}
        assert server.client.delete(path).status_code == 409
        assert server.client.post(path, json=named).status_code == 409
    server.wait_for(lambda core: core.scheduler.running == 0)
    server.wait_for(lambda _: not shown(server, name)["busy"])
    assert server.held == held and shown(server, name)["turns"] == 1
    assert said(server, name, TURNS[1]) == said(server, control, TURNS[1])
    one, two = server.inside(caches)
    assert all(torch.equal(one[key], two[key]) for key in one)


def conversations(server: Server, count: int) -> list[str]:
    """Hold some conversations side by side; what was replied, and each session's file.

    Two go on from one memory: one of them ends, the other hibernates where room is short.
    """
    names, texts, ends = [created(server) for _ in range(count)], list[str](), ""
    for asks in ("who?", "where?", "when?"):
        texts += [said(server, name, f"{at} {asks}") for at, name in enumerate(names)]
        if asks == "who?":
            ends = server.client.post(f"/v1/sessions/{names[0]}/fork").json()["id"]
        if asks == "where?":
            texts.append(said(server, ends, "elsewhere?"))
            assert server.client.delete(f"/v1/sessions/{ends}").json()["deleted"]
    for at, name in enumerate(names):
        save = server.client.post(f"/v1/sessions/{name}/save", json={"name": f"hibernated{at}"})
        assert save.status_code == 200, save.text
    return texts


def digest(path: Path) -> str:
    """Return the hash over a session file's tensors, conversation and state."""
    with safe_open(path, framework="pt") as file:
        return file.metadata()["digest"]


def test_idle_sessions_hibernate_and_come_back_bit_for_bit(
    server: Server, saved: Path, folder: Path, tmp_path: Path
) -> None:
    """A server with room for about one session leaves what one with room for all of them does."""
    wanted = conversations(server, 3)
    work = ChatWork([], "", Sampling())
    need = server.inside(lambda core: core.job(work, lambda: None).reservation().total)
    size = server.inside(lambda core: core.engine.cache.pool.page_bytes)
    with serving(lambda: load(folder, (need + 2) * size), session_folder=tmp_path) as small:
        assert conversations(small, 3) == wanted
        states = [one["state"] for one in small.client.get("/v1/sessions").json()["data"]]
        assert "file" in states and list(tmp_path.glob(".hibernated-*/*.mmkv"))
    assert not list(tmp_path.glob(".hibernated-*"))
    for at in range(3):
        one, two = (
            digest(place / "public" / f"hibernated{at}.mmkv") for place in (saved, tmp_path)
        )
        assert one == two


def test_a_key_has_its_share_of_the_sessions(folder: Path) -> None:
    """Another key's sessions are not in its way, and the share holds for forks, too."""
    with serving(lambda: load(folder), api_keys=("one", "two"), max_sessions=5) as made:
        names = []
        for key, places in (("one", 2), ("two", 2)):
            made.client.headers["Authorization"] = f"Bearer {key}"
            for _ in range(places):
                answer = made.client.post("/v1/sessions", json={})
                assert answer.status_code == 200
                names.append(answer.json()["id"])
            refused = made.client.post("/v1/sessions", json={})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "too_many_sessions")
            assert "2 sessions of your key" in error["message"]
            assert made.client.post(f"/v1/sessions/{names[-1]}/fork").status_code == 503
        assert made.client.delete(f"/v1/sessions/{names[-1]}").status_code == 200
        assert made.client.post("/v1/sessions", json={}).status_code == 200


def test_a_key_s_own_idle_session_makes_way(folder: Path, tmp_path: Path) -> None:
    keys = {"api_keys": ("one", "two"), "max_sessions": 4}
    with serving(lambda: load(folder), session_folder=tmp_path, keep_sessions=True, **keys) as made:
        opened = {"one": [], "two": []}  # type: dict[str, list[str]]
        for key, count in (("one", 1), ("two", 4)):
            made.client.headers["Authorization"] = f"Bearer {key}"
            for _ in range(count):
                opened[key].append(created(made))
                said(made, opened[key][-1], "hello")
        made.client.headers["Authorization"] = "Bearer one"
        assert shown(made, opened["one"][0])["state"] == "memory"
        made.client.headers["Authorization"] = "Bearer two"
        states = [shown(made, name)["state"] for name in opened["two"]]
        assert states == ["file", "file", "memory", "memory"]
