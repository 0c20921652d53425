"""Markdown of replies on a terminal: streamed or whole, the same screen, and nothing lacks."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

import mmkv.chat.markdown as module
from mmkv.chat.display import Display, answer
from mmkv.chat.markdown import MarkdownStream
from mmkv.chat.options import ChatOptions

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

BLOCKS = (
    "A paragraph with *some* **marks**, `code` and snake_case words.",
    "line one\nline two #tag\n#notitle\n-5 degrees",
    "# Title",
    "Under\n=====",
    "- one\n- two\n  - nested\n\n  more of two",
    "3. three\n4. four",
    "```python\ndef f(x):\n\n    return 'abc' + x\n```",
    "    indented code\n\n    more of it",
    "| name | number |\n|---|--:|\n| averyveryverylongwordwithoutanyspace | 1 |",
    "> quoted\nlazy",
    "<b>bold</b> and &amp; more",
    "<div>\nhtml block\n</div>",
    "![picture](http://example.org/p.png) [link](http://example.org/l)",
    "[ref]: http://example.org/ref",
    "***",
    "*",
)


class Screen:
    """What a terminal of endless height shows of what is written to it."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.|\n", text):
            if part == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif part == "\r":
                self.column = 0
            elif part.endswith("A") and part.startswith("\x1b"):
                self.row -= int(part[2:-1])
                assert self.row >= 0
            elif part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part.startswith("\x1b"):
                assert re.fullmatch(r"\x1b\[(\?25[lh]|[\d;]*m)", part), repr(part)
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1

    def shown(self) -> list[str]:
        """Return the lines that hold something."""
        return [line.rstrip() for line in self.lines if line.strip()]


def console(stream: io.StringIO, width: int) -> Console:
    return Console(file=stream, force_terminal=True, width=width, height=12, color_system=None)


def streamed(text: str, width: int, rng: random.Random) -> Screen:
    stream, screen, at = io.StringIO(), Screen(), 0
    view = MarkdownStream(console(stream, width))
    while at < len(text):
        end = at + rng.randrange(1, 8)
        view.feed(text[at:end])
        at = end
    view.close()
    screen.write(stream.getvalue())
    assert screen.column == 0 and not any(screen.lines[screen.row :])
    return screen


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_ends_as_the_whole_text_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE_S", 0)  # redraw at every piece
    monkeypatch.setattr(module, "SHARE", 0)
    rng = random.Random(seed)
    text = "\n\n".join(rng.choices(BLOCKS, k=rng.randrange(1, 6)))
    width = rng.choice((24, 60))
    whole = io.StringIO()
    console(whole, width).print(module._Reply(text))
    once = Screen()
    once.write(whole.getvalue())
    shown = streamed(text, width, rng).shown()
    assert shown == once.shown()
    # Wrapped words are joined again; numbers of lists and the names of languages are drawn anew.
    words = re.findall(r"[a-z]{2,}", re.sub(r"```\w*", "", text))
    joined = re.sub(r"[^a-z]", "", "".join(shown))
    assert all(word in joined for word in words if word != "amp")


def test_blocks_that_are_over_are_written_once() -> None:
    stream = io.StringIO()
    view = MarkdownStream(console(stream, 40))
    for piece in ("first\n\n", "second\n\n", "third\n"):
        view._rest_until = 0.0  # it is time to draw
        view.feed(piece)
    before, view._rest_until = len(stream.getvalue()), float("inf")
    view.feed(" and more\n" * 30)
    view.close()
    later = stream.getvalue()[before:]
    assert "first" not in later and "second" not in later and later.count("third") == 1


def test_control_characters_do_not_reach_the_terminal() -> None:
    stream = io.StringIO()
    view = MarkdownStream(console(stream, 40))
    view.feed("a\x1b]0;title\x07b\x9b2Jc\rd")
    view.close()
    assert "a]0;titleb2Jcd" in stream.getvalue()


def test_keys_are_not_echoed_into_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    view = MarkdownStream(console(io.StringIO(), 40))

    def echoes() -> bool:
        return bool(termios.tcgetattr(theirs)[3] & termios.ECHO)

    with open(theirs) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        assert echoes()
        view.feed("text")
        assert not echoes()
        view.close()
        assert echoes()
    os.close(ours)


# --- in the chat ---


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Session:
    """Says ``**yes**``, and then raises ``error`` if one is given."""

    note, last = (
        None,
        SimpleNamespace(text="**yes**", finish_reason="eos", token_ids=[1], memory=None),
    )

    def __init__(self, error: BaseException | None) -> None:
        self.history: list[Any] = []
        self._error = error

    def send(self, *_: Any, **__: Any) -> Iterator[str]:
        self.history += ["question", "reply"]
        yield from ("**ye", "s**")
        if self._error is not None:
            raise self._error


def said(
    monkeypatch: pytest.MonkeyPatch,
    stream: io.StringIO,
    error: BaseException | None = None,
    **options: bool,
) -> str:
    """Return what a reply leaves on ``stream``."""
    monkeypatch.setattr(sys, "stdout", stream)
    made = ChatOptions(**options)
    session: Any = Session(error)
    with suppress(RuntimeError):
        answer(None, session, made, Display(made), "?", [], [], None, made.sampling())  # type: ignore[arg-type]
    return stream.getvalue()


@pytest.mark.parametrize("no_stream", [False, True])
def test_only_a_terminal_gets_rendered_text(
    monkeypatch: pytest.MonkeyPatch, no_stream: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    screen.write(said(monkeypatch, Terminal(), no_stream=no_stream))
    assert screen.lines == ["yes", ""]
    assert said(monkeypatch, Terminal(), no_stream=no_stream, plain=True) == "**yes**\n"
    assert said(monkeypatch, io.StringIO(), no_stream=no_stream) == "**yes**\n"
    monkeypatch.setenv("TERM", "dumb")
    assert said(monkeypatch, Terminal(), no_stream=no_stream) == "**yes**\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broke")])
def test_what_stops_a_reply_leaves_the_terminal_in_order(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    written = said(monkeypatch, Terminal(), error)
    screen = Screen()
    screen.write(written)
    assert screen.lines == ["yes", ""]
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")  # the cursor is shown again


def test_plain_is_an_option_of_the_config_file(
    mmkv: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "mmkv.toml").write_text("plain = true\n")
    assert "plain True" in mmkv("env").out
