"""Find NaN and infinity in weights, in one pass over their bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mmkv.engine.errors import ModelError
from mmkv.engine.model.panels import Panels


def find_not_finite(tensors: Iterable[tuple[str, Tensor | Panels]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, None where none does.

    The least and the greatest number are numbers only if all are, and are found in one pass.
    """
    for name, held in tensors:
        tensor = held.held()[-1] if isinstance(held, Panels) else held
        if not tensor.numel():
            continue
        least, greatest = tensor.detach().aminmax()
        if not (torch.isfinite(least) and torch.isfinite(greatest)):
            return name
    return None


def require_finite(tensors: Iterable[tuple[str, Tensor | Panels]], checkpoint: str) -> None:
    """Check weights of a checkpoint, in one pass over their bytes.

    Raises:
        ModelError: one holds NaN or an infinity, so that every answer would be noise.
    """
    if odd := find_not_finite(tensors):
        raise ModelError(
            f"the weights of {checkpoint} hold NaN or infinity (in {odd}); get the complete "
            "checkpoint again, or load it in another dtype"
        )
