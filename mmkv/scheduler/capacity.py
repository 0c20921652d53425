"""What fits into the executor's pages, and what makes way for it.

:class:`Ledger` adds up the pages that jobs and idle sessions may take. Idle sessions make way for
who waits, and copies for anything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from mmkv.engine.errors import CapacityError, SessionError
from mmkv.scheduler.contract import CachedCopy, Executor, PersistentSession, Reservation


class Ledger:
    """Commitments by owner: a job, or a session that is kept."""

    def __init__(self) -> None:
        self._reservations: dict[Hashable, Reservation] = {}
        self._chunks: dict[Hashable, int] = {}
        self._sum = 0

    @property
    def committed(self) -> int:
        """Return the most pages that all owners hold together."""
        return self._sum + self.chunk

    @property
    def chunk(self) -> int:
        """Return the pages for chunks: what is read in one turn takes no more than the largest."""
        return max(self._chunks.values(), default=0)

    def commit(self, owner: Hashable, reservation: Reservation) -> None:
        """Set what ``owner`` may take; a price that was set before is replaced."""
        self.release(owner)
        self._reservations[owner] = reservation
        self._sum += reservation.steady + reservation.snapshot
        if reservation.chunk:
            self._chunks[owner] = reservation.chunk

    def release(self, owner: Hashable) -> None:
        """Forget what ``owner`` may take."""
        reservation = self._reservations.pop(owner, None)
        if reservation is not None:
            self._sum -= reservation.steady + reservation.snapshot
            self._chunks.pop(owner, None)

    def of(self, owner: Hashable) -> Reservation:
        """Return what ``owner`` may take."""
        return self._reservations.get(owner, Reservation(0))

    def committed_with(self, owner: Hashable, reservation: Reservation) -> int:
        """Return :attr:`committed` as it would be with another price of ``owner``."""
        before = self._reservations.get(owner)
        self.commit(owner, reservation)
        total = self.committed
        self.release(owner)
        if before is not None:
            self.commit(owner, before)
        return total


class Residents:
    """Idle sessions that hold pages, the one used longest ago first; and copies.

    Args:
        to_files: whether sessions can hibernate.

    Attributes:
        copies: the one used longest ago first; copy_pages: what they hold.
    """

    def __init__(self, ledger: Ledger, to_files: bool) -> None:
        self.ledger, self.to_files = ledger, to_files
        self._idle: OrderedDict[PersistentSession, int] = OrderedDict()  # with the pages of each
        self._idle_pages = 0
        self.copies: OrderedDict[CachedCopy, Callable[[], None]] = OrderedDict()
        self.copy_pages = 0

    def take(self, session: PersistentSession) -> None:
        """Note that a job has begun to use a session; what it commits is the job's to say."""
        self._idle_pages -= self._idle.pop(session, 0)

    def rest(self, session: PersistentSession) -> None:
        """Note that a session is idle, and used last."""
        self.take(session)
        if session.resident:
            pages = session.resting()
            self._idle[session] = pages
            self._idle_pages += pages
            self.ledger.commit(session, Reservation(pages))
        else:
            self.ledger.release(session)

    def drop(self, session: PersistentSession) -> None:
        """Forget a session that is being closed."""
        self.take(session)
        self.ledger.release(session)

    def hibernate(self, session: PersistentSession) -> None:
        """Move an idle session to its file. Raises SessionError; it stays as it was then."""
        session.hibernate()
        self.drop(session)

    def movable(self, besides: PersistentSession | None) -> int:
        """Return the pages that would come free without copies and idle sessions but one."""
        return self.copy_pages + (self._resting(besides) if self.to_files else 0)

    def pinned(self, besides: PersistentSession | None) -> int:
        """Return the pages of idle sessions but one that cannot hibernate."""
        return 0 if self.to_files else self._resting(besides)

    def make_room(self, pages: int, besides: PersistentSession | None) -> bool:
        """Drop copies, then let idle sessions hibernate; whether ``pages`` came free."""
        while pages > 0 and self.copies:
            pages -= self.drop_oldest_copy()
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

    def keep_copy(self, cached: CachedCopy, dropped: Callable[[], None]) -> None:
        """Count a copy; ``dropped`` is called when it has been closed to make room."""
        self.copies[cached] = dropped
        self.copy_pages += cached.pages
        self.ledger.commit(cached, Reservation(cached.pages))

    def touch_copy(self, cached: CachedCopy) -> None:
        """Note that a copy was used last."""
        self.copies.move_to_end(cached)

    def drop_copy(self, cached: CachedCopy) -> None:
        """Close a copy."""
        dropped = self.copies.pop(cached)
        self.copy_pages -= self.ledger.of(cached).steady
        cached.close()
        self.ledger.release(cached)
        dropped()

    def drop_oldest_copy(self) -> int:
        """Close the copy used longest ago; its pages."""
        cached = next(iter(self.copies))
        pages = self.ledger.of(cached).steady
        self.drop_copy(cached)
        return pages

    def _resting(self, besides: PersistentSession | None) -> int:
        return self._idle_pages - (0 if besides is None else self._idle.get(besides, 0))


