"""Eviction of a batch on the device: score, select, fill holes, give pages back; no host sync.

What the runtime does for one sequence after the other (``engine.budgets``), with the same
victims, the same storage order afterwards and the same pages in the same places of the free stack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.backends.cuda.kernels.buffers import (
    BINS,
    BLOCK,
    MOST_TIES,
    TURNS,
    EvictionBuffers,
    PageTables,
)
from mmkv.engine.budget import EVERY_STEP, Interval
from mmkv.engine.cache import Columns
from mmkv.engine.device import on_device
from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import CacheView, Policy
from mmkv.engine.policies.scoring import Recency, Retention

# Selecting programs that an H200 holds at once, or nearly: the sequences share them.
PROGRAMS = 384


def empty_eviction(
    batch: int, rows: PageTables, most_entries: int | None = None
) -> EvictionBuffers:
    """Buffers for :func:`evict` with B = ``batch``; allocate once, outside a CUDA graph.

    Args:
        most_entries: the most entries a sequence may hold when it is evicted from, such as budget +
            slack + R; None: as many as its table could name. Costs 8 bytes each.
    """
    count = rows.length[0].numel()
    if most_entries is None:
        most_entries = rows.table[0].numel() * rows.page_size
    padded = (most_entries // BLOCK + 2) * BLOCK
    wide, narrow = rows.length, torch.int32
    return EvictionBuffers(
        dropped=wide.new_zeros(batch),
        nan=wide.new_zeros(batch),
        most_entries=most_entries,
        keys=wide.new_zeros(batch, padded, dtype=narrow),
        ties=wide.new_zeros(batch, padded, dtype=narrow),
        plan=wide.new_zeros(batch, 4),
        starts=wide.new_zeros(batch, count, dtype=narrow),
        state=wide.new_zeros(TURNS + 1, batch, 4),
        counts=wide.new_zeros(TURNS, batch, BINS, dtype=narrow),
        chunks=max(1, min(PROGRAMS // batch, most_entries // BLOCK + 1)),
        freed=wide.new_zeros(batch, count, dtype=narrow),
        top_before=wide.new_zeros(1),
    )


def empty_drop(batch: int, rows: PageTables, cells: int) -> EvictionBuffers:
    """Buffers for :func:`drop` of rows of at most ``cells`` entries; allocate outside a graph."""
    length, count = rows.length, rows.length[0].numel()
    keys = length.new_zeros(batch, count * cells, dtype=torch.int32)
    starts = torch.arange(0, count * cells, cells, dtype=torch.int32, device=length.device)
    state = length.new_zeros(TURNS + 1, batch, 4)
    state[TURNS, :, 0] = 1  # a victim has the key 0, any other 2
    return EvictionBuffers(
        dropped=length.new_zeros(batch),
        nan=length.new_zeros(batch),
        most_entries=count * cells,
        keys=keys,
        ties=keys,
        plan=length.new_zeros(batch, 4),
        starts=starts.repeat(batch, 1),
        state=state,
        counts=length.new_zeros(0, dtype=torch.int32),
        chunks=1,
        freed=length.new_zeros(batch, count, dtype=torch.int32),
        top_before=length.new_zeros(1),
    )


def drop(
    work: EvictionBuffers,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    victims: Tensor,
    nan: Tensor,
) -> None:
    """Drop given entries of a batch, as :func:`evict` does those that it finds.

    Args:
        work: of :func:`empty_drop`; ``work.dropped`` is the result, and ``work.nan`` grows.
        rows, pool, seqs: see :func:`evict`.
        victims: bool ``[B, R, cells]``, False where a row has no entry; nan: ``[B]`` int64, how
            many of them have a score that is NaN.
    """
    if on_triton(seqs):
        from mmkv.engine.backends.cuda.kernels import evict_triton

        with on_device(seqs.device):
            evict_triton.drop(work, rows, pool, seqs, victims, nan)
    else:
        drop_reference(work, rows, pool, seqs, victims, nan)


def drop_reference(
    work: EvictionBuffers,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    victims: Tensor,
    nan: Tensor,
) -> None:
    """The torch reference of :func:`drop`, sequence after sequence."""
    work.dropped.zero_()
    for batch_slot, seq in enumerate(seqs.tolist()):
        if seq < 0:
            continue
        row, offset, slot = _entries(rows, seq)
        cell = offset.clamp(max=victims.shape[2] - 1)
        gone = (victims[batch_slot][row, cell] & (cell == offset)).nonzero().flatten()
        work.nan[batch_slot] += nan[batch_slot]
        _drop(rows, pool, seq, row, offset, slot, gone)
        work.dropped[batch_slot] = gone.numel()


def _entries(rows: PageTables, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, offset and slot of every entry: :meth:`mmkv.engine.cache.RaggedCache.entries`."""
    length = rows.length[seq].flatten()
    row = torch.repeat_interleave(length)
    offset = torch.arange(row.numel(), device=row.device) - (length.cumsum(0) - length)[row]
    page = rows.table[seq].flatten(0, 1)[row, offset // rows.page_size]
    return row, offset, page * rows.page_size + offset % rows.page_size


def unsupported_reason(policy: Policy) -> str:
    """Name the policy if the kernel does not know its scoring or allocation; empty if it does."""
    known = type(policy.scoring) in (Retention, Recency)
    known &= type(policy.allocation) in (GlobalAllocation, HeadAllocation)
    known &= policy.recent_share is None and not policy.keeps_prompt
    return "" if known else f"policy {policy.name!r}"


def evict(
    work: EvictionBuffers,
    policy: Policy,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    seen: Tensor,
    allowed: Tensor,
    interval: Interval = EVERY_STEP,
) -> Tensor:
    """Cut every sequence in which a group of rows stands above its share and slack to the shares.

    Args:
        work: the result goes to ``work.dropped``, and ``work.nan`` grows.
        policy: one without an :func:`unsupported_reason`.
        rows: changed in place: lengths, ``stack`` and ``top``; tables stay as they are.
        pool: entries move inside their rows, in all columns.
        seqs: ``[B]`` int64, different sequence slots; -1 marks an idle batch slot, which drops
            nothing.
        seen: ``[B]`` int64 tokens seen, positions lie below; allowed: ``[B]`` int64 entries that
            may stay. Both are read on the device.
        interval: what is let be above the budget, the same number of entries in each row.

    Returns:
        ``work.dropped``.
    """
    if on_triton(seqs):
        from mmkv.engine.backends.cuda.kernels import evict_triton

        with on_device(seqs.device):
            return evict_triton.evict(work, policy, rows, pool, seqs, seen, allowed, interval)
    return evict_reference(work, policy, rows, pool, seqs, seen, allowed, interval)


def evict_reference(
    work: EvictionBuffers,
    policy: Policy,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    seen: Tensor,
    allowed: Tensor,
    interval: Interval = EVERY_STEP,
) -> Tensor:
    """The torch reference of :func:`evict`: the policy's own victims, sequence after sequence."""
    work.dropped.zero_()
    for batch_slot, seq in enumerate(seqs.tolist()):
        length = rows.length[max(seq, 0)].flatten()
        entries, budget, now = int(length.sum()), int(allowed[batch_slot]), int(seen[batch_slot])
        if seq < 0 or not _due(policy, rows, length, budget, interval):
            continue
        if entries > work.most_entries or now * length.numel() > MOST_TIES:
            work.dropped[batch_slot] = -1
            continue
        row, offset, slot = _entries(rows, seq)
        columns = (c.view(-1)[slot] for c in (pool.position, pool.log_beta, pool.modality))
        position, log_beta, modality = columns
        layers, heads = rows.length.shape[1:]
        view = CacheView(now, layers, heads, row, length, position.long(), log_beta, modality)
        scores = policy.scores(view, budget).value
        victims = policy.lowest(scores, view, budget)
        work.nan[batch_slot] += scores[victims].isnan().sum()
        _drop(rows, pool, seq, row, offset, slot, victims)
        work.dropped[batch_slot] = victims.numel()
    return work.dropped


def _due(policy: Policy, rows: PageTables, length: Tensor, budget: int, interval: Interval) -> bool:
    shares = policy.shares(budget, *rows.length.shape[1:])
    slack = interval.slack(budget, length.numel())
    if shares.share.numel() == 1:
        return int(length.sum()) > budget + slack
    return shares.exceeded(length, slack // length.numel())


def _drop(
    rows: PageTables,
    pool: Columns,
    seq: int,
    row: Tensor,
    offset: Tensor,
    slot: Tensor,
    victims: Tensor,
) -> None:
    """:meth:`mmkv.engine.cache.RaggedCache.drop`, with the free stack on the device."""
    size, before = rows.page_size, rows.length[seq].flatten()
    after = before - torch.bincount(row[victims], minlength=before.numel())
    keep = torch.ones_like(row, dtype=torch.bool)
    keep[victims] = False
    inside = offset < after[row]
    hole, mover = slot[~keep & inside], slot[keep & ~inside]
    for column in pool.columns():
        flat = column.flatten(0, 1)
        flat[hole] = flat[mover]
    column_index = torch.arange(rows.table.shape[-1], device=row.device)
    first, last = ((n + size - 1) // size for n in (after, before))
    freed = (column_index >= first[:, None]) & (column_index < last[:, None])
    pages, top = rows.table[seq].flatten(0, 1)[freed], int(rows.top)
    rows.stack[top : top + pages.numel()] = pages
    rows.top.add_(pages.numel())
    rows.length[seq] = after.view_as(rows.length[seq])
