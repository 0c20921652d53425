"""Budgets of open sequences, own or shared; all eviction outside a step goes through here.

A sequence has a budget of its own, or all of an engine share one and their entries compete on their
scores. The most pages that a sequence can hold are known before it begins (:class:`PageBound`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mmkv.engine.backends.base import Backend, Batch, Counts, Scored
from mmkv.engine.budget import EVERY_STEP, Dial, Interval, above_most
from mmkv.engine.cache import Entries
from mmkv.engine.drafts import MOST_DRAFTED
from mmkv.engine.errors import BudgetError, PolicyError, SessionError, require_real
from mmkv.engine.policies import Budget
from mmkv.engine.policies.allocation import GlobalAllocation
from mmkv.engine.policies.base import CacheView
from mmkv.engine.policies.scoring import Retention
from mmkv.engine.policies.selection import MOST_ENTRIES, Shares, lowest
from mmkv.engine.scorer_state import score_entries
from mmkv.engine.trace import REFUSED

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


@dataclass(frozen=True)
class PageBound:
    """The most pages of one sequence, with what its states take in pages.

    Attributes:
        steady: between two chunks, while it decodes and afterwards.
        chunk: what one chunk of a prompt takes beside them, until the cache is cut back.
    """

    steady: int
    chunk: int


@dataclass(frozen=True)
class SequenceSize:
    """How far a sequence has come: tokens seen, entries held, tokens that came in prompts."""

    seen: int = 0
    entries: int = 0
    prompt_tokens: int = 0


def page_bound(
    engine: Runtime,
    budget: Budget,
    prompt: int,
    generated: int = 0,
    start: SequenceSize | None = None,
    chunk: int | None = None,
) -> PageBound:
    """Bound the pages of a sequence that reads ``prompt`` tokens and then decodes ``generated``.

    With R rows, pages of P entries and b entries after an eviction, a policy that evicts holds at
    most ``ceil((b + s R + R (P - 1)) / P)`` pages (s: steps between evictions), and a chunk of C
    tokens takes ``C R`` entries more. A share of the tokens is counted at the sequence's end. No
    bound is above what all tokens would take. States of layers without entries are added.

    Args:
        start: where the sequence stands; None: an empty one.
        chunk: tokens in a chunk; None: the engine's.
    """
    start = start or SequenceSize()
    rows, pool, policy = engine.spec.rows, engine.cache.pool, engine.policy
    ahead = 0 if engine.drafts is None else MOST_DRAFTED
    every = start.entries + (prompt + generated + ahead) * rows
    beside = engine.cache.state_pages
    if not policy.evicts:
        return PageBound(_pages(every, rows, pool.page_size) + beside, 0)
    seen = start.seen + prompt + generated
    size, each = pool.page_size, pool.page_bytes
    kept = budget.ceiling.entries(rows, seen, size, each, engine.interval)
    kept += (start.prompt_tokens + prompt) * rows if policy.keeps_prompt else 0
    slack = engine.interval.slack(kept, rows)
    # Between two evictions a sequence may stand above its budget, and a step adds to that.
    kept = max(kept + slack, start.entries) + (rows if generated else 0)
    in_chunk = kept + min(chunk or engine.prefill_chunk, prompt) * rows
    steady = _pages(min(every, kept), rows, pool.page_size)
    chunks = _pages(min(every, in_chunk), rows, pool.page_size) - steady
    return PageBound(steady + beside, chunks)


def _pages(entries: int, rows: int, page_size: int) -> int:
    """Count pages at the worst: every row's last page holds one entry."""
    return math.ceil((entries + rows * (page_size - 1)) / page_size)


def why_unbound(engine: Runtime) -> str | None:
    """Return why no budget binds the sessions of an engine; None: one does."""
    if engine.drafts is not None:
        return "lossless sessions keep all entries"
    return None if engine.policy.evicts else f"policy {engine.policy.name!r} evicts nothing"


def _require_bound(engine: Runtime) -> None:
    """Raise BudgetError where no budget binds a session."""
    if why := why_unbound(engine):
        drafts = engine.drafts is not None
        other = " for drafts, or without lossless" if drafts else ", or with a policy that evicts"
        raise BudgetError(
            f"{why}, so that a budget would bind nothing; load the model with a budget{other}"
        )


