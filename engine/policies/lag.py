"""Scorers that measure keys and values by the range of a neighbouring chunk of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mmkv.engine.policies.base import CacheView, Needs, NewTokens, compiled
from mmkv.engine.policies.frozen import Shapes, frozen

_LEAST_RANGE = 1e-6


@dataclass(frozen=True)
class NextChunk:
    """Spread of keys and values against the next chunk's range (LagKV, arXiv 2504.04704).

    Section 3, as kvpress computes it. The first ``sinks`` tokens are in no chunk; with less than
    two whole chunks the newest stay.
    """

    sinks: int = 4
    lag: int = 128
    needs: ClassVar[Needs] = Needs(keys=True, values=True)

    def score(self, view: CacheView) -> Tensor:
        """Rank in the chunk, from 0 to below 1; 1 where no whole chunk comes after."""
        place = view.position.masked_fill(view.position < self.sinks, -1).float()
        order = view.to_rows(place, float("inf")).argsort(dim=-1, stable=True)
        sinks = view.to_rows((place < 0).long(), 0).sum(-1)
        rows, longest = order.shape
        chunks = longest // self.lag
        if chunks < 2:
            return view.position.float()
        # The column of each entry of each chunk: sinks come first, then the chunks.
        column = torch.arange(chunks * self.lag, device=order.device) + sinks[:, None]
        source = order.gather(-1, column.clamp(max=longest - 1))
        ranks = self._ranks(view, source.unflatten(1, (chunks, self.lag)))
        whole = (view.length - sinks) // self.lag
        chunk = torch.arange(chunks, device=order.device).repeat_interleave(self.lag)
        ranked = chunk < whole[:, None] - 1
        score = torch.ones((rows, longest + 1), device=order.device)
        # What is not ranked goes to a column of its own: rows are ranked to different lengths.
        score.scatter_(-1, source.masked_fill(~ranked, longest), ranks.flatten(1))
        score = score[:, :longest][view.live()]
        return torch.where(whole[view.row] < 2, view.position.float(), score)

    def _ranks(self, view: CacheView, source: Tensor) -> Tensor:
        """Rank of each entry ``source [R, chunks, lag]`` in its chunk, divided by ``lag``."""
        # In float64: shares of a wide spread round to 0 and 1 in float32, and their sums tie.
        total = torch.zeros(source.shape, dtype=torch.float64, device=source.device)
        for entries in (view.keys(), view.values()):
            x = view.to_rows(entries.float(), 0.0)
            chunk = x.gather(1, source.flatten(1)[..., None].expand(-1, -1, x.shape[-1]))
            chunk = chunk.unflatten(1, source.shape[1:])
            least, most = (m.roll(-1, 1) for m in (chunk.amin(2), chunk.amax(2)))
            spread = scaled(chunk, least[:, :, None], most[:, :, None]).std(-1)
            total += spread.double().softmax(-1)
        return total.argsort(dim=-1, stable=True).argsort(-1).float() / self.lag


@compiled("state")
@dataclass(frozen=True)
class PreviousChunk:
    """Variance of keys and values against the chunk before, frozen (arXiv 2606.26472, 3.3)."""

    lag: int = 128
    needs: ClassVar[Needs] = Needs(state=1, keys=True, values=True)

    def memory(self, layers: int, kv_heads: int, head_dim: int, hidden_size: int) -> Shapes:
        """Least and greatest key and value of the chunk before and of the present one."""
        return {"ranges": (2, 2, 2, layers, kv_heads, head_dim)}

    def born(self, new: NewTokens) -> Tensor:
        """The score, ``[B, T, 1, 1, 1]``."""
        entries = torch.stack([new.keys(), new.values()], 1)  # [B, 2, L, H, T, D]
        position, first = new.position, new.position[:, :1] // self.lag
        number = position // self.lag - first  # [B, T], chunks counted from the pass's first
        ranges = self._ranges(entries, number, new)
        batch = torch.arange(position.shape[0], device=position.device)[:, None]
        before = ranges[batch, number].permute(2, 0, 3, 4, 5, 1, 6)  # [2, B, 2, L, H, T, D]
        x = scaled(entries, before[0], before[1])
        x = torch.where((position < self.lag)[:, None, None, None, :, None], entries, x)
        last = number[:, -1:] + torch.arange(2, device=position.device)
        new.memory["ranges"] = ranges[batch, last]
        return frozen(x.var(-1, correction=0).sum(1).mean((1, 2)), new)

    def score(self, view: CacheView) -> Tensor:
        """State 0."""
        return view.state()[:, 0]

    def _ranges(self, entries: Tensor, number: Tensor, new: NewTokens) -> Tensor:
        """Least and greatest of the chunk before the pass's first, of that, and of those after.

        Returns:
            ``[B, chunks + 1, 2, 2, L, H, D]``: least and greatest, of keys and values.
        """
        known = new.memory["ranges"]  # [B, 2, 2, 2, L, H, D]
        chunks = (number.shape[1] - 1) // self.lag + 2
        # Whether the pass goes on with a chunk that an earlier one began.
        opened = (new.position[:, :1] % self.lag > 0)[:, :, None, None, None]
        where = number[:, None, None, None, :, None].expand_as(entries)
        found = []
        for bound, (reduce, empty) in enumerate((("amin", torch.inf), ("amax", -torch.inf))):
            room = entries.new_full((*entries.shape[:4], chunks, entries.shape[-1]), empty)
            room[..., 0, :] = torch.where(opened, known[:, 1, bound], empty)
            found.append(room.scatter_reduce(4, where, entries, reduce).movedim(4, 1))
        before = torch.where(opened[..., None], known[:, 0], known[:, 1])[:, None]
        return torch.cat([before, torch.stack(found, 2)], 1)


def scaled(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Scale ``x`` so that ``least`` becomes 0 and ``most`` 1."""
    return (x - least) / (most - least).clamp(min=_LEAST_RANGE)
