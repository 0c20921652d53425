"""The compiled library: found beside this file, checked against its structures, called by ctypes.

``setup.py`` compiles it at install for the CPU of that machine (``-march=native``): an install
carried to a machine with an older CPU may die on an illegal instruction, which no cheap test
would foresee; install again there, or set ``MMKV_NATIVE=0``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

MAX_TRUNK = 2


class Linear(Structure):
    """``struct linear`` of native.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias", "brief")),
        *((name, c_int64) for name in ("rows", "width")),
    ]


class Layer(Structure):
    """``struct layer``."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "qk_norm")),
        *((name, Linear) for name in ("qkv", "out", "gate_up", "down")),
        ("trunk", Linear * MAX_TRUNK),
        ("readout", Linear),
    ]


class Model(Structure):
    """``struct model``."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "layers", "hidden", "heads", "kv_heads", "head_dim", "rotary", "trunk",
            )
        ),
        ("eps", c_double),
        ("embed", c_void_p),
        ("norm", c_void_p),
        ("head", Linear),
        ("layer", POINTER(Layer)),
    ]  # fmt: skip


class Cache(Structure):
    """``struct cache``."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in (
                "keys", "values", "log_beta", "position", "modality", "length", "table", "stack",
            )
        ),
        *((name, c_int64) for name in ("free", "rows", "width", "page_size", "head_dim")),
    ]  # fmt: skip


class Lane(Structure):
    """``struct lane``."""

    _fields_ = [
        *((name, c_int64) for name in ("token", "position", "rope_position")),
        ("inv_freq", c_void_p),
    ]


class Eviction(Structure):
    """``struct eviction``."""

    _fields_ = [
        *(
            (name, c_int64)
            for name in (
                "scorer", "allocation", "seen", "budget", "protect_first", "protect_recent",
            )
        ),
        ("lookahead", c_double),
        ("guess", c_double),
        ("margin", c_double),
        ("slack", c_int64),
        ("entries", c_int64),
        ("most", c_int64),
        ("found", c_int64),
        ("scratch", c_void_p),
    ]  # fmt: skip


class Step(Structure):
    """``struct step``."""

    _fields_ = [
        *((name, c_int64) for name in ("lanes", "threads")),
        ("rope_scale", c_double),
        ("scratch", c_void_p),
        ("logits", c_void_p),
        ("lane", POINTER(Lane)),
        ("orders", POINTER(Eviction)),
        *((n, c_int64) for n in ("room", "pages", "width", "longest", "done", "evicting")),
    ]


_FUNCTIONS = {
    "mmkv_scratch": (c_int64, [POINTER(Model), c_int64, c_int64, c_int64]),
    "mmkv_step": (None, [POINTER(Model), POINTER(Cache), POINTER(Step)]),
    "mmkv_evict_scratch": (c_int64, [c_int64]),
    "mmkv_evict": (None, [POINTER(Cache), POINTER(Eviction), c_int64, c_int64]),
    "mmkv_layout": (c_int64, [POINTER(c_int64)]),
}


def library() -> ctypes.CDLL | str:
    """The library, or why there is none. ``MMKV_NATIVE=0`` in the environment refuses it."""
    if os.environ.get("MMKV_NATIVE", "1") == "0":
        return "switched off by MMKV_NATIVE=0"
    return _load()


@functools.cache
def _load() -> ctypes.CDLL | str:
    here = Path(__file__).parent
    paths = [here / f"_step{suffix}" for suffix in EXTENSION_SUFFIXES]
    found = next((path for path in paths if path.is_file()), None)
    if found is None:
        return "not compiled; install a C compiler and then mmkv again"
    try:
        loaded = ctypes.CDLL(str(found))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"{found.name} does not load ({error}); install mmkv again"
    ours = [ctypes.sizeof(kind) for kind in (Linear, Layer, Model, Cache, Lane, Step, Eviction)]
    theirs = (c_int64 * 16)()
    if ours != theirs[: loaded.mmkv_layout(theirs)]:
        return f"{found.name} was compiled from other sources; install mmkv again"
    return loaded


__all__ = [
    "MAX_TRUNK", "Cache", "Eviction", "Lane", "Layer", "Linear", "Model", "Step", "byref",
    "library",
]  # fmt: skip
