"""Our methods of the decode benchmark: graph or eager steps, with eviction or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mmkv.engine.backends.cuda import GraphRunner
from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.bench.synthetic_cache import rewind, synthetic_sessions
from mmkv.eval.measure.speed_model import StepBytes, entry_bytes, step_bytes
from mmkv.eval.measure.timing import wall

EAGER_STEPS = 8  # few, because it is slow
# Entries that a row may grow by before block tables and graphs are built again.
SPARE_COLUMNS = 1024


class Own:
    """Sessions of an engine, filled with random entries, that decode again and again.

    With a policy that evicts they are at their budget and stay there; without one they are cut
    back after each run.
    """

    def __init__(self, engine: Runtime, batch: int, context: int, skew: float, steps: int) -> None:
        self.engine, self.context, self.steps = engine, context, steps
        self.sessions: list[CachedSequence] = synthetic_sessions(
            engine, batch, context, skew, steps
        )
        longest = int(engine.cache.length.max())
        engine.cache._widen(
            (longest + max(steps, SPARE_COLUMNS)) // engine.cache.pool.page_size + 2
        )
        self.tokens = [batch_slot % engine.spec.vocab_size for batch_slot in range(batch)]

    def timed(self, decode: Callable[[], Any]) -> float:
        """Time one call that decodes, in seconds, and restore the sessions' lengths."""
        seconds = wall(decode, self.engine.device)
        if not self.engine.policy.evicts:
            for session in self.sessions:
                rewind(session, self.context)
        return seconds

    def graph(self, runner: GraphRunner, steps: int | None = None) -> float:
        """Time ``steps`` steps of the static path (a CUDA graph where CUDA is)."""
        count = steps or self.steps
        return self.timed(lambda: runner.decode(self.sessions, self.tokens, count))

    def graph_step(self, runner: GraphRunner) -> tuple[float, float]:
        """Time a step, in seconds: without what a call of ``decode`` costs once, and with it.

        The first is the slope between a short call and one of all steps.
        """
        few = max(1, self.steps // 4)
        short, long = self.graph(runner, few), self.graph(runner)
        return max(long - short, 1e-9) / max(self.steps - few, 1), long / self.steps

    def eager(self) -> float:
        """Time ``EAGER_STEPS`` steps of :meth:`Runtime.decode`, in torch."""

        def decode() -> None:
            token = self.tokens
            for _ in range(EAGER_STEPS):
                token = self.engine.decode(self.sessions, token).argmax(-1).tolist()

        return self.timed(decode)

    def step_bytes(self) -> StepBytes:
        """Count the bytes that a step in the middle of a run reads."""
        found = step_bytes(self.engine, self.sessions)
        if self.engine.policy.evicts:
            return found
        grown = len(self.sessions) * self.engine.spec.rows * self.steps // 2
        return StepBytes(found.weights, found.kv + grown * entry_bytes(self.engine), found.gates)

    def memory(self) -> dict[str, Any]:
        """Count physical bytes of the entries, and the bytes of the entries alone."""
        pool = self.engine.cache.pool
        pages = sum(self.engine.cache.held_pages(session.seq) for session in self.sessions)
        entries = sum(session.entries for session in self.sessions)
        length = self.engine.cache.length[[session.seq for session in self.sessions]]
        return {
            "entries": entries,
            "kv_bytes": pages * pool.kv_page_bytes,
            "metadata_bytes": pages * pool.metadata_page_bytes + self.engine.cache.table.nbytes,
            "physical_over_logical": pages * pool.page_size / entries,
            "longest_row": int(length.max()),
            "empty_rows": float((length == 0).float().mean()),
        }


def concerns_one_method(error: BaseException) -> bool:
    """Return whether only this method failed; otherwise the GPU is lost."""
    if isinstance(error, MmkvError | torch.OutOfMemoryError):
        return True
    lost = ("device-side assert", "illegal memory", "misaligned", "launch failure")
    return isinstance(error, RuntimeError) and not any(word in str(error) for word in lost)
