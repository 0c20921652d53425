"""``kernels.sample`` in Triton: a token of the sorted vocabulary, found without sorting it.

What may be drawn are always the likeliest tokens, down to some place in the running sum of their
weights. So three places are looked up: the k-th token, the one that reaches ``top_p``, and the one
that the noise takes. Each is found digit by digit, as a radix sort would, but only where the place
is. Sums of integers are the same in any order, so the token is that of the sorted form.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.jit_triton import jit
from mmkv.engine.backends.cuda.kernels.sample import SamplingColumns, greatest_weight, weights_of

BITS = 11  # of a digit: three hold a logit's 32 bits, two a token's id
BLOCK = 4096
WARPS = 8
_STAGES = 10
# Of SplitMix64.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST, SECOND = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_FIELDS = 6  # of a row, that a stage leaves to the next


def sample(logits: Tensor, columns: SamplingColumns, noise: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.sample.sample`."""
    logits, (rows, vocab) = logits.contiguous(), logits.shape
    highest, likeliest = logits.max(-1)
    weight = weights_of(logits, highest[:, None], columns.temperature)
    sums = weight.new_zeros(_STAGES, 2, rows, 1 << BITS)
    state, token = weight.new_zeros(_STAGES, _FIELDS, rows), torch.empty_like(likeliest)
    blocks = triton.cdiv(vocab, BLOCK)
    for stage in range(_STAGES):
        sample_kernel[(rows, blocks if stage < _STAGES - 1 else 1)](
            logits,
            weight,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            noise,
            sums,
            state,
            token,
            rows,
            stage,
            VOCAB=vocab,
            GREATEST=greatest_weight(vocab),
            BITS=BITS,
            BLOCK=BLOCK,
            FIELDS=_FIELDS,
            num_warps=WARPS,
        )
    return token.where(columns.temperature > 0, likeliest)


def uniform(seed: Tensor, counter: Tensor) -> Tensor:
    """See :func:`mmkv.engine.backends.cuda.kernels.sample.uniform`."""
    out = torch.empty(len(seed), dtype=torch.float64, device=seed.device)
    uniform_kernel[(len(seed),)](seed, counter, out, num_warps=1)
    return out


@jit
def uniform_kernel(seed, counter, out):
    """Draw the noise of one batch slot; grid (B,)."""
    row = tl.program_id(0)
    first = mix(tl.load(seed + row).to(tl.uint64, bitcast=True))
    counted = tl.load(counter + row).to(tl.uint64, bitcast=True) * GOLDEN
    mixed = mix(first + counted)
    tl.store(out + row, (mixed >> 11).to(tl.float64) * (1.0 / (1 << 53)))


@triton.jit
def mix(x):
    """Apply SplitMix64's finaliser."""
    x += GOLDEN
    x = (x ^ (x >> 30)) * FIRST
    x = (x ^ (x >> 27)) * SECOND
    return x ^ (x >> 31)


