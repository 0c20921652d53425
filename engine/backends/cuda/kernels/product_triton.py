"""``kernels.product`` in Triton: states in 8 bits, and tiles of whole numbers times steps.

A program owns a tile of the result and walks along the blocks of a matrix's rows, first to last.
Tensor cores make the sums of a block, whole numbers that are exact. They are scaled and added up
in float32 by operations that are rounded one by one (nothing is fused), as torch does in the
reference. So results have the reference's bits, whatever the tile and the other states are.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.model.rounded import BLOCK, IntegerMatrix

LARGEST = tl.constexpr(127.0)
LEAST_CODED = tl.constexpr(1e-30)  # as in mmkv.engine.model.rounded
# Added and taken away again, it rounds to the nearest whole number, to the even one of two.
ROUNDER = tl.constexpr(12582912.0)

CODED_BLOCKS = 32  # blocks that one program rounds
EXACT = {"enable_fp_fusion": False}  # a fused product and sum is rounded once, not twice


def multiply(x: Tensor, weight: IntegerMatrix, bias: Tensor | None = None) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.product.multiply`."""
    (rows, width), flat = weight.shape, x.reshape(-1, x.shape[-1])
    tokens, made = len(flat), x.new_empty(len(flat), rows)
    if tokens:
        codes, steps = code_states(flat, weight.bits)
        size = sizes(tokens)
        integer_kernel[_grid(tokens, rows, size)](
            codes,
            steps,
            *weight.held(),
            made if bias is None else bias,  # never read without one
            made,
            tokens,
            rows,
            triton.cdiv(width, BLOCK),
            BITS=weight.bits,
            BIASED=bias is not None,
            **size,
            **EXACT,
        )
    return made.view(*x.shape[:-1], rows)


