"""Bursts of an engine's sessions on a graph runner; on a CPU its step runs as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.backends.cuda.kernels.sample import Draw
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
