"""Policies: what stays in the cache. One file per stage, one registry row per method."""

from engine.budget import Budget
from engine.policies.allocation import GlobalAllocation, HeadAllocation
from engine.policies.base import Allocation, CacheView, Needs, Policy, Scorer
from engine.policies.registry import PRESETS, describe_added, make_policy, names, register_policy
from engine.policies.selection import Shares

__all__ = [
    "PRESETS",
    "Allocation",
    "Budget",
    "CacheView",
    "GlobalAllocation",
    "HeadAllocation",
    "Needs",
    "Policy",
    "Scorer",
    "Shares",
    "describe_added",
    "make_policy",
    "names",
    "register_policy",
]
