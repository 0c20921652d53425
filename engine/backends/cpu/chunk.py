"""Attention of a prompt's chunk, in C (chunk.c)."""

from __future__ import annotations

from ctypes import c_int64

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import Library, byref, library
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import RaggedCache


def native_chunk_attention() -> NativeChunkAttention | None:
    """Return the function in C; None where C is not there."""
    found = library()
    return None if isinstance(found, str) else NativeChunkAttention(found)


class NativeChunkAttention:
    """Attends from a chunk's queries to what its sequence held before it, and to the chunk.

    Stands for :func:`chunk_attention` and :func:`ragged_attention` of
    :mod:`mmkv.engine.backends.torch` together, where the pool computes in float32 and no window
    limits what is seen. The softmax runs on from one stretch of entries to the next (arXiv
    1805.02867).
    """

    def __init__(self, found: Library) -> None:
        self._library, self._views = found, CacheViews()
        self._scratch = torch.empty(0)

    @staticmethod
    def takes(cache: RaggedCache) -> bool:
        """Whether C can read this cache."""
        return cache.length.device.type == "cpu" and cache.pool.dtype == torch.float32

    def __call__(self, cache: RaggedCache, seq: int, layer: int, query: Tensor) -> Tensor:
        """Compute the attention of the last T tokens of a chunk.

        Args:
            query: float32 ``[T, Hq, D]``, rotated as the pool's keys are. The chunk's entries are
                stored already, as the last ones of each row of the layer.

        Returns:
            float32 ``[T, Hq D]``, rotated as the pool's values are.
        """
        tokens, heads, dim = query.shape
        if query.stride()[1:] != (dim, 1):
            query = query.contiguous()
        out, threads = query.new_empty(tokens, heads * dim), c_int64()
        rows = layer * cache.kv_heads, cache.kv_heads, heads // cache.kv_heads
        with self._views.of(cache, [seq]) as views:
            most = torch.get_num_threads()
            size = self._library.mmkv_attend_chunk_plan(views, *rows, tokens, most, byref(threads))
            if self._scratch.numel() < threads.value * size:
                self._scratch = torch.empty(threads.value * size)
            places = self._scratch.data_ptr(), out.data_ptr()
            asked = query.data_ptr(), query.stride(0), tokens
            self._library.mmkv_attend_chunk(views, *rows, *asked, threads.value, size, *places)
        return out
