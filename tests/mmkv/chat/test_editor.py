"""Input editing at a terminal: pasted blocks, several lines, history, completion."""

from __future__ import annotations

import os
import pty
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input.base import PipeInput
from prompt_toolkit.input.defaults import create_pipe_input

from mmkv.chat.editor import HISTORY_SIZE, Editor, continuation, open_history
from mmkv.chat.inputs import Words
from mmkv.chat.repl import COMMANDS, HIDDEN, SETTINGS
from mmkv.resources import state_folder

ENTER, NEW_LINE, UP, TAB = "\r", "\x1b\r", "\x1b[A", "\t"


def pasted(text: str) -> str:
    """Return what a terminal sends for a pasted text."""
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe, create_app_session(input=pipe):
        yield pipe


@pytest.fixture
def screen() -> Iterator[TextIO]:
    with open(os.devnull, "w") as stream:
        yield stream


@pytest.fixture
def editor(keys: PipeInput, screen: TextIO) -> Editor:
    words = Words(
        {name: command.takes for name, command in COMMANDS.items()},
        {name: command.takes for name, command in HIDDEN.items()},
        {"set": lambda: SETTINGS, "fork": lambda: ["main", "other"]},
    )
    return Editor(words, screen)


def typed(editor: Editor, keys: PipeInput, text: str) -> str:
    keys.send_text(text)
    return editor.read()


def test_a_pasted_block_is_one_message(editor: Editor, keys: PipeInput) -> None:
    block = 'if a:\n    b = 1 \\\n    c\n\n"""\nend'
    assert typed(editor, keys, pasted(block) + ENTER) == block
    assert typed(editor, keys, pasted("one\r\ntwo\r\n") + "three" + ENTER) == "one\ntwo\nthree"
    # Quotes that a text opens and closes by itself stay in it.
    code = '"""Doc."""\nx = """a"""'
    assert typed(editor, keys, pasted(code) + ENTER) == code


def test_lines_are_joined_as_they_are_from_a_pipe(editor: Editor, keys: PipeInput) -> None:
    assert typed(editor, keys, f"one{NEW_LINE}two{ENTER}") == "one\ntwo"
    assert typed(editor, keys, f"what\\{ENTER}is it?{ENTER}") == "what\nis it?"
    assert typed(editor, keys, f'"""several{ENTER}lines"""{ENTER}') == "several\nlines"
    assert typed(editor, keys, f'"""{ENTER}a\\{ENTER}b{ENTER}"""{ENTER}') == "a\nb"


def test_only_lines_of_the_message_have_dots() -> None:
    assert [continuation(4, 0, 1), continuation(4, 1, 0)] == ["    ", "... "]


def test_ctrl_c_and_ctrl_d(editor: Editor, keys: PipeInput) -> None:
    with pytest.raises(KeyboardInterrupt):
        typed(editor, keys, "half a line\x03")
    with pytest.raises(EOFError):
        typed(editor, keys, "\x04")


def test_the_history_outlives_the_editor_and_is_private(
    editor: Editor, keys: PipeInput, screen: TextIO
) -> None:
    typed(editor, keys, f"first{NEW_LINE}line{ENTER}")
    keys.send_text("y" + ENTER)
    assert editor.agrees("overwrite?")
    keys.send_text("no" + ENTER)
    assert not editor.agrees("overwrite?")
    file = state_folder() / "history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert typed(Editor(Words(), screen), keys, UP + ENTER) == "first\nline"


def test_the_history_stays_short(tmp_path: Path) -> None:
    file = tmp_path / "history"
    history = open_history(file)
    for number in range(2 * HISTORY_SIZE):
        history.store_string(f"message {number}")
    history.store_string("\udcff is no UTF-8")
    kept = list(open_history(file).load_history_strings())
    assert kept == [
        f"message {number}" for number in reversed(range(HISTORY_SIZE, 2 * HISTORY_SIZE))
    ]
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["history"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_home_that_cannot_be_written_keeps_nothing(
    keys: PipeInput, tmp_path: Path, screen: TextIO
) -> None:
    (tmp_path / "state").write_text("a file")
    editor = Editor(Words(), screen)
    assert typed(editor, keys, "hello" + ENTER) == "hello"
    assert typed(editor, keys, UP + ENTER) == "hello"


@pytest.mark.parametrize(
    ("start", "whole"),
    [
        ("/im", "/image "),
        ("/image pic", "/image pictures/"),
        ("/image pictures/re", "/image pictures/red.png"),
        ("/save! pictures/re", "/save! pictures/red.png"),
        ("/set max", "/set max_new_tokens"),
        ("/fork o", "/fork other"),
        ("look at pic", "look at pic"),
        ("/budget pic", "/budget pic"),
    ],
)
def test_tab_completes(
    editor: Editor, keys: PipeInput, tmp_path: Path, start: str, whole: str
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").touch()
    assert typed(editor, keys, start + TAB + ENTER) == whole


PROGRAM = """
import sys
from mmkv.chat.inputs import Words
from mmkv.chat.repl import open_reader
reader = open_reader(Words())
sys.stderr.write(type(reader).__name__ + "\\n")
sys.stderr.write(repr(reader.read()) + "\\n")
sys.stderr.write(str("prompt_toolkit" in sys.modules) + "\\n")
"""


def test_a_terminal_is_asked_to_mark_what_is_pasted() -> None:
    """In a pseudo-terminal, with stdout redirected: prompt and editing are on stderr."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    seen = b""
    try:
        while b"\x1b[?2004h" not in seen:
            seen += os.read(ours, 1000)
        os.write(ours, pasted("one\ntwo").encode() + b"\r")
        while b"True" not in seen:
            seen += os.read(ours, 1000)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"Editor" in seen and b"'one\\ntwo'" in seen


def test_a_pipe_is_read_by_lines() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="one\ntwo\n", capture_output=True, text=True
    )
    assert done.stderr == "LineReader\n'one'\nFalse\n"
