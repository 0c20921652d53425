"""``engine.backends.cuda.kernels.store`` in Triton: one program owns one KV head of one batch slot.

Its tile holds the head's queries, key and value, one per row. All loads are independent and come
before the first store, so that the latency of memory is paid once.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import copy

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.forms_triton import encode
from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.backends.cuda.kernels.pointwise_triton import turn
from mmkv.engine.cache import Columns

# log2(e) with 12 significant bits, and what is missing: see `_exp_of_minus`.
LOG2_E = tl.constexpr(1.4426950408889634)
LOG2_E_HIGH = tl.constexpr(2955 / 2048)
LOG2_E_LOW = tl.constexpr(1.4426950408889634 - 2955 / 2048)


def store_layer(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    qk_norm: Tensor | None,
    eps: float,
    pool: Columns,
    slots: Tensor,
    position: Tensor,
) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.store.store_layer`."""
    batch_slots, heads = slots.shape
    head_dim = pool.form.key.head_dim(pool.keys.shape[-1])
    rounded = pool
    if not pool.form.plain:  # the kernel leaves them beside the pool, one per batch slot and head
        pool = copy.copy(pool)
        pool.keys, pool.values = qkv.new_empty(2, batch_slots, heads, head_dim).unbind(0)
    group = qkv.shape[1] // (head_dim * heads) - 2
    query = torch.empty(batch_slots, heads * group, head_dim, dtype=qkv.dtype, device=qkv.device)
    cos, sin = (x.contiguous() for x in rope)
    shape = sizes(group, head_dim)
    store_kernel[(batch_slots, heads)](
        qkv,
        cos,
        sin,
        cos if qk_norm is None else qk_norm,
        slots,
        position,
        *pool.columns(),
        query,
        qkv.stride(0),
        slots.stride(0),
        eps,
        HEADS=heads,
        GROUP=group,
        DIM=head_dim,
        ROT=cos.shape[1],
        NORM=qk_norm is not None,
        APART=qk_norm is not None and qk_norm.dtype != qkv.dtype,
        STATE=pool.state.shape[-1],
        BESIDE=pool is not rounded,
        **shape,
    )
    if pool is not rounded:
        form = rounded.form
        key, value = form.rotate(pool.keys), form.rotate(pool.values)
        encode(key, slots, rounded.keys, rounded.key_scale, form.key)
        encode(value, slots, rounded.values, rounded.value_scale, form.value)
    return pool.form.rotate(query)


