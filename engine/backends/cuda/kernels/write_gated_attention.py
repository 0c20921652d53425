"""Attention of a prompt's chunk under write gates, of which only the blocks that are seen are read.

A token sees the newest entries (the slash) and, of those before, the admitted ones (the verticals).
Entries come sorted by position, all of them and the admitted ones apart: a block of tokens then
sees one range of each, and what lies outside is neither loaded nor multiplied (WG-KV, arXiv
2512.17452, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.policies.base import admitted
from mmkv.engine.policies.write_gate import visible

LAST = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class GatedRows:
    """The entries of H rows of one layer by ascending position, the chunk's own among them.

    Attributes:
        slot: ``[H, N]`` int64 flat slots; position: ``[H, N]`` int64, the largest int64 past a
            row's end; log_g: ``[H, N]`` float32.
    """

    slot: Tensor
    position: Tensor
    log_g: Tensor


@dataclass(frozen=True)
class Ranges:
    """What each of n blocks of tokens sees of H rows, as ranges.

    Attributes:
        slot, position: ``[H, N]`` of the admitted entries, by position; the rest past them.
        far: ``[H, n]`` int32, the end of those that are seen, from 0 on.
        begin, end: ``[H, n]`` int32 of all entries, those in the window.
    """

    slot: Tensor
    position: Tensor
    far: Tensor
    begin: Tensor
    end: Tensor

    @classmethod
    def of(
        cls, rows: GatedRows, position: Tensor, window: int, threshold: float, tokens: int
    ) -> Ranges:
        """Return those of blocks of ``tokens`` with consecutive positions ``[C]``."""
        passes = admitted(rows.log_g, threshold) & (rows.position < LAST)
        order = (~passes).byte().argsort(dim=-1, stable=True)
        at = rows.position.masked_fill(~passes, LAST).gather(-1, order)
        first = position[::tokens].expand(len(at), -1).contiguous()
        last = (first + tokens - 1).clamp(max=position[-1:])
        far = torch.searchsorted(at, last - window, right=True)
        begin = torch.searchsorted(rows.position, first - window + 1)
        end = torch.searchsorted(rows.position, last, right=True)
        ends = (one.int() for one in (far, begin, end))
        return cls(rows.slot.gather(-1, order), at, *ends)

    def tiles(self, size: int) -> tuple[Tensor, Tensor]:
        """Count the tiles of ``size`` entries in the ranges, and in all that causality leaves.

        Both int32 ``[H, n]``.
        """
        every = (one.add(size - 1) // size for one in (self.far, self.end - self.begin, self.end))
        far, near, whole = every
        return far + near, whole


def write_gated_attention_reference(
    query: Tensor,
    position: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: GatedRows,
    window: int,
    threshold: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend from a chunk's queries to what each of them may see.

    Args:
        query: ``[H, G, C, D]``, contiguous along D; position: ``[C]`` int64, one after the other.
        keys, values: ``[slots, D]``, the pool's, in the query's dtype.
        rows: each token's own entry is among them.
        window: W_local, from 1; threshold: tau; scale: factor on the logits.

    Returns:
        ``[H, G, C, D]``; tiles of entries that each block of tokens was multiplied with, and those
        that plain causal attention has, int32 ``[H, n]``. No host sync on CUDA.
    """
    key, value = keys[rows.slot].float()[:, None], values[rows.slot].float()[:, None]
    seen = torch.stack(
        [
            visible(position, at, log_g, window, threshold)
            for at, log_g in zip(rows.position, rows.log_g, strict=True)
        ]
    )
    scores = query.float() @ key.transpose(-1, -2) * scale
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    _, whole = Ranges.of(rows, position, window, threshold, 16).tiles(16)
    return (shares @ value).to(query.dtype), whole, whole


write_gated_attention = in_triton(write_gated_attention_reference, "query")
