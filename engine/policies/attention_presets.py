"""Presets whose scores come from attention."""

from __future__ import annotations

from typing import Literal

from engine.policies.allocation import EvenLayerAllocation, HeadAllocation
from engine.policies.attention import AttentionMass, FusedAttention, NewestAttention
from engine.policies.base import Group, Policy
from engine.policies.preset import Parameter, Preset
from engine.policies.preset_parameters import KERNEL, POOL, WINDOW, group
from engine.policies.scoring import WindowAttention


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


ATTENTION_PRESETS: dict[str, Preset] = {
    "snapkv": Preset(
        _snapkv,
        "arXiv 2404.14469",
        "SnapKV: LLM Knows What You are Looking for Before Generation",
        {"window": WINDOW, "kernel": KERNEL, "pool": POOL, "group": group()},
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
    "morphkv": Preset(
        _morphkv,
        "arXiv 2503.00979",
        "Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs",
        {
            "window": Parameter(
                32,
                "newest queries, which observe and always stay",
                "runs of LongWriter and LongBench",
                least=1,
            ),
            "fusion": Parameter("sum", "fusion of the window's queries", choices=("sum", "max")),
            "group": group(),
        },
    ),
}
