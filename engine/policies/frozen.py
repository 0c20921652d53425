"""Scores that tokens get when they are created and keep: EpiKV and its controls, arXiv 2606.26472.

A score is one number a token, the same in all rows. Tokens of prompts get infinity: they stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from mmkv.engine.policies.allocation import HeadAllocation
from mmkv.engine.policies.base import (
    CacheView,
    Group,
    Needs,
    NewTokens,
    Policy,
    Scorer,
    Tap,
    compiled,
    tapped_layers,
)
from mmkv.engine.policies.preset import Parameter, Preset, group

Shapes = dict[str, tuple[int, ...]]


_LEAST_RANGE = 1e-6


def scaled(x: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Scale ``x`` so that ``least`` becomes 0 and ``most`` 1."""
    return (x - least) / (most - least).clamp(min=_LEAST_RANGE)


@compiled("state")
@dataclass(frozen=True)
class StreamChange:
    """How the residual stream changes from token to token, at one depth against another.

    EpiKV (equation 3) with ``normalised``: the change's distance from its mean over the trailing
    window, in standard deviations; without it that mean itself (equation 2). Of a band of layers
    the mean counts.
    """

    a: Tap = 0.3125
    b: Tap = 0.65625
    window: int = 64
    normalised: bool = True
    eps: float = 1e-6

    @property
    def needs(self) -> Needs:
        """The frozen score as state 0, and the stream after both depths."""
        return Needs(state=1, taps=(self.a, self.b))

    def memory(self, layers: int, kv_heads: int, head_dim: int, hidden_size: int) -> Shapes:
        """The newest token's states, and the changes of the window, at both depths."""
        return {
            **change_memory("a", self.a, layers, hidden_size, self.window),
            **change_memory("b", self.b, layers, hidden_size, self.window),
        }

    def on_append(self, new: NewTokens) -> Tensor:
        """The score, ``[B, T, 1, 1, 1]``."""
        taps, count = new.taps.transpose(0, 1), new.memory["a.state"].shape[1]
        parts = {"a": taps[:, :count], "b": taps[:, count:]}
        a, b = (self._statistic(name, taps, new) for name, taps in parts.items())
        return frozen(a - b, new)

    def score(self, view: CacheView) -> Tensor:
        """State 0."""
        return view.state()[:, 0]

    def _statistic(self, name: str, taps: Tensor, new: NewTokens) -> Tensor:
        changes = change_windows(name, taps, new)
        if self.normalised:
            return standardised(changes, new.position, self.eps).mean(1)
        return window_mean(changes, new.position).mean(1)


@dataclass(frozen=True)
class AttentionAndChange:
    """Accumulated attention plus the change at one depth (table 1, "cumul. attn + z_10")."""

    a: Tap = 0.3125
    window: int = 64
    eps: float = 1e-6
    group: Group = "mean"

    @property
    def needs(self) -> Needs:
        """Attention as state 0, the frozen score as state 1, and the stream after ``a``."""
        return Needs(state=2, mass=self.group, taps=(self.a,))

    def memory(self, layers: int, kv_heads: int, head_dim: int, hidden_size: int) -> Shapes:
        """The newest token's states, and the changes of the window."""
        return change_memory("a", self.a, layers, hidden_size, self.window)

    def on_append(self, new: NewTokens) -> Tensor:
        """The frozen part, ``[B, T, 1, 1, 1]``."""
        changes = change_windows("a", new.taps.transpose(0, 1), new)
        return frozen(standardised(changes, new.position, self.eps).mean(1), new)

    def score(self, view: CacheView) -> Tensor:
        """The sum of both states."""
        return view.state().sum(-1)


