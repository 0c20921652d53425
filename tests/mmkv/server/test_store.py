"""Files that the server reads back, whatever somebody put in their place; what tenants may take."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from mmkv import Engine
from mmkv.engine.errors import SessionError
from mmkv.engine.paths import DRAFT
from mmkv.server import store as store_module
from mmkv.server.guard import network_of
from mmkv.server.quota import DiskQuota, MediaStore, QuotaError
from mmkv.server.store import SavedSessions, SessionRecord, SessionStore
from tests.fuzz.strategies import values
from tests.support.servers import asked, serving

ANN, BOB = ("a" * 32, "b" * 32)
HEX = "0123456789abcdef" * 2
RECORD: dict[str, Any] = {
    "id": "bob.1",
    "created": 1,
    "budget": ["entries", 24.0],
    "metadata": {"of": "bob"},
    "turns": 1,
    "messages": 2,
    "memory": f"bob.1.{HEX}.mmkv",
    "version": HEX,
    "media": [],
    "skipped": 0,
}


def planted(root: Path) -> tuple[SessionStore, Path, dict[Path, bytes]]:
    """Return a store of two tenants, Bob's folder, and what lies there that is not Bob's."""
    (root / ANN).mkdir(parents=True)
    folders = {name: root / ".sessions" / name for name in (ANN, BOB)}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        memory = "ann.1." + HEX + ".mmkv" if name == ANN else RECORD["memory"]
        (folder / memory).write_bytes(name.encode())
        record = RECORD | {"id": memory[:5], "memory": memory}
        (folder / f"{memory[:5]}.json").write_text(json.dumps(record))
    (root / ANN / "notes.mmkv").write_text("saved")
    (root / "victim").write_text("of somebody else")
    theirs = [path for path in root.rglob("*") if path.is_file() and BOB not in path.parts]
    for path in root.rglob("*"):
        os.utime(path, (0, 0))  # old enough to be swept
    return SessionStore(root), folders[BOB], {path: path.read_bytes() for path in theirs}


def survives(store: SessionStore, theirs: dict[Path, bytes]) -> None:
    """Do all that a server does with Bob's sessions; others' files stay as they are."""
    store.sweep()
    for record in store.records(BOB):
        memory = None if record.memory is None else store.memory(BOB, record)
        assert memory is None or memory.parent.name == BOB
        assert json.dumps(dict(record))
    for name in ("bob.1", "ann.1", "x"):
        with suppress(SessionError):
            store.record(BOB, name)
        with suppress(SessionError):
            store.delete(BOB, name)
    store.sweep()
    for path, content in theirs.items():
        assert path.read_bytes() == content, path
    assert [one.id for one in store.records(ANN)] == ["ann.1"]


WRONG: dict[str, dict[str, Any]] = {
    "another tenant's memory": {"memory": f"../{ANN}/ann.1.{HEX}.mmkv"},
    "a path": {"memory": "../../victim"},
    "an absolute path": {"memory": "/etc/passwd"},
    "another session's memory": {"memory": f"ann.1.{HEX}.mmkv"},
    "its own record": {"memory": "bob.1.json"},
    "a list": {"memory": ["x"]},
    "a NUL byte": {"memory": f"bob.1\0.{HEX}.mmkv"},
    "a number for a name": {"memory": 7},
    "another id": {"id": "ann.1"},
    "a path for an id": {"id": "../x"},
    "an unknown field": {"path": "/etc"},
    "no budget": {"budget": []},
    "a list in a budget": {"budget": [["x"], {}]},
    "a budget without end": {"budget": ["entries", float("inf")]},
    "no kind of budget": {"budget": ["pages", 3.0]},
    "text for a count": {"turns": "1"},
    "less than nothing": {"messages": -1},
    "a number without end": {"created": 10**400},
    "media that are no digests": {"media": ["../../victim"]},
    "a text of media": {"media": "abc"},
    "lists in metadata": {"metadata": {"a": ["b"]}},
    "much metadata": {"metadata": {str(n): "x" for n in range(99)}},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=list(WRONG))
def test_a_record_that_no_server_wrote_costs_one_session(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    store, folder, theirs = planted(tmp_path)
    (folder / "bob.1.json").write_text(json.dumps(RECORD | fields))
    with pytest.raises(SessionError, match="begin a new one"):
        store.record(BOB, "bob.1")
    store.sweep()
    assert (folder / RECORD["memory"]).exists()  # somebody may mend the record
    survives(store, theirs)


def _link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


PLACED: dict[str, Callable[[Path, Path], Any]] = {
    "a link": lambda path, root: _link(path, root / "victim"),
    "a link to nothing": lambda path, root: _link(path, root / "nothing"),
    "a link to itself": lambda path, root: _link(path, path),
    "a link to another's record": lambda path, root: _link(
        path, root / ".sessions" / ANN / "ann.1.json"
    ),
    "a pipe": lambda path, root: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path, root: (path.unlink(), path.mkdir()),
    "a device": lambda path, root: _link(path, Path("/dev/zero")),
    "nothing": lambda path, root: path.write_bytes(b""),
    "no text": lambda path, root: path.write_bytes(b"\xff\xfe{"),
    "deep": lambda path, root: path.write_text("[" * 100_000),
    "huge": lambda path, root: os.truncate(path, 2**33),
    "a list": lambda path, root: path.write_text(f"[{path.read_text()}]"),
    "cut": lambda path, root: path.write_text(path.read_text()[:-9]),
}


@pytest.mark.parametrize("what", ["bob.1.json", RECORD["memory"], ".lock"])
@pytest.mark.parametrize("place", PLACED.values(), ids=list(PLACED))
def test_what_lies_in_a_file_s_place_costs_one_session(
    place: Callable[[Path, Path], Any], what: str, tmp_path: Path
) -> None:
    store, folder, theirs = planted(tmp_path)
    if not (folder / what).exists():
        (folder / what).write_text("{}")
    place(folder / what, tmp_path)
    survives(store, theirs)


def test_a_folder_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    """Ann's saved files look like memories that no record names."""
    store, folder, theirs = planted(tmp_path)
    saved = tmp_path / ANN / f"ann.2.{HEX}.mmkv"
    saved.write_text("saved")
    os.utime(saved, (0, 0))
    shutil.rmtree(folder)
    folder.symlink_to(tmp_path / ANN)
    (tmp_path / BOB).symlink_to(tmp_path / ANN)
    store.sweep(), SavedSessions(tmp_path).sweep()
    for call in (
        lambda: list(store.records(BOB)),
        lambda: store.delete(BOB, "x"),
        lambda: SavedSessions(tmp_path).of(BOB),
        lambda: SavedSessions(tmp_path).delete("notes", BOB),
    ):
        with pytest.raises(SessionError, match="a link in place of yours"):
            call()
    assert saved.exists() and all(path.read_bytes() == theirs[path] for path in theirs)


