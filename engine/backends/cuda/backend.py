"""CudaBackend: steps on Triton kernels, and bursts of steps as one CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmkv.engine.backends.base import Backend, Decoded
from mmkv.engine.backends.cuda.graph_runner import GraphRunner
from mmkv.engine.backends.cuda.kernels import evict
from mmkv.engine.backends.cuda.kernels.available import triton_installed
from mmkv.engine.backends.cuda.kernels.sample import Draw

if TYPE_CHECKING:
    from mmkv.engine.policies import Policy
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


class CudaBackend:
    """Decodes bursts of steps as replays of a CUDA graph, with nothing read back in between.

    A single step whose logits are wanted is the torch step, which takes Triton's kernels by
    itself where it can; so is an eviction outside of a burst.

    Attributes:
        runner: the graphs, made when the first burst needs one.
    """

    def __init__(self, engine: Runtime, single: Backend) -> None:
        self.engine, self._single = engine, single
        self.runner: GraphRunner | None = None

    def unsupported_reason(self, sessions: Sequence[CachedSequence] = ()) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`; of bursts."""
        engine = self.engine
        policy, gates = engine.policy, engine.decoder.gates
        if engine.device.type != "cuda":
            return "no GPU"
        if not triton_installed():
            return "Triton is not installed"
        if any(engine.spec.sliding_window):
            return "sliding-window layers"
        if self.policy_reason(policy):
            return self.policy_reason(policy)
        if gates is not None and any(not gate.trunk for gate in gates.layers):
            return "gates without a trunk"
        if engine.decoder.on_gate_input is not None:
            return "on_gate_input is set"
        if engine.spec.rope.switch_at is not None:
            return "longrope"
        if not engine.decoder.weights.layers:
            return "the forward pass is transformers'"
        return ""

    @staticmethod
    def policy_reason(policy: Policy) -> str:
        """Say why bursts cannot evict for a policy; empty where they can, or never have to."""
        if policy.admission is not None:
            return f"policy {policy.name!r} has write gates"
        return evict.unsupported_reason(policy) if policy.evicts else ""

    def decode(self, sessions: Sequence[CachedSequence], token_ids: Sequence[int]) -> Decoded:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        return self._single.decode(sessions, token_ids)

    def evict(self, sessions: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        return self._single.evict(sessions)

    def reset(self) -> None:
        """Drop the graphs: they keep the tensors alive that they were made for."""
        self.runner = None

    def decode_many(
        self,
        sessions: Sequence[CachedSequence],
        token_ids: Sequence[int],
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> list[list[int]]:
        """See :meth:`mmkv.engine.runtime.Runtime.decode_many`; evictions are part of the graph."""
        if self.runner is None:
            self.runner = GraphRunner(self.engine)
        return self.runner.decode(sessions, token_ids, steps, stop, draws)