@compiled("state")
@dataclass(frozen=True)
class EntryVariance:
    """Variance of a token's keys or values over head_dim, averaged over the trailing window."""

    of: Literal["keys", "values"]
    window: int = 64

    @property
    def needs(self) -> Needs:
        """The frozen score as state 0."""
        return Needs(state=1, keys=self.of == "keys", values=self.of == "values")

    def memory(self, layers: int, kv_heads: int, head_dim: int, hidden_size: int) -> Shapes:
        """The variances of the window."""
        return {"variances": (1, self.window - 1)}

    def on_append(self, new: NewTokens) -> Tensor:
        """The score, ``[B, T, 1, 1, 1]``."""
        entries = new.keys() if self.of == "keys" else new.values()
        variance = entries.var(-1, correction=0).mean((1, 2))
        windows = trailing(variance[:, None], "variances", new)
        return frozen(window_mean(windows, new.position)[:, 0], new)

    def score(self, view: CacheView) -> Tensor:
        """State 0."""
        return view.state()[:, 0]


def frozen(score: Tensor, new: NewTokens) -> Tensor:
    """Return ``score [B, T]`` as the state of new entries; infinity for tokens of prompts."""
    return (torch.full_like(score, torch.inf) if new.prompt else score)[:, :, None, None, None]


def change_memory(name: str, tap: Tap, layers: int, hidden_size: int, window: int) -> Shapes:
    """Shapes of what :func:`change_windows` keeps under ``name``."""
    count = len(tapped_layers(tap, layers))
    return {f"{name}.state": (count, hidden_size), f"{name}.changes": (count, window - 1)}


def change_windows(name: str, taps: Tensor, new: NewTokens) -> Tensor:
    """Return trailing windows ``[B, n, T, w]`` of the norm of the change from the token before.

    EpiKV's equation 1, for the states ``taps [B, n, T, d]`` of n tapped layers; the first token of
    a sequence changes by 0. What the next chunk needs is put into ``new.memory`` under ``name``.
    """
    before = torch.cat([new.memory[f"{name}.state"][:, :, None], taps[:, :, :-1]], 2)
    new.memory[f"{name}.state"] = taps[:, :, -1]
    change = (taps - before).norm(dim=-1).masked_fill(new.position[:, None] == 0, 0.0)
    return trailing(change, f"{name}.changes", new)


def trailing(values: Tensor, name: str, new: NewTokens) -> Tensor:
    """Windows ``[B, n, T, w]`` of each of ``values [B, n, T]`` and the w - 1 before it.

    Args:
        name: the memory ``[B, n, w - 1]`` of the values before; it takes the last of the new ones.
            Before a sequence's first token it holds zeros.
    """
    window = new.memory[name].shape[-1] + 1
    joined = torch.cat([new.memory[name], values], -1)
    new.memory[name] = joined[..., joined.shape[-1] - window + 1 :]
    return joined.unfold(-1, window, 1)


def window_mean(windows: Tensor, position: Tensor) -> Tensor:
    """Mean ``[B, n, T]`` over the tokens that a window holds, fewer at a sequence's start."""
    return windows.sum(-1) / (position + 1).clamp(max=windows.shape[-1])[:, None]


