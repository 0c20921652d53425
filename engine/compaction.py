"""Compaction of rope positions: how a bounded session goes on beyond the trained context.

A session's rope positions grow with every token, evicted or not, and a model was trained for so
many. Before they would pass the last one, the gaps that evicted tokens have left are closed, in
each row (layer, KV head) by itself, since attention compares a query with the keys of one row: what
follows has the same next position in all rows, T, and in a row no gap is longer than G afterwards,
the largest length with which the row fits before T. A picture moves as a whole, tokens keep their
order, and no distance grows. T is three quarters of the context, so that distances stay near what
they were; a row that needs more loses its lowest entries.

A key that moves by d positions is multiplied with R(-d), the plain rotation of a text token, since
all axes of a position move alike; angles are computed in float64 (at a million, those in float32
are off by 0.04 rad). Ages count tokens, not positions, so gates and scores stay.

With G = 0 and text alone this is StreamingLLM (arXiv 2309.17453, section 3.2), whose positions are
those inside the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmkv.engine.cache import Entries, RaggedCache
from mmkv.engine.model.rope import rotate
from mmkv.engine.scorer_state import POSITIONS, QUERIES

# Entries whose keys are turned at a time.
_AT_ONCE = 2**16
# Where a row's number stands beside a token's.
_ROW = 32
_MOST_MOVES = 255


class Run(NamedTuple):
    """Tokens from index ``token`` on, up to the next run's, whose first has rope ``position``.

    The position is the one that it would have, had nothing moved (:class:`RowShifts`).

    ``extent``: how many positions a picture takes, however many tokens it has; 0: a text, each
    token of which takes one.
    """

    token: int
    position: int
    extent: int = 0


Runs = tuple[Run, ...]


def with_tokens(runs: Runs, token: int, modality: Tensor, positions: Tensor) -> Runs:
    """Return the runs of a sequence to which tokens are appended.

    Args:
        token: index of the first new one; modality: ``[T]``, 0 for text.
        positions: rope positions ``[A, T]`` of one or three axes.
    """
    low, high = (x.cpu().numpy() for x in (positions.amin(0), positions.amax(0)))
    seen = modality.cpu().numpy() > 0
    made = list(runs)
    for start, stop in _spans(seen, low):
        run = Run(token + start, int(low[start:stop].min()))
        if seen[start]:
            run = run._replace(extent=int(high[start:stop].max()) + 1 - run.position)
        last = made[-1] if made else None
        if last is not None and last.extent and run.extent and start == 0:
            # The chunk before ended inside this picture; two that touch move together.
            end = max(last.position + last.extent, run.position + run.extent)
            made[-1] = last._replace(extent=end - last.position)
        elif last is None or run.extent or last.extent or _line(last, run.token) != run.position:
            made.append(run)  # else the text goes on where the last run's tokens would stand
    return tuple(made)


def _spans(seen: np.ndarray, low: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each picture and text; a text ends where its positions jump, too."""
    starts = np.ones(seen.size, bool)
    changes, jumps = seen[1:] != seen[:-1], low[1:] != low[:-1] + 1
    starts[1:] = changes | (jumps & ~seen[1:])
    yield from pairwise([*np.flatnonzero(starts).tolist(), seen.size])


def with_text(runs: Runs, token: int, position: int) -> Runs:
    """Return the runs of a sequence to which text is appended, from token and position on."""
    if runs:  # every decode step asks
        start, first, extent = runs[-1]
        if not extent and first + token - start == position:
            return runs
    return (*runs, Run(token, position))


def position_of(runs: Runs, token: int) -> int:
    """Return a rope position for text that follows the first ``token`` tokens.

    It lies behind all of those and not behind what follows them.
    """
    at = sum(run.token <= token for run in runs) - 1
    if at < 0:
        return 0
    run = runs[at]
    if run.token == token:
        return run.position
    own = run.position + run.extent if run.extent else _line(run, token)
    return own if at + 1 == len(runs) else min(own, runs[at + 1].position)


def without_after(runs: Runs, token: int) -> Runs:
    """Return the runs of the first ``token`` tokens."""
    return tuple(run for run in runs if run.token < token)


def _line(run: Run, token: int) -> int:
    """Return the position of a token as if all behind the run's first were text."""
    return run.position + token - run.token


