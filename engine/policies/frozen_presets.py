"""EpiKV and its controls (arXiv 2606.26472): scores from a token's creation, with prompts kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policies.base import Group, Policy, Scorer
from mmkv.engine.policies.frozen import AttentionAndChange, EntryVariance, StreamChange
from mmkv.engine.policies.lag import PreviousChunk
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.preset_parameters import group
from mmkv.engine.policies.segments import SegmentedChange

# Of the paper's 32 layers, numbers 7 to 13 and 18 to 25.
_BAND_A, _BAND_B = (7 / 32, 13 / 32), (18 / 32, 25 / 32)


def prompt_kept(name: str, scoring: Scorer) -> Policy:
    """Make the policy that all of these are: prompts stay, and the newest of the budget."""
    return Policy(
        name,
        scoring,
        HeadAllocation(),
        protect_recent=128,
        recent_share=0.25,
        keeps_prompt=True,
    )


def _epikv(a: float, b: float, window: int, eps: float) -> Policy:
    return prompt_kept("epikv", StreamChange(a, b, window, True, eps))


def _hs_variance(a: float, b: float, window: int) -> Policy:
    return prompt_kept("hs-variance", StreamChange(a, b, window, False))


def _band_adaptive(window: int, eps: float) -> Policy:
    return prompt_kept("band-adaptive", StreamChange(_BAND_A, _BAND_B, window, True, eps))


def _kv_key(window: int) -> Policy:
    return prompt_kept("kv-key", EntryVariance("keys", window))


def _kv_val(window: int) -> Policy:
    return prompt_kept("kv-val", EntryVariance("values", window))


def _lag_kv(lag: int) -> Policy:
    return prompt_kept("lag-kv", PreviousChunk(lag))


def _attention_hs(a: float, window: int, eps: float, group: Group) -> Policy:
    return prompt_kept("attention-hs", AttentionAndChange(a, window, eps, group))


def _segments_hs(
    segment: int, r: int, e: int, t: int, a: float, b: float, window: int, eps: float
) -> Policy:
    scoring = SegmentedChange(a, b, window, True, eps, segment=segment, r=r, e=e, t=t)
    return prompt_kept("segments-hs", scoring)


_TITLE = "Epiphany-Aware KV Cache Eviction Without the Attention Matrix"
_A = Parameter(
    0.3125, "depth a, as a share of the layers", "layer 10 of 32, section 3.2", least=0, most=1
)
_B = Parameter(
    0.65625, "depth b, as a share of the layers", "layer 21 of 32, section 3.2", least=0, most=1
)
_WINDOW = Parameter(64, "tokens of the trailing window", "equation 2", least=1)
_EPS = Parameter(1e-6, "added to the standard deviation", least=0)


def _preset(make: Callable[..., Policy], **parameters: Parameter) -> Preset:
    return Preset(make, "arXiv 2606.26472", _TITLE, parameters)


FROZEN_PRESETS: dict[str, Preset] = {
    "epikv": _preset(_epikv, a=_A, b=_B, window=replace(_WINDOW, place="equation 3"), eps=_EPS),
    "hs-variance": _preset(_hs_variance, a=_A, b=_B, window=_WINDOW),
    "band-adaptive": _preset(_band_adaptive, window=_WINDOW, eps=_EPS),
    "kv-key": _preset(_kv_key, window=replace(_WINDOW, place="section 3.3")),
    "kv-val": _preset(_kv_val, window=replace(_WINDOW, place="section 3.3")),
    "lag-kv": _preset(_lag_kv, lag=Parameter(128, "tokens of a chunk", least=1)),
    "attention-hs": _preset(
        _attention_hs,
        a=_A,
        window=replace(_WINDOW, place="equation 3"),
        eps=_EPS,
        group=group(),
    ),
    "segments-hs": _preset(
        _segments_hs,
        segment=Parameter(128, "generated tokens of a segment", least=1),
        r=Parameter(64, "tokens that a segment of high entropy keeps", "appendix D", least=0),
        e=Parameter(32, "tokens that one between keeps", "appendix D", least=0),
        t=Parameter(8, "tokens that one of low entropy keeps", "appendix D", least=0),
        a=_A,
        b=_B,
        window=replace(_WINDOW, place="equation 3"),
        eps=_EPS,
    ),
}
