"""What fits into the executor's pages, and what makes way for it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from mmkv.engine.errors import CapacityError
from mmkv.scheduler.contract import Executor, KeptSession, Price, Spare
from mmkv.scheduler.ledger import Ledger
from mmkv.scheduler.residents import Residents

S = TypeVar("S", bound=Spare)


class Capacity:
    """Keeps all that is committed within the executor's limit.

    Spares make way for whatever needs their pages, and then idle sessions that can hibernate.

    Args:
        to_files: whether sessions can hibernate.
    """

    def __init__(self, executor: Executor, to_files: bool) -> None:
        self.executor, self.ledger = executor, Ledger()
        self.residents = Residents(self.ledger, to_files)

    def require_possible(self, price: Price, session: KeptSession | None) -> None:
        """Refuse what would not fit if everything that ends had ended. Raises CapacityError."""
        limit = self.executor.limit()
        if limit is not None and price.total + self.residents.pinned(session) > limit:
            raise self._refusal(price, limit)

    def commit(
        self, owner: Hashable, price: Price, session: KeptSession | None, wait: bool
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
            short = self.ledger.committed_with(owner, price) - limit
            possible = short <= self.residents.movable(session)
            if not possible:
                self.require_possible(price, session)
            if not possible or not self.residents.make_room(short, session):
                if wait:
                    return False
                raise self._refusal(price, limit)
        if session is not None:
            self.residents.take(session)
        self.ledger.commit(owner, price)
        return True

    def free_up(self, pages: int) -> None:
        """Let spares and idle sessions go until there is room. Raises CapacityError."""
        limit = self.executor.limit()
        if limit is None:
            return
        short = self.ledger.committed + pages - limit
        if short > self.residents.movable(None) or not self.residents.make_room(short, None):
            raise self._refusal(Price(pages), limit)

    def spare_fits(self, pages: int, most: int | None) -> bool:
        """Whether there is room for a spare where others make way; see :meth:`keep_spare`."""
        limit, held = self.executor.limit(), self.residents.spare_pages
        free = None if limit is None else limit - self.ledger.committed + held
        return pages <= min((one for one in (free, most) if one is not None), default=pages)

    def keep_spare(
        self, pages: int, make: Callable[[], S], dropped: Callable[[S], None], most: int | None
    ) -> S:
        """Make a spare that fits, in place of those used longest ago.

        Args:
            pages: what it will hold; dropped: called with it once it has been closed to make room.
            most: pages that all spares may hold together; None: no limit but the executor's.
        """
        limit, residents = self.executor.limit(), self.residents
        while most is not None and residents.spare_pages + pages > most:
            residents.drop_oldest_spare()
        while limit is not None and self.ledger.committed + pages > limit:
            residents.drop_oldest_spare()
        spare = make()
        residents.keep_spare(spare, lambda: dropped(spare))
        return spare

    def _refusal(self, price: Price, limit: int) -> CapacityError:
        committed = self.ledger.committed
        remedy = "lower its budget or its length" if price.total > limit else "close a session"
        return CapacityError(
            f"the request may take {price.total:,} pages, {committed:,} of {limit:,} are "
            f"committed; {remedy}, or raise the memory limit",
            price.total,
            committed,
            limit,
        )
