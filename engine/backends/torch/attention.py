"""Attention in torch over ragged rows of pages: of a step, of a prompt's chunk, under write gates.

Rows of all lengths are attended to at once over a work list of (row, page) pairs; a reference that
takes row after row stands beside each fast form.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.cache import EncodedKV
from mmkv.engine.policies.base import admitted
from mmkv.engine.policies.write_gate import visible

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
        dead: ``[X]`` int64, the slots of all pieces that hold none, counted through.
        rows: R.
        empty: whether some row has no entry at all.
        whole: every row is exactly one piece, in order, so nothing needs merging.
    """

    row: Tensor
    pages: Tensor
    valid: Tensor
    bias: Tensor
    dead: Tensor
    rows: int
    whole: bool
    empty: bool

    def gather(self, pool: Tensor | EncodedKV) -> Tensor:
        """Copy the pieces' slots from ``pool [pages, P, D]``, ``[W, c * P, D]``: 0 where they are
        dead.

        What lies there may be another sequence's, and no number: neither a bias nor a weight of 0
        hides that.
        """
        held = pool[self.pages].flatten(1, 2)
        held.view(-1, held.shape[-1]).index_fill_(0, self.dead, 0)
        return held


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
        dead = (~valid[part]).flatten().nonzero().flatten()
        parts = row[part], pages[part], valid[part], bias[part], dead
        work.append(LayerWork(*parts, rows, whole, empty))
        start += count
    return work


# Elements of one score block; longer query blocks are cut so that temporaries stay near 32 MiB.
_BLOCK_ELEMENTS = 8 * 2**20
# Elements of the queries of all pieces together, on a CPU: several tensors have as many.
_QUERY_ELEMENTS = 2**19


