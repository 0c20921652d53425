"""``engine.backends.cuda.kernels.window_scores`` in Triton: two passes over the keys of every row.

The first gives each query's log-sum-exp, the second the probabilities, averaged. A row's blocks
of entries are dealt out in turn to some programs, so that one long row does not hold up the
step; the partial sums are merged in the second pass, in a fixed order. Nothing of size
queries x entries ever reaches memory.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.backends.cuda.kernels.window_scores import empty_shares

LOG2_E = 1.4426950408889634
# Entries of a row's table per program, and the most programs for a row.
SHARE, MOST_SPLITS = 256, 8
# A position behind every query.
NEVER = tl.constexpr(2**31 - 1)


def window_scores(
    query: Tensor,
    query_position: Tensor,
    keys: Tensor,
    position: Tensor,
    length: Tensor,
    table: Tensor,
    seqs: Tensor,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.window_scores.window_scores`."""
    if out is None:
        out = empty_shares(keys, table, seqs)
    batch_slots, layers, heads, capacity = out.shape
    window, head_dim = query.shape[3:]
    queries = query.shape[2] // heads * window
    splits = min(max(triton.cdiv(capacity, SHARE), 1), MOST_SPLITS)
    rows = layers * heads
    partial = torch.empty(batch_slots * rows, splits, queries, device=keys.device)
    shape = sizes(queries, head_dim, keys.dtype)
    constants = {
        "ROWS": rows,
        "WINDOW": window,
        "DIM": head_dim,
        "PAGE": keys.shape[1],
        **shape,
    }
    grid = (batch_slots * rows, splits)
    shared = (query, query_position, keys, position, length, table, seqs, partial)
    constants |= {"QUERIES": queries, "enable_fp_fusion": True}
    numbers = (scale * LOG2_E, table.shape[3], splits)
    lse_kernel[(*grid, triton.cdiv(queries, shape["TILE"]))](*shared, *numbers, **constants)
    probability_kernel[grid](*shared, out, *numbers, **constants)
    return out


def sizes(queries: int, head_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Return tile sizes of a program, and its warps: 32 scores per thread, 8 in float32.

    float32 products are made of three of the tensor cores' (tf32x3, exact to about 2**-21); in
    plain float32 arithmetic this tile does not fit the registers by far. Twice the tile would not
    fit the shared memory of small cards, nor would this one with heads of more than 128.
    """
    whole, wide = dtype == torch.float32, head_dim > 128
    most = (16 if wide else 64) if whole else (64 if wide else 128)
    tile = min(max(triton.next_power_of_2(queries), 16), most)
    return {
        "TILE": tile,
        "DIM_BLOCK": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK": 32 if whole else 64,
        "num_warps": 8 if tile == most else 4,
    }


@jit
def lse_kernel(
    query,
    query_position,
    keys,
    position,
    length,
    table,
    seqs,
    partial,
    scale,
    width,
    splits,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Log2-sum-exp2 of one split of one row, ``partial [B L H, splits, QUERIES]``.

    Grid (B L H, splits, tiles of queries).
    """
    index, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2) * TILE
    seq = tl.load(seqs + index // ROWS)
    if seq < 0:
        return
    row = seq * ROWS + index % ROWS
    count = tl.load(length + row).to(tl.int32)
    q, at = _queries(query, query_position, seq, row, tile, QUERIES, WINDOW, DIM, TILE, DIM_BLOCK)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for begin in range(split * BLOCK, count, splits * BLOCK):
        scores = _scores(
            q,
            at,
            keys,
            position,
            table,
            width,
            row,
            begin,
            count,
            scale,
            DIM,
            PAGE,
            DIM_BLOCK,
            BLOCK,
        )
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - base) + tl.sum(tl.exp2(scores - base[:, None]), 1)
        highest = higher
    column = tile + tl.arange(0, TILE)
    target = partial + (index.to(tl.int64) * splits + split) * QUERIES + column
    tl.store(target, highest + tl.log2(total), mask=column < QUERIES)


