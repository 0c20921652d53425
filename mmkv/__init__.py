"""mmkv: vision-language decoding under one bounded, paged KV cache.

The names below are loaded on first use, so that ``import mmkv`` stays quick and does not pull in
torch (the command line answers ``--help`` and reports usage errors without it).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mmkv.engine import paths as _paths

__version__ = "0.1.0"

if TYPE_CHECKING:
    from pathlib import Path

    from mmkv.api import Engine, Session
    from mmkv.engine.budget import Budget
    from mmkv.engine.config import EngineConfig
    from mmkv.engine.errors import (
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
    from mmkv.engine.model.families import Family, register_family
    from mmkv.engine.policies import (
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
    from mmkv.reply import Reply
    from mmkv.resources import bundled_model
    from mmkv.sampling import Sampling

_HOMES = {
    "Budget": "mmkv.engine.budget",
    "BudgetError": "mmkv.engine.errors",
    "CacheView": "mmkv.engine.policies",
    "CapacityError": "mmkv.engine.errors",
    "ContextError": "mmkv.engine.errors",
    "Engine": "mmkv.api",
    "EngineConfig": "mmkv.engine.config",
    "Family": "mmkv.engine.model.families",
    "GateError": "mmkv.engine.errors",
    "GlobalAllocation": "mmkv.engine.policies",
    "HeadAllocation": "mmkv.engine.policies",
    "InputError": "mmkv.engine.errors",
    "MmkvError": "mmkv.engine.errors",
    "ModelError": "mmkv.engine.errors",
    "NotFiniteError": "mmkv.engine.errors",
    "Needs": "mmkv.engine.policies",
    "NewTokens": "mmkv.engine.policies",
    "Parameter": "mmkv.engine.policies",
    "Policy": "mmkv.engine.policies",
    "PolicyError": "mmkv.engine.errors",
    "Preset": "mmkv.engine.policies",
    "Reply": "mmkv.reply",
    "Sampling": "mmkv.sampling",
    "Scores": "mmkv.engine.policies",
    "Session": "mmkv.api",
    "SessionError": "mmkv.engine.errors",
    "Shares": "mmkv.engine.policies",
    "bundled_model": "mmkv.resources",
    "register_family": "mmkv.engine.model.families",
    "register_policy": "mmkv.engine.policies",
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


_paths.gate_sets = _gate_sets  # wherever gates are named, these names are known


def __getattr__(name: str) -> Any:
    if name == "hf":  # a package that imports transformers
        return importlib.import_module("mmkv.hf")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mmkv' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