@jit
def sample_kernel(
    logits,
    weight,
    top_k,
    top_p,
    min_p,
    noise,
    sums,
    state,
    token,
    rows,
    stage,
    VOCAB: tl.constexpr,
    GREATEST: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Settle a digit and sum weights and tokens by the next; grid (B, blocks of the vocabulary).

    Each program settles for itself by what the launch before summed. Stage 0 sums by the first
    digit, for all three searches; 1 to 3 find the k-th token, 3 to 5 the end of ``top_p``, 5 to 7
    the logit drawn, and 7 to 9 which of the tokens that have it.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) == 0
    k = tl.load(top_k + row)
    prefix, before, passed = k * 0, k * 0, k * 0
    chosen, total = k * 0, k * 0
    wanted = tl.where((k > 0) & (k < VOCAB), k, VOCAB) - 1
    if stage > 0:
        at = state + (stage - 1) * FIELDS * rows + row
        prefix, before, passed = tl.load(at), tl.load(at + rows), tl.load(at + 2 * rows)
        wanted, chosen = tl.load(at + 3 * rows), tl.load(at + 4 * rows)
        total = tl.load(at + 5 * rows)
        by_count = (stage <= 3) | (stage >= 8)
        of = sums + ((stage - 1) * 2 * rows + row) * (1 << BITS)
        prefix, before, passed, mass, count = settle(
            of, rows, prefix, before, passed, wanted, by_count, BITS
        )
        each = mass // tl.maximum(count, 1)  # equal logits have equal weights
        if (stage == 3) | (stage == 5):
            if stage == 3:
                likely = tl.load(state + FIELDS * rows * 9 + row)  # those that min_p leaves
                total = tl.minimum(before + mass, likely)
                share = tl.load(top_p + row).to(tl.float64)
                reached = tl.ceil((before + mass).to(tl.float64) * share).to(tl.int64)
                wanted = tl.where(share < 1, reached, before + mass) - 1
            else:
                total = tl.minimum(total, before + ((wanted - before) // each + 1) * each)
                place = (tl.load(noise + row) * total.to(tl.float64)).to(tl.int64)
                wanted = tl.minimum(place, total - 1)
            of = sums + row * (1 << BITS)
            prefix, before, passed, mass, count = settle(
                of, rows, k * 0, k * 0, k * 0, wanted, False, BITS
            )
        if stage == 7:
            chosen, wanted = prefix, (wanted - before) // each
            prefix, passed = k * 0, k * 0
    if first:
        at = state + stage * FIELDS * rows + row
        tl.store(at + rows, before)
        tl.store(at + 2 * rows, passed)
        tl.store(at + 3 * rows, wanted)
        tl.store(at + 4 * rows, chosen)
        tl.store(at + 5 * rows, total)
        if stage == 9:
            tl.store(token + row, prefix)
        else:
            tl.store(at, prefix)
    if stage < 9:
        index = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        mine = index < VOCAB
        logit = tl.load(logits + row * VOCAB + index, mask=mine, other=0.0) + 0.0  # no -0
        bits = logit.to(tl.int32, bitcast=True)
        # Descending logits are ascending from 0 on.
        key = 0x7FFFFFFF - tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
        code = tl.where(stage < 7, key, index)
        left = tl.where(stage == 0, 2 * BITS, stage % 2 * BITS)
        mine &= (code >> (left + BITS)) == prefix
        mine &= (stage < 7) | (key == chosen)
        amount = tl.load(weight + row * VOCAB + index, mask=mine, other=0)
        of = sums + (stage * 2 * rows + row) * (1 << BITS) + ((code >> left) & ((1 << BITS) - 1))
        tl.atomic_add(of, amount, mask=mine, sem="relaxed")
        tl.atomic_add(of + rows * (1 << BITS), 1, mask=mine, sem="relaxed")
        if stage == 0:
            least = tl.load(min_p + row).to(tl.float64) * GREATEST
            likely = tl.sum(tl.where(amount.to(tl.float64) >= least, amount, 0), 0)
            tl.atomic_add(state + FIELDS * rows * 9 + row, likely, sem="relaxed")


@triton.jit
def settle(sums, rows, prefix, before, passed, wanted, by_count, BITS: tl.constexpr):
    """Find the digit at which the running sum of weights, or of tokens, passes a place.

    Returns the prefix with the digit, weight and tokens before it, and those that have it.
    """
    digit = tl.arange(0, 1 << BITS)
    weight, count = tl.load(sums + digit), tl.load(sums + rows * (1 << BITS) + digit)
    running = tl.where(by_count, passed + tl.cumsum(count, 0), before + tl.cumsum(weight, 0))
    below = running <= wanted
    found = tl.sum(below.to(tl.int64), 0)
    mass = tl.sum(tl.where(digit == found, weight, 0), 0)
    tokens = tl.sum(tl.where(digit == found, count, 0), 0)
    before += tl.sum(tl.where(below, weight, 0), 0)
    passed += tl.sum(tl.where(below, count, 0), 0)
    return prefix * (1 << BITS) + found, before, passed, mass, tokens
