"""Window attention in C: :func:`mmkv.engine.scorer_state.window_attention` for float32 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import JOINS, Window, byref, library
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import RaggedCache
from mmkv.engine.policies.base import WindowReduction


def native_window_attention(
    cache: RaggedCache, seq: int, queries: Tensor, seen: int, reduction: WindowReduction
) -> Tensor:
    """Compute what the last queries pay to every entry of a sequence, row after row.

    Args:
        queries: float32 ``[L, Hq, w, D]``, the query of token p in slot ``p % w``.
        seen: tokens of the sequence so far; reduction: how heads and queries are joined.

    Returns:
        float32 ``[N]``.
    """
    loaded = library()
    assert not isinstance(loaded, str), loaded
    length = cache.length[seq]
    threads, dim = torch.get_num_threads(), queries.shape[-1]
    queries = queries.contiguous()
    what = Window(
        queries=queries.data_ptr(),
        group=queries.shape[1] // cache.kv_heads,
        size=queries.shape[2],
        seen=seen,
        join=JOINS.index(reduction.group),
        logits=reduction.of == "logits",
        greatest=reduction.queries == "max",
    )
    room = loaded.mmkv_window_scratch(byref(what), dim, int(length.max()), threads)
    scratch, out = torch.empty(room), torch.empty(int(length.sum()))
    what.scratch, what.out = scratch.data_ptr(), out.data_ptr()
    with CacheViews().of(cache, [seq]) as views:
        loaded.mmkv_window(views, byref(what), threads)
    return out
