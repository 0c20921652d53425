"""Attention of a prefill chunk under a write gate: the local window, and what was admitted.

Source: WG-KV, arXiv 2512.17452, section 4.2. Blocks of keys that no query of a block may see are
not computed: an entry is read while it is in the window, and afterwards only if it was admitted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.policies.write_gate import admitted, visible

_QUERIES = 128  # of one block


@dataclass(frozen=True)
class SortedRows:
    """The entries of H rows by ascending position, the chunk's own included, padded to the longest.

    Attributes:
        key, value: ``[H, N, D]``; position: int64 ``[H, N]``, the largest int64 where there is no
            entry; log_g: float32 ``[H, N]``.
    """

    key: Tensor
    value: Tensor
    position: Tensor
    log_g: Tensor

    def take(self, index: Tensor) -> SortedRows:
        """The entries ``index [H, n]`` of each row."""
        wide = index[..., None].expand(-1, -1, self.key.shape[-1])
        return SortedRows(
            self.key.gather(1, wide),
            self.value.gather(1, wide),
            self.position.gather(1, index),
            self.log_g.gather(1, index),
        )


def admitted_attention_reference(
    query: Tensor, position: Tensor, rows: SortedRows, window: int, threshold: float, scale: float
) -> Tensor:
    """Compute :func:`admitted_attention` with the whole mask and the whole score matrix."""
    scores = query.float() @ rows.key.float()[:, None].transpose(-1, -2) * scale
    seen = torch.stack(
        [
            visible(position, at, log_g, window, threshold)
            for at, log_g in zip(rows.position, rows.log_g, strict=True)
        ]
    )
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return (shares @ rows.value.float()[:, None]).to(query.dtype)


def admitted_attention(
    query: Tensor, position: Tensor, rows: SortedRows, window: int, threshold: float, scale: float
) -> Tensor:
    """Attend from the chunk's queries to what each of them may see.

    Args:
        query: ``[H, G, C, D]``, the G query heads of each KV head; position: int64 ``[C]`` token
            indices that follow each other.
        rows: the entries, those of the chunk included: each query sees its own at least.
        window: W_local; threshold: tau; scale: factor on the logits.

    Returns:
        ``[H, G, C, D]`` in the query's dtype.
    """
    passes = admitted(rows.log_g, threshold) & (rows.position < torch.iinfo(torch.int64).max)
    # Admitted entries of each row first, still by position.
    chosen = rows.take((~passes).byte().argsort(dim=-1, stable=True))
    count = passes.sum(-1, keepdim=True)
    column = torch.arange(rows.position.shape[1], device=query.device)
    last = torch.iinfo(torch.int64).max
    chosen_at = chosen.position.masked_fill(column >= count, last)
    parts, places = query.split(_QUERIES, 2), position.split(_QUERIES)
    # How many of them each block sees: the one read from the device.
    newest = torch.stack([at[-1] for at in places]) - window
    newest = newest.expand(len(chosen_at), -1).contiguous()
    reach = torch.searchsorted(chosen_at, newest, right=True)
    out = []
    for part, at, most in zip(parts, places, reach.amax(0).tolist(), strict=True):
        near = _slice(rows, at[0] - window + 1, window - 1 + at.numel())
        age = at[:, None] - near.position[:, None]
        near_seen = (age >= 0) & (age < window)
        far_at = chosen_at[:, :most]
        far_seen = far_at[:, None] <= at[:, None] - window
        key = torch.cat([near.key, chosen.key[:, :most]], 1)[:, None]
        value = torch.cat([near.value, chosen.value[:, :most]], 1)[:, None]
        seen = torch.cat([near_seen, far_seen], -1)[:, None]
        shape = (-1, query.shape[1], -1, -1)
        out.append(
            F.scaled_dot_product_attention(
                part, key.expand(shape), value.expand(shape), seen, scale=scale
            )
        )
    return torch.cat(out, 2)


def _slice(rows: SortedRows, first: Tensor, count: int) -> SortedRows:
    """``count`` entries from position ``first`` on: those of as many positions, and later ones.

    Where a row ends before, what follows is padding.
    """
    longest = rows.position.shape[1]
    begin = (rows.position < first).sum(-1, keepdim=True)
    index = begin + torch.arange(min(count, longest), device=begin.device)
    taken = rows.take(index.clamp(max=longest - 1))
    last = torch.iinfo(torch.int64).max
    return replace(taken, position=taken.position.masked_fill(index >= longest, last))
