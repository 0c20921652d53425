"""The last w queries of each sequence, and the attention they pay to what is retained.

They lie in the cache's memory as ``queries [S, L, Hq, w, D]``, after RoPE and in the model's dtype:
the query of token p in slot ``p % w``, so that a step writes one slot and moves nothing. Where the
form of the cache is rotated, they lie there rotated, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.backends.cuda.kernels.window_scores import window_scores
from mmkv.engine.cache import Entries, RaggedCache
from mmkv.engine.policies.base import CacheView, Group, WindowReduction

QUERIES = "queries"
# The reductions that the kernel computes.
_ON_PAGES = (WindowReduction("mean"), WindowReduction("sum"))


def window_positions(seen: int, size: int, device: torch.device) -> Tensor:
    """Token index of the query in each of ``size`` slots, int64 ``[w]``; -1 where there is none.

    Args:
        seen: tokens of the sequence whose queries have been stored.
    """
    last = seen - 1
    position = last - (last - torch.arange(size, device=device)) % size
    return position.clamp(min=-1)


def store_queries(queries: Tensor, seqs: Tensor, position: Tensor, new: Tensor) -> None:
    """Put new queries into their slots.

    Args:
        queries: the ring, ``[S, L, Hq, w, D]``; changed in place.
        seqs: ``[B]`` int64; position: ``[B, T]`` token indices, T <= w.
        new: ``[B, L, Hq, T, D]``.
    """
    slot = position % queries.shape[3]
    queries[seqs[:, None], :, :, slot] = new.permute(0, 3, 1, 2, 4)


def window_attention(
    cache: RaggedCache,
    seq: int,
    entries: Entries,
    view: CacheView,
    reduction: WindowReduction,
    native: bool = False,
) -> Tensor:
    """Compute attention probabilities of the window over the retained entries.

    For each layer and KV head: softmax over the row's entries (causal: an entry after the
    query counts nothing), joined over the group's heads and then over the window's queries.

    Args:
        reduction: how both are joined.
        native: whether C computes it; for float32 on a CPU.

    Returns:
        float32 ``[N]``, row-major as the view.
    """
    queries = cache.memory[QUERIES]
    if native:
        from mmkv.engine.backends.cpu.window import native_window_attention

        return native_window_attention(cache, seq, queries[seq], view.seen, reduction)
    at = window_positions(view.seen, queries.shape[3], queries.device)
    group = reduction.group
    if on_triton(cache.pool.keys) and cache.pool.form.plain and reduction in _ON_PAGES:
        mean = _attention_on_pages(cache, seq, at)[entries.row, entries.offset]
        return mean if group == "mean" else mean * (queries.shape[2] // view.kv_heads)
    join_first = group if reduction.of == "logits" else None
    shares = []
    for probability in _probabilities(cache, seq, entries, view, at >= 0, join_first):
        paid = join(probability, group, 1)
        shares.append(paid.amax(1) if reduction.queries == "max" else paid.mean(1))
    return torch.cat(shares)[view.live()]


def newest_entropy(cache: RaggedCache, seq: int, entries: Entries, view: CacheView) -> Tensor:
    """Compute :meth:`mmkv.engine.policies.base.CacheView.entropy`."""
    queries = cache.memory[QUERIES]
    at = window_positions(view.seen, queries.shape[3], queries.device)
    most = view.length.float().log().view(view.layers, -1)
    found = []
    for layer, probability in enumerate(
        _probabilities(cache, seq, entries, view, at == view.seen - 1)
    ):
        entropy = torch.special.entr(probability).sum(-1)[..., 0]
        share = entropy / most[layer][:, None]
        found.append(share.masked_fill(most[layer][:, None] <= 0, 0.0))
    return torch.stack(found).mean()


def _probabilities(
    cache: RaggedCache,
    seq: int,
    entries: Entries,
    view: CacheView,
    chosen: Tensor,
    join_first: Group | None = None,
) -> Iterator[Tensor]:
    """Yield each layer's shares of attention ``[H, G, w, longest row]``, 0 where nothing is seen.

    Args:
        chosen: bool ``[W]``, which w slots of the ring have queries that count.
        join_first: how the logits of the group's heads are joined, G = 1 then; None: not at all.
    """
    queries = cache.memory[QUERIES]
    at = window_positions(view.seen, queries.shape[3], queries.device)
    heads, dim = view.kv_heads, queries.shape[-1]
    slot = view.to_rows(entries.slot, 0)
    position = view.to_rows(view.position, torch.iinfo(torch.int64).max)
    query_at = at[chosen]
    keys = cache.pool.stored_keys.flatten(0, 1)
    for layer in range(view.layers):
        rows = slice(layer * heads, (layer + 1) * heads)
        grouped = queries[seq, layer][:, chosen].float().reshape(heads, -1, dim) * dim**-0.5
        scores = grouped @ keys[slot[rows]].float().transpose(1, 2)
        scores = scores.unflatten(1, (-1, query_at.numel()))
        allowed = position[rows][:, None] <= query_at[:, None]
        if join_first is not None:
            scores = join(scores, join_first, 1)[:, None]
        probability = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        # A query whose own entry and all before it are gone attends to nothing.
        yield probability.nan_to_num(0.0)


def join(shares: Tensor, group: Group, dim: int) -> Tensor:
    """Join the attention of the heads of a KV group, which lie along ``dim``."""
    if group == "max":
        return shares.amax(dim)
    return shares.mean(dim) if group == "mean" else shares.sum(dim)


def _attention_on_pages(cache: RaggedCache, seq: int, at: Tensor) -> Tensor:
    """Compute :func:`window_attention` where the keys lie, by the kernel: ``[R, W P]``."""
    pool, queries = cache.pool, cache.memory[QUERIES]
    batch_slot = torch.zeros(1, dtype=torch.int64, device=pool.keys.device)
    shares = window_scores(
        queries[seq][None],
        at[None],
        pool.keys,
        pool.position,
        cache.length[seq][None],
        cache.table[seq][None],
        batch_slot,
        queries.shape[-1] ** -0.5,
    )
    return shares[0].flatten(0, 1)
