"""Evaluate gates on held-out data with real eviction in the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from engine.model.gates import Gates
from engine.policies import make_policy
from engine.runtime import Runtime
from mmkv.measure.teacher_forced import DialogueRun, read


def engine_with(engine: Runtime, gates: Gates | None, policy: str, budget: float) -> Runtime:
    """Return a second engine over the same weights, with other gates and another policy."""
    return Runtime(
        engine.family,
        engine.spec,
        engine.decoder.weights,
        gates,
        make_policy(policy),
        budget,
        prefill_chunk=engine.prefill_chunk,
    )


def summary(runs: Sequence[DialogueRun]) -> dict[str, float]:
    """Return means over answers and answer tokens.

    Returns:
        ``kl``, ``nll`` and ``agreement`` per token, ``exact`` share of answers, ``evicted``
        entries, ``visual_share`` of the entries held at the end.
    """
    answers = [answer for run in runs for answer in run.answers]
    tokens = sum(answer.tokens for answer in answers)
    held = sum(run.entries for run in runs)
    visual = sum(n for r in runs for name, n in r.by_modality.items() if name != "text")
    return {
        "kl": sum(a.kl for a in answers) / tokens,
        "nll": sum(a.nll for a in answers) / tokens,
        "agreement": sum(a.agree for a in answers) / tokens,
        "exact": sum(a.right for a in answers) / len(answers),
        "answers": len(answers),
        "evicted": sum(r.evicted for r in runs),
        "visual_share": visual / max(held, 1),
    }


class HeldOutData:
    """Held-out dialogues, run for every set of gates.

    What the full cache predicts is computed anew each time: kept, it would be a vocabulary's worth
    of logits for every answer token.

    Args:
        examples: per dialogue what the processor returns, and ``labels``.
    """

    def __init__(self, engine: Runtime, examples: Sequence[Mapping[str, Any]]) -> None:
        self.engine = engine
        self.rows: list[tuple[dict[str, Any], Tensor]] = []
        for example in examples:
            labels = example["labels"].flatten().clone()
            labels[0] = -100  # nothing stands before a document's first token
            self.rows.append(({k: v for k, v in example.items() if k != "labels"}, labels))

    def read(self, gates: Gates | None, policy: str, budget: float) -> list[DialogueRun]:
        """Feed every dialogue under ``policy`` and M = ``budget``."""
        engine = engine_with(self.engine, gates, policy, budget)
        return [read(engine, inputs, labels) for inputs, labels in self.rows]