_NAMES = ["bob.1", "ann.1", "../x", HEX, RECORD["memory"], f"ann.1.{HEX}.mmkv"]


@pytest.mark.parametrize(
    "examples", [40, pytest.param(5000, marks=pytest.mark.drawn(reason="many more records"))]
)
def test_any_record_is_survived(examples: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(
        st.dictionaries(
            st.sampled_from([*RECORD, "more"]), st.sampled_from(_NAMES) | values, max_size=4
        ),
        st.lists(st.sampled_from(list(RECORD)), max_size=2),
        st.sampled_from([None, *PLACED.values()]),
        st.booleans(),
    )
    def check(changed: dict[str, Any], dropped: list[str], place: Any, twice: bool) -> None:
        root = tmp_path_factory.mktemp("root")
        store, folder, theirs = planted(root)
        record = {key: value for key, value in (RECORD | changed).items() if key not in dropped}
        text = json.dumps(record)
        if twice and len(record) > 1:  # names that stand twice
            text = f"{text[:-1]}, {json.dumps(RECORD)[1:]}"
        (folder / "bob.1.json").write_text(text)
        if place is not None:
            place(folder / RECORD["memory"], root)
        survives(store, theirs)
        shutil.rmtree(root)

    check()


def test_a_start_waits_for_no_other_server_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SWEEP", 0)
    store, folder, _ = planted(tmp_path)
    lost = [folder.parent / name / f"gone.1.{HEX}.mmkv" for name in (ANN, BOB)]
    for path in lost:
        path.write_text("of a server that was killed")
        os.utime(path, (0, 0))
    with FileLock(folder / ".lock"):
        sweeping = threading.Thread(target=store.sweep)
        sweeping.start()
        sweeping.join(30)
        over = not sweeping.is_alive()
    assert over and [path.exists() for path in lost] == [False, True]


def test_a_record_is_checked_as_it_is_written() -> None:
    record = SessionRecord.model_validate_json(json.dumps(RECORD))
    for wrong in ({"memory": "../x"}, {"media": ("x",)}, {"budget": ("entries", -1.0)}):
        with pytest.raises(ValueError, match="for SessionRecord"):
            record.changed(**wrong)


def test_drafts_of_killed_writers_go(tmp_path: Path) -> None:
    """Old ones, where the server writes; those of others, and of today, stay."""
    for folder in (tmp_path / ANN, tmp_path / ".sessions" / ANN):
        folder.mkdir(parents=True)
        gone = [f".x{DRAFT}", "notes.mmkvab_12cd3.part", "tmp1234_abc.part", ".tmpA1b2C3"]
        stay = ["movie.mp4.part", "notes.part", "notes.mmkv", ".tmpA1b2C3d", f"x{DRAFT}"]
        for name in (*gone, *stay, f".y{DRAFT}"):
            path = folder / name
            path.mkdir() if name.endswith(DRAFT) else path.write_text("")
            if name[0] != "." or name[1] != "y":
                os.utime(path, (0, 0))
        SessionStore(tmp_path).sweep(), SavedSessions(tmp_path).sweep()
        left = {path.name for path in folder.iterdir()} - {".lock"}
        assert left == {*stay, f".y{DRAFT}"}


def put(store: MediaStore, owner: str, tenant: str, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    store.put(owner, tenant, digest, content)
    return digest


def test_pictures_have_a_bound_and_who_sends_much_makes_way(tmp_path: Path) -> None:
    media = tmp_path / "media"
    store = MediaStore(media, DiskQuota(None, media, 2**30, 1000), most=250)
    names: dict[str, str] = {}

    def add(owner: str, tenant: str, letter: str, size: int = 100) -> None:
        names[put(store, owner, tenant, letter.encode() * size)] = letter
        time.sleep(0.002)  # their order is that of times

    def kept() -> str:
        return "".join(sorted(names[path.name[-64:]] for path in media.iterdir()))

    first, second = "1" * 32, "2" * 32
    for letter in "abc":
        add("me", first, letter)
    assert kept() == "bc"
    b = hashlib.sha256(b"b" * 100).hexdigest()
    assert store.get(first, b) == b"b" * 100
    assert store.get(second, b) is None and store.get(first, "../../etc/passwd") is None
    add("me", first, "d")
    assert kept() == "bd"
    # Nobody's one picture goes for another's many, however many browsers that one has made.
    add("you", second, "e")
    assert kept() in ("be", "de")
    add("me", "3" * 32, "f")
    assert kept() == "ef"
    add("me", first, "g", 300)  # one too large for itself alone
    assert kept() == "e"
    (media / f"{second}-{b}").write_text("not what its name says")
    assert store.get(second, b) is None


def test_an_owner_has_bytes_and_files_of_its_own(tmp_path: Path) -> None:
    media, saved, kept = tmp_path / ".media", tmp_path / ANN, tmp_path / ".sessions" / ANN
    idle = {"ann": (0, 0), "bob": (0, 0), "eve": (0, 0)}
    quota = DiskQuota(tmp_path, media, 1000, 4, idle.__getitem__)

    def fits(size: int, owner: str = "ann", tenant: str = ANN, files: int = 1) -> bool:
        try:
            with quota.writing(owner, tenant, size, files):
                return True
        except QuotaError as error:
            assert error.status == 507 and "delete sessions" in str(error)
            return False

    assert fits(1000) and not fits(1001)
    for folder, size in ((saved, 300), (kept, 300)):
        folder.mkdir(parents=True)
        (folder / "x.mmkv").write_bytes(b"." * size)
    assert fits(400) and not fits(401) and fits(1000, "bob", BOB)
    idle["ann"] = 100, 1
    assert fits(300) and not fits(301)
    with quota.writing("ann", ANN, 200, 0):  # two at once
        assert fits(100) and not fits(101)
    with quota.writing("ann", ANN, 0):  # the fourth file
        assert not fits(0)
    store = MediaStore(media, quota)
    first, second = (put(store, "ann", ANN, letter * 200) for letter in (b"a", b"b"))
    assert store.get(ANN, first) is None and store.get(ANN, second)  # its own make way
    with pytest.raises(QuotaError):  # one for which all of them would go in vain
        put(store, "ann", ANN, b"c" * 1000)
    assert store.get(ANN, second)
    (file,) = media.rglob(f"*{second}")
    os.utime(file, (0, 0))
    assert put(store, "ann", ANN, b"b" * 200) == second and file.stat().st_mtime > 0  # used again
    assert not fits(1) and fits(1, "bob", BOB)
    assert not fits(0) and fits(0, files=0) and fits(-5, files=0)  # what does not grow
    os.truncate(saved / "x.mmkv", 0)
    idle["ann"] = 0, 0
    assert fits(1) and not fits(1, files=2)
    with ExitStack() as writing:  # browsers of one address, all of which write their first file
        eves = ("e" * 32, "f" * 32)
        for tenant in eves:
            writing.enter_context(quota.writing("eve", tenant, 400))
        for tenant in eves:
            (tmp_path / tenant).mkdir()
            (tmp_path / tenant / "x.mmkv").write_bytes(b"." * 400)
    assert fits(200, "eve", "d" * 32) and not fits(201, "eve", "d" * 32)
    # Without a bound an owner takes no more than it leaves free.
    free = shutil.disk_usage(tmp_path).free
    unbound = DiskQuota(tmp_path, media, None, 100)
    more = unbound.writing("ann", ANN, free // 2 + 2**30)
    with unbound.writing("ann", ANN, free // 2), pytest.raises(QuotaError), more:
        pass


def load(folder: Path) -> Engine:
    options = {"gates": "random", "policy": "dbtrimkv", "budget": 24, "dtype": "float32"}
    return Engine.from_pretrained(folder, kv_limit=8 * 2**20, prefill_chunk=64, **options)


def test_nobody_without_a_key_takes_all_places(folder: Path) -> None:
    """A browser has half of what others leave, an address three quarters, whatever it says."""

    def opens(at: str, browser: str = "", says: str = "") -> bool:
        client = clients[at]
        head = {"X-Mmkv-Browser": browser * 32} if browser else {}
        head |= {"X-Forwarded-For": says} if says else {}
        answer = client.post("/v1/sessions", json={}, headers=head)
        if answer.status_code == 200:
            return True
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "too_many_sessions")
        assert "sessions are your" in error["message"]
        return False

    with ExitStack() as stack:
        settings = {"max_sessions": 8, "proxies": ("127.0.0.3/32",)}
        server = stack.enter_context(serving(lambda: load(folder), **settings))
        clients = {
            at: stack.enter_context(
                httpx.Client(base_url=server.url, transport=httpx.HTTPTransport(local_address=at))
            )
            for at in ("127.0.0.1", "127.0.0.2", "127.0.0.3")
        }
        assert [opens("127.0.0.1", "a") for _ in range(5)] == [True] * 4 + [False]
        assert [opens("127.0.0.1", letter) for letter in "bcde"] == [True, True, False, False]
        assert not opens("127.0.0.1", "f", "198.51.100.7")  # whom nobody trusts to say that
        assert opens("127.0.0.2", "h") and not opens("127.0.0.2", "i")
        assert not opens("127.0.0.3", "g", "127.0.0.1")  # the proxy is believed
        assert not opens("127.0.0.3", "g", "198.51.100.7, 127.0.0.2")
        assert opens("127.0.0.3", "g", "198.51.100.7")


def test_a_tenant_s_files_are_bounded(folder: Path, tmp_path: Path) -> None:
    """What does not fit is refused, and nothing is lost."""
    keys = {"api_keys": ("ann", "bob"), "session_folder": tmp_path, "keep_sessions": True}
    with serving(lambda: load(folder), tenant_files=5, **keys) as server:
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in keys["api_keys"])

        def post(path: str, body: Any, who: dict[str, str] = ann) -> httpx.Response:
            return server.client.post(f"/v1/{path}", json=body, headers=who)

        name = post("sessions", {}).json()["id"]
        turn = f"sessions/{name}/chat/completions"
        assert post(turn, asked("one")).status_code == 200  # two files
        for number in range(3):
            assert post(f"sessions/{name}/save", {"name": f"s{number}"}).status_code == 200
        for path, body in (
            (f"sessions/{name}/save", {"name": "more"}),
            ("sessions", {}),
            (f"sessions/{name}/fork", {}),
        ):
            full = post(path, body)
            assert full.status_code == 507, full.text
            assert full.json()["error"]["code"] == "tenant_storage_full"
            assert full.headers["x-should-retry"] == "false"
        # A turn puts one file in the place of another, and so does a save over an older one.
        assert post(turn, asked("two")).status_code == 200
        again = {"name": "s0", "overwrite": True}
        assert post(f"sessions/{name}/save", again).status_code == 200
        assert post("sessions", {}, bob).status_code == 200
        assert len(server.client.get("/v1/sessions", headers=ann).json()["data"]) == 1
        assert server.client.delete("/v1/saved_sessions/s1", headers=ann).status_code == 200
        assert post("sessions", {}).status_code == 200


def test_a_session_that_cannot_be_read_can_be_deleted(folder: Path, tmp_path: Path) -> None:
    keeps = {"session_folder": tmp_path, "keep_sessions": True}
    place = tmp_path / ".sessions" / "public"
    with serving(lambda: load(folder), **keeps) as server:
        names = [server.client.post("/v1/sessions", json={}).json()["id"] for _ in range(2)]
    (place / f"{names[0]}.json").write_text("{")
    other = tmp_path / ANN
    other.mkdir()
    _memory_of(place, names[1], other / "secret.mmkv")
    with serving(lambda: load(folder), **keeps) as server:
        client = server.client
        listed = [one["id"] for one in client.get("/v1/sessions").json()["data"]]
        assert listed == [names[1]]
        assert client.get(f"/v1/sessions/{names[0]}").status_code == 409
        assert client.delete(f"/v1/sessions/{names[0]}").status_code == 200
        assert client.get(f"/v1/sessions/{names[0]}").status_code == 404
        for path in ("memory", "messages"):
            shown = client.get(f"/v1/sessions/{names[1]}/{path}")
            assert shown.status_code == 409 and "no file but a link" in shown.text
            assert str(tmp_path) not in shown.text
        assert client.delete(f"/v1/sessions/{names[1]}").status_code == 200
    assert (other / "secret.mmkv").read_text() == "secret"


def _memory_of(place: Path, name: str, secret: Path) -> None:
    """Let a session's record name a link to somebody else's file."""
    secret.write_text("secret")
    record = json.loads((place / f"{name}.json").read_text())
    memory = f"{name}.{HEX}.mmkv"
    (place / memory).symlink_to(secret)
    (place / f"{name}.json").write_text(json.dumps(record | {"memory": memory, "turns": 1}))


def test_addresses_that_one_host_may_have_are_one() -> None:
    same = ["2001:db8:1:2::1", "2001:db8:1:2:ffff::9%eth0"]
    assert {network_of(one) for one in same} == {"2001:db8:1:2::/64"}
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("192.0.2.2") != network_of("192.0.2.1")
    assert network_of("") == "" and network_of("x" * 99) == "x" * 64
