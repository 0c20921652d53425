"""Files of the chat: autosave and --resume, --load and --save, /save, /load and /export."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mmkv.chat.saved
from mmkv import Engine
from mmkv.chat.repl import Repl
from mmkv.chat.saved import KEPT, SHARE
from mmkv.engine.errors import plain
from tests.support.chat_models import new_repl

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

FEW = ("--max-new-tokens", "5")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this test's autosaved chats."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "mmkv" / "chats"


def replies(ran: Ran) -> list[tuple[str, dict[str, int]]]:
    """Return text and tokens of each reply of a run with --json, which must have ended well."""
    assert ran.code == 0 and "error" not in ran.err, ran.err
    return [(r["text"], r["tokens"]) for r in map(json.loads, ran.out.splitlines())]


# --- autosave ---


def test_a_chat_that_is_killed_goes_on_with_resume(
    mmkv: Callable[..., Ran], small_engine: Engine, model: str, state: Path
) -> None:
    options = ("--json", *FEW, "--policy", "snapkv", "--budget", "16")
    one, two, three = replies(mmkv("chat", model, "-i", *options, stdin="hello\nand?\nso?\n"))
    killed = new_repl(small_engine, model)
    killed.handle("hello")
    killed.handle("and?")
    # Nothing was closed and nothing said goodbye; model, policy and budget are those of the file.
    ran = mmkv("chat", "--resume", "-i", "--json", *FEW, stdin="so?\n")
    assert replies(ran) == [three]
    (file,) = [path for path in state.iterdir() if path.name in ran.err]
    assert f'loaded {file}: 2 turn(s), {two[1]["seen"]} tokens; latest: "and?"' in ran.err
    # That chat was kept in the same file, so that it is the latest again.
    again = mmkv("chat", "--resume", "-i", "--json", *FEW, stdin="/history\n")
    assert f"loaded {file}: 3 turn(s)" in again.err and ">>> so?" in again.err
    assert f">>> hello\n{plain(one[0])}\n" in again.err
    killed.session.close()


def test_autosaved_files_are_private_few_and_whole(
    small_engine: Engine, model: str, state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = os.umask(0)
    try:
        for number in range(KEPT + 3):
            chat = new_repl(small_engine, model)
            chat.handle(f"hello {number}")
            latest = max(state.iterdir(), key=lambda path: path.stat().st_mtime)
            os.utime(latest, (number, number))
            chat.handle("/clear")  # a conversation of its own from here on
            chat.session.close()
    finally:
        os.umask(before)
    files = list(state.iterdir())
    assert len(files) == KEPT and stat.S_IMODE(state.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    capfd.readouterr()
    newest = max(files, key=lambda path: path.stat().st_mtime)
    chat = new_repl(small_engine, model, load=str(newest))
    chat.load(newest)
    assert f'latest: "hello {KEPT + 2}"' in capfd.readouterr().err
    chat.session.close()


def test_a_failing_autosave_is_one_line_once(
    repl: Repl, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(*_: Any) -> None:
        raise full

    monkeypatch.setattr(repl.session.__class__, "save", fail)
    for text in ("hello", "and?", "so?"):
        repl.handle(text)
    shown = capfd.readouterr()
    assert shown.err.count("not kept for --resume") == 1
    assert "No space left on device" in shown.err and len(repl.session.history) == 6


def test_a_state_folder_that_cannot_be_is_one_line(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    ran = mmkv("chat", model, "-i", *FEW, stdin="hello\nand?\n")
    assert ran.code == 0 and ran.err.count("not kept for --resume") == 1
    assert mmkv("chat", "--resume", "-i").error_line().endswith("begin one with mmkv chat")


def test_no_autosave_leaves_nothing(mmkv: Callable[..., Ran], model: str, state: Path) -> None:
    mmkv("chat", model, "-i", "--no-autosave", *FEW, stdin="hello\n")
    mmkv("chat", model, *FEW, stdin="one answer\n")
    assert not state.exists()


def test_saving_takes_a_small_share_of_the_time(
    repl: Repl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of 3 seconds (a large cache) is followed by none for 60, and the end saves."""
    now, saves = [1000.0], []
    monkeypatch.setattr(mmkv.chat.saved.time, "monotonic", lambda: now[0])

    def save(session: Any, path: Path, extra: Any) -> None:
        saves.append(now[0])
        now[0] += 3
        path.write_bytes(b"")

    monkeypatch.setattr(repl.session.__class__, "save", save)
    for _ in range(11):
        repl.handle("hello")
        now[0] += 20
    assert saves == [1000.0, 1063.0, 1126.0, 1189.0] and 3 * SHARE == 60
    repl._keep(last=True)
    assert len(saves) == 5


