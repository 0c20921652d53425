"""Which prompts are read in one pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from mmkv.scheduler.contract import Executor
from mmkv.scheduler.ledger import Ledger
from mmkv.scheduler.ticket import Ticket


class SharedPass:
    """Prompts whose next chunks are read together.

    All of them take no more tokens than a pass has, and no more pages than are committed: what
    other requests may take and do not hold yet is free for the length of a pass.

    Args:
        first: the prompt whose turn it is; its chunk has begun.
        slow: whether its job was slow to begin: no other such job begins in this turn then.

    Attributes:
        tickets: ``first``, and those beside it.
        tokens: how many more the pass has.
    """

    def __init__(self, executor: Executor, ledger: Ledger, first: Ticket[Any], slow: bool) -> None:
        self.executor, self.ledger = executor, ledger
        self.tickets = [first]
        self.tokens = executor.pass_tokens - first.job.next_chunk
        # On a GPU, where nothing is shared, counting them would wait for the device.
        self._pages = [executor.pages_for(first.job)] if self.tokens > 0 else []
        self._tried, self._slow = {first}, slow

    def candidate(self, heads: Collection[Ticket[Any]]) -> Ticket[Any] | None:
        """Choose the prompt to try next; None where all were tried.

        Users who have fewer prompts in the pass go first.

        Args:
            heads: the first request of each user that is not in the pass.
        """
        ready = [one for one in heads if one.state == "prefill" and one not in self._tried]
        users = Counter(one.user for one in self.tickets)
        ticket = min(ready, key=lambda one: users[one.user], default=None)
        if ticket is not None:
            self._tried.add(ticket)
        return ticket

    def may_begin(self, ticket: Ticket[Any]) -> bool:
        """Whether a candidate's chunk may begin in this turn; it counts as begun then."""
        slow = ticket.job.slow_to_begin
        if slow and self._slow:
            return False
        self._slow = self._slow or slow
        return True

    def add(self, ticket: Ticket[Any]) -> None:
        """Take in a prompt whose chunk has begun, if it fits."""
        chunk, pages = ticket.job.next_chunk, self.executor.pages_for(ticket.job)
        if chunk <= self.tokens and self._fit([*self._pages, pages]):
            self.tokens -= chunk
            self.tickets.append(ticket)
            self._pages.append(pages)

    def shrink(self) -> None:
        """Leave out the last ones until the others fit.

        One that failed to begin has taken its pages out of what is committed.
        """
        while len(self.tickets) > 1 and not self._fit(self._pages):
            self.tickets.pop()
            self._pages.pop()

    def _fit(self, pages: Sequence[int]) -> bool:
        """Whether new pages of the chunks keep to what is committed, where there is a limit."""
        if self.executor.limit() is None:
            return True
        return self.executor.held() + sum(pages) <= self.ledger.committed
