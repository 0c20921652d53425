"""Sequences of a RaggedCache as C sees them."""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Sequence

from torch import Tensor

from mmkv.engine.backends.cpu.binding import Cache
from mmkv.engine.cache import RaggedCache


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

    def of(self, cache: RaggedCache, seqs: Sequence[int]) -> ctypes.Array[Cache]:
        """Return the views of the sequences ``seqs`` for one call of C.

        One may stand there several times in a row: its tokens then follow each other.

        Where that takes pages or gives some back, the first view's ``free`` says how many are left:
        the pool has to have it, also when Ctrl-C lands the moment C returns.
        """
        # They are replaced when they grow, one by one: Ctrl-C may come between any two of them.
        now = [*cache.pool.columns(), cache.length, cache.table, cache.pool._stack]
        known = [tensor() for tensor in self._of]
        if not known or len(self._views) != len(seqs) or any(map(operator.is_not, known, now)):
            self._of, self._seqs = (), ()
            self._views = (Cache * len(seqs))(*([_whole(cache, now)] * len(seqs)))
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
            for index in range(len(seqs) - 1, -1, -1):  # tokens of one sequence in a row
                more = index + 1 < len(seqs) and seqs[index + 1] == seqs[index]
                self._each[index].behind = self._each[index + 1].behind + 1 if more else 0
            self._seqs = seqs
        self._each[0].free = cache.pool.free_pages  # of the first view alone, to and from C
        return self._views


def _whole(cache: RaggedCache, tensors: Sequence[Tensor]) -> Cache:
    """Return a view but for its rows; ``tensors``: those of the pool and the cache."""
    pool = cache.pool
    plain = 8 * pool.dtype.itemsize
    return Cache(
        *(tensor.data_ptr() for tensor in tensors),
        rows=cache.rows,
        width=cache.table.shape[-1],
        page_size=pool.page_size,
        head_dim=pool.head_dim,
        state_size=pool.state_size,
        key_bits=pool.form.key.bits or plain,
        value_bits=pool.form.value.bits or plain,
        rotated=pool.form.rotated,
    )
