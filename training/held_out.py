"""Evaluate gates on held-out data: with real eviction in the engine, or with real admission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.model.gates import Gates, WriteGates
from mmkv.engine.policies import make_policy
from mmkv.engine.policies.base import admitted
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.full_attention import full_attention_states, lay_out
from mmkv.training.measure.teacher_forced import Answer, DialogueRun, compare_states, read
from mmkv.training.student import binary, write_gated_states


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
    held = sum(run.entries for run in runs)
    visual = sum(n for r in runs for name, n in r.by_modality.items() if name != "text")
    return {
        **_means([answer for run in runs for answer in run.answers]),
        "evicted": sum(r.evicted for r in runs),
        "visual_share": visual / max(held, 1),
    }


def _means(answers: Sequence[Answer]) -> dict[str, float]:
    tokens = sum(answer.tokens for answer in answers)
    return {
        "kl": sum(a.kl for a in answers) / tokens,
        "nll": sum(a.nll for a in answers) / tokens,
        "agreement": sum(a.agree for a in answers) / tokens,
        "exact": sum(a.right for a in answers) / len(answers),
        "answers": len(answers),
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

    @torch.inference_mode()
    def admit(self, gates: WriteGates, window: int, threshold: float) -> dict[str, float]:
        """Read every dialogue as it is decoded when write gates decide what stays.

        An entry that leaves the window of the newest tokens is gone unless ``g >= threshold``. A
        masked pass over the whole dialogue computes the same as decoding it with a cache: an entry
        is out of the window of every token that comes after its removal.

        Returns:
            What :func:`summary` returns, ``evicted`` left out, with ``admitted``, the share of all
            entries with ``g >= threshold``, and ``kept``, the share of all entries held at the
            dialogues' ends (admitted or in the window).
        """
        engine, answers = self.engine, list[Answer]()
        total, chosen, held, visual = 0, 0, 0, 0
        gates = gates.to(engine.device, engine.dtype)
        for inputs, labels in self.rows:
            documents = lay_out(engine, [inputs])
            full = full_attention_states(engine, documents)
            states, log_g = write_gated_states(
                engine, documents, gates, window, lambda log_g: binary(log_g, threshold)
            )
            answers += compare_states(engine.decoder, states, full, labels.to(engine.device))
            stays = admitted(log_g, threshold)
            chosen += int(stays.sum())
            stays[-window:] = True
            total, held = total + stays.numel(), held + int(stays.sum())
            visual += int(stays[documents.modality > 0].sum())
        return {
            **_means(answers),
            "admitted": chosen / total,
            "kept": held / total,
            "visual_share": visual / max(held, 1),
        }
