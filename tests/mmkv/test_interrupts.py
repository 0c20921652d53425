"""Ctrl-C waits until a call is whole and is never lost, also while a command still starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmkv.api import Engine
from mmkv.chat.display import Display
from mmkv.cli.app import run
from mmkv.engine.interrupts import CtrlC, OpenToCtrlC, quiet_imports, whole
from mmkv.engine.model.families import loading, vision
from mmkv.sampling import Sampling
from mmkv.session import ReplyStream
from tests.support.chat_models import picture, save_qwen3_vl


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_it_comes_when_the_outermost_block_ends() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with CtrlC():
            with CtrlC():
                press()
                done.append("inner")
            done.append("outer")
        done.append("not reached")
    assert done == ["inner", "outer"]
    with CtrlC():  # nothing is left of it
        pass


def test_an_error_does_not_swallow_it() -> None:
    with pytest.raises(KeyboardInterrupt) as caught, CtrlC():
        press()
        raise ValueError("of the block")
    assert isinstance(caught.value.__context__, ValueError)


def test_it_is_delivered_once_where_work_checks_for_it() -> None:
    with CtrlC():
        press()
        with pytest.raises(KeyboardInterrupt):
            CtrlC.check()
        CtrlC.check()
    done = []

    @whole
    def work() -> None:
        press()
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [1]


def test_others_code_may_be_interrupted() -> None:
    reached = []
    with CtrlC():
        press()
        with pytest.raises(KeyboardInterrupt), OpenToCtrlC():  # what came before
            reached.append("not reached")
        with pytest.raises(KeyboardInterrupt), OpenToCtrlC():
            press()
        reached.append("held back again")
        with pytest.raises(KeyboardInterrupt):
            press()
            CtrlC.check()
    assert reached == ["held back again"]


def test_the_handler_of_somebody_else_gets_it() -> None:
    got: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: got.append(number))
    try:
        with CtrlC():
            press()
            assert not got
        assert got == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_holds_nothing_back() -> None:
    inside, over = threading.Event(), threading.Event()

    def work() -> None:
        with CtrlC():
            inside.set()
            over.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    with pytest.raises(KeyboardInterrupt):
        press()
    over.set()
    thread.join()


# Ctrl-C while the vision side of a checkpoint is read ends the wait, and harms nothing.


FEW = Sampling(max_new_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Press Ctrl-C as soon as the modules are being imported, which lasts until the test ends."""
    end, names = threading.Event(), []

    def importing(family: Any, config: Any) -> None:
        names.append(threading.current_thread().name)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        end.wait()

    monkeypatch.setattr(vision, "_import_vision", importing)
    yield names
    end.set()
    vision._imports.wait()


def test_ctrl_c_while_modules_are_imported(folder: Path, stuck: list[str], tmp_path: Path) -> None:
    picture().save(tmp_path / "red.png")
    named = ["--image", str(tmp_path / "red.png"), "-p", "hi", "--max-new-tokens", "2"]
    assert run(["chat", str(folder), *named]) == 130
    assert stuck == ["import vision"]


def test_ctrl_c_while_the_first_picture_waits_for_them(folder: Path, stuck: list[str]) -> None:
    engine = Engine.from_pretrained(folder)
    session = engine.session()
    list(session.send("hello", sampling=FEW))
    with pytest.raises(KeyboardInterrupt):
        session.send("what is it?", images=[picture()], sampling=FEW)
    assert stuck == ["import vision"] and len(session.history) == 2


def test_ctrl_c_while_the_vision_side_is_built(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(folder)
    build = loading.build_vision
    went_on = []

    def pressing(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        return build(*arguments)

    monkeypatch.setattr(loading, "build_vision", pressing)
    with engine.session() as session, engine.session() as other:
        with pytest.raises(KeyboardInterrupt):
            session.send("what is it?", images=[picture()], sampling=FEW)
        assert not went_on and session.history == [] and not engine.family.vision_loaded
        monkeypatch.setattr(loading, "build_vision", build)
        replies = [
            "".join(s.send("what is it?", images=[picture()], sampling=FEW))
            for s in (session, other)
        ]
        assert replies[0] == replies[1] and engine.family.vision_loaded


def test_reading_the_vision_side_is_shown(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextmanager
    def loading_bar(self: Display, name: str) -> Iterator[Any]:
        yield shown.append

    monkeypatch.setattr(Display, "loading", loading_bar)
    picture().save(tmp_path / "red.png")
    few = ["-p", "hi", "--max-new-tokens", "2"]
    assert run(["chat", str(folder), *few]) == 0
    assert "what reads pictures" not in shown
    assert run(["chat", str(folder), "--image", str(tmp_path / "red.png"), *few]) == 0
    assert shown[-1] == "what reads pictures"


# Ctrl-C while a command is still importing: exit code 130, and no traceback.


posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@posix
@pytest.mark.parametrize("module", ["mmkv", "mmkv.training.distill"])
@pytest.mark.parametrize("during", ["typer", "mmkv.engine.errors"])
def test_ctrl_c_in_the_first_imports_ends_with_130(
    tmp_path: Path, module: str, during: str
) -> None:
    # A finder that is asked first presses Ctrl-C when the import of a module begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {during!r} and '__main__' in sys.modules:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join([str(tmp_path), str(root)])
    ran = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 130 and "Traceback" not in ran.stderr and not ran.stdout
    assert ran.stderr.count("\n") <= 1


@posix
def test_a_handler_of_somebody_else_stays() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    try:
        with quiet_imports():
            signal.raise_signal(signal.SIGINT)
        assert pressed == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


@posix
def test_afterwards_ctrl_c_is_an_exception_again() -> None:
    with quiet_imports():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_reply_ends_where_it_comes_behind_a_piece() -> None:
    """Nobody has seen the piece; what made it is over, and so is the stream."""
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield from "ab"
        finally:
            closed.append(True)

    @contextmanager
    def streaming() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    session: Any = SimpleNamespace(streaming=streaming, stopping=nullcontext)
    stream = ReplyStream(session, pieces)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert closed and list(stream) == []
