"""Lossless decoding: a part of the cache drafts tokens, all of it checks them.

Sessions keep every entry, in the order of their tokens. Drafts read those that the policy would
keep under the budget where they lie, as if each were a page of its own: none is stored twice. A
single pass then computes the drafted tokens on the whole cache, and what the reply does not say is
cut off again. A token is chosen from the logits of the whole cache in any case, by the same means
and with the same random numbers as without drafts. (Self-speculation with a sparse cache: TriForce,
arXiv 2404.11912, and MagicDec, arXiv 2408.11049; the sets there are windows and heavy hitters, here
any policy's.)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from mmkv.engine.backends.base import Batch, Burst, Counts
from mmkv.engine.backends.cuda.backend import CudaBackend
from mmkv.engine.backends.cuda.kernels.decode_attention import tokens_at_once
from mmkv.engine.backends.cuda.kernels.sample import Draw, Draws, guard
from mmkv.engine.backends.cuda.static_step import power_of_two
from mmkv.engine.backends.torch.backend import TorchBackend
from mmkv.engine.budget import EVERY_STEP, Interval
from mmkv.engine.cache import COLUMNS, Entries, PagePool, RaggedCache
from mmkv.engine.errors import BROKEN, BudgetError, NotFiniteError, PolicyError
from mmkv.engine.policies.base import Needs, Policy
from mmkv.engine.scorer_state import revise_state, score_entries, view_of

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence

MOST_DRAFTED = 16  # tokens at a time: more would hardly pay, were all of them right
# Tokens between two choices of what drafts read, fewer where they would add a quarter to it.
_CHOSEN_EVERY = Interval(32, 4)
_TRIED = 2  # measurements of a kind before they are believed
_SAMPLES = 5  # of which the least counts: others have waited for something
# Passes after which what is not done is measured again: the least, twice as many each time that it
# does not pay, and the most.
_LOOK_AGAIN = 16, 128
_GAIN = 1.03  # drafts have to be faster by this factor
_LEAST_COLUMNS = 256  # of tables of what drafts read: what grows is captured anew
_FIRST = 2  # tokens that are drafted while nothing is known
_WEIGHT = 32.0  # drafted tokens that an estimate of their rate remembers

# Chooses a drafted token from float32 logits ``[vocab]``; None: no more are wanted. It must leave
# the session alone whose token it chooses. Or says how the next tokens are drawn.
Guess = Callable[[Tensor], int | None] | Draw


@dataclass
class HitRate:
    """Which part of the latest drafted tokens was right, of those behind right ones."""

    right: float = 14.4
    of: float = 16.0

    def note(self, right: bool) -> None:
        """Count a token."""
        fade = 1 - 1 / _WEIGHT
        self.right, self.of = self.right * fade + right, self.of * fade + 1

    @property
    def value(self) -> float:
        """It, in (0, 1)."""
        return min(self.right / self.of, 0.999)


@dataclass(frozen=True)
class Chosen:
    """The entries that drafts read of one sequence's first ``seen`` tokens.

    Attributes:
        offset: ``[N]`` int64, their places in their rows, row after row; count: ``[rows]`` int64.
    """

    offset: Tensor
    count: Tensor
    seen: int


@dataclass
class Ahead:
    """What is known of a session beyond the tokens that it has seen; their entries are cached.

    Attributes:
        tokens: drafted ones that may follow; logits: float32 ``[vocab]`` behind each.
        drafted: tokens so far; accepted: those that the session then got.
        chosen: what drafts read, with all later tokens; None: everything, so that nothing is
            drafted.
    """

    tokens: deque[int] = field(default_factory=deque)
    logits: deque[Tensor] = field(default_factory=deque)
    drafted: int = 0
    accepted: int = 0
    rate: HitRate = field(default_factory=HitRate)
    chosen: Chosen | None = None


class Pace:
    """Measures drafts and passes of some sessions, and says how many drafts pay.

    A pass over n tokens is taken to cost the time of one and (n - 1) times the same more. Times are
    those of one thread's work: on a busy machine it may wait for anything meanwhile.
    """

    def __init__(self) -> None:
        self._draft, self._single, self._more = (deque[float](maxlen=_SAMPLES) for _ in range(3))
        # Whether drafts pay; passes since that is so, or since the other kind, and until it.
        self._pays, self._since, self._until = False, 0, _LOOK_AGAIN[0]

    def choose(self, rate: float) -> int:
        """Return how many tokens to draft where so many of them are right, behind right ones.

        Of k, (1 - rate^(k+1)) / (1 - rate) tokens come, that of the pass included.
        """
        if len(self._single) < _TRIED:
            return 0
        if len(self._more) < _TRIED:
            return _FIRST
        draft, single, more = min(self._draft), min(self._single), min(self._more)
        best, least = 0, single / _GAIN
        for count in range(1, MOST_DRAFTED + 1):
            tokens = (1 - rate ** (count + 1)) / (1 - rate)
            seconds = (count * draft + single + count * more) / tokens
            if seconds < least:
                best, least = count, seconds
        if self._pays != (best > 0):
            self._pays, self._since, self._until = best > 0, 0, _LOOK_AGAIN[0]
        self._since += 1
        if self._since <= self._until:
            return best
        self._since, self._until = 0, min(2 * self._until, _LOOK_AGAIN[1])
        return 0 if best else _FIRST

    def note(self, drafted: int, drafting: float, passing: float) -> None:
        """Note the seconds of ``drafted`` drafts a session and of the pass over them."""
        if drafted:
            self._draft.append(drafting / drafted)
            if self._single:
                self._more.append(max(passing - min(self._single), 0.0) / drafted)
        else:
            self._single.append(passing)


def keeping_all(policy: Policy) -> Policy:
    """Return the policy of sessions whose drafts ``policy`` chooses entries for.

    Raises PolicyError: it drops what no draft may decide on, or evicts nothing.
    """
    if policy.admission is not None or policy.pruner is not None:
        what = "write gates" if policy.admission is not None else "a pruner"
        raise PolicyError(
            f"policy {policy.name!r} has {what}, which drop tokens before all of the cache could "
            "check anything; use another policy with lossless decoding"
        )
    if not policy.evicts:
        raise PolicyError(
            f"policy {policy.name!r} evicts nothing, so that drafts would read as much as what "
            "checks them; give lossless decoding a budget, or a policy that evicts"
        )
    return replace(policy, allocation=None, keeps_prompt=False)


class Drafts:
    """Drafts and checks the tokens of an engine's sessions.

    Args:
        policy: chooses what drafts read, under each session's budget.
    """

    def __init__(self, engine: Runtime, policy: Policy) -> None:
        self._engine, self._policy = engine, policy
        cache, model, pool = engine.cache, engine.model, engine.cache.pool
        # Rows of what drafts read: pages of one entry each in the memory of the engine's cache. Of
        # none between drafts: what the pool has outgrown or given back shall not live on here.
        form = pool.dtype, pool.device, 0, pool.state_size, pool.form
        self._none = PagePool(1, pool.head_dim, 0, *form)
        self._rows = RaggedCache(self._none, cache.layers, cache.kv_heads)
        self._stack = self._none._stack  # of the places for drafted tokens
        plain = replace(
            model,
            decoder=copy(model.decoder),
            needs=Needs(),
            interval=EVERY_STEP,
            has_on_append=False,
            has_on_step=False,
        )
        plain.decoder.gates, plain.decoder.taps = None, ()
        self._torch, self._cuda = TorchBackend(plain, self._rows), CudaBackend(plain, self._rows)
        self._on_gpu, self._most = model.device.type == "cuda", MOST_DRAFTED
        # On a busy machine a thread may wait for anything; a GPU is what is waited for.
        self._clock = time.thread_time
        if self._on_gpu:
            self._most = tokens_at_once(engine.spec.group, pool.dtype) - 1
            self._clock = time.perf_counter
        self._ahead: WeakSet[CachedSequence] = WeakSet()  # all with tokens cached, or once
        self._paces: dict[tuple[int, int], Pace] = {}
        self._rate = HitRate()  # of all sessions: where a new one begins

    def ahead(self, like: Ahead | None = None) -> Ahead:
        """Return that of a new session, or of a fork of one."""
        if like is None:
            return Ahead(rate=replace(self._rate))
        return Ahead(rate=replace(like.rate), chosen=like.chosen)

    def decode(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        guesses: Sequence[Guess] | None,
    ) -> Tensor:
        """Append one token to each session; see :meth:`mmkv.engine.runtime.Runtime.decode`."""
        try:
            return self._decode(sessions, token_ids, guesses)
        except BudgetError:  # nothing has changed
            ahead = [one for one in self._ahead if not one.closed]
            if not ahead or self._rows.pool is not self._none:
                raise
        for session in ahead:  # what nobody has seen takes no page that a token needs
            self.drop(session)
        return self._decode(sessions, token_ids, guesses)

    def _decode(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        guesses: Sequence[Guess] | None,
    ) -> Tensor:
        known = [
            index
            for index, (one, token) in enumerate(zip(sessions, token_ids, strict=True))
            if one.ahead is not None and one.ahead.tokens and one.ahead.tokens[0] == token
        ]
        going = [index for index in range(len(sessions)) if index not in known]
        rows: dict[int, Tensor] = {}
        if going:
            for index in going:
                self._miss(sessions[index])
            own = None if guesses is None else [guesses[index] for index in going]
            asked = [sessions[index] for index in going], [token_ids[index] for index in going]
            rows = dict(zip(going, self._pass(*asked, own), strict=True))
        for index in known:
            ahead = sessions[index].ahead
            assert ahead is not None
            ahead.tokens.popleft()
            rows[index] = ahead.logits.popleft()
            ahead.accepted += 1
            ahead.rate.note(True)
            self._rate.note(True)
            sessions[index].count_appended(1)
        return torch.stack([rows[index] for index in range(len(sessions))])

    @torch.inference_mode()
    def drop(self, session: CachedSequence) -> None:
        """Cut off what is cached of tokens that a session has not seen."""
        ahead = session.ahead
        self._ahead.discard(session)
        if ahead is not None and ahead.tokens:
            count = len(ahead.tokens)
            ahead.tokens.clear()
            ahead.logits.clear()
            self._engine.cache.shorten(session.seq, count)

    @torch.inference_mode()
    def cut(self, session: CachedSequence) -> None:
        """Choose anew what drafts read where that is too much; nothing is drafted now."""
        engine, cache, seq, ahead = self._engine, self._engine.cache, session.seq, session.ahead
        allowed, due = self._allowed(session)
        assert ahead is not None
        if not due or not self._complete(session):
            return
        entries, count = self._read(session)
        view = view_of(
            cache,
            seq,
            entries,
            session.seen,
            session.prompt_tokens,
            self._policy.scoring.needs,
            rope=engine.rope,
            long=bool(session.long_rope),
        )
        view = replace(view, length=count, log_beta=_known(view.log_beta, entries.row, count))
        if engine.model.has_on_step:
            revise_state(cache, self._policy.scoring, seq, entries, view)
        scores = score_entries(cache, self._policy, entries, view, allowed)
        stays = torch.ones_like(entries.row, dtype=torch.bool)
        stays[self._policy.lowest(scores, view, allowed)] = False
        left = torch.bincount(entries.row[stays], minlength=cache.rows)
        ahead.chosen = Chosen(entries.offset[stays], left, session.seen)

    def reset(self) -> None:
        """Let go of what drafts have kept for the next ones; not while some are made."""
        if self._rows.pool is self._none:
            self._cuda.reset()
            self._rows.table, self._stack = self._rows.table[:0, ..., :0].clone(), self._none._stack

    def _allowed(self, session: CachedSequence) -> tuple[int, bool]:
        """Return how many entries drafts may read, and whether those that they do are too many."""
        ahead, rows = session.ahead, self._engine.spec.rows
        assert ahead is not None
        if ahead.chosen is not None and not ahead.chosen.seen <= session.seen:
            ahead.chosen = None  # it was cut back
        allowed, chosen = session.allowed_entries, ahead.chosen
        allowed += session.prompt_tokens * rows if self._policy.keeps_prompt else 0
        read = 0 if chosen is None else chosen.offset.numel() - chosen.seen * rows
        read += session.seen * rows
        return allowed, read > allowed + _CHOSEN_EVERY.slack(allowed, rows)

    def _complete(self, session: CachedSequence) -> bool:
        """Whether each row holds all tokens, in their order: nothing was dropped from inside."""
        return int(self._engine.cache.length[session.seq].min()) == session.seen

    def _read(self, session: CachedSequence) -> tuple[Entries, Tensor]:
        """Return the entries that drafts read of a session, and how many each row has."""
        cache, ahead = self._engine.cache, session.ahead
        assert ahead is not None
        none = cache.length.new_zeros(0), cache.length.new_zeros(cache.rows), 0
        chosen, size = ahead.chosen or Chosen(*none), cache.pool.page_size
        own = chosen.count
        count = own + (session.seen - chosen.seen)
        row = torch.repeat_interleave(count)
        rank = torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row]
        old = rank < own[row]
        offset = chosen.seen + rank - own[row]
        offset[old] = chosen.offset
        page = cache.table[session.seq].flatten(0, 1)[row, offset // size]
        return Entries(row, offset, page * size + offset % size), count

    def _miss(self, session: CachedSequence) -> None:
        """Have a session whose next token was not drafted lie as if nothing had been."""
        if session.ahead is not None and session.ahead.tokens:
            session.ahead.rate.note(False)
            self._rate.note(False)
        self.drop(session)

    def _pass(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        guesses: Sequence[Guess] | None,
    ) -> list[Tensor]:
        """Append a token to each session and what it drafts behind it; logits of the former."""
        counts, pace = self._counts(sessions)
        begun = self._clock()
        if any(counts):  # else nobody reads what would be chosen
            for session in sessions:
                self.cut(session)
        drafted = self._draft(sessions, token_ids, counts, guesses)
        checked = self._clock()
        said = [[token, *more] for token, more in zip(token_ids, drafted, strict=True)]
        try:
            logits = self._check(sessions, said)
        except (BudgetError, NotFiniteError):  # nothing has changed
            if not any(drafted):
                raise
            said = [[token] for token in token_ids]
            logits = self._check(sessions, said)
        now = self._clock()
        if any(drafted) or not any(counts):
            pace.note(max(map(len, drafted)), checked - begun, now - checked)
        made = []
        for session, own in zip(sessions, logits.split([len(row) for row in said]), strict=True):
            made.append(own[0])
            assert session.ahead is not None
            session.count_appended(1)
            session.ahead.logits.extend(own[1:])
        for session, row in zip(sessions, said, strict=True):
            assert session.ahead is not None
            session.ahead.tokens.extend(row[1:])
            if row[1:]:
                self._ahead.add(session)
            session.ahead.drafted += len(row) - 1
        return made

    def _counts(self, sessions: Sequence[CachedSequence]) -> tuple[list[int], Pace]:
        """Return how many tokens to draft in each session, and where that is measured."""
        pace = self._pace(len(sessions), max(session.seen for session in sessions).bit_length())
        rooms, rates = [], []
        for session in sessions:
            assert session.ahead is not None
            rates.append(session.ahead.rate.value)
            due = self._allowed(session)[1]
            worth = (due or session.ahead.chosen is not None) and session.recorder is None
            room = session.last_position - session.next_position - 1
            rooms.append(room if worth and self._complete(session) else 0)
        if not any(rooms):
            return rooms, pace
        count = pace.choose(sum(rates) / len(rates))
        return [min(count, self._most, room) for room in rooms], pace

    def _pace(self, sessions: int, bits: int) -> Pace:
        """Return that of so many sessions, whose longest has a length of so many bits.

        It begins with what was measured at half the length: to try again would cost time.
        """
        if (sessions, bits) not in self._paces:
            self._paces[sessions, bits] = deepcopy(self._paces.get((sessions, bits - 1), Pace()))
        return self._paces[sessions, bits]

    def _check(self, sessions: Sequence[CachedSequence], said: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to sessions in one pass; float32 logits ``[tokens, vocab]`` behind each."""
        batch = _batch_of(sessions, [session.seq for session in sessions], said)
        # What only the choice for drafts reads of a token is left out where none are made.
        batch.bare = len(batch.tokens) == len(sessions)
        backend = self._engine.backends.for_step(batch)
        try:
            logits = backend.decode(batch, Counts())
            # On torch a token's NaN reach those before it: attention gives them a share of 0.
            mixes = len(batch.seqs) > len(sessions) and backend is not self._engine.backends.cpu
            if mixes and not bool(logits.isfinite().all()):
                raise NotFiniteError
            return logits
        except BaseException:
            for session in sessions:
                session.roll_back()
            raise

    def _draft(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        counts: Sequence[int],
        guesses: Sequence[Guess] | None,
    ) -> list[list[int]]:
        """Return up to ``counts`` tokens that are likely to follow in each session."""
        made: list[list[int]] = [[] for _ in sessions]
        going = [index for index, count in enumerate(counts) if count]
        if not going or self._rows.pool is not self._none:  # a guess asks for a step of others
            return made
        cache, most = self._engine.cache, max(counts)
        self._cuda.off = self._engine.backends.cuda.off
        seqs = torch.tensor([sessions[index].seq for index in going], device=cache.length.device)
        try:
            # The places of the tokens that are drafted; the pass writes there what is right.
            slots = cache.append(seqs, most)
        except BudgetError:
            return made
        try:
            asked = [sessions[index] for index in going], [token_ids[index] for index in going]
            entries = self._show(asked[0], slots)
            own = [None if guesses is None else guesses[index] for index in going]
            rows = asked[0], range(len(going)), [[token] for token in asked[1]]
            batch = _batch_of(*rows, entries=entries)
            if any(map(callable, own)) or self._cuda.unsupported_reason(batch):
                left = [counts[index] for index in going]
                found = self._one_by_one(*asked, entries, left, own)
            else:
                found = self._burst(batch, own, most)
            for index, row in zip(going, found, strict=True):
                made[index] = row[: counts[index]]
        except (BudgetError, torch.OutOfMemoryError):  # it goes without
            return [[] for _ in sessions]
        finally:
            self._rows.pool = self._none
            if not self._on_gpu:  # where no graph reads them
                self._rows.table = self._rows.table[:0].clone()
            for seq in seqs.tolist():
                cache.shorten(seq, most)
        return made

    def _burst(self, batch: Batch, guesses: Sequence[Guess | None], most: int) -> list[list[int]]:
        """Draft ``most`` tokens behind those of a batch, with nothing read in between."""
        draws = [guess if isinstance(guess, Draw) else Draw(temperature=0) for guess in guesses]
        batch.share, burst = [0.0] * len(draws), Burst.of(batch)
        plain = all(draw.plain for draw in draws)
        self._cuda.decode_many(batch, burst, most, (), None if plain else draws)
        return [row[: row.index(BROKEN)] if BROKEN in row else row for row in burst.generated]

    def _one_by_one(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        entries: Sequence[int],
        counts: Sequence[int],
        guesses: Sequence[Guess | None],
    ) -> list[list[int]]:
        """Draft up to ``counts`` tokens behind ``token_ids``, which the host looks at each time."""
        vocabulary = self._engine.model.decoder.weights.embed.shape[0]
        made: list[list[int]] = [[] for _ in sessions]
        token, going = list(token_ids), list(range(len(sessions)))
        for step in range(max(counts)):
            held = [entries[at] + step * self._rows.rows for at in going]
            asked = [sessions[at] for at in going], going, [[token[at]] for at in going]
            logits = self._step(_batch_of(*asked, behind=step, entries=held))
            for at, row in zip(list(going), logits, strict=True):
                found = self._chosen(guesses[at], row, sessions[at].seen + step + 1, made[at])
                if found is not None and not 0 <= found < vocabulary:
                    found = None  # C would read beyond the embeddings
                if found is not None:
                    token[at] = found
                    made[at].append(found)
                if found is None or len(made[at]) == counts[at]:
                    going.remove(at)
            if not going:
                break
        return made

    def _chosen(
        self, guess: Guess | None, logits: Tensor, seen: int, said: Sequence[int]
    ) -> int | None:
        """Choose the token that follows ``seen`` tokens, the last of them the drafts ``said``."""
        if guess is None:
            return self._likeliest(logits)
        if not isinstance(guess, Draw):
            return guess(logits)
        fit, broken = guard(logits[None], self._engine.never_chosen)
        drawn = Draws([guess.after(said)], len(logits), logits.device)
        token = drawn.next(fit, torch.tensor([seen], device=logits.device))
        return None if bool(broken) else int(token)

    def _likeliest(self, logits: Tensor) -> int | None:
        """Return the likeliest token that a reply may hold; None where there is none."""
        logits = logits.index_fill(0, self._engine.never_chosen, -torch.inf)
        value, token = logits.max(0)
        return int(token) if bool(value.isfinite()) else None

    def _show(self, sessions: Sequence[CachedSequence], slots: Tensor) -> list[int]:
        """Fill the first rows with what drafts read of sessions; how many entries each has.

        Args:
            slots: ``[B, L, H, steps]``, where the entries of drafted tokens go.
        """
        rows, read = self._rows, [self._read(session) for session in sessions]
        rows.pool = pool = _entries_of(self._engine.cache.pool)
        # What a CUDA graph reads stays where it is while it is large enough.
        before = len(rows.table)
        many = power_of_two(max(len(sessions), before))
        if many * rows.rows * self._most > len(self._stack):
            self._stack = slots.new_zeros(many * rows.rows * self._most)
        pool._stack, pool.limit, pool.free_pages = self._stack, len(self._stack), slots.numel()
        pool._stack[: slots.numel()] = slots.permute(3, 0, 1, 2).flatten().flip(0)
        count = torch.stack([each for _, each in read])
        columns = int(count.max()) + slots.shape[-1]
        if len(sessions) > before or columns > rows.table.shape[-1]:
            width = max(power_of_two(columns), rows.table.shape[-1], _LEAST_COLUMNS)
            rows.length = slots.new_zeros(many, rows.layers, rows.kv_heads)
            rows.table = slots.new_zeros(*rows.length.shape, width)
        rows.length[: len(sessions)] = count.view(-1, rows.layers, rows.kv_heads)
        for table, (entries, each) in zip(rows.table, read, strict=False):
            rank = torch.arange(entries.row.numel(), device=each.device)
            rank -= (each.cumsum(0) - each)[entries.row]
            table.flatten(0, 1)[entries.row, rank] = entries.slot
        return [entries.row.numel() for entries, _ in read]

    def _step(self, batch: Batch) -> Tensor:
        """Append a token to rows of drafts, and write nothing else."""
        native = self._engine.backends.cpu
        if not native.unsupported_reason(batch):
            batch.bare = True
            logits: Tensor = native.decoder.step(self._rows, batch)
            return logits
        backend = self._torch if self._cuda.unsupported_reason(batch) else self._cuda
        return backend.decode(batch, Counts())


