"""Sessions that outlast a server, and go on at another one with the same folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import SessionError
from mmkv import Engine
from mmkv.server.kept import Kept
from mmkv.server.lasting import Lasting, Note
from mmkv.server.machine import Machine
from tests.support.chat_models import picture, save_qwen3_vl
from tests.support.servers import Server, asked, picture_part, serving

FIRST = {
    "role": "user",
    "content": [picture_part(picture("red", (48, 40))), {"type": "text", "text": "what is red?"}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def servers(folder: Path, shared: Path) -> Iterator[tuple[Server, Server]]:
    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
        return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)

    with ExitStack() as stack:
        one, two = (
            stack.enter_context(serving(load, session_folder=shared, lasting=True))
            for _ in range(2)
        )
        yield one, two


def created(server: Server, name: str | None = None, **fields: Any) -> str:
    headers = {} if name is None else {"X-Session-Id": name}
    answer = server.client.post("/v1/sessions", json=fields, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def said(server: Server, name: str, *messages: Any) -> str:
    path = f"/v1/sessions/{name}/chat/completions"
    answer = server.client.post(path, json=asked(*messages, max_tokens=12))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def cache(server: Server, name: str) -> dict[str, Tensor]:
    """Return what a session's memory holds, the one that was used last."""
    assert server.client.get(f"/v1/sessions/{name}/memory").json()["entries"]

    def read(machine: Machine) -> dict[str, Tensor]:
        kept = list(machine.scheduler.residents._idle)[-1]
        assert isinstance(kept, Kept)
        with kept.open() as session:
            return machine.engine.cache.export(session.seq)

    return server.inside(read)


def test_a_session_goes_on_at_another_server(servers: tuple[Server, Server]) -> None:
    one, two = servers
    name, alone = created(one, "ann.1", metadata={"of": "ann"}), created(one)
    assert name == "ann.1"
    for session in (name, alone):
        said(one, session, FIRST)
    held = cache(one, name)
    assert two.client.get(f"/v1/sessions/{name}").json()["turns"] == 1
    moved = cache(two, name)
    assert held.keys() == moved.keys() and all(torch.equal(held[key], moved[key]) for key in held)
    # It goes on at the second, then at the first again, as it would have at one.
    replies = [said(two, name, "and left of it?"), said(one, name, "and how many?")]
    assert replies == [said(one, alone, "and left of it?"), said(one, alone, "and how many?")]
    shown = two.client.get(f"/v1/sessions/{name}").json()
    assert (shown["turns"], shown["messages"], shown["metadata"]) == (3, 6, {"of": "ann"})
    fork = two.client.post(f"/v1/sessions/{name}/fork").json()["id"]
    assert said(one, fork, "so?") == said(one, alone, "so?")
    listed = [one["id"] for one in two.client.get("/v1/sessions").json()["data"]]
    assert {name, alone, fork} <= set(listed)
    assert two.client.delete(f"/v1/sessions/{name}").json()["deleted"]
    assert one.client.get(f"/v1/sessions/{name}").status_code == 404
    assert name not in {one["id"] for one in one.client.get("/v1/sessions").json()["data"]}


def test_names_are_taken_once(servers: tuple[Server, Server]) -> None:
    one, two = servers
    created(one, "bob")
    for server in (one, two):
        again = server.client.post("/v1/sessions", json={}, headers={"X-Session-Id": "bob"})
        assert again.status_code == 409 and again.json()["error"]["code"] == "session_exists"
    for bad in ("../x", ".x", "a/b", "x" * 101, ""):
        answer = one.client.post("/v1/sessions", json={}, headers={"X-Session-Id": bad})
        assert answer.status_code == 400


def test_a_turn_that_cannot_be_written_is_taken_back(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = servers
    name = created(one)
    said(one, name, "one")
    files = {path for path in _files(one) if path.name.startswith(name)}

    def refuse(*_: Any) -> Note:
        raise SessionError("the session cannot be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Lasting, "commit", refuse)
        path = f"/v1/sessions/{name}/chat/completions"
        answer = one.client.post(path, json=asked("two"))
        assert answer.status_code == 409 and "No space" in answer.json()["error"]["message"]
    assert one.client.get(f"/v1/sessions/{name}").json()["turns"] == 1
    assert {path for path in _files(one) if path.name.startswith(name)} == files
    assert len(files) == 2  # a note, and the memory that it names
    said(one, name, "two")


def test_one_of_two_that_go_on_at_once_is_told(shared: Path) -> None:
    one, two = Lasting(shared), Lasting(shared)
    first = one.commit("t", Note("x", 0, ("entries", 24.0)))
    seen = two.note("t", "x")
    assert seen == first
    one.commit("t", first)
    with pytest.raises(SessionError, match="another server"):
        two.commit("t", first)
    (shared / ".sessions" / "t" / "x.json").write_text("{")
    with pytest.raises(SessionError, match="begin a new one"):
        one.note("t", "x")
    assert list(one.notes("t")) == []


def test_sessions_outlast_the_server(folder: Path, servers: tuple[Server, Server]) -> None:
    one, _ = servers
    name = created(one, budget=16)
    said(one, name, FIRST)
    wanted = cache(one, name)

    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
        return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)

    with serving(load, session_folder=one.room.settings.session_folder, lasting=True) as later:
        found = cache(later, name)
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
        assert later.client.get(f"/v1/sessions/{name}").json()["budget"] == "16 entries per row"


def _files(server: Server) -> list[Path]:
    folder = server.room.settings.session_folder
    assert folder is not None
    return list((folder / ".sessions" / "public").iterdir())
