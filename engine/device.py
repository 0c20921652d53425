"""Pin the current GPU and full float32 products around the engine's calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one; nothing for other devices.

    Triton launches on the current GPU, and torch captures and replays there, wherever the tensors
    are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def exact_products(device: torch.device) -> AbstractContextManager[object]:
    """Compute products of float32 in float32, also where the program around has allowed less.

    TF32 (on a GPU) and bfloat16 (on a CPU) keep 8 to 11 bits of a factor. Which products they
    touch depends on the path, so scores would differ between them, and with them what is evicted.
    The setting belongs to the process: for the time of a step it holds for all threads.
    """
    product = _ON_CUDA if device.type == "cuda" else _ON_CPU
    if product.fp32_precision in _WHOLE and not _under_way.steps:
        return _AS_IT_IS
    return _under_way.one_more(product)


# Looked up once: every decode step asks.
_ON_CUDA: Any = torch.backends.cuda.matmul
_ON_CPU: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_AS_IT_IS = nullcontext()
_WHOLE = ("none", "ieee")


class _UnderWay:
    """The steps that run, of all threads and engines: the last one puts back what was set."""

    def __init__(self) -> None:
        self.steps = 0
        self._lock = threading.Lock()
        self._put_back: list[Callable[[], None]] = []

    @contextmanager
    def one_more(self, product: Any) -> Iterator[None]:
        """Have products exact until the end of this step, and of those that overlap it."""
        with self._lock:
            self.steps += 1
            if product.fp32_precision not in _WHOLE:
                self._put_back.append(_make_exact(product))
        try:
            yield
        finally:
            with self._lock:
                self.steps -= 1
                while not self.steps and self._put_back:
                    self._put_back.pop()()


_under_way = _UnderWay()


def _make_exact(product: Any) -> Callable[[], None]:
    """Make the products of a kind of device exact; what puts back the setting there was."""
    reduced = product.fp32_precision
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for this backend alone, which torch does not let one read here
        whole = ""
    if whole not in ("", "highest"):
        torch.set_float32_matmul_precision("highest")
        return partial(torch.set_float32_matmul_precision, whole)
    product.fp32_precision = "ieee"
    return partial(setattr, product, "fp32_precision", reduced)
