"""A session: one sequence under its own budget, from its first token to its last."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmkv.engine.budget import TURN
from mmkv.engine.budgets import SequenceSize
from mmkv.engine.cache import Entries
from mmkv.engine.compaction import (
    RowShifts,
    Runs,
    Segments,
    move,
    position_of,
    runs_of,
    with_text,
    without_after,
)
from mmkv.engine.contents import Memory, Span, held_shares, memory_of, retained_tokens
from mmkv.engine.errors import ContextError, SessionError
from mmkv.engine.interrupts import CtrlC
from mmkv.engine.paths import user_path
from mmkv.engine.policies import Budget, CacheView
from mmkv.engine.policies.selection import sort_key
from mmkv.engine.prefill import Prefill, claimed, run_whole
from mmkv.engine.read_ids import with_ids
from mmkv.engine.risk import Risk, RiskMeter, entries_needed
from mmkv.engine.scorer_state import QUERIES, RINGS, forget_positions, score_entries, view_of
from mmkv.engine.system import exact_products
from mmkv.engine.trace import FORGOTTEN, Recorder

if TYPE_CHECKING:
    import numpy as np

    from mmkv.engine.budget import Interval
    from mmkv.engine.model.families.base import Turn
    from mmkv.engine.prefill import PassMark
    from mmkv.engine.runtime import Runtime

_STATE = (
    "seen",
    "next_position",
    "evicted",
    "evicted_nan",
    "entries",
    "long_rope",
    "prompt_tokens",
    "read_ids",
    "pictures",
    "runs",
    "shifts",
    "compactions",
    "capped",
    "dial",
)


class CachedSequence:
    """Appends turns and tokens to one sequence; made by :meth:`Runtime.session`.

    One that nobody refers to any more returns its pages when the engine is used next.

    Attributes:
        recorder: what :meth:`record` has begun, or None.
        ahead: what lossless decoding knows beyond the tokens seen, or None.
        meter: adds up for :meth:`risk`; None without retention gates, and where what was evicted
            is not known.
        left: of a pass over its prompt that was left, or None.
        seen: tokens so far; next_position: rope position of the next text token. Their
            difference is this sequence's M-RoPE delta: it belongs to the session, never to
            the model. prompt_tokens: those of them that came in prompts. pictures: where the
            tokens of each begin and end. runs: which rope positions the tokens would have, None
            where that is not known; shifts: how far they have moved since, row by row, None: not;
            compactions: how often; capped: entries that went since their row was too long for the
            context (:mod:`mmkv.engine.compaction`).
        read_ids: a bit for each token id that it has read, evicted or not
            (:mod:`mmkv.engine.read_ids`).
        cache_salt: only sessions with the same one find each other's features of pictures.

    Threads may share an engine, not a session: a call on a session that another thread is using
    raises :class:`SessionError`. Reading it (:meth:`memory`, :meth:`retained`) and closing it
    wait for the chunk or step that runs.
    """

    def __init__(self, engine: Runtime, budget: Budget) -> None:
        self.engine = engine
        self._set_budget(budget)
        self.seen, self.next_position, self.entries = 0, 0, 0
        self.evicted, self.evicted_nan, self.prompt_tokens, self.read_ids = 0, 0, 0, 0
        self.pictures: tuple[Span, ...] = ()
        self.runs: Runs | None = ()
        self.meter = self.new_meter()
        self.shifts: RowShifts | None = None
        self.compactions = self.capped = 0
        self.long_rope: bool | None = None
        self.cache_salt = ""
        self.ahead = None if engine.drafts is None else engine.drafts.ahead()
        self._claim = threading.RLock()
        self.closed = False
        self.left: PassMark | None = None
        self.recorder: Recorder | None = None
        with engine.lock:
            self._own(engine.cache.open())
            engine.budgets.join(self)

    def claimed(self) -> AbstractContextManager[None]:
        """Claim the session for one call, as :func:`claimed` does."""
        return claimed([self])

    def require_whole(self, by: PassMark | None = None) -> None:
        """Raise SessionError if a pass was left, but ``by``: some layers then have more tokens."""
        if self.left is not None and self.left is not by:
            raise SessionError(
                "a prompt is being read into the session; wait for it, or take it back"
            )

    def _take(self) -> None:
        """Claim the session until the claim is released. Raises SessionError: it is in use."""
        if not self._claim.acquire(blocking=False):
            raise SessionError(
                "the session is in use by another thread; wait for that call to end, or give "
                "each thread a session of its own"
            )

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Claim the session, whatever its state, and hold Ctrl-C back. Raises SessionError."""
        with CtrlC():
            self._take()
            try:
                yield
            finally:
                self._claim.release()

    def _own(self, seq: int) -> None:
        """Own a sequence of the cache from now on: with the session, it goes."""
        self.seq, self._owner = seq, self.engine.cache.owner(seq)

    def drop_ahead(self) -> None:
        """Cut off what is cached of tokens that the session has not seen."""
        if self.engine.drafts is not None:
            with self.engine.lock:
                self.engine.drafts.drop(self)

    def _require_idle(self) -> None:
        """Raise SessionError while the session is in the middle of something of its own."""

    def _set_budget(self, budget: Budget) -> None:
        """Raises :class:`BudgetError`, and changes nothing, for less than one entry per row."""
        entries = self.engine.budgets.allowed(budget, 0)
        self.budget = budget
        # Every decode step asks; only a share of the tokens changes with them.
        self._fixed_entries = None if budget.kind == "fraction" else entries
        self._dial = self.engine.budgets.dial(budget)

    @property
    def dial(self) -> tuple[int, int, int, bool] | None:
        """State of the dial of a budget with a risk; None: the budget is fixed.

        ``allowed``, ``room``, ``turned_at`` and ``full`` of :class:`mmkv.engine.budget.Dial`.
        """
        made = self._dial
        return None if made is None else (made.allowed, made.room, made.turned_at, made.full)

    @dial.setter
    def dial(self, stands: tuple[int, int, int, bool] | None) -> None:
        if self._dial is not None:
            allowed, room, at, full = stands or (0, 0, 0, False)
            self._dial = replace(self._dial, allowed=allowed, room=room, turned_at=at, full=full)

    @torch.inference_mode()
    def turn_dial(self, decoding: bool = False) -> None:
        """Let the budget follow the risk: after a chunk, and every few tokens of a reply.

        The caller holds the engine's lock. Entries above the budget go with the next cut; a
        reply gets room for the tokens until it is turned again.
        """
        dial = self._dial
        if dial is None or (decoding and 0 < dial.turned_at > self.seen - TURN):
            return
        risk = self._risk()
        if risk is None:  # the dial stays where it is, and Memory.risk_unknown says so
            return
        enough, plenty = entries_needed(risk, dial, self.view(), self.engine.policy)
        dial.turn(enough, plenty, TURN * self.engine.spec.rows if decoding else 0)
        dial.turned_at = self.seen if decoding else 0

    @property
    def allowed_entries(self) -> int:
        """M_global at the present length: the entries that may stay after an eviction."""
        return self.allowed_at(self.seen)

    def allowed_at(self, seen: int) -> int:
        """M_global once ``seen`` tokens have been read, and all of a prompt that is to be kept."""
        engine = self.engine
        if self._dial is not None:
            allowed = self._dial.allowed
        elif self._fixed_entries is not None:
            allowed = self._fixed_entries
        else:
            allowed = engine.budgets.allowed(self.budget, seen)
        kept = self.prompt_tokens * engine.spec.rows if engine.policy.keeps_prompt else 0
        return allowed + kept

    @torch.inference_mode()
    def prefill(
        self,
        inputs: Mapping[str, Tensor],
        progress: Callable[[int, int], None] | None = None,
    ) -> Tensor:
        """Append one turn, in chunks, cutting the cache back to the budget after each.

        Args:
            inputs: what the processor returns for this turn alone (one row), or ``input_ids``.
            progress: called with (tokens done, tokens of the turn) after each chunk.

        Returns:
            float32 logits ``[vocab]`` of the last token.

        Raises:
            InputError, ContextError, BudgetError: before anything has changed. If a later
            chunk is interrupted, the session keeps the chunks before it, whole.
        """
        engine = self.engine
        with self.claimed():
            with engine.lock:
                turn = engine.turn(inputs, self.next_position, self.cache_salt)
            return self.extend(turn, progress)

    @torch.inference_mode()
    def extend(self, turn: Turn, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """:meth:`prefill` of a turn already built, whose positions follow this session's."""
        with self.claimed():
            return run_whole(Prefill(self, turn), progress)

    @torch.inference_mode()
    def begin_prefill(
        self, inputs: Mapping[str, Tensor], chunk: int | None = None, undoable: bool = True
    ) -> Prefill:
        """Begin a :meth:`prefill` whose chunks the caller asks for, one at a time.

        Pictures are encoded here, all of them.

        Args:
            chunk: tokens in a chunk; None: the engine's.
            undoable: whether the turn can be taken back whole between chunks. A turn of several
                chunks then holds a copy of the sequence's pages until it is complete.

        Raises:
            InputError, ContextError, BudgetError: before anything has changed.
        """
        engine = self.engine
        with self.claimed(), engine.lock:
            turn = engine.turn(inputs, self.next_position, self.cache_salt)
            return Prefill(self, turn, chunk, undoable)

    def record(self, limit: int = Recorder.LIMIT) -> Recorder:
        """Record from now on which entries stay and which go; the same recorder when asked again.

        Forks record on, each for itself. A session file holds no record. While it records, a
        session decodes step by step on a GPU, too.

        Args:
            limit: bytes that its list of evicted entries may take; beyond, the oldest steps go.
        """
        with self.engine.lock:
            self._require_open()
            if self.recorder is None:
                self.drop_ahead()
                self.recorder = Recorder(self, limit)
            return self.recorder

    @property
    def decode_path(self) -> str:
        """Backend of :meth:`decode` now; as :attr:`mmkv.engine.runtime.Runtime.decode_path`."""
        return self.engine.path_of([self])

    @property
    def has_room(self) -> bool:
        """Whether there is a position for one more token."""
        try:
            self.require_context(1, self.next_position + 1)
        except ContextError:
            return False
        return True

    def decode(self, token_id: int) -> Tensor:
        """Append one token; float32 logits ``[vocab]`` of the next.

        Raises:
            TypeError, InputError, SessionError, ContextError, BudgetError: as
            :meth:`mmkv.engine.runtime.Runtime.decode`.
        """
        return self.engine.decode([self], [token_id])[0]

    def retained(self) -> list[list[Tensor]]:
        """Token indices kept, ``[layer][kv_head]``, each ascending int64 on the CPU."""
        with self.engine.lock:
            self._require_open()
            self.drop_ahead()
            return retained_tokens(self.engine.cache, self.seq)

    def memory(self) -> Memory:
        """Physical memory of this session, beside the logical entry count."""
        with self.engine.lock:
            self._require_open()
            self.drop_ahead()
            counts = self.evicted, self.evicted_nan
            vision = self.engine.vision_cache.bytes_of(self.cache_salt)
            risk = self._risk()
            share = None if risk is None else risk.total
            moved = self.compactions, self.capped
            told = self.seen, *counts, self.pictures, vision, *moved, share, self.shifts
            dial = self._dial
            found = memory_of(
                self.engine.cache,
                self.seq,
                *told,
                over_risk=dial is not None and dial.full,
                risk_unknown=dial is not None and risk is None,
            )
            ahead = self.ahead
            if ahead is None:
                return found
            return replace(found, drafted=ahead.drafted, accepted=ahead.accepted)

    @torch.inference_mode()
    def risk(self) -> Risk | None:
        """Return the :data:`mmkv.engine.budget.RISK` of what was read, and its parts.

        It reads the session's entries once, and waits for the device. What :meth:`forget` has
        dropped counts as never read.

        Returns:
            None without retention gates, and where the session does not know: it comes from a file
            of an older mmkv, or was cut back behind what it remembers.
        """
        with self.engine.lock:
            self._require_open()
            self.drop_ahead()
            return self._risk()

    def _risk(self) -> Risk | None:
        if self.meter is None or self.meter.tokens != self.seen:
            return None
        view = self.view()
        # Entries of a chunk whose pass was left are in some layers, and are not counted yet.
        read = view.position < self.seen
        found = self.meter.risk(view.log_beta[read], view.position[read], view.modality[read])
        return found if self.evicted else replace(found, total=0.0, forgotten=0.0)

    def held_shares(self, spans: Sequence[Span]) -> tuple[float, ...]:
        """Return the share of each span's entries that is held; see :mod:`mmkv.engine.contents`."""
        with self.engine.lock:
            self._require_open()
            self.drop_ahead()
            return held_shares(self.engine.cache, self.seq, spans)

    def entries_per_layer(self) -> list[int]:
        """Live entries of each layer, all heads together."""
        with self.engine.lock:
            self._require_open()
            self.drop_ahead()
            return self.engine.cache.length[self.seq].sum(-1).tolist()

    @torch.inference_mode()
    def set_budget(self, budget: Budget | float) -> None:
        """Change the budget now; a smaller one evicts at once. The form of the cache stays.

        Raises:
            BudgetError: for a budget below one entry per row; the old one stays then.
        """
        with self.claimed(), self.engine.lock, exact_products(self.engine.device):
            self._set_budget(self.engine.budgets.changed(budget))
            self.turn_dial()  # one that is new stands at the least that it may
            if self.recorder is not None:
                self.recorder.step(self, "budget")
            self.engine.budgets.cut([self])

    @torch.inference_mode()
    def fork(self) -> CachedSequence:
        """An independent copy that continues from the same state."""
        with self.claimed(), self.engine.lock:
            other = self._sibling()
            try:
                other.adopt(self.engine.cache.fork(self.seq), self.state())
            except BaseException:
                other.close()
                raise
            other.cache_salt = self.cache_salt
            if self.engine.drafts is not None:
                other.ahead = self.engine.drafts.ahead(self.ahead)
            self.engine.budgets.join(other, self.engine.budgets.weight(self))
            other.recorder = None if self.recorder is None else self.recorder.fork()
            return other

    def save(self, path: str | Path, extra: dict[str, str] | None = None) -> None:
        """Write the whole memory to one safetensors file, atomically. See session_file."""
        from mmkv.engine.session_file import checked_extra, save_session

        target = user_path(path)
        with self.claimed():
            save_session(self, target, checked_extra(extra))

    @torch.inference_mode()
    def close(self) -> None:
        """Return every page to the pool; the session cannot be used afterwards."""
        with self.engine.lock:
            if not self.closed:
                self.engine.cache.close(self.seq)
                self.closed = True
                self.engine.budgets.leave(self)

    def __enter__(self) -> CachedSequence:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sibling(self) -> CachedSequence:
        return type(self)(self.engine, self.budget)

    def count_appended(self, tokens: int, next_position: int | None = None) -> None:
        """Count tokens whose entries are in every row.

        Args:
            next_position: rope position of the next text token; None: each token took one.
        """
        if next_position is None and self.runs is not None:
            self.runs = with_text(self.runs, self.seen, self.next_position + self.newest_shift)
        self.seen += tokens
        self.long_rope = bool(self.long_rope)
        self.next_position = self.next_position + tokens if next_position is None else next_position
        self.entries += tokens * self.engine.spec.rows
        if self.recorder is not None:
            self.recorder.step(self)

    def note_ids(self, ids: Sequence[int] | np.ndarray) -> None:
        """Note which token ids have been appended."""
        self.read_ids = with_ids(self.read_ids, ids)

    def count_evicted(self, entries: int, nan: int) -> None:
        """Count entries that have been dropped, ``nan`` of them with a score that is NaN."""
        self.entries -= entries
        self.evicted += entries
        self.evicted_nan += nan

    def count_burst(
        self, tokens: int, entries: int, nan: int, log_beta: Sequence[Tensor] = ()
    ) -> None:
        """Count ``tokens`` text tokens and the evictions among them that left ``entries``.

        Args:
            log_beta: float32 ``[T, rows]`` of their entries, in parts; nothing without gates.
        """
        self.count_appended(tokens)
        if self.meter is not None:
            for part in log_beta:
                self.meter.add(part)
        self.count_evicted(self.entries - entries, nan)

    def state(self) -> dict[str, Any]:
        """Everything but the budget and what lies in the cache, as plain values."""
        meter = None if self.meter is None else self.meter.copy()
        return {name: getattr(self, name) for name in _STATE} | {"meter": meter}

    def adopt(self, seq: int, state: Mapping[str, Any]) -> None:
        """Take over a sequence of the cache and the state that belongs to it; close the own one.

        Args:
            state: as :meth:`state` gave it.
        """
        own = self.seq
        self._own(seq)
        self.engine.cache.close(own)
        self.restore(state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave; it has to fit the entries in the cache."""
        for name in _STATE:
            setattr(self, name, state[name])
        meter = state["meter"]
        self.meter = None if meter is None else meter.copy()
        self.runs = None if self.runs is None else runs_of(self.runs)
        if self.recorder is not None:
            self.recorder.rewind(self.seen)

    @torch.inference_mode()
    def rewind(self, before: Mapping[str, Any], states: Mapping[str, Tensor] | None = None) -> bool:
        """Go back to where :meth:`state` gave ``before``, if the cache still holds it all.

        Args:
            states: what layers without entries kept then; None: that is not known.

        Returns:
            whether it does: the sequence was empty then, or nothing has been evicted since, no
            position has moved, and the policy keeps nothing beside plain entries, nor a layer
            anything but ``states``.
        """
        cache = self.engine.cache
        self.drop_ahead()
        if not before["seen"]:
            cache.clear(self.seq)
            self.restore(before)
            return True
        sums_up = cache.memory or cache.pool.state_size or (cache.states and states is None)
        sums_up = sums_up and self.engine.drafts is None
        moved = self.compactions != before["compactions"]
        if self.evicted != before["evicted"] or sums_up or moved:
            return False
        self.restore(before)
        self.roll_back()
        cache.put_states(self.seq, states or {})
        return True

    @property
    def can_cut_back(self) -> bool:
        """Whether :meth:`cut_back` leaves what the policy would have kept of fewer tokens.

        A policy that sums up what tokens have done to others cannot take that back, nor can a layer
        that keeps a state in place of entries.
        """
        cache = self.engine.cache
        if self.engine.drafts is not None:
            return True  # drafts alone read what was summed up
        return not cache.states and not cache.pool.state_size and cache.memory.keys() <= RINGS

    @torch.inference_mode()
    def cut_back(self, seen: int, next_position: int, prompt_tokens: int) -> None:
        """Drop all but the first ``seen`` tokens; what was evicted of those stays evicted.

        Args:
            next_position: rope position of the next text token, as it was then;
                prompt_tokens: how many of those tokens came in prompts.

        Raises:
            SessionError: some would stay, and a layer's state holds those that would go, too.
        """
        with self.claimed(), self.engine.lock:
            if seen and seen < self.seen and self.engine.cache.states:
                raise SessionError(
                    "this model's linear layers cannot go back by tokens; fork the session before "
                    "them, or read the conversation again from its beginning"
                )
            if not seen:
                fresh: dict[str, Any] = dict.fromkeys(_STATE, 0)
                fresh |= {"long_rope": None, "pictures": (), "runs": ()}
                fresh |= {"meter": self.new_meter(), "dial": None, "shifts": None}
                self.engine.cache.clear(self.seq)
                self.restore(fresh)
                return
            recorder, nan = self.recorder, self.evicted_nan
            if self.runs is not None:
                if self.compactions:
                    next_position = position_of(self.runs, seen)
                if self.shifts is not None:
                    # Where the first of those that go stands, in the row in which it moved least.
                    origin, least = next_position, self.shifts.least(seen)
                    next_position = min(max(origin - least, 0), self.next_position)
                    self.shifts = self.shifts.cut(seen, origin - next_position)
                self.runs = without_after(self.runs, seen)
            forget_positions(self.engine.cache, self.seq, self.seen, seen)
            self.seen, self.next_position, self.prompt_tokens = seen, next_position, prompt_tokens
            if self._dial is not None:
                self._dial.turned_at = min(self._dial.turned_at, seen)
            self.pictures = tuple(span for span in self.pictures if span[1] <= seen)
            self.roll_back()
            if self.meter is None or not (self.meter.tokens == seen or self.meter.go_back(seen)):
                self.recount_meter()
            self.entries = int(self.engine.cache.length[self.seq].sum())
            before, self.evicted = self.evicted, seen * self.engine.spec.rows - self.entries
            self.evicted_nan, self.capped = min(nan, self.evicted), min(self.capped, self.evicted)
            if recorder is not None:
                self._rewind(recorder, seen, before)

    def _rewind(self, recorder: Recorder, seen: int, evicted: int) -> None:
        """Have the record end after ``seen`` tokens; ``evicted``: entries, before it went back."""
        if not evicted:
            recorder.rewind(seen)
            return
        # Who died later of what stays is not told apart.
        self.recorder = None
        self.record(recorder.limit).media = [one for one in recorder.media if one[0] < seen]

    @torch.inference_mode()
    def forget(self, start: int, stop: int) -> int:
        """Drop every entry of the tokens ``start`` to ``stop - 1``, whatever the policy says.

        All other tokens stay where they are: token indices and rope positions keep the gap. What a
        policy has summed up for other entries stays, too, and so does what the tokens have left in
        the state of layers without entries. The entries count as evicted.

        Args:
            start, stop: token indices; what is not in the cache is passed over.

        Returns:
            the number of entries dropped.

        Raises:
            SessionError: the session is closed or in use.
        """
        with self.claimed():
            return self._forget(start, stop)

    @torch.inference_mode()
    def _forget(self, start: int, stop: int) -> int:
        cache = self.engine.cache
        with self.engine.lock:
            self.drop_ahead()
            entries = cache.entries(self.seq)
            position = cache.pool.position.view(-1)[entries.slot]
            victims = ((position >= start) & (position < stop)).nonzero().flatten()
            if self.recorder is not None:
                view = self.view(entries)
                self.recorder.step(self, "forget")
                self.recorder.died(
                    view, victims, torch.full_like(view.log_beta, torch.nan), FORGOTTEN
                )
            if self.meter is not None and self.meter.tokens == self.seen:
                view = self.view(entries)
                parts = view.log_beta, view.position, view.modality
                self.meter.remove(*(part[victims] for part in parts))
            cache.drop(self.seq, victims, entries)
            self.count_evicted(victims.numel(), 0)
            return victims.numel()

    def needs_eviction(self, interval: Interval) -> bool:
        """Whether a group of rows stands above its share by more than ``interval`` lets be."""
        policy, spec = self.engine.policy, self.engine.spec
        if not policy.evicts:
            return False
        allowed = self.allowed_entries
        slack = interval.slack(allowed, spec.rows)
        if self.entries > allowed + slack:
            return True  # the shares add up to the budget
        shares = policy.shares(allowed, spec.entry_layers, spec.num_kv_heads)
        if shares.share.numel() == 1:
            return False
        length = self.engine.cache.length[self.seq].flatten()
        return shares.exceeded(length, slack // spec.rows)

    def view(self, entries: Entries | None = None) -> CacheView:
        """The entries as policies see them."""
        engine = self.engine
        return view_of(
            engine.cache,
            self.seq,
            engine.cache.entries(self.seq) if entries is None else entries,
            self.seen,
            self.prompt_tokens,
            engine.policy.scoring.needs,
            engine.backends.window_attention,
            engine.rope,
            bool(self.long_rope),
        )

    def new_meter(self) -> RiskMeter | None:
        """Return the meter of a session that has read nothing; None without retention gates."""
        if self.engine.policy.scoring.needs.gates != "retention" or self.engine.drafts is not None:
            return None
        return RiskMeter(self.engine.device)

    def recount_meter(self) -> None:
        """Make a meter that counts all that was read, or none if some of it was evicted."""
        self.meter = None if self.evicted else self.new_meter()
        if self.meter is not None:
            view = self.view()
            self.meter.refill(view.log_beta, view.position, view.modality, self.seen)

    def roll_back(self) -> None:
        """Drop what an unfinished pass appended: every entry not yet counted as seen."""
        cache = self.engine.cache
        entries = cache.entries(self.seq)
        position = cache.pool.position.view(-1)[entries.slot]
        cache.drop(self.seq, (position >= self.seen).nonzero().flatten(), entries)

    @property
    def extent(self) -> SequenceSize:
        """What :func:`mmkv.engine.budgets.page_bound` wants to know of this sequence."""
        return SequenceSize(self.seen, self.entries, self.prompt_tokens)

    def _require_open(self) -> None:
        if self.closed:
            raise SessionError("the session is closed; open a new one with engine.session()")

    @property
    def newest_shift(self) -> int:
        """By how many positions what comes next stands before where it would, had nothing moved."""
        return 0 if self.shifts is None else self.shifts.newest

    def require_context(self, count: int, next_position: int) -> bool:
        """Return whether positions have to be drawn together for ``count`` more tokens.

        Args:
            next_position: rope position of the text that would follow them.

        Raises:
            ContextError: there is no room for them.
        """
        limit = self.last_position
        if next_position <= limit:
            return False
        needs = 0
        if self.may_compact and self.runs:
            held, most = self._fitted(
                self._segments(self.engine.cache.entries(self.seq)), next_position
            )
            needs = held.longest
            if needs <= most or (self.may_cap and held.rigid <= most >= limit // 2):
                return True
        if limit < self.engine.spec.max_position:
            raise ContextError(
                f"this session began with the short rope factors and cannot pass position "
                f"{limit:,}; send the long text in the first prompt"
            )
        why = f"one of its rows needs {needs:,} even without gaps; " if needs else ""
        raise ContextError(
            f"{count:,} more tokens after {self.seen:,} reach position {next_position:,}, the "
            f"model was trained for {limit:,}; {why}shorten the prompt, start a new session, or "
            f"{self._remedy()}"
        )

    @property
    def last_position(self) -> int:
        """The last rope position that the next one may be."""
        limit, switch = self.engine.spec.max_position, self.engine.spec.rope.switch_at
        if self.long_rope is False and switch is not None:
            limit = min(limit, switch)
        return limit

    @property
    def may_cap(self) -> bool:
        """Whether a row may lose entries since it is too long for the context.

        Down to half of that; a chunk or burst that needs more is refused instead.
        """
        return self.engine.policy.evicts and not self.engine.policy.keeps_prompt

    def _segments(self, entries: Entries) -> Segments:
        """Return where the entries of the session stand, ``entries`` being all of them."""
        cache, runs = self.engine.cache, self.runs
        assert runs is not None
        position = cache.pool.position.view(-1)[entries.slot].long()
        row, token = torch.stack([entries.row, position]).cpu().numpy()
        queries = cache.memory.get(QUERIES)
        window = 0 if queries is None else queries.shape[3]
        stands = self.shifts, cache.rows, self.seen, self.next_position, window
        return Segments(row, token, runs, *stands, cache.pool.form.settles)

    def _fitted(self, held: Segments, next_position: int) -> tuple[Segments, int]:
        """Return what is held, pictures whole if they fit, and the last next position for it.

        Args:
            next_position: of the text that would follow what is to come.
        """
        limit = self.last_position
        most = min(limit * 3 // 4, limit - (next_position - self.next_position))
        if held.longest > most and self.engine.spec.rope.mrope_axes is None:
            held = held.plain or held
        return held, most

    def _remedy(self) -> str:
        """Say what would let the session go on beyond the trained context."""
        if self.engine.decoder.hosted:
            return "leave it: a model that runs on transformers' layers ends here"
        if self.engine.drafts is not None:
            return "leave lossless out: a session that keeps all ends here"
        if not self.engine.endless:
            return "let sessions go on beyond it (endless)"
        if not self.engine.policy.evicts:
            return "use a policy that evicts"
        if self.budget.kind == "fraction":
            return "give it a budget in entries or bytes: a share grows with the session"
        if self.may_compact and self.runs is None:
            return "read the conversation again: an older mmkv saved it without its positions"
        if self.engine.policy.keeps_prompt:
            return "use a policy that evicts from prompts, too"
        return "read it in smaller chunks (prefill_chunk)"

    def make_context(self, count: int, next_position: int) -> int:
        """Draw positions together where :meth:`require_context` says so.

        Rows that are too long for the context lose their lowest entries before.

        Returns:
            by how many the next position moves back.

        Raises:
            ContextError: there is no room for so many more tokens; nothing has changed then.
        """
        if not self.require_context(count, next_position):
            return 0
        entries = self.engine.cache.entries(self.seq)
        held, most = self._fitted(self._segments(entries), next_position)
        if held.longest > most:
            held = self._cap(held, entries, most)
            entries = self.engine.cache.entries(self.seq)
        made = held.drawn_together(most)
        frequencies = self.engine.spec.frequencies(bool(self.long_rope))
        move(self.engine.cache, self.seq, entries, made, frequencies)
        self.runs, self.shifts = made.runs, made.shifts
        self.next_position -= made.newest
        self.compactions += 1
        return made.newest

    def _cap(self, held: Segments, entries: Entries, most: int) -> Segments:
        """Evict the lowest entries of rows that need more than ``most`` positions."""
        engine, view = self.engine, self.view(entries)
        budget = engine.budgets.competing(self)
        scores = score_entries(engine.cache, engine.policy, entries, view, budget)
        above = held.above(most, sort_key(scores).long().cpu().numpy())
        victims = torch.from_numpy(above).to(scores.device)
        if self.recorder is not None:
            self.recorder.step(self, "context")
            self.recorder.died(view, victims, scores)
        nan = int(scores[victims].isnan().sum())
        engine.cache.drop(self.seq, victims, entries)
        self.count_evicted(victims.numel(), nan)
        self.capped += victims.numel()
        self.runs = held.runs
        return self._segments(engine.cache.entries(self.seq))

    @property
    def may_compact(self) -> bool:
        """Whether the session may go on beyond the trained context.

        Not under a share of the tokens: it would grow with them, past any bound on its pages.
        """
        return self.engine.endless and self._fixed_entries is not None

    def _needs_long(self, next_position: int) -> bool:
        switch = self.engine.spec.rope.switch_at
        return switch is not None and next_position > switch
