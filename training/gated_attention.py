"""Causal attention in which gates weigh the keys, for training retention gates and write gates.

With ``s[t, i] = scale * q_t . k_i`` and ages ``t - i`` counted in tokens, the logits are

- ``log-bias``: ``s[t, i] + (t - i) * log_beta_i``. ``beta^(t-i)`` multiplies the attention *weight*
  (DBTrimKV, arXiv 2605.09649, section 2.2);
- ``logit-scale``: ``s[t, i] * exp((t - i) * log_beta_i)``. ``beta^(t-i)`` multiplies the *logit*
  (TRIM-KV, arXiv 2512.03324, eq. 3);
- ``write``: ``s[t, i]`` while ``t - i < window``, then ``s[t, i] + log g_i``. ``g_i`` multiplies
  the weight of a key that has left the window (WG-KV, arXiv 2512.17452, section 3.2).

Packed documents do not see each other. Three forms compute the same: blocks of queries with
recomputation in the backward pass (``sdpa``, for CPUs), FlexAttention (``flex``, for GPUs), and a
dense float64 reference (``reference``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask, flex_attention

GATINGS = ("log-bias", "logit-scale", "write")
BLOCK = 96  # queries that a block of the CPU form takes at once; 64 .. 128 measure alike
FLEX_BLOCK = 128  # FlexAttention's own default


def gated_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    *,
    scale: float,
    document_start: Tensor | None = None,
    gating: str = "log-bias",
    window: int = 1,
    backend: str = "auto",
) -> Tensor:
    """Return attention outputs under one of the gatings of the module docstring.

    Query head h reads KV head ``h // (Hq / H)``. Gradients flow to all four tensors.

    Args:
        query: ``[B, Hq, T, D]``; key, value: ``[B, H, T, D]``, H a divisor of Hq.
        log_beta: ``[B, H, T]`` float32, finite and <= 0; for ``write`` log g, which may be -inf
            where no gradient is asked for.
        scale: factor of ``q . k``.
        document_start: ``[B, T]`` int64, index of the first token of each token's document,
            non-decreasing. None: one document per sequence.
        gating: ``log-bias``, ``logit-scale`` or ``write``; window: of ``write``, tokens that a
            key is seen in full for, its own included.
        backend: ``sdpa``: blocks of queries, O(block * T) memory per head in both passes;
            ``flex``: FlexAttention, compiled on CUDA (elsewhere eager and without gradients);
            ``reference``: dense, float64; ``auto``: flex on CUDA, else sdpa.

    Returns:
        ``[B, Hq, T, D]`` in query's dtype.

    Raises:
        ValueError: on an unknown gating or backend, or on shapes that do not fit.
    """
    _check(query, key, value, log_beta, document_start, gating)
    if backend == "auto":
        backend = "flex" if query.is_cuda else "sdpa"
    if backend == "sdpa":
        out = _Blocked.apply(query, key, value, log_beta, scale, document_start, gating, window)
    elif backend == "flex":
        out = _flex(query, key, value, log_beta, scale, document_start, gating, window)
    elif backend == "reference":
        out = gated_attention_reference(
            query,
            key,
            value,
            log_beta,
            scale=scale,
            document_start=document_start,
            gating=gating,
            window=window,
        )
    else:
        raise ValueError(f"backend is {backend!r}; use 'auto', 'sdpa', 'flex' or 'reference'")
    return out.to(query.dtype)


def gated_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    *,
    scale: float,
    document_start: Tensor | None = None,
    gating: str = "log-bias",
    window: int = 1,
) -> Tensor:
    """Return the definition, dense and in float64; arguments as for ``gated_attention``."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    rate = log_beta.double().repeat_interleave(group, 1)
    step = torch.arange(query.shape[2], device=query.device)
    age = step[:, None] - step
    seen = age >= 0
    if document_start is not None:
        seen = seen & (step >= document_start[:, None, :, None])
    logits = scale * (query.double() @ key.mT)
    if gating == "write":
        logits = logits + torch.where(age >= window, rate[:, :, None], 0.0)
    else:
        faded = rate[:, :, None] * age.clamp(min=0)
        logits = logits + faded if gating == "log-bias" else logits * faded.exp()
    return logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value