@dataclass(frozen=True, eq=False)
class RowShifts:
    """How far the tokens of each of R rows have moved back, all compactions together.

    What a row held when it was last drawn together has a shift of its own, and so have the
    tokens that followed. It takes 9 bytes an entry at most, and none before the first compaction.

    Attributes:
        start: int64 ``[R + 1]``, where the parts of each row begin; its first begins with token 0.
        token: int32 ``[S]`` ascending in each row, the first token of each part.
        shift: int32 ``[S]``, by how many positions the tokens of each part have moved.
        moves: uint8 ``[S]``, how often, 255 at most.
        newest: the shift of all tokens that follow.
    """

    start: np.ndarray
    token: np.ndarray
    shift: np.ndarray
    moves: np.ndarray
    newest: int

    @classmethod
    def of(
        cls,
        rows: int,
        seen: int,
        newest: int,
        row: np.ndarray,
        token: np.ndarray,
        shift: np.ndarray,
        moves: np.ndarray,
    ) -> RowShifts:
        """Gather parts ``[S]`` of some rows; in every row ``seen`` tokens stand before the newest.

        Args:
            row, token, shift, moves: int64, of each part.
        """
        each = np.arange(rows)
        row, token = np.append(row, each), np.append(token, np.full(rows, seen))
        order = np.argsort(row << _ROW | token)
        row, token = row[order], token[order]
        shift = np.append(shift, np.full(rows, newest))[order]
        moves = np.append(moves, np.zeros(rows, np.int64)).clip(max=_MOST_MOVES)[order]
        new = np.ones(row.size, bool)
        new[1:] = row[1:] != row[:-1]
        other = new.copy()  # neighbours that moved alike are one part
        other[1:] |= (shift[1:] != shift[:-1]) | (moves[1:] != moves[:-1])
        start = np.append(np.flatnonzero(new[other]), int(other.sum()))
        token = np.where(new, 0, token)[other].astype(np.int32)
        kept = shift[other].astype(np.int32), moves[other].astype(np.uint8)
        return cls(start, token, *kept, newest)

    def find(self, row: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Return in which part each of N tokens in rows is, int64 ``[N]``."""
        own = np.arange(self.start.size - 1).repeat(np.diff(self.start)) << _ROW | self.token
        found: np.ndarray = np.searchsorted(own, row << _ROW | token, "right") - 1
        return found

    def least(self, token: int) -> int:
        """Return the smallest shift that a token has in any row."""
        rows = np.arange(self.start.size - 1)
        return int(self.shift[self.find(rows, np.full_like(rows, token))].min())

    @property
    def together(self) -> int:
        """The token from which on all have the newest shift in every row, as its last part has."""
        others = np.flatnonzero(self.shift[:-1] != self.newest)
        return int(self.token[others + 1].max(initial=0))

    def cut(self, seen: int, newest: int) -> RowShifts:
        """Return those of the first ``seen`` tokens, and of others that follow those."""
        return RowShifts.of(self.start.size - 1, seen, newest, *self.between(0, seen))

    def between(self, first: int, stop: int) -> list[np.ndarray]:
        """Return row, token, shift and moves, int64, of the parts that begin in these tokens."""
        rows = np.arange(self.start.size - 1).repeat(np.diff(self.start))
        inside = (first <= self.token) & (self.token < stop)
        parts = rows, self.token, self.shift, self.moves
        return [part[inside].astype(np.int64) for part in parts]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowShifts):
            return NotImplemented
        parts = zip(self.parts, other.parts, strict=True)
        return self.newest == other.newest and all(np.array_equal(*both) for both in parts)

    @property
    def nbytes(self) -> int:
        """Count the bytes of all of it."""
        return sum(part.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """Return ``start``, ``token``, ``shift`` and ``moves``."""
        return self.start, self.token, self.shift, self.moves

    __hash__ = None  # type: ignore[assignment]


class Segments:
    """The entries of a sequence, and the segments that move as a whole: a picture, or one token.

    The tokens whose queries a scorer keeps are one segment of every row, up to the next position:
    their queries then move as their keys do.

    Args:
        row, token: int64 ``[N]``, of each entry.
        rows: R, of the sequence; shifts: of its tokens so far, None: nothing has moved.
        seen: its tokens; next_position: of the text that follows.
        window: tokens whose queries are kept.
        settles: after how many moves what is held stays where it is if the rest fits behind it.

    Attributes:
        runs: as given; of: ``[N]``, the segment of each entry.
        longest: positions that the row needs which needs most, all its gaps closed.
        rigid: those of the newest tokens among them, which no eviction makes fewer.
    """

    def __init__(
        self,
        row: np.ndarray,
        token: np.ndarray,
        runs: Runs,
        shifts: RowShifts | None,
        rows: int,
        seen: int,
        next_position: int,
        window: int = 0,
        settles: int | None = None,
    ) -> None:
        self._row, self._token, self.runs, self._shifts = row, token, runs, shifts
        self._rows, self._seen, self._next = rows, seen, next_position
        self._window, self._settles = window, settles
        first, position, extent = np.array(runs, np.int64).reshape(-1, 3).T

        def run(tokens: np.ndarray) -> np.ndarray:
            return np.maximum(np.searchsorted(first, tokens, "right") - 1, 0)

        newest = max(seen - window, 0)
        begun = int(run(np.array([newest]))[0])
        if window and extent[begun] and first[begun] < newest:
            newest = int(first[begun])
        if shifts is not None:
            # In a session that was cut back, others have moved apart, and their queries are gone.
            newest = max(newest, shifts.together)
        self._newest = newest
        at = run(token)
        head = np.where(extent[at] > 0, first[at], token)
        key = row << _ROW | np.where(token >= newest, newest, head)
        if newest < seen:  # each row has it, whatever it holds
            key = np.append(key, np.arange(rows) << _ROW | newest)
        key, of = np.unique(key, return_inverse=True)
        self.of: np.ndarray = of[: row.size]
        self._of_row, self._head = key >> _ROW, key & (1 << _ROW) - 1
        at = run(self._head)
        where = position[at] + np.where(extent[at] > 0, 0, self._head - first[at])
        self._moves = shift = np.zeros_like(where)
        if shifts is not None:
            part = shifts.find(self._of_row, self._head)
            shift, self._moves = shifts.shift[part], shifts.moves[part].astype(np.int64)
        self._shift, self._old = shift, where - shift
        sees, self._tail = extent[at] > 0, self._head >= newest
        # Their first may be gone, and so may be where it stood.
        begin = position_of(runs, newest) - (0 if shifts is None else shifts.newest)
        self._old[self._tail] = min(max(begin, 0), next_position)
        self._size = np.where(sees, extent[at], 1)
        self._size[self._tail] = next_position - self._old[self._tail]
        begins = np.ones(key.size, bool)
        begins[1:] = self._of_row[1:] != self._of_row[:-1]
        self._begins = np.flatnonzero(begins)
        self._last = np.append(self._begins, key.size)[1:] - 1
        after = np.append(self._old, next_position)[1:]
        after[self._last] = next_position
        self._gap = after - self._old - self._size
        self._kept_runs = {*at.tolist(), *range(begun, len(runs))}
        needs = self._by_row(self._size)
        self._needs: np.ndarray = needs.repeat(self._counts)
        self.longest = int(needs.max(initial=0))
        self.rigid = int(self._size[self._tail].max(initial=0))

    @property
    def _counts(self) -> np.ndarray:
        return self._last - self._begins + 1

    def _by_row(self, of_segments: np.ndarray) -> np.ndarray:
        if not self._begins.size:
            return np.zeros(0, np.int64)
        summed: np.ndarray = np.add.reduceat(of_segments, self._begins)
        return summed

    @property
    def plain(self) -> Segments | None:
        """The same with pictures whose tokens move one by one; None: it holds none."""
        if not any(run.extent for run in self.runs):
            return None
        runs = tuple(run._replace(extent=0) for run in self.runs)
        stands = self._shifts, self._rows, self._seen, self._next, self._window, self._settles
        return Segments(self._row, self._token, runs, *stands)

    def above(self, most: int, keys: np.ndarray) -> np.ndarray:
        """Return the entries, indices ``[K]``, that rows lose which need more than ``most``.

        The lowest go, as few as there can be. A picture takes its positions until the last of its
        entries has gone; the newest segment goes last, since that frees none.

        Args:
            keys: int64 ``[N]``, in the order of the scores.
        """
        inside = np.flatnonzero((self._needs[self.of] > most) & ~self._tail[self.of])
        order = inside[np.lexsort((self._token[inside], keys[inside], self._row[inside]))]
        row, of = self._row[order], self.of[order]
        last = np.zeros(self._head.size, np.int64)
        np.maximum.at(last, of, np.arange(order.size))
        frees = np.where(last[of] == np.arange(order.size), self._size[of], 0)
        freed = np.cumsum(frees) - frees  # before each goes
        begins = np.searchsorted(row, row)  # of the row's first
        freed -= freed[begins]
        chosen: np.ndarray = order[self._needs[of] - freed > most]
        return chosen

    def drawn_together(self, last: int) -> Compaction:
        """Return how positions move so that the next is ``last``, at least :attr:`longest`."""
        size, gap, first = self._settled(last)
        room = (last - self._by_row(size)).repeat(self._counts) - first
        least = np.zeros(self._head.size, np.int64)
        most = np.full_like(least, max(int(gap.max(initial=0)), 0))
        while (least < most).any():  # the largest G of each row that fits
            middle = (least + most + 1) // 2
            fits = self._by_row(np.minimum(gap, middle)).repeat(self._counts) <= room
            least, most = np.where(fits, middle, least), np.where(fits, most, middle - 1)
        taken = size + np.minimum(gap, least)
        behind = np.cumsum(taken)
        ends = behind[self._last].repeat(self._counts)
        # From the end backwards. What gaps of one length leave over moves nothing to the right.
        new = np.minimum(last - (ends - behind + taken), self._old)
        newest = back = self._next - last
        moved = self._old - new
        parts = [self._of_row, self._head, self._shift + moved, self._moves + (moved > 0)]
        if self._shifts is not None:
            newest += self._shifts.newest
            # The newest tokens move as one from now on; before, the older of them moved more often.
            row, token, shift, moves = self._shifts.between(self._newest + 1, self._seen)
            inside = row, token, shift + back, moves + (back > 0)
            parts = [np.append(*both) for both in zip(parts, inside, strict=True)]
        shifts = RowShifts.of(self._rows, self._seen, newest, *parts)
        runs = tuple(self.runs[index] for index in sorted(self._kept_runs))
        return Compaction(moved[self.of], back, runs, shifts)

    def _settled(self, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return sizes, gaps, and where their row begins, with what has settled as one segment.

        In the rows where it fits; elsewhere as they are, from 0 on.
        """
        if self._settles is None or not self._head.size:
            return self._size, self._gap, np.zeros_like(self._size)
        index = np.arange(self._head.size)
        settled = np.where((self._moves >= self._settles) & ~self._tail, index, -1)
        newest = np.maximum.reduceat(settled, self._begins).repeat(self._counts)
        stays = index < newest  # the gap behind it
        first = np.where(newest >= 0, self._old[self._begins].repeat(self._counts), 0)
        needs = self._by_row(self._size + np.where(stays, self._gap, 0)).repeat(self._counts)
        stays &= needs + first <= last
        first[needs + first > last] = 0
        return self._size + np.where(stays, self._gap, 0), np.where(stays, 0, self._gap), first

    @property
    def fits(self) -> bool:
        """Whether all of it stands between 0 and the next position."""
        ends = (self._old + self._size).max(initial=0)
        return int(self._old.min(initial=0)) >= 0 and int(ends) <= self._next


@dataclass(frozen=True)
class Compaction:
    """Where the entries of a sequence move.

    Attributes:
        back: ``[N]`` int64, how many positions each moves back.
        newest: how many the next position moves, and the queries that are kept.
        runs, shifts: those of the sequence afterwards.
    """

    back: np.ndarray
    newest: int
    runs: Runs
    shifts: RowShifts


def move(
    cache: RaggedCache,
    seq: int,
    entries: Entries,
    made: Compaction,
    inv_freq: Sequence[Tensor],
) -> None:
    """Turn the keys of a sequence, and its recent queries, back by what their tokens move.

    Args:
        entries: all of the sequence; inv_freq: of each layer with entries the rope's frequencies
            ``[rot / 2]``.
    """
    pool = cache.pool
    by = torch.from_numpy(made.back).to(pool.device)
    moves = by.nonzero().flatten()
    bounds = torch.arange(1, len(inv_freq) + 1, device=pool.device) * cache.kv_heads
    ends = torch.searchsorted(entries.row[moves].contiguous(), bounds).tolist()
    for frequencies, start, end in zip(inv_freq, [0, *ends], ends, strict=False):
        for some in moves[start:end].split(_AT_ONCE):
            slots = entries.slot[some]
            pool.put_keys(slots, turned(pool.keys_at(slots), by[some], frequencies))
    if QUERIES in cache.memory:
        ring = cache.memory[QUERIES][seq]  # [L, Hq, w, D]
        back = torch.full((ring.shape[2],), made.newest, device=pool.device)
        for layer, frequencies in zip(ring, inv_freq, strict=True):
            queries = pool.form.rotate(layer.transpose(0, 1))
            layer.copy_(pool.form.rotate(turned(queries, back, frequencies)).transpose(0, 1))
        if POSITIONS in cache.memory:
            cache.memory[POSITIONS][seq] -= made.newest


def turned(x: Tensor, back: Tensor, inv_freq: Tensor) -> Tensor:
    """Rotate ``x [T, D]`` or ``[T, heads, D]`` back by ``back [T]`` positions, in its dtype."""
    angle = -back.double()[:, None] * inv_freq.double().to(x.device)
    cos, sin = angle.cos().float(), angle.sin().float()
    cos, sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    heads = x.float() if x.dim() == 3 else x.float()[:, None]
    made = rotate(heads, cos, sin).to(x.dtype)
    return made if x.dim() == 3 else made[:, 0]


def runs_of(rows: Sequence[Sequence[int]]) -> Runs:
    """Return runs that were plain numbers."""
    return tuple(Run(*row) for row in rows)
