"""Room for one new entry in every row of a batch, with the page bookkeeping on the device.

What :meth:`mmkv.engine.cache.RaggedCache.append` does for a count of 1, without a host sync: the
same pages in the same order, so that the eager path and a CUDA graph may take turns on one cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.backends.cuda.kernels.buffers import AppendBuffers, PageTables


def empty_room(batch: int, rows: PageTables) -> AppendBuffers:
    """Return the buffers for :func:`make_room` with B = ``batch``.

    Allocate once, outside a CUDA graph.
    """
    length = rows.length
    return AppendBuffers(
        length.new_full((batch, *length.shape[1:]), -1),
        length.new_zeros(1, dtype=torch.int32),
        length.new_zeros(batch),
        length.new_zeros(1),
    )


def make_room_reference(room: AppendBuffers, rows: PageTables, seqs: Tensor) -> Tensor:
    """Lengthen every row of the sequences ``seqs`` by one entry, which the caller fills.

    Rows at the end of a page take a new one, in the order batch slot, layer, head. When the free
    pages or the table's columns do not suffice, no row changes, all slots are -1 and ``room.error``
    is raised. No host sync on CUDA.

    Args:
        room: the result goes to ``room.slots``.
        rows: changed in place: lengths, tables and ``top``.
        seqs: ``[B]`` int64, different sequence slots; -1 marks an idle batch slot, whose slots are
            -1.

    Returns:
        ``room.slots``.
    """
    size, width = rows.page_size, rows.table.shape[-1]
    live = seqs >= 0
    seq = seqs[live]
    before = rows.length[seq]
    column = before // size
    fresh = before % size == 0
    count, top = int(fresh.sum()), int(rows.top)
    room.slots.fill_(-1)
    if room.error or count > top or bool((column >= width).any()):
        room.error.fill_(1)
        return room.slots
    table = rows.table[seq]
    page = table.gather(-1, column[..., None])[..., 0]
    page[fresh] = rows.stack[top - count : top].flip(0)
    rows.table[seq] = table.scatter(-1, column[..., None], page[..., None])
    rows.length[seq] = before + 1
    rows.top.sub_(count)
    room.slots[live] = page * size + before % size
    return room.slots


make_room = in_triton(make_room_reference, "seqs")