def _known(log_beta: Tensor, row: Tensor, count: Tensor) -> Tensor:
    """Return ``log_beta [N]``, a row's mean where it is 0: of tokens whose gates nobody asked."""
    known = log_beta < 0
    of = row[known]
    sums = torch.zeros(count.shape, device=row.device).index_add_(0, of, log_beta[known])
    mean = sums / torch.bincount(of, minlength=len(count)).clamp(min=1)
    return torch.where(known, log_beta, mean[row])


def _entries_of(pool: PagePool) -> PagePool:
    """Return a pool whose pages are the entries of another, in its memory; none is free."""
    columns = {name: getattr(pool, name).flatten(0, 1)[:, None] for name in COLUMNS}
    device, size, form = pool.device, pool.state_size, pool.form
    return PagePool(1, pool.head_dim, 0, pool.dtype, device, 0, size, form, columns)


def _batch_of(
    sessions: Sequence[CachedSequence],
    seqs: Sequence[int],
    said: Sequence[Sequence[int]],
    behind: int = 0,
    entries: Sequence[int] | None = None,
) -> Batch:
    """Put tokens that follow each other in sessions in columns, session after session.

    Args:
        seqs: where their rows are; behind: tokens before these that were not counted.
        entries: that stand there; None: as many as the sessions have.
    """
    columns = []
    held = [session.entries for session in sessions] if entries is None else entries
    for session, seq, row, stand in zip(sessions, seqs, said, held, strict=True):
        long = bool(session.long_rope)
        for at, token in enumerate(row, behind):
            where = session.seen + at, session.next_position + at
            columns.append((seq, *where, long, stand, session.prompt_tokens, token))
    own, seen, positions, longs, stands, prompts, tokens = zip(*columns, strict=True)
    return Batch(own, seen, positions, longs, stands, stands, prompts, tokens)
