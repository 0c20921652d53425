"""Scores that tokens get when they are created and keep: EpiKV and its controls, arXiv 2606.26472.

A score is one number a token, the same in all rows. Tokens of prompts get infinity: they stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmkv.engine.policies.base import (
    CacheView,
    Group,
    Needs,
    NewTokens,
    Tap,
    compiled,
    tapped_layers,
)

Shapes = dict[str, tuple[int, ...]]


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

    def born(self, new: NewTokens) -> Tensor:
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

    def born(self, new: NewTokens) -> Tensor:
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

    def born(self, new: NewTokens) -> Tensor:
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
    """Trailing windows ``[B, n, T, w]`` of the norm of the change from the token before.

    Equation 1, for states ``taps [B, n, T, d]``; the first token of a sequence changes by 0.
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
