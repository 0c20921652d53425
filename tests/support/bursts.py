"""Bursts of tokens as a GPU decodes them, and a pool whose growth is interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.cache import PagePool, pool
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.steps import decode_burst


class Bursts:
    def __init__(self, engine: Runtime) -> None:
        self.engine, self.runner = engine, GraphRunner(engine.model, engine.cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def decode(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> list[list[int]]:
        """As :meth:`Runtime.decode_many` on a GPU."""
        run = self.runner.decode
        return decode_burst(self.engine, run, sessions, token_ids, steps, stop, draws)


# A pool whose growth Ctrl-C interrupts.


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
