"""``kernels.delta`` in Triton. Import only where Triton is.

A column of a value head's state does not know the others. A program holds some of them in
registers while it takes its sequence's tokens, one after the other: no more than a warp, so that
nothing waits for another one.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.model.delta import EPS

COLUMNS = 8  # of a state, that a program holds
DELTA_WARPS = 1
CHANNELS = 256
TOKENS = 16  # that a program convolves
WARPS = 4


def sizes(dk: int, dv: int) -> dict[str, Any]:
    """Return the constants of a head's size."""
    return {
        "DK": dk,
        "DV": dv,
        "BLOCK_K": triton.next_power_of_2(dk),
        "COLUMNS": COLUMNS,
        "EPS": EPS,
    }


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`mmkv.engine.backends.cuda.kernels.delta.causal_conv`."""
    tokens, channels = x.shape
    taps = weight.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    weight, state = weight.contiguous(), state.contiguous()
    conv_kernel[(triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS))](
        x,
        weight,
        state,
        out,
        tokens,
        x.stride(0),
        x.stride(1),
        WIDTH=channels,
        TAPS=taps,
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )
    newest = x[max(tokens - taps + 1, 0) :].T.to(state.dtype)
    return out, torch.cat([state, newest], 1)[:, newest.shape[1] :].contiguous()


@jit
def conv_kernel(
    x,
    weight,
    state,
    out,
    tokens,
    x_row,
    x_column,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolve some tokens of some channels; grid (blocks of tokens, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there, live = channel < WIDTH, row < tokens
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        at = row - (TAPS - 1) + tap
        factor = tl.load(weight + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
        new = (at >= 0) & live
        value = tl.load(
            x + at[:, None] * x_row + channel[None, :] * x_column,
            mask=new[:, None] & there[None, :],
            other=0.0,
        ).to(tl.float32)
        before = tl.load(
            state + channel[None, :] * (TAPS - 1) + (at + TAPS - 1)[:, None],
            mask=(at < 0)[:, None] & there[None, :],
            other=0.0,
        ).to(tl.float32)
        total += (value + before) * factor[None, :]
    made = total / (1.0 + tl.exp(-total))
    tl.store(
        out + row[:, None] * WIDTH + channel[None, :],
        made.to(out.dtype.element_ty),
        mask=live[:, None] & there[None, :],
    )


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.delta.conv_step`."""
    batch, channels = x.shape
    out = torch.empty(batch, channels, dtype=x.dtype, device=x.device)
    conv_step_kernel[(batch, triton.cdiv(channels, CHANNELS))](
        x,
        weight.contiguous(),
        states,
        slot,
        out,
        x.stride(0),
        states.stride(0),
        WIDTH=channels,
        TAPS=weight.shape[1],
        CHANNELS=CHANNELS,
        num_warps=WARPS,
    )
    return out


@jit
def conv_step_kernel(
    x,
    weight,
    states,
    slot,
    out,
    x_row,
    states_row,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Convolve one token of a batch slot and shift its state; grid (B, blocks of channels)."""
    row = tl.program_id(0).to(tl.int64)
    mine = tl.load(slot + row)
    if mine < 0:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    there = channel < WIDTH
    past = states + mine * states_row + channel * (TAPS - 1)
    newest = tl.load(x + row * x_row + channel, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros([CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        if tap == TAPS - 1:
            value = newest
        else:
            value = tl.load(past + tap, mask=there, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(past + tap - 1, value.to(states.dtype.element_ty), mask=there)
        factor = tl.load(weight + channel * TAPS + tap, mask=there, other=0.0).to(tl.float32)
        total += value * factor
    made = total / (1.0 + tl.exp(-total))
    tl.store(out + row * WIDTH + channel, made.to(out.dtype.element_ty), mask=there)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: Tensor
) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.delta.delta_step`."""
    return _take(q, k, v, g, beta, states, slot, 1)


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`mmkv.engine.backends.cuda.kernels.delta.delta_chunk`; one launch."""
    after = state.clone(memory_format=torch.contiguous_format)
    slot = torch.zeros(1, dtype=torch.int64, device=v.device)
    return _take(q, k, v, g, beta, after[None], slot, len(v)), after


def _take(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: Tensor,
    slot: Tensor,
    tokens: int,
) -> Tensor:
    """Take so many tokens of each of B sequences, which follow each other in ``v``."""
    _, heads, dv = v.shape
    dk = k.shape[2]
    q, k, v = (_heads_together(x) for x in (q, k, v))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta_kernel[(len(slot) * heads, triton.cdiv(dv, COLUMNS))](
        q,
        k,
        v,
        g.contiguous(),
        beta.contiguous(),
        states,
        slot,
        out,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        GROUP=heads // k.shape[1],
        **sizes(dk, dv),
        num_warps=DELTA_WARPS,
    )
    return out


@jit
def delta_kernel(
    q,
    k,
    v,
    g,
    beta,
    states,
    slot,
    out,
    tokens,
    q_row,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Take the tokens of a batch slot and value head; grid (B Hv, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    batch_slot, head = row // HEADS, row % HEADS
    mine = tl.load(slot + batch_slot)
    if mine < 0:
        return
    i, column = tl.arange(0, BLOCK_K), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    deep, there = i < DK, column < DV
    place = states + (mine * HEADS + head) * (DK * DV) + i[:, None] * DV + column[None, :]
    inside = deep[:, None] & there[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    of_key = head // GROUP * DK + i
    scale = 1.0 / tl.sqrt(DK * 1.0)
    for at in range(0, tokens):
        token = batch_slot * tokens + at
        query = tl.load(q + token * q_row + of_key, mask=deep, other=0.0).to(tl.float32)
        key = tl.load(k + token * k_row + of_key, mask=deep, other=0.0).to(tl.float32)
        value = tl.load(v + token * v_row + head * DV + column, mask=there, other=0.0)
        decay = tl.exp(tl.load(g + token * HEADS + head))
        rate = tl.load(beta + token * HEADS + head)
        query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
        state *= decay
        delta = (value.to(tl.float32) - tl.sum(state * key[:, None], 0)) * rate
        state += key[:, None] * delta[None, :]
        made = tl.sum(state * query[:, None], 0)
        tl.store(
            out + (token * HEADS + head) * DV + column, made.to(out.dtype.element_ty), mask=there
        )
    tl.store(place, state, mask=inside)


def _heads_together(x: Tensor) -> Tensor:
    """Return ``x [T, H, D]`` with a token's numbers side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
