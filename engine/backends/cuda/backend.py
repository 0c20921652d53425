"""CudaBackend: bursts of steps as one CUDA graph, and kernels for what others compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmkv.engine.backends.base import HOSTED, Backend, Batch, Burst, Counts, LoadedModel
from mmkv.engine.backends.cuda.kernels.available import on_triton, triton_installed
from mmkv.engine.backends.cuda.kernels.buffers import PageTables
from mmkv.engine.backends.cuda.kernels.decode_attention import tokens_at_once
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction, evict, unsupported_reason
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
    """Decodes steps, and bursts of them, as replays of a CUDA graph that evicts as it goes.

    Outside of a step it evicts where kernels compute the scores.

    Attributes:
        runner: the graphs, made when the first step needs one.
        off: whether tools have it leave all steps to torch.
    """

    name, path, devices = "cuda", "CUDA graph", ("cuda",)
    steps = bursts = True

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        super().__init__(model, cache)
        self.off = False
        self.runner: GraphRunner | None = None

    def unsupported_reason(self, batch: Batch | None = None) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        if batch is not None and batch.recorded:
            return "the session is recorded"
        model, dtype = self.model, self.cache.pool.dtype
        most = tokens_at_once(model.spec.group, dtype)
        if batch is not None and max(map(len, batch.runs)) > most:
            return "too many tokens of a sequence"
        # Where nothing is evicted, drafts are chosen by what the policy has kept of each token.
        needs, bare = model.needs, batch is not None and batch.bare
        if not model.policy.evicts and not bare and (needs.queries or needs.state):
            return f"policy {model.policy.name!r} keeps more of a token than its gates say"
        return self.burst_reason()

    def no_eviction_reason(self) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        if not on_triton(self.cache.length):
            return "Triton is not installed"
        return unsupported_reason(self.model.policy)

    def evict(self, batch: Batch, counts: Counts) -> None:
        """See :class:`mmkv.engine.backends.base.Backend`; the device is read once."""
        if self.no_eviction_reason() or batch.recorded:
            counts.uncut = range(len(batch.seqs))
            return
        cache, pool = self.cache, self.cache.pool
        seqs, seen, allowed = cache.length.new_tensor([batch.seqs, batch.seen, batch.allowed])
        top = cache.length.new_full((1,), pool.free_pages)
        rows = PageTables(cache.length, cache.table, pool._stack, top, pool.page_size)
        work = empty_eviction(len(batch.seqs), rows, max(batch.entries))
        evict(work, self.model.policy, rows, pool, seqs, seen, allowed)
        pool.free_pages, *found = torch.cat([top, work.dropped, work.nan]).tolist()
        dropped, counts.nan = found[: len(batch.seqs)], found[len(batch.seqs) :]
        counts.uncut = [index for index, entries in enumerate(dropped) if entries < 0]
        counts.dropped = [max(entries, 0) for entries in dropped]

    def burst_reason(self) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        model, policy = self.model, self.model.policy
        if model.device.type != "cuda":
            return "no GPU"
        if self.off:
            return "switched off"
        if not triton_installed():
            return "Triton is not installed"
        if model.shared:
            return "sessions share a budget"
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

    def decode(self, batch: Batch, counts: Counts) -> Tensor:
        """See :class:`mmkv.engine.backends.base.Backend`: one replay, evictions included.

        Of several tokens of a sequence one replay, too; nothing is evicted then.
        """
        if len(batch.runs) < len(batch.seqs):
            logits = self._graphs().check(batch)
            counts.appended = 1
            return logits
        single = replace(batch, share=[0.0] * len(batch.seqs))  # what is allowed is of this step
        burst = Burst.of(single)
        try:
            self.decode_many(single, burst, 1)
        finally:
            if all(burst.appended) and self.runner is not None:
                made = self.runner.log_beta
                if made is not None:
                    counts.log_beta = made.unflatten(1, self.cache.length.shape[1:])[None]
                counts.appended, counts.revised, counts.nan = 1, True, burst.nan
                grown = [entries + self.model.spec.rows for entries in batch.entries]
                left = zip(grown, burst.entries, strict=True)
                counts.dropped = [before - now for before, now in left]
        assert self.runner is not None
        return self.runner.logits.clone()

    def decode_many(
        self,
        batch: Batch,
        burst: Burst,
        steps: int,
        stop: Sequence[int] = (),
        draws: Sequence[Draw] | None = None,
    ) -> None:
        """See :class:`mmkv.engine.backends.base.Backend`; evictions are part of the graph."""
        self._graphs().decode(batch, burst, steps, stop, draws)

    def _graphs(self) -> GraphRunner:
        if self.runner is None:
            self.runner = GraphRunner(self.model, self.cache)
        return self.runner

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