# --- /save, /export and --save ---


def targets(folder: Path, repl: Repl) -> dict[str, tuple[str, str, str]]:
    """Return names to save to: what is refused of them, and what /save! says."""
    talk = folder / "talk.mmkv"
    repl.session.save(talk)
    (folder / "photo.png").write_bytes(b"\x89PNG precious")
    (folder / "notes.md").write_text("precious")
    (folder / "empty").write_bytes(b"")
    (folder / "header.mmkv").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("photo.png", "talk.mmkv", "folder", "pipe", "nothing"):
        (folder / f"to-{name}").symlink_to(folder / name)
    (folder / "to-null").symlink_to("/dev/null")
    (folder / "loop").symlink_to(folder / "loop")
    refused = {
        "photo.png": "photo.png is not a session file; .*/save! ",
        "notes.md": "is not a session file",
        "empty": "is not a session file",
        "header.mmkv": "is not a session file",
        "talk.mmkv": "exists and stays as it is; .*/save! ",
        "to-talk.mmkv": "exists and stays as it is",
    }
    never = {
        "folder": "is a folder",
        "pipe": "is a pipe",
        "to-photo.png": "is a link to",
        "to-folder": "is a folder",
        "to-pipe": "is a pipe",
        "to-nothing": "is a link to a file that is not there",
        "to-null": "is a device",
        "loop": "",
        "no/where.mmkv": "there is no folder",
        "photo.png/x": "there is no folder",
        "a\0b": "not a usable file name",
        "x" * 300: "",
        "~no-such-user/x": "not a usable file name",
    }
    made = {name: (says, "saved to") for name, says in refused.items()}
    made |= {name: (says, says) for name, says in never.items()}
    return {
        name: (name if name.startswith("~") else str(folder / name), *says)
        for name, says in made.items()
    }


def contents(folder: Path) -> dict[str, bytes | str]:
    return {
        path.name: path.read_bytes()
        if path.is_file() and not path.is_symlink()
        else f"{stat.S_IFMT(path.lstat().st_mode)}"
        for path in sorted(folder.iterdir())
    }


