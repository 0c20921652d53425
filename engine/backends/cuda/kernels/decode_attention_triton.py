"""``decode_attention`` as one Triton kernel. Import only where Triton is.

A program walks over the tiles of its run (see ``kernels.worklist``) in one loop that does
not stop between rows, so that the next tiles are always on their way from memory. Where it leaves a
row, the softmax is closed: a row that lies in this run alone is written out, otherwise the piece
goes to the partial buffers. After the loop each program says which split rows it worked on, and the
one that brings a row's last piece merges them all, in the order of the runs. The integer counters
decide only who merges, so results do not depend on timing, and the merge costs no second launch.

The G query heads of a KV head, of one token or of several, are rows of one matrix product, of 16
rows or more: K and V are read once, and the tensor cores need a small part of the time in which a
tile arrives.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.buffers import NewestTokens, Partials, WorkList
from mmkv.engine.backends.cuda.kernels.forms_triton import load_codes, load_scale, load_zero, parts
from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.backends.cuda.kernels.worklist import TILE_BYTES
from mmkv.engine.cache import EncodedKV

# 3 stages: a tile in use and two on their way, 48 KiB of shared memory in half precision. With at
# most 128 registers per thread (the compile test says so) four programs share a multiprocessor,
# which is what ``worklist.PROGRAMS_PER_SM`` counts on. No tile is shorter than 16 entries: those of
# float32 heads of 256 are twice as large, and get twice the registers and a stage less.
WARPS = 4
STAGES = 3
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGE_SUMS = 8192  # numbers: as many as 4 warps have registers for
PADDED = 16  # rows of the smallest tensor-core product
MERGE_ELEMENTS = tl.constexpr(4096)  # partial outputs a program has in flight while it merges


def decode_attention(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    table: Tensor,
    work: WorkList,
    layer: int,
    partials: Partials,
    scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    window: NewestTokens | None = None,
    behind: Tensor | None = None,
) -> None:
    """See ``decode_attention`` in ``decode_attention.py``; one launch."""
    heads, head_dim, group = work.heads, query.shape[2], query.shape[1] // work.heads
    tokens = query.shape[0] * heads // work.rows.shape[1]
    key_codes, key_scales, key_bits = parts(keys)
    value_codes, value_scales, value_bits = parts(values)
    joined = triton.next_power_of_2(tokens * group)
    padded = max(joined, PADDED)
    large = 2 * work.tile * head_dim * query.element_size() > TILE_BYTES
    large = large or padded * head_dim >= LARGE_SUMS
    decode_kernel[(work.runs.shape[1],)](
        query,
        key_codes,
        value_codes,
        key_scales,
        value_scales,
        table,
        work.rows[layer],
        work.runs[layer],
        partials.out,
        partials.peak,
        partials.total,
        partials.arrived,
        out,
        out if lse is None else lse,
        work.rows if window is None else window.position,
        work.rows if window is None else window.now,
        work.rows if behind is None else behind,
        query.stride(0),
        query.stride(1),
        table.shape[-1],
        scale,
        HEADS=heads,
        TOKENS=tokens,
        G=group,
        GROUP=joined,
        PADDED=padded,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        P=key_codes.shape[1],
        STRIDE=key_codes.stride(1),
        KEY_BITS=key_bits,
        VALUE_BITS=value_bits,
        TILE=work.tile,
        WRITE_LSE=lse is not None,
        WINDOW=0 if window is None else window.tokens,
        BEHIND=behind is not None,
        num_warps=2 * WARPS if large else WARPS,
        num_stages=STAGES - large,
        enable_fp_fusion=True,
    )


@triton.jit
def _merge(
    partial,
    peaks,
    totals,
    first,
    pieces,
    factor,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merge a row's pieces, in their order, to sums ``[GROUP, BLOCK_D]``, peak and total."""
    BLOCK: tl.constexpr = (MERGE_ELEMENTS + GROUP * BLOCK_D - 1) // (GROUP * BLOCK_D)
    batch_slot, g, d = tl.arange(0, BLOCK), tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, BLOCK_D], tl.float32)
    for base in range(0, pieces, BLOCK):
        piece = base + batch_slot
        spot = 2 * (first + piece) + (piece == 0).to(tl.int32)
        to = spot[:, None] * G + g[None, :]
        there = (piece < pieces)[:, None] & (g < G)[None, :]
        # .cg: the L1 of this multiprocessor does not know what others wrote.
        top = tl.load(peaks + to, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(totals + to, mask=there, other=0.0, cache_modifier=".cg")
        body = tl.load(
            partial + to[:, :, None] * D + d[None, None, :],
            mask=there[:, :, None] & (d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        high = tl.maximum(peak, tl.max(top, 0))
        # Of a piece that lies outside the window no entry is above -inf.
        base = tl.where(high == float("-inf"), 0.0, high)
        shrink = tl.exp2((peak - base) * factor)
        share = tl.exp2((top - base[None, :]) * factor)
        acc = acc * shrink[:, None] + tl.sum(body * share[:, :, None], 0)
        total = total * shrink + tl.sum(part * share, 0)
        peak = high
    return acc, peak, total


@triton.jit
def _write(
    out,
    lse,
    row,
    acc,
    peak,
    total,
    scale,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LSE: tl.constexpr,
):
    """Store what a row's sums ``acc [GROUP, BLOCK_D]``, ``peak``, ``total [GROUP]`` amount to."""
    g, d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    to = row * G + g
    if TOKENS > 1:
        to = ((row // HEADS * TOKENS + g // G) * HEADS + row % HEADS) * G + g % G
    asked = g < TOKENS * G
    live = asked[:, None] & (d < D)[None, :]
    mean = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + to[:, None] * D + d[None, :], mean.to(out.dtype.element_ty), mask=live)
    if LSE:
        tl.store(lse + to, peak * scale + tl.log2(total) * LN_2, mask=asked)


@jit
def decode_kernel(
    query,
    keys,
    values,
    key_scale,
    value_scale,
    table,
    rows,
    runs,
    partial,
    peaks,
    totals,
    arrived,
    out,
    lse,
    position,
    now,
    behind,
    query_batch,
    query_head,
    width,
    scale,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    P: tl.constexpr,
    STRIDE: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    TILE: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    WINDOW: tl.constexpr,
    BEHIND: tl.constexpr,
):
    """Compute one run of one layer; grid (N,). WINDOW of 0: entries of any position are seen.

    BEHIND: whether queries of TOKENS tokens see no entries of those behind theirs.
    """
    run = tl.program_id(0)
    tiles = tl.load(runs + run * 8)
    row = tl.load(runs + run * 8 + 1)
    at = tl.load(runs + run * 8 + 2)
    entries = tl.load(runs + run * 8 + 3)
    source = tl.load(runs + run * 8 + 4)

    batch_slot, g, d = tl.arange(0, TILE), tl.arange(0, PADDED), tl.arange(0, BLOCK_D)
    in_head = (d < D)[None, :]
    asked = g < TOKENS * G
    live = asked[:, None] & in_head
    factor = scale * LOG2_E  # applied to differences of logits, which it then rounds least
    peak = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED, TILE], tl.float32)  # summed over batch slots only where a row ends
    acc = tl.zeros([PADDED, BLOCK_D], tl.float32)
    # Page ids are read one tile before keys and values, which then need not wait for them.
    pages = tl.load(
        table + source.to(tl.int64) * width + (at + batch_slot) // P,
        mask=(at + batch_slot < entries) & (tiles > 0),
        other=0,
    ).to(tl.int32)
    # A plain range: under tl.range(num_stages=...) the compiler stages the page ids as well, and
    # then gives up on the overlap of all loads.
    for step in range(0, tiles):
        there = at + batch_slot < entries
        mask = there[:, None] & in_head
        slot = pages.to(tl.int64) * (P * STRIDE) + (at + batch_slot) % P * STRIDE
        # The query is read with every tile (an eighth of its bytes at most, from L2), so
        # that a new row does not stop the loop.
        own = query + (row // HEADS * TOKENS).to(tl.int64) * query_batch
        if TOKENS == 1:
            own += ((row % HEADS) * G + g)[:, None] * query_head
        else:
            own += (g // G)[:, None] * query_batch
            own += ((row % HEADS) * G + g % G)[:, None] * query_head
        q = tl.load(own + d[None, :], mask=live, other=0.0)
        entry = pages.to(tl.int64) * P + (at + batch_slot) % P
        if WINDOW > 0:
            when = tl.load(position + entry, mask=there, other=0)
            if not BEHIND:
                there = there & (tl.load(now + row // HEADS) - when < WINDOW)
                mask = there[:, None] & in_head
        if KEY_BITS == 0:
            key = tl.load(keys + slot[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            key = load_codes(keys, entry, d, mask, q.dtype, D, KEY_BITS)
        if VALUE_BITS == 0:
            value = tl.load(values + slot[:, None] + d[None, :], mask=mask, other=0.0)
        else:
            value = load_codes(values, entry, d, mask, q.dtype, D, VALUE_BITS)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if (KEY_BITS == 8) | (KEY_BITS == 4):
            scores *= load_scale(key_scale, entry, there, KEY_BITS)[None, :]
        if KEY_BITS == 4:
            summed_query = tl.sum(q.to(tl.float32), 1)
            scores += summed_query[:, None] * load_zero(key_scale, entry, there)[None, :]
        seen = there[None, :]
        if BEHIND:
            token = row // HEADS * TOKENS + g // G
            last = entries - tl.load(behind + token, mask=asked, other=0)
            seen = seen & ((at + batch_slot)[None, :] < last[:, None])
            if WINDOW > 0:
                of = tl.load(now + token, mask=asked, other=0)
                seen = seen & (of[:, None] - when[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        high = tl.maximum(peak, tl.max(scores, 1))
        # In a row without entries nothing is above -inf; -inf - -inf must not come up.
        base = tl.where(high == float("-inf"), 0.0, high)
        shrink = tl.exp2((peak - base) * factor)
        weight = tl.exp2((scores - base[:, None]) * factor)
        total = total * shrink[:, None] + weight
        share = weight
        if (VALUE_BITS == 8) | (VALUE_BITS == 4):
            value_step = load_scale(value_scale, entry, there, VALUE_BITS)
            if value.dtype == tl.float16:  # which has no room for a small weight times a scale
                value *= value_step.to(tl.float16)[:, None]
            else:
                share = weight * value_step[None, :]
        acc = tl.dot(share.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
        if VALUE_BITS == 4:
            zero = load_zero(value_scale, entry, there)
            acc += tl.sum(weight * zero[None, :], 1)[:, None]
        peak = high

        ends = at + TILE >= entries
        more = step + 1 < tiles
        if ends | (not more):
            summed = tl.sum(total, 1)
            first = tl.load(rows + row * 4 + 2)
            if tl.load(rows + row * 4 + 3) == 1:
                _write(
                    out,
                    lse,
                    row,
                    acc,
                    peak,
                    summed,
                    scale,
                    HEADS,
                    TOKENS,
                    G,
                    D,
                    PADDED,
                    BLOCK_D,
                    WRITE_LSE,
                )
            else:
                spot = (2 * run + (run == first).to(tl.int32)) * (TOKENS * G) + g
                tl.store(partial + spot[:, None] * D + d[None, :], acc, mask=live)
                tl.store(peaks + spot, peak, mask=asked)
                tl.store(totals + spot, summed, mask=asked)
            peak = tl.full([PADDED], float("-inf"), tl.float32)
            total = tl.zeros([PADDED, TILE], tl.float32)
            acc = tl.zeros([PADDED, BLOCK_D], tl.float32)
        if ends & more:
            row += 1
            at = 0
            entries = tl.load(rows + row * 4)
            source = tl.load(rows + row * 4 + 1)
        else:
            at += TILE
        pages = tl.load(
            table + source.to(tl.int64) * width + (at + batch_slot) // P,
            mask=(at + batch_slot < entries) & more,
            other=0,
        ).to(tl.int32)

    # A run shares with others at most its first row and its last. Both are reported at once.
    if tiles > 0:
        tl.debug_barrier()  # all threads' partial results first, then the word that they are there
        side = tl.arange(0, 2)
        begun = tl.load(runs + run * 8 + 1)
        shared = tl.where(side == 0, begun, row)
        pieces = tl.load(rows + shared * 4 + 3)
        mine = (pieces > 1) & ((side == 0) | (row != begun))
        came = tl.atomic_add(arrived + shared, 1, mask=mine, sem="acq_rel")
        last = (mine & (came == pieces - 1)).to(tl.int32)
        for index in range(2):
            if tl.sum(tl.where(side == index, last, 0), 0) > 0:
                whose = tl.where(index == 0, begun, row)
                tl.store(arrived + whose, 0)  # ready for the next layer
                first = tl.load(rows + whose * 4 + 2)
                count = tl.load(rows + whose * 4 + 3)
                merged, top, sums = _merge(
                    partial, peaks, totals, first, count, factor, TOKENS * G, D, GROUP, BLOCK_D
                )
                _write(
                    out,
                    lse,
                    whose,
                    merged,
                    top,
                    sums,
                    scale,
                    HEADS,
                    TOKENS,
                    G,
                    D,
                    GROUP,
                    BLOCK_D,
                    WRITE_LSE,
                )
