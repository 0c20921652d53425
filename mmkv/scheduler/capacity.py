"""Count pages: what can be admitted, and what is dropped or hibernated to admit it.

:class:`Ledger` adds up the pages that jobs and idle sessions may take. Idle sessions move to files
for a request that waits; cached copies are dropped for anything that needs their pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from mmkv.engine.errors import CapacityError, SessionError


@dataclass(frozen=True)
class Reservation:
    """The most pages that a job takes.

    Attributes:
        steady: of its session, from the first chunk until it is closed or idle again.
        chunk: more while a chunk is stored; also the bound of a pass that several jobs share.
        snapshot: more while the prompt is read, for the copy that a cancelled one returns to.
    """

    steady: int
    chunk: int = 0
    snapshot: int = 0

    @property
    def total(self) -> int:
        """Return the pages that the job needs when it runs alone."""
        return self.steady + self.chunk + self.snapshot


class PersistentSession(Protocol):
    """A session that stays open between its requests."""

    def __hash__(self) -> int: ...

    @property
    def resident(self) -> bool:
        """Whether it may hold pages; a new session, or one in a file, holds none."""
        ...

    def resting(self) -> int:
        """Bound the pages that it holds while it is idle."""
        ...

    def hibernate(self) -> None:
        """Move it to a file and return its pages. Raises SessionError; it is resident then."""
        ...

    def close(self) -> None:
        """Return its pages and remove its file."""
        ...


class CachedCopy(Protocol):
    """A copy of a session that is kept while nobody needs its pages."""

    def __hash__(self) -> int: ...

    @property
    def pages(self) -> int:
        """Count the pages that it holds; they do not change."""
        ...

    def close(self) -> None:
        """Return its pages."""
        ...


class Ledger:
    """The reservations of all owners: jobs, idle sessions, cached copies."""

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
        """Return the pages for chunks: those of one pass, which the largest chunk bounds."""
        return max(self._chunks.values(), default=0)

    def commit(self, owner: Hashable, reservation: Reservation) -> None:
        """Set what ``owner`` may take; an earlier reservation is replaced."""
        self.release(owner)
        self._reservations[owner] = reservation
        self._sum += reservation.steady + reservation.snapshot
        if reservation.chunk:
            self._chunks[owner] = reservation.chunk

    def release(self, owner: Hashable) -> None:
        """Drop the reservation of ``owner``."""
        reservation = self._reservations.pop(owner, None)
        if reservation is not None:
            self._sum -= reservation.steady + reservation.snapshot
            self._chunks.pop(owner, None)

    def of(self, owner: Hashable) -> Reservation:
        """Return what ``owner`` may take."""
        return self._reservations.get(owner, Reservation(0))

    def committed_with(self, owner: Hashable, reservation: Reservation) -> int:
        """Return :attr:`committed` as it would be with another reservation of ``owner``."""
        before = self.of(owner)
        more = reservation.steady + reservation.snapshot - before.steady - before.snapshot
        chunks = [pages for one, pages in self._chunks.items() if one != owner]
        return self._sum + more + max([reservation.chunk, *chunks])


class Residents:
    """Idle sessions that hold pages, least recently used first; and cached copies.

    Args:
        to_files: whether sessions can hibernate.

    Attributes:
        copies: least recently used first; copy_pages: how many they hold.
    """

    def __init__(self, ledger: Ledger, to_files: bool) -> None:
        self.ledger, self.to_files = ledger, to_files
        self._idle: OrderedDict[PersistentSession, int] = OrderedDict()  # with the pages of each
        self._idle_pages = 0
        self.copies: OrderedDict[CachedCopy, Callable[[], None]] = OrderedDict()
        self.copy_pages = 0

    def take(self, session: PersistentSession) -> None:
        """Take a session off the idle ones: a job uses it, and makes a reservation of its own."""
        self._idle_pages -= self._idle.pop(session, 0)

    def rest(self, session: PersistentSession) -> None:
        """Put a session among the idle ones, as the most recently used."""
        self.take(session)
        if session.resident:
            pages = session.resting()
            self._idle[session] = pages
            self._idle_pages += pages
            self.ledger.commit(session, Reservation(pages))
        else:
            self.ledger.release(session)

    def drop(self, session: PersistentSession) -> None:
        """Take out a session that is being closed."""
        self.take(session)
        self.ledger.release(session)

    def hibernate(self, session: PersistentSession) -> None:
        """Move an idle session to its file. Raises SessionError; it stays as it was then."""
        session.hibernate()
        self.drop(session)

    def pinned(self, besides: PersistentSession | None) -> int:
        """Count the pages of idle sessions other than ``besides`` that cannot hibernate."""
        return 0 if self.to_files else self._resting(besides)

    def make_room(self, pages: int, besides: PersistentSession | None) -> bool:
        """Drop copies, then move idle sessions to files; whether ``pages`` were freed.

        Nothing moves where copies and sessions other than ``besides`` have fewer.
        """
        if pages > self.copy_pages + (self._resting(besides) if self.to_files else 0):
            return False
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
        """Add a copy; ``dropped`` is called when it has been closed to make room."""
        self.copies[cached] = dropped
        self.copy_pages += cached.pages
        self.ledger.commit(cached, Reservation(cached.pages))

    def touch_copy(self, cached: CachedCopy) -> None:
        """Make a copy the most recently used one."""
        self.copies.move_to_end(cached)

    def drop_copy(self, cached: CachedCopy) -> None:
        """Close a copy."""
        dropped = self.copies.pop(cached)
        self.copy_pages -= self.ledger.of(cached).steady
        cached.close()
        self.ledger.release(cached)
        dropped()

    def drop_oldest_copy(self) -> int:
        """Close the least recently used copy and return how many pages it had."""
        cached = next(iter(self.copies))
        pages = self.ledger.of(cached).steady
        self.drop_copy(cached)
        return pages

    def _resting(self, besides: PersistentSession | None) -> int:
        return self._idle_pages - (0 if besides is None else self._idle.get(besides, 0))


S = TypeVar("S", bound=CachedCopy)


class Capacity:
    """Keeps the sum of all reservations within the executor's limit.

    Where pages are short, copies are dropped first; then idle sessions that can hibernate do.

    Args:
        limit: gives the most pages that there may be; None: no limit.
        to_files: whether sessions can hibernate.
    """

    def __init__(self, limit: Callable[[], int | None], to_files: bool) -> None:
        self._limit, self.ledger = limit, Ledger()
        self.residents = Residents(self.ledger, to_files)

    def require_possible(self, reservation: Reservation, session: PersistentSession | None) -> None:
        """Refuse a request that would not fit even alone. Raises CapacityError."""
        limit = self._limit()
        if limit is not None and reservation.total + self.residents.pinned(session) > limit:
            raise self._refusal(reservation, limit)

    def commit(
        self,
        owner: Hashable,
        reservation: Reservation,
        session: PersistentSession | None,
        wait: bool,
    ) -> bool:
        """Reserve the pages of a request, if they fit now.

        Args:
            session: its own, if that is kept: it does not hibernate for it.
            wait: whether other requests are under way whose end it can wait for.

        Raises:
            CapacityError: it does not fit, and there is nothing to wait for.
        """
        limit = self._limit()
        if limit is not None:
            short = self.ledger.committed_with(owner, reservation) - limit
            if short > 0 and not self.residents.make_room(short, session):
                self.require_possible(reservation, session)
                if wait:
                    return False
                raise self._refusal(reservation, limit)
        if session is not None:
            self.residents.take(session)
        self.ledger.commit(owner, reservation)
        return True

    def free_up(self, pages: int) -> None:
        """Drop copies and move idle sessions to files until there is room. Raises CapacityError."""
        limit = self._limit()
        if limit is None:
            return
        short = self.ledger.committed + pages - limit
        if short > 0 and not self.residents.make_room(short, None):
            raise self._refusal(Reservation(pages), limit)

    def keep_copy(
        self, pages: int, make: Callable[[], S], dropped: Callable[[S], None], most: int | None
    ) -> S | None:
        """Make a copy, in place of the least recently used ones where that is needed.

        See :meth:`mmkv.scheduler.Scheduler.keep_copy`.
        """
        limit, residents = self._limit(), self.residents
        free = None if limit is None else limit - self.ledger.committed + residents.copy_pages
        if any(bound is not None and pages > bound for bound in (free, most)):
            return None
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
