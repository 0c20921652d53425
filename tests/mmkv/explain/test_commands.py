"""``mmkv explain``, and ``/explain`` and ``/watch`` in a conversation."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from mmkv import Sampling
from mmkv.chat import display as answering
from mmkv.chat.display import Display, Watch, panel
from mmkv.chat.options import ChatOptions
from mmkv.chat.repl import _explain
from mmkv.chat.run import run_chat
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import InputError
from mmkv.explain.figures import draw
from mmkv.resources import asset
from tests.support.recorded import bundled

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

FEW = ("--budget", "6", "--gates", "random")


def test_a_page_of_one_answer(
    mmkv: Callable[..., Ran], model: str, picture: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    asked = ("-p", "what is red?", "--image", picture, *FEW, "--max-new-tokens", "5")
    for beside in ((), ("--compare", str(page))):  # the second overwrites the first's page
        ran = mmkv("explain", model, *asked, "-o", str(page), *beside)
        assert ran.code == 0 and ran.out.strip()
        assert re.search(rf"mmkv: wrote {page} \([\d.]+ KiB\); open it in a browser", ran.err)
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>") and '"caption":"picture 1"' in text
    assert '"high":2,"wide":3' in text and text.count('"caption":"picture 1"') == 2
    assert re.search(
        r'"headline":"The answer .*looked most at row \d, column \d of picture 1', text
    )


def test_what_cannot_be_shown_is_refused_before_a_model_is_loaded(
    mmkv: Callable[..., Ran], tmp_path: Path
) -> None:
    mine = b"<!doctype html><title>\xff of nobody's code</title>"
    (tmp_path / "other.html").write_bytes(mine)
    for arguments, words, code in (
        (("-p", "x", "-o", str(tmp_path / "other.html")), "is not a page of mmkv explain", 1),
        (("-p", "x", "-o", str(tmp_path / "none" / "a.html")), "there is no folder", 1),
        (("-p", "x", "-o", str(tmp_path)), "is a folder; name a file", 1),
        (
            ("-p", "x", "-o", str(tmp_path / "a.html"), "--figures", str(tmp_path / "other.html")),
            "is no folder",
            1,
        ),
        (
            ("-p", "x", "-o", str(tmp_path / "a.html"), "--compare", str(tmp_path / "other.html")),
            "is no page of this version's mmkv explain",
            1,
        ),
        (("-o", str(tmp_path / "a.html")), "the prompt is empty", 1),
        (("-p", "x", "--fps", "1", "--num-frames", "2"), "exclude each other", 2),
    ):
        ran = mmkv("explain", "no-such-model", *arguments)
        assert ran.code == code and words in ran.error_line()
    assert (tmp_path / "other.html").read_bytes() == mine
    assert [path.name for path in tmp_path.iterdir()] == ["other.html"]


def test_figures_without_matplotlib_are_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ChatOptions(EngineConfig(model="no-such-model"), prompt="x", figures=str(tmp_path))
    with pytest.raises(InputError, match=r"mmkv\[explain\]"):
        run_chat(options)
    with pytest.raises(InputError, match=r"mmkv\[explain\]"):
        draw(cast(Any, None), tmp_path)


def test_figures_go_to_a_folder_of_ones_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "figures").mkdir()
    folders: list[Path] = []
    trace = SimpleNamespace(figures=lambda folder: folders.append(folder) or [])
    session = SimpleNamespace(recorder=object(), trace=lambda: trace)
    repl = SimpleNamespace(session=session, display=SimpleNamespace(say=lambda _: None))
    _explain(cast(Any, repl), "~/figures")
    assert folders == [tmp_path / "figures"]


def test_a_conversation_is_shown_from_its_beginning(
    mmkv: Callable[..., Ran], model: str, picture: str, tmp_path: Path
) -> None:
    page, mine = tmp_path / "page.html", tmp_path / "mine.html"
    mine.write_text("mine")
    lines = (
        f"/image {picture}",
        "hello",
        f"/explain {page}",
        "forget this",
        "/undo",
        f"/explain {mine}",
        f"/explain! {mine}",
        "/explain",
        f"/explain {'a' * 300}",
        f"/explain {'a' * 300}/",
        "/watch",
        f"/explain {page}",
    )
    ran = mmkv("chat", model, "-i", *FEW, "--max-new-tokens", "4", stdin="\n".join(lines) + "\n")
    assert ran.code == 0 and "Traceback" not in ran.err
    said = ran.err.replace("\n", " ")
    assert f"wrote {page}" in said and f"wrote {mine}" in said
    assert "mine.html is not a page of mmkv explain" in said and "needs a file name" in said
    assert "not a usable file name" in said
    assert "cannot make the folder" in said or "matplotlib" in said
    assert "/watch needs a terminal" in said
    assert "page.html exists and stays as it is" in said
    # Taken back before it was written, the second turn is not on the page.
    assert mine.read_bytes() == page.read_bytes()
    assert "forget this" not in page.read_text("utf-8")


def test_the_panel_shows_what_the_session_holds() -> None:
    engine = bundled()
    session = engine.session()
    console = Console(file=io.StringIO(), width=100, force_terminal=True, legacy_windows=False)
    watch = Watch(session, console, echo=True)
    pieces = session.send(
        "what is at row 2, column 3?",
        images=[asset("scene.png")],
        sampling=Sampling(max_new_tokens=4),
    )
    for piece in pieces:
        watch.feed(piece)
    watch.close()
    assert isinstance(console.file, io.StringIO)
    drawn = console.file.getvalue()
    assert "frog" in drawn and "tokens/s" in drawn and "layer 5" in drawn
    plain = Console(file=io.StringIO(), width=100)
    plain.print(panel(session, 12.34))
    shown = plain.file.getvalue()  # type: ignore[attr-defined]
    memory = session.memory()
    assert f"{memory.entries:,} of {memory.tokens_seen * 18:,}, 144 allowed" in shown
    assert f"in {memory.pages:,} pages" in shown and "12.3 tokens/s" in shown
    for kind, count in memory.by_modality.items():
        assert (f"{count:,} entries" in shown) == bool(count), kind
    session.close()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_watched_reply_is_printed_once_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the same terminal as the panel; elsewhere it comes as it is made."""
    engine, options = bundled(), ChatOptions(plain=True, max_new_tokens=4)
    question, pictures = "what is at row 2, column 3?", [asset("scene.png")]
    for stream in (Terminal(), io.StringIO()):
        display, session = Display(options), engine.session()
        display.console = Console(file=Terminal(), width=100, force_terminal=True)
        writes: list[str] = []
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            patched.setattr(answering, "_write", writes.append)
            sampling = options.sampling()
            assert answering.answer(
                session,
                options,
                display,
                question,
                pictures,
                (),
                None,
                sampling,
                None,
                True,
            )
        assert "".join(writes) == "frog\n"
        assert isinstance(display.console.file, Terminal)
        drawn = display.console.file.getvalue()
        assert "tokens/s" in drawn and ("frog" in drawn) == stream.isatty()
        session.close()
