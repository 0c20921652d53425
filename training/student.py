"""The student: a frozen decoder with gated attention, beside full attention.

It runs the engine's decoder over documents laid end to end. So every family of the engine can be
trained, and the gates see the same states in training as in decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates, WriteGates
from mmkv.engine.policies.base import admitted
from mmkv.engine.runtime import Runtime
from mmkv.training.gated_attention import gated_attention
from mmkv.training.measure.full_attention import Documents, FullAttention


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


class WriteGatedAttention(FullAttention):
    """Attention within each document in which entries past the window count by their gates.

    Attributes:
        bias: ``[T, H]`` float32, what the logits of an entry get once it has left the window;
            set before :meth:`attend`.
    """

    bias: Tensor

    def __init__(self, engine: Runtime, documents: Documents, window: int) -> None:
        super().__init__(engine, documents)
        self.window = window

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :meth:`FullAttention.attend_document`."""
        bias = self.bias.split(self.documents.lengths)[index].T[None]
        return gated_attention(
            query, key, value, bias, scale=self.scale, gating="write", window=self.window
        )


def floored(log_g: Tensor, floor: float = 1e-3) -> Tensor:
    """Return the bias of training, ``log max(g, floor)``.

    WG-KV (arXiv 2512.17452, section 3.2) writes ``log(m + eps)``; the authors' released code has a
    floor of 1e-3 on g, so that a gate of 1 changes nothing.
    """
    return log_g.clamp(min=math.log(floor))


def binary(log_g: Tensor, threshold: float) -> Tensor:
    """Return the bias of inference: 0 for entries with ``g >= threshold``, -inf for the others."""
    return torch.zeros_like(log_g).masked_fill(~admitted(log_g, threshold), -math.inf)


def write_gated_states(
    engine: Runtime,
    documents: Documents,
    gates: WriteGates,
    window: int,
    bias_of: Callable[[Tensor], Tensor] = floored,
    checkpointing: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the same pass with write-gated attention (WG-KV, arXiv 2512.17452, section 3.2).

    Args:
        window: W_local, tokens that every entry is seen in full for.
        bias_of: log g ``[T, H]`` to what is added to the logits past the window. With
            :func:`binary` the pass is what decoding with admission computes.
        checkpointing: recompute each layer in the backward pass instead of keeping it.

    Returns:
        states ``[T, d]`` before the final norm, and log g ``[T, L, H]`` float32.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)

    def run(index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        step = WriteGatedAttention(engine, documents, window)

        def read(key_pre: Tensor, key_post: Tensor) -> None:
            found.append(gates.log_g(index, key_pre, key_post))
            step.bias = bias_of(found[0])

        x = decoder.gate_input(index, hidden)
        hidden = decoder.layer(index, hidden, x, rope, step, documents.deepstack, read)
        return hidden, found[0]

    hidden, log_g = documents.hidden, []
    for index in range(engine.spec.num_layers):
        if checkpointing:
            hidden, gate = checkpoint(run, index, hidden, use_reentrant=False)
        else:
            hidden, gate = run(index, hidden)
        log_g.append(gate)
    return hidden, torch.stack(log_g, 1)
