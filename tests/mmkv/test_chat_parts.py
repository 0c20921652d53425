"""Parts of mmkv chat by themselves: folders, what a file may name, places of errors, the panel."""

from __future__ import annotations

import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from mmkv import Engine, Sampling, resources
from mmkv.chat import saved, trouble
from mmkv.chat.display import memory_line
from mmkv.chat.repl import COMMANDS
from mmkv.resources import bundled_model, config_file, state_folder


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


@pytest.mark.parametrize("name", ["model", "gates"])
def test_what_a_session_file_names_elsewhere_is_told(name: str, tmp_path: Path) -> None:
    """A hub id in a file from anybody is fetched by nobody who does not name it, too."""
    here = str(bundled_model())
    assert saved.elsewhere({"model": here, "gates": here, "policy": "dbtrimkv"}) == {}
    found = saved.elsewhere({"model": here, "gates": here, name: "owner/repository"})
    assert list(found) == [name] and "owner/repository" in found[name]
    policy = f"wgkv+dbtrimkv:write_gates={tmp_path / 'gone'}"
    assert list(saved.elsewhere({"policy": policy})) == ["policy"]
    policy = f"wgkv+dbtrimkv:write_gates={tmp_path}"
    assert saved.elsewhere({"policy": policy}) == {}


@pytest.mark.parametrize("form", ["int8", "k8v4", "bf16"])
def test_the_form_of_a_session_file_is_read_from_it(form: str, tmp_path: Path) -> None:
    """Whoever wrote it: a program that stores no options of a chat, too."""
    engine = Engine.from_pretrained(bundled_model(), policy="streamingllm", budget=8, kv=form)
    with engine.session() as session:
        list(session.send("hello", sampling=Sampling(max_new_tokens=2)))
        session.save(tmp_path / "kept.mmkv")
    assert saved.chat_options(tmp_path / "kept.mmkv")["kv"] == form


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
    assert "kept 0 of 0 entries (100 %)" in memory_line(engine, session)
    list(session.send("what is at row 2, column 3?", sampling=Sampling(max_new_tokens=3)))
    memory, rows = session.memory(), engine.spec.num_layers * engine.spec.num_kv_heads
    total = memory.tokens_seen * rows
    assert memory.entries == 8 * rows < total
    share = f"({100 * 8 / memory.tokens_seen:.0f} %)"
    line = memory_line(engine, session)
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
