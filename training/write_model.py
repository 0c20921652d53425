"""One training step of write gates, as a torch module that holds the gates only.

Source: WG-KV, arXiv 2512.17452, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkv.engine.policies.base import admitted
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.full_attention import full_attention_states, lay_out
from mmkv.training.model import inputs_of
from mmkv.training.student import write_gated_states
from mmkv.training.trainable import TrainableWriteGates


@dataclass(frozen=True)
class WriteObjective:
    """The loss: its terms, and what the log lines count as admitted.

    Attributes:
        sparsity: lambda, weight of the sparsity term.
        window: W_local, tokens that every entry is seen in full for.
        threshold: tau, the gate from which an entry is admitted.
    """

    sparsity: float = 0.04
    window: int = 256
    threshold: float = 0.1


class WriteGateModel(nn.Module):
    """A module whose parameters are the write gates; the frozen backbone stands outside.

    Args:
        checkpointing: recompute layers in the backward pass.
    """

    parts = ("distill", "sparsity", "gate", "admitted", "admitted_least", "admitted_most")

    def __init__(
        self,
        engine: Runtime,
        gates: TrainableWriteGates,
        objective: WriteObjective,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.gates = gates
        self.engine, self.objective, self.checkpointing = engine, objective, checkpointing

    def forward(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return loss and its parts over a batch of documents.

        Args:
            examples: per document what the processor returns; labels are not looked at.

        Returns:
            float32 scalars: ``loss`` and, without gradient, those named in :attr:`parts`:
            ``distill`` and ``sparsity`` are the two terms, ``gate`` the mean of g, ``admitted``
            the share of entries with g at the threshold or above, and ``admitted_least`` and
            ``admitted_most`` that share in the (layer, KV head) with the fewest and the most.
        """
        engine, goal = self.engine, self.objective
        documents = lay_out(engine, [inputs_of(example) for example in examples])
        gates = self.gates.gates().to(engine.device, engine.dtype)
        teacher = full_attention_states(engine, documents)
        student, log_g = write_gated_states(
            engine, documents, gates, goal.window, checkpointing=self.checkpointing
        )
        distill = distillation_loss(engine, student, teacher)
        sparsity = sparsity_loss(log_g, documents.lengths, goal.window)
        chosen = admitted(log_g.detach(), goal.threshold).float().mean(0)
        parts = {
            "distill": distill,
            "sparsity": sparsity,
            "gate": log_g.exp().mean(),
            "admitted": chosen.mean(),
            "admitted_least": chosen.min(),
            "admitted_most": chosen.max(),
        }
        loss = distill + goal.sparsity * sparsity
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}


def distillation_loss(engine: Runtime, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the last hidden states, after the final norm.

    The paper says "hidden states of the final layer"; after the norm is where the authors' released
    code takes them.

    Args:
        student, teacher: states ``[T, d]`` before the final norm.
    """
    gain = engine.decoder.weights.norm.float()
    ours, theirs = (
        F.rms_norm(x.float(), gain.shape, gain, engine.spec.rms_eps) for x in (student, teacher)
    )
    return F.mse_loss(ours, theirs)


def sparsity_loss(log_g: Tensor, lengths: Sequence[int], window: int) -> Tensor:
    """Return the mean over tokens, layers and heads of ``w_s (g + g (1 - g))``.

    ``w_s = 1 - min(1, window / (T - s))`` for token s, counted from 0, of a document of T tokens:
    an entry costs by the share of its time in which it is past the window. The paper has no such
    weight; the authors' released code has it.

    Args:
        log_g: ``[T, L, H]`` of documents laid end to end; lengths: of each document.
    """
    left = torch.cat([torch.arange(n, 0, -1, device=log_g.device) for n in lengths])
    weight = 1 - (window / left).clamp(max=1)
    g = log_g.exp()
    return (weight[:, None, None] * (g + g * (1 - g))).mean()
