"""One training step of the gates, as a torch module that holds the gates only."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.product import plain
from mmkv.engine.runtime import Runtime
from mmkv.training.capacity import (
    capacity_loss,
    retained_counts,
    retained_total,
    retained_total_grouped,
)
from mmkv.training.losses import quality_losses
from mmkv.training.measure.full_attention import full_attention_states, lay_out
from mmkv.training.student import student_states
from mmkv.training.trainable import TrainableGates

PARTS = (
    "kl",
    "ntp",
    "capacity",
    "kept",
    "kept_least",
    "kept_most",
    "visual_share",
    "agreement",
)


@dataclass(frozen=True)
class Objective:
    """The loss: its terms and weights.

    Attributes:
        kl, ntp: weights of the two quality terms.
        reverse: KL(student || teacher) instead of KL(teacher || student).
        capacity: lambda, weight of the capacity term.
        budget: M, mean entries per (layer, KV head).
        scope: ``global`` bounds the sum over layers and heads, ``head`` every head alone.
        normaliser: see :func:`mmkv.training.capacity.capacity_loss`.
        gating: see :func:`mmkv.training.student.student_states`.
        rates: 0 for the exact count, else the number of decay rates of its approximation.
    """

    kl: float = 1.0
    ntp: float = 1.0
    reverse: bool = False
    capacity: float = 1.0
    budget: float = 256.0
    scope: str = "global"
    normaliser: str = "relative"
    gating: str = "log-bias"
    rates: int = 0


class DistillModel(nn.Module):
    """A module whose parameters are the gates; the frozen backbone stands outside.

    Args:
        checkpointing: recompute layers in the backward pass.
    """

    parts = PARTS

    def __init__(
        self,
        engine: Runtime,
        gates: TrainableGates,
        objective: Objective,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.gates = gates
        self.engine, self.objective, self.checkpointing = engine, objective, checkpointing

    def forward(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return loss and its parts over a batch of documents.

        Args:
            examples: per document what the processor returns, and ``labels [t]``.

        Returns:
            float32 scalars: ``loss`` and, without gradient, those named in :data:`PARTS`:
            ``kept`` is the mean of S_t / (L H), the soft count of entries per head; at the end
            of the documents, ``kept_least`` and ``kept_most`` are that of the heads with the
            fewest and the most, and ``visual_share`` the share of visual entries.
        """
        engine, goal = self.engine, self.objective
        documents = lay_out(engine, [inputs_of(example) for example in examples])
        labels = torch.cat([_labels(example) for example in examples]).to(engine.device)
        gates = self.gates.gates().to(engine.device, engine.dtype)
        teacher = full_attention_states(engine, documents)
        student, log_beta = student_states(
            engine, documents, gates, goal.gating, self.checkpointing
        )
        decoder = Decoder(engine.spec, engine.decoder.weights, None)
        quality = quality_losses(decoder, student, teacher, labels, goal.reverse)
        rows = log_beta.flatten(1).T.contiguous()
        capacity, kept = self._capacity(rows, documents.start)
        loss = goal.kl * quality.kl + goal.ntp * quality.ntp + goal.capacity * capacity
        at_end = weights_at_end(rows, documents.start)
        by_head = at_end.sum(1) / len(documents.lengths)
        parts = {
            "kl": quality.kl,
            "ntp": quality.ntp,
            "capacity": capacity,
            "kept": kept,
            "kept_least": by_head.min(),
            "kept_most": by_head.max(),
            "visual_share": at_end[:, documents.modality > 0].sum() / at_end.sum(),
            "agreement": quality.agreement,
        }
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}

    def _capacity(self, rows: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
        goal, count = self.objective, rows.shape[0]
        if goal.scope == "head":
            counts = retained_counts(rows, start)
            each = capacity_loss(counts, goal.budget, goal.normaliser, document_start=start)
            return each, counts.detach().mean()
        if goal.rates:
            total = retained_total_grouped(rows, start, goal.rates)
        else:
            total = retained_total(rows, start)
        budget = goal.budget * count
        cap = capacity_loss(total, budget, goal.normaliser, rows=count, document_start=start)
        return cap, total.detach().mean() / count


@torch.no_grad()
def weights_at_end(rows: Tensor, start: Tensor) -> Tensor:
    """Return what each entry still weighs at the last token of its document, ``beta^(end - i)``.

    Args:
        rows: log_beta ``[R, T]``; start: int64 ``[T]``, first token of each token's document.

    Returns:
        ``[R, T]``.
    """
    step = torch.arange(rows.shape[1], device=rows.device)
    last = torch.cat([step[1:][start[1:] == step[1:]] - 1, step[-1:]])
    ends = last[torch.searchsorted(last, step)]
    return torch.exp((ends - step) * rows)


def backbone_digest(engine: Runtime) -> str:
    """Return SHA-256 over every weight, the vision side's too: equal before and after training."""
    weights, digest = engine.decoder.weights, hashlib.sha256()
    tensors = [plain(weights.embed), weights.norm, plain(weights.head)]
    tensors += [plain(t) for x in weights.layers for t in vars(x).values() if t is not None]
    # What the decoder has not taken out.
    tensors += [t for t in engine.family.hf.parameters() if not t.is_meta]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def inputs_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the processor returned: an example without its labels."""
    return {name: value for name, value in example.items() if name != "labels"}


def _labels(example: Mapping[str, Any]) -> Tensor:
    labels = example["labels"].flatten().clone()
    labels[0] = -100  # nothing stands before a document's first token
    return labels
