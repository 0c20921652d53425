"""Conversations whose memory stays between requests, in pages or in files."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.budgets import SequenceSize
from mmkv.engine.errors import SessionError
from mmkv.engine.interrupts import whole

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.budget import Budget
    from mmkv.session import Session

# What a session file does not hold.
_LOST = ("last", "note", "undo_depth", "rewrites", "forget_thoughts", "cache_salt", "watched")


class CachedConversation:
    """A conversation that may lie in a file between two requests.

    A request goes on with its session (:meth:`wake`), or with a copy that leaves it as it is
    (:meth:`fork`). All methods belong to the thread of the scheduler.

    Args:
        budget: of its session; None: the engine's.
        folder: where it hibernates; None: it cannot.
        session: taken over; None: it holds nothing until its first request is read.

    Attributes:
        live: the session while it is in memory. Another object after it has hibernated.
        path: its file, where it may hibernate.
    """

    def __init__(
        self,
        engine: Engine,
        budget: Budget | float | None = None,
        folder: Path | None = None,
        session: Session | None = None,
    ) -> None:
        self.engine, self.live = engine, session
        self.budget = engine.budgets.checked(budget) if session is None else session.budget
        self.path = None if folder is None else folder / f"{uuid.uuid4().hex}.mmkv"
        self._extent, self._pages = SequenceSize(), 0
        self._in_file = False
        self._last: dict[str, Any] = {}

    @property
    def resident(self) -> bool:
        """Whether its session is in memory."""
        return self.live is not None

    @property
    def lost(self) -> bool:
        """Whether it lies nowhere: it was dropped, or somebody has removed its file."""
        # In this order: the engine thread notes a file before it lets the session go.
        if self.live is not None:
            return False
        return not (self._in_file and self.path is not None and os.path.exists(self.path))

    @property
    def extent(self) -> SequenceSize:
        """How far the session has come, wherever it lies."""
        return self._extent if self.live is None else self.live.extent

    @property
    def pages(self) -> int:
        """Count the pages that it holds, or will hold when it comes back."""
        if self.live is None:
            return self._pages
        return self.engine.cache.held_pages(self.live.seq)

    def resting(self) -> int:
        """Return what its budget lets it hold; where that is no bound, what it holds."""
        lasting = self.engine.budgets.lasting_pages(self.budget)
        return self.pages if lasting is None else lasting

    @whole
    def wake(self) -> Session:
        """Return the session itself, from its file if it lies there. Raises SessionError."""
        if self.live is None and self._in_file:
            assert self.path is not None
            session, _ = self.engine.load_session(self.path)
            for name, value in self._last.items():
                setattr(session, name, value)
            self.live, self._in_file = session, False
            self.path.unlink(missing_ok=True)
        elif self.live is None:
            self.live = self.engine.session(self.budget)
        return self.live

    def fork(self) -> Session:
        """Return a copy of the session, from its file if it lies there. Raises SessionError."""
        if self.live is not None:
            return self.live.fork()
        if self.lost:
            raise SessionError("the memory of this conversation is gone; begin a new one")
        assert self.path is not None
        try:
            session, _ = self.engine.load_session(self.path)
            session.watched = self._last.get("watched")
            return session
        except SessionError as error:  # the file is nobody's affair but its owner's
            raise SessionError(str(error).replace(str(self.path), "its file")) from error

    @whole
    def hibernate(self) -> None:
        """Write the session to its file and return its pages.

        Raises:
            SessionError: it cannot be written; it stays in memory then.
        """
        session = self.live
        if session is None:
            return
        pages = self.pages
        self._in_file = self._write(session)
        self._extent, self._pages = session.extent, pages
        self._last = {name: getattr(session, name) for name in _LOST}
        self.live = None
        session.close()

    def _write(self, session: Session) -> bool:
        """Write the session to its file; whether it lies there then. Raises SessionError."""
        if self.path is None:
            raise SessionError("there is no folder for sessions; name one to let them hibernate")
        session.save(self.path)
        return True

    @whole
    def close(self) -> None:
        """Return its pages and remove its file."""
        if self.live is not None:
            self.live.close()
        self.live, self._in_file = None, False
        self._extent, self._pages = SequenceSize(), 0
        if self.path is not None:
            with contextlib.suppress(OSError):  # the folder may be gone, and the file with it
                self.path.unlink(missing_ok=True)