def standardised(windows: Tensor, position: Tensor, eps: float) -> Tensor:
    """How many standard deviations ``[B, n, T]`` the last of each window lies above its mean."""
    size = windows.shape[-1]
    held = torch.arange(size, device=position.device) >= size - 1 - position[..., None]
    mean = window_mean(windows, position)
    away = (windows - mean[..., None]).masked_fill(~held[:, None], 0.0)
    deviation = window_mean(away.square(), position).sqrt()
    return (windows[..., -1] - mean) / (deviation + eps)


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

    def on_append(self, new: NewTokens) -> Tensor:
        """Both states, ``[B, T, 1, 1, 2]``; tokens of the running segment are kept."""
        score = super().on_append(new)
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

    def on_step(self, view: CacheView, memory: dict[str, Tensor]) -> Tensor | None:
        """Add up the step's entropy; when a segment is complete, lower what it does not keep."""
        total = memory["segment.entropy"] + view.entropy()
        spoken = torch.as_tensor(view.seen - view.prompt_tokens, device=total.device)
        complete = spoken % self.segment == 0
        memory["segment.entropy"] = total.masked_fill(complete, 0.0)
        count, mean, squares = memory["segment.means"].unbind()
        entropy, count = total / self.segment, count + 1
        away = entropy - mean
        mean = mean + away / count
        squares = squares + away * (entropy - mean)
        means = torch.stack([count, mean, squares])
        memory["segment.means"] = torch.where(complete, means, memory["segment.means"])
        half = (squares / count).sqrt() / 2
        kept = torch.where(entropy >= mean + half, self.r, self.e)
        kept = kept.masked_fill(entropy < mean - half, self.t)
        order = memory["segment.score"].argsort(stable=True)  # of equal ones the older first
        rank = torch.arange(self.segment, device=total.device)
        gone = (rank < self.segment - kept) & complete
        gone_at = memory["segment.position"][order].long().masked_fill(~gone, -1).sort().values
        place = torch.searchsorted(gone_at, view.position).clamp(max=self.segment - 1)
        state = view.state()
        state[:, 0] = torch.where(gone_at[place] == view.position, state[:, 1], state[:, 0])
        return state


# Of the paper's 32 layers, numbers 7 to 13 and 18 to 25.
_BAND_A, _BAND_B = (7 / 32, 13 / 32), (18 / 32, 25 / 32)


@compiled("state")
@dataclass(frozen=True)
class PreviousChunk:
    """Variance of keys and values against the chunk before, frozen (arXiv 2606.26472, 3.3)."""

    lag: int = 128
    needs: ClassVar[Needs] = Needs(state=1, keys=True, values=True)

    def memory(self, layers: int, kv_heads: int, head_dim: int, hidden_size: int) -> Shapes:
        """Least and greatest key and value of the chunk before and of the present one."""
        return {"ranges": (2, 2, 2, layers, kv_heads, head_dim)}

    def on_append(self, new: NewTokens) -> Tensor:
        """The score, ``[B, T, 1, 1, 1]``."""
        entries = torch.stack([new.keys(), new.values()], 1)  # [B, 2, L, H, T, D]
        position, first = new.position, new.position[:, :1] // self.lag
        number = position // self.lag - first  # [B, T], chunks counted from the pass's first
        ranges = self._ranges(entries, number, new)
        batch = torch.arange(position.shape[0], device=position.device)[:, None]
        before = ranges[batch, number].permute(2, 0, 3, 4, 5, 1, 6)  # [2, B, 2, L, H, T, D]
        x = scaled(entries, before[0], before[1])
        x = torch.where((position < self.lag)[:, None, None, None, :, None], entries, x)
        last = number[:, -1:] + torch.arange(2, device=position.device)
        new.memory["ranges"] = ranges[batch, last]
        return frozen(x.var(-1, correction=0).sum(1).mean((1, 2)), new)

    def score(self, view: CacheView) -> Tensor:
        """State 0."""
        return view.state()[:, 0]

    def _ranges(self, entries: Tensor, number: Tensor, new: NewTokens) -> Tensor:
        """Least and greatest of the chunk before the pass's first, of that, and of those after.

        Returns:
            ``[B, chunks + 1, 2, 2, L, H, D]``: least and greatest, of keys and values.
        """
        known = new.memory["ranges"]  # [B, 2, 2, 2, L, H, D]
        chunks = (number.shape[1] - 1) // self.lag + 2
        # Whether the pass goes on with a chunk that an earlier one began.
        opened = (new.position[:, :1] % self.lag > 0)[:, :, None, None, None]
        where = number[:, None, None, None, :, None].expand_as(entries)
        found = []
        for bound, (reduce, empty) in enumerate((("amin", torch.inf), ("amax", -torch.inf))):
            room = entries.new_full((*entries.shape[:4], chunks, entries.shape[-1]), empty)
            room[..., 0, :] = torch.where(opened, known[:, 1, bound], empty)
            found.append(room.scatter_reduce(4, where, entries, reduce).movedim(4, 1))
        before = torch.where(opened[..., None], known[:, 0], known[:, 1])[:, None]
        return torch.cat([before, torch.stack(found, 2)], 1)