def test_save_overwrites_nothing_by_accident(
    repl: Repl, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("hello")
    repl.autosave = None
    folder = tmp_path / "files"
    folder.mkdir()
    cases = targets(folder, repl)
    repl.handle("and?")
    before = contents(folder)
    names = list(cases)
    random.Random(1).shuffle(names)
    capfd.readouterr()
    for name in names:
        path, says, _ = cases[name]
        repl.handle(f"/save {path}")
        shown = capfd.readouterr().err
        assert shown.startswith("mmkv: error: ") and shown.count("\n") == 1, shown
        assert re.search(says, shown), shown
        assert contents(folder) == before, name
    for name in sorted(names, key=lambda name: cases[name][2] == "saved to"):
        path, _, says = cases[name]
        repl.handle(f"/save! {path}")
        shown = capfd.readouterr().err
        assert says in shown and shown.count("\n") == 1, shown
    after = contents(folder)
    changed = {name for name in after if after[name] != before.get(name)}
    # A link stays one, and what it names was written.
    assert changed == {"photo.png", "notes.md", "empty", "header.mmkv", "talk.mmkv"}
    assert Path("/dev/null").is_char_device()


def test_save_asks_at_a_terminal(
    repl: Repl, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Reader:
        def __init__(self, answer: bool) -> None:
            self.answer, self.asked = answer, ""

        def agrees(self, question: str) -> bool:
            self.asked = question
            return self.answer

    file = tmp_path / "talk.mmkv"
    repl.handle("hello")
    repl.handle(f"/save {file}")
    old = file.read_bytes()
    repl.handle("and?")
    for answer in (False, True):
        repl.reader = Reader(answer)  # type: ignore[assignment]
        repl.handle(f"/save {file}")
        assert repl.reader.asked == f"{file} exists; overwrite it?"  # type: ignore[union-attr]
        assert (file.read_bytes() == old) is not answer
    (tmp_path / "a.png").write_bytes(b"picture")
    repl.handle(f"/save {tmp_path / 'a.png'}")
    assert (tmp_path / "a.png").read_bytes() == b"picture"


def test_a_tilde_is_the_home(
    repl: Repl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    repl.handle("hello")
    repl.handle("/save ~/talk.mmkv")
    repl.handle("/export ~/talk.md")
    assert (tmp_path / "talk.mmkv").is_file() and (tmp_path / "talk.md").is_file()
    seen = repl.session.seen
    repl.handle("/clear")
    repl.handle("/load ~/talk.mmkv")
    assert repl.session.seen == seen


def test_export_writes_markdown_and_overwrites_only_its_own(
    repl: Repl, tmp_path: Path, picture: str, capfd: pytest.CaptureFixture[str]
) -> None:
    repl.handle("/system Be kind.")
    repl.handle(f"/image {picture}")
    repl.handle("what is it?")
    file, notes = tmp_path / "talk.md", tmp_path / "notes.md"
    notes.write_text("# My notes")
    repl.handle(f"/export {file}")
    reply = repl.session.history[-1]["content"]
    title = Path(repl.options.model).name
    assert file.read_text() == (
        f"# Conversation with {title}\n\n**System**\n\nBe kind.\n\n"
        f"**You**\n\n[picture] what is it?\n\n**Reply**\n\n{reply}\n"
    )
    repl.handle(f"/export {notes}")
    assert notes.read_text() == "# My notes"
    repl.handle("and?")
    old = file.read_text()
    repl.handle(f"/export {file}")
    assert file.read_text() == old
    repl.handle(f"/export! {file}")
    assert file.read_text().startswith(old.rstrip("\n")) and "and?" in file.read_text()


def test_load_and_save_as_options(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    talk = str(tmp_path / "talk.mmkv")
    options = (*FEW, "--json")
    policy = ("--policy", "snapkv", "--budget", "16")
    whole = replies(mmkv("chat", model, "-i", *options, *policy, stdin="hello\nand?\nso?\n"))
    ran = mmkv("chat", model, "-i", *options, *policy, "--save", talk, stdin="hello\n")
    assert replies(ran) == whole[:1]
    # One answer a call: the file goes on, with the model, the policy and the budget that it has.
    ran = mmkv("chat", "--load", talk, "--save", talk, "-p", "and?", *options)
    assert (
        json.loads(ran.out)["tokens"] == whole[1][1]
        and json.loads(ran.out)["budget"]["value"] == 16
    )
    ran = mmkv("chat", "--load", talk, "-i", *options, stdin="so?\n")
    assert replies(ran) == whole[2:]
    ran = mmkv("chat", "--load", talk, "-i", *options, "--budget", "8", stdin="so?\n")
    assert json.loads(ran.out)["budget"]["value"] == 8
    assert "exists" in mmkv("chat", model, "-p", "x", "--save", talk).error_line()
    assert "no session file at" in mmkv("chat", "--load", "/nowhere", "-p", "x").error_line()
    assert "not a session file" in mmkv("chat", "--load", __file__, "-p", "x").error_line()
    both = mmkv("chat", "--resume", "--load", talk, "-i")
    assert both.code == 2 and "exclude each other" in both.error_line()
