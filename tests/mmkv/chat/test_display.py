"""Replies on a terminal: Markdown, the panel, places of errors, and text that steers nothing."""

from __future__ import annotations

import inspect
import io
import json
import logging
import os
import pty
import random
import re
import subprocess
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
from mmkv import Engine, Sampling, resources
from mmkv.chat import saved, trouble
from mmkv.chat.display import Display, _Plain, answer, calls_shown, memory_line
from mmkv.chat.markdown import MarkdownStream
from mmkv.chat.options import ChatOptions
from mmkv.chat.repl import COMMANDS
from mmkv.checkpoints import Checkpoint, ListedGates, Listing, table
from mmkv.cli.app import run
from mmkv.engine.errors import InputError, first_line, one_line, plain, without_codes
from mmkv.prompt.template import ChatTemplate
from mmkv.resources import bundled_model, config_file, state_folder
from mmkv.server.run import PlainFormatter
from tests.support.chat_models import byte_tokenizer, new_repl, save_llama, script

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


@pytest.mark.parametrize("seed", range(14))
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
    view.feed(f"a\x1b]0;title\x07b\x9b2Jc\rd{CODES}")
    view.close()
    assert "a]0;titleb2Jcd[2J31m]0;owned" in stream.getvalue()


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

    notes: tuple[()] = ()
    last = SimpleNamespace(text="**yes**", finish_reason="eos", token_ids=[1], memory=None)

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
        answer(session, made, Display(made), "?", [], [], None, made.sampling())  # type: ignore[arg-type]
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


# Parts of mmkv chat by themselves: folders, what a file may name, places of errors, the panel.


def test_folders_are_those_of_the_xdg_specification(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Absolute paths are followed, relative ones are ignored, and unset means below the home."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for variable, found, own in (
        ("XDG_STATE_HOME", state_folder, tmp_path / ".local" / "state" / "mmkv"),
        ("XDG_CONFIG_HOME", config_file, tmp_path / ".config" / "mmkv.toml"),
    ):
        monkeypatch.delenv(variable)
        assert found() == own
        for relative in ("", "here", "./state", "../up"):
            monkeypatch.setenv(variable, relative)
            assert found() == own
        monkeypatch.setenv(variable, "/elsewhere")
        assert found() == Path("/elsewhere") / own.name


def test_the_form_of_a_session_file_is_read_from_it(tmp_path: Path) -> None:
    """Whoever wrote it: a program that stores no options of a chat, too."""
    engine = Engine.from_pretrained(bundled_model(), policy="streamingllm", budget=8, kv="k8v4")
    with engine.session() as session:
        list(session.send("hello", sampling=Sampling(max_new_tokens=2)))
        session.save(tmp_path / "kept.mmkv")
    assert saved.chat_options(tmp_path / "kept.mmkv")["kv"] == "k8v4"


