"""The work list of a decode step: which program reads which part of which row, for all layers.

The entries of a row are cut into *tiles* of a fixed count; the tiles of all rows of a layer stand
end to end, and are dealt to a fixed number of programs in equal, contiguous *runs*. So every
program reads the same number of bytes, however uneven the rows are, and a row is cut only where
one run ends and the next begins. A run's part of one row is a *piece*.

Why equal runs and not pieces of a chosen length: with pieces, some
programs of a persistent grid get one more than others, and the slowest decides. Runs differ by one
tile at most, and need buffers of a size known beforehand: each run shares at most two rows with its
neighbours, so there are at most ``2 * runs`` pieces to merge, whatever the lengths.

The list is made on the device, once per step, and depends on lengths only, not on what is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.backends.cuda.kernels.buffers import WorkList

# A tile holds about this many bytes of keys and values. A program of the attention kernel has two
# tiles on their way from memory and four programs share a multiprocessor: 128 KiB in flight, five
# times what Little's law asks of 4.3 TB/s at 0.8 us on 132 multiprocessors.
TILE_BYTES = 16384
PROGRAMS_PER_SM = 4


def tile_entries(head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of entries that take ``TILE_BYTES``, a power of two from 16 to 128."""
    fitting = TILE_BYTES // (2 * head_dim * dtype.itemsize)
    return max(16, min(128, 1 << (fitting.bit_length() - 1)))


def default_runs(device: torch.device) -> int:
    """Return the programs of the attention kernel that fit the device together (a few on a CPU)."""
    if device.type != "cuda":
        return 8
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count


def empty_worklist(
    batch: int, layers: int, heads: int, tile: int, runs: int, device: torch.device | str
) -> WorkList:
    """Return the buffers for :func:`build_worklist`; allocate once, outside a CUDA graph."""
    rows = torch.zeros(layers, batch * heads, 4, dtype=torch.int32, device=device)
    return WorkList(
        rows, torch.zeros(layers, runs, 8, dtype=torch.int32, device=device), tile, heads
    )


def build_worklist_reference(work: WorkList, seqs: Tensor, length: Tensor) -> None:
    """Fill ``work`` for the present lengths; no host sync, so it may stand in a CUDA graph.

    Args:
        work: buffers whose batch is B.
        seqs: ``[B]`` int64 sequence slots; -1 marks an idle batch slot, whose rows count as empty.
        length: ``[S, L, H]`` int64 entries per row, those appended in this step included.
    """
    rows, runs = work.rows, work.runs
    layers, count = rows.shape[:2]
    slot = seqs.clamp(min=0)
    entries = length[slot].where((seqs >= 0)[:, None, None], 0)  # [B, L, H]
    at = torch.arange(layers * work.heads, device=seqs.device).view(layers, work.heads)
    source = slot[:, None, None] * at.numel() + at  # [B, L, H]
    entries = entries.transpose(0, 1).reshape(layers, count)
    source = source.transpose(0, 1).reshape(layers, count)
    tiles = (entries + work.tile - 1).div(work.tile, rounding_mode="floor").clamp(min=1)
    end = tiles.cumsum(1)
    total = end[:, -1:]
    busy = total.clamp(max=runs.shape[1])
    # Run p covers the tiles from p * total / busy on; tile t is in the last run that starts by t.
    run = torch.arange(runs.shape[1], device=seqs.device)
    begin = (run * total).div(busy, rounding_mode="floor")
    after = ((run + 1) * total).div(busy, rounding_mode="floor")
    first = ((end - tiles + 1) * busy - 1).div(total, rounding_mode="floor")
    last = (end * busy - 1).div(total, rounding_mode="floor")
    rows.copy_(torch.stack([entries, source, first, last - first + 1], -1))

    active = run < busy
    row = torch.searchsorted(end, begin, right=True).clamp(max=count - 1)
    offset = (begin - (end - tiles).gather(1, row)) * work.tile
    columns = [after - begin, row, offset, entries.gather(1, row), source.gather(1, row)]
    runs[..., :5] = torch.stack([column.where(active, 0) for column in columns], -1).int()


build_worklist = in_triton(build_worklist_reference, "seqs")
