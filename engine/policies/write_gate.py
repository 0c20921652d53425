"""What a token sees under a write gate, and the presets with write gates.

Source: WG-KV, arXiv 2512.17452, sections 3.2 and 4.2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from torch import Tensor

from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import Admission, Group, Policy, admitted
from mmkv.engine.policies.preset import KERNEL, POOL, Parameter, Preset, group
from mmkv.engine.policies.scoring import SCORE, Age, Recency, WindowAttention, retention


def visible(
    query: Tensor, key: Tensor, log_g: Tensor, window: int, threshold: float = 0.1
) -> Tensor:
    """Return the mask of a pass under a write gate (section 4.2).

    Token i sees entry j when ``i >= j`` and either ``i - j < window`` or ``g_j >= threshold``. It
    is the same for prefill in chunks and for decoding, because an entry that was not admitted is
    out of every later token's window.

    Args:
        query: int64 ``[Q]``, positions i of the tokens in their document; key: int64 ``[N]``,
            positions j of the entries.
        log_g: float32 ``[..., N]`` of the entries.
        window: W_local, tokens that every entry stays visible for, its own included.

    Returns:
        bool ``[..., Q, N]``.
    """
    age = query[:, None] - key
    return (age >= 0) & ((age < window) | admitted(log_g, threshold)[..., None, :])


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
