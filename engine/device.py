"""What the engine's arithmetic runs on, whatever the program around it has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
    reduced = product.fp32_precision
    return _AS_IT_IS if reduced in ("none", "ieee") else _exact(product, reduced)


# Looked up once: every decode step asks.
_ON_CUDA: Any = torch.backends.cuda.matmul
_ON_CPU: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_AS_IT_IS = nullcontext()


@contextmanager
def _exact(product: Any, reduced: str) -> Iterator[None]:
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for this backend alone, which torch does not let one read here
        whole = ""
    if whole in ("", "highest"):
        product.fp32_precision = "ieee"
    else:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if whole in ("", "highest"):
            product.fp32_precision = reduced
        else:
            torch.set_float32_matmul_precision(whole)
