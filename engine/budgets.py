"""What bounds the sequences of an engine; the one door to eviction outside a decode step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from mmkv.engine.errors import BudgetError
from mmkv.engine.page_bound import lasting_pages, page_bound
from mmkv.engine.policies import Budget, Policy

if TYPE_CHECKING:
    from mmkv.engine.backends.base import Backend
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


class Budgets(Protocol):
    """Bounds open sequences: each by its own budget, or all by one that they share.

    Attributes:
        graph_obstacle: why a CUDA graph cannot cut to it, or "".
    """

    graph_obstacle: str

    @property
    def fixed_pages(self) -> int:
        """Bound the pages beside the :meth:`lasting_pages` of every sequence."""
        ...

    def checked(self, budget: Budget | float | None) -> Budget:
        """Return the budget that a new session gets; None: the engine's.

        Raises:
            BudgetError: it cannot have this, or this would bind nothing.
        """
        ...

    def saved(self, budget: Budget) -> Budget:
        """Return the budget of a session that was saved with ``budget``. Raises BudgetError."""
        ...

    def changed(self, budget: Budget | float) -> Budget:
        """Return the budget that an open session may change to. Raises BudgetError."""
        ...

    def join(self, session: CachedSequence, weight: float = 1.0) -> None:
        """Bound a sequence that has been opened."""
        ...

    def leave(self, session: CachedSequence) -> None:
        """Bound it no more together with others."""
        ...

    def weight(self, session: CachedSequence) -> float:
        """Return the weight of its entries beside those of others."""
        ...

    def allowed(self, budget: Budget, seen: int) -> int:
        """Count the entries that ``budget`` leaves a sequence which has read ``seen`` tokens.

        Raises:
            BudgetError: fewer than one per row.
        """
        ...

    def competing(self, session: CachedSequence) -> int:
        """Count the entries that may stay of all with which this sequence's entries compete."""
        ...

    def lasting_pages(self, budget: Budget) -> int | None:
        """Bound the pages of a sequence of any length between its chunks; None: no bound."""
        ...

    def reserve(self, session: CachedSequence, tokens: int, chunk: int) -> None:
        """Have pages ready for a prompt of ``tokens``, in chunks. Raises BudgetError."""
        ...

    def cut(
        self,
        sessions: Sequence[CachedSequence],
        slack: int = 0,
        refused_by: Backend | None = None,
    ) -> None:
        """Evict from sequences that stand above their budget and ``slack`` entries beside it.

        Args:
            sessions: different open sequences of the engine.
            refused_by: a backend that has refused these sequences, and is not asked again.
        """
        ...


def why_unbound(policy: Policy) -> str | None:
    """Return why no budget binds a policy; None: one does."""
    if policy.evicts:
        return None
    return (
        f"policy {policy.name!r} evicts nothing, so that a budget would bind nothing; load the "
        "model with a budget, or with a policy that evicts"
    )


class OwnBudgets:
    """Each sequence has a budget of its own. See :class:`Budgets`."""

    graph_obstacle = ""
    fixed_pages = 0

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine

    def checked(self, budget: Budget | float | None) -> Budget:
        """See :class:`Budgets`."""
        made = self._engine.budget if budget is None else Budget.of(budget)
        self.allowed(made, 0)
        why = why_unbound(self._engine.policy)
        if why is not None and made != self._engine.budget:
            raise BudgetError(why)
        return made

    def saved(self, budget: Budget) -> Budget:
        """See :class:`Budgets`."""
        if why_unbound(self._engine.policy) is None:
            return self.checked(budget)
        self.allowed(budget, 0)  # one that cannot be says that the file is damaged
        return self._engine.budget

    def changed(self, budget: Budget | float) -> Budget:
        """See :class:`Budgets`."""
        why = why_unbound(self._engine.policy)
        if why is not None:
            raise BudgetError(why)
        return Budget.of(budget)

    def join(self, session: CachedSequence, weight: float = 1.0) -> None:
        """See :class:`Budgets`."""

    def leave(self, session: CachedSequence) -> None:
        """See :class:`Budgets`."""

    def weight(self, session: CachedSequence) -> float:
        """See :class:`Budgets`."""
        return 1.0

    def allowed(self, budget: Budget, seen: int) -> int:
        """See :class:`Budgets`."""
        engine, pool = self._engine, self._engine.cache.pool
        return budget.entries(engine.spec.rows, seen, pool.page_size, pool.page_bytes, engine.slack)

    def competing(self, session: CachedSequence) -> int:
        """See :class:`Budgets`."""
        return session.allowed_entries

    def lasting_pages(self, budget: Budget) -> int | None:
        """See :class:`Budgets`."""
        return lasting_pages(self._engine, budget)

    def reserve(self, session: CachedSequence, tokens: int, chunk: int) -> None:
        """See :class:`Budgets`."""
        cache = self._engine.cache
        bound = page_bound(self._engine, session.budget, tokens, 0, session.extent, chunk)
        cache.pool.reserve(bound.steady + bound.chunk - cache.held_pages(session.seq))

    def cut(
        self,
        sessions: Sequence[CachedSequence],
        slack: int = 0,
        refused_by: Backend | None = None,
    ) -> None:
        """See :class:`Budgets`: where a group of rows stands above its share and its slack.

        Before that goes what write gates have not admitted. C is asked first, for all of them
        together; torch cuts what C refuses.
        """
        engine = self._engine
        if engine.policy.admission is not None:
            for session in sessions:
                engine.backends.torch.drop_refused(session)
        due = [session for session in sessions if session.is_due(slack)]
        for backend in (engine.backends.cpu, engine.backends.torch):
            if due and backend is not refused_by:
                due = list(backend.evict(due))
