"""Decode speed of a policy under a budget, and the share of a step that its eviction takes."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from mmkv.engine.errors import InputError
from mmkv.engine.runtime import Runtime
from mmkv.eval.bench.decode_cpu import Mmkv
from mmkv.eval.measure.journal import Journal
from mmkv.eval.quality.methods import Cell, Comparison

STEPS, ROUNDS = 48, 3


class Speeds:
    """Measured speeds, from the journal or new ones.

    Args:
        context: tokens of the random prompt before the timed steps.
    """

    def __init__(self, comparison: Comparison, journal: Journal, context: int) -> None:
        self.comparison, self.journal, self.context = comparison, journal, context
        self._base: Runtime | None = None
        self._where = f"speed of {comparison.described()} {context}"

    def of(self, cell: Cell) -> dict[str, Any]:
        """Return ``tokens_per_second`` (median of rounds), ``eviction_share`` and ``path``.

        Raises:
            InputError: the model's context does not hold the prompt and the steps.
        """
        key = cell.key()
        done = [row for row in self.journal.rows("where", self._where) if row["cell"] == key]
        if done:
            return dict(done[-1]["record"])
        found = self._measure(cell)
        self.journal.add([{"where": self._where, "cell": key, "record": found}])
        return found

    def _measure(self, cell: Cell) -> dict[str, Any]:
        compared = self.comparison
        if self._base is None:
            self._base = Runtime.from_pretrained(
                compared.model, policy="full", dtype=compared.dtype, device=compared.device
            )
        base = self._base
        if self.context + STEPS > base.spec.max_position:
            raise InputError(
                f"--context {self.context} and {STEPS} steps pass position "
                f"{base.spec.max_position:,}, which the model was trained for; give a shorter one"
            )
        engine = cell.engine(base, compared.model)
        if cell.budget is not None:
            engine.budget = cell.budget_for(self.context)
        below = min([base.spec.vocab_size, *base.family.placeholder.values()])
        prompt = torch.randint(3, below, (1, self.context), generator=torch.manual_seed(0))
        method = Mmkv(engine, prompt)
        try:
            method.run(4)  # warms up
            seconds = [method.run(STEPS)[0] for _ in range(ROUNDS)]
            share = method.eviction_share(STEPS) if engine.policy.evicts else 0.0
        finally:
            for session in method.sessions:
                session.close()
        return {
            "tokens_per_second": STEPS / statistics.median(seconds),
            "eviction_share": share,
            "path": engine.decode_path,
        }
