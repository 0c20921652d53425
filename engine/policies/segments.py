"""Frozen scores by segments of what was generated: EpiKV's second hybrid, arXiv 2606.26472."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmkv.engine.policies.base import CacheView, Needs, NewTokens, compiled
from mmkv.engine.policies.frozen import Shapes, StreamChange

_KEPT = 64.0  # added to the score of tokens that their segment keeps


@compiled("state")
@dataclass(frozen=True)
class SegmentedChange(StreamChange):
    """The best of each segment by EpiKV's score, more of some kinds (table 1; appendix D: budgets).

    ThinKV's thresholds are in neither paper. Here a segment's kind follows from the mean entropy of
    its tokens' attention beside the mean and the deviation over all complete segments.

    Attributes:
        segment: generated tokens of a segment.
        r, e, t: how many tokens a segment of high, middle and low entropy keeps.
    """

    segment: int = 128
    r: int = 64
    e: int = 32
    t: int = 8

    @property
    def needs(self) -> Needs:
        """State 0 is the score, state 1 the same without what the segment adds; one query."""
        return Needs(state=2, queries=1, taps=(self.a, self.b))

    def memory(self, layers: int, kv_heads: int, head_dim: int, hidden_size: int) -> Shapes:
        """The running segment's scores and positions; counts, and statistics of the entropy."""
        running = {"segment.score": (self.segment,), "segment.position": (self.segment,)}
        # Tokens generated; entropy of the running segment; segments, mean and sum of squares.
        counts = {"segment.tokens": (), "segment.entropy": (), "segment.means": (3,)}
        kept = super().memory(layers, kv_heads, head_dim, hidden_size)
        return {**kept, **running, **counts}

    def born(self, new: NewTokens) -> Tensor:
        """Both states, ``[B, T, 1, 1, 2]``; tokens of the running segment are kept."""
        score = super().born(new)
        if not new.prompt:
            batch = torch.arange(len(score), device=score.device)
            place = (new.memory["segment.tokens"] % self.segment).long()
            place = place.clamp(0, self.segment - 1)  # a forged session file's may be NaN
            for name, value in (("score", score[:, 0, 0, 0, 0]), ("position", new.position[:, 0])):
                held = new.memory[f"segment.{name}"].clone()
                held[batch, place] = value.float()
                new.memory[f"segment.{name}"] = held
            new.memory["segment.tokens"] = new.memory["segment.tokens"] + 1
        return torch.cat([score + _KEPT, score], -1)

    def revise(self, view: CacheView, memory: dict[str, Tensor]) -> Tensor | None:
        """Add up the step's entropy; when a segment is complete, lower what it does not keep."""
        total = memory["segment.entropy"] + view.entropy()
        if (view.seen - view.prompt_tokens) % self.segment:
            memory["segment.entropy"] = total
            return None
        memory["segment.entropy"] = torch.zeros_like(total)
        count, mean, squares = memory["segment.means"].unbind()
        entropy, count = total / self.segment, count + 1
        away = entropy - mean
        mean = mean + away / count
        squares = squares + away * (entropy - mean)
        memory["segment.means"] = torch.stack([count, mean, squares])
        half = (squares / count).sqrt() / 2
        high, low = torch.stack([entropy >= mean + half, entropy < mean - half]).tolist()
        kept = self.r if high else self.t if low else self.e
        order = memory["segment.score"].argsort(stable=True)  # of equal ones the older first
        gone = memory["segment.position"][order[: max(self.segment - kept, 0)]].long()
        state = view.state()
        state[:, 0] = torch.where(torch.isin(view.position, gone), state[:, 1], state[:, 0])
        return state
