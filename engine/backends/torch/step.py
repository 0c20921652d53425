"""The cache side of one forward pass: a prefill chunk of one sequence, or a decode step of many."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.backends.cuda.kernels.available import on_triton
from engine.backends.cuda.kernels.prefill_attention import prefill_attention
from engine.backends.torch.chunk_attention import chunk_attention
from engine.backends.torch.ragged_attention import merge, ragged_attention
from engine.backends.torch.windowed_attention import windowed_attention
from engine.backends.torch.worklist import LayerWork, build_worklist
from engine.cache import RaggedCache
from engine.model.spec import DecoderSpec
from engine.query_window import QueryWindow


class PrefillChunk:
    """C new tokens of one sequence: causal among themselves, full towards what is retained.

    Args:
        position: ``[C]`` token indices; modality: ``[C]`` uint8.
        window: where recent queries are kept for attention scorers, or None.
        seen: tokens seen, this chunk included; retained: whether the sequence holds entries. The
            host knows both: reading them from tensors would make it wait for the device.
    """

    def __init__(
        self,
        cache: RaggedCache,
        spec: DecoderSpec,
        seq: int,
        position: Tensor,
        modality: Tensor,
        window: QueryWindow | None,
        seen: int,
        retained: bool,
    ) -> None:
        self.cache, self.spec, self.window = cache, spec, window
        self.position, self.seen, self.retained = position, seen, retained
        page_size = cache.pool.page_size
        ids = torch.tensor([seq], device=position.device)
        count = position.numel()
        self.past: list[LayerWork] | None = None
        self.length = cache.length[seq].clone()  # of what was retained before this chunk
        self.paged = on_triton(cache.pool.keys)
        if self.retained and not self.paged:
            self.past = build_worklist(
                cache.length[ids], cache.table[ids], page_size, cache.pool.keys.dtype
            )
        self.slots = cache.append(ids, count)[0]
        self.table = cache.table[seq]
        cache.pool.position.view(-1)[self.slots] = position.int()
        cache.pool.modality.view(-1)[self.slots] = modality
        self.now = None
        if any(window and window < self.seen for window in spec.sliding_window):
            self.now = build_worklist(
                cache.length[ids], cache.table[ids], page_size, cache.pool.keys.dtype
            )
        if self.window is not None:
            self.window.advance(position)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`engine.model.decoder.StepAttention`."""
        spec, pool = self.spec, self.cache.pool
        count, scale = query.shape[0], spec.head_dim**-0.5
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        slot = self.slots[layer]
        pool.keys.flatten(0, 1)[slot] = key
        pool.values.flatten(0, 1)[slot] = value
        if self.window is not None:
            self.window.push(layer, query)
        grouped = query.reshape(spec.num_kv_heads, spec.group * count, spec.head_dim)
        limit = spec.sliding_window[layer]
        if limit and limit < self.seen:
            assert self.now is not None
            where = self.position.repeat(spec.num_kv_heads, spec.group)
            out = windowed_attention(
                grouped,
                where,
                pool.keys,
                pool.values,
                pool.position,
                self.now[layer],
                scale,
                limit,
            )
        else:
            out, lse = chunk_attention(query, key, value, scale)
            past = self._attend_to_past(layer, query, grouped, scale)
            if past is not None:
                out, _ = merge(past, (out, lse))
        return out.reshape(spec.num_heads, count, -1).transpose(0, 1).reshape(count, -1)

    def _attend_to_past(
        self, layer: int, query: Tensor, grouped: Tensor, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """Compute output ``[Hq, C, D]`` and log-sum-exp ``[Hq, C]``.

        None when nothing was retained.
        """
        pool = self.cache.pool
        if not self.retained:
            return None
        if self.paged:
            return prefill_attention(
                query, pool.keys, pool.values, self.length[layer], self.table[layer], scale
            )
        assert self.past is not None
        out, lse = ragged_attention(grouped, pool.keys, pool.values, self.past[layer], scale)
        return out.view(query.shape), lse.view(query.shape[:2])

    def store_gates(self, log_beta: Tensor) -> None:
        """Write log_beta ``[C, L, H]`` into the slots of this chunk."""
        self.cache.pool.log_beta.view(-1)[self.slots] = log_beta.permute(1, 2, 0)


class DecodeStep:
    """One new token for each of B sequences.

    Args:
        seqs: ``[B]`` sequence slots; position: ``[B]`` token indices.
        seen: the largest token count among the sequences, this token included.
        windows: per sequence, where recent queries are kept, or None.
    """

    def __init__(
        self,
        cache: RaggedCache,
        spec: DecoderSpec,
        seqs: Tensor,
        position: Tensor,
        seen: int,
        windows: list[QueryWindow | None],
    ) -> None:
        self.cache, self.spec, self.seen = cache, spec, seen
        self.windows = windows if any(w is not None for w in windows) else None
        self.slots = cache.append(seqs, 1)[..., 0]
        self.position = position
        pool = cache.pool
        pool.position.view(-1)[self.slots] = position.int()[:, None, None].expand_as(self.slots)
        pool.modality.view(-1)[self.slots.flatten()] = 0
        self.work = build_worklist(
            cache.length[seqs], cache.table[seqs], pool.page_size, pool.keys.dtype
        )
        self._layer_slots = self.slots.transpose(0, 1).flatten(1).unbind(0)
        self._keys, self._values = pool.keys.flatten(0, 1), pool.values.flatten(0, 1)
        for index, window in enumerate(windows):
            if window is not None:
                window.advance(position[index : index + 1])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See :class:`engine.model.decoder.StepAttention`."""
        spec, pool = self.spec, self.cache.pool
        slot = self._layer_slots[layer]
        self._keys.index_copy_(0, slot, key.flatten(0, 1))
        self._values.index_copy_(0, slot, value.flatten(0, 1))
        if self.windows is not None:
            for index, window in enumerate(self.windows):
                if window is not None:
                    window.push(layer, query[index][:, None])
        grouped = query.reshape(-1, spec.group, spec.head_dim)
        scale, limit = spec.head_dim**-0.5, spec.sliding_window[layer]
        if limit and limit < self.seen:
            where = self.position.repeat_interleave(spec.num_kv_heads)[:, None]
            out = windowed_attention(
                grouped,
                where.expand(-1, spec.group),
                pool.keys,
                pool.values,
                pool.position,
                self.work[layer],
                scale,
                limit,
            )
        else:
            out, _ = ragged_attention(grouped, pool.keys, pool.values, self.work[layer], scale)
        return out.view(query.shape[0], -1)

    def store_gates(self, log_beta: Tensor) -> None:
        """Write log_beta ``[B, L, H]`` into the slots of this step."""
        self.cache.pool.log_beta.view(-1)[self.slots] = log_beta
