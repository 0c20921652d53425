"""Policies: which entries stay in the cache. Scorers by kind, allocation, selection, presets."""

from mmkv.engine.budget import Budget
from mmkv.engine.policies.allocation import GlobalAllocation, HeadAllocation
from mmkv.engine.policies.base import (
    Allocation,
    CacheView,
    Needs,
    NewTokens,
    Policy,
    Scorer,
    Scores,
    compiled,
)
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.registry import (
    PRESETS,
    describe_added,
    find_preset,
    make_policy,
    names,
    register_policy,
)
from mmkv.engine.policies.selection import Shares

__all__ = [
    "PRESETS",
    "Allocation",
    "Budget",
    "CacheView",
    "GlobalAllocation",
    "HeadAllocation",
    "Needs",
    "NewTokens",
    "Parameter",
    "Policy",
    "Preset",
    "Scorer",
    "Scores",
    "Shares",
    "compiled",
    "describe_added",
    "find_preset",
    "make_policy",
    "names",
    "register_policy",
]
