"""The pages that jobs and idle sessions may take, added up."""

from __future__ import annotations

from collections.abc import Hashable

from mmkv.scheduler.contract import Price


class Ledger:
    """Commitments by owner: a job, or a session that is kept."""

    def __init__(self) -> None:
        self._prices: dict[Hashable, Price] = {}
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

    def commit(self, owner: Hashable, price: Price) -> None:
        """Set what ``owner`` may take; a price that was set before is replaced."""
        self.release(owner)
        self._prices[owner] = price
        self._sum += price.steady + price.snapshot
        if price.chunk:
            self._chunks[owner] = price.chunk

    def release(self, owner: Hashable) -> None:
        """Forget what ``owner`` may take."""
        price = self._prices.pop(owner, None)
        if price is not None:
            self._sum -= price.steady + price.snapshot
            self._chunks.pop(owner, None)

    def of(self, owner: Hashable) -> Price:
        """Return what ``owner`` may take."""
        return self._prices.get(owner, Price(0))

    def committed_with(self, owner: Hashable, price: Price) -> int:
        """Return :attr:`committed` as it would be with another price of ``owner``."""
        before = self._prices.get(owner)
        self.commit(owner, price)
        total = self.committed
        self.release(owner)
        if before is not None:
            self.commit(owner, before)
        return total
