"""Presets whose scores come from keys and values."""

from __future__ import annotations

from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policies.base import Policy
from mmkv.engine.policies.keys import KeyDifference, KeyNorm
from mmkv.engine.policies.lag import NextChunk
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.preset_parameters import RECENT


def _keydiff(recent: int) -> Policy:
    return Policy("keydiff", KeyDifference(), HeadAllocation(), protect_recent=recent)


def _knorm(recent: int) -> Policy:
    return Policy("knorm", KeyNorm(), HeadAllocation(), protect_recent=recent)


def _lagkv(sinks: int, lag: int) -> Policy:
    return Policy("lagkv", NextChunk(sinks, lag), HeadAllocation(), protect_first=sinks)


KEY_PRESETS: dict[str, Preset] = {
    "keydiff": Preset(
        _keydiff,
        "arXiv 2504.15364",
        "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference",
        {"recent": RECENT},
    ),
    "knorm": Preset(
        _knorm,
        "arXiv 2406.11430",
        "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
        {"recent": RECENT},
    ),
    "lagkv": Preset(
        _lagkv,
        "arXiv 2504.04704",
        "LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important",
        {
            "sinks": Parameter(4, "first tokens, which always stay", "kvpress", least=0),
            "lag": Parameter(128, "tokens of a chunk", "kvpress", least=1),
        },
    ),
}
