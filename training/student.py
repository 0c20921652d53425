"""The student: a frozen decoder with retention-gated attention, beside full attention.

It runs the engine's decoder over documents laid end to end. So every family of the engine can be
trained, and the gates see the same states in training as in decoding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.model.decoder import Decoder
from engine.model.gates import Gates
from engine.runtime import Runtime
from mmkv.measure.full_attention import Documents, FullAttention
from training.gated_attention import gated_attention


class GatedAttention(FullAttention):
    """Retention-gated attention within each document.

    Args:
        log_beta: ``[T, H]`` float32 of the layer that runs.
    """

    def __init__(
        self, engine: Runtime, documents: Documents, gating: str, log_beta: Tensor
    ) -> None:
        super().__init__(engine, documents)
        self.gating, self._log_beta = gating, log_beta.split(documents.lengths)

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :meth:`FullAttention.attend_document`."""
        gate = self._log_beta[index].T[None]
        return gated_attention(query, key, value, gate, scale=self.scale, gating=self.gating)


def student_states(
    engine: Runtime,
    documents: Documents,
    gates: Gates,
    gating: str = "log-bias",
    checkpointing: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the same pass with retention-gated attention (DBTrimKV, section 4; TRIM-KV, eq. 3).

    Args:
        gating: ``log-bias`` adds age times log_beta to the attention logits, ``logit-scale``
            multiplies them by beta to the age.
        checkpointing: recompute each layer in the backward pass instead of keeping it.

    Returns:
        states ``[T, d]`` before the final norm, and log_beta ``[T, L, H]`` float32.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)

    def run(index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x = decoder.gate_input(index, hidden)
        log_beta = gates.log_beta(index, x)
        step = GatedAttention(engine, documents, gating, log_beta)
        return decoder.layer(index, hidden, x, rope, step, documents.deepstack), log_beta

    hidden, log_beta = documents.hidden, []
    for index in range(engine.spec.num_layers):
        if checkpointing:
            hidden, gate = checkpoint(run, index, hidden, use_reentrant=False)
        else:
            hidden, gate = run(index, hidden)
        log_beta.append(gate)
    return hidden, torch.stack(log_beta, 1)
