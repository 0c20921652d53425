"""``kernels.delta`` in Triton. Import only where Triton is.

A column of a value head's state does not know the others: a program holds some of them in
registers. In a step it is no more than a warp, so that nothing waits for another one. Products of a
chunk's blocks are on tensor cores, of three parts each (``tf32x3``): as exact as float32's.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.model.delta import BLOCK, EPS

COLUMNS = 8  # of a state, that a program of a step holds
STEP_WARPS = 1
CHUNK_COLUMNS = 16
CHUNK_WARPS = 4
PART = 16  # of a row, between two products
CHANNELS = 256
TOKENS = 16  # that a program convolves
WARPS = 4


def sizes(dk: int, dv: int) -> dict[str, Any]:
    """Return a step's constants of a head's size."""
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
    batch, heads, dv = v.shape
    dk = k.shape[2]
    q, k, v = (_heads_together(x) for x in (q, k, v))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    step_kernel[(batch * heads, triton.cdiv(dv, COLUMNS))](
        q,
        k,
        v,
        g.contiguous(),
        beta.contiguous(),
        states,
        slot,
        out,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        HEADS=heads,
        GROUP=heads // k.shape[1],
        **sizes(dk, dv),
        num_warps=STEP_WARPS,
    )
    return out


@jit
def step_kernel(
    q,
    k,
    v,
    g,
    beta,
    states,
    slot,
    out,
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
    """Take the token of a batch slot and value head; grid (B Hv, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    mine = tl.load(slot + token)
    if mine < 0:
        return
    i, column = tl.arange(0, BLOCK_K), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    deep, there = i < DK, column < DV
    place = states + (mine * HEADS + head) * (DK * DV) + i[:, None] * DV + column[None, :]
    inside = deep[:, None] & there[None, :]
    of_key = head // GROUP * DK + i
    query = tl.load(q + token * q_row + of_key, mask=deep, other=0.0).to(tl.float32)
    key = tl.load(k + token * k_row + of_key, mask=deep, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_row + head * DV + column, mask=there, other=0.0)
    query *= tl.rsqrt(tl.sum(query * query, 0) + EPS) / tl.sqrt(DK * 1.0)
    key *= tl.rsqrt(tl.sum(key * key, 0) + EPS)
    state = tl.load(place, mask=inside, other=0.0) * tl.exp(tl.load(g + row))
    delta = (value.to(tl.float32) - tl.sum(state * key[:, None], 0)) * tl.load(beta + row)
    state += key[:, None] * delta[None, :]
    made = tl.sum(state * query[:, None], 0)
    tl.store(out + row * DV + column, made.to(out.dtype.element_ty), mask=there)
    tl.store(place, state, mask=inside)


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """See :func:`mmkv.engine.backends.cuda.kernels.delta.delta_chunk`; two launches and a copy."""
    (tokens, heads, dv), dk = v.shape, k.shape[2]
    q, k, v = (_heads_together(x) for x in (q, k, v))
    out, after = v.new_empty(v.shape), state.clone(memory_format=torch.contiguous_format)
    if not tokens:
        return out, after
    blocks = triton.cdiv(tokens, BLOCK)
    of_keys, of_queries, newest = state.new_empty(3, blocks, heads, BLOCK, dk)
    of_values = state.new_empty(blocks, heads, BLOCK, dv)
    within, decay = state.new_empty(blocks, heads, BLOCK, BLOCK), state.new_empty(blocks, heads)
    parts = of_keys, of_values, of_queries, newest, within, decay
    size = {"HEADS": heads, "DK": dk, "DV": dv, "BLOCK": BLOCK, "PART": PART, "num_stages": 1}
    block_kernel[(blocks * heads,)](
        q,
        k,
        v,
        g.contiguous(),
        beta.contiguous(),
        *parts,
        tokens,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        GROUP=heads // k.shape[1],
        EPS=EPS,
        **size,
        num_warps=CHUNK_WARPS,
    )
    chunk_kernel[(heads, triton.cdiv(dv, CHUNK_COLUMNS))](
        *parts, after, out, tokens, COLUMNS=CHUNK_COLUMNS, **size, num_warps=CHUNK_WARPS
    )
    return out, after


@jit
def block_kernel(
    q,
    k,
    v,
    g,
    beta,
    of_keys,
    of_values,
    of_queries,
    newest,
    within,
    decay,
    tokens,
    q_row,
    k_row,
    v_row,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    EPS: tl.constexpr,
):
    """Compute what a block's tokens need of each other, whatever the state; grid (blocks Hv).

    With the triangular system of :func:`mmkv.engine.model.delta.delta_chunk` solved, the deltas
    are ``of_values - of_keys S``: both sides of it are made here (the WY form).
    """
    row = tl.program_id(0).to(tl.int64)
    head = row % HEADS
    at, part = tl.arange(0, BLOCK), tl.arange(0, PART)
    token = row // HEADS * BLOCK + at
    live, here = token < tokens, (row * BLOCK + at)[:, None]
    of_query = q + token[:, None] * q_row + (head // GROUP * DK + part)[None, :]
    of_key = k + token[:, None] * k_row + (head // GROUP * DK + part)[None, :]
    alike, mixing = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    long_query, long_key = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, DK, PART):
        inside = live[:, None] & (part < DK - first)[None, :]
        query = tl.load(of_query + first, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(of_key + first, mask=inside, other=0.0).to(tl.float32)
        long_query += tl.sum(query * query, 1)
        long_key += tl.sum(key * key, 1)
        alike = tl.dot(key, tl.trans(key), alike, input_precision="tf32x3")
        mixing = tl.dot(query, tl.trans(key), mixing, input_precision="tf32x3")
    unit_query = tl.rsqrt(long_query + EPS) / tl.sqrt(DK * 1.0)
    unit_key = tl.rsqrt(long_key + EPS)
    rate = tl.load(beta + token * HEADS + head, mask=live, other=0.0)
    # Sums of a head that forgets at once are in the thousands: float32 would keep 3 digits.
    total = tl.cumsum(tl.load(g + token * HEADS + head, mask=live, other=0.0).to(tl.float64), 0)
    end = tl.sum(tl.where(at == BLOCK - 1, total, 0.0), 0)
    since_start, left = tl.exp(total.to(tl.float32)), tl.exp((end - total).to(tl.float32))
    tl.store(decay + row, tl.exp(end.to(tl.float32)))
    seen = at[:, None] >= at[None, :]
    between = tl.where(seen, (total[:, None] - total[None, :]).to(tl.float32), 0.0)
    between = tl.where(seen, tl.exp(between), 0.0) * unit_key[None, :]
    tl.store(within + here * BLOCK + at[None, :], unit_query[:, None] * between * mixing)
    system = (rate * unit_key)[:, None] * between * alike
    system = tl.where(at[:, None] > at[None, :], system, 0.0)
    inverse = (at[:, None] == at[None, :]).to(tl.float32)
    for line in range(1, BLOCK):  # forward substitution
        own = (at == line)[:, None]
        factor = tl.sum(tl.where(own, system, 0.0), 0)
        inverse -= tl.where(own, tl.sum(factor[:, None] * inverse, 0)[None, :], 0.0)
    for first in range(0, DV, PART):
        there = (part < DV - first)[None, :]
        of_value = v + token[:, None] * v_row + (head * DV + first + part)[None, :]
        value = tl.load(of_value, mask=live[:, None] & there, other=0.0).to(tl.float32)
        solved = tl.dot(inverse, rate[:, None] * value, input_precision="tf32x3")
        tl.store(of_values + here * DV + (first + part)[None, :], solved, mask=there)
    for first in range(0, DK, PART):
        there = (part < DK - first)[None, :]
        inside = live[:, None] & there
        query = tl.load(of_query + first, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(of_key + first, mask=inside, other=0.0).to(tl.float32)
        key *= unit_key[:, None]
        solved = tl.dot(inverse, (rate * since_start)[:, None] * key, input_precision="tf32x3")
        place = here * DK + (first + part)[None, :]
        tl.store(of_keys + place, solved, mask=there)
        tl.store(of_queries + place, (since_start * unit_query)[:, None] * query, mask=there)
        tl.store(newest + place, left[:, None] * key, mask=there)


@jit
def chunk_kernel(
    of_keys,
    of_values,
    of_queries,
    newest,
    within,
    decay,
    state,
    out,
    tokens,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Take some columns of a head's state through the blocks; grid (Hv, blocks of columns).

    They lie in memory and come PART rows at a time: whole products would not fit in registers.
    """
    head = tl.program_id(0).to(tl.int64)
    at, part = tl.arange(0, BLOCK), tl.arange(0, PART)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    there = column < DV
    for block in range(0, (tokens + BLOCK - 1) // BLOCK):
        row = block * HEADS + head
        here = (row * BLOCK + at)[:, None]
        known = tl.zeros([BLOCK, COLUMNS], tl.float32)
        made = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for first in range(0, DK, PART):
            i = (first + part)[:, None]
            place = state + (head * DK + i) * DV + column
            held = tl.load(place, mask=(i < DK) & there, other=0.0)
            wide, deep = here * DK + (first + part)[None, :], (part < DK - first)[None, :]
            keys = tl.load(of_keys + wide, mask=deep, other=0.0)
            known = tl.dot(keys, held, known, input_precision="tf32x3")
            queries = tl.load(of_queries + wide, mask=deep, other=0.0)
            made = tl.dot(queries, held, made, input_precision="tf32x3")
        delta = tl.load(of_values + here * DV + column, mask=there, other=0.0) - known
        mixing = tl.load(within + here * BLOCK + at[None, :])
        made = tl.dot(mixing, delta, made, input_precision="tf32x3")
        token = (block * BLOCK + at)[:, None]
        to = out + (token * HEADS + head) * DV + column
        tl.store(to, made.to(out.dtype.element_ty), mask=(token < tokens) & there)
        tl.debug_barrier()  # until all threads have read the state
        for first in range(0, DK, PART):
            i = (first + part)[:, None]
            inside = (i < DK) & there
            place = state + (head * DK + i) * DV + column
            held = tl.load(place, mask=inside, other=0.0) * tl.load(decay + row)
            turned = newest + (row * BLOCK + at)[None, :] * DK + i
            key = tl.load(turned, mask=i < DK, other=0.0)
            held = tl.dot(key, delta, held, input_precision="tf32x3")
            tl.store(place, held, mask=inside)
        tl.debug_barrier()  # until all have written it


def _heads_together(x: Tensor) -> Tensor:
    """Return ``x [T, H, D]`` with a token's numbers side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
