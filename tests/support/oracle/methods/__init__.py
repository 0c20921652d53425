"""Every policy in the oracle's own words, named as in docs/reference/policies.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.oracle.methods import (
    admission,
    attention,
    frozen,
    keys,
    redundancy,
    retention,
)
from tests.support.oracle.methods.base import Method
from tests.support.oracle.methods.retention import log_score

METHODS: dict[str, Callable[..., Method]] = {
    "full": retention.Full,
    "dbtrimkv": retention.GlobalRetention,
    "trimkv": retention.Retention,
    "balanced": retention.FlooredRetention,
    "streamingllm": retention.Streaming,
    "snapkv": attention.SnapKV,
    "h2o": attention.H2O,
    "tova": attention.Tova,
    "pyramidkv": attention.PyramidKV,
    "adakv": attention.AdaKV,
    "ada-pyramidkv": attention.AdaPyramidKV,
    "morphkv": attention.MorphKV,
    "rkv": redundancy.RKV,
    "gkv": redundancy.GKV,
    "keydiff": keys.KeyDiff,
    "knorm": keys.KNorm,
    "lagkv": keys.LagKV,
    "epikv": frozen.EpiKV,
    "hs-variance": frozen.HiddenVariance,
    "band-adaptive": frozen.BandAdaptive,
    "kv-key": frozen.StateVariance,
    "kv-val": frozen.ValueVariance,
    "lag-kv": frozen.CausalLag,
    "attention-hs": frozen.AttentionHidden,
    "segments-hs": frozen.SegmentHidden,
    "wgkv": admission.WriteGated,
    "wgkv+dbtrimkv": admission.WriteGatedRetention,
    "wgkv+snapkv": admission.WriteGatedSnapKV,
}


def make_method(name: str, lookahead: float, parameters: Mapping[str, Any]) -> Method:
    """The method ``name``; ``lookahead`` is that of dbtrimkv and balanced."""
    named = {key + "_" * (key == "lambda"): value for key, value in parameters.items()}
    if name in ("dbtrimkv", "balanced", "wgkv+dbtrimkv"):
        named.setdefault("lookahead", lookahead)
    return METHODS[name](**named)


__all__ = ["METHODS", "Method", "log_score", "make_method"]
