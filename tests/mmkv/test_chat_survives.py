"""The chat goes on after any exception of a turn, with the state of before."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError

import pytest
import torch
from PIL import Image

import mmkv.chat.display
import mmkv.session
import mmkv.turn
from mmkv import Engine
from mmkv.chat.display import Display, OutputClosed
from mmkv.chat.options import ChatOptions
from mmkv.chat.repl import Leave, Repl
from mmkv.engine.cache import RaggedCache
from mmkv.engine.errors import InputError
from mmkv.engine.model.decoder import Decoder
from mmkv.prompt.media import load_image
from mmkv.prompt.processing import QwenProcessor
from mmkv.prompt.template import ChatTemplate
from mmkv.reply import ReplyWriter

if TYPE_CHECKING:
    from tests.support.cli_fixtures import Ran

pytest_plugins = ("tests.support.cli_fixtures",)

# Where a turn of the chat may fail, in the order of the turn.
PLACES = (
    (mmkv.turn, "take_media"),
    (ChatTemplate, "render"),
    (QwenProcessor, "load_picture"),
    (QwenProcessor, "encode"),
    (RaggedCache, "fork"),
    (Decoder, "embed_turn"),
    (Decoder, "forward"),
    (Decoder, "logits"),
    (ReplyWriter, "begin"),
    (ReplyWriter, "take"),
    (mmkv.session, "step"),
    (mmkv.session.Session, "memory"),
    (ReplyWriter, "held_text"),
    (ReplyWriter, "reply"),
    (mmkv.chat.display, "_write"),
)
RUNS = 150


class Unspeakable(Exception):
    """Cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def exceptions() -> list[type[Exception]]:
    """Return every class of exceptions that is loaded, those of torch and the packages, too."""
    found: list[type[Exception]] = []
    waiting: list[type[Exception]] = [Exception]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += [one for one in kind.__subclasses__() if one not in found]
    # Those that end a chat on purpose; and one whose broken instances complain when they go.
    return sorted(set(found) - {Leave, OutputClosed, HTTPError}, key=repr)


def make(kind: type[Exception], rng: random.Random) -> Exception:
    for arguments in (("it\nbroke",), (), (2, "it broke"), ("utf-8", b"\xff", 0, 1, "it broke")):
        try:
            made = kind(*arguments)
        except Exception:
            continue
        return made
    return Unspeakable()


@pytest.fixture
def repl(model: str) -> Iterator[Repl]:
    """Yield a conversation of one turn on a small model."""
    options = ChatOptions(quiet=True, max_new_tokens=5)
    engine = Engine.from_pretrained(model, policy="streamingllm", budget=16)
    made = Repl(engine, options, Display(options), [], [])
    made.handle("hello")
    yield made
    made.session.close()
    engine.cache.check()


def state(repl: Repl) -> tuple[Any, ...]:
    session = repl.session
    rows = [row.tolist() for layer in session.retained() for row in layer]
    return (list(session.history), session.state(), session._unfed, rows, len(repl.images))


