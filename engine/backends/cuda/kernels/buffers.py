"""The buffers of a step's kernels: made once for a batch size, outside of the graph that uses them.

Each kernel has a reference in torch and a form in Triton; both take these.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# The radix selection looks at 8 bytes of a rank, one launch each: 4 of the score, 4 of the tie.
TURNS = 8
BINS = 256
# Entries are read in blocks of this many; scratch is padded to whole blocks.
BLOCK = 2048
# Ties are ordered by position * rows + row, in 32 bits.
MOST_TIES = 2**32


@dataclass(frozen=True)
class PageTables:
    """The ragged rows and the free pages of a cache, all int64 and contiguous on one device.

    Attributes:
        length: ``[S, L, H]`` entries per row.
        table: ``[S, L, H, W]`` page ids; columns past ``ceil(length / page_size)`` mean nothing.
        stack: ``[pages]``; its first ``top`` ids are the free pages, handed out from the end.
        top: ``[1]``.
        page_size: entries per page.
    """

    length: Tensor
    table: Tensor
    stack: Tensor
    top: Tensor
    page_size: int


@dataclass(frozen=True)
class AppendBuffers:
    """Static buffers of one batch bucket.

    Attributes:
        slots: ``[B, L, H]`` int64, the result: flat slots ``page * P + offset``, or -1.
        error: ``[1]`` int32; 1 once a step did not fit. It stays until the host clears it, and
            until then nothing is appended: the host, which reads it a step late, finds the cache
            as the last step that fitted left it.
        wanted: ``[B]`` int64 scratch, pages each batch slot takes; top_before: ``[1]`` int64
            scratch.
    """

    slots: Tensor
    error: Tensor
    wanted: Tensor
    top_before: Tensor


@dataclass(frozen=True)
class WorkList:
    """Static buffers of one batch bucket. R = batch x KV heads rows, in that order; N runs.

    Attributes:
        rows: ``[L, R, 4]`` int32 per row: entries; the row's index in ``table.view(-1, W)``; the
            first run with a piece of it; its pieces (at least 1: a row without entries still has
            one tile, in which its output is zeroed).
        runs: ``[L, N, 8]`` int32 per run: tiles (0: nothing to do); row of the first tile; entry
            of that row where it starts; that row's entries and table index again, so that a
            program learns them in one read; the rest unused.
        tile: entries in a tile, a power of two.
        heads: KV heads.
    """

    rows: Tensor
    runs: Tensor
    tile: int
    heads: int


@dataclass(frozen=True)
class NewestTokens:
    """What a query of a layer with a sliding window sees: the newest tokens, its own among them.

    Attributes:
        tokens: their number.
        position: ``[pages, P]`` int32 token indices, the pool's; now: ``[B]`` int64, the queries'.
    """

    tokens: int
    position: Tensor
    now: Tensor


@dataclass(frozen=True)
class Partials:
    """Static scratch of :func:`decode_attention`, shared by all layers of a step.

    Attributes:
        out: ``[2 N, G, D]`` float32, values summed over a piece with the weights
            ``exp(scale (q.k - peak))``. Of run p, the piece that begins a row is at ``2 p + 1``,
            one that continues a row at ``2 p``.
        peak, total: ``[2 N, G]`` float32, the piece's highest ``q.k`` and the sum of its weights.
            (Apart they lose nothing; a log-sum-exp of 1e4 would be rounded to 1e-3.)
        arrived: ``[R]`` int32, pieces of a row that are done; zero between layers.
    """

    out: Tensor
    peak: Tensor
    total: Tensor
    arrived: Tensor


@dataclass(frozen=True)
class EvictionBuffers:
    """Static buffers of one batch bucket; R = layers x KV heads.

    Attributes:
        dropped: ``[B]`` int64, the result: entries evicted from each batch slot; -1 where a batch
            slot had to evict and could not, being larger than these buffers (nothing has changed
            there).
        nan: ``[B]`` int64, entries evicted with a score that is NaN, added up over calls.
        most_entries: entries of one sequence that fit.
        keys, ties: ``[B, N]`` int32 holding uint32: per entry, row after row, its score mapped so
            that unsigned numbers order as floats do, and ``position * R + row``.
        plan: ``[B, 3]`` int64: entries (0 if nothing is to be evicted), the most that have to go of
            one group, how many victims have a score that is NaN.
        starts: ``[B, R]`` int32, entries of the sequence before each row.
        share: ``[B, R]`` int64, what each group may keep (the first G of R), and floor: ``[B, R]``
            int64, both where an eviction works them out of a budget.
        threshold: ``[B, G, 4]`` int64, of each group that of its keys, of its ties, and how many
            have to go, or a part of them (0: nothing); the last of ``state`` where G is 1.
        state: ``[TURNS + 1, B, 4]`` int64 of the selection before each turn: threshold of keys,
            of ties, victims still sought, whether it is settled.
        counts: ``[TURNS, B, BINS]`` int32, each turn's histogram.
        chunks: programs that share the selection of one sequence.
        freed: ``[B, R]`` int32, pages each row gives back; top_before: ``[1]`` int64.
    """

    dropped: Tensor
    nan: Tensor
    most_entries: int
    keys: Tensor
    ties: Tensor
    plan: Tensor
    starts: Tensor
    share: Tensor
    floor: Tensor
    threshold: Tensor
    state: Tensor
    counts: Tensor
    chunks: int
    freed: Tensor
    top_before: Tensor


@dataclass(frozen=True)
class EvictionLimits:
    """What each batch slot may keep where a budget alone does not say it; int64 and contiguous.

    Attributes:
        share: ``[B, G]``, entries that each group of ``R / G`` neighbouring rows may keep.
        floor: ``[B, R]``, each row's best entries, so many of them, that stay; those of a group are
            no more than its share. None: no row is guarded.
        above: ``[B]``, entries per row beside its share that are let be.
        recent: ``[B]``, newest tokens that are protected.
    """

    share: Tensor
    floor: Tensor | None
    above: Tensor
    recent: Tensor