def batch_of(
    sessions: Sequence[CachedSequence], tokens: Sequence[int] = (), interval: Interval = EVERY_STEP
) -> Batch:
    """Put what backends read of different sequences of one engine in columns.

    Args:
        tokens: what a step appends, one each; empty for an eviction.
        interval: what is let be above a budget.
    """
    ahead = 1 if tokens else 0
    rows, recorded = [], []
    for index, one in enumerate(sessions):  # in one go: every decode step does so
        allowed = one.allowed_at(one.seen + ahead)
        long, position = bool(one.long_rope), one.next_position
        rows.append((one.seq, one.seen, position, long, one.entries, allowed, one.prompt_tokens))
        if one.recorder is not None:
            recorded.append(index)
    seqs, seen, positions, longs, entries, most, prompts = zip(*rows, strict=True)
    return Batch(
        seqs, seen, positions, longs, entries, most, prompts, tokens, interval, recorded=recorded
    )


def give_room(batch: Batch, sessions: Sequence[CachedSequence], backend: Backend) -> None:
    """Tell a backend that writes down by itself who dies where it may do so."""
    if batch.recorded and (most := backend.writes_deaths):
        recorders = (session.recorder for session in sessions)
        batch.deaths = [0 if each is None else each.room(most) for each in recorders]


def count(sessions: Sequence[CachedSequence], counts: Counts) -> None:
    """Count what a backend has made of sequences, and note it where it is recorded."""
    appended, all_dropped = counts.appended, counts.dropped
    for index, session in enumerate(sessions):
        if appended:
            session.count_appended(appended)
            if session.meter is not None and counts.log_beta is not None:
                session.meter.step(counts.log_beta, counts.step, index)
        if all_dropped:
            dropped = all_dropped[index]
            if dropped:
                session.count_evicted(dropped, counts.nan[index])
            if session.recorder is not None:
                _note(session, dropped, counts.scored.get(index) if counts.scored else None)


def _note(session: CachedSequence, dropped: int, scored: Scored | None) -> None:
    """Record an eviction from a sequence of which the backend gave ``scored``."""
    recorder, policy = session.recorder, session.engine.policy
    assert recorder is not None
    if scored is not None:
        recorder.sample(scored.view, scored.scores)
        if scored.victims is not None:
            recorder.died(scored.view, scored.victims, scored.scores)
            return
    if dropped:
        recorder.filled(dropped)
        if scored is None and recorder.samples_next:
            view = session.view()
            recorder.sample(view, policy.scores(view, session.allowed_entries).value)


def _cut_on(backend: Backend, sessions: Sequence[CachedSequence]) -> list[CachedSequence]:
    """Have a backend cut sequences to their budgets; those that it leaves to others."""
    batch, counts = batch_of(sessions), Counts()
    batch.attention = sessions[0].engine.backends.window_attention
    give_room(batch, sessions, backend)
    try:
        backend.evict(batch, counts)
    finally:  # an interrupt, or a scorer's error: what stands is counted
        count(sessions, counts)
    return [sessions[index] for index in counts.uncut]


def _drop_unadmitted(session: CachedSequence) -> None:
    """Drop what write gates have not admitted and the window has left."""
    admission, cache = session.engine.policy.admission, session.engine.cache
    if admission is None or session.seen < admission.window:
        return
    entries = cache.entries(session.seq)
    view = session.view(entries)
    log_g = view.state()[:, 0]
    victims = admission.refused(view.position, log_g, view.seen).nonzero().flatten()
    cache.drop(session.seq, victims, entries)
    session.count_evicted(victims.numel(), int(log_g[victims].isnan().sum()))
    if session.recorder is not None:
        session.recorder.died(view, victims, log_g, REFUSED)


