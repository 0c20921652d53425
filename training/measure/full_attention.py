"""Compute full causal attention over whole documents without a cache: the reference.

It runs the engine's decoder over documents laid end to end, so every family of the engine has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.families.base import Turn
from mmkv.engine.runtime import Runtime


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


def lay_out(engine: Runtime, inputs: Sequence[Mapping[str, Any]]) -> Documents:
    """Run the vision side of every document and lay them end to end.

    Args:
        inputs: per document what the processor returns (``input_ids [1, t]``, pixels, ...).

    Raises:
        InputError: for a malformed document.
    """
    return lay_out_turns(engine, [engine.family.turn(row, 0, engine.device) for row in inputs])


def lay_out_turns(engine: Runtime, turns: Sequence[Turn]) -> Documents:
    """Return :func:`lay_out` of documents already built as turns."""
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
        torch.cat(hidden),
        torch.cat(positions, -1),
        deepstack,
        torch.cat(start),
        torch.cat(modality),
        lengths,
    )


class FullAttention:
    """The attention of a pass without a cache: causal within each document.

    A subclass may weigh the entries of a document otherwise (:meth:`attend_document`).
    """

    def __init__(self, engine: Runtime, documents: Documents) -> None:
        self.documents = documents
        self.scale = engine.spec.head_dim**-0.5

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`mmkv.engine.model.decoder.StepAttention`."""
        lengths = self.documents.lengths
        parts = []
        for index, (q, k, v) in enumerate(
            zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        ):
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = self.attend_document(index, q, k, v)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(parts)

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend within document ``index``: ``[1, Hq, t, D]`` and ``[1, H, t, D]`` each.

        Returns:
            ``[1, Hq, t, D]``.
        """
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )


@torch.no_grad()
def full_attention_states(engine: Runtime, documents: Documents) -> Tensor:
    """Compute the states ``[T, d]`` before the final norm under full attention."""
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    rope = engine.rope.at(documents.positions)
    step = FullAttention(engine, documents)
    return decoder.forward(documents.hidden, rope, step, documents.deepstack)[0]
