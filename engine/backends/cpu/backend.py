"""CpuBackend: steps and evictions in C, for float32 weights on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.backends.base import Decoded
from engine.backends.cpu.decoder import NativeDecoder
from engine.backends.cpu.evictor import NativeEvictor

if TYPE_CHECKING:
    from engine.runtime import Runtime
    from engine.sequence import CachedSequence


class CpuBackend:
    """Decodes and evicts in one call of C; either part may be missing.

    Attributes:
        decoder: the model laid out for C, or None where it cannot run there or is switched off.
        evictor: None where C does not know the policy.
    """

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        weights, gates, policy = engine.decoder.weights, engine.decoder.gates, engine.policy
        self._reason = NativeDecoder.unsupported_reason(weights, gates)
        self.decoder: NativeDecoder | None = None
        self.evictor: NativeEvictor | None = None
        if not self._reason:
            self.decoder = NativeDecoder(engine.spec, weights, gates)
            if not NativeEvictor.unsupported_reason(policy):
                self.evictor = NativeEvictor(policy)

    def switch_off(self) -> None:
        """Leave every step and eviction to torch from now on."""
        self.decoder = self.evictor = None

    def unsupported_reason(self, sessions: Sequence[CachedSequence] = ()) -> str:
        """See :class:`engine.backends.base.Backend`."""
        engine = self.engine
        if self.decoder is None:
            return self._reason or "switched off"
        if engine.decoder.on_gate_input is not None:
            return "on_gate_input is set"
        if engine.policy.scoring.needs.queries and engine.policy.evicts:
            return f"policy {engine.policy.name!r} keeps recent queries"
        if engine.needs.mass or engine.has_born:
            return f"policy {engine.policy.name!r} writes state in every step"
        for session in sessions:
            if any(window and window <= session.seen for window in engine.spec.sliding_window):
                return "a sliding window is in effect"
        return ""

    def no_eviction_reason(self) -> str:
        """Say why torch evicts; empty when C does."""
        if self.evictor is not None:
            return ""
        if self.decoder is None:
            return self.unsupported_reason()
        return NativeEvictor.unsupported_reason(self.engine.policy)

    def decode(self, sessions: Sequence[CachedSequence], token_ids: Sequence[int]) -> Decoded:
        """See :class:`engine.backends.base.Backend`.

        The eviction is part of the same call. Both are counted even if Ctrl-C comes when C returns.
        """
        engine, decoder, evictor = self.engine, self.decoder, self.evictor
        assert decoder is not None, "ask unsupported_reason first"
        requests = None
        if evictor is not None:
            requests = evictor.request(sessions, 1, engine.spec.rows, engine.slack)
        decoder.reset()
        try:
            logits = decoder.step(
                engine.cache,
                [session.seq for session in sessions],
                [int(token) for token in token_ids],
                [session.seen for session in sessions],
                [session.next_position for session in sessions],
                [bool(session.long_rope) for session in sessions],
                requests,
            )
        finally:
            if decoder.stepped:
                for session in sessions:
                    session.count_appended(1)
                uncut = sessions if evictor is None else evictor.commit(sessions)
        return Decoded(logits, uncut, refused=True)

    def evict(self, sessions: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """See :class:`engine.backends.base.Backend`."""
        if self.evictor is None:
            return sessions
        return self.evictor.evict(self.engine.cache, sessions)
