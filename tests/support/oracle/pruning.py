"""Pruning of visual tokens at prefill (FastV, arXiv 2403.06764; DivPrune, arXiv 2503.02175)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.oracle.eviction import Oracle


class Pruned(Oracle):
    """Keeps what a pruner drops out of sight from its layer on.

    All tokens run through all layers; a token that nobody sees changes nothing.
    """

    def __init__(
        self, hf: nn.Module, policy: str, *, prefill_chunk: int = 2048, **parameters: Any
    ) -> None:
        super().__init__(hf, None, "full", prefill_chunk=prefill_chunk)
        self.diverse = policy == "divprune"
        self.after = 0 if self.diverse else parameters.get("layer", 2)
        self.share = parameters.get("keep", 0.098 if self.diverse else 0.5)
        self.by = parameters.get("attention", "all")

    def _forward(
        self, hidden: Tensor, positions: Tensor, deepstack: list[Tensor], prompt: bool
    ) -> Tensor:
        self.embedded = hidden
        return super()._forward(hidden, positions, deepstack, prompt)

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        picture = getattr(self.hf.config, "image_token_id", None)
        if layer == self.after and self.prompt[-1] and picture is not None:
            ids = torch.cat(self.past["input_ids"], 1)[0, : self.seen]
            visual = (ids[-self.new :] == picture).nonzero().flatten()
            for index in self._dropped(visual.tolist()):
                if index != self.new - 1:
                    self.keep[layer:, :, self.seen - self.new + index] = False
        return super()._attention(layer, query, at, window)

    def _dropped(self, visual: list[int]) -> set[int]:
        count = min(max(round(self.share * len(visual)), 1), len(visual))
        if self.diverse:
            return set(visual) - set(self._diverse(visual, count))
        weights = self.weights[self.after - 1][..., -self.new :].mean(0)
        received = weights[-1] if self.by == "last" else weights.sum(0)
        order = sorted(visual, key=lambda index: (-float(received[index]), index))
        return set(order[count:])

    def _diverse(self, visual: list[int], count: int) -> list[int]:
        def distance(a: int, b: int) -> float:
            return 1 - float(torch.cosine_similarity(self.embedded[a], self.embedded[b], dim=0))

        chosen: list[int] = []
        while len(chosen) < count:
            rest = [index for index in visual if index not in chosen]
            among = chosen or visual
            near = [min([distance(a, b) for b in among if b != a] or [0.0]) for a in rest]
            chosen.append(rest[near.index(max(near))])
        return chosen
