"""mmkv: vision-language decoding under one bounded, paged KV cache.

The names below are loaded on first use, so that ``import mmkv`` stays quick and does not pull in
torch (the command line answers ``--help`` and reports usage errors without it).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from engine.errors import MmkvError
    from engine.policies.budget import Budget
    from mmkv.api import Engine, Session
    from mmkv.reply import Reply
    from mmkv.sampling import Sampling

_HOMES = {
    "Engine": "mmkv.api",
    "Session": "mmkv.api",
    "Budget": "engine.policies.budget",
    "MmkvError": "engine.errors",
    "Reply": "mmkv.reply",
    "Sampling": "mmkv.sampling",
}

__all__ = ["Budget", "Engine", "MmkvError", "Reply", "Sampling", "Session", "__version__"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'mmkv' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