def test_any_exception_anywhere_in_a_turn_is_one_line_and_changes_nothing(
    repl: Repl, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(21)
    kinds = exceptions()
    assert len(kinds) > 200 and torch.OutOfMemoryError in kinds
    repl.images = [Image.new("RGB", (32, 32), "red")]
    before = state(repl)
    hit = set()
    for run in range(RUNS):
        home, name = PLACES[run % len(PLACES)]
        error = make(rng.choice(kinds), rng)
        # Each place fails at its first call once; some have no second one in a turn.
        after = rng.randrange(3) if run >= len(PLACES) else 0
        raised = fail(home, name, error, after)
        capsys.readouterr()
        try:
            repl.handle("what is it?")
        finally:
            raised.undo()
        shown = capsys.readouterr().err
        if raised.count:
            hit.add(name)
        # A template may refuse to show the past anew: the turn goes on without the comparison.
        refused = isinstance(error, InputError) and after > 0 and not shown
        if raised.count and not refused:
            assert shown.startswith("mmkv: error: ") and shown.count("\n") == 1, (name, shown)
        else:
            repl.command("/undo")
            repl.images = [Image.new("RGB", (32, 32), "red")]
        assert state(repl) == before, (name, error)
    assert hit == {name for _, name in PLACES}
    capsys.readouterr()
    repl.handle("what is it?")
    shown = capsys.readouterr()
    assert shown.err == "" and len(repl.session.history) == 4


class fail:
    """Makes the call number ``after`` of a function raise, and the later ones, until ``undo``."""

    def __init__(self, home: Any, name: str, error: Exception, after: int) -> None:
        self.count, self._left, self._error = 0, after, error
        self._home, self._name, self._kept = home, name, getattr(home, name)
        kept = self._kept

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._left:
                self._left -= 1
                return kept(*args, **kwargs)
            self.count += 1
            raise self._error

        setattr(home, name, call)

    def undo(self) -> None:
        setattr(self._home, self._name, self._kept)


def test_out_of_memory_says_what_to_do(repl: Repl, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ):
        raised = fail(Decoder, "forward", error, 0)
        repl.handle("more")
        raised.undo()
        shown = capsys.readouterr().err
        assert "out of memory" in shown and "/budget" in shown and "unexpected" not in shown


def test_lines_that_are_not_utf8_are_refused_whole(
    model: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mmkv.cli.app import run

    rng = random.Random(3)
    broken = [bytes(rng.randrange(128, 256) for _ in range(4)) + b"\xff text" for _ in range(8)]
    lines = [b"hello", *broken, b'"""one\n\xfftwo\nthree"""', b"and?", b"/image \xfe.png"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n".join(lines) + b"\n")))
    assert run(["chat", model, "-i", "--quiet", "--max-new-tokens", "3"]) == 0
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line]
    assert len(errors) == len(broken) + 2
    assert all(line.startswith("mmkv: error: the message is not UTF-8 (0x") for line in errors)
    assert "0xff at character 5)" in errors[-2]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\nand?\n")))
    assert run(["chat", model, "-i", "--quiet", "--max-new-tokens", "3"]) == 0
    assert capfd.readouterr().out == out


def jpeg(path: Path, rng: random.Random | None) -> str:
    """Write a JPEG with an orientation; with ``rng`` some bytes of its EXIF part are replaced."""
    facts = Image.Exif()
    facts[0x0112], facts[0x010F], facts[0x011A] = 6, "maker", 300.0
    facts.get_ifd(0x8769)[0x9003] = "2020:01:01 00:00:00"
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), "red").save(buffer, "JPEG", exif=facts)
    content = bytearray(buffer.getvalue())
    begin, end = content.index(b"Exif") + 4, content.index(b"\xff\xdb")
    for _ in range(rng.randint(1, 6) if rng else 0):
        assert rng is not None
        content[rng.randrange(begin, end)] = rng.randrange(256)
    path.write_bytes(content)
    return str(path)


@pytest.mark.filterwarnings("ignore")
def test_garbled_exif_is_ignored(tmp_path: Path) -> None:
    rng = random.Random(5)
    upright = load_image(jpeg(tmp_path / "whole.jpg", None))
    assert upright.size == (32, 48)
    for _ in range(150):
        picture = load_image(load_image(jpeg(tmp_path / "broken.jpg", rng)))
        assert picture.size in ((48, 32), (32, 48)) and picture.getpixel((9, 9)) == (254, 0, 0)


def test_a_picture_with_garbled_exif_is_sent(
    mmkv: Callable[..., Ran], model: str, tmp_path: Path
) -> None:
    path = Path(jpeg(tmp_path / "a.jpg", None))
    path.write_bytes(
        path.read_bytes().replace(b"Exif\0\0MM", b"Exif\0\0M~").replace(b"II*", b"I~*")
    )
    ran = mmkv(
        "chat", model, "-i", "--max-new-tokens", "3", stdin=f"/image {path}\nwhat?\n/stats\n"
    )
    assert ran.code == 0 and "error" not in ran.err and " image" in ran.err
