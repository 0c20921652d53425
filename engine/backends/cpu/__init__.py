"""Decode steps and evictions in C, for batches of sequences on a CPU."""

from __future__ import annotations

from mmkv.engine.backends.cpu.backend import CpuBackend
from mmkv.engine.backends.cpu.binding import levels, library
from mmkv.engine.backends.cpu.decoder import NativeDecoder
from mmkv.engine.backends.cpu.evictor import NativeEvictor
from mmkv.engine.backends.cpu.kernels import native_kernels, native_product, packed, rounded

__all__ = [
    "CpuBackend",
    "NativeDecoder",
    "NativeEvictor",
    "available",
    "int8_form",
    "level",
    "levels",
    "native_kernels",
    "native_product",
    "packed",
    "reason",
    "rounded",
]


def available() -> bool:
    """Return whether the compiled library can be used."""
    return not isinstance(library(), str)


def reason() -> str:
    """Return the reason why it cannot be used; empty when it can."""
    found = library()
    return found if isinstance(found, str) else ""


def level() -> str:
    """Return the level of the instruction set that it was compiled for.

    Empty when it cannot be used.
    """
    found = library()
    return "" if isinstance(found, str) else found.level


def int8_form() -> str:
    """Return the form of its products with weights in 8 or 4 bits; empty when it cannot be used."""
    found = library()
    return "" if isinstance(found, str) else found.int8
