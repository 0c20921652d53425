"""Bursts of tokens as a GPU decodes them, and a pool whose growth is interrupted."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.cache import PagePool, pool
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.steps import decode_burst
from tests.support.native import content
from tests.support.sessions import state, text_ids


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


# The static step beside the eager one.


def opened(engine: Runtime, count: int) -> list[CachedSequence]:
    """Sessions of different lengths, with a closed one between them."""
    # Enough for all: the static step takes its pages beforehand, and grown pools differ in ids.
    engine.cache.pool.grow(600)
    made = [engine.session() for _ in range(count + 1)]
    for index, session in enumerate(made):
        session.prefill({"input_ids": text_ids(5 + 11 * index, index)[None]})
    made.pop(min(1, count)).close()
    return made


def eager(
    engine: Runtime, sessions: list[CachedSequence], tokens: list[int], steps: int
) -> list[Any]:
    """Greedy decoding step by step, in torch; placeholders of media are left out."""
    engine.backends.cpu.switch_off()
    generated = []
    for _ in range(steps):
        logits = engine.decode(sessions, tokens)
        tokens = logits.index_fill(1, engine.never_chosen, -torch.inf).argmax(-1).tolist()
        generated.append(tokens)
    return [list(row) for row in zip(*generated, strict=True)]


def states(sessions: list[CachedSequence]) -> list[Any]:
    """All but the tables' bytes: the static step widens them beforehand."""
    found = [state(session) for session in sessions]
    return [(dataclasses.replace(memory, metadata_bytes=0), *rest) for memory, *rest in found]


def same(left: list[CachedSequence], right: list[CachedSequence]) -> None:
    assert states(left) == states(right)
    assert content(left[0].engine.cache) == content(right[0].engine.cache)
    for name, kept in right[0].engine.cache.states.items():  # one may have spare ones
        mine = left[0].engine.cache.states[name][: len(kept)]
        torch.testing.assert_close(mine, kept, rtol=1e-4, atol=1e-4)
    left[0].engine.cache.check()


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
