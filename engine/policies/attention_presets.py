"""Presets whose scores come from attention."""

from __future__ import annotations

from typing import Literal

from mmkv.engine.policies.allocation import (
    EvenLayerAllocation,
    HeadAllocation,
    LayerAllocation,
    PyramidAllocation,
)
from mmkv.engine.policies.attention import AttentionMass, FusedAttention, NewestAttention
from mmkv.engine.policies.base import Group, Policy
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.preset_parameters import KERNEL, POOL, WINDOW, group
from mmkv.engine.policies.redundancy import AttentionAndRedundancy, GlobalAttention
from mmkv.engine.policies.scoring import WindowAttention


def _h2o(recent: float, group: Group) -> Policy:
    return Policy("h2o", AttentionMass(group), HeadAllocation(), recent_share=recent)


def _tova() -> Policy:
    return Policy("tova", NewestAttention(), EvenLayerAllocation())


def _snapkv(window: int, kernel: int, pool: Literal["avg", "max"], group: Group) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    return Policy("snapkv", scoring, HeadAllocation(), protect_recent=window)


def _morphkv(window: int, fusion: Literal["sum", "max"], group: Group) -> Policy:
    scoring = FusedAttention(window, fusion, group)
    return Policy("morphkv", scoring, HeadAllocation(), protect_recent=window)


def _rkv(window: int, lambda_: float, kernel: int, threshold: float) -> Policy:
    scoring = AttentionAndRedundancy(window, lambda_, kernel, threshold)
    return Policy("rkv", scoring, HeadAllocation(), protect_recent=window)


def _gkv(
    window: int,
    alpha: float,
    form: Literal["max", "mean", "sum"],
    redundancy: bool,
    lambda_: float,
    threshold: float,
    group: Group,
) -> Policy:
    scoring = GlobalAttention(window, alpha, form, redundancy, lambda_, threshold, group)
    return Policy("gkv", scoring, HeadAllocation(), protect_recent=window)


def _pyramidkv(
    beta: int, window: int, kernel: int, pool: Literal["avg", "max"], group: Group
) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    return Policy("pyramidkv", scoring, PyramidAllocation(window, beta), protect_recent=window)


def _adakv(
    floor: float, window: int, kernel: int, pool: Literal["avg", "max"], group: Group
) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    return Policy("adakv", scoring, LayerAllocation(floor), protect_recent=window)


def _ada_pyramidkv(
    beta: int, floor: float, window: int, kernel: int, pool: Literal["avg", "max"], group: Group
) -> Policy:
    scoring = WindowAttention(window, kernel, pool, group)
    allocation = LayerAllocation(floor, PyramidAllocation(window, beta))
    return Policy("ada-pyramidkv", scoring, allocation, protect_recent=window)


_BETA = Parameter(
    20, "steepness: the top layer's share is 1 / beta of the mean; 1: level", "section 5", least=1
)
_FLOOR = Parameter(
    0.2, "part of an equal share that a head is sure of", "its safeguard", least=0, most=1
)
_WINDOW_ATTENTION = {"window": WINDOW, "kernel": KERNEL, "pool": POOL, "group": group()}
_OBSERVERS = "newest queries, which observe and always stay"
_ALIKE = "cosine above which two keys are similar"

ATTENTION_PRESETS: dict[str, Preset] = {
    "snapkv": Preset(
        _snapkv,
        "arXiv 2404.14469",
        "SnapKV: LLM Knows What You are Looking for Before Generation",
        _WINDOW_ATTENTION,
    ),
    "h2o": Preset(
        _h2o,
        "arXiv 2306.14048",
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
        {
            "recent": Parameter(
                0.5, "share of the budget for the newest tokens", "section 5", least=0, most=1
            ),
            "group": group(),
        },
    ),
    "tova": Preset(_tova, "arXiv 2401.06104", "Transformers are Multi-State RNNs"),
    "pyramidkv": Preset(
        _pyramidkv,
        "arXiv 2406.02069",
        "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
        {"beta": _BETA, **_WINDOW_ATTENTION},
    ),
    "adakv": Preset(
        _adakv,
        "arXiv 2407.11550",
        "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM "
        "Inference",
        {"floor": _FLOOR, **_WINDOW_ATTENTION},
    ),
    "ada-pyramidkv": Preset(
        _ada_pyramidkv,
        "arXiv 2407.11550",
        "Ada-KV over PyramidKV (arXiv 2406.02069)",
        {"beta": _BETA, "floor": _FLOOR, **_WINDOW_ATTENTION},
    ),
    "morphkv": Preset(
        _morphkv,
        "arXiv 2503.00979",
        "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
        {
            "window": Parameter(
                32,
                _OBSERVERS,
                "runs of LongWriter and LongBench",
                least=1,
            ),
            "fusion": Parameter("sum", "fusion of the window's queries", choices=("sum", "max")),
            "group": group(),
        },
    ),
    "rkv": Preset(
        _rkv,
        "arXiv 2505.24133",
        "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models",
        {
            "window": Parameter(8, _OBSERVERS, "section 4.1", least=1),
            "lambda": Parameter(
                0.1, "weight of attention; redundancy has the rest", "section 4.1", least=0, most=1
            ),
            "kernel": Parameter(
                7, "positions that are pooled together, an odd number", "released code", least=1
            ),
            "threshold": Parameter(0.5, _ALIKE, "released code", least=0, most=1),
        },
    ),
    "gkv": Preset(
        _gkv,
        "arXiv 2512.00504",
        "G-KV: Decoding-Time KV Cache Eviction with Global Attention",
        {
            "window": Parameter(16, _OBSERVERS, "section 7.2", least=1),
            "alpha": Parameter(
                0.8,
                "what is left of the score at the next eviction",
                "section 7.3",
                least=0,
                most=1,
            ),
            "form": Parameter(
                "max",
                "how old and new scores are joined",
                "equation 3; mean: 4, sum: 5",
                choices=("max", "mean", "sum"),
            ),
            "redundancy": Parameter(True, "whether redundancy lowers scores", "appendix D"),
            "lambda": Parameter(
                0.7, "weight of attention; redundancy has the rest", "section 7.3", least=0, most=1
            ),
            "threshold": Parameter(0.5, _ALIKE, "code of R-KV", least=0, most=1),
            "group": group("max", "section 3"),
        },
    ),
}
