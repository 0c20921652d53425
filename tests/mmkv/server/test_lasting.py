"""Sessions that outlast a server and go on at another one; what belongs to one key alone."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from mmkv import Engine
from mmkv.engine import session_file
from mmkv.engine.errors import SessionError
from mmkv.sampling import Sampling
from mmkv.server import reply as answers
from mmkv.server import store
from mmkv.server.conversations import ConversationState
from mmkv.server.engine_thread import EngineCore
from mmkv.server.sessions import SessionTable
from mmkv.server.store import HibernationFolder, SessionRecord, SessionStore
from mmkv.server.work import ChatWork
from tests.support.chat_models import picture, save_qwen3_vl
from tests.support.servers import MODEL, Server, asked, picture_part, serving

FIRST = {
    "role": "user",
    "content": [picture_part(picture("red", (48, 40))), {"type": "text", "text": "what is red?"}],
}


RECORD: dict[str, Any] = {"id": "x", "created": 0, "budget": ("entries", 24.0)}
TENANT = "0" * 32


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
    # A title, too.
    titled = two.client.post(f"/v1/sessions/{name}", json={"metadata": {"title": "Red"}})
    assert titled.json()["metadata"] == {"title": "Red"} and titled.json()["turns"] == 3
    there = one.client.get(f"/v1/sessions/{name}").json()
    assert (there["metadata"], there["turns"]) == ({"title": "Red"}, 3)
    wrong = one.client.post(f"/v1/sessions/{name}", json={"metadata": {"title": "r" * 513}})
    assert wrong.status_code == 400
    listed = [one["id"] for one in two.client.get("/v1/sessions").json()["data"]]
    assert {name, alone, fork} <= set(listed)
    assert two.client.delete(f"/v1/sessions/{name}").json()["deleted"]
    assert one.client.get(f"/v1/sessions/{name}").status_code == 404
    assert name not in {one["id"] for one in one.client.get("/v1/sessions").json()["data"]}


def test_frames_that_were_all_skipped_are_counted_at_another_server(
    servers: tuple[Server, Server],
) -> None:
    one, two = servers
    name = created(one)

    def skipped(server: Server, session: str, shade: str = "red") -> int:
        body = {"content": [picture_part(picture(shade, (48, 40)))], "at": 1, "skip_similar": 2}
        answer = server.client.post(f"/v1/sessions/{session}/observe", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["frames_skipped"]

    assert [skipped(server, name) for server in (one, one, two, two, one)] == [0, 1, 2, 3, 4]
    memory = set(_files(one))
    fork = one.client.post(f"/v1/sessions/{name}/fork").json()["id"]
    assert [skipped(server, fork) for server in (two, one)] == [5, 6]
    assert skipped(two, name) == 5 and memory <= set(_files(one))  # the memory is as it was
    assert [skipped(two, name, "blue"), skipped(one, name, "blue")] == [5, 6]


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

    limit(monkeypatch, two, 3)  # two of an address
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
    limit(monkeypatch, one, 3)  # two of an address
    for name in [created(one) for _ in range(4)]:
        said(one, name, "one")
    assert one.inside(lambda core: len(core.scheduler.sessions)) - others == 2


def test_one_of_two_that_go_on_at_once_is_told(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = SessionStore(shared), SessionStore(shared)
    first = one.commit(TENANT, SessionRecord(**RECORD))
    seen = two.record(TENANT, "x")
    assert seen == first
    one.commit(TENANT, first)
    with pytest.raises(SessionError, match="another server"):
        two.commit(TENANT, first)
    stands = one.record(TENANT, "x")
    with pytest.raises(SessionError, match="another server"):  # a creation, of a name that is there
        two.commit(TENANT, SessionRecord(**RECORD | {"created": 1}))
    assert two.record(TENANT, "x") == stands
    path = shared / ".sessions" / TENANT / "x.json"
    path.unlink()

    def meanwhile(_: int) -> None:
        with (path.parent / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the other server has to wait

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", meanwhile)  # between what is checked and what is replaced
        one.commit(TENANT, SessionRecord(**RECORD))
    path.write_text("{")
    with pytest.raises(SessionError, match="begin a new one"):
        one.record(TENANT, "x")
    assert list(one.records(TENANT)) == []


def test_files_that_no_note_names_go(tmp_path: Path) -> None:
    lasting, folder = SessionStore(tmp_path), tmp_path / ".sessions" / TENANT
    kept = lasting.new_memory(TENANT, "x")
    lost = [folder / f"x.{'0' * 32}.mmkv", folder / "x.mmkv-1_a.part"]
    young, unread = lasting.new_memory(TENANT, "x"), lasting.new_memory(TENANT, "y.z")
    for path in (kept, *lost, young, unread):
        path.write_text("")
    (folder / "y.z.json").write_text("{")
    lasting.commit(TENANT, SessionRecord(**RECORD, memory=kept.name))
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


@pytest.mark.parametrize("reader", [store, session_file])
def test_a_session_outlives_a_time_without_descriptors(
    servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch, reader: Any
) -> None:
    """The note cannot be opened, or the session file: neither is damaged."""
    one, two = servers
    name = one.client.post("/v1/sessions", json={}).json()["id"]
    path = f"/v1/sessions/{name}"
    one.client.post(f"{path}/chat/completions", json=asked("what is red?"))
    with monkeypatch.context() as patched:

        def out(path: Path, *_: Any, **__: Any) -> Any:
            raise OSError(errno.EMFILE, "Too many open files", str(path))

        patched.setattr(reader, "open_regular", out)
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


# What a killed server left in its folder goes with the next start, and nothing else does.


CHILD = """
import pathlib, sys
from mmkv.server.store import HibernationFolder
made = HibernationFolder(pathlib.Path(sys.argv[1]))
(made.path / "memory.mmkv").write_text("idle")
print(made.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_server_left_goes_with_the_next_start(tmp_path: Path) -> None:
    here = HibernationFolder(tmp_path)
    saved = tmp_path / "public"
    saved.mkdir()
    (tmp_path / ".hibernated-link").symlink_to(saved)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        other = Path(child.stdout.readline().strip())
        assert other.is_dir() and other != here.path and here.path.is_dir()
        HibernationFolder(tmp_path).close()
        assert (other / "memory.mmkv").exists(), "of a server that lives"
        child.send_signal(signal.SIGKILL)
    third = HibernationFolder(tmp_path)
    assert not other.exists() and here.path.is_dir() and saved.is_dir()
    for one in (third, here):
        one.close()
        assert not one.path.exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SessionError, match="name another --session-folder"):
        HibernationFolder(tmp_path / "file")


