"""Compute the floor of a decode step: the bytes that it must read over the measured bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence


@dataclass(frozen=True)
class StepBytes:
    """Bytes that one decode step reads.

    Attributes:
        weights: of the decoder and the output head, once for the whole batch.
        kv: keys and values of all entries, the new ones included.
        gates: weights of the retention gates, which are not part of the floor.
    """

    weights: int
    kv: int
    gates: int

    def floor(self, bandwidth: float) -> float:
        """Compute the seconds for weights and entries at ``bandwidth`` bytes per second."""
        return (self.weights + self.kv) / bandwidth


def weight_bytes(engine: Runtime, sequences: int = 1) -> int:
    """Count the bytes of the weights that a step of so many sequences reads, at most.

    A step reads single rows of an embedding that is not also the head, and of a mixture's experts
    those that its tokens choose: no two the same, where there are enough.
    """
    weights = engine.decoder.weights
    untied = weights.head.data_ptr() != weights.embed.data_ptr()
    native = engine.backends.cpu.decoder
    spared = 0 if native is None else native.bytes_spared
    return (
        weights.nbytes()
        - (weights.embed.nbytes if untied else 0)
        - spared
        - _idle(engine, sequences)
    )


def _idle(engine: Runtime, sequences: int) -> int:
    """Count the bytes of the experts that a step cannot read."""
    routing = engine.spec.routing
    if routing is None:
        return 0
    idle = max(0, routing.experts - sequences * routing.chosen)
    layers = [each for each in engine.decoder.weights.layers if each.router is not None]
    experts = sum(each.gate_up.nbytes + each.down.nbytes for each in layers)
    return experts // routing.experts * idle


def gate_bytes(engine: Runtime) -> int:
    """Count the bytes of the gates a step reads, 0 without gates."""
    if engine.decoder.gates is None:
        return 0
    tensors = [
        tensor
        for gate in engine.decoder.gates.layers
        for tensor in (*(t for pair in gate.trunk for t in pair), gate.readout, gate.bias)
    ]
    return sum(tensor.nbytes for tensor in tensors)


def entry_bytes(engine: Runtime) -> int:
    """Count the bytes of the key and value of one entry."""
    pool = engine.cache.pool
    return pool.kv_page_bytes // pool.page_size


def step_bytes(engine: Runtime, sessions: Sequence[CachedSequence]) -> StepBytes:
    """Count the bytes that the next step of these sessions reads."""
    entries = sum(session.entries + engine.spec.rows for session in sessions)
    return StepBytes(
        weight_bytes(engine, len(sessions)), entries * entry_bytes(engine), gate_bytes(engine)
    )
