"""Student and teacher: one frozen decoder, with and without retention-gated attention.

Both run the engine's own decoder over documents laid end to end, so a family that the engine reads
can be trained, and what the gates see in training is what they see while decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from engine.decoder import Decoder
from engine.families.base import Turn
from engine.gates import Gates
from engine.runtime import Engine
from training.gated_attention import gated_attention


@dataclass(frozen=True)
class Documents:
    """Documents laid end to end, ready for the decoder; T tokens in all.

    Attributes:
        hidden: ``[T, d]`` embeddings, visual features in their places.
        positions: int64 ``[A, T]`` rope positions, from 0 in each document.
        deepstack: per layer from the first: token indices ``[V]``, features ``[V, d]``.
        start: int64 ``[T]``, index of the first token of each token's document.
        modality: uint8 ``[T]``: 0 text, 1 image, 2 video.
        lengths: tokens of each document.
    """

    hidden: Tensor
    positions: Tensor
    deepstack: tuple[tuple[Tensor, Tensor], ...]
    start: Tensor
    modality: Tensor
    lengths: list[int]


def lay_out(engine: Engine, inputs: Sequence[Mapping[str, Any]]) -> Documents:
    """Run the vision side of every document and lay them end to end.

    Args:
        inputs: per document what the processor returns (``input_ids [1, t]``, pixels, ...).

    Raises:
        InputError: for a malformed document.
    """
    return lay_out_turns(engine, [engine.family.turn(row, 0, engine.device) for row in inputs])


def lay_out_turns(engine: Engine, turns: Sequence[Turn]) -> Documents:
    """:func:`lay_out` of documents already built as turns."""
    hidden, positions, start, modality, lengths = [], [], [], [], []
    levels: dict[int, list[tuple[Tensor, Tensor]]] = {}
    first = 0
    for turn in turns:
        states, deepstack = engine.decoder.embed_turn(turn)
        for level, (where, features) in enumerate(deepstack):
            levels.setdefault(level, []).append((where + first, features.clone()))
        length = turn.token_ids.numel()
        # A clone made outside inference mode may take part in a graph.
        hidden.append(states.clone())
        positions.append(turn.positions.clone())
        start.append(torch.full((length,), first, device=engine.device))
        modality.append(turn.modality.clone())
        lengths.append(length)
        first += length
    deepstack = tuple(
        (torch.cat([w for w, _ in levels[i]]), torch.cat([f for _, f in levels[i]]))
        for i in range(len(levels))
    )
    return Documents(
        torch.cat(hidden), torch.cat(positions, -1), deepstack, torch.cat(start),
        torch.cat(modality), lengths,
    )  # fmt: skip


class TrainingPass:
    """The attention side of a pass without a cache: causal within each document.

    Attributes:
        log_beta: ``[T, H]`` float32 of the layer now running, or None for the teacher.
    """

    def __init__(self, engine: Engine, documents: Documents, gating: str) -> None:
        self.documents, self.gating = documents, gating
        self.scale = engine.spec.head_dim**-0.5
        self.log_beta: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`engine.decoder.StepAttention`."""
        gate = None if self.log_beta is None else self.log_beta.split(self.documents.lengths)
        parts = []
        for index, (q, k, v) in enumerate(
            zip(*(x.split(self.documents.lengths) for x in (query, key, value)), strict=True)
        ):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            if gate is None:
                out = F.scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.scale, enable_gqa=True
                )
            else:
                out = gated_attention(
                    q, k, v, gate[index].T[None], scale=self.scale, gating=self.gating
                )
            parts.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)


@torch.no_grad()
def teacher_states(engine: Engine, documents: Documents) -> Tensor:
    """States ``[T, d]`` before the final norm, with plain attention."""
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)
    step = TrainingPass(engine, documents, "log-bias")
    return decoder.forward(documents.hidden, rope, step, documents.deepstack)[0]


def student_states(
    engine: Engine,
    documents: Documents,
    gates: Gates,
    gating: str = "log-bias",
    checkpointing: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same pass with retention-gated attention (001, section 4; 000, eq. 3).

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
        step = TrainingPass(engine, documents, gating)
        x = decoder.gate_input(index, hidden)
        step.log_beta = gates.log_beta(index, x)
        states = decoder.layer(index, hidden, x, rope, step, documents.deepstack)
        return states, step.log_beta

    hidden, log_beta = documents.hidden, []
    for index in range(engine.spec.num_layers):
        if checkpointing:
            hidden, gate = checkpoint(run, index, hidden, use_reentrant=False)
        else:
            hidden, gate = run(index, hidden)
        log_beta.append(gate)
    return hidden, torch.stack(log_beta, 1)