S = TypeVar("S", bound=CachedCopy)


class Capacity:
    """Keeps all that is committed within the executor's limit.

    Copies make way for whatever needs their pages, and then idle sessions that can hibernate.

    Args:
        to_files: whether sessions can hibernate.
    """

    def __init__(self, executor: Executor, to_files: bool) -> None:
        self.executor, self.ledger = executor, Ledger()
        self.residents = Residents(self.ledger, to_files)

    def require_possible(self, reservation: Reservation, session: PersistentSession | None) -> None:
        """Refuse what would not fit if everything that ends had ended. Raises CapacityError."""
        limit = self.executor.limit()
        if limit is not None and reservation.total + self.residents.pinned(session) > limit:
            raise self._refusal(reservation, limit)

    def commit(
        self,
        owner: Hashable,
        reservation: Reservation,
        session: PersistentSession | None,
        wait: bool,
    ) -> bool:
        """Commit what a request may take, if it fits now.

        Args:
            session: its own, if that is kept: it does not make way.
            wait: whether there are others whose end it may wait for.

        Raises:
            CapacityError: it does not fit, and never will or has nothing to wait for.
        """
        limit = self.executor.limit()
        if limit is not None:
            short = self.ledger.committed_with(owner, reservation) - limit
            possible = short <= self.residents.movable(session)
            if not possible:
                self.require_possible(reservation, session)
            if not possible or not self.residents.make_room(short, session):
                if wait:
                    return False
                raise self._refusal(reservation, limit)
        if session is not None:
            self.residents.take(session)
        self.ledger.commit(owner, reservation)
        return True

    def free_up(self, pages: int) -> None:
        """Let copies and idle sessions go until there is room. Raises CapacityError."""
        limit = self.executor.limit()
        if limit is None:
            return
        short = self.ledger.committed + pages - limit
        if short > self.residents.movable(None) or not self.residents.make_room(short, None):
            raise self._refusal(Reservation(pages), limit)

    def copy_fits(self, pages: int, most: int | None) -> bool:
        """Whether there is room for a copy where others make way; see :meth:`keep_copy`."""
        limit, held = self.executor.limit(), self.residents.copy_pages
        free = None if limit is None else limit - self.ledger.committed + held
        return pages <= min((one for one in (free, most) if one is not None), default=pages)

    def keep_copy(
        self, pages: int, make: Callable[[], S], dropped: Callable[[S], None], most: int | None
    ) -> S:
        """Make a copy that fits, in place of those used longest ago.

        Args:
            pages: what it will hold; dropped: called with it once it has been closed to make room.
            most: pages that all copies may hold together; None: no limit but the executor's.
        """
        limit, residents = self.executor.limit(), self.residents
        while most is not None and residents.copy_pages + pages > most:
            residents.drop_oldest_copy()
        while limit is not None and self.ledger.committed + pages > limit:
            residents.drop_oldest_copy()
        cached = make()
        residents.keep_copy(cached, lambda: dropped(cached))
        return cached

    def _refusal(self, reservation: Reservation, limit: int) -> CapacityError:
        committed = self.ledger.committed
        remedy = (
            "lower its budget or its length" if reservation.total > limit else "close a session"
        )
        return CapacityError(
            f"the request may take {reservation.total:,} pages, {committed:,} of {limit:,} are "
            f"committed; {remedy}, or raise the memory limit",
            reservation.total,
            committed,
            limit,
        )