@jit
def probability_kernel(
    query,
    query_position,
    keys,
    position,
    length,
    table,
    seqs,
    partial,
    out,
    scale,
    width,
    splits,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute mean probabilities of one split of one row, ``out [B L H, W P]``.

    Grid (B L H, splits).
    """
    index, split = tl.program_id(0), tl.program_id(1)
    seq = tl.load(seqs + index // ROWS)
    if seq < 0:
        return
    row = seq * ROWS + index % ROWS
    count = tl.load(length + row).to(tl.int32)
    sums = partial + index.to(tl.int64) * splits * QUERIES
    known = _known(query_position + seq * WINDOW, QUERIES, WINDOW, TILE)
    share = 1.0 / tl.maximum(known, 1).to(tl.float32)
    capacity = width * PAGE
    target = out + index.to(tl.int64) * capacity
    if QUERIES <= TILE:  # the usual case: the queries stay where they are
        q, at = _queries(query, query_position, seq, row, 0, QUERIES, WINDOW, DIM, TILE, DIM_BLOCK)
        lse = _merged(sums, 0, splits, QUERIES, TILE)
    for begin in range(split * BLOCK, count, splits * BLOCK):
        mean = tl.zeros([BLOCK], tl.float32)
        # A loop that stays one: unrolled, all tiles of queries would lie in shared memory together.
        for tile in tl.range(0, QUERIES, TILE, num_stages=1):
            if QUERIES > TILE:
                q, at = _queries(
                    query, query_position, seq, row, tile, QUERIES, WINDOW, DIM, TILE, DIM_BLOCK
                )
                lse = _merged(sums, tile, splits, QUERIES, TILE)
            scores = _scores(
                q,
                at,
                keys,
                position,
                table,
                width,
                row,
                begin,
                count,
                scale,
                DIM,
                PAGE,
                DIM_BLOCK,
                BLOCK,
            )
            mean += tl.sum(tl.exp2(scores - lse[:, None]), 0)
        offset = begin + tl.arange(0, BLOCK)
        tl.store(target + offset, mean * share, mask=offset < capacity)
    # The blocks past the last entry, dealt out in turn as well.
    first = tl.cdiv(count, BLOCK)
    first += (split - first % splits + splits) % splits
    for begin in range(first * BLOCK, capacity, splits * BLOCK):
        offset = begin + tl.arange(0, BLOCK)
        tl.store(target + offset, tl.zeros([BLOCK], tl.float32), mask=offset < capacity)


@triton.jit
def _queries(
    query,
    query_position,
    seq,
    row,
    tile,
    QUERIES: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Load a tile of the group's queries ``[TILE, DIM_BLOCK]`` and their positions ``[TILE]``."""
    line = tile + tl.arange(0, TILE)
    feature = tl.arange(0, DIM_BLOCK)
    inside = line < QUERIES
    start = query + (row * QUERIES + line[:, None]) * DIM + feature[None, :]
    q = tl.load(start, mask=inside[:, None] & (feature < DIM)[None, :], other=0.0)
    at = tl.load(query_position + seq * WINDOW + line % WINDOW, mask=inside, other=-1)
    return q, at


@triton.jit
def _scores(
    q,
    at,
    keys,
    position,
    table,
    width,
    row,
    begin,
    count,
    scale,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute base-2 logits ``[TILE, BLOCK]`` of a block of entries; -inf where masked."""
    offset = begin + tl.arange(0, BLOCK)
    feature = tl.arange(0, DIM_BLOCK)
    live = offset < count
    page = tl.load(table + row * width + offset // PAGE, mask=live, other=0)
    slot = page * PAGE + offset % PAGE
    where = tl.load(position + slot, mask=live, other=NEVER)
    start = keys + slot[None, :] * DIM + feature[:, None]
    key = tl.load(start, mask=live[None, :] & (feature < DIM)[:, None], other=0.0)
    scores = tl.dot(q, key, input_precision="tf32x3") * scale
    return tl.where(where[None, :] <= at[:, None], scores, float("-inf"))


@triton.jit
def _merged(sums, tile, splits, QUERIES: tl.constexpr, TILE: tl.constexpr):
    """Log2-sum-exp2 ``[TILE]`` over the splits; 0 for queries that see nothing."""
    column = tile + tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    for split in range(splits):
        part = tl.load(sums + split * QUERIES + column, mask=column < QUERIES, other=float("-inf"))
        highest = tl.maximum(highest, part)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.zeros([TILE], tl.float32)
    for split in range(splits):
        part = tl.load(sums + split * QUERIES + column, mask=column < QUERIES, other=float("-inf"))
        total += tl.exp2(part - base)
    return base + tl.where(total > 0.0, tl.log2(total), 0.0)


@triton.jit
def _known(query_position, QUERIES: tl.constexpr, WINDOW: tl.constexpr, TILE: tl.constexpr):
    """Return how many of the group's queries have been seen."""
    known = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(0, QUERIES, TILE):
        line = tile + tl.arange(0, TILE)
        at = tl.load(query_position + line % WINDOW, mask=line < QUERIES, other=-1)
        known += (at >= 0).to(tl.int32)
    return tl.sum(known, 0)