class Budgets:
    """Bounds open sequences: each by a budget of its own; :class:`SharedBudget`: all by one."""

    def __init__(self, engine: Runtime) -> None:
        self._engine = engine

    @property
    def fixed_pages(self) -> int:
        """Bound the pages beside the :meth:`lasting_pages` of every sequence."""
        return 0

    def checked(self, budget: Budget | float | None) -> Budget:
        """Return the budget that a new session gets; None: the engine's.

        Raises:
            BudgetError: it cannot have this, or this would bind nothing.
        """
        made = self._engine.budget if budget is None else Budget.of(budget)
        self.allowed(made, 0)
        if made != self._engine.budget:
            _require_bound(self._engine)
        self.dial(made)
        return made

    def saved(self, budget: Budget) -> Budget:
        """Return the budget of a session that was saved with ``budget``. Raises BudgetError."""
        if why_unbound(self._engine) is None:
            return self.checked(budget)
        self.allowed(budget, 0)  # one that cannot be says that the file is damaged
        return self._engine.budget

    def changed(self, budget: Budget | float) -> Budget:
        """Return the budget that an open session may change to. Raises BudgetError."""
        _require_bound(self._engine)
        made = Budget.of(budget)
        self.dial(made)
        return made

    def join(self, session: CachedSequence, weight: float = 1.0) -> None:
        """Bound a sequence that has been opened."""

    def leave(self, session: CachedSequence) -> None:
        """Bound it no more together with others."""

    def weight(self, session: CachedSequence) -> float:
        """Return the weight of its entries beside those of others."""
        return 1.0

    def allowed(self, budget: Budget, seen: int) -> int:
        """Count the entries that ``budget`` leaves a sequence which has read ``seen`` tokens.

        Raises:
            BudgetError: fewer than one per row.
        """
        engine, pool = self._engine, self._engine.cache.pool
        size, each = pool.page_size, pool.page_bytes
        return budget.entries(engine.spec.rows, seen, size, each, engine.interval)

    def dial(self, budget: Budget) -> Dial | None:
        """Return a dial for a budget that grows with the risk; None: it is fixed.

        Raises:
            BudgetError: fewer than one entry per row, or a bound below the budget.
            PolicyError: the policy predicts no weights.
        """
        if budget.risk is None:
            return None
        policy = self._engine.policy
        if not (policy.evicts and isinstance(policy.scoring, Retention)):
            raise PolicyError(
                f"policy {policy.name!r} does not predict what is forgotten, so that a risk means "
                "nothing; use dbtrimkv with gates, or leave risk and budget_max out"
            )
        least, most = self.allowed(budget, 0), self.allowed(budget.ceiling, 0)
        if least > most:
            raise BudgetError(above_most(budget))
        return Dial(budget.risk, least, most, self._engine.cache.pool.page_size)

    def competing(self, session: CachedSequence) -> int:
        """Count the entries that may stay of all with which this sequence's entries compete."""
        return session.allowed_entries

    def lasting_pages(self, budget: Budget) -> int | None:
        """Bound the pages of a sequence of any length between its chunks; None: no bound."""
        engine = self._engine
        if not engine.policy.evicts or engine.policy.keeps_prompt or budget.kind == "fraction":
            return None
        rows, kept = engine.spec.rows, self.allowed(budget.ceiling, 0)
        kept += engine.interval.at(kept, rows) * rows
        return _pages(kept, rows, engine.cache.pool.page_size) + engine.cache.state_pages

    def reserve(self, session: CachedSequence, tokens: int, chunk: int) -> None:
        """Have pages ready for a prompt of ``tokens``, in chunks. Raises BudgetError."""
        cache = self._engine.cache
        bound = page_bound(self._engine, session.budget, tokens, 0, session.extent, chunk)
        cache.pool.reserve(bound.steady + bound.chunk - cache.held_pages(session.seq))

    def cut(
        self,
        sessions: Sequence[CachedSequence],
        interval: Interval = EVERY_STEP,
        tried: Backend | None = None,
    ) -> None:
        """Evict from sequences that stand above their budget and what ``interval`` lets be.

        That is where a group of rows stands above its share and its slack. Before that goes what
        write gates have not admitted. The backends are asked in their order, each for all that the
        ones before it have left.

        Args:
            sessions: different open sequences of the engine.
            tried: a backend that has refused to cut these sequences, and is not asked again.
        """
        if not sessions:
            return
        engine = self._engine
        if engine.drafts is not None:
            for session in sessions:
                engine.drafts.cut(session)
        if engine.policy.admission is not None:
            for session in sessions:
                _drop_unadmitted(session)
        due = [session for session in sessions if session.needs_eviction(interval)]
        for backend in engine.backends.stepping:
            if due and backend is not tried:
                due = _cut_on(backend, due)


