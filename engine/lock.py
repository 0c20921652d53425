"""The lock that threads share an engine by."""

from __future__ import annotations

import threading


class FairLock:
    """A reentrant lock that is handed to whoever waits before it can be taken again.

    A thread that decodes step after step holds a plain lock nearly always: others may wait until
    it has ended. Here it has to queue behind the first of them. Reentrant also for what the
    garbage collector runs in the middle of :meth:`__enter__` or :meth:`__exit__`.
    """

    def __init__(self) -> None:
        self._lock, self._queue = threading.RLock(), threading.RLock()

    def __enter__(self) -> None:
        # Who holds the lock must not queue: the first in the queue waits for it.
        if self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock.acquire()
        else:
            with self._queue:
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
