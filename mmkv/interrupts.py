"""Delay Ctrl-C until a safe point.

Python raises KeyboardInterrupt between any two bytecodes. Within a decode step it would leave a
token in some layers' rows and not in others, so steps run with SIGINT delayed.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


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


class CtrlC:
    """A context manager that stores Ctrl-C and delivers it at the end.

    ``check()`` delivers it earlier, for long work that has safe points of its own. Outside the
    main thread (where Python delivers no signals) it does nothing.
    """

    def __init__(self) -> None:
        self._pressed: tuple[int, FrameType | None] | None = None
        self._previous: Any = None
        self._active = False

    def __enter__(self) -> CtrlC:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            # None: the handler was installed from C; SIG_IGN/SIG_DFL need no holding back.
            if callable(self._previous):
                signal.signal(signal.SIGINT, self._remember)
                self._active = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._active:
            signal.signal(signal.SIGINT, self._previous)
            self._active = False
        if kind is None:
            self.check()

    def check(self) -> None:
        """Deliver a remembered Ctrl-C now (to the handler that was there before)."""
        if self._pressed is not None:
            pressed, self._pressed = self._pressed, None
            self._previous(*pressed)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._pressed = (number, frame)
