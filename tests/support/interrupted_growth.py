"""A pool whose growth Ctrl-C interrupts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from torch import Tensor

from mmkv.engine.cache import PagePool, pool


def grow_one_column(cache_pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Grow the pool until Ctrl-C comes, when one column more is larger than before the call."""
    zeros, calls = pool.zeros, itertools.count()

    def interrupted(*args: Any) -> Tensor:
        if next(calls):
            raise KeyboardInterrupt
        return zeros(*args)

    with monkeypatch.context() as patched:
        patched.setattr(pool, "zeros", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache_pool.grow(cache_pool.num_pages + 40)
