"""Decide whether a call runs in Triton or in the torch reference."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from mmkv.engine.system import on_device

P = ParamSpec("P")
T = TypeVar("T")


def on_triton(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is on CUDA and Triton is installed."""
    return tensor.is_cuda and triton_installed()


@functools.cache
def triton_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def in_triton(reference: Callable[P, T], where: str, learns: bool = False) -> Callable[P, T]:
    """Return a function that runs in Triton on the GPU of its argument ``where``, else in torch.

    The Triton form of ``name_reference`` in a module ``x`` is ``name`` in ``x_triton``, which is
    imported when it first runs.

    Args:
        learns: whether gradients may be asked for at ``where``; Triton has none, torch runs then.
    """
    name = reference.__name__.removesuffix("_reference")
    place = list(inspect.signature(reference).parameters).index(where)

    @functools.wraps(reference)
    def run(*args: P.args, **named: P.kwargs) -> T:
        tensor: Any = named[where] if where in named else args[place]
        if not on_triton(tensor) or (learns and tensor.requires_grad):
            return reference(*args, **named)
        form: Callable[P, T] = getattr(
            importlib.import_module(f"{reference.__module__}_triton"), name
        )
        with on_device(tensor.device):
            return form(*args, **named)

    run.__name__ = run.__qualname__ = name
    return run
