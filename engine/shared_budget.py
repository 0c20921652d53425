"""One budget that the sequences of an engine share: their entries compete on their scores."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.checks import require_real
from engine.errors import BudgetError, PolicyError, SessionError
from engine.policies.allocation import GlobalAllocation
from engine.policies.base import CacheView
from engine.policies.scoring import Retention
from engine.policies.selection import Shares, lowest

if TYPE_CHECKING:
    from engine.cache import Entries
    from engine.policies import Budget
    from engine.runtime import Runtime
    from engine.sequence import CachedSequence


class SharedBudget:
    """Keeps the best entries of all its sequences together, and some of each.

    An entry's score is the policy's plus the log of its sequence's weight; entries that the policy
    protects go last. Each sequence's best ``floor`` entries per row, or as many as an equal share
    has, go after all others. Ties fall on the smaller position, then layer, then head, then the
    sequence that joined first. So what a sequence keeps depends on the others.

    Made by :meth:`engine.runtime.Runtime.share`. Who calls :meth:`cut` holds the engine's lock.

    Attributes:
        entries: that may stay of all sequences together.
        floor: entries that each sequence keeps of its own, rows together.

    Raises:
        BudgetError: the budget is not in entries, or the floor is above it.
        PolicyError: the policy's scores cannot be compared between sequences.
        SessionError: sequences are open that this budget would not count.
    """

    def __init__(self, engine: Runtime, budget: Budget, floor: float) -> None:
        policy, rows, pool = engine.policy, engine.spec.rows, engine.cache.pool
        if budget.kind != "entries":
            raise BudgetError(
                f"a shared budget of {budget.describe()} cannot be; give entries per row, such as "
                "1024, for all sessions together"
            )
        if not (
            type(policy.allocation) is GlobalAllocation
            and isinstance(policy.scoring, Retention)
            and policy.admission is None
        ):
            raise PolicyError(
                f"policy {policy.name!r} cannot share a budget: its scores say nothing across "
                "sessions; use dbtrimkv"
            )
        require_real("the floor of a shared budget", floor)
        if not 0 <= floor <= budget.value:
            raise BudgetError(
                f"a floor of {floor:g} entries per row is not between 0 and the shared budget of "
                f"{budget.value:g}"
            )
        if engine.cache.open_count:  # those without an entry, too: they would never join
            raise SessionError("sessions are open already; share a budget before them")
        self._engine = engine
        self.entries = budget.entries(rows, 0, pool.page_size, pool.page_bytes)
        self.floor = int(floor * rows)
        self._weights: dict[CachedSequence, float] = {}

    @property
    def held(self) -> int:
        """Count the entries of all sequences."""
        with self._engine.lock:
            return sum(one.entries for one in self._weights)

    @property
    def fixed_pages(self) -> int:
        """Bound the pages beside :attr:`pages_each` of every sequence, between two chunks.

        With R rows, pages of P entries and n sequences, at most ``B + (s - 1) R + n R`` entries
        stand (s: ``evict_every``, each sequence taking one step), and the last page of every row
        may hold a single one: ``(B + (s - 1) R + n R + n R (P - 1)) / P`` pages.
        """
        return math.ceil((self.entries + self._engine.slack) / self._engine.cache.pool.page_size)

    @property
    def pages_each(self) -> int:
        """Bound what a sequence adds to :attr:`fixed_pages`: one page a row."""
        return self._engine.spec.rows

    def join(self, session: CachedSequence, weight: float = 1.0) -> None:
        """Let a sequence's entries compete; one that takes part already gets the weight.

        Raises:
            BudgetError: the weight is not positive.
        """
        require_real("the weight of a session", weight)
        if not (math.isfinite(weight) and weight > 0):
            raise BudgetError(f"a weight of {weight} cannot be; give a positive number")
        with self._engine.lock:  # another thread may be cutting
            self._weights[session] = float(weight)

    def leave(self, session: CachedSequence) -> None:
        """Take a sequence out: nothing of it is evicted, nor counted."""
        with self._engine.lock:
            self._weights.pop(session, None)

    def weight(self, session: CachedSequence) -> float:
        """Return the weight of a sequence; 1 where it takes no part."""
        return self._weights.get(session, 1.0)

    def cut(self, slack: int = 0) -> None:
        """Evict from all sequences when they hold more than the budget and ``slack`` together."""
        if self.held <= self.entries + slack:
            return
        cache, backend = self._engine.cache, self._engine.backends.torch
        members = [one for one in self._weights if one.entries]
        held = [cache.entries(one.seq) for one in members]
        views = [one.view(entries) for one, entries in zip(members, held, strict=True)]
        scores = [
            backend.scores(one, entries, view) + math.log(self._weights[one])
            for one, entries, view in zip(members, held, views, strict=True)
        ]
        victims = self._victims(held, scores)
        counts = [one.numel() for one in scores]
        owner = torch.arange(len(members), device=victims.device).repeat_interleave(
            torch.tensor(counts, device=victims.device)
        )
        start = 0
        for index, (session, entries) in enumerate(zip(members, held, strict=True)):
            own = victims[owner[victims] == index] - start
            start += counts[index]
            if own.numel():
                cache.drop(session.seq, own, entries)
                session.count_evicted(own.numel(), int(scores[index][own].isnan().sum()))
                if session.recorder is not None:  # others' entries may be the reason
                    session.recorder.step(session, "shared")
                    session.recorder.died(views[index], own, scores[index])

    def _victims(self, held: list[Entries], scores: list[Tensor]) -> Tensor:
        """Indices ``[K]`` into the entries of all sequences, one after the other.

        The selection of :mod:`engine.policies.selection` takes each sequence for a row.
        """
        pool, rows = self._engine.cache.pool, self._engine.spec.rows
        counts = torch.tensor([one.numel() for one in scores], device=scores[0].device)
        slot = torch.cat([one.slot for one in held])
        place = pool.position.view(-1)[slot].long() * rows + torch.cat([one.row for one in held])
        view = CacheView(
            seen=0,
            layers=len(held),
            kv_heads=1,
            row=torch.arange(len(held), device=slot.device).repeat_interleave(counts),
            length=counts,
            position=place,
            log_beta=pool.log_beta.view(-1)[slot],
            modality=pool.modality.view(-1)[slot],
        )
        group = torch.zeros(len(held), dtype=torch.int64)
        floor = torch.full_like(group, min(self.floor, self.entries // len(held)))
        return lowest(torch.cat(scores), view, Shares(group, torch.tensor([self.entries]), floor))
