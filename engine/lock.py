"""The lock that threads share an engine by."""

from __future__ import annotations

import threading
from collections.abc import Callable

from mmkv.engine.interrupts import CtrlC


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
