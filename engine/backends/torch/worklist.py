"""The work list: which pages each piece of ragged attention reads, made once per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Pages per piece when rows are so uneven that padding them to the longest would cost more than
# merging pieces does (8 pages of 16 = 128 entries).
SPLIT_PAGES = 8


@dataclass(frozen=True)
class LayerWork:
    """The pieces of one layer. A piece is a run of pages of one row; R rows, W pieces.

    Attributes:
        row: ``[W]`` int64, the row (sequence in the batch x KV head) a piece belongs to.
        pages: ``[W, c]`` int64 page ids, padded with page 0.
        valid: ``[W, c * P]`` bool, which slots of the pages hold live entries.
        bias: ``[W, c * P]`` in the model's dtype: 0 at live slots, else its most negative
            number (not -inf, so that pieces of empty rows stay free of NaN).
        rows: R.
        empty: whether some row has no entry at all.
        whole: every row is exactly one piece, in order, so nothing needs merging.
    """

    row: Tensor
    pages: Tensor
    valid: Tensor
    bias: Tensor
    rows: int
    whole: bool
    empty: bool


def build_worklist(
    length: Tensor, table: Tensor, page_size: int, dtype: torch.dtype = torch.float32
) -> list[LayerWork]:
    """Cut the rows ``length [B, L, H]``, ``table [B, L, H, W]`` into pieces, per layer.

    Either every row is one piece, padded to the longest, or all are cut every
    ``SPLIT_PAGES`` pages: whichever reads less.
    """
    batch, layers, heads = length.shape
    length = length.transpose(0, 1).reshape(-1)
    table = table.transpose(0, 1).reshape(length.numel(), -1)
    held = (length + page_size - 1).div(page_size, rounding_mode="floor")
    longest, total = int(held.max()), int(held.sum())
    rows = batch * heads
    whole = longest * length.numel() <= max(1.5 * total, SPLIT_PAGES * length.numel())
    span = max(longest, 1) if whole else SPLIT_PAGES
    pieces = torch.ones_like(held) if whole else (held + span - 1).div(span, rounding_mode="floor")
    row = torch.repeat_interleave(pieces)
    index = torch.arange(row.numel(), device=row.device) - (pieces.cumsum(0) - pieces)[row]
    column = index[:, None] * span + torch.arange(span, device=row.device)
    live = column < held[row][:, None]
    pages = table[row[:, None], column.clamp(max=table.shape[1] - 1)].masked_fill(~live, 0)
    slot = torch.arange(span * page_size, device=row.device)
    valid = slot < (length[row] - index * span * page_size)[:, None]
    bias = torch.zeros(valid.shape, dtype=dtype, device=valid.device)
    bias.masked_fill_(~valid, torch.finfo(dtype).min)
    empty = int(held.min()) == 0
    counts = pieces.view(layers, rows).sum(1).tolist()
    row = row % rows
    work, start = [], 0
    for count in counts:
        part = slice(start, start + count)
        work.append(LayerWork(row[part], pages[part], valid[part], bias[part], rows, whole, empty))
        start += count
    return work
