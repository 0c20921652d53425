"""Sequences of a RaggedCache as C sees them."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mmkv.engine.backends.cpu.binding import Cache
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.cache.forms import Codec


class CacheViews:
    """Shows C the rows of one cache and the pool's free pages, for one call at a time.

    The structures of the last call are used again, and only what changes between steps is written:
    to fill them anew would take as long as a small model's eviction.
    """

    def __init__(self) -> None:
        self._views = (Cache * 0)()
        self._each: list[Cache] = []
        self._of: tuple[weakref.ref[Tensor], ...] = ()
        self._seqs: tuple[int, ...] = ()

    def of(self, cache: RaggedCache, seqs: Sequence[int]) -> BorrowedViews:
        """Return the views of the sequences ``seqs``, to be used in a with statement."""
        pool = cache.pool
        # They are replaced when they grow, one by one: Ctrl-C may come between any two of them.
        now = self._tensors(cache)
        known = [tensor() for tensor in self._of]
        if not known or len(self._views) != len(seqs) or any(map(operator.is_not, known, now)):
            self._of, self._seqs = (), ()
            self._views = (Cache * len(seqs))(*([self._whole(cache)] * len(seqs)))
            self._each = list(self._views)  # an item of a ctypes array is wrapped anew at each look
            # Weak: what a pool has outgrown shall not live on here.
            self._of = tuple(map(weakref.ref, now))
        if self._seqs != (seqs := tuple(seqs)):
            self._seqs = ()  # until all are written: Ctrl-C may come in between
            rows, tables = cache.length.data_ptr(), cache.table.data_ptr()
            width = 8 * self._each[0].width  # bytes: both are int64
            for view, seq in zip(self._each, seqs, strict=True):
                first = seq * cache.rows
                view.length, view.table = rows + 8 * first, tables + width * first
            self._seqs = seqs
        self._each[0].free = pool.free_pages  # of the first view alone, to and from C
        return BorrowedViews(pool, self._views)

    @staticmethod
    def _tensors(cache: RaggedCache) -> list[Tensor]:
        return [*cache.pool.columns(), cache.length, cache.table, cache.pool._stack]

    def _whole(self, cache: RaggedCache) -> Cache:
        pool = cache.pool
        return Cache(
            *(tensor.data_ptr() for tensor in self._tensors(cache)),
            free=pool.free_pages,
            rows=cache.rows,
            width=cache.table.shape[-1],
            page_size=pool.page_size,
            head_dim=pool.head_dim,
            state_size=pool.state_size,
            key_bits=_bits(pool.form.key, pool.dtype),
            value_bits=_bits(pool.form.value, pool.dtype),
            rotated=pool.form.rotated,
        )


class BorrowedViews:
    """Views during one call of C; at its end the pool takes the count of free pages back.

    It does so even when Ctrl-C lands the moment C returns.
    """

    def __init__(self, pool: PagePool, views: ctypes.Array[Cache]) -> None:
        self._pool, self._views = pool, views

    def __enter__(self) -> ctypes.Array[Cache]:
        return self._views

    def __exit__(self, *_: object) -> None:
        self._pool.set_free(self._views[0].free)


def _bits(codec: Codec, dtype: torch.dtype) -> int:
    return codec.bits or 8 * dtype.itemsize
