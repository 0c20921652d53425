"""CudaBackend: bursts of steps as one CUDA graph, and kernels for what others compute."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmkv.engine.backends.base import HOSTED, Backend, Batch, Burst, LoadedModel
from mmkv.engine.backends.cuda.kernels.available import on_triton, triton_installed
from mmkv.engine.backends.cuda.kernels.sample import Draw
from mmkv.engine.backends.cuda.kernels.window_scores import window_scores
from mmkv.engine.backends.cuda.policy_step import ON_PAGES, own_code
from mmkv.engine.backends.cuda.static_step import GraphRunner
from mmkv.engine.cache import Entries, RaggedCache
from mmkv.engine.model.state_layer import DeltaLayer
from mmkv.engine.policies.base import CacheView, Policy, WindowReduction
from mmkv.engine.scorer_state import (
    QUERIES,
    WindowAttention,
    window_attention,
    window_positions,
)


class CudaBackend(Backend):
    """Decodes bursts of steps as replays of a CUDA graph, with nothing read back in between.

    A single step whose logits are wanted is the torch step, which takes Triton's kernels by
    itself where it can; so is an eviction outside of a burst.

    Attributes:
        runner: the graphs, made when the first burst needs one.
    """

    name, path = "cuda", "graph"
    bursts = True

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        super().__init__(model, cache)
        self.runner: GraphRunner | None = None

    def burst_reason(self) -> str:
        model, policy = self.model, self.model.policy
        if model.device.type != "cuda":
            return "no GPU"
        if not triton_installed():
            return "Triton is not installed"
        states = [layer.state_layer for layer in model.decoder.weights.layers]
        if any(each is not None and not isinstance(each, DeltaLayer) for each in states):
            return "linear layers of its own"
        if self.policy_reason(policy):
            return self.policy_reason(policy)
        gates = model.decoder.gates
        if gates is not None and any(not gate.trunk for gate in gates.layers):
            return "gates without a trunk"
        if gates is not None and len({gate.readout.shape for gate in gates.layers}) > 1:
            return "gates of different widths"
        if model.decoder.on_gate_input is not None:
            return "on_gate_input is set"
        if model.spec.rope.switch_at is not None:
            return "longrope"
        return HOSTED if model.decoder.hosted else ""

    @staticmethod
    def policy_reason(policy: Policy) -> str:
        """Say why bursts cannot evict for a policy; empty where they can, or never have to."""
        return f"policy {policy.name!r} has code of its own" if own_code(policy) else ""

    def decode_many(
        self,
        batch: Batch,
        burst: Burst,
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> None:
        """See :class:`mmkv.engine.backends.base.Backend`; evictions are part of the graph."""
        if self.runner is None:
            self.runner = GraphRunner(self.model, self.cache)
        self.runner.decode(batch, burst, steps, stop, draws)

    @property
    def window_attention(self) -> WindowAttention | None:
        """See :class:`mmkv.engine.backends.base.Backend`: where keys lie whole on a GPU."""
        pool = self.cache.pool
        return _window_attention if on_triton(pool.keys) and pool.form.plain else None

    def reset(self) -> None:
        """Drop the graphs: they keep the tensors alive that they were made for."""
        self.runner = None


def _window_attention(
    cache: RaggedCache, seq: int, entries: Entries, view: CacheView, reduction: WindowReduction
) -> Tensor:
    """Compute :func:`mmkv.engine.scorer_state.window_attention` where the keys lie."""
    if reduction not in ON_PAGES:
        return window_attention(cache, seq, entries, view, reduction)
    pool, queries = cache.pool, cache.memory[QUERIES]
    at = window_positions(view.seen, queries.shape[3], queries.device)
    shares = window_scores(
        queries[seq][None],
        at[None],
        pool.keys,
        pool.position,
        cache.length[seq][None],
        cache.table[seq][None],
        at.new_zeros(1),
        queries.shape[-1] ** -0.5,
    )
    mean = shares[0].flatten(0, 1)[entries.row, entries.offset]
    return mean if reduction.group == "mean" else mean * (queries.shape[2] // view.kv_heads)