def prompt_kept(name: str, scoring: Scorer) -> Policy:
    """Make the policy that all of these are: prompts stay, and the newest of the budget."""
    return Policy(
        name,
        scoring,
        HeadAllocation(),
        protect_recent=128,
        recent_share=0.25,
        keeps_prompt=True,
    )


def _epikv(a: float, b: float, window: int, eps: float) -> Policy:
    return prompt_kept("epikv", StreamChange(a, b, window, True, eps))


def _hs_variance(a: float, b: float, window: int) -> Policy:
    return prompt_kept("hs-variance", StreamChange(a, b, window, False))


def _band_adaptive(window: int, eps: float) -> Policy:
    return prompt_kept("band-adaptive", StreamChange(_BAND_A, _BAND_B, window, True, eps))


def _kv_key(window: int) -> Policy:
    return prompt_kept("kv-key", EntryVariance("keys", window))


def _kv_val(window: int) -> Policy:
    return prompt_kept("kv-val", EntryVariance("values", window))


def _lag_kv(lag: int) -> Policy:
    return prompt_kept("lag-kv", PreviousChunk(lag))


def _attention_hs(a: float, window: int, eps: float, group: Group) -> Policy:
    return prompt_kept("attention-hs", AttentionAndChange(a, window, eps, group))


def _segments_hs(
    segment: int, r: int, e: int, t: int, a: float, b: float, window: int, eps: float
) -> Policy:
    scoring = SegmentedChange(a, b, window, True, eps, segment=segment, r=r, e=e, t=t)
    return prompt_kept("segments-hs", scoring)


_TITLE = "Epiphany-Aware KV Cache Eviction Without the Attention Matrix"
_A = Parameter(
    0.3125, "depth a, as a share of the layers", "layer 10 of 32, section 3.2", least=0, most=1
)
_B = Parameter(
    0.65625, "depth b, as a share of the layers", "layer 21 of 32, section 3.2", least=0, most=1
)
_WINDOW = Parameter(64, "tokens of the trailing window", "equation 2", least=1)
_EPS = Parameter(1e-6, "added to the standard deviation", least=0)


def _preset(make: Callable[..., Policy], **parameters: Parameter) -> Preset:
    return Preset(make, "arXiv 2606.26472", _TITLE, parameters)


FROZEN_PRESETS: dict[str, Preset] = {
    "epikv": _preset(_epikv, a=_A, b=_B, window=replace(_WINDOW, place="equation 3"), eps=_EPS),
    "hs-variance": _preset(_hs_variance, a=_A, b=_B, window=_WINDOW),
    "band-adaptive": _preset(_band_adaptive, window=_WINDOW, eps=_EPS),
    "kv-key": _preset(_kv_key, window=replace(_WINDOW, place="section 3.3")),
    "kv-val": _preset(_kv_val, window=replace(_WINDOW, place="section 3.3")),
    "lag-kv": _preset(_lag_kv, lag=Parameter(128, "tokens of a chunk", least=1)),
    "attention-hs": _preset(
        _attention_hs,
        a=_A,
        window=replace(_WINDOW, place="equation 3"),
        eps=_EPS,
        group=group(),
    ),
    "segments-hs": _preset(
        _segments_hs,
        segment=Parameter(128, "generated tokens of a segment", least=1),
        r=Parameter(64, "tokens that a segment of high entropy keeps", "appendix D", least=0),
        e=Parameter(32, "tokens that one between keeps", "appendix D", least=0),
        t=Parameter(8, "tokens that one of low entropy keeps", "appendix D", least=0),
        a=_A,
        b=_B,
        window=replace(_WINDOW, place="equation 3"),
        eps=_EPS,
    ),
}
