"""What holds pages beside the jobs: idle sessions, and spare copies that give way to anything."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from mmkv.engine.errors import SessionError
from mmkv.scheduler.contract import KeptSession, Price, Spare
from mmkv.scheduler.ledger import Ledger


class Residents:
    """Idle sessions that hold pages, the one used longest ago first; and spares.

    Args:
        to_files: whether sessions can hibernate.

    Attributes:
        spares: the one used longest ago first; spare_pages: what they hold.
    """

    def __init__(self, ledger: Ledger, to_files: bool) -> None:
        self.ledger, self.to_files = ledger, to_files
        self._idle: OrderedDict[KeptSession, int] = OrderedDict()  # with the pages of each
        self._idle_pages = 0
        self.spares: OrderedDict[Spare, Callable[[], None]] = OrderedDict()
        self.spare_pages = 0

    def take(self, session: KeptSession) -> None:
        """Note that a job has begun to use a session; what it commits is the job's to say."""
        self._idle_pages -= self._idle.pop(session, 0)

    def rest(self, session: KeptSession) -> None:
        """Note that a session is idle, and used last."""
        self.take(session)
        if session.resident:
            pages = session.resting()
            self._idle[session] = pages
            self._idle_pages += pages
            self.ledger.commit(session, Price(pages))
        else:
            self.ledger.release(session)

    def drop(self, session: KeptSession) -> None:
        """Forget a session that is being closed."""
        self.take(session)
        self.ledger.release(session)

    def hibernate(self, session: KeptSession) -> None:
        """Move an idle session to its file. Raises SessionError; it stays as it was then."""
        session.hibernate()
        self.drop(session)

    def movable(self, besides: KeptSession | None) -> int:
        """Return the pages that would come free without spares and idle sessions but one."""
        return self.spare_pages + (self._resting(besides) if self.to_files else 0)

    def pinned(self, besides: KeptSession | None) -> int:
        """Return the pages of idle sessions but one that cannot hibernate."""
        return 0 if self.to_files else self._resting(besides)

    def make_room(self, pages: int, besides: KeptSession | None) -> bool:
        """Give up spares, then let idle sessions hibernate; whether ``pages`` came free."""
        while pages > 0 and self.spares:
            pages -= self.drop_oldest_spare()
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

    def keep_spare(self, spare: Spare, dropped: Callable[[], None]) -> None:
        """Count a spare; ``dropped`` is called when it has been closed to make room."""
        self.spares[spare] = dropped
        self.spare_pages += spare.pages
        self.ledger.commit(spare, Price(spare.pages))

    def used_spare(self, spare: Spare) -> None:
        """Note that a spare was used last."""
        self.spares.move_to_end(spare)

    def drop_spare(self, spare: Spare) -> None:
        """Close a spare."""
        dropped = self.spares.pop(spare)
        self.spare_pages -= self.ledger.of(spare).steady
        spare.close()
        self.ledger.release(spare)
        dropped()

    def drop_oldest_spare(self) -> int:
        """Close the spare used longest ago; its pages."""
        spare = next(iter(self.spares))
        pages = self.ledger.of(spare).steady
        self.drop_spare(spare)
        return pages

    def _resting(self, besides: KeptSession | None) -> int:
        return self._idle_pages - (0 if besides is None else self._idle.get(besides, 0))
