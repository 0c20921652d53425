"""Presets with write gates."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import Group, Policy
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.preset_parameters import KERNEL, POOL, group
from mmkv.engine.policies.retention_presets import SCORE, Age, retention
from mmkv.engine.policies.scoring import Recency, WindowAttention
from mmkv.engine.policies.write_gate import Admission

PAPER_WINDOW = 256  # W_local of WG-KV, appendix E


def _wgkv(window: int, threshold: float) -> Policy:
    return Policy("wgkv", Recency(), None, admission=Admission(window, threshold))


def _with_dbtrimkv(
    window: int, threshold: float, lookahead: float, age: Age, write_gates: str
) -> Policy:
    admission = Admission(window, threshold, write_gates)
    scoring = retention(lookahead, age)
    return Policy("wgkv+dbtrimkv", scoring, GlobalAllocation(), admission=admission)


def _with_snapkv(
    window: int,
    threshold: float,
    observed: int,
    kernel: int,
    pool: Literal["avg", "max"],
    group: Group,
) -> Policy:
    admission = Admission(window, threshold, observed=not observed)
    scoring = WindowAttention(observed or window or PAPER_WINDOW, kernel, pool, group)
    return Policy(
        "wgkv+snapkv", scoring, HeadAllocation(), protect_recent=observed, admission=admission
    )


_TITLE = "KV Admission: Learning What to Write for Efficient Long-Context Inference"
_ADMISSION = {
    "window": Parameter(
        0,
        "newest tokens, which all are kept and seen; 0: as many as in the gates' training",
        "appendix E: 256",
        least=0,
    ),
    "threshold": Parameter(
        0.1, "tau: an older entry stays if g >= tau", "appendix F", least=0.0, most=1.0
    ),
}

WRITE_PRESETS: dict[str, Preset] = {
    "wgkv": Preset(_wgkv, "arXiv 2512.17452", _TITLE, _ADMISSION),
    "wgkv+dbtrimkv": Preset(
        _with_dbtrimkv,
        "arXiv 2512.17452",
        "WG-KV, with DBTrimKV (arXiv 2605.09649) among admitted entries",
        {
            **_ADMISSION,
            **SCORE,
            "write_gates": Parameter("", "the write gates; --gates has retention gates", path=True),
        },
    ),
    "wgkv+snapkv": Preset(
        _with_snapkv,
        "arXiv 2512.17452",
        "WG-KV, with SnapKV (arXiv 2404.14469) among admitted entries",
        {
            **_ADMISSION,
            "observed": Parameter(
                0,
                "newest queries, which observe and always stay; 0: as many as the window",
                "appendix K.1: 256, as the window",
                least=0,
            ),
            "kernel": replace(KERNEL, place="appendix K.1"),
            "pool": replace(POOL, default="max", place="appendix K.1"),
            "group": group("max", "appendix K.1"),
        },
    ),
}


def with_window(policy: Policy, window: int) -> Policy:
    """Return ``policy`` with a local window of this many tokens, which its budget protects."""
    admission, scoring = policy.admission, policy.scoring
    assert admission is not None
    if admission.observed and isinstance(scoring, WindowAttention):
        scoring = replace(scoring, window=window)
    return replace(
        policy,
        scoring=scoring,
        admission=replace(admission, window=window),
        protect_recent=max(policy.protect_recent, window) if policy.evicts else 0,
    )
