"""``kernels.experts`` in Triton: each chosen expert's matrices are read where they lie.

Tokens of an expert lie side by side in an order that one launch makes; a program of the products
takes some of them, and some rows of the expert's matrix.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit

PLACED = 32  # pairs or experts of a program
PAIRS = 128  # that it looks at together
DEPTH = 32  # of a row, between two products of a program


def experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.experts.experts`; three launches."""
    (tokens, chosen), (count, twice, width) = ids.shape, gate_up.shape
    pairs = tokens * chosen
    out = x.new_empty(tokens, chosen, width)
    if not pairs:
        return out
    order = torch.empty(pairs + count, dtype=torch.int32, device=x.device)
    order_kernel[(triton.cdiv(pairs + count, PLACED),)](
        ids.contiguous(), order, pairs, EXPERTS=count, PLACED=PLACED, PAIRS=PAIRS, num_warps=4
    )
    inner = x.new_empty(pairs, twice // 2)
    size = sizes(pairs, count)
    tiles = min(count, pairs) + pairs // size["TOKENS"]
    for states, matrix, made, each in (
        (x.contiguous(), gate_up, inner, chosen),
        (inner, down, out, 1),
    ):
        expert_kernel[(tiles, triton.cdiv(made.shape[-1], size["COLUMNS"]))](
            states,
            matrix.contiguous(),
            order,
            made,
            pairs,
            WIDTH=matrix.shape[2],
            ROWS=made.shape[-1],
            EXPERTS=count,
            BLOCK_E=triton.next_power_of_2(count),
            EACH=each,
            GATED=matrix is gate_up,
            DEPTH=DEPTH,
            EXACT=x.dtype == torch.float32,
            **size,
        )
    return out


def sizes(pairs: int, count: int) -> dict[str, Any]:
    """Return the tile of a program, its warps and how far ahead it reads, as for few tokens of an
    expert or for many.
    """
    if pairs <= 16 * count:
        return {"TOKENS": 16, "COLUMNS": 16, "STAGES": 8, "num_warps": 2}
    return {"TOKENS": 64, "COLUMNS": 64, "STAGES": 3, "num_warps": 4}


@jit
def order_kernel(
    ids, order, pairs, EXPERTS: tl.constexpr, PLACED: tl.constexpr, PAIRS: tl.constexpr
):
    """Sort pairs (token, choice) by expert, stably; grid ((pairs + experts) / PLACED).

    A pair's place is the number of pairs before it. Behind the pairs, ``order`` holds where each
    expert's end.
    """
    mine = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    paired = mine < pairs
    expert = tl.load(ids + mine, mask=paired, other=0)
    bound = tl.where(paired, expert * pairs + mine, (mine - pairs + 1).to(tl.int64) * pairs)
    before = tl.zeros([PLACED], tl.int32)
    for begin in range(0, pairs, PAIRS):
        other = begin + tl.arange(0, PAIRS)
        there = other < pairs
        code = tl.load(ids + other, mask=there, other=0) * pairs + other
        before += tl.sum((there[None, :] & (code[None, :] < bound[:, None])).to(tl.int32), 1)
    tl.store(order + before, mine, mask=paired)
    tl.store(order + mine, before, mask=(mine >= pairs) & (mine < pairs + EXPERTS))


@jit
def expert_kernel(
    states,
    matrix,
    order,
    out,
    pairs,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    EACH: tl.constexpr,
    GATED: tl.constexpr,
    DEPTH: tl.constexpr,
    EXACT: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply TOKENS pairs of an expert by COLUMNS of its rows; grid (tiles, rows / COLUMNS).

    Pair p has row ``p / EACH`` of ``states``. With GATED there are twice as many rows, the gates
    before what they multiply.
    """
    tile = tl.program_id(0)
    each = tl.arange(0, BLOCK_E)
    known = each < EXPERTS
    end = tl.load(order + pairs + each, mask=known, other=0)
    begin = tl.load(order + pairs + each - 1, mask=known & (each > 0), other=0)
    tiles = (end - begin + TOKENS - 1) // TOKENS
    after = tl.cumsum(tl.where(known, tiles, 0), 0)
    expert = tl.sum((known & (after <= tile)).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    own = each == expert
    skipped = tile - tl.sum(tl.where(own, after - tiles, 0), 0)
    place = tl.sum(tl.where(own, begin, 0), 0) + skipped * TOKENS + tl.arange(0, TOKENS)
    live = place < tl.sum(tl.where(own, end, 0), 0)
    pair = tl.load(order + place, mask=live, other=0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < ROWS
    deep = tl.arange(0, DEPTH)
    rows_each: tl.constexpr = 2 * ROWS if GATED else ROWS
    row = expert.to(tl.int64) * rows_each + column
    source = matrix + row[None, :] * WIDTH + deep[:, None]
    given = states + (pair // EACH)[:, None] * WIDTH + deep[None, :]
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    made, beside = tl.zeros([TOKENS, COLUMNS], tl.float32), tl.zeros([TOKENS, COLUMNS], tl.float32)
    for at in tl.range(0, WIDTH, DEPTH, num_stages=STAGES):
        left = deep < WIDTH - at
        # TF32 holds bfloat16 and float16 exactly; the interpreter cannot multiply the former.
        state = tl.load(given + at, mask=live[:, None] & left[None, :], other=0.0).to(tl.float32)
        wanted = left[:, None] & inside[None, :]
        held = tl.load(source + at, mask=wanted, other=0.0).to(tl.float32)
        made = tl.dot(state, held, made, input_precision=precision)
        if GATED:
            held = tl.load(source + ROWS * WIDTH + at, mask=wanted, other=0.0).to(tl.float32)
            beside = tl.dot(state, held, beside, input_precision=precision)
    dtype = out.dtype.element_ty
    if GATED:  # rounded where torch's operations round
        gate = made.to(dtype).to(tl.float32)
        made = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        made *= beside.to(dtype).to(tl.float32)
    to = out + pair[:, None] * ROWS + column[None, :]
    tl.store(to, made.to(dtype), mask=live[:, None] & inside[None, :])
