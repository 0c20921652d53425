"""The heads of a layer on several ranks: what an eviction reads of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mmkv.engine.policies.base import CacheView


class Ranks:
    """A tensor-parallel group in which rank r has the r-th part of each layer's KV heads.

    Attributes:
        gather: takes ``[N]`` of equal N on all ranks, returns ``[size * N]`` in their order.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, gather: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.rank, self.size, self._gather = rank, size, gather

    def heads(self, values: Tensor) -> Tensor:
        """Return ``[L, H]`` of all ranks' heads, of this rank's ``[L, H / size]``."""
        if self._gather is None:
            return values
        parts = self._gather(values.flatten()).view(self.size, *values.shape)
        return torch.cat(parts.unbind(0), 1)

    def joined(
        self, scores: Tensor, view: CacheView, lengths: Tensor
    ) -> tuple[CacheView, Tensor, Tensor]:
        """Join the entries of all ranks, so that one selection is made, the same on each.

        Args:
            scores: float32 ``[N]`` of this rank's entries, which ``view`` shows.
            lengths: ``[L, H]`` of all ranks.

        Returns:
            the view of all M entries, row-major; their scores ``[M]``; and for each its index among
            this rank's, -1 for those of others.
        """
        assert self._gather is not None
        layers, heads = lengths.shape
        by_rank = lengths.view(layers, self.size, -1).sum((0, 2)).tolist()
        most = max(by_rank)
        # Row numbers of the whole model, positions and scores; one gather of 16 bytes an entry.
        layer, head = view.row // view.kv_heads, view.row % view.kv_heads
        row = layer * heads + self.rank * view.kv_heads + head
        bits = scores.view(torch.int32).long()
        sent = row.new_zeros(2, most)
        sent[0, : row.numel()] = view.position << 32 | row
        sent[1, : row.numel()] = bits
        parts = self._gather(sent.flatten()).view(self.size, 2, most)
        packed = torch.cat([parts[rank, :, :count] for rank, count in enumerate(by_rank)], 1)
        own = packed.new_full((packed.shape[1],), -1)
        before = sum(by_rank[: self.rank])
        own[before : before + row.numel()] = torch.arange(row.numel(), device=row.device)
        row, position = packed[0] & 0xFFFFFFFF, packed[0] >> 32
        order = row.argsort(stable=True)
        every = replace(
            view,
            kv_heads=heads,
            row=row[order],
            length=lengths.flatten(),
            position=position[order],
            log_beta=scores.new_zeros(order.numel()),
            modality=view.modality.new_zeros(order.numel()),
            source=None,
        )
        return every, packed[1].int().view(torch.float32)[order], own[order]
