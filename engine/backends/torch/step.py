"""The cache side of one forward pass: prefill chunks, or a decode step, of many sequences."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import on_triton
from mmkv.engine.backends.cuda.kernels.buffers import NewestTokens
from mmkv.engine.backends.cuda.kernels.decode_attention import decode_attention, empty_partials
from mmkv.engine.backends.cuda.kernels.pointwise import merged
from mmkv.engine.backends.cuda.kernels.prefill_attention import prefill_attention
from mmkv.engine.backends.cuda.kernels.worklist import build_worklist as list_tiles
from mmkv.engine.backends.cuda.kernels.worklist import (
    default_runs,
    empty_worklist,
    tile_entries,
)
from mmkv.engine.backends.torch.attention import (
    LayerWork,
    build_worklist,
    chunk_attention,
    ragged_attention,
    windowed_attention,
)
from mmkv.engine.backends.torch.write_step import WriteGatePass
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.state_layer import State, StateLayer
from mmkv.engine.model.weights import state_name
from mmkv.engine.policies.base import ChunkStates, Group, Needs, Pruner, Scorer, shaped
from mmkv.engine.scorer_state import QUERIES, Rows, attention_mass, store_queries, write_state

_Reads = Literal["", "all", "last", "keys"]


class PrefillChunk:
    """C new tokens of one sequence: causal among themselves, full towards what is retained.

    Args:
        position: ``[C]`` token indices; modality: ``[C]`` uint8.
        needs: what the scorer reads: recent queries, attention added up; None: neither.
        seen: tokens seen, this chunk included; retained: whether the sequence holds entries. The
            host knows both: reading them from tensors would make it wait for the device.
        pruner: drops visual tokens of the chunk on the way, or None.
        writes: says what the chunk's tokens see under a write gate, or None.
        native: attends in C where nothing limits what a token sees, or None:
            :class:`mmkv.engine.backends.cpu.kernels.NativeChunkAttention`.
        whole_pictures: some are in the chunk whose tokens see all of their picture.
        merged: bool ``[V]``, which of its visual tokens a merger has kept, or None.

    Attributes:
        before: the states of layers without entries that :meth:`put_states` has replaced.
    """

    before: State

    def __init__(
        self,
        cache: RaggedCache,
        spec: DecoderSpec,
        seq: int,
        position: Tensor,
        modality: Tensor,
        needs: Needs | None,
        seen: int,
        retained: bool,
        pruner: Pruner | None = None,
        writes: WriteGatePass | None = None,
        native: Callable[[RaggedCache, int, int, Tensor], Tensor] | None = None,
        whole_pictures: bool = False,
        merged: Tensor | None = None,
    ) -> None:
        self.cache, self.spec, self.seq, self.needs = cache, spec, seq, needs or Needs()
        self._native = None if pruner is not None or whole_pictures else native
        self._until = _picture_ends(position, modality > 0) if whole_pictures else position
        self._whole_pictures = whole_pictures
        self.position, self.seen, self.retained = position, seen, retained
        page_size = cache.pool.page_size
        ids = torch.tensor([seq], device=position.device)
        count = position.numel()
        self.past: list[LayerWork] | None = None
        self.length = cache.length[seq].clone()  # of what was retained before this chunk
        self.paged = _kernels_read(cache.pool)
        if self.retained and not self.paged and self._native is None:
            self.past = build_worklist(
                cache.length[ids], cache.table[ids], page_size, cache.pool.dtype
            )
        self.slots = cache.append(ids, count)[0]
        self.table = cache.table[seq]
        cache.pool.position.view(-1)[self.slots] = position.int()
        cache.pool.modality.view(-1)[self.slots] = modality
        self.now = None
        if any(window and window < self.seen for window in spec.sliding_window):
            self.now = build_worklist(
                cache.length[ids], cache.table[ids], page_size, cache.pool.dtype
            )
        # Until the pass is over, so that a chunk that fails has changed nothing.
        self._queries: list[Tensor] = []
        self._mass: list[tuple[Tensor, Tensor]] = []
        self._visual, self._pruner, self._merged = modality > 0, pruner, merged
        self._writes = writes
        self._received: Tensor | None = None
        self._keys: Tensor | None = None
        self._dropped: Tensor | None = None  # bool [C], of the chunk's tokens
        self._states: State = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, last: bool = False
    ) -> Tensor:
        """Store the chunk's keys and values, then attend; see
        :class:`mmkv.engine.model.decoder.StepAttention`. ``last``: for the last token alone.
        """
        spec, pool = self.spec, self.cache.pool
        scale = spec.head_dim**-0.5
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        slot = self.slots[layer]
        if self._dropped is not None:
            slot = slot[:, ~self._dropped]
        pruner = self._pruner
        reads: _Reads = pruner.reads if pruner is not None and layer == pruner.layer - 1 else ""
        if reads == "keys":
            self._keys = key.transpose(0, 1).flatten(1)
        key, value = pool.store(slot, key, value)
        query = pool.form.rotate(query)
        self._note(layer, query, reads)
        query = query[:, -1:] if last else query
        count = query.shape[1]
        limit = spec.sliding_window[layer]
        if self._writes is not None:
            out = self._writes.attend(
                pool,
                layer,
                slot,
                query.contiguous().unflatten(0, (spec.num_kv_heads, -1)),
                self.position[-count:],
                self.cache.length[self.seq, layer],
                self.table[layer],
            )
        elif limit and limit < self.seen:
            assert self.now is not None
            times = spec.num_kv_heads, spec.group
            out = windowed_attention(
                query.reshape(spec.num_kv_heads, -1, spec.head_dim),
                self.position[-count:].repeat(times),
                pool.stored_keys,
                pool.stored_values,
                pool.position,
                self.now[layer],
                scale,
                limit,
                self._until[-count:].repeat(times) if self._whole_pictures else None,
            )
        elif self._native is not None:
            out = self._native(self.cache, self.seq, layer, query.transpose(0, 1))
            out = pool.form.rotate(out.view(count, spec.num_heads, -1))
            return out.view(count, -1)
        else:
            out, lse = chunk_attention(query, key, value, scale, self._visible(count))
            past = self._attend_to_past(layer, query, scale)
            if past is not None:
                out = merged(*past, out, lse)
        out = pool.form.rotate(out.reshape(spec.num_heads, count, -1))
        return out.transpose(0, 1).reshape(count, -1)

    def _note(self, layer: int, query: Tensor, reads: _Reads) -> None:
        """Keep what scorer and pruner read of a layer's queries ``[Hq, C, D]``."""
        if self.needs.queries:
            self._queries.append(query[:, -self.needs.queries :].clone())
        if self.needs.mass:
            where = self.position, self._until
            rows, mass = self._mass_of(layer, query, where, self.needs.mass)
            self._mass.append((rows.slot.flatten(), mass.flatten()))
        if reads and reads != "keys":
            self._received = self._paid_to_chunk(layer, query, reads)

    def _visible(self, count: int) -> Tensor | None:
        """Return bool ``[C, C]``, which of the chunk's tokens each sees; None: those before it."""
        if not self._whole_pictures or count == 1:
            return None
        at, until = self.position, self._until
        if self._dropped is not None:
            at, until = at[~self._dropped], until[~self._dropped]
        return at <= until[:, None]

    def mix(self, layer: int, by: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """See :class:`mmkv.engine.model.decoder.StepAttention`; :meth:`put_states` ends it."""
        parts = by.states(self.cache.pool.dtype)
        kept = {name: self.cache.states[state_name(layer, name)][self.seq] for name in parts}
        mixed, made = by.chunk(inputs, kept)
        self._states |= {state_name(layer, name): made[name] for name in parts}
        return mixed

    @functools.cached_property
    def _longest(self) -> list[int]:
        """The entries of each layer's longest row, the chunk's included: one read for all."""
        return self.cache.length[self.seq].amax(-1).tolist()

    def put_states(self) -> None:
        """Have the sequence's layers without entries go on behind the chunk, which is over."""
        states = self.cache.states
        self.before = {name: states[name][self.seq].clone() for name in self._states}
        self.cache.put_states(self.seq, self._states)

    def _attend_to_past(
        self, layer: int, query: Tensor, scale: float
    ) -> tuple[Tensor, Tensor] | None:
        """Compute output ``[Hq, C, D]`` and log-sum-exp ``[Hq, C]``.

        None when nothing was retained.
        """
        pool = self.cache.pool
        if not self.retained:
            return None
        keys, values = pool.stored_keys, pool.stored_values
        if self.paged:
            return prefill_attention(
                query, keys, values, self.length[layer], self.table[layer], scale
            )
        assert self.past is not None
        grouped = query.reshape(self.spec.num_kv_heads, -1, query.shape[-1])
        out, lse = ragged_attention(grouped, keys, values, self.past[layer], scale)
        return out.view(query.shape), lse.view(query.shape[:2])

    def prune(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Ask the policy's pruner which tokens go on into ``layer``; see ``Decoder.forward``."""
        if self._pruner is None or layer != self._pruner.layer:
            return None
        visual = self._visual.nonzero().flatten()  # waits for the device
        if not visual.numel():
            return None
        received = None if self._received is None else self._received[visual]
        made = self._pruner.keep(ChunkStates(hidden, visual, received, self._keys, self._merged))
        call = f"{type(self._pruner).__name__}.keep"
        kept = shaped(made, tuple(visual.shape), call, "bool [V], for each visual token").bool()
        self._dropped = torch.zeros_like(self._visual)
        self._dropped[visual[~kept]] = True
        self._dropped[-1] = False  # the chunk's last state is its result
        return (~self._dropped).nonzero().flatten()

    def write_state(
        self,
        scorer: Scorer,
        taps: Sequence[Tensor],
        outputs: Callable[[int], Tensor],
        prompt: bool = True,
    ) -> None:
        """Have the scorer give the chunk's entries their state; ``taps [C, d]`` each."""
        seqs = torch.tensor([self.seq], device=self.position.device)
        slots, taps = self.slots[None], [tap[None] for tap in taps]
        write_state(self.cache, scorer, seqs, slots, self.position[None], prompt, taps, outputs)

    def finish(self, log_beta: Tensor | None) -> int:
        """Store what the pass has found beside keys and values.

        Args:
            log_beta: ``[C, L, H]`` of this chunk's entries, or None.

        Returns:
            entries of pruned tokens, which are gone again.
        """
        pool, ring = self.cache.pool, self.cache.memory.get(QUERIES)
        if log_beta is not None:
            pool.log_beta.view(-1)[self.slots] = log_beta.permute(1, 2, 0)
        if self._queries and ring is not None:
            seqs = torch.tensor([self.seq], device=ring.device)
            recent = self.position[None, -self.needs.queries :]
            store_queries(ring, seqs, recent, torch.stack(self._queries)[None])
        for slot, mass in self._mass:  # cells without an entry add 0 to slot 0
            pool.state.flatten(0, 1)[:, 0].index_add_(0, slot, mass)
        return self._drop_unfilled()

    def _drop_unfilled(self) -> int:
        """Give back the room of pruned tokens in the layers that did not see them."""
        if self._dropped is None or self._pruner is None:
            return 0
        entries = self.cache.entries(self.seq)
        at = self.cache.pool.position.view(-1)[entries.slot] - self.position[0]
        gone = (at >= 0) & self._dropped[at.long().clamp(min=0)]
        gone &= entries.row >= self._pruner.layer * self.spec.num_kv_heads
        victims = gone.nonzero().flatten()
        self.cache.drop(self.seq, victims, entries)
        return victims.numel()

    def _paid_to_chunk(self, layer: int, query: Tensor, by: Literal["all", "last"]) -> Tensor:
        """Attention that the chunk's tokens get from all of them or the last, ``[C]``."""
        first = 0 if by == "all" else -1
        where = self.position[first:], self._until[first:]
        rows, mass = self._mass_of(layer, query[:, first:], where, "mean")
        count = self.position.numel()
        column = (rows.live.sum(-1) - count)[:, None] + torch.arange(count, device=mass.device)
        return mass.gather(-1, column).mean(0)

    def _mass_of(
        self, layer: int, query: Tensor, where: tuple[Tensor, Tensor], group: Group
    ) -> tuple[Rows, Tensor]:
        """Add up attention of queries ``[Hq, Q, D]``; ``where``: their positions and until which
        they see.
        """
        spec, cache, size = self.spec, self.cache, self.cache.pool.page_size
        length, table = cache.length[self.seq, layer], self.table[layer]
        rows = Rows.of(length, table, size, self._longest[layer])
        mass = attention_mass(
            query.unflatten(0, (spec.num_kv_heads, spec.group)),
            where[0].expand(spec.num_kv_heads, -1),
            cache.pool.stored_keys.flatten(0, 1),
            cache.pool.position.view(-1),
            rows,
            spec.head_dim**-0.5,
            group,
            spec.sliding_window[layer] or 0,
            where[1].expand(spec.num_kv_heads, -1),
        )
        return rows, mass


def _picture_ends(position: Tensor, visual: Tensor) -> Tensor:
    """Return the token index ``[C]`` of the last token of each one's picture; of text, its own."""
    beyond = torch.iinfo(position.dtype).max
    goes_on = visual & torch.cat([visual[1:], visual.new_zeros(1)])
    ends = position.masked_fill(goes_on, beyond)
    return ends.flip(0).cummin(0).values.flip(0)


class PackedChunks:
    """Chunks of B sequences in one pass: products read all tokens, attention those of a sequence.

    See :class:`mmkv.engine.model.decoder.ChunkAttention`.
    """

    def __init__(self, chunks: Sequence[PrefillChunk]) -> None:
        self._chunks = chunks
        self.counts = [chunk.position.numel() for chunk in chunks]  # of the tokens that go on

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with each chunk's queries to its own sequence."""
        return self._attend(layer, query, key, value, last=False)

    def attend_last(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Do as :meth:`attend`, for the last token of each chunk alone."""
        return self._attend(layer, query, key, value, last=True)

    def mix(self, layer: int, by: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Mix each chunk's tokens by the state of its own sequence."""
        parts = zip(*(part.split(self.counts) for part in inputs), strict=True)
        made = [chunk.mix(layer, by, own) for chunk, own in zip(self._chunks, parts, strict=True)]
        return made[0] if len(made) == 1 else torch.cat(made)

    def ends(self) -> Tensor:
        """Return the index of each chunk's last token."""
        ends = torch.tensor(self.counts).cumsum(0) - 1
        return ends.to(self._chunks[0].position.device)

    def prune(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Ask the policy's pruner which tokens of each chunk go on into ``layer``."""
        kept = [
            chunk.prune(layer, part)
            for chunk, part in zip(self._chunks, hidden.split(self.counts), strict=True)
        ]
        if all(part is None for part in kept):
            return None
        every = torch.arange(hidden.shape[0], device=hidden.device).split(self.counts)
        going = [own if part is None else own[part] for own, part in zip(every, kept, strict=True)]
        self.counts = [part.numel() for part in going]
        return torch.cat(going)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, last: bool) -> Tensor:
        parts = zip(*(x.split(self.counts) for x in (query, key, value)), strict=True)
        out = [
            chunk.attend(layer, q, k, v, last)
            for chunk, (q, k, v) in zip(self._chunks, parts, strict=True)
        ]
        return out[0] if len(out) == 1 else torch.cat(out)


class DecodeStep:
    """One new token for each of B sequences.

    Args:
        seqs: ``[B]`` sequence slots; position: ``[B]`` token indices.
        seen: the largest token count among the sequences, this token included.
        needs: what the scorer reads: recent queries, attention added up; None: neither.
    """

    def __init__(
        self,
        cache: RaggedCache,
        spec: DecoderSpec,
        seqs: Tensor,
        position: Tensor,
        seen: int,
        needs: Needs | None = None,
    ) -> None:
        self.cache, self.spec, self.seen = cache, spec, seen
        self.seqs, self.needs = seqs, needs or Needs()
        self.slots = cache.append(seqs, 1)[..., 0]
        self.position = position
        pool = cache.pool
        pool.position.view(-1)[self.slots] = position.int()[:, None, None].expand_as(self.slots)
        pool.modality.view(-1)[self.slots.flatten()] = 0
        self._by_kernel = _DecodeByKernel(self) if _kernels_read(pool) else None
        if self._by_kernel is None:
            self.work = build_worklist(
                cache.length[seqs], cache.table[seqs], pool.page_size, pool.dtype
            )
        self._layer_slots = self.slots.transpose(0, 1).flatten(1).unbind(0)
        self._queries: list[Tensor] = []
        self._mass: list[tuple[Tensor, Tensor]] = []
        self._states: State = {}

    def mix(self, layer: int, by: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """See :class:`mmkv.engine.model.decoder.StepAttention`; :meth:`put_states` ends it."""
        parts = by.states(self.cache.pool.dtype)
        kept = {name: self.cache.states[state_name(layer, name)][self.seqs] for name in parts}
        mixed, made = by.step(inputs, kept)
        self._states |= {state_name(layer, name): made[name] for name in parts}
        return mixed

    def put_states(self) -> None:
        """Have the layers without entries go on behind the token, once nothing can fail."""
        self.cache.put_states(self.seqs, self._states)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec, pool = self.spec, self.cache.pool
        slot = self._layer_slots[layer]
        pool.store(slot, key.flatten(0, 1), value.flatten(0, 1))
        query = pool.form.rotate(query)
        if self.needs.queries:
            self._queries.append(query)
        if self.needs.mass:
            self._add_mass(layer, query)
        grouped = query.reshape(-1, spec.group, spec.head_dim)
        scale, limit = spec.head_dim**-0.5, spec.sliding_window[layer]
        if self._by_kernel is not None:
            out = self._by_kernel.attend(layer, query)
        elif limit and limit < self.seen:
            where = self.position.repeat_interleave(spec.num_kv_heads)[:, None]
            out = windowed_attention(
                grouped,
                where.expand(-1, spec.group),
                pool.stored_keys,
                pool.stored_values,
                pool.position,
                self.work[layer],
                scale,
                limit,
            )
        else:
            keys, values = pool.stored_keys, pool.stored_values
            out, _ = ragged_attention(grouped, keys, values, self.work[layer], scale)
        return pool.form.rotate(out).view(query.shape[0], -1)

    def finish(self, log_beta: Tensor | None) -> None:
        """Store what the step has found beside keys and values.

        Args:
            log_beta: ``[B, L, H]`` of this step's entries, or None.
        """
        pool, ring = self.cache.pool, self.cache.memory.get(QUERIES)
        if log_beta is not None:
            pool.log_beta.view(-1)[self.slots] = log_beta
        if self._queries and ring is not None:
            new = torch.stack(self._queries, 1)[..., None, :]
            store_queries(ring, self.seqs, self.position[:, None], new)
        for slot, mass in self._mass:  # cells without an entry add 0 to slot 0
            pool.state.flatten(0, 1)[:, 0].index_add_(0, slot, mass)

    def _add_mass(self, layer: int, query: Tensor) -> None:
        spec, cache = self.spec, self.cache
        length, table = cache.length[self.seqs, layer], cache.table[self.seqs, layer]
        rows = Rows.of(length.flatten(), table.flatten(0, 1), cache.pool.page_size)
        assert self.needs.mass
        mass = attention_mass(
            query.reshape(-1, spec.group, 1, spec.head_dim),
            self.position.repeat_interleave(spec.num_kv_heads)[:, None],
            cache.pool.stored_keys.flatten(0, 1),
            cache.pool.position.view(-1),
            rows,
            spec.head_dim**-0.5,
            self.needs.mass,
            spec.sliding_window[layer] or 0,
        )
        self._mass.append((rows.slot.flatten(), mass.flatten()))


def _kernels_read(pool: PagePool) -> bool:
    """Whether the Triton kernels of attention run on a pool: codes have no gaps between them."""
    return on_triton(pool.keys) and (pool.form.plain or pool.keys.is_contiguous())


class _DecodeByKernel:
    """The attention of a decode step as one launch a layer, without reading lengths on the host."""

    def __init__(self, step: DecodeStep) -> None:
        self._step, spec, cache = step, step.spec, step.cache
        device = cache.length.device
        tile = tile_entries(spec.head_dim, cache.pool.dtype)
        sizes = step.seqs.numel(), spec.entry_layers, spec.num_kv_heads
        self._work = empty_worklist(*sizes, tile, default_runs(device), device)
        list_tiles(self._work, step.seqs, cache.length)
        self._partials = empty_partials(self._work, spec.group, spec.head_dim)

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Return ``[B, Hq, D]`` for queries of that shape."""
        step, pool = self._step, self._step.cache.pool
        window = step.spec.sliding_window[layer]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        decode_attention(
            query,
            pool.stored_keys,
            pool.stored_values,
            step.cache.table,
            self._work,
            layer,
            self._partials,
            step.spec.head_dim**-0.5,
            out,
            window=NewestTokens(window, pool.position, step.position) if window else None,
        )
        return out
