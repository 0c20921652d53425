"""Tell numbers from NaN and infinities, in one pass over the bytes of a model or of gates."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def find_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, None where none does.

    A sum in float32 is a number only if all its terms are, and reads each byte once.
    """
    for name, tensor in tensors:
        if not torch.isfinite(tensor.detach().sum(dtype=torch.float32)):
            return name
    return None
