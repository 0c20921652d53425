"""Sessions that the scheduler keeps, in memory or in files."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv.engine.budgets import Extent
from mmkv.engine.errors import SessionError
from mmkv.engine.interrupts import whole

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.budget import Budget
    from mmkv.session import Session


class StoredSession:
    """A chat session that may lie in a file between two requests.

    It holds nothing until its first request is read.

    Args:
        folder: where it hibernates; None: it cannot.

    Attributes:
        live: the session while it is in memory. Another object after it has hibernated.
    """

    def __init__(
        self,
        engine: Engine,
        budget: Budget | float | None = None,
        folder: Path | None = None,
    ) -> None:
        self.engine, self.budget = engine, engine.budgets.checked(budget)
        self.folder, self.path = folder, None if folder is None else _path(folder)
        self.live: Session | None = None
        self._extent, self._pages = Extent(), 0
        self._in_file = False
        self._last: tuple[object, ...] = ()

    @property
    def resident(self) -> bool:
        """See :class:`mmkv.scheduler.contract.PersistentSession`."""
        return self.live is not None

    @property
    def extent(self) -> Extent:
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
        """Return the session, from its file if it lies there. Raises SessionError."""
        if self.live is None and self._in_file:
            assert self.path is not None
            session, _ = self.engine.load_session(self.path)
            session.last, session.note, session.undo_depth, session.rewrites = self._last  # type: ignore[assignment]
            self.live, self._in_file = session, False
            self.path.unlink(missing_ok=True)
        elif self.live is None:
            self.live = self.engine.session(self.budget)
        return self.live

    @whole
    def hibernate(self) -> None:
        """Write the session to its file and return its pages. Raises SessionError."""
        session = self.live
        if session is None:
            return
        if self.path is None:
            raise SessionError("there is no folder for sessions; name one to let them hibernate")
        pages = self.pages
        session.save(self.path)
        self._extent, self._pages, self._in_file = session.extent, pages, True
        self._last = session.last, session.note, session.undo_depth, session.rewrites
        self.live = None
        session.close()

    @whole
    def close(self) -> None:
        """Return its pages and remove its file."""
        if self.live is not None:
            self.live.close()
        elif self._in_file and self.path is not None:
            self.path.unlink(missing_ok=True)
        self.live, self._in_file = None, False
        self._extent, self._pages = Extent(), 0


def _path(folder: Path) -> Path:
    return folder / f"{uuid.uuid4().hex}.mmkv"
