"""Decide whether a call runs in Triton or in the torch reference."""

from __future__ import annotations

import functools
import importlib.util

from torch import Tensor


def on_triton(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on CUDA and Triton is installed."""
    return tensor.is_cuda and triton_installed()


@functools.cache
def triton_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None