def test_a_transcript_is_utf_8_whatever_the_locale_is(tmp_path: Path) -> None:
    """Python warns where no encoding is named and the locale decides; that is an error here."""
    code = """
import sys
from pathlib import Path
from types import SimpleNamespace
from mmkv.chat.saved import export
talk = [{"role": "user", "content": "rot \\u2192 gr\\u00fcn"}]
export(SimpleNamespace(history=talk), "m", Path(sys.argv[1]))
"""
    target = tmp_path / "talk.md"
    strict = "error::EncodingWarning:mmkv.chat.saved"
    options = ["-X", "warn_default_encoding", "-W", strict]
    done = subprocess.run(
        [sys.executable, *options, "-c", code, str(target)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "rot \u2192 gr\u00fcn" in target.read_text("utf-8")


def test_an_error_is_placed_in_the_innermost_line_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mmkv's own code, whatever else stands below it; else where it was raised."""

    def lost() -> Path:
        raise ValueError("no home")

    monkeypatch.setattr(Path, "home", lost)
    monkeypatch.delenv("XDG_STATE_HOME")
    with pytest.raises(ValueError, match="no home") as raised:
        state_folder()
    lines, first = inspect.getsourcelines(resources._home)
    at = first + next(i for i, line in enumerate(lines) if "Path.home()" in line)
    assert trouble._place(raised.value) == f"mmkv/resources.py:{at}"
    with pytest.raises(ValueError, match="Expecting") as foreign:
        json.loads("{")
    assert trouble._place(foreign.value).startswith("decoder.py:")
    assert trouble._place(ValueError("never raised")) == "mmkv"


class Said:
    """A display that keeps what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.say = self.lines.append
        self.animated = True
        self.shown: list[Any] = []
        self.show = self.shown.append


def test_forks_are_listed_and_what_is_kept_is_drawn() -> None:
    engine = Engine.from_pretrained(bundled_model(), policy="streamingllm", budget=8)
    session = engine.session()
    assert "kept 0 of 0 entries (100 %)" in memory_line(session)
    list(session.send("what is at row 2, column 3?", sampling=Sampling(max_new_tokens=3)))
    memory, rows = session.memory(), engine.spec.num_layers * engine.spec.num_kv_heads
    total = memory.tokens_seen * rows
    assert memory.entries == 8 * rows < total
    share = f"({100 * 8 / memory.tokens_seen:.0f} %)"
    line = memory_line(session)
    assert f"kept {memory.entries:,} of {total:,} entries {share}" in line
    display = Said()
    repl: Any = SimpleNamespace(engine=engine, session=session, display=display, watching=False)
    repl.branch, repl.branches = "main", {"main": session}
    for name, listed in (
        ("", "[main]"),
        ("b", "main, [b]"),
        ("", "main, [b]"),
        ("main", "[main], b"),
    ):
        COMMANDS["fork"].run(repl, name)
        assert display.lines.pop() == f"conversations: {listed}"
    assert repl.session is session
    COMMANDS["watch"].run(repl, "")
    assert repl.watching and "/watch again hides it" in display.lines.pop()
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(display.shown.pop())
    drawn = console.export_text()
    assert re.search(rf"text .* {memory.entries:,} entries", drawn)
    assert f"{memory.entries:,} of {total:,}, {memory.entries:,} allowed" in drawn
    COMMANDS["watch"].run(repl, "")
    assert not repl.watching and display.lines.pop() == "hidden"
    for held in repl.branches.values():
        held.close()


# Text of templates, files and models reaches a terminal without codes that steer it.


# Clears the screen, rings, sets the title, turns the direction of text.
CODES = "\x1b[2J\x07\x9b31m\x1b]0;owned\x07\u202e"
REFUSING = "{{ raise_exception('" + CODES + "no') }}"


def has_codes(text: str) -> bool:
    return any(code in text for code in "\x1b\x07\x9b\u202e")


def test_codes_become_escapes_and_words_stay() -> None:
    text = f"é\u200d\U0001f469 {CODES}\n\tb"
    shown = plain(text)
    assert not has_codes(shown) and shown.startswith("é\u200d\U0001f469 \\x1b[2J\\x07")
    assert shown.endswith("\n\tb") and "\\u202e" in shown
    assert without_codes(text) == "é\u200d\U0001f469 [2J31m]0;owned\n\tb"
    assert not has_codes(one_line(text)) and not has_codes(first_line(ValueError(CODES)))
    assert len(first_line(ValueError("\x07" * 150))) == 200


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (REFUSING, "refuses these messages .*; drop the system message or reorder the turns"),
        ("{{ '" + CODES + "' / 2 }}", "is broken .*; use another model, or --raw"),
        ("{% if %}", "is damaged .*; get another copy of chat_template.jinja"),
    ],
)
def test_what_a_template_raises_is_plain_text(source: str, says: str) -> None:
    template = ChatTemplate(byte_tokenizer(), source, parts=False)
    with pytest.raises(InputError, match=f"the model's chat template {says}") as raised:
        template.render([{"role": "user", "content": "a"}], opening=True)
    assert not has_codes(str(raised.value))


def test_a_refusing_template_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_llama(tmp_path / "m", REFUSING)
    monkeypatch.setattr(sys, "argv", ["mmkv", "chat", str(folder), "-p", "a"])
    assert run() == 1
    found = capsys.readouterr()
    assert "refuses these messages" in found.err and not has_codes(found.err + found.out)


def test_replies_and_history_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_llama(tmp_path)
    engine = Engine.from_pretrained(folder, policy="snapkv", budget=16, dtype="float32")
    script(monkeypatch, engine, [CODES] * 2)
    repl = new_repl(engine, str(folder), plain=True, autosave=False)
    repl.sampling = repl.sampling.__class__(max_new_tokens=40)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    repl.handle(f"say {CODES}")
    repl.handle("/history")
    found = capsys.readouterr()
    assert "say" in found.err and not has_codes(found.out + found.err)
    assert repl.session.history[-1]["content"] == CODES  # what is saved and exported is as it was
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    _Plain().feed(CODES)
    assert capsys.readouterr().out == CODES  # a pipe gets the text as it is
    repl.session.close()


def test_names_of_files_in_a_listing() -> None:
    model = Checkpoint(CODES, CODES, "folder", CODES, 3, [CODES], CODES)
    screen = io.StringIO()
    listing = Listing([model], [ListedGates(CODES, CODES, "folder", CODES, CODES, "")])
    Console(file=screen, width=200).print(table(listing))
    Console(file=screen).print(calls_shown([(f"look{CODES}", f"at{CODES}")]))
    assert not has_codes(screen.getvalue()) and "look" in screen.getvalue()
    assert not has_codes(json.dumps(listing.as_json()))


def test_log_lines_of_the_server() -> None:
    def fail(text: str) -> Any:
        raise ValueError(text)

    try:
        fail(CODES)
    except ValueError:
        made = logging.LogRecord("mmkv", 40, "", 0, "failed %s", (CODES,), sys.exc_info())
    text = PlainFormatter().format(made)
    assert not has_codes(text) and "Traceback" in text and text.count("\n") > 2
