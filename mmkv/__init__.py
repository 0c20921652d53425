"""mmkv: vision-language decoding under one bounded, paged KV cache.

The names below are loaded on first use, so that ``import mmkv`` stays quick and does not pull in
torch (the command line answers ``--help`` and reports usage errors without it).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import engine.paths

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from engine.budget import Budget
    from engine.config import EngineConfig
    from engine.errors import (
        BudgetError,
        CapacityError,
        ContextError,
        GateError,
        InputError,
        MmkvError,
        ModelError,
        NotFiniteError,
        PolicyError,
        SessionError,
    )
    from engine.model.families import Family, register_family
    from engine.policies import (
        CacheView,
        GlobalAllocation,
        HeadAllocation,
        Needs,
        NewTokens,
        Parameter,
        Policy,
        Preset,
        Scores,
        Shares,
        register_policy,
    )
    from mmkv.api import Engine, Session
    from mmkv.reply import Reply
    from mmkv.resources import bundled_model
    from mmkv.sampling import Sampling

_HOMES = {
    "Budget": "engine.budget",
    "BudgetError": "engine.errors",
    "CacheView": "engine.policies",
    "CapacityError": "engine.errors",
    "ContextError": "engine.errors",
    "Engine": "mmkv.api",
    "EngineConfig": "engine.config",
    "Family": "engine.model.families",
    "GateError": "engine.errors",
    "GlobalAllocation": "engine.policies",
    "HeadAllocation": "engine.policies",
    "InputError": "engine.errors",
    "MmkvError": "engine.errors",
    "ModelError": "engine.errors",
    "NotFiniteError": "engine.errors",
    "Needs": "engine.policies",
    "NewTokens": "engine.policies",
    "Parameter": "engine.policies",
    "Policy": "engine.policies",
    "PolicyError": "engine.errors",
    "Preset": "engine.policies",
    "Reply": "mmkv.reply",
    "Sampling": "mmkv.sampling",
    "Scores": "engine.policies",
    "Session": "mmkv.api",
    "SessionError": "engine.errors",
    "Shares": "engine.policies",
    "bundled_model": "mmkv.resources",
    "register_family": "engine.model.families",
    "register_policy": "engine.policies",
}

__all__ = [
    "Budget",
    "BudgetError",
    "CacheView",
    "CapacityError",
    "ContextError",
    "Engine",
    "EngineConfig",
    "Family",
    "GateError",
    "GlobalAllocation",
    "HeadAllocation",
    "InputError",
    "MmkvError",
    "ModelError",
    "Needs",
    "NewTokens",
    "NotFiniteError",
    "Parameter",
    "Policy",
    "PolicyError",
    "Preset",
    "Reply",
    "Sampling",
    "Scores",
    "Session",
    "SessionError",
    "Shares",
    "__version__",
    "bundled_model",
    "register_family",
    "register_policy",
]


def _gate_sets() -> Mapping[str, Path]:
    from mmkv.resources import bundled_gates

    return bundled_gates()


engine.paths.gate_sets = _gate_sets  # wherever gates are named, these names are known


def __getattr__(name: str) -> Any:
    if name == "hf":  # a package that imports transformers
        return importlib.import_module("mmkv.hf")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mmkv' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
