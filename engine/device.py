"""What the engine's arithmetic runs on, whatever the program around it has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one; nothing for other devices.

    Triton launches on the current GPU, and torch captures and replays there, wherever the tensors
    are.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Compute products of float32 in float32, also where the program around has allowed less.

    TF32 (on a GPU) and bfloat16 (on a CPU) keep 8 to 11 bits of a factor. Which products they
    touch depends on the path, so scores would differ between them, and with them what is evicted.
    The setting belongs to the process: for the time of a step it holds for all threads.
    """
    backends = torch.backends
    product = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul  # type: ignore[attr-defined]
    reduced = product.fp32_precision
    if reduced in ("none", "ieee"):
        yield
        return
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
