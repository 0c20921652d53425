"""Delay Ctrl-C until a safe point.

Python raises KeyboardInterrupt between any two bytecodes. Within a decode step it would leave a
token in some layers' rows and not in others; within the opening of a session, a row in one list and
not in another. So all that changes an engine runs with SIGINT held back: who takes its lock, or a
session for a call, holds it back until that is done.
"""

from __future__ import annotations

# What signal wraps: that looks for an enum of each handler, ten times as long, and each step asks.
import _signal  # type: ignore[import-not-found]
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_SIGINT = int(signal.SIGINT)


@contextmanager
def quiet_imports(wanted: bool = True) -> Iterator[None]:
    """End the process at once, with code 130, at a Ctrl-C within the block.

    For imports at the start of a program, where nothing is begun yet and a traceback would only
    show how far they had come. A handler of somebody else's stays.
    """
    if not wanted or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Hold:
    """What the main thread knows of a Ctrl-C that is held back.

    Attributes:
        depth: of blocks that hold it back; pressed: it came meanwhile.
        previous: the handler that gets it.
    """

    depth = 0
    pressed: tuple[int, FrameType | None] | None = None
    previous: Callable[..., Any] | None = None


class CtrlC:
    """A context manager that holds Ctrl-C back and delivers it when the outermost block ends.

    Whatever the block does is then done or not, and whoever called learns of it. An error does not
    swallow the Ctrl-C. Outside the main thread, where Python delivers no signals, it does nothing.
    """

    def __enter__(self) -> CtrlC:
        if _in_main_thread():
            if not _Hold.depth:
                _hold()
            _Hold.depth += 1
        return self

    def __exit__(self, *_: object) -> None:
        if _in_main_thread():
            _Hold.depth = max(_Hold.depth - 1, 0)
            if not _Hold.depth:
                _let_go()

    @staticmethod
    def check() -> None:
        """Deliver a Ctrl-C that was held back, now: for long work that has safe points."""
        if _Hold.pressed is not None and _in_main_thread():
            _deliver()


class OpenToCtrlC:
    """Lets Ctrl-C through inside of blocks that hold it back: while others' code runs, or waits.

    What is around it has to stand an exception there.
    """

    def __init__(self) -> None:
        self._depth = 0

    def __enter__(self) -> None:
        if _in_main_thread():
            self._depth, _Hold.depth = _Hold.depth, 0
            if self._depth:
                _let_go()

    def __exit__(self, *_: object) -> None:
        # Not reached where Ctrl-C comes first: the blocks around it then end without a hold.
        if self._depth and _in_main_thread():
            _hold()
            _Hold.depth = self._depth


def whole(call: Callable[P, T]) -> Callable[P, T]:
    """Have a function hold Ctrl-C back until it has done all."""

    @functools.wraps(call)
    def held(*arguments: P.args, **named: P.kwargs) -> T:
        with CtrlC():
            return call(*arguments, **named)

    return held


def _hold() -> None:
    before = _signal.getsignal(_SIGINT)
    # None: the handler was installed from C; SIG_IGN and SIG_DFL, numbers here, raise nothing.
    if callable(before) and before is not _remember:
        _Hold.pressed, _Hold.previous = None, before
        _signal.signal(_SIGINT, _remember)  # what comes now is held back


def _let_go() -> None:
    if _Hold.previous is not None:
        if _signal.getsignal(_SIGINT) is _remember:
            _signal.signal(_SIGINT, _Hold.previous)
        if _Hold.pressed is not None:
            _deliver()


def _deliver() -> None:
    pressed, _Hold.pressed = _Hold.pressed, None
    if pressed is not None and _Hold.previous is not None:
        _Hold.previous(*pressed)


def _remember(number: int, frame: FrameType | None) -> None:
    _Hold.pressed = (number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class FairLock:
    """A reentrant lock that is handed to whoever waits before it can be taken again.

    A thread that decodes step after step holds a plain lock nearly always: others may wait until
    it has ended. Here it has to queue behind the first of them. Reentrant also for what the
    garbage collector runs in the middle of :meth:`__enter__` or :meth:`__exit__`.

    Ctrl-C waits until whoever has it gives it back: what is done under it is done whole.

    Attributes:
        taken: called whenever it has been taken anew, before anything else is done under it.
    """

    def __init__(self) -> None:
        self._lock, self._queue = threading.RLock(), threading.RLock()
        self._ctrl_c = CtrlC()
        self.taken: Callable[[], None] | None = None

    def __enter__(self) -> None:
        self._ctrl_c.__enter__()
        # Who holds the lock must not queue: the first in the queue waits for it.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()
            return
        with self._queue:
            self._lock.acquire()
        if self.taken is not None:
            self.taken()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._ctrl_c.__exit__()
