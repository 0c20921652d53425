"""Sessions that are kept: which hold pages, and which go to files when room is short."""

from __future__ import annotations

from collections import OrderedDict

from engine.errors import SessionError
from mmkv.scheduler.contract import KeptSession, Price
from mmkv.scheduler.ledger import Ledger


class Residents:
    """Idle sessions that hold pages, the one used longest ago first.

    Args:
        to_files: whether sessions can hibernate.
    """

    def __init__(self, ledger: Ledger, to_files: bool) -> None:
        self.ledger, self.to_files = ledger, to_files
        self._idle: OrderedDict[KeptSession, None] = OrderedDict()

    def take(self, session: KeptSession) -> None:
        """Note that a job has begun to use a session; what it commits is the job's to say."""
        self._idle.pop(session, None)

    def rest(self, session: KeptSession) -> None:
        """Note that a session is idle, and used last."""
        self._idle.pop(session, None)
        if session.resident:
            self._idle[session] = None
            self.ledger.commit(session, Price(session.resting()))
        else:
            self.ledger.release(session)

    def drop(self, session: KeptSession) -> None:
        """Forget a session that is being closed."""
        self._idle.pop(session, None)
        self.ledger.release(session)

    def hibernate(self, session: KeptSession) -> None:
        """Move an idle session to its file. Raises SessionError; it stays as it was then."""
        session.hibernate()
        self.drop(session)

    def movable(self, besides: KeptSession | None) -> int:
        """Return the pages that would come free if all idle sessions but one hibernated."""
        return self._resting(besides) if self.to_files else 0

    def pinned(self, besides: KeptSession | None) -> int:
        """Return the pages of idle sessions but one that cannot hibernate."""
        return 0 if self.to_files else self._resting(besides)

    def make_room(self, pages: int, besides: KeptSession | None) -> bool:
        """Let idle sessions hibernate until ``pages`` are free; whether that was possible."""
        if not self.to_files:
            return pages <= 0
        for session in [one for one in self._idle if one is not besides]:
            if pages <= 0:
                break
            freed = self.ledger.of(session).steady
            try:
                self.hibernate(session)
            except SessionError:
                continue  # the disk refuses: it stays, and the next one is tried
            pages -= freed
        return pages <= 0

    def _resting(self, besides: KeptSession | None) -> int:
        return sum(self.ledger.of(one).steady for one in self._idle if one is not besides)
