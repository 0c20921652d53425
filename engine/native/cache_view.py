"""Sequences of a RaggedCache as C sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.cache import RaggedCache
from engine.native.binding import Cache


@contextmanager
def lent(cache: RaggedCache, seqs: Sequence[int]) -> Iterator[ctypes.Array[Cache]]:
    """Lend the rows of ``seqs`` and the pool's free pages to C, and take the free count back.

    Pointers are read anew each time: the pool and the table are replaced when they grow. The
    count comes back even when Ctrl-C lands the moment C returns.
    """
    pool, rows = cache.pool, cache.rows
    width = cache.table.shape[-1]
    views = (Cache * len(seqs))(
        *(
            Cache(
                pool.keys.data_ptr(),
                pool.values.data_ptr(),
                pool.log_beta.data_ptr(),
                pool.position.data_ptr(),
                pool.modality.data_ptr(),
                cache.length.data_ptr() + seq * rows * 8,
                cache.table.data_ptr() + seq * rows * width * 8,
                pool._stack.data_ptr(),
                pool._free,
                rows,
                width,
                pool.page_size,
                pool.head_dim,
            )
            for seq in seqs
        )
    )
    try:
        yield views
    finally:
        pool._free = views[0].free