class SharedBudget(Budgets):
    """Keeps the best entries of all its sequences together, and some of each.

    An entry's score is the policy's plus the log of its sequence's weight; entries that the policy
    protects go last. Each sequence's best ``floor`` entries per row, or as many as an equal share
    has, go after all others. By risk, those go first whose sequence has forgotten least when
    they are gone (:meth:`_by_risk`). Ties fall on the smaller position, then layer, then head, then
    the sequence that joined first. So what a sequence keeps depends on the others.

    Made by :meth:`mmkv.engine.runtime.Runtime.share`. Who calls :meth:`cut` holds the engine's
    lock.

    Attributes:
        entries: that may stay of all sequences together.
        floor: entries that each sequence keeps of its own, rows together.
        by_risk: whether what sequences have forgotten decides which of them gives up room.

    Raises:
        BudgetError: the budget is not in entries, or the floor is above it.
        PolicyError: the policy's scores cannot be compared between sequences.
        SessionError: sequences are open that this budget would not count.
    """

    def __init__(
        self, engine: Runtime, budget: Budget, floor: float, by_risk: bool = False
    ) -> None:
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
        super().__init__(engine)
        self.entries = budget.entries(rows, 0, pool.page_size, pool.page_bytes)
        self.floor = int(floor * rows)
        self.by_risk = by_risk
        self._weights: WeakKeyDictionary[CachedSequence, float] = WeakKeyDictionary()

    @property
    def held(self) -> int:
        """Count the entries of all sequences."""
        with self._engine.lock:
            return sum(one.entries for one in self._weights)

    @property
    def fixed_pages(self) -> int:
        """Bound the pages beside :attr:`pages_each` of every sequence, between two chunks.

        With R rows, pages of P entries and n sequences, at most ``B + (s - 1) R + n R`` entries
        stand (s: steps between evictions, each sequence taking one step), and the last page of
        every row may hold a single one: ``(B + (s - 1) R + n R + n R (P - 1)) / P`` pages.
        """
        engine = self._engine
        slack = engine.interval.slack(self.entries, engine.spec.rows)
        return math.ceil((self.entries + slack) / engine.cache.pool.page_size)

    @property
    def pages_each(self) -> int:
        """Bound what a sequence adds to :attr:`fixed_pages`: one page a row, and its states."""
        return self._engine.spec.rows + self._engine.cache.state_pages

    def lasting_pages(self, budget: Budget) -> int:
        """See :class:`Budgets`: :attr:`pages_each`."""
        return self.pages_each

    def checked(self, budget: Budget | float | None) -> Budget:
        """See :class:`Budgets`: the shared one, and no other."""
        ours = self._engine.budget
        if budget is not None and Budget.of(budget) != ours:
            raise BudgetError(
                f"all sessions of this engine share a budget of {ours.describe()}; open them "
                "without one of their own"
            )
        return ours

    def saved(self, budget: Budget) -> Budget:
        """See :class:`Budgets`: a file's own budget binds no more."""
        Budget.of(budget)  # one that cannot be says that the file is damaged
        return self._engine.budget

    def changed(self, budget: Budget | float) -> Budget:
        """Raise BudgetError."""
        raise BudgetError("the session shares a budget; it has none of its own to change")

    def allowed(self, budget: Budget, seen: int) -> int:
        """See :class:`Budgets`: a sequence by itself may keep all."""
        return MOST_ENTRIES

    def dial(self, budget: Budget) -> None:
        """See :class:`Budgets`: no sequence has one of its own."""

    def competing(self, session: CachedSequence) -> int:
        """See :class:`Budgets`: those of all sequences."""
        return self.entries

    def reserve(self, session: CachedSequence, tokens: int, chunk: int) -> None:
        """See :class:`Budgets`: chunk after chunk, the same pages come free."""
        pool, rows = self._engine.cache.pool, self._engine.spec.rows
        pool.reserve(rows + math.ceil(min(chunk, tokens) * rows / pool.page_size))

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

    def cut(
        self,
        sessions: Sequence[CachedSequence],
        interval: Interval = EVERY_STEP,
        tried: Backend | None = None,
    ) -> None:
        """Cut all that share back to the budget, when together they hold more.

        Whichever ``sessions`` have grown, the entries of all compete, and torch finds the victims:
        neither ``sessions`` nor ``tried`` is read. All victims are found and dropped at once, so
        the host waits for a GPU as often for many as for two.
        """
        engine = self._engine
        if self.held <= self.entries + interval.slack(self.entries, engine.spec.rows):
            return
        members = [one for one in self._weights if one.entries]
        live = engine.cache.entries([one.seq for one in members])
        counts, rows = [one.entries for one in members], engine.spec.rows
        columns = (column.split(counts) for column in (live.row, live.offset, live.slot))
        # Rows counted as if each sequence were alone.
        parts = [
            Entries(row - index * rows, offset, slot)
            for index, (row, offset, slot) in enumerate(zip(*columns, strict=True))
        ]
        views = [one.view(entries) for one, entries in zip(members, parts, strict=True)]
        # Scores are logs of retention (__init__ asks for that): a weight's log multiplies it.
        scores = [
            self._scores(one, entries, view) + math.log(self._weights[one])
            for one, entries, view in zip(members, parts, views, strict=True)
        ]
        owner = torch.arange(len(members), device=live.row.device).repeat_interleave(
            torch.tensor(counts, device=live.row.device), output_size=sum(counts)
        )
        every = torch.cat(scores)
        order = self._by_risk(members, views, scores) if self.by_risk else every
        victims = self._victims(live, order, owner, counts)
        engine.cache.drop([one.seq for one in members], victims, live)
        gone = owner[victims].bincount(minlength=len(members))
        broken = owner[victims[every[victims].isnan()]].bincount(minlength=len(members))
        start = 0
        for index, (dropped, nan) in enumerate(torch.stack([gone, broken], 1).tolist()):
            session = members[index]
            session.count_evicted(dropped, nan)
            if dropped and session.recorder is not None:  # others' entries may be the reason
                session.recorder.step(session, "shared")
                own = victims[owner[victims] == index] - start
                session.recorder.died(views[index], own, scores[index])
            start += counts[index]

    def _by_risk(
        self,
        sessions: Sequence[CachedSequence],
        views: Sequence[CacheView],
        scores: Sequence[Tensor],
    ) -> Tensor:
        """Order entries, float32 ``[N]``, by the risk of their sequence once they are gone.

        A sequence's entries go in the order of their scores, so each has such a risk, times the
        sequence's weight. The lowest go, whosever they are: all end at about the same risk, and the
        highest is as low as it can be.
        """
        keys = []
        for session, view, score in zip(sessions, views, scores, strict=True):
            found, order = session.risk(), score.argsort(stable=True)
            forgotten = 0.0 if found is None else found.forgotten
            weight = (view.log_beta * (view.seen - view.position)).double().exp()
            after = forgotten + weight[order].cumsum(0)
            key = torch.empty_like(after)
            key[order] = after / (forgotten + weight.sum()) * self._weights[session]
            keys.append(torch.where(score.isfinite(), key, score.double()))
        key = torch.cat(keys)
        ranks = key.unique(return_inverse=True)[1].float()  # equal ones stay equal
        return torch.where(key.isfinite(), ranks, key.float())

    def _scores(self, session: CachedSequence, entries: Entries, view: CacheView) -> Tensor:
        engine = self._engine
        scores = score_entries(engine.cache, engine.policy, entries, view, self.entries)
        if session.recorder is not None:
            session.recorder.sample(view, scores)
        return scores

    def _victims(self, live: Entries, scores: Tensor, owner: Tensor, counts: list[int]) -> Tensor:
        """Indices ``[K]`` into ``live``, whose entries have ``scores [N]`` and ``owner [N]``.

        The selection of :mod:`mmkv.engine.policies.selection` takes each sequence for a row.
        """
        pool, rows = self._engine.cache.pool, self._engine.spec.rows
        place = pool.position.view(-1)[live.slot].long() * rows + live.row % rows
        view = CacheView(
            seen=0,
            layers=len(counts),
            kv_heads=1,
            row=owner,
            length=torch.tensor(counts, device=owner.device),
            position=place,
            log_beta=pool.log_beta.view(-1)[live.slot],
            modality=pool.modality.view(-1)[live.slot],
        )
        group = torch.zeros(len(counts), dtype=torch.int64)
        floor = torch.full_like(group, min(self.floor, self.entries // len(counts)))
        return lowest(scores, view, Shares(group, torch.tensor([self.entries]), floor))
