"""The columns of the cache: what an entry holds, its types and its bytes, named here once.

A column to be added is a line of :class:`Columns`. ``struct cache`` of native.h, the C code that
moves an entry (pages.c) and the Triton kernels name their columns again, in the same order;
tests/engine/test_cache_layout.py compares them with this list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import torch
from torch import Tensor


@dataclass(frozen=True)
class Column:
    """What one column holds for each entry.

    Attributes:
        dtype: of its tensor; None for the model's own.
        per_feature: whether an entry holds ``head_dim`` numbers (keys, values).
        per_state: whether an entry holds the K numbers that the policy asks for; else one.
    """

    dtype: torch.dtype | None
    per_feature: bool = False
    per_state: bool = False

    def shape(self, page_size: int, head_dim: int, state: int = 0) -> tuple[int, ...]:
        """Give the shape of one page; ``state``: K."""
        if self.per_feature:
            return (page_size, head_dim)
        return (page_size, state) if self.per_state else (page_size,)

    def page_bytes(self, page_size: int, head_dim: int, dtype: torch.dtype, state: int = 0) -> int:
        """Count the bytes of one page, for a model of this ``dtype``."""
        numbers = math.prod(self.shape(page_size, head_dim, state))
        return numbers * (self.dtype or dtype).itemsize


class Columns:
    """The tensors of a page pool, each ``[pages, *column.shape]`` and contiguous.

    Attributes:
        keys, values: in the model's dtype; keys are stored after RoPE.
        log_beta: log of the retention (DBTrimKV, arXiv 2605.09649, section 4); 0 where the policy
            reads no gates.
        position: 0-based token index (not the rope position).
        modality: 0 text, 1 image, 2 video.
        state: ``[pages, P, K]``, what the policy's scorer keeps with each entry
            (:attr:`engine.policies.Needs.state`); K is 0 for most.
    """

    keys: Annotated[Tensor, Column(None, per_feature=True)]
    values: Annotated[Tensor, Column(None, per_feature=True)]
    log_beta: Annotated[Tensor, Column(torch.float32)]
    position: Annotated[Tensor, Column(torch.int32)]
    modality: Annotated[Tensor, Column(torch.uint8)]
    state: Annotated[Tensor, Column(torch.float32, per_state=True)]

    def columns(self) -> list[Tensor]:
        """Return the tensors in the order of :data:`COLUMNS`."""
        return [getattr(self, name) for name in COLUMNS]


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Columns, include_extras=True).items()
}
