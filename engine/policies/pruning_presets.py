"""Presets that prune visual tokens at prefill and evict nothing afterwards."""

from __future__ import annotations

from typing import Literal

from mmkv.engine.policies.base import Policy
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.pruning import LeastAttended, MostDiverse
from mmkv.engine.policies.scoring import Recency


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
