"""CpuBackend: steps and evictions in C, for float32 weights on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.backends.base import Backend, Batch, Counts, LoadedModel, Scored
from mmkv.engine.backends.cpu.decoder import NativeDecoder
from mmkv.engine.backends.cpu.evictor import MOST_VICTIMS, NativeEvictor
from mmkv.engine.backends.cpu.kernels import (
    NativeChunkAttention,
    native_chunk_attention,
    native_window_attention,
)
from mmkv.engine.cache import Entries, RaggedCache
from mmkv.engine.policies.base import CacheView, WindowReduction
from mmkv.engine.scorer_state import (
    QUERIES,
    WindowAttention,
    score_entries,
    window_attention,
    write_state,
)

if TYPE_CHECKING:
    from mmkv.engine.backends.base import ChunkFunction


class CpuBackend(Backend):
    """Decodes and evicts in one call of C; either part may be missing.

    Attributes:
        decoder: the model laid out for C, or None where it cannot run there or is switched off.
        evictor: None where nothing is evicted.
    """

    name, path, devices = "cpu", "native", ("cpu",)
    steps = True

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        super().__init__(model, cache)
        weights, gates, policy = model.decoder.weights, model.decoder.gates, model.policy
        self._reason = NativeDecoder.unsupported_reason(weights, gates, model.decoder.hosted)
        self.decoder: NativeDecoder | None = None
        self.evictor: NativeEvictor | None = None
        self._chunk_attention: NativeChunkAttention | None = None
        if NativeChunkAttention.takes(cache):
            self._chunk_attention = native_chunk_attention()
        if not self._reason:
            spec = model.spec
            self.decoder = NativeDecoder(spec, weights, gates, model.needs.mass, model.decoder.taps)
            if policy.evicts:
                self.evictor = NativeEvictor(policy, spec.entry_layers, spec.num_kv_heads)

    def switch_off(self) -> None:
        """Leave every step, eviction and prompt's attention to torch from now on."""
        self.decoder = self.evictor = self._chunk_attention = None

    def unsupported_reason(self, batch: Batch | None = None) -> str:
        if self.decoder is None:
            return self._reason or "switched off"
        if self.model.decoder.on_gate_input is not None:
            return "on_gate_input is set"
        return ""

    def no_eviction_reason(self) -> str:
        if self.decoder is None:
            return self.unsupported_reason()
        return "" if self.evictor is not None else "write gates"

    @property
    def writes_deaths(self) -> int:
        return 0 if self.evictor is None else MOST_VICTIMS

    @property
    def scores_in_torch(self) -> bool:
        """Whether C selects and drops by scores that torch has computed."""
        return self.evictor is not None and self.evictor.given

    @property
    def chunk_attention(self) -> ChunkFunction | None:
        return self._chunk_attention

    @property
    def window_attention(self) -> WindowAttention | None:
        return None if self.decoder is None else _window_attention

    def decode(self, batch: Batch, counts: Counts) -> Tensor:
        """See :class:`mmkv.engine.backends.base.Backend`.

        The eviction is part of the same call. Both are counted even if Ctrl-C comes when C returns.
        """
        model, decoder = self.model, self.decoder
        assert decoder is not None, "ask unsupported_reason first"
        # In the same call, where all that the scores are computed from is in the cache by then.
        gated = model.policy.admission is not None  # what they refuse goes first, in torch
        later = gated or model.has_on_append or model.has_on_step
        evictor = self.evictor
        if evictor is not None and (evictor.given or later):
            evictor = None
        requests = None if evictor is None else evictor.request(batch)
        writes = model.write_step(model.angles(batch)) if gated else None
        decoder.latest.done = 0
        try:
            return decoder.step(self.cache, batch, requests)
        finally:
            if decoder.latest.done:
                if not batch.bare:
                    counts.log_beta, counts.step = decoder.log_beta, decoder.noted
                counts.appended = 1
                if self.cache.memory:
                    batch.store_positions(self.cache)
                if evictor is None:
                    counts.uncut = range(len(batch.seqs))
                else:
                    evictor.commit(batch, counts)
                    counts.tried = True
                if model.has_on_append and not batch.bare:
                    self._write_state(decoder, batch)
                if writes is not None:
                    writes.store(self.cache.pool, self._newest_slots(batch.seqs))

    def evict(self, batch: Batch, counts: Counts) -> None:
        if self.evictor is None:
            counts.uncut = range(len(batch.seqs))
        elif not self.evictor.given:
            self.evictor.evict(self.cache, batch, counts)
        else:
            self._evict_by_scores(self.evictor, batch, counts)

    def _evict_by_scores(self, evictor: NativeEvictor, batch: Batch, counts: Counts) -> None:
        """Select and drop in C by scores that torch computes, sequence after sequence."""
        cache, policy = self.cache, self.model.policy
        dropped, nan, uncut = [0] * len(batch.seqs), [0] * len(batch.seqs), list[int]()
        counts.dropped, counts.nan, counts.uncut = dropped, nan, uncut
        for index, (seq, allowed) in enumerate(zip(batch.seqs, batch.allowed, strict=True)):
            if not evictor.takes(batch.entries[index], allowed):
                uncut.append(index)
                continue
            entries = cache.entries(seq)
            view = batch.view(index, entries, cache, self.model)
            scores, victims = score_entries(cache, policy, entries, view, allowed), None
            one = Counts()
            try:
                evictor.evict(cache, batch.only(index), one, scores.contiguous())
            finally:
                if one.dropped:
                    dropped[index], nan[index] = one.dropped[0], one.nan[0]
            if one.uncut:
                victims = policy.lowest(scores, view, allowed)
                cache.drop(seq, victims, entries)
                dropped[index], nan[index] = victims.numel(), int(scores[victims].isnan().sum())
            if index in batch.recorded:
                counts.note(index, Scored(view, scores, victims))

    def _write_state(self, decoder: NativeDecoder, batch: Batch) -> None:
        """Give the entries of the step that C has just made their state."""
        runs, scorer, outputs = batch.runs, self.model.policy.scoring, self.model.decoder.output
        for at in range(max(map(len, runs))):  # token after token: a scorer may remember the last
            rows = [run[at] for run in runs if at < len(run)]
            behind = [len(run) - 1 - at for run in runs if at < len(run)]
            seqs = [batch.seqs[row] for row in rows]
            slots = self._newest_slots(seqs, behind)[..., None]
            taps = [tap[rows, None] for tap in decoder.tapped]
            position = torch.tensor([batch.seen[row] for row in rows])[:, None]
            where = self.cache, scorer, torch.tensor(seqs), slots, position
            write_state(*where, False, taps, outputs)

    def _newest_slots(self, sequences: Sequence[int], behind: Sequence[int] = (0,)) -> Tensor:
        """Flat slots ``[B, L, H]`` of the last entry of every row but for ``behind`` more."""
        cache = self.cache
        seqs = torch.tensor(sequences)
        last = cache.length[seqs] - 1 - torch.tensor(behind)[:, None, None]
        size = cache.pool.page_size
        page = cache.table[seqs].gather(-1, (last // size)[..., None])[..., 0]
        return page * size + last % size


def _window_attention(
    cache: RaggedCache, seq: int, entries: Entries, view: CacheView, reduction: WindowReduction
) -> Tensor:
    """Compute :func:`mmkv.engine.scorer_state.window_attention`, in C what C knows."""
    if reduction.queries not in ("mean", "max"):
        return window_attention(cache, seq, entries, view, reduction)
    return native_window_attention(cache, seq, cache.memory[QUERIES][seq], view.seen, reduction)
