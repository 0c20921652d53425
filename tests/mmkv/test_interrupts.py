"""Ctrl-C waits until a call is whole, is never lost, and harms nothing wherever it comes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from mmkv.engine import interrupts
from mmkv.engine.interrupts import CtrlC, OpenToCtrlC, whole
from mmkv.eval.fuzz.target import Wrong
from mmkv.eval.fuzz.targets.command_line import CALLS, Interrupts


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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Interrupts:
    made = Interrupts()
    made.prepare(tmp_path_factory.mktemp("interrupts"))
    return made


@pytest.mark.parametrize("name", sorted(CALLS))
def test_ctrl_c_at_any_bytecode_of_a_public_call(name: str, world: Interrupts) -> None:
    """A slice of ``python -m eval.fuzz --classes interrupts``: all pages, and the engine as it was.

    Early in the call, drawn within it, and at its end.
    """
    draw = Random(name)
    before = world.interrupted
    for at in (draw.random() * 0.1, draw.random(), 0.999):
        case: dict[str, Any] = {"call": name, "at": at, "shared": draw.random() < 0.3}
        world.run(case)
    assert world.interrupted > before, "no case was interrupted"


def test_a_ctrl_c_that_is_lost_would_be_found(
    world: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "_deliver", lambda: None)
    with pytest.raises(Wrong, match="was swallowed"):
        world.run({"call": "Session.decode", "at": 0.5, "shared": False})
