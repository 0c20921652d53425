"""mmkv: vision-language decoding under one bounded, paged KV cache.

The names of ``__init__.pyi`` are loaded on first use, so that ``import mmkv`` stays quick and does
not pull in torch (the command line answers ``--help`` and reports usage errors without it).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lazy_loader

from mmkv.engine import paths as _paths

__version__ = "0.1.0"

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)
# Not mmkv.hf, which imports transformers: "from mmkv import *" is to stay quick.
__all__ = [name for name in _names if name != "hf"] + ["__version__"]


def _gate_sets() -> Mapping[str, Path]:
    from mmkv.resources import bundled_gates

    return bundled_gates()


def _named_model(name: str) -> Path | None:
    from mmkv.resources import pulled_model

    return pulled_model(name)


# Wherever gates and models are named, these names are known.
_paths.gate_sets, _paths.named_model = _gate_sets, _named_model