def multiply_rounded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.product.multiply_rounded`: bfloat16 rows."""
    (rows, width), flat = weight.shape, x.reshape(-1, x.shape[-1]).bfloat16()
    tokens, made = len(flat), x.new_empty(len(flat), rows)
    if tokens:
        size = sizes(tokens)
        bf16_kernel[_grid(tokens, rows, size)](
            flat.contiguous(),
            weight.contiguous(),
            made if bias is None else bias,
            made,
            tokens,
            rows,
            width,
            BIASED=bias is not None,
            **size,
        )
    return made.view(*x.shape[:-1], rows)


def sizes(tokens: int) -> dict[str, int]:
    """Return the tile of a program, its warps and how many blocks ahead it reads.

    Few tokens, as in a decode step, get narrow tiles that read far ahead: that makes many programs,
    and what they wait for together keeps the memory busy. Many, as in a prompt, get large ones:
    less is read twice.
    """
    if tokens <= 16:
        return {"TOKENS": 16, "COLUMNS": 16, "STAGES": 16, "num_warps": 1}
    if tokens <= 64:
        block = 32 if tokens <= 32 else 64
        return {"TOKENS": block, "COLUMNS": 32, "STAGES": 8, "num_warps": 4}
    return {"TOKENS": 128, "COLUMNS": 128, "STAGES": 4, "num_warps": 8}


def _grid(tokens: int, rows: int, size: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(rows, size["COLUMNS"]), triton.cdiv(tokens, size["TOKENS"])


def code_states(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round states ``[T, in]`` as :func:`mmkv.engine.model.rounded.code_states` does.

    Args:
        bits: of the weights, which decide in what order the codes of a block lie.

    Returns:
        codes int8 ``[T, blocks 32]`` and steps float32 ``[blocks, T]``.
    """
    tokens, width = x.shape
    blocks = triton.cdiv(width, BLOCK)
    codes = torch.empty(tokens, blocks * BLOCK, dtype=torch.int8, device=x.device)
    steps = torch.empty(blocks, tokens, dtype=torch.float32, device=x.device)
    code_kernel[(triton.cdiv(tokens * blocks, CODED_BLOCKS),)](
        x,
        codes,
        steps,
        x.stride(0),
        x.stride(1),
        tokens,
        width,
        blocks,
        BITS=bits,
        CODED_BLOCKS=CODED_BLOCKS,
        num_warps=4,
        **EXACT,
    )
    return codes, steps


@jit
def code_kernel(
    x,
    codes,
    steps,
    row_stride,
    stride,
    tokens,
    features,
    blocks,
    BITS: tl.constexpr,
    CODED_BLOCKS: tl.constexpr,
):
    """Round some blocks, those of a token together; grid (T blocks / CODED_BLOCKS).

    With 4 bits the codes of a block lie as the halves of the weights' bytes do.
    """
    index = tl.program_id(0) * CODED_BLOCKS + tl.arange(0, CODED_BLOCKS)
    token, block = (index // blocks).to(tl.int64), index % blocks
    there = token < tokens
    place = tl.arange(0, 32)
    column = place
    if BITS == 4:
        column = place // 8 * 8 + place % 2 * 4 + place // 2 % 4
    at = block[:, None] * 32 + column[None, :]
    source = x + (token * row_stride)[:, None] + at * stride
    inside = there[:, None] & (at < features)
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    # 0, unless something is not finite, which the largest would not tell.
    finite = tl.sum(value - value, 1) == 0.0
    most = tl.max(tl.abs(value), 1)
    coded = finite & (most >= LEAST_CODED)
    inverse = tl.where(
        coded, tl.div_rn(tl.zeros_like(most) + LARGEST, tl.where(coded, most, 1.0)), 0.0
    )
    scaled = tl.where(finite[:, None], value * inverse[:, None], 0.0)
    code = ((scaled + ROUNDER) - ROUNDER).to(tl.int8)
    step = tl.div_rn(most, tl.zeros_like(most) + LARGEST)
    step = tl.where(finite, step, float("nan"))
    tl.store(codes + index.to(tl.int64)[:, None] * 32 + place[None, :], code, mask=there[:, None])
    tl.store(steps + block * tokens + token, step, mask=there)


@jit
def integer_kernel(
    codes,
    steps,
    weight,
    scales,
    bias,
    out,
    tokens,
    height,
    blocks,
    BITS: tl.constexpr,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute a tile ``[TOKENS, COLUMNS]`` of the result; grid (out / COLUMNS, T / TOKENS).

    Where a tile ends behind the last panel or token, it reads the last or first one once more.
    """
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = token < tokens
    panel = tl.minimum(column // 16, (height + 15) // 16 - 1).to(tl.int64)
    row = column % 16
    place = tl.arange(0, 32)
    states = codes + (tl.where(known, token, 0) * (blocks * 32))[:, None] + place[None, :]
    if BITS == 8:
        group = place // 4 * 64 + place % 4
    else:
        byte = tl.arange(0, 16)
        group = byte // 4 * 64 + byte % 4
    block_bytes: tl.constexpr = 64 * BITS
    source = weight + group[:, None] + (panel * (blocks * block_bytes) + row * 4)[None, :]
    factors = scales + panel * (blocks * 16) + row
    made = tl.zeros([TOKENS, COLUMNS], tl.float32)
    # Said here and not at the launch, this reads steps ahead, too, and not codes alone.
    for block in tl.range(0, blocks, num_stages=STAGES):
        state = tl.load(states + block * 32)
        held = tl.load(source + block * block_bytes)
        if BITS == 4:
            low = ((held & 15).to(tl.int8) - 8).to(tl.int8)
            high = ((held >> 4).to(tl.int8) - 8).to(tl.int8)
            held = tl.join(low, high).permute(0, 2, 1).reshape(32, COLUMNS)
        factor = tl.load(factors + block * 16).to(tl.float32)
        step = tl.load(steps + block * tokens + token, mask=known, other=0.0)
        total = tl.dot(state, held, out_dtype=tl.int32)
        made += total.to(tl.float32) * (factor[None, :] * step[:, None])
    inside = column < height
    if BIASED:
        made += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = out + token[:, None] * height + column[None, :]
    tl.store(to, made.to(out.dtype.element_ty), mask=known[:, None] & inside[None, :])


@jit
def bf16_kernel(
    x,
    weight,
    bias,
    out,
    tokens,
    height,
    features,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply bfloat16 by bfloat16 and sum in float32; grid as :func:`integer_kernel`."""
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    known, inside = token < tokens, column < height
    place = tl.arange(0, 32)
    states = x + token[:, None] * features + place[None, :]
    source = weight + column[None, :] * features + place[:, None]
    made = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for begin in tl.range(0, features, 32, num_stages=STAGES):
        left = place < features - begin
        state = tl.load(states + begin, mask=known[:, None] & left[None, :], other=0.0)
        held = tl.load(source + begin, mask=left[:, None] & inside[None, :], other=0.0)
        # TF32 holds bfloat16 exactly, and the interpreter cannot multiply the latter.
        made = tl.dot(state.to(tl.float32), held.to(tl.float32), made, input_precision="tf32")
    if BIASED:
        made += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + token[:, None] * height + column[None, :], made, known[:, None] & inside[None, :]
    )