def ragged_attention_reference(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    work: LayerWork,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`ragged_attention` the slow way: one row after the other, in float32."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
    for row in range(work.rows):
        mine = work.row == row
        live = work.valid[mine].flatten()
        if not live.any():
            continue
        key = keys[work.pages[mine]].flatten(0, 2)[live].float()
        value = values[work.pages[mine]].flatten(0, 2)[live].float()
        scores = query[row].float() @ key.T * scale
        out[row] = scores.softmax(-1) @ value
        lse[row] = scores.logsumexp(-1)
    return out.to(query.dtype), lse


def ragged_attention(
    query: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    work: LayerWork,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend from ``query`` to every live entry of each row, without causality.

    Args:
        query: ``[R, Q, D]``: all queries that share a KV head stand in its row.
        keys, values: ``[pages, P, D]``, the pool.
        work: the pieces of this layer.
        scale: factor on the logits.

    Returns:
        output ``[R, Q, D]`` in the query's dtype, log-sum-exp ``[R, Q]`` float32.
    """
    key, value = work.gather(keys), work.gather(values)
    if query.device.type == "cpu" and not work.whole:
        block = max(1, _QUERY_ELEMENTS // max(len(work.row) * query.shape[-1], 1))
        parts = [_of_rows(part, key, value, work, scale) for part in query.split(block, 1)]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, 1), torch.cat(sums, 1)
    return _of_rows(query, key, value, work, scale)


def _of_rows(
    query: Tensor, key: Tensor, value: Tensor, work: LayerWork, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from ``query [R, Q, D]`` to the pieces' ``key, value [W, N, D]``, row by row."""
    piece = query if work.whole else query[work.row]
    out, lse = _attend(piece, key, value, work.bias, scale)
    if work.whole and not work.empty:
        return out, lse
    if work.whole:
        empty = ~work.valid[:, :1]
        return out.masked_fill(empty[..., None], 0), lse.masked_fill(empty, -torch.inf)
    highest = amax_by_row(lse, work.row, work.rows)
    share = (lse - highest[work.row]).exp()
    summed = share.new_zeros(query.shape[:2]).index_add_(0, work.row, share)
    mixed = share.new_zeros(query.shape).index_add_(0, work.row, out.float() * share[..., None])
    mixed /= summed.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return mixed.to(query.dtype), highest + summed.log()


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of ``query [W, Q, D]`` to ``key, value [W, N, D]`` under ``bias [W,
    N]``: outputs ``[W, Q, D]``, log-sum-exp ``[W, Q]``.
    """
    if query.device.type == "cpu":
        # What scaled_dot_product_attention calls: it alone gives the sums that parts are merged by.
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = bias[:, None, None].expand(-1, 1, query.shape[1], -1)
        out, lse = kernel(
            query[:, None], key[:, None], value[:, None], 0.0, False, attn_mask=mask, scale=scale
        )
        return out[:, 0], lse.reshape(query.shape[:2]).float()
    block = max(1, _BLOCK_ELEMENTS // max(key.shape[0] * key.shape[1], 1))
    outs, sums = [], []
    for part in query.split(block, 1):
        scores = (part.float() * scale) @ key.float().transpose(1, 2) + bias[:, None].float()
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1).to(value.dtype) @ value)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def amax_by_row(values: Tensor, row: Tensor, rows: int) -> Tensor:
    """Return the largest of ``values [W, Q]`` per row, ``[rows, Q]``.

    -inf for rows without pieces.
    """
    highest = values.new_full((rows, values.shape[1]), -torch.inf)
    return highest.scatter_reduce_(0, row[:, None].expand_as(values), values, "amax")


_QUERIES = 128  # of one block


@dataclass(frozen=True)
class SortedRows:
    """The entries of H rows by ascending position, the chunk's own included, padded to the longest.

    Attributes:
        key, value: ``[H, N, D]``; position: int64 ``[H, N]``, the largest int64 where there is no
            entry; log_g: float32 ``[H, N]``.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    log_g: Tensor

    def take(self, index: Tensor) -> SortedRows:
        """The entries ``index [H, n]`` of each row."""
        wide = index[..., None].expand(-1, -1, self.key.shape[-1])
        return SortedRows(
            self.key.gather(1, wide),
            self.value.gather(1, wide),
            self.position.gather(1, index),
            self.log_g.gather(1, index),
        )


def write_gated_attention_reference(
    query: Tensor, position: Tensor, rows: SortedRows, window: int, threshold: float, scale: float
) -> Tensor:
    """Compute :func:`write_gated_attention` with the whole mask and the whole score matrix."""
    scores = query.float() @ rows.key.float()[:, None].transpose(-1, -2) * scale
    seen = torch.stack(
        [
            visible(position, at, log_g, window, threshold)
            for at, log_g in zip(rows.position, rows.log_g, strict=True)
        ]
    )
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (shares @ rows.value.float()[:, None]).to(query.dtype)


def write_gated_attention(
    query: Tensor, position: Tensor, rows: SortedRows, window: int, threshold: float, scale: float
) -> Tensor:
    """Attend from the chunk's queries to what each of them may see.

    Args:
        query: ``[H, G, C, D]``, the G query heads of each KV head; position: int64 ``[C]`` token
            indices that follow each other.
        rows: the entries, those of the chunk included: each query sees its own at least.
        window: W_local; threshold: tau; scale: factor on the logits.

    Returns:
        ``[H, G, C, D]`` in the query's dtype.
    """
    passes = admitted(rows.log_g, threshold) & (rows.position < torch.iinfo(torch.int64).max)
    # Admitted entries of each row first, still by position.
    chosen = rows.take((~passes).byte().argsort(dim=-1, stable=True))
    count = passes.sum(-1, keepdim=True)
    column = torch.arange(rows.position.shape[1], device=query.device)
    last = torch.iinfo(torch.int64).max
    chosen_at = chosen.position.masked_fill(column >= count, last)
    parts, places = query.split(_QUERIES, 2), position.split(_QUERIES)
    # How many of them each block sees: the one read from the device.
    newest = torch.stack([at[-1] for at in places]) - window
    newest = newest.expand(len(chosen_at), -1).contiguous()
    reach = torch.searchsorted(chosen_at, newest, right=True)
    out = []
    for part, at, most in zip(parts, places, reach.amax(0).tolist(), strict=True):
        near = _slice(rows, at[0] - window + 1, window - 1 + at.numel())
        age = at[:, None] - near.position[:, None]
        near_seen = (age >= 0) & (age < window)
        far_at = chosen_at[:, :most]
        far_seen = far_at[:, None] <= at[:, None] - window
        key = torch.cat([near.key, chosen.key[:, :most]], 1)[:, None]
        value = torch.cat([near.value, chosen.value[:, :most]], 1)[:, None]
        seen = torch.cat([near_seen, far_seen], -1)[:, None]
        shape = (-1, query.shape[1], -1, -1)
        out.append(
            F.scaled_dot_product_attention(
                part, key.expand(shape), value.expand(shape), seen, scale=scale
            )
        )
    return torch.cat(out, 2)


def _slice(rows: SortedRows, first: Tensor, count: int) -> SortedRows:
    """Return ``count`` entries of each row from position ``first`` on.

    A row has at most one entry a position: all of the next ``count`` positions are among them.
    Later ones may be, too, and are masked by the caller. Where a row ends, padding follows.
    """
    longest = rows.position.shape[1]
    begin = (rows.position < first).sum(-1, keepdim=True)
    index = begin + torch.arange(min(count, longest), device=begin.device)
    taken = rows.take(index.clamp(max=longest - 1))
    last = torch.iinfo(torch.int64).max
    return replace(taken, position=taken.position.masked_fill(index >= longest, last))


def chunk_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute :func:`chunk_attention` the slow way: the whole score matrix in float32."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    scores = query.float() @ key.float().transpose(1, 2) * scale
    asked, count = scores.shape[-2:]
    future = torch.ones(asked, count, dtype=torch.bool, device=query.device)
    hidden = future.triu(1 + count - asked) if seen is None else ~seen
    scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ value.float()).to(query.dtype), scores.logsumexp(-1)


def chunk_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a chunk to itself, causal where nothing else is said.

    Args:
        query: ``[Hq, C, D]``, or ``[Hq, 1, D]`` of the chunk's last token alone; key, value:
            ``[H, C, D]``; Hq is a multiple of H.
        scale: factor on the logits.
        seen: bool ``[C, C]``, which keys each query sees; None: those up to its own.

    Returns:
        output in the query's shape and dtype, log-sum-exp ``[Hq, C]`` or ``[Hq, 1]`` float32.
    """
    if seen is not None:
        bias = query.new_zeros(seen.shape).masked_fill(~seen, torch.finfo(query.dtype).min)
        return _chunk_under(query, key, value, scale, bias)
    causal = query.shape[1] > 1  # the last token sees the whole chunk
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0)[None], value.repeat_interleave(group, 0)[None]
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(query[None], key, value, 0.0, causal, scale=scale)
    elif query.dtype != torch.float32:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = kernel(query[None], key, value, 0.0, causal, False, scale=scale)
    else:
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = kernel(query[None], key, value, None, True, 0.0, causal, scale=scale)
        lse = lse[..., : query.shape[1]]  # the kernel pads its length to a multiple of 32
    return out[0], lse[0].float()


def _chunk_under(
    query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Attend from ``query [Hq, C, D]`` to the chunk under ``bias [C, C]``."""
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    if query.device.type == "cpu":
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        mask = bias.expand(1, len(query), -1, -1)
        three = (query[None], key[None], value[None])
        out, lse = kernel(*three, 0.0, False, attn_mask=mask, scale=scale)
        return out[0], lse[0].float()
    block = max(1, _BLOCK_ELEMENTS // max(key.shape[0] * key.shape[1], 1))
    outs, sums = [], []
    for part, hidden in zip(query.split(block, 1), bias.split(block, 0), strict=True):
        scores = (part.float() * scale) @ key.float().transpose(1, 2) + hidden.float()
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1).to(value.dtype) @ value)
    return torch.cat(outs, 1), torch.cat(sums, 1)


