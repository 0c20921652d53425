"""TorchBackend: the reference, which runs everything everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmkv.engine.backends.base import Decoded
from mmkv.engine.backends.torch.step import DecodeStep
from mmkv.engine.cache import Entries
from mmkv.engine.policies import CacheView
from mmkv.engine.scorer_state import write_state
from mmkv.engine.trace import REFUSED

if TYPE_CHECKING:
    from mmkv.engine.runtime import Runtime
    from mmkv.engine.sequence import CachedSequence


class TorchBackend:
    """Decodes with :class:`mmkv.engine.model.decoder.Decoder`, evicts with the policy's own code.

    Attributes:
        make_step: builds the cache side of a step; tools may put another one in its place.
    """

    def __init__(self, engine: Runtime) -> None:
        self.engine = engine
        self.make_step: Callable[..., DecodeStep] = DecodeStep

    def unsupported_reason(self, sessions: Sequence[CachedSequence] = ()) -> str:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        return ""

    def decode(self, sessions: Sequence[CachedSequence], token_ids: Sequence[int]) -> Decoded:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        engine = self.engine
        device, decoder = engine.device, engine.decoder
        seqs = torch.tensor([session.seq for session in sessions], device=device)
        position = torch.tensor([session.seen for session in sessions], device=device)
        rope = self.rope(sessions)
        ids = torch.tensor(list(token_ids), device=device)
        seen = max(session.seen for session in sessions) + 1
        step = self.make_step(engine.cache, engine.spec, seqs, position, seen, engine.needs)
        tapped: list[Tensor] = []
        hidden, log_beta = decoder.forward(decoder.embed(ids), rope, step, tapped=tapped)
        step.finish(log_beta)
        writes = engine.write_step(rope)
        if writes is not None:
            writes.store(engine.cache.pool, step.slots)
        if engine.has_born:
            taps = [tap[:, None] for tap in tapped]
            slots, scorer = step.slots[..., None], engine.policy.scoring
            write_state(engine.cache, scorer, seqs, slots, position[:, None], False, taps)
        logits = decoder.logits(hidden)
        for session in sessions:
            session.count_appended(1)
        return Decoded(logits, sessions, refused=False)

    def evict(self, sessions: Sequence[CachedSequence]) -> Sequence[CachedSequence]:
        """See :class:`mmkv.engine.backends.base.Backend`."""
        for session in sessions:
            entries = self.engine.cache.entries(session.seq)
            view = session.view(entries)
            self.drop_lowest(session, entries, view, self.scores(session, entries, view))
        return []

    def drop_refused(self, session: CachedSequence) -> None:
        """Drop what write gates have not admitted and the window has left."""
        admission, cache = self.engine.policy.admission, self.engine.cache
        if admission is None or session.seen < admission.window:
            return
        entries = cache.entries(session.seq)
        view = session.view(entries)
        log_g = view.state()[:, 0]
        refused = admission.refused(view.position, log_g, view.seen).nonzero().flatten()
        cache.drop(session.seq, refused, entries)
        session.count_evicted(refused.numel(), int(log_g[refused].isnan().sum()))
        if session.recorder is not None:
            session.recorder.died(view, refused, log_g, REFUSED)

    def scores(self, session: CachedSequence, entries: Entries, view: CacheView) -> Tensor:
        """Score the entries ``[N]`` of one sequence; keep the state that the scorer hands back."""
        engine = self.engine
        scores = engine.policy.scores(view, engine.budgets.competing(session))
        if scores.state is not None:
            engine.cache.pool.state.flatten(0, 1)[entries.slot] = scores.state
        if session.recorder is not None:
            session.recorder.sample(view, scores.value)
        return scores.value

    def drop_lowest(
        self, session: CachedSequence, entries: Entries, view: CacheView, scores: Tensor
    ) -> None:
        """Cut one sequence to its budget by ``scores [N]``."""
        engine = self.engine
        victims = engine.policy.lowest(scores, view, session.allowed_entries)
        engine.cache.drop(session.seq, victims, entries)
        session.count_evicted(victims.numel(), int(scores[victims].isnan().sum()))
        if session.recorder is not None:
            session.recorder.died(view, victims, scores)

    def rope(self, sessions: Sequence[CachedSequence]) -> tuple[Tensor, Tensor]:
        rope, device = self.engine.rope, self.engine.device
        where = torch.tensor([session.next_position for session in sessions], device=device)
        long = [bool(session.long_rope) for session in sessions]
        if len(set(long)) == 1:
            return rope.text(where, long[0])
        chosen = torch.tensor(long, device=device)[:, None]
        short_cos, short_sin = rope.text(where, False)
        long_cos, long_sin = rope.text(where, True)
        return (
            torch.where(chosen, long_cos, short_cos),
            torch.where(chosen, long_sin, short_sin),
        )