def test_a_folder_that_is_gone_is_made_anew_and_stays_ours(tmp_path: Path) -> None:
    here = HibernationFolder(tmp_path / "within")
    for _ in range(2):
        shutil.rmtree(tmp_path / "within")
        with here.writing():
            (here.path / "memory.mmkv").write_text("idle")
    HibernationFolder(tmp_path / "within").close()
    assert (here.path / "memory.mmkv").exists(), "another one took it for nobody's"
    here.close()
    assert not here.path.exists()


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """Return what loads an engine with room for a request and a few idle memories."""
    folder = save_qwen3_vl(tmp_path / "model")

    def load(**fields: Any) -> Engine:
        options = {
            "policy": "streamingllm",
            "budget": 24,
            "dtype": "float32",
            "prefill_chunk": 16,
        } | fields
        return Engine.from_pretrained(folder, **options)

    with serving(load) as measured:
        pages = measured.inside(
            lambda core: core.job(ChatWork([], "", Sampling()), lambda: None).reservation().total
        )
        size = measured.inside(lambda core: core.engine.cache.pool.page_bytes)
    return lambda: load(kv_limit=3 * pages * size)


def respond(server: Server, **fields: Any) -> Any:
    body = {"model": MODEL, "input": "what is red?", "max_output_tokens": 2, "temperature": 0}
    return server.client.post("/v1/responses", json=body | fields)


def stands(server: Server, name: str) -> bool:
    return server.client.get(f"/v1/responses/{name}").status_code == 200


def test_stored_responses_make_way_where_they_cannot_be_written(
    small: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder is gone and something else stands there: nobody is locked out."""
    place = tmp_path / "sessions"
    with serving(small, session_folder=place, snapshot_bytes=0) as server:
        session = server.client.post("/v1/sessions", json={}).json()["id"]
        turn = f"/v1/sessions/{session}/chat/completions"
        assert server.client.post(turn, json=asked("hello")).status_code == 200
        shutil.rmtree(place)
        place.write_text("in the way")
        names = [respond(server).json()["id"] for _ in range(14)]
        standing = [name for name in names if stands(server, name)]
        assert standing and standing == names[-len(standing) :] and len(standing) < len(names)
        again = respond(server, previous_response_id=names[0])
        assert again.status_code == 400
        assert again.json()["error"]["code"] == "previous_response_not_found"
        after = respond(server, previous_response_id=names[-1])
        assert after.status_code == 200, after.text
        for _ in range(3):
            assert server.chat("what?").status_code == 200
        (said,) = server.client.get("/health").json()["warnings"]
        assert "moved to files" in said and str(tmp_path) not in said
        assert [one.levelname for one in caplog.records if one.name == "mmkv.server"] == ["ERROR"]
        assert server.client.post(turn, json=asked("again")).status_code == 200, "a session stays"
        place.unlink()
        names = [respond(server).json()["id"] for _ in range(14)]
        assert all(stands(server, name) for name in names)
        assert server.client.get("/health").json() == {"status": "ok"}
        shutil.rmtree(place)  # what lay there is gone, and is not claimed to stand
        assert 0 < sum(stands(server, name) for name in names) < len(names)
        assert server.chat("what?").status_code == 200


# What one key made is nothing to another: every route that takes a name, and every list.


KEYS = ("first-key", "second-key")
SECRET = "the word is periwinkle"
SCENE = picture_part(picture("red", (48, 40)))


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
                body = asked("tell me") if path.endswith("completions") else {}
                body = {"name": "notes"} if path.endswith("save") else body
                body = {"content": "look"} if path.endswith("observe") else body
                body = {"metadata": {}} if path.endswith("{name}") else body
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
        assert len(tried) >= 15, tried  # sessions have thirteen, responses three, saved ones one
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


@pytest.mark.parametrize("server", [True], ids=["lasting"], indirect=True)
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


@pytest.mark.parametrize("server", [True], ids=["lasting"], indirect=True)
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
