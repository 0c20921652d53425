"""The last few queries of a sequence, kept for scorers that look at attention."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from engine.backends.cuda.kernels.available import on_triton
from engine.backends.cuda.kernels.window_scores import window_scores
from engine.cache import Entries, RaggedCache
from engine.model.spec import DecoderSpec
from engine.policies.base import CacheView


class QueryWindow:
    """A window of the last w queries of every layer; only sessions that need one have one.

    Attributes:
        layers: per layer ``[Hq, w, D]`` post-RoPE queries, oldest first; never written in place.
        position: ``[w]`` token index, -1 where fewer than w queries have been seen.
    """

    def __init__(
        self, spec: DecoderSpec, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.spec, self.size = spec, size
        empty = torch.zeros(spec.num_heads, size, spec.head_dim, dtype=dtype, device=device)
        self.layers = [empty] * spec.num_layers
        self.position = torch.full((size,), -1, device=device)
        self._before = (self.layers, self.position)

    @property
    def query(self) -> Tensor:
        """Return all queries as one tensor ``[L, Hq, w, D]``."""
        return torch.stack(self.layers)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the queries."""
        return sum(layer.nbytes for layer in self.layers)

    def restore(self, query: Tensor, position: Tensor) -> None:
        """Take over saved queries ``[L, Hq, w, D]`` and their positions ``[w]``."""
        self.layers, self.position = list(query.unbind(0)), position

    def advance(self, position: Tensor) -> None:
        """Note the token indices ``[T]`` of the queries about to be pushed, once per pass."""
        self._before = (list(self.layers), self.position)
        self.position = torch.cat([self.position, position])[-self.size :]

    def push(self, layer: int, query: Tensor) -> None:
        """Append the queries ``[Hq, T, D]`` of one layer."""
        recent = query[:, -self.size :]
        kept = self.layers[layer][:, recent.shape[1] :]
        self.layers[layer] = torch.cat([kept, recent], 1)

    def roll_back(self, seen: int) -> None:
        """Undo the last pass if it pushed queries at or past token index ``seen``."""
        if int(self.position[-1]) >= seen:
            self.layers, self.position = self._before

    def attention(self, cache: RaggedCache, seq: int, entries: Entries, view: CacheView) -> Tensor:
        """Compute attention probabilities of the window over the retained entries.

        For each layer and KV head: softmax over the row's entries (causal: an entry after the
        query counts nothing), averaged over the window's queries and the group's heads.

        Returns:
            float32 ``[N]``, row-major as the view.
        """
        if on_triton(cache.pool.keys):
            return self._attention_on_pages(cache, seq, entries)
        spec, live = self.spec, view.live()
        slot = view.to_rows(entries.slot, 0)
        position = view.to_rows(view.position, torch.iinfo(torch.int64).max)
        known = self.position >= 0
        query_at = self.position[known]
        keys = cache.pool.keys.flatten(0, 1)
        shares = []
        for layer in range(spec.num_layers):
            rows = slice(layer * spec.num_kv_heads, (layer + 1) * spec.num_kv_heads)
            query = self.layers[layer][:, known].float()
            grouped = query.reshape(spec.num_kv_heads, -1, spec.head_dim) * spec.head_dim**-0.5
            scores = grouped @ keys[slot[rows]].float().transpose(1, 2)
            allowed = position[rows][:, None] <= query_at.repeat(spec.group)[:, None]
            probability = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
            # A query whose own entry and all before it are gone attends to nothing.
            shares.append(probability.nan_to_num(0.0).mean(1))
        return torch.cat(shares)[live]

    def _attention_on_pages(self, cache: RaggedCache, seq: int, entries: Entries) -> Tensor:
        """Return :meth:`attention` by the kernel, which reads keys where they lie."""
        pool = cache.pool
        batch_slot = torch.zeros(1, dtype=torch.int64, device=pool.keys.device)
        shares = window_scores(
            self.query[None],
            self.position[None],
            pool.keys,
            pool.position,
            cache.length[seq][None],
            cache.table[seq][None],
            batch_slot,
            self.spec.head_dim**-0.5,
        )
        return shares[0].flatten(0, 1)[entries.row, entries.offset]

    def copy(self) -> QueryWindow:
        """Return an independent copy."""
        other = copy.copy(self)
        other.layers = list(self.layers)
        return other
