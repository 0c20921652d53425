"""``build_worklist`` as one Triton kernel. Import only where Triton is."""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.buffers import WorkList
from mmkv.engine.backends.cuda.kernels.jit_triton import jit

BLOCK_ROWS = 128
BLOCK_RUNS = 32
WARPS = 4


def build_worklist(work: WorkList, seqs: Tensor, length: Tensor) -> None:
    """See ``build_worklist``; one launch for all layers."""
    layers, rows = work.rows.shape[:2]
    runs = work.runs.shape[1]
    # Every program finds the owners of BLOCK_RUNS runs; some also write BLOCK_ROWS rows.
    grid = (layers, max(triton.cdiv(runs, BLOCK_RUNS), triton.cdiv(rows, BLOCK_ROWS)))
    worklist_kernel[grid](
        seqs,
        length,
        work.rows,
        work.runs,
        rows,
        runs,
        layers,
        HEADS=work.heads,
        TILE=work.tile,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_RUNS=BLOCK_RUNS,
        num_warps=WARPS,
    )


@triton.jit
def _read_rows(seqs, length, row, layer, rows, layers, HEADS: tl.constexpr, TILE: tl.constexpr):
    """Read entries, table index and tiles of rows; rows past the end have no tile."""
    inside = row < rows
    seq = tl.load(seqs + row // HEADS, mask=inside, other=-1)
    source = (tl.maximum(seq, 0) * layers + layer) * HEADS + row % HEADS
    entries = tl.load(length + source, mask=inside & (seq >= 0), other=0).to(tl.int32)
    tiles = tl.where(inside, tl.maximum((entries + TILE - 1) // TILE, 1), 0)
    return entries, source.to(tl.int32), tiles


@jit
def worklist_kernel(
    seqs,
    length,
    rows_out,
    runs_out,
    rows,
    runs,
    layers,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
):
    """Write a block of the work list.

    Grid (layers, blocks). All programs of a layer repeat the sum over rows: it is short.
    """
    layer, block = tl.program_id(0), tl.program_id(1)
    batch_slot = tl.arange(0, BLOCK_ROWS)
    total = 0
    for base in range(0, rows, BLOCK_ROWS):
        _, _, tiles = _read_rows(seqs, length, base + batch_slot, layer, rows, layers, HEADS, TILE)
        total += tl.sum(tiles, 0)
    wide = tl.cast(total, tl.int64)  # tiles * runs can pass 2**31
    busy = tl.cast(tl.minimum(total, runs), tl.int64)

    run = block * BLOCK_RUNS + tl.arange(0, BLOCK_RUNS)
    active = run < busy
    begin = (run * wide // busy).to(tl.int32)
    after = ((run + 1) * wide // busy).to(tl.int32)
    owner = tl.zeros([BLOCK_RUNS], tl.int32)  # rows that end by `begin`: the next one owns it
    passed = tl.zeros([BLOCK_RUNS], tl.int32)  # and their tiles
    before = 0
    for base in range(0, rows, BLOCK_ROWS):
        row = base + batch_slot
        entries, source, tiles = _read_rows(seqs, length, row, layer, rows, layers, HEADS, TILE)
        end = before + tl.cumsum(tiles, 0)
        over = (end[None, :] <= begin[:, None]) & (row < rows)[None, :]
        owner += tl.sum(over.to(tl.int32), 1)
        passed = tl.maximum(passed, tl.max(tl.where(over, end[None, :], 0), 1))
        if base == block * BLOCK_ROWS:
            first = (((end - tiles + 1) * busy - 1) // wide).to(tl.int32)
            last = ((end * busy - 1) // wide).to(tl.int32)
            to = rows_out + (layer * rows + row) * 4
            tl.store(to, entries, mask=row < rows)
            tl.store(to + 1, source, mask=row < rows)
            tl.store(to + 2, first, mask=row < rows)
            tl.store(to + 3, last - first + 1, mask=row < rows)
        before += tl.sum(tiles, 0)

    row = tl.where(active, owner, rows)
    entries, source, _ = _read_rows(seqs, length, row, layer, rows, layers, HEADS, TILE)
    to = runs_out + (layer * runs + run) * 8
    exists = run < runs
    tl.store(to, tl.where(active, after - begin, 0), mask=exists)
    tl.store(to + 1, tl.where(active, owner, 0), mask=exists)
    tl.store(to + 2, tl.where(active, (begin - passed) * TILE, 0), mask=exists)
    tl.store(to + 3, entries, mask=exists)
    tl.store(to + 4, tl.where(active, source, 0), mask=exists)
