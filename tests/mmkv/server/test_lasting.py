"""Sessions that outlast a server, and go on at another one with the same folder."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv import Engine
from mmkv.engine.errors import SessionError
from mmkv.server import reply as answers
from mmkv.server.conversations import ConversationState
from mmkv.server.engine_thread import EngineCore
from mmkv.server.sessions import SessionTable
from mmkv.server.store import SessionRecord, SessionStore
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
            stack.enter_context(serving(load, session_folder=shared, keep_sessions=True))
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

    def read(core: EngineCore) -> dict[str, Tensor]:
        kept = list(core.scheduler.residents._idle)[-1]
        assert isinstance(kept, ConversationState)
        with kept.fork() as session:
            return core.engine.cache.export(session.seq)

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
    files = set(_files(one))

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for after in (0, 2):  # it is refused with the memory, and with the note
        left = iter(range(after))
        with monkeypatch.context() as patched:
            patched.setattr(
                os, "fsync", lambda handle, left=left: next(left, None) or refuse(handle)
            )
            path = f"/v1/sessions/{name}/chat/completions"
            answer = one.client.post(path, json=asked("two"))
        assert answer.status_code == 507 and "No space" in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert one.client.get(f"/v1/sessions/{name}").json()["turns"] == 1
        assert set(_files(one)) == files
    assert sum(path.name.startswith(name) for path in files) == 2  # a note, and its memory
    said(one, name, "two")


def test_a_client_that_leaves_while_its_turn_is_written_loses_nothing(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = servers
    name = created(one)
    said(one, name, "one")
    writing, left, over = (threading.Event() for _ in range(3))
    commit, gone = SessionStore.commit, answers._gone

    def slow(self: SessionStore, tenant: str, note: SessionRecord) -> SessionRecord:
        writing.set()
        assert over.wait(60)
        return commit(self, tenant, note)

    async def watched(receive: Any) -> None:
        await gone(receive)
        left.set()

    monkeypatch.setattr(SessionStore, "commit", slow)
    monkeypatch.setattr(answers, "_gone", watched)
    client = HTTPConnection(one.url.removeprefix("http://"))
    body, kind = json.dumps(asked("two")), {"Content-Type": "application/json"}
    client.request("POST", f"/v1/sessions/{name}/chat/completions", body, kind)
    assert writing.wait(60)
    client.close()
    assert left.wait(60)
    over.set()
    until = time.monotonic() + 60
    while one.client.get(f"/v1/sessions/{name}").json()["busy"]:
        assert time.monotonic() < until
    assert one.client.get(f"/v1/sessions/{name}").json()["turns"] == 2
    assert cache(one, name).keys() == cache(two, name).keys()
    said(one, name, "three")
    assert sum(path.name.startswith(name) for path in _files(one)) == 2


def test_one_deleted_while_its_memory_is_read_holds_nothing(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = servers
    name = created(one)
    said(one, name, "one")
    before = two.inside(lambda core: len(core.scheduler.sessions))
    load = SessionTable._load

    async def slow(self: SessionTable, path: Path, of: str, tenant: str) -> ConversationState:
        kept = await load(self, path, of, tenant)
        gone = await asyncio.to_thread(two.client.delete, f"/v1/sessions/{of}")
        assert gone.status_code == 200
        return kept

    monkeypatch.setattr(SessionTable, "_load", slow)
    assert two.client.get(f"/v1/sessions/{name}/memory").status_code == 404
    assert two.inside(lambda core: len(core.scheduler.sessions)) == before


def limit(monkeypatch: pytest.MonkeyPatch, server: Server, most: int) -> None:
    """Let no more sessions be open on a server."""
    settings = dataclasses.replace(server.state.settings, max_sessions=most)
    monkeypatch.setattr(server.state, "settings", settings)


def delete_all(server: Server) -> None:
    for session in server.client.get("/v1/sessions").json()["data"]:
        server.client.delete(f"/v1/sessions/{session['id']}")


def test_sessions_that_lie_in_the_folder_take_no_place(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = servers
    said(one, created(one), "one")
    there = len(two.client.get("/v1/sessions").json()["data"])
    limit(monkeypatch, two, there)
    created(two)


def test_sessions_that_come_back_count(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more are open than may be: that used longest ago makes way, and comes back as it was."""
    one, two = servers
    names = [created(one) for _ in range(3)]
    for at, name in enumerate(names):
        said(one, name, f"this is {at}")
    before = [one.client.get(f"/v1/sessions/{name}/memory").json() for name in names]
    for name in [session["id"] for session in two.client.get("/v1/sessions").json()["data"]]:
        if name not in names:
            assert two.client.delete(f"/v1/sessions/{name}").status_code == 200

    def opened(core: EngineCore) -> int:
        return len(core.scheduler.sessions)

    others = two.inside(opened)  # of tests before this one

    limit(monkeypatch, two, 2)
    for at, name in enumerate([*names, names[0]]):
        memory = two.client.get(f"/v1/sessions/{name}/memory").json()
        assert memory["bytes"] == before[at % 3]["bytes"]
        assert two.inside(opened) - others == min(at + 1, 2)
    limit(monkeypatch, two, 0)
    full = two.client.get(f"/v1/sessions/{names[1]}/memory")
    assert (full.status_code, full.json()["error"]["code"]) == (503, "too_many_sessions")
    limit(monkeypatch, two, 1)
    said(two, names[1], "go on")
    assert two.inside(opened) - others == 1