class _Blocked(torch.autograd.Function):
    """The CPU form; saves its inputs only, recomputes the weights in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_beta: Tensor,
        scale: float,
        document_start: Tensor | None,
        gating: str,
        window: int,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, log_beta, document_start)
        ctx.settings = scale, gating, window
        blocks = _Blocks(query, key, log_beta, document_start, *ctx.settings)
        value = value.to(blocks.dtype)
        out = torch.empty_like(blocks.query)
        for b, queries, keys in blocks.ranges():
            _, weights, *_ = blocks.weights(b, queries, keys)
            out[b, :, :, queries] = (weights @ value[b, :, keys]).unflatten(1, (blocks.group, -1))
        return out.flatten(1, 2).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, log_beta, document_start = inputs = ctx.saved_tensors
        blocks = _Blocks(query, key, log_beta, document_start, *ctx.settings)
        value, grad = value.to(blocks.dtype), grad.to(blocks.dtype)
        grad = grad.unflatten(1, (key.shape[1], -1))
        d_query, d_key = torch.empty_like(blocks.query), torch.zeros_like(blocks.key)
        d_value, d_rate = torch.zeros_like(value), torch.zeros_like(blocks.rate)
        for b, queries, keys in blocks.ranges():
            rows, weights, fade, score = blocks.weights(b, queries, keys)
            d_out = grad[b, :, :, queries].flatten(1, 2)
            if ctx.needs_input_grad[2]:
                d_value[b, :, keys] += weights.mT @ d_out
            d_weights = torch.bmm(d_out, value[b, :, keys].mT, out=blocks.work(1, weights.shape))
            # d_logit = weights * (d_weights - sum of weights * d_weights), in one pass.
            d_score = torch._softmax_backward_data(d_weights, weights, -1, blocks.dtype)
            by_age = d_score
            if fade is not None and score is not None:
                d_score.unflatten(1, (blocks.group, -1)).mul_(fade[:, None])
                by_age = score.mul_(d_score)
            d_rate[b, :, keys] += blocks.rate_sum(by_age, queries, keys)
            if ctx.needs_input_grad[0]:
                d_rows = (d_score @ blocks.key[b, :, keys]).mul_(blocks.scale)
                d_query[b, :, :, queries] = d_rows.unflatten(1, (blocks.group, -1))
            if ctx.needs_input_grad[1]:
                d_key[b, :, keys] += d_score.mT @ rows
        grads = (d_query.flatten(1, 2), d_key, d_value, d_rate)
        return *(g.to(x.dtype) for g, x in zip(grads, inputs, strict=False)), None, None, None, None


class _Blocks:
    """Attention weights of one block of queries of one sequence at a time.

    The query heads of a group are stacked as rows of one matrix, so that K and V are read once
    for all of them and never repeated.

    Attributes:
        query: ``[B, H, group, T, D]``; key: ``[B, H, T, D]``; rate: ``[B, H, T]``, all in dtype
            (float64 if the query is, else float32).
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        log_beta: Tensor,
        document_start: Tensor | None,
        scale: float,
        gating: str,
        window: int,
    ) -> None:
        self.dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.query = query.to(self.dtype).unflatten(1, (key.shape[1], -1))
        self.key, self.rate = key.to(self.dtype), log_beta.to(self.dtype)
        self.scale, self.gating, self.window = scale, gating, window
        self.group, self.steps = self.query.shape[2], query.shape[2]
        self.step = torch.arange(self.steps, device=query.device)
        self.time = self.step.to(self.dtype)
        self.document_start = document_start
        self.starts = None if document_start is None else document_start.tolist()
        area = key.shape[1] * self.group * min(BLOCK, self.steps) * self.steps
        self._work = self.query.new_empty(3, area)

    def ranges(self) -> Iterator[tuple[int, slice, slice]]:
        """Yield (sequence, queries, keys): keys from the first one that the first query may see."""
        for b in range(self.query.shape[0]):
            for first in range(0, self.steps, BLOCK):
                end = min(first + BLOCK, self.steps)
                begin = 0 if self.starts is None else self.starts[b][first]
                yield b, slice(first, end), slice(begin, end)

    def weights(
        self, b: int, queries: slice, keys: slice
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return rows ``scale * q [H, R, D]`` and weights ``[H, R, n]``, R = group * queries.

        For ``logit-scale`` also fade ``exp((t - i) log_beta) [H, queries, n]`` and the unfaded
        scores ``[H, R, n]``. The last three lie in workspaces that the next call overwrites.
        """
        rows = (self.query[b, :, :, queries] * self.scale).flatten(1, 2)
        heads, height = rows.shape[:2]
        width = keys.stop - keys.start
        shape = (heads, height, width)
        score = torch.bmm(rows, self.key[b, :, keys].mT, out=self.work(0, shape))
        age = self.time[queries, None] - self.time[keys]
        rate = self.rate[b, :, None, keys]
        fade, logits = None, score
        if self.gating == "log-bias":
            logits.unflatten(1, (self.group, -1)).addcmul_(age, rate[:, None])
        elif self.gating == "write":
            bias = torch.where(age >= self.window, rate, 0.0)
            logits.unflatten(1, (self.group, -1)).add_(bias[:, None])
        else:
            fade = (age.clamp_(min=0) * rate).exp_()
            logits = self.work(2, shape)
            grouped = (heads, self.group, -1, width)
            torch.mul(score.view(grouped), fade[:, None], out=logits.view(grouped))
        self._hide(logits, b, queries, keys)
        torch.softmax(logits, -1, out=logits)
        return rows, logits, fade, None if fade is None else score

    def work(self, index: int, shape: tuple[int, ...]) -> Tensor:
        """Return one of the workspaces, as a contiguous tensor of this shape."""
        return self._work[index, : math.prod(shape)].view(shape)

    def rate_sum(self, x: Tensor, queries: slice, keys: slice) -> Tensor:
        """Return ``[H, R, n]`` -> ``[H, n]``: the sum over rows of x times what the rate is
        multiplied by, ``t - i``, or for ``write`` 1 outside the window and 0 within.

        By matrix products, the first is the sum of ``(t - t0) x`` plus ``(t0 - i)`` times the sum
        of x.
        """
        if self.gating == "write":
            far = self.step[queries, None] - self.step[keys] >= self.window
            return (x.unflatten(1, (self.group, -1)).sum(1) * far).sum(1)
        lag = self.time[: queries.stop - queries.start]
        factors = torch.stack((lag, torch.ones_like(lag))).repeat(1, self.group)
        lagged, plain = (factors.expand(len(x), -1, -1) @ x).unbind(1)
        return torch.addcmul(lagged, self.time[queries.start] - self.time[keys], plain)

    def _hide(self, logits: Tensor, b: int, queries: slice, keys: slice) -> None:
        """Put -inf where the key comes later than the query or lies in another document."""
        first = queries.start
        if self.starts is not None and self.starts[b][queries.stop - 1] > keys.start:
            first = keys.start  # a document starts within the block: look at all its keys
        last = self.step[first : keys.stop]
        hidden = last > self.step[queries, None]
        if first == keys.start and self.document_start is not None:
            hidden = hidden | (last < self.document_start[b, queries, None])
        part = logits.unflatten(1, (self.group, -1))[..., first - keys.start :]
        part.masked_fill_(hidden, -torch.inf)


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    scale: float,
    document_start: Tensor | None,
    gating: str,
    window: int,
) -> Tensor:
    group, steps = query.shape[1] // key.shape[1], query.shape[2]
    # Each length is compiled anew, for a minute, and after eight torch gives up: powers of two.
    # What is appended is a document of its own, so that few blocks of it are computed.
    extra = max(1 << (steps - 1).bit_length(), FLEX_BLOCK) - steps
    if extra:
        query, key, value = (F.pad(x, (0, 0, 0, extra)) for x in (query, key, value))
        log_beta = F.pad(log_beta, (0, extra))
        if document_start is None:
            document_start = query.new_zeros(query.shape[0], steps, dtype=torch.int64)
        document_start = F.pad(document_start, (0, extra), value=steps)

    def fade(b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
        # Clamped: ages below 0 are masked afterwards, but exp of them could overflow.
        return (t - i).clamp(min=0) * log_beta[b, h // group, i]

    def bias(score: Tensor, b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
        return score + fade(b, h, t, i)

    def stretch(score: Tensor, b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
        return score * torch.exp(fade(b, h, t, i))

    def admit(score: Tensor, b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
        return torch.where(t - i >= window, score + log_beta[b, h // group, i], score)

    attend: Any = _compiled_flex() if query.is_cuda else flex_attention
    out = attend(
        query,
        key,
        value,
        score_mod={"log-bias": bias, "logit-scale": stretch, "write": admit}[gating],
        block_mask=_block_mask(document_start, query.shape[2], query.device),
        scale=scale,
        enable_gqa=group > 1,
    )
    return out[:, :, :steps]


def _block_mask(document_start: Tensor | None, steps: int, device: torch.device) -> BlockMask:
    """Return which 128 x 128 blocks FlexAttention computes, and in which it must look at each pair.

    ``create_block_mask`` would find the same in a dense T x T mask; here two numbers per block of
    queries are enough, because a query sees one range of keys, and the ranges only move right.
    """
    if document_start is None:
        start, visible = torch.zeros(1, steps, dtype=torch.int64, device=device), _causal
    else:
        start = document_start

        def visible(b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
            return (i <= t) & (i >= start[b, t])

    block = torch.arange(0, steps, FLEX_BLOCK, device=device)
    earliest = start[:, block, None]
    latest = start[:, (block + FLEX_BLOCK - 1).clamp(max=steps - 1), None]
    reached = (block <= block[:, None]) & (block + FLEX_BLOCK > earliest)
    full = reached & (block < block[:, None]) & (block >= latest)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        flags = chosen[:, None].int()
        order = flags.argsort(stable=True, dim=-1, descending=True)
        return flags.sum(-1).int(), order.int()

    some, some_at = listed(reached & ~full)
    whole, whole_at = listed(full)
    return BlockMask.from_kv_blocks(
        some,
        some_at,
        whole,
        whole_at,
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(steps, steps),
    )


def _causal(b: Tensor, h: Tensor, t: Tensor, i: Tensor) -> Tensor:
    return i <= t


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_beta: Tensor,
    document_start: Tensor | None,
    gating: str,
) -> None:
    if gating not in GATINGS:
        raise ValueError(f"gating is {gating!r}; use one of {GATINGS}")
    batch, heads, steps, width = key.shape
    wanted = (batch, query.shape[1], steps, width)
    if query.shape != wanted or value.shape != key.shape or query.shape[1] % heads:
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do "
            "not fit: key and value must be equal, query may have a multiple of their heads"
        )
    if log_beta.shape != (batch, heads, steps):
        raise ValueError(f"log_beta is {list(log_beta.shape)}, not {[batch, heads, steps]}")
    if document_start is not None and document_start.shape != (batch, steps):
        raise ValueError(f"document_start is {list(document_start.shape)}, not {[batch, steps]}")
