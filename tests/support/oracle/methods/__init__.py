"""Every policy in the oracle's own words, named as in docs/reference/policies.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.oracle.methods.retention import Full, GlobalRetention, Retention, FlooredRetention, Streaming
from tests.support.oracle.methods.attention import SnapKV, H2O, Tova, PyramidKV, AdaKV, AdaPyramidKV, MorphKV
from tests.support.oracle.methods.redundancy import RKV, GKV
from tests.support.oracle.methods.keys import KeyDiff, KNorm, LagKV
from tests.support.oracle.methods.frozen import EpiKV, HiddenVariance, BandAdaptive, StateVariance, ValueVariance, CausalLag, AttentionHidden, SegmentHidden
from tests.support.oracle.methods.admission import WriteGated, WriteGatedRetention, WriteGatedSnapKV
from tests.support.oracle.methods.base import Method
from tests.support.oracle.methods.retention import log_score

METHODS: dict[str, Callable[..., Method]] = {
    "full": Full,
    "dbtrimkv": GlobalRetention,
    "trimkv": Retention,
    "balanced": FlooredRetention,
    "streamingllm": Streaming,
    "snapkv": SnapKV,
    "h2o": H2O,
    "tova": Tova,
    "pyramidkv": PyramidKV,
    "adakv": AdaKV,
    "ada-pyramidkv": AdaPyramidKV,
    "morphkv": MorphKV,
    "rkv": RKV,
    "gkv": GKV,
    "keydiff": KeyDiff,
    "knorm": KNorm,
    "lagkv": LagKV,
    "epikv": EpiKV,
    "hs-variance": HiddenVariance,
    "band-adaptive": BandAdaptive,
    "kv-key": StateVariance,
    "kv-val": ValueVariance,
    "lag-kv": CausalLag,
    "attention-hs": AttentionHidden,
    "segments-hs": SegmentHidden,
    "wgkv": WriteGated,
    "wgkv+dbtrimkv": WriteGatedRetention,
    "wgkv+snapkv": WriteGatedSnapKV,
}


def make_method(name: str, lookahead: float, parameters: Mapping[str, Any]) -> Method:
    """The method ``name``; ``lookahead`` is that of dbtrimkv and balanced."""
    named = {key + "_" * (key == "lambda"): value for key, value in parameters.items()}
    if name in ("dbtrimkv", "balanced", "wgkv+dbtrimkv"):
        named.setdefault("lookahead", lookahead)
    return METHODS[name](**named)


__all__ = ["METHODS", "Method", "log_score", "make_method"]
