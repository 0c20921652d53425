"""Eviction of a batch on the device: score, select, fill holes, give pages back; no host sync.

What the runtime does for one sequence after the other (``engine.budgets``), with the same
victims, the same storage order afterwards and the same pages in the same places of the free stack.
:func:`evict` works out of a budget what rows may keep; :func:`evict_to_shares` is told, and takes
scores that torch has computed. :func:`drop` is told the victims.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.backends.cuda.kernels.buffers import (
    BINS,
    BLOCK,
    MOST_TIES,
    TURNS,
    EvictionBuffers,
    EvictionLimits,
    PageTables,
)
from mmkv.engine.budget import EVERY_STEP, Interval
from mmkv.engine.cache import Columns
from mmkv.engine.policies.allocation import FlooredAllocation, GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import CacheView, Policy, kernel_of
from mmkv.engine.policies.selection import Shares, lowest

# Selecting programs that an H200 holds at once, or nearly: the sequences share them.
PROGRAMS = 384


def empty_eviction(
    batch: int, rows: PageTables, most_entries: int | None = None, groups: int = 1
) -> EvictionBuffers:
    """Buffers to evict with B = ``batch``; allocate once, outside a CUDA graph.

    Args:
        most_entries: the most entries a sequence may hold when it is evicted from, such as budget +
            slack + R; None: as many as its table could name. Costs 8 bytes each.
        groups: G of the shares that :func:`evict_to_shares` is given.
    """
    count = rows.length[0].numel()
    if most_entries is None:
        most_entries = rows.table[0].numel() * rows.page_size
    padded = (most_entries // BLOCK + 2) * BLOCK
    wide, narrow = rows.length, torch.int32
    state = wide.new_zeros(TURNS + 1, batch, 4)
    return EvictionBuffers(
        dropped=wide.new_zeros(batch),
        nan=wide.new_zeros(batch),
        most_entries=most_entries,
        keys=wide.new_zeros(batch, padded, dtype=narrow),
        ties=wide.new_zeros(batch, padded, dtype=narrow),
        plan=wide.new_zeros(batch, 3),
        starts=wide.new_zeros(batch, count, dtype=narrow),
        share=wide.new_zeros(batch, count),
        floor=wide.new_zeros(batch, count),
        threshold=state[TURNS][:, None] if groups == 1 else wide.new_zeros(batch, groups, 4),
        state=state,
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
    threshold = length.new_zeros(batch, 1, 4)
    threshold[:, :, 0], threshold[:, :, 2] = 2, 1  # a victim has the key 1, any other 3
    none = length.new_zeros(0)
    return EvictionBuffers(
        dropped=length.new_zeros(batch),
        nan=length.new_zeros(batch),
        most_entries=count * cells,
        keys=keys,
        ties=keys,
        plan=length.new_zeros(batch, 3),
        starts=starts.repeat(batch, 1),
        share=none,
        floor=none,
        threshold=threshold,
        state=none,
        counts=none.int(),
        chunks=1,
        freed=length.new_zeros(batch, count, dtype=torch.int32),
        top_before=length.new_zeros(1),
    )


def drop_reference(
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


drop = in_triton(drop_reference, "seqs")


def _entries(rows: PageTables, seq: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, offset and slot of every entry: :meth:`mmkv.engine.cache.RaggedCache.entries`."""
    length = rows.length[seq].flatten()
    row = torch.repeat_interleave(length)
    offset = torch.arange(row.numel(), device=row.device) - (length.cumsum(0) - length)[row]
    page = rows.table[seq].flatten(0, 1)[row, offset // rows.page_size]
    return row, offset, page * rows.page_size + offset % rows.page_size


def unsupported_reason(policy: Policy) -> str:
    """Name the policy if :func:`evict` does not know its scoring or allocation; empty if it does.

    Others go by :func:`evict_to_shares`, whose kernels select by whatever groups and floors. In
    torch remain the scores of those that :func:`scores_in_torch` names, and what a scorer notes in
    the state of entries. These read keys or the newest queries, which is most of their work, and
    each has a formula of its own: a kernel would spare launches of one policy alone. They are
    computed for a whole batch at once, but for memories of a sequence (``segments-hs``).
    """
    known = kernel_of(policy.scoring) in ("retention", "recency")
    known &= type(policy.allocation) in (GlobalAllocation, HeadAllocation, FlooredAllocation)
    known &= policy.recent_share is None and not policy.keeps_prompt
    return "" if known else f"policy {policy.name!r}"


def scores_in_torch(policy: Policy) -> bool:
    """Whether an eviction on the device is given the policy's scores: no kernel computes them."""
    return kernel_of(policy.scoring) == "torch"


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
    work.dropped.zero_()
    for batch_slot, seq in enumerate(seqs.tolist()):
        length = rows.length[max(seq, 0)].flatten()
        entries, budget, now = int(length.sum()), int(allowed[batch_slot]), int(seen[batch_slot])
        if seq < 0 or not _due(policy, rows, length, budget, interval):
            continue
        if entries > work.most_entries or now * length.numel() > MOST_TIES:
            work.dropped[batch_slot] = -1
            continue
        view, offset, slot = _view(rows, pool, seq, now)
        scores = policy.scores(view, budget).value
        victims = policy.lowest(scores, view, budget)
        work.nan[batch_slot] += scores[victims].isnan().sum()
        _drop(rows, pool, seq, view.row, offset, slot, victims)
        work.dropped[batch_slot] = victims.numel()
    return work.dropped


evict = in_triton(evict_reference, "seqs")


def evict_to_shares_reference(
    work: EvictionBuffers,
    policy: Policy,
    rows: PageTables,
    pool: Columns,
    seqs: Tensor,
    seen: Tensor,
    limits: EvictionLimits,
    scores: Tensor | None = None,
) -> Tensor:
    """Cut as :func:`evict` does, to shares and floors that are given; for every policy.

    Args:
        work: of :func:`empty_eviction` with ``groups``; see :func:`evict`.
        rows, pool, seqs, seen: see :func:`evict`.
        limits: see :class:`EvictionLimits`; read on the device.
        scores: float32 ``[B, R, M]``, contiguous, of the entries as they lie, without protection.
            A sequence with a row of more than M entries that had to evict drops nothing and gives
            -1. None: they are computed here, which needs a policy without :func:`scores_in_torch`.

    Returns:
        ``work.dropped``.
    """
    work.dropped.zero_()
    count, groups = rows.length[0].numel(), limits.share.shape[1]
    # Group g: rows from g R / G to before (g + 1) R / G.
    group = torch.arange(count).div(count // groups, rounding_mode="floor")
    for batch_slot, seq in enumerate(seqs.tolist()):
        length = rows.length[max(seq, 0)].flatten()
        floor = None if limits.floor is None else limits.floor[batch_slot].cpu()
        shares = Shares(group, limits.share[batch_slot].cpu(), floor)
        if seq < 0 or not shares.exceeded(length, int(limits.above[batch_slot])):
            continue
        fits = int(length.sum()) <= work.most_entries
        fits &= int(seen[batch_slot]) * count <= MOST_TIES
        if not fits or (scores is not None and int(length.max()) > scores.shape[-1]):
            work.dropped[batch_slot] = -1
            continue
        view, offset, slot = _view(rows, pool, seq, int(seen[batch_slot]))
        if scores is not None:
            scored = scores[batch_slot][view.row, offset]
        elif kernel_of(policy.scoring) == "state":
            scored = pool.state.flatten(0, 1)[slot, 0]
        else:
            scored = cast(Tensor, policy.scoring.score(view))
        scored = policy.protected(scored, view, int(limits.recent[batch_slot]))
        victims = lowest(scored, view, shares)
        work.nan[batch_slot] += scored[victims].isnan().sum()
        _drop(rows, pool, seq, view.row, offset, slot, victims)
        work.dropped[batch_slot] = victims.numel()
    return work.dropped


evict_to_shares = in_triton(evict_to_shares_reference, "seqs")


def _view(rows: PageTables, pool: Columns, seq: int, seen: int) -> tuple[CacheView, Tensor, Tensor]:
    """Return a view of a sequence's entries that reads no keys, their offsets and their slots."""
    row, offset, slot = _entries(rows, seq)
    layers, heads = rows.length.shape[1:]
    columns = (c.view(-1)[slot] for c in (pool.position, pool.log_beta, pool.modality))
    position, log_beta, modality = columns
    length = rows.length[seq].flatten()
    view = CacheView(seen, layers, heads, row, length, position.long(), log_beta, modality)
    return view, offset, slot


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
