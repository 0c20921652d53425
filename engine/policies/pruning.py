"""Policies that drop visual tokens from a prompt on its way through the layers, and evict nothing.

A pruner acts once for each prefill chunk. The tokens that it drops are not computed in the layers
behind it and have no entries there; a token's position stays its own. Text is never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import Policy, Pruner
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.scoring import Recency


def kept_count(share: float, tokens: int) -> int:
    """How many of ``tokens`` stay: at least one."""
    return min(max(round(share * tokens), 1), tokens)


@dataclass(frozen=True)
class LeastAttended:
    """Drops the visual tokens that receive the least attention (FastV, arXiv 2403.06764).

    Section 4: after layer K the R % of image tokens with the lowest average attention from all
    tokens go. ``attention="last"`` reads the last token's only, as later work on FastV does.
    """

    layer: int = 2
    share: float = 0.5
    attention: Literal["all", "last"] = "all"

    def keep(self, hidden: Tensor, received: Tensor | None) -> Tensor:
        """The ``share`` of the tokens with the most attention; of equal ones the earlier."""
        assert received is not None
        order = received.argsort(descending=True, stable=True)
        kept = torch.zeros_like(order, dtype=torch.bool)
        kept[order[: kept_count(self.share, order.numel())]] = True
        return kept


@dataclass(frozen=True)
class MostDiverse:
    """Keeps visual tokens that are far from each other (DivPrune, arXiv 2503.02175, section 3).

    The max-min diversity problem by its greedy algorithm: begin with the token whose nearest other
    is the farthest, and add the token that is the farthest from its nearest kept one. Distance is 1
    minus the cosine of the embeddings.
    """

    share: float = 0.098
    layer: int = 0
    attention: Literal[""] = ""

    def keep(self, hidden: Tensor, received: Tensor | None) -> Tensor:
        """The ``share`` of the tokens that the greedy algorithm picks; of equal ones the first."""
        unit = torch.nn.functional.normalize(hidden.float(), dim=-1)
        distance = 1 - unit @ unit.T
        distance.fill_diagonal_(torch.inf)
        nearest, kept = distance.amin(1), torch.zeros(len(hidden), dtype=torch.bool)
        kept = kept.to(hidden.device)
        nearest[nearest.isinf()] = 0  # a single token has no other
        for count in range(kept_count(self.share, len(hidden))):
            chosen = nearest.masked_fill(kept, -torch.inf).argmax()
            kept[chosen] = True
            nearest = torch.minimum(nearest, distance[chosen]) if count else distance[chosen]
        return kept


def check_pruner(pruner: Pruner, layers: int, windows: tuple[int | None, ...]) -> None:
    """Check that a model can be pruned so.

    Raises:
        PolicyError: it has too few layers, or sliding windows.
    """
    if not 0 <= pruner.layer < layers:
        raise PolicyError(
            f"the policy prunes after layer {pruner.layer}; this model has {layers} layers, give "
            f"0 to {layers - 1}"
        )
    if any(windows):
        raise PolicyError(
            "pruning of visual tokens is not made for sliding-window layers; choose another policy"
        )


def _fastv(layer: int, keep: float, attention: Literal["all", "last"]) -> Policy:
    return Policy("fastv", Recency(), None, pruner=LeastAttended(layer, keep, attention))


def _divprune(keep: float) -> Policy:
    return Policy("divprune", Recency(), None, pruner=MostDiverse(keep))


PRUNING_PRESETS: dict[str, Preset] = {
    "fastv": Preset(
        _fastv,
        "arXiv 2403.06764",
        "An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for "
        "Large Vision-Language Models",
        {
            "layer": Parameter(2, "layers that see all visual tokens", "title: K = 2", least=1),
            "keep": Parameter(
                0.5, "share of visual tokens that go on", "title: R = 50 %", least=0.0, most=1.0
            ),
            "attention": Parameter(
                "all",
                "whose attention counts: all tokens of the chunk, or the last",
                "section 4",
                choices=("all", "last"),
            ),
        },
    ),
    "divprune": Preset(
        _divprune,
        "arXiv 2503.02175",
        "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models",
        {"keep": Parameter(0.098, "share of visual tokens that stay", least=0.0, most=1.0)},
    ),
}