def windowed_attention(
    query: Tensor,
    query_position: Tensor,
    keys: Tensor | EncodedKV,
    values: Tensor | EncodedKV,
    position: Tensor,
    work: LayerWork,
    scale: float,
    window: int,
    until: Tensor | None = None,
) -> Tensor:
    """Causal attention to the entries at most ``window - 1`` tokens back, the query's own included.

    Args:
        query: ``[R, Q, D]``; query_position: ``[R, Q]`` token index.
        keys, values: ``[pages, P, D]``; position: ``[pages, P]`` int32.
        work: pieces of the layer; all new entries must be in the cache already.
        window: tokens a query may see.
        until: ``[R, Q]`` token index of the last entry that a query sees; None: its own.

    Returns:
        ``[R, Q, D]`` in the query's dtype.
    """
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    total = torch.zeros(query.shape[:2], device=query.device)
    key, value = work.gather(keys), work.gather(values)
    at = position[work.pages].flatten(1, 2)[:, None]
    back = query_position[work.row][..., None] - at
    last = (query_position if until is None else until)[work.row][..., None]
    allowed = work.valid[:, None] & (at <= last) & (back < window)
    scores = (query[work.row].float() * scale) @ key.float().transpose(1, 2)
    scores = scores.masked_fill(~allowed, -torch.inf)
    highest = amax_by_row(scores.amax(-1), work.row, work.rows)
    weights = (scores - highest[work.row][..., None]).exp().nan_to_num(0.0)
    total = total.index_add(0, work.row, weights.sum(-1))
    out = out.index_add(0, work.row, weights @ value.float())
    return (out / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).to(query.dtype)
