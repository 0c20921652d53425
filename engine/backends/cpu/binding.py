"""Load the library that was built for this CPU's instructions, by ctypes, and check its structures.

``setup.py`` compiles the same sources once per level of the instruction set (``LEVELS``). The
environment variable ``MMKV_NATIVE`` names the level to load, or refuses all of them with ``0``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int64, c_void_p
from importlib.util import find_spec
from typing import Any

from mmkv.engine.cache import COLUMNS

MAX_TRUNK = 2
JOINS = ("mean", "max", "sum")  # JOIN_MEAN, JOIN_MAX, JOIN_SUM
LEVELS = ("v4", "v3", "sve", "baseline")  # best first; v3 and v4: of x86-64
# Best first; "portable" runs everywhere.
INT8_FORMS = ("amx", "avx512vnni", "avxvnni", "avx2", "neon", "portable")
BF16_FORMS = ("avx512bf16", "widened")


def _each(kind: type[Any], names: str) -> list[tuple[str, type[Any]]]:
    """Return fields of one type."""
    return [(name, kind) for name in names.split()]


class Linear(Structure):
    """``struct linear`` of native.h."""

    _fields_ = [
        *_each(c_void_p, "weight bias bf16 codes scales"),
        *_each(c_int64, "rows width bits rounds"),
    ]


class Expert(Structure):
    """``struct expert``."""

    _fields_ = [(name, Linear) for name in ("gate_up", "down")]


class Layer(Structure):
    """``struct layer``."""

    _fields_ = [
        *_each(c_void_p, "input_norm post_norm qk_norm attention_out_norm mlp_out_norm"),
        *_each(c_int64, "angle window"),
        *_each(Linear, "qkv out gate_up down"),
        ("trunk", Linear * MAX_TRUNK),
        ("readout", Linear),
        ("entry", c_int64),
        ("rates", Linear),
        *_each(c_void_p, "conv log_decay step_bias gain conv_states delta_states"),
        ("router", Linear),
        ("experts", POINTER(Expert)),
        *_each(Linear, "shared_gate shared_gate_up shared_down"),
    ]


class Model(Structure):
    """``struct model``."""

    _fields_ = [
        *_each(c_int64, "layers hidden heads kv_heads head_dim rotary trunk angles gelu"),
        *_each(c_int64, "output_gate key_heads value_heads key_dim value_dim taps"),
        *_each(c_int64, "chosen normalized"),
        *_each(c_double, "eps embed_scale"),
        ("embed", Linear),
        ("norm", c_void_p),
        ("head", Linear),
        ("layer", POINTER(Layer)),
    ]


class Cache(Structure):
    """``struct cache``."""

    _fields_ = [
        *((name, c_void_p) for name in (*COLUMNS, "length", "table", "stack")),
        *_each(c_int64, "free rows width page_size head_dim state_size"),
        *_each(c_int64, "key_bits value_bits rotated behind"),
    ]


class BatchSlot(Structure):
    """``struct batch_slot``."""

    _fields_ = [
        *_each(c_int64, "token position rope_position states"),
        *_each(c_void_p, "inv_freq queries"),
    ]


class Eviction(Structure):
    """``struct eviction``."""

    _fields_ = [
        *_each(c_int64, "scorer allocation seen budget protect_first protect_recent age_shift"),
        *_each(c_double, "lookahead guess margin"),
        *_each(c_int64, "slack entries most found nan"),
        ("given", c_void_p),
        ("groups", c_int64),
        *_each(c_void_p, "first_row share floor scratch trace"),
    ]


class Window(Structure):
    """``struct window``."""

    _fields_ = [
        ("queries", c_void_p),
        *_each(c_int64, "group size seen join logits greatest"),
        *_each(c_void_p, "scratch out"),
    ]


class Patches(Structure):
    """``struct patches``."""

    _fields_ = [
        *_each(c_void_p, "query key value"),
        ("stride", c_int64 * 3 * 3),
        ("out", c_void_p),
        *_each(c_int64, "batch heads tokens dim parts"),
        ("start", c_void_p),
        ("scale", c_double),
        ("rounds", c_int64),
    ]


class DeltaTokens(Structure):
    """``struct delta_tokens``."""

    _fields_ = [
        *_each(c_void_p, "query key value g beta out"),
        ("stride", c_int64 * 3),
        *_each(c_int64, "tokens key_heads value_heads dk dv"),
    ]


class Step(Structure):
    """``struct step``."""

    _fields_ = [
        *_each(c_int64, "batch_slots threads"),
        ("rope_scale", c_double * 2),
        *_each(c_void_p, "scratch logits"),
        ("batch_slot", POINTER(BatchSlot)),
        ("requests", POINTER(Eviction)),
        *_each(c_int64, "window mass"),
        *_each(c_void_p, "tap_layer tapped log_beta"),
        *_each(c_int64, "taps room pages width longest done evicting"),
    ]


_FUNCTIONS = {
    "mmkv_scratch": (c_int64, [POINTER(Model), c_int64, c_int64, c_int64]),
    "mmkv_step": (None, [POINTER(Model), POINTER(Cache), POINTER(Step)]),
    "mmkv_store": (None, [POINTER(Cache), c_int64, c_void_p, c_void_p]),
    "mmkv_attend": (None, [POINTER(Cache), c_int64, c_void_p, *[c_int64] * 3, *[c_void_p] * 2]),
    "mmkv_attend_chunk_plan": (c_int64, [POINTER(Cache), *[c_int64] * 5, POINTER(c_int64)]),
    "mmkv_attend_chunk": (
        None,
        [POINTER(Cache), *[c_int64] * 3, c_void_p, *[c_int64] * 4, *[c_void_p] * 2],
    ),
    "mmkv_attend_patches_scratch": (c_int64, [POINTER(Patches)]),
    "mmkv_attend_patches": (None, [POINTER(Patches), c_int64, c_void_p]),
    "mmkv_delta_step": (None, [POINTER(DeltaTokens), *[c_void_p] * 2, c_int64]),
    "mmkv_delta_scratch": (c_int64, [c_int64, c_int64]),
    "mmkv_delta_chunk": (None, [POINTER(DeltaTokens), c_void_p, c_int64, c_void_p]),
    "mmkv_conv": (
        None,
        [c_void_p, *[c_int64] * 4, c_void_p, c_int64, *[c_void_p] * 2, c_int64, c_void_p],
    ),
    "mmkv_product": (None, [POINTER(Linear), c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "mmkv_product_scratch": (c_int64, [POINTER(Linear), c_int64]),
    "mmkv_norm": (None, [*[c_void_p] * 2, *[c_int64] * 2, c_double, c_int64, c_void_p]),
    "mmkv_turn": (
        None,
        [c_void_p, *[c_int64] * 5, c_void_p, c_double, *[c_void_p] * 2, c_int64],
    ),
    "mmkv_gated": (None, [c_void_p, *[c_int64] * 4, c_void_p]),
    "mmkv_round": (
        None,
        [c_void_p, *[c_int64] * 4, *[c_void_p] * 3, c_int64],
    ),
    "mmkv_pack": (None, [c_void_p, c_int64, c_int64, c_void_p, c_int64]),
    "mmkv_int8_form": (c_char_p, [c_char_p]),
    "mmkv_bf16_form": (c_char_p, [c_char_p]),
    "mmkv_evict_scratch": (c_int64, [c_int64, c_int64]),
    "mmkv_window": (None, [POINTER(Cache), POINTER(Window), c_int64]),
    "mmkv_window_scratch": (c_int64, [POINTER(Window), c_int64, c_int64, c_int64]),
    "mmkv_evict": (None, [POINTER(Cache), POINTER(Eviction), c_int64, c_int64]),
    "mmkv_layout": (c_int64, [POINTER(c_int64)]),
    "mmkv_runs": (c_int64, [c_char_p]),
}


class Library(ctypes.CDLL):
    """The functions of one level's library.

    Attributes:
        int8: the form of products with weights in 8 or 4 bits that it takes: ``INT8_FORMS``.
        bf16: of products with weights and states in bfloat16: ``BF16_FORMS``.
    """

    level: str
    int8: str
    bf16: str

    def take_int8(self, name: str = "") -> bool:
        """Take the form of that name from now on, without one the best; False: it is not there."""
        found = self.mmkv_int8_form(name.encode())
        if found is not None:
            self.int8 = found.decode()
        return found is not None

    def take_bf16(self, name: str = "") -> bool:
        """Take the form of that name, as :meth:`take_int8` does."""
        found = self.mmkv_bf16_form(name.encode())
        if found is not None:
            self.bf16 = found.decode()
        return found is not None


def library() -> Library | str:
    """The library, or why there is none."""
    named = os.environ.get("MMKV_NATIVE") or "1"
    if named == "0":
        return "switched off by MMKV_NATIVE=0"
    if named == "1":
        return _best()
    if named not in LEVELS:
        return f"MMKV_NATIVE={named} is none of {', '.join(LEVELS)}, 1 (the best) and 0 (torch)"
    return _load(named)


def levels() -> list[str]:
    """The levels that are compiled and that this CPU can run, best first."""
    return [level for level in LEVELS if not isinstance(_load(level), str)]


@functools.cache
def _best() -> Library | str:
    """Return the best level that loads, else why the last, the baseline, does not."""
    found: Library | str = ""
    for level in LEVELS:
        found = _load(level)
        if not isinstance(found, str):
            break
    return found


@functools.cache
def _load(level: str) -> Library | str:
    spec = find_spec(f"{__package__}._step_{level}")
    if spec is None or spec.origin is None:
        if level == "baseline":
            return "not compiled; install a C compiler and then mmkv again"
        return f"level {level} is not compiled"
    if level != "baseline":
        baseline = _load("baseline")
        if isinstance(baseline, str):
            return baseline
        if not baseline.mmkv_runs(level.encode()):
            return f"this CPU cannot run level {level}"
    name = os.path.basename(spec.origin)
    try:
        loaded = Library(spec.origin)
        for function_name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, function_name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return f"{name} does not load ({error}); install mmkv again"
    ours = [
        ctypes.sizeof(kind)
        for kind in (
            Linear,
            Layer,
            Model,
            Cache,
            BatchSlot,
            Step,
            Eviction,
            Window,
            Patches,
            DeltaTokens,
            Expert,
        )
    ]
    theirs = (c_int64 * 16)()
    if ours != theirs[: loaded.mmkv_layout(theirs)]:
        return f"{name} was compiled from other sources; install mmkv again"
    loaded.level = level
    loaded.take_int8()
    loaded.take_bf16()
    return loaded
