"""Compaction of rope positions: how a bounded session goes on beyond the trained context.

A session's rope positions grow with every token, evicted or not, and a model was trained for so
many. Before they would pass the last one, the gaps that evicted tokens have left are closed, down
to half of the context: no gap is longer than G afterwards, the largest length with which all fits.
A picture moves as a whole, tokens keep their order, and no distance grows. A key that moves by d
positions is multiplied with R(-d), the plain rotation of a text token, since all axes of a position
move alike; angles are computed in float64 (at a million, those in float32 are off by 0.04 rad).
Ages count tokens, not positions, so gates and scores stay.

With G = 0, text alone and rows that keep the same tokens this is StreamingLLM (arXiv 2309.17453,
section 3.2), whose positions are those inside the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmkv.engine.cache import RaggedCache
from mmkv.engine.model.rope import rotate
from mmkv.engine.scorer_state import POSITIONS, QUERIES, window_positions

# Entries whose keys are turned at a time.
_AT_ONCE = 2**16


class Run(NamedTuple):
    """Tokens from index ``token`` on, up to the next run's, whose first has rope ``position``.

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
    at = sum(run.token < token for run in runs) - 1
    if at < 0:
        return 0
    run = runs[at]
    own = run.position + run.extent if run.extent else _line(run, token)
    return own if at + 1 == len(runs) else min(own, runs[at + 1].position)


def without_after(runs: Runs, token: int) -> Runs:
    """Return the runs of the first ``token`` tokens."""
    return tuple(run for run in runs if run.token < token)


def _line(run: Run, token: int) -> int:
    """Return the position of a token as if all behind the run's first were text."""
    return run.position + token - run.token


@dataclass(frozen=True)
class Compaction:
    """Where the tokens that are held move.

    Attributes:
        token: ``[S]`` int64 ascending, first index of each segment: a picture, or one token.
        shift: ``[S]`` int64, how many positions it moves back; never less than the one before.
        runs, next_position: those of the sequence afterwards.
        gap: G, the longest gap that stays.
    """

    token: np.ndarray
    shift: np.ndarray
    runs: Runs
    next_position: int
    gap: int


def plan(
    live: np.ndarray,
    runs: Runs,
    seen: int,
    next_position: int,
    last: int,
    flat: bool = False,
) -> Compaction | None:
    """Return how positions move so that the next is at most ``last``; None: it cannot be.

    Args:
        live: indices of the tokens that are held in any row, int64 ascending.
        seen: tokens of the sequence; next_position: of the text that follows.
        flat: whether each token of a picture has a position of its own, as text has: pictures that
            do not fit as a whole then lose gaps inside, too.
    """
    if not live.size:
        return Compaction(live, live, (Run(seen, 0),), 0, 0)
    table = np.array(runs, np.int64)
    run = np.searchsorted(table[:, 0], live, "right") - 1
    token, position, extent = table[run].T
    sees = extent > 0
    first = ~sees
    first[0] = True
    first[1:] |= run[1:] != run[:-1]
    old = np.where(sees, position, position + live - token)[first]
    size = np.where(sees, extent, 1)[first]
    gaps = np.append(old[1:], next_position) - old - size
    least, most = 0, int(gaps.max())
    room = last - int(size.sum())
    if room < 0 and flat and sees.any():
        plain = tuple(run._replace(extent=0) for run in runs)
        return plan(live, plain, seen, next_position, last)
    if room < 0:
        return None
    while least < most:  # the largest G that fits
        middle = (least + most + 1) // 2
        if int(np.minimum(gaps, middle).sum()) <= room:
            least = middle
        else:
            most = middle - 1
    ends = np.cumsum(size + np.minimum(gaps, least))
    new = np.append(0, ends[:-1])
    at = np.where(sees, token, live)[first]
    kept = np.where(sees, extent, 0)[first]
    # Neighbours in a text stay one run.
    begins = np.ones(at.size, bool)
    begins[1:] = (kept[1:] > 0) | (kept[:-1] > 0)
    begins[1:] |= (np.diff(at) != 1) | (np.diff(new) != 1)
    rows = np.stack([at, new, kept], 1)[begins].tolist()
    moved = tuple(Run(*row) for row in rows)
    end = int(ends[-1])
    return Compaction(at, old - new, with_text(moved, seen, end), end, least)


def live_tokens(cache: RaggedCache, seq: int, seen: int) -> np.ndarray:
    """Return the tokens that any row of a sequence holds, ascending; those of its recent queries,
    which scorers compare with keys, are among them.
    """
    held = cache.pool.position.view(-1)[cache.entries(seq).slot].long()
    if QUERIES in cache.memory:
        recent = window_positions(seen, cache.memory[QUERIES].shape[3], held.device)
        held = torch.cat([held, recent[recent >= 0]])
    found: np.ndarray = held.unique().cpu().numpy()
    return found


def move(
    cache: RaggedCache, seq: int, seen: int, made: Compaction, inv_freq: Sequence[Tensor]
) -> None:
    """Turn the keys of a sequence, and its recent queries, back by what their tokens move.

    Args:
        inv_freq: of each layer with entries the rope's frequencies ``[rot / 2]``.
    """
    pool = cache.pool
    token, shift = (torch.from_numpy(x).to(pool.device) for x in (made.token, made.shift))

    def shifts(tokens: Tensor) -> Tensor:
        return shift[(torch.searchsorted(token, tokens, right=True) - 1).clamp(min=0)]

    entries = cache.entries(seq)
    by = shifts(pool.position.view(-1)[entries.slot].long())
    moves = (by > 0).nonzero().flatten()
    bounds = torch.arange(1, len(inv_freq) + 1, device=pool.device) * cache.kv_heads
    ends = torch.searchsorted(entries.row[moves].contiguous(), bounds).tolist()
    for frequencies, start, end in zip(inv_freq, [0, *ends], ends, strict=False):
        for some in moves[start:end].split(_AT_ONCE):
            slots = entries.slot[some]
            pool.put_keys(slots, turned(pool.keys_at(slots), by[some], frequencies))
    if QUERIES in cache.memory:
        ring = cache.memory[QUERIES][seq]  # [L, Hq, w, D]
        at = window_positions(seen, ring.shape[2], ring.device)
        back = torch.where(at >= 0, shifts(at), 0)
        for layer, frequencies in zip(ring, inv_freq, strict=True):
            queries = pool.form.rotate(layer.transpose(0, 1))
            layer.copy_(pool.form.rotate(turned(queries, back, frequencies)).transpose(0, 1))
        if POSITIONS in cache.memory:
            cache.memory[POSITIONS][seq] -= back


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
