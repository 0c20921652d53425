"""The worker's side: rows of entries in vLLM's memory, and the passes that write and cut them.

vLLM says of a pass how many tokens each request brings, how many it has, and which blocks it holds.
Blocks tell requests apart, since no two hold the same one, and how many pages may be in use: that
is all that is read of them. Which page a row gets, the engine's own :class:`RaggedCache` decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmkv.engine.backends.torch.step import DecodeStep, PrefillChunk
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.cache.layout import COLUMNS, Layout
from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import CacheView
from mmkv.engine.scorer_state import (
    has_on_append,
    score_entries,
    sequence_memory,
    view_of,
    write_state,
)
from mmkv.vllm.ranks import Ranks
from mmkv.vllm.settings import Settings, entry_size


@dataclass(eq=False)
class HeldRequest:
    """A request as the worker knows it: its slot in the cache, tokens so far, blocks."""

    seq: int
    seen: int = 0
    blocks: set[int] = field(default_factory=set)


@dataclass
class Arrival:
    """What one request brings to a pass.

    Attributes:
        seen: tokens it has had; new: those it brings; prompt: whether they are part of its prompt.
    """

    seen: int
    new: int
    blocks: Sequence[int]
    prompt: bool


class WorkerRows:
    """All requests of one worker.

    Args:
        raw: int8, the memory of ``blocks`` blocks, block after block.
        settings: what bounds a request; ranks: the tensor-parallel group.

    Attributes:
        spec: of the heads that this rank has; cache: their rows.
    """

    def __init__(self, raw: Tensor, blocks: int, settings: Settings, ranks: Ranks) -> None:
        self.settings, self.ranks, self.spec = settings, ranks, settings.local
        layout, spec = settings.layout, self.spec
        pages = blocks * spec.rows
        pool = PagePool(
            layout.page_size,
            spec.head_dim,
            pages,
            layout.dtype,
            raw.device,
            limit=pages,
            state_size=layout.state,
            form=layout.form,
            columns=columns_in(raw, pages, layout),
        )
        pool.take(spec.rows)  # block 0 is vLLM's null block
        memory = sequence_memory(settings.policy, spec, layout.dtype)
        self.cache = RaggedCache(pool, spec.entry_layers, spec.num_kv_heads, memory)
        heads = settings.spec.num_kv_heads
        self._shares = settings.policy.shares(settings.allowed, spec.entry_layers, heads)
        gates = settings.gates
        self.gates = None if gates is None else gates.to(raw.device, layout.dtype)
        self._owner: dict[int, HeldRequest] = {}

    @property
    def requests(self) -> list[HeldRequest]:
        """Requests whose entries are still there, the oldest first."""
        return list(dict.fromkeys(self._owner.values()))

    def begin(self, arrivals: Sequence[Arrival]) -> Pass:
        """Begin a pass over some requests; pages of those that are gone come free first."""
        held = [self._find(arrival) for arrival in arrivals]
        return Pass(self, held, arrivals)

    def log_beta(self, layer: int, hidden: Tensor | None) -> Tensor | None:
        """Return float32 ``[T, kv_heads]`` of this rank's heads; None without gates."""
        if self.gates is None:
            return None
        if hidden is None:
            raise PolicyError(
                "mmkv: this model's attention layers do not show vLLM's plugins what they read, "
                "which gates need; choose a policy without gates"
            )
        first = self.ranks.rank * self.spec.num_kv_heads
        return self.gates.log_beta(layer, hidden)[:, first : first + self.spec.num_kv_heads]

    def cut(self, held: HeldRequest, slack: int) -> None:
        """Evict from a request what stands above its budget, and more than ``slack`` above it."""
        settings, cache, policy = self.settings, self.cache, self.settings.policy
        lengths = self.ranks.heads(cache.length[held.seq])  # [L, H] of all ranks
        if not self._shares.exceeded(lengths.flatten(), slack // settings.spec.rows):
            return
        entries = cache.entries(held.seq)
        needs = policy.scoring.needs
        view = view_of(cache, held.seq, entries, held.seen, 0, needs)
        scores = score_entries(cache, policy, entries, view, settings.allowed // self.ranks.size)
        victims = self._victims(scores, view, lengths)
        cache.drop(held.seq, victims, entries)

    def _victims(self, scores: Tensor, view: CacheView, lengths: Tensor) -> Tensor:
        policy, allowed, ranks = self.settings.policy, self.settings.allowed, self.ranks
        if ranks.size == 1:
            return policy.lowest(scores, view, allowed)
        every, scores, own = ranks.joined(scores, view, lengths)
        victims = policy.lowest(scores, every, allowed)
        return own[victims][own[victims] >= 0]

    def _find(self, arrival: Arrival) -> HeldRequest:
        held = self._owner.get(arrival.blocks[0]) if arrival.seen else HeldRequest(-1)
        if held is None or held.seen != arrival.seen:
            raise RuntimeError(
                f"mmkv: vLLM goes on with a request of {arrival.seen} tokens, of which mmkv has "
                f"{0 if held is None else held.seen}; report this with vLLM's version"
            )
        for block in arrival.blocks:
            if block not in held.blocks:
                self._reclaim(block)
                self._owner[block] = held
                held.blocks.add(block)
        if held.seq < 0:
            held.seq = self.cache.open()
        return held

    def _reclaim(self, block: int) -> None:
        """Free the request that had a block which vLLM has given to another."""
        gone = self._owner.get(block)
        if gone is None:
            return
        self.cache.close(gone.seq)
        for each in gone.blocks:
            if self._owner.get(each) is gone:
                del self._owner[each]


class Pass:
    """One forward pass over some requests: attends layer by layer, then cuts.

    Replies decode a token each, together; each prompt reads a chunk.
    """

    def __init__(
        self, rows: WorkerRows, held: Sequence[HeldRequest], arrivals: Sequence[Arrival]
    ) -> None:
        self.rows, cache, spec = rows, rows.cache, rows.spec
        device = cache.length.device
        needs = rows.settings.policy.scoring.needs
        self.held, self._new = held, [arrival.new for arrival in arrivals]
        self.tokens = sum(self._new)
        self._log_beta: list[Tensor] = []
        self._chunks: list[tuple[int, slice, PrefillChunk]] = []
        self._stepping: list[int] = []
        at, where = 0, []
        for index, (one, arrival) in enumerate(zip(held, arrivals, strict=True)):
            if arrival.new == 1 and not arrival.prompt:
                self._stepping.append(index)
                where.append(at)
            else:
                position = torch.arange(one.seen, one.seen + arrival.new, device=device)
                text = torch.zeros(arrival.new, dtype=torch.uint8, device=device)
                after = one.seen + arrival.new
                chunk = PrefillChunk(
                    cache, spec, one.seq, position, text, needs, after, one.seen > 0
                )
                self._chunks.append((index, slice(at, at + arrival.new), chunk))
            at += arrival.new
        self._where = torch.tensor(where, device=device)
        self._step: DecodeStep | None = None
        if self._stepping:
            seen = [held[index].seen for index in self._stepping]
            seqs = torch.tensor([held[index].seq for index in self._stepping], device=device)
            at_token = torch.tensor(seen, device=device)
            self._step = DecodeStep(cache, spec, seqs, at_token, max(seen) + 1, needs)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None
    ) -> Tensor:
        """Store keys and values ``[T, H, D]`` and attend with queries ``[T, Hq, D]``.

        Args:
            hidden: what the layer's attention reads, ``[T, d]``; None: gates do not ask.

        Returns:
            ``[T, Hq D]``.
        """
        out = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for _, tokens, chunk in self._chunks:
            out[tokens] = chunk.attend(layer, query[tokens], key[tokens], value[tokens])
        if self._step is not None:
            at = self._where
            out[at] = self._step.attend(layer, query[at], key[at], value[at])
        if (log_beta := self.rows.log_beta(layer, hidden)) is not None:
            self._log_beta.append(log_beta)
        if layer == self.rows.spec.entry_layers - 1:
            self._finish()
        return out

    def _finish(self) -> None:
        rows, settings = self.rows, self.rows.settings
        log_beta = torch.stack(self._log_beta, 1) if self._log_beta else None  # [T, L, H]
        scorer = settings.policy.scoring if has_on_append(settings.policy.scoring) else None
        for _, tokens, chunk in self._chunks:
            chunk.finish(None if log_beta is None else log_beta[tokens])
            if scorer is not None:
                chunk.write_state(scorer, [], _no_outputs)
        step = self._step
        if step is not None:
            step.finish(None if log_beta is None else log_beta[self._where])
            if scorer is not None:
                slots, where = step.slots[..., None], step.position[:, None]
                write_state(rows.cache, scorer, step.seqs, slots, where, False, [], _no_outputs)
        for one, new in zip(self.held, self._new, strict=True):
            one.seen += new
        for index, _, _ in self._chunks:
            rows.cut(self.held[index], 0)
        slack = settings.interval.slack(settings.allowed, settings.spec.rows)
        for index in self._stepping:
            rows.cut(self.held[index], slack)


def _no_outputs(layer: int) -> Tensor:
    raise PolicyError("mmkv: the layers' output matrices are vLLM's")


def columns_in(raw: Tensor, pages: int, layout: Layout) -> dict[str, Tensor]:
    """View memory ``raw`` int8 as the columns of so many pages, entry after entry.

    vLLM counts these bytes: what an entry has beside key and value lies in the same block.
    """
    size, end, made = entry_size(layout), 0, {}
    for name, column in COLUMNS.items():
        dtype, shape = layout.dtype_of(column), layout.shape(column)
        wide = layout.page_bytes(column) // layout.page_size
        if not wide:
            made[name] = torch.empty((pages, *shape), dtype=dtype, device=raw.device)
            continue
        end = -(-end // dtype.itemsize) * dtype.itemsize
        typed, step = raw.view(dtype), size // dtype.itemsize
        strides = (layout.page_size * step, step, 1)[: len(shape) + 1]
        start = typed.storage_offset() + end // dtype.itemsize
        made[name] = torch.as_strided(typed, (pages, *shape), strides, start)
        end += wide
    return made