def sizes(group: int, head_dim: int) -> dict[str, int]:
    """Return tile sizes of a program, and its warps: 8 elements per thread."""
    rows, features = triton.next_power_of_2(group + 2), triton.next_power_of_2(head_dim)
    return {
        "ROWS": rows,
        "DIM_BLOCK": features,
        "num_warps": min(max(rows * features // 256, 1), 8),
    }


@jit
def store_kernel(
    qkv,
    cos,
    sin,
    gain,
    slots,
    position,
    pool_keys,
    pool_values,
    pool_key_scale,
    pool_value_scale,
    pool_log_beta,
    pool_position,
    pool_modality,
    pool_state,
    query,
    qkv_row,
    slots_row,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROT: tl.constexpr,
    NORM: tl.constexpr,
    APART: tl.constexpr,
    STATE: tl.constexpr,
    BESIDE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    """Store one KV head of one batch slot; grid (B, H)."""
    batch_slot = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + batch_slot * slots_row + head)
    at = tl.load(position + batch_slot)
    dtype = query.dtype.element_ty

    # Rows of the tile: the group's queries, then the key, then the value.
    row = tl.arange(0, ROWS)
    feature = tl.arange(0, DIM_BLOCK)
    part = tl.where(row == GROUP, HEADS * GROUP, HEADS * (GROUP + 1))
    source = tl.where(row < GROUP, head * GROUP + row, part + head)[:, None]
    inside = (row < GROUP + 2)[:, None] & (feature < DIM)[None, :]
    turns = (row <= GROUP)[:, None] & (feature < DIM)[None, :]
    turned, plain = turn(
        qkv + batch_slot * qkv_row + source * DIM,
        gain + source * DIM,
        cos + batch_slot * ROT,
        sin + batch_slot * ROT,
        feature[None, :],
        inside,
        turns,
        eps,
        dtype,
        DIM,
        ROT,
        NORM,
        APART,
    )

    # Only now, so that no load had to wait for the slot; an idle batch slot's inputs are readable.
    if slot < 0:
        return
    is_query = inside & (row < GROUP)[:, None]
    tl.store(
        query + (batch_slot * HEADS * GROUP + source) * DIM + feature[None, :], turned, is_query
    )
    to = slot
    if BESIDE:
        to = batch_slot * HEADS + head
    here = tl.broadcast_to(to * DIM + feature[None, :], (ROWS, DIM_BLOCK))
    tl.store(pool_keys + here, turned, inside & (row == GROUP)[:, None])
    tl.store(pool_values + here, plain.to(dtype), inside & (row == GROUP + 1)[:, None])
    tl.store(pool_position + slot, at.to(tl.int32))
    tl.store(pool_modality + slot, 0)
    for number in tl.static_range(STATE):
        tl.store(pool_state + slot * STATE + number, 0.0)


def store_log_beta(
    trunk: Tensor, weight: Tensor, bias: Tensor, log_beta: Tensor, slots: Tensor
) -> None:
    """See :func:`mmkv.engine.backends.cuda.kernels.store.store_log_beta`."""
    layers, batch_slots, width = trunk.shape
    heads = bias.shape[1]
    gate_kernel[(batch_slots, layers * heads)](
        trunk.contiguous(),
        weight,
        bias,
        log_beta,
        slots.contiguous(),
        HEADS=heads,
        TRUNK=width,
        **gate_sizes(width),
    )


def gate_sizes(width: int) -> dict[str, int]:
    """Return the block of a program of gates, and its warps: up to 8 elements per thread."""
    block = min(triton.next_power_of_2(width), 1024)
    return {"TRUNK_BLOCK": block, "num_warps": max(block // 256, 1)}


@jit
def gate_kernel(
    trunk,
    weight,
    bias,
    log_beta,
    slots,
    HEADS: tl.constexpr,
    TRUNK: tl.constexpr,
    TRUNK_BLOCK: tl.constexpr,
):
    """Read out the gate of a row for one batch slot; grid (B, L H)."""
    batch_slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + batch_slot * tl.num_programs(1) + row)
    if slot < 0:
        return
    source = trunk + (row // HEADS * tl.num_programs(0) + batch_slot) * TRUNK
    total = tl.zeros([TRUNK_BLOCK], tl.float32)
    for begin in tl.static_range(0, TRUNK, TRUNK_BLOCK):
        column = begin + tl.arange(0, TRUNK_BLOCK)
        known = column < TRUNK
        t = tl.load(source + column, mask=known, other=0.0).to(tl.float32)
        active = (t / (1.0 + tl.exp(-t))).to(trunk.dtype.element_ty).to(tl.float32)
        total += active * tl.load(weight + row * TRUNK + column, mask=known, other=0.0)
    tl.store(log_beta + slot, _logsigmoid(tl.sum(total, 0) + tl.load(bias + row)))


@triton.jit
def _logsigmoid(z):
    """Compute ``min(z, 0) - log1p(exp(-|z|))`` to a few units in the last place for every z.

    With u = exp(-|z|) <= 1 and r = u / (2 + u) <= 1/3, log1p(u) = 2 artanh(r), an odd series
    whose ninth term is below 2**-24 of the first. Nothing is added to 1 that matters: at z = 18
    the result is -1.5e-8, where log(1 + u) would give 0.
    """
    u = _exp_of_minus(tl.abs(z))
    r = u / (2.0 + u)
    q = r * r
    series = q * (1 / 13 + q * (1 / 15))
    series = q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + series)))
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + series))
    return tl.minimum(z, 0.0) - 2.0 * r * series


@triton.jit
def _exp_of_minus(a):
    """Compute ``exp(-a)`` for a >= 0. ``exp2(-a log2(e))`` alone would be off by 1e-6 at a = 18.

    The upper 12 bits of a times the upper 12 bits of log2(e) are exact in float32; the small
    rest has an exponential of its own.
    """
    a = tl.minimum(a, 104.0)  # 0 in float32 from here on; an infinite z must not give NaN
    high = (a.to(tl.int32, bitcast=True) & -4096).to(tl.float32, bitcast=True)
    rest = high * LOG2_E_LOW + (a - high) * LOG2_E
    return tl.exp2(-(high * LOG2_E_HIGH)) * tl.exp2(-rest)
