"""CpuBackend: steps and evictions in C, for float32 weights on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.backends.base import Decoded
from mmkv.engine.backends.cpu.decoder import NativeDecoder
from mmkv.engine.backends.cpu.evictor import NativeEvictor
from mmkv.engine.backends.cpu.kernels import NativeChunkAttention, native_chunk_attention
from mmkv.engine.scorer_state import write_state

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


class CpuBackend:
    """Decodes and evicts in one call of C; either part may be missing.

    Attributes:
        decoder: the model laid out for C, or None where it cannot run there or is switched off.
        evictor: None where nothing is evicted.
        chunk_attention: of prompts; None where C cannot read the cache or is switched off.
    """

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        weights, gates, policy = engine.decoder.weights, engine.decoder.gates, engine.policy
        self._reason = NativeDecoder.unsupported_reason(weights, gates)
        self.decoder: NativeDecoder | None = None
        self.evictor: NativeEvictor | None = None
        self.chunk_attention: NativeChunkAttention | None = None
        if NativeChunkAttention.takes(engine.cache):
            self.chunk_attention = native_chunk_attention()
        if not self._reason:
            spec = engine.spec
            mass, taps = engine.needs.mass, engine.decoder.taps
            self.decoder = NativeDecoder(spec, weights, gates, mass, taps)
            if policy.evicts:
                self.evictor = NativeEvictor(policy, spec.num_layers, spec.num_kv_heads)

    def switch_off(self) -> None:
        """Leave every step, eviction and prompt's attention to torch from now on."""
        self.decoder = self.evictor = self.chunk_attention = None

    def unsupported_reason(self, sessions: Sequence[CachedSequence] = ()) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        engine = self.engine
        if self.decoder is None:
            return self._reason or "switched off"
        if engine.decoder.on_gate_input is not None:
            return "on_gate_input is set"
        for session in sessions:
            if any(window and window <= session.seen for window in engine.spec.sliding_window):
                return "a sliding window is in effect"
        return ""

    def no_eviction_reason(self) -> str:
        """Say why torch evicts; empty when C does, by itself or by scores computed in torch."""
        if self.decoder is None:
            return self.unsupported_reason()
        return "" if self.evictor is not None else "write gates"

    def decode(self, sessions: Sequence[CachedSequence], token_ids: Sequence[int]) -> Decoded:
        """See :class:`mmkv.engine.backends.base.Backend`.

        The eviction is part of the same call. Both are counted even if Ctrl-C comes when C returns.
        """
        engine, decoder = self.engine, self.decoder
        assert decoder is not None, "ask unsupported_reason first"
        # In the same call, where all that the scores are computed from is in the cache by then.
        gated = engine.policy.admission is not None  # what they refuse goes first, in torch
        later = gated or engine.has_born or engine.has_revise
        evictor = None if self.scores_in_torch or later else self.evictor
        requests = None
        if evictor is not None:
            requests = evictor.request(sessions, 1, engine.spec.rows, engine.slack)
        decoder.reset()
        positions = [session.seen for session in sessions]
        writes = engine.write_step(engine.backends.torch.rope(sessions)) if gated else None
        try:
            logits = decoder.step(
                engine.cache,
                [session.seq for session in sessions],
                list(token_ids),
                positions,
                [session.next_position for session in sessions],
                [bool(session.long_rope) for session in sessions],
                requests,
            )
        finally:
            if decoder.stepped:
                for session in sessions:
                    session.count_appended(1)
                uncut = sessions if evictor is None else evictor.commit(sessions)
                if engine.has_born:
                    self._write_state(decoder, sessions, positions)
                if writes is not None:
                    writes.store(engine.cache.pool, self._newest_slots(sessions))
        return Decoded(logits, uncut, refused=evictor is not None)

    @property
    def scores_in_torch(self) -> bool:
        """Whether C selects and drops by scores that torch has computed."""
        return self.evictor is not None and self.evictor.given

    def evict(self, sessions: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        evictor, engine = self.evictor, self.engine
        if evictor is None:
            return sessions
        if not evictor.given:
            return evictor.evict(engine.cache, sessions)
        left = []
        for session in sessions:
            if not evictor.takes(session):
                left.append(session)
                continue
            entries = engine.cache.entries(session.seq)
            view = session.view(entries)
            # Once: a scorer may hand back a state that counts how often it was asked.
            scores = engine.backends.torch.scores(session, entries, view)
            if evictor.evict(engine.cache, [session], [scores.contiguous()]):
                engine.backends.torch.drop_lowest(session, entries, view, scores)
        return left

    def _write_state(
        self, decoder: NativeDecoder, sessions: Sequence[CachedSequence], positions: list[int]
    ) -> None:
        """Give the entries of the step that C has just made their state."""
        cache = self.engine.cache
        seqs = torch.tensor([session.seq for session in sessions])
        slots = self._newest_slots(sessions)[..., None]
        taps = [tap[:, None] for tap in decoder.tapped]
        position = torch.tensor(positions)[:, None]
        write_state(cache, self.engine.policy.scoring, seqs, slots, position, False, taps)

    def _newest_slots(self, sessions: Sequence[CachedSequence]) -> Tensor:
        """Flat slots ``[B, L, H]`` of the last entry of every row."""
        cache = self.engine.cache
        seqs = torch.tensor([session.seq for session in sessions])
        last, size = cache.length[seqs] - 1, cache.pool.page_size
        page = cache.table[seqs].gather(-1, (last // size)[..., None])[..., 0]
        return page * size + last % size