def test_a_fork_takes_no_place_from_its_origin(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session may be open: the origin makes way for its fork, and both go on."""
    one, _ = servers
    delete_all(one)
    name = created(one)
    said(one, name, "one")
    limit(monkeypatch, one, 1)
    fork = one.client.post(f"/v1/sessions/{name}/fork")
    assert fork.status_code == 200, fork.text
    assert said(one, fork.json()["id"], "two") == said(one, name, "two")
    # What is refused for another reason moves nobody out.
    before = one.inside(lambda core: len(core.scheduler.sessions))
    again = one.client.post("/v1/sessions", json={}, headers={"X-Session-Id": name})
    missing = one.client.post("/v1/sessions", json={"file": "never-saved"})
    assert (again.status_code, missing.status_code) == (409, 404)
    assert "no saved session never-saved" in missing.json()["error"]["message"]
    assert one.inside(lambda core: len(core.scheduler.sessions)) == before


def test_sessions_without_a_turn_count_when_one_begins(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = servers
    delete_all(one)
    others = one.inside(lambda core: len(core.scheduler.sessions))
    limit(monkeypatch, one, 2)
    for name in [created(one) for _ in range(4)]:
        said(one, name, "one")
    assert one.inside(lambda core: len(core.scheduler.sessions)) - others == 2


def test_one_of_two_that_go_on_at_once_is_told(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = SessionStore(shared), SessionStore(shared)
    first = one.commit("t", SessionRecord("x", 0, ("entries", 24.0)))
    seen = two.record("t", "x")
    assert seen == first
    one.commit("t", first)
    with pytest.raises(SessionError, match="another server"):
        two.commit("t", first)
    stands = one.record("t", "x")
    with pytest.raises(SessionError, match="another server"):  # a creation, of a name that is there
        two.commit("t", SessionRecord("x", 1, ("entries", 8.0)))
    assert two.record("t", "x") == stands
    path = shared / ".sessions" / "t" / "x.json"
    path.unlink()

    def meanwhile(_: int) -> None:
        with (path.parent / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the other server has to wait

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", meanwhile)  # between what is checked and what is replaced
        one.commit("t", SessionRecord("x", 0, ("entries", 24.0)))
    path.write_text("{")
    with pytest.raises(SessionError, match="begin a new one"):
        one.record("t", "x")
    assert list(one.records("t")) == []


def test_files_that_no_note_names_go(tmp_path: Path) -> None:
    lasting, folder = SessionStore(tmp_path), tmp_path / ".sessions" / "t"
    kept = lasting.new_memory("t", "x")
    lost = [folder / f"x.{'0' * 32}.mmkv", folder / "x.mmkv-1.part"]
    young, unread = lasting.new_memory("t", "x"), lasting.new_memory("t", "y.z")
    for path in (kept, *lost, young, unread):
        path.write_text("")
    (folder / "y.z.json").write_text("{")
    lasting.commit("t", SessionRecord("x", 0, ("entries", 24.0), memory=kept.name))
    for path in folder.iterdir():
        if path != young:
            os.utime(path, (0, 0))
    before = set(folder.iterdir())
    lasting.sweep()
    assert set(folder.iterdir()) == before - set(lost)


def test_sessions_outlast_the_server(folder: Path, servers: tuple[Server, Server]) -> None:
    one, _ = servers
    name = created(one, budget=16)
    said(one, name, FIRST)
    wanted = cache(one, name)

    def load() -> Engine:
        options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
        return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)

    with serving(
        load, session_folder=one.state.settings.session_folder, keep_sessions=True
    ) as later:
        found = cache(later, name)
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
        assert later.client.get(f"/v1/sessions/{name}").json()["budget"] == "16 entries per row"


def _files(server: Server) -> list[Path]:
    folder = server.state.settings.session_folder
    assert folder is not None
    return list((folder / ".sessions" / "public").iterdir())


@pytest.mark.parametrize("method", ["read_text", "open"])
def test_a_session_outlives_a_time_without_descriptors(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The note cannot be opened, or the session file: neither is damaged."""
    one, two = servers
    name = one.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}"
    one.client.post(f"{path}/chat/completions", json=asked("what is red?"))
    with monkeypatch.context() as patched:

        def out(self: Path, *_: Any, **__: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files", str(self))

        patched.setattr(Path, method, out)
        refused = two.client.get(f"{path}/memory")
    assert refused.status_code == 503 and refused.headers["Retry-After"] == "1"
    error = refused.json()["error"]
    assert error["code"] == "no_descriptors"
    assert str(one.state.settings.session_folder) not in error["message"]
    found, there = (server.client.get(f"{path}/memory").json() for server in (two, one))
    assert found["entries"] == there["entries"] > 0
    for server in (one, two):
        server.client.delete(path)


def test_a_session_comes_back_from_its_file_when_its_idle_memory_is_removed(
    servers: tuple[Server, Server],
) -> None:
    """A cleaner of hidden or temporary files takes where it hibernates, not where it lasts."""
    one, _ = servers
    name = created(one)
    said(one, name, FIRST)
    other = one.client.post(f"/v1/sessions/{name}/fork").json()["id"]
    wanted = said(one, other, "and what is left of it?")

    def hibernate(core: EngineCore) -> None:
        for kept in list(core.scheduler.sessions):
            core.scheduler.hibernate(kept)
        for file in core.folder.path.glob("*.mmkv"):
            file.unlink()

    one.inside(hibernate)
    assert said(one, name, "and what is left of it?") == wanted
    messages = one.client.get(f"/v1/sessions/{other}/messages").json()["data"]
    assert len(messages) == 4
    for each in (name, other):
        assert one.client.delete(f"/v1/sessions/{each}").status_code == 200
