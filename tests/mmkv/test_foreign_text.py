"""Text of templates, files and models reaches a terminal without codes that steer it."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mmkv import Engine
from mmkv.chat.display import _Plain
from mmkv.chat.markdown import MarkdownStream
from mmkv.checkpoints import Checkpoint, ListedGates, Listing, table
from mmkv.cli.app import run
from mmkv.engine.errors import InputError, first_line, one_line, plain, without_codes
from mmkv.prompt.template import ChatTemplate
from mmkv.server.run import PlainFormatter
from tests.support.chat_models import byte_tokenizer, new_repl, save_llama, script

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


@pytest.mark.parametrize("source", [REFUSING, "{{ '" + CODES + "' / 2 }}"])
def test_what_a_template_raises_is_plain_text(source: str) -> None:
    template = ChatTemplate(byte_tokenizer(), source, parts=False)
    with pytest.raises(InputError, match="the model's chat template") as raised:
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


def test_a_reply_as_markdown() -> None:
    screen = io.StringIO()
    view = MarkdownStream(Console(file=screen, force_terminal=False, width=60))
    view.feed(f"a {CODES} b\n")
    view.close()
    assert not has_codes(screen.getvalue())


def test_names_of_files_in_a_listing() -> None:
    model = Checkpoint(CODES, CODES, "folder", CODES, 3, [CODES], CODES)
    screen = io.StringIO()
    listing = Listing([model], [ListedGates(CODES, CODES, "folder", CODES, CODES, "")])
    Console(file=screen, width=200).print(table(listing))
    assert not has_codes(screen.getvalue())
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
