"""The registry: one row per published method (design section 6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from engine.errors import PolicyError
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import CacheView, Policy
from engine.policies.budget import Budget
from engine.policies.scoring import Recency, Retention, WindowAttention

__all__ = ["PRESETS", "Budget", "CacheView", "Policy", "make_policy"]

PRESETS: dict[str, Callable[[float], Policy]] = {
    "full": lambda n: Policy("full", Recency(), None, source="baseline"),
    "dbtrimkv": lambda n: Policy(
        "dbtrimkv", Retention(n), GlobalAllocation(), source="arXiv 2605.09649"
    ),
    "trimkv": lambda n: Policy("trimkv", Retention(1), HeadAllocation(), source="arXiv 2512.03324"),
    "streamingllm": lambda n: Policy(
        "streamingllm",
        Recency(),
        HeadAllocation(),
        protect_first=4,
        source="arXiv 2309.17453",
    ),
    "snapkv": lambda n: Policy(
        "snapkv",
        WindowAttention(window=16, kernel=5),
        HeadAllocation(),
        protect_recent=16,
        source="arXiv 2404.14469",
    ),
}


def make_policy(name: str, lookahead: float = 2) -> Policy:
    """The preset ``name``; ``lookahead`` (n = T - t of 001, equation 9) is read by dbtrimkv only.

    ``dbtrimkv+N`` and ``trimkv+N`` also keep the newest N tokens of every row, whatever their
    scores: what the papers leave to the gates, for streams longer than gates were trained for.

    Raises:
        PolicyError: for an unknown name, a lookahead below 1, or an N that cannot be.
    """
    name, plus, recent = name.partition("+")
    if name not in PRESETS:
        raise PolicyError(f"unknown policy {name!r}; choose one of {', '.join(PRESETS)}")
    if not (math.isinf(lookahead) and lookahead > 0) and (lookahead < 1 or lookahead % 1):
        raise PolicyError(f"lookahead {lookahead} is not a whole number >= 1 or inf")
    policy = PRESETS[name](lookahead)
    if not plus:
        return policy
    if not recent.isdecimal() or not isinstance(policy.scoring, Retention):
        raise PolicyError(
            f"policy {name + plus + recent!r}: only dbtrimkv and trimkv take +N, the number of "
            "newest tokens to keep; write dbtrimkv+32"
        )
    return replace(policy, name=f"{name}+{int(recent)}", protect_recent=int(recent))
