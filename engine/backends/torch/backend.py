"""TorchBackend: the reference, which runs everything everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.backends.base import Backend, Batch, Counts, LoadedModel, Scored
from mmkv.engine.backends.torch.step import DecodeStep, PackedChunks, PrefillChunk
from mmkv.engine.scorer_state import score_entries, write_state

if TYPE_CHECKING:
    from mmkv.engine.cache import RaggedCache


class TorchBackend(Backend):
    """Decodes with :class:`mmkv.engine.model.decoder.Decoder`, evicts with the policy's own code.

    Attributes:
        make_step: builds the cache side of a step; tools may put another one in its place.
    """

    name, path = "torch", "torch"
    steps = True

    def __init__(self, model: LoadedModel, cache: RaggedCache) -> None:
        super().__init__(model, cache)
        self.make_step: Callable[..., DecodeStep] = DecodeStep

    def unsupported_reason(self, batch: Batch | None = None) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`: nothing."""
        return ""

    def no_eviction_reason(self) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`: nothing."""
        return ""

    def decode(self, batch: Batch, counts: Counts) -> Tensor:
        """See :class:`mmkv.engine.backends.base.Backend`; nothing is evicted."""
        runs = batch.runs
        if len(runs) < len(batch.seqs):
            return self._decode_runs(batch, runs, counts)
        model, cache, decoder = self.model, self.cache, self.model.decoder
        device = cache.length.device
        seqs = torch.tensor(batch.seqs, device=device)
        position = torch.tensor(batch.seen, device=device)
        rope = model.angles(batch)
        ids = torch.tensor(batch.tokens, device=device)
        seen = max(batch.seen) + 1
        step = self.make_step(cache, model.spec, seqs, position, seen, model.needs)
        tapped: list[Tensor] = []
        hidden, log_beta = decoder.forward(decoder.embed(ids), rope, step, tapped=tapped)
        logits = decoder.logits(hidden)  # first: of a step that fails here, nothing is left
        step.finish(log_beta)
        batch.store_positions(cache)
        writes = model.write_step(rope)
        if writes is not None:
            writes.store(cache.pool, step.slots)
        if model.has_on_append:
            taps = [tap[:, None] for tap in tapped]
            slots, scorer = step.slots[..., None], model.policy.scoring
            write_state(cache, scorer, seqs, slots, position[:, None], False, taps, decoder.output)
        step.put_states()
        counts.log_beta = None if log_beta is None else log_beta[None]
        counts.appended, counts.uncut = 1, range(len(batch.seqs))
        return logits

    def _decode_runs(self, batch: Batch, runs: Sequence[range], counts: Counts) -> Tensor:
        """Append several tokens to each sequence, as prompts are; the last bits may differ."""
        model, cache, decoder = self.model, self.cache, self.model.decoder
        device, sizes = cache.length.device, [len(run) for run in runs]
        position = torch.tensor(batch.seen, device=device).split(sizes)
        chunks = [
            PrefillChunk(
                cache,
                model.spec,
                batch.seqs[run.start],
                own,
                torch.zeros_like(own, dtype=torch.uint8),
                model.needs,
                batch.seen[run.stop - 1] + 1,
                bool(cache.length[batch.seqs[run.start]].any()),
            )
            for run, own in zip(runs, position, strict=True)
        ]
        ids, tapped = torch.tensor(batch.tokens, device=device), list[Tensor]()
        step = PackedChunks(chunks)
        hidden, log_beta = decoder.forward(
            decoder.embed(ids), model.angles(batch), step, tapped=tapped
        )
        logits = decoder.logits(hidden)
        betas = [None] * len(runs) if log_beta is None else log_beta.split(sizes)
        taps = [tap.split(sizes) for tap in tapped]
        for index, (chunk, beta) in enumerate(zip(chunks, betas, strict=True)):
            if model.has_on_append:
                chunk.write_state(
                    model.policy.scoring, [tap[index] for tap in taps], decoder.output, prompt=False
                )
            chunk.finish(beta)
        batch.store_positions(cache)
        counts.appended = 1
        return logits

    def evict(self, batch: Batch, counts: Counts) -> None:
        """See :class:`mmkv.engine.backends.base.Backend`: of all of them."""
        dropped, nan = [0] * len(batch.seqs), [0] * len(batch.seqs)
        counts.dropped, counts.nan = dropped, nan
        policy, cache = self.model.policy, self.cache
        for index, (seq, allowed) in enumerate(zip(batch.seqs, batch.allowed, strict=True)):
            entries = cache.entries(seq)
            view = batch.view(index, entries, cache, self.model)
            scores = score_entries(cache, policy, entries, view, allowed)
            victims = policy.lowest(scores, view, allowed)
            cache.drop(seq, victims, entries)
            dropped[index], nan[index] = victims.numel(), int(scores[victims].isnan().sum())
            if index in batch.recorded:
                counts.note(index, Scored(view, scores, victims))
