"""``kernels.append`` in Triton: one kernel counts the pages, one hands them out.

Two launches, because every batch slot has to know what the batch slots before it take, and whether
all of it fits, before any row may change. One program owns one batch slot; it holds all rows of its
sequence.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.buffers import AppendBuffers, PageTables
from mmkv.engine.backends.cuda.kernels.jit_triton import jit

WARPS = 4
BATCH = tl.constexpr(64)  # batch slots that are looked at together
# A batch slot that cannot be served asks for more pages than there can be; sums of it do not
# overflow.
TOO_MANY = tl.constexpr(1 << 40)


def make_room(room: AppendBuffers, rows: PageTables, seqs: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.append.make_room`."""
    batch_slots, count = seqs.shape[0], rows.length[0].numel()
    width = rows.table.shape[-1]
    block = triton.next_power_of_2(count)
    count_kernel[(batch_slots,)](
        seqs,
        rows.length,
        rows.top,
        room.error,
        room.wanted,
        room.top_before,
        count,
        width,
        PAGE=rows.page_size,
        BLOCK=block,
        num_warps=WARPS,
    )
    take_kernel[(batch_slots,)](
        seqs,
        rows.length,
        rows.table,
        rows.stack,
        rows.top,
        room.error,
        room.wanted,
        room.top_before,
        room.slots,
        count,
        width,
        batch_slots,
        PAGE=rows.page_size,
        BLOCK=block,
        num_warps=WARPS,
    )
    return room.slots


@jit
def count_kernel(
    seqs,
    length,
    top,
    error,
    wanted,
    top_before,
    rows,
    width,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the pages that one batch slot takes; grid (B)."""
    batch_slot = tl.program_id(0)
    seq = tl.load(seqs + batch_slot)
    row = tl.arange(0, BLOCK)
    inside = (row < rows) & (seq >= 0)
    before = tl.load(length + seq * rows + row, mask=inside, other=1)
    fresh = inside & (before % PAGE == 0)
    crowded = inside & (before // PAGE >= width)
    count = tl.sum(fresh.to(tl.int64), 0)
    refused = (tl.max(crowded.to(tl.int32), 0) > 0) | (tl.load(error) != 0)
    tl.store(wanted + batch_slot, tl.where(refused, TOO_MANY, count))
    if batch_slot == 0:  # the next kernel writes `top` while others still need it
        tl.store(top_before, tl.load(top))


@jit
def take_kernel(
    seqs,
    length,
    table,
    stack,
    top,
    error,
    wanted,
    top_before,
    slots,
    rows,
    width,
    batch_slots,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write pages, lengths and slots of one batch slot; grid (B)."""
    batch_slot = tl.program_id(0)
    total, first = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for base in range(0, batch_slots, BATCH):
        other = base + tl.arange(0, BATCH)
        pages = tl.load(wanted + other, mask=other < batch_slots, other=0)
        total += tl.sum(pages, 0)
        first += tl.sum(tl.where(other < batch_slot, pages, 0), 0)
    free = tl.load(top_before)
    fits = total <= free
    if batch_slot == 0:
        if fits:
            tl.store(top, free - total)
        else:
            tl.store(error, 1)

    seq = tl.load(seqs + batch_slot)
    row = tl.arange(0, BLOCK)
    exists = row < rows
    served = exists & (seq >= 0) & fits
    source = seq * rows + row
    before = tl.load(length + source, mask=served, other=1)
    fresh = served & (before % PAGE == 0)
    # Rows take from the end of the stack, each after those before it.
    nth = first + tl.cumsum(fresh.to(tl.int64), 0) - 1
    cell = table + source * width + before // PAGE
    page = tl.load(cell, mask=served & (before % PAGE != 0), other=0)
    page += tl.load(stack + free - 1 - nth, mask=fresh, other=0)
    # With fewer rows than threads several warps have read the same lengths: all of them first.
    tl.debug_barrier()
    tl.store(cell, page, mask=fresh)
    tl.store(length + source, before + 1, mask=served)
    slot = tl.where(served, page * PAGE + before % PAGE, -1)
    tl.store(slots + batch_slot * rows + row, slot, mask=exists)
