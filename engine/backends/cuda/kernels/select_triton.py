"""Radix selection in Triton: the threshold below which the wanted number of entries lies.

Entries are ordered by two unsigned numbers, key and then tie (``buffers.EvictionBuffers``);
no two entries share both. A *turn* looks at one byte, from the highest of the keys to the lowest of
the ties: it counts the 256 values of that byte among the entries that agree with the threshold in
all bytes before it, and the sum of the counts says which value the threshold has. As soon as all
entries that agree are victims, the rest of the threshold is all ones and the selection is settled;
at a usual eviction that is so after three or four of the eight turns.

A threshold (key_at, tie_at) means: victims are those with key < key_at, and those with key =
key_at and tie <= tie_at.
"""

# mypy: disable-error-code="import-not-found, import-untyped, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from mmkv.engine.backends.cuda.kernels.jit_triton import jit

WARPS = 8
BINS = tl.constexpr(256)
ONES = tl.constexpr(2**32 - 1)
# Up to so many entries of a block are counted one by one in memory. A histogram of the block takes
# 60 instructions for each entry that is looked at, whether it counts or not.
FEW = tl.constexpr(64)


@jit
def count_kernel(
    keys,
    ties,
    plan,
    state,
    counts,
    capacity,
    batch_slots,
    chunks,
    turn,
    TURNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count byte ``turn`` of a chunk of a sequence; grid (B, chunks), and (B, 1) for turn TURNS.

    Each program first repeats the conclusion from the last turn's counts: a launch of its own would
    cost more. Turn TURNS only concludes. Counts are whole numbers, so that the order in which
    programs add them up does not matter. ``turn`` is no constant: all turns are one compilation.
    """
    batch_slot = tl.program_id(0)
    chunk = tl.program_id(1)
    bins = tl.arange(0, BINS)
    later = turn > 0
    entries = tl.load(plan + batch_slot * 3).to(tl.int32)
    most = tl.load(plan + batch_slot * 3 + 1)
    target = state + (turn * batch_slots + batch_slot) * 4
    here = counts + (turn * batch_slots + batch_slot) * BINS + bins
    # Read before it is known whether it is of use: one wait instead of three.
    source = target - batch_slots * 4
    key_at = tl.load(source, mask=later, other=0)
    tie_at = tl.load(source + 1, mask=later, other=0)
    sought = tl.load(source + 2, mask=later, other=0)
    settled = tl.load(source + 3, mask=later, other=0)
    total = tl.load(here - batch_slots * BINS, mask=later, other=0)
    if entries == 0:
        return
    if turn == 0:
        sought = most
    elif settled == 0:
        key_at, tie_at, sought, settled = conclude(total, key_at, tie_at, sought, turn - 1)
    if chunk == 0:
        tl.store(target, key_at)
        tl.store(target + 1, tie_at)
        tl.store(target + 2, sought)
        tl.store(target + 3, settled)

    if (turn < TURNS) & (settled == 0):
        found = tl.zeros([BINS], tl.int32)
        start = tl.multiple_of(batch_slot.to(tl.int64) * capacity, BLOCK)  # padded to whole ones
        for base in range(chunk * BLOCK, entries, chunks * BLOCK):
            index = base + tl.arange(0, BLOCK)
            byte, agrees = look(keys, ties, start + index, index < entries, key_at, tie_at, turn)
            number = tl.sum(agrees.to(tl.int32), 0)
            if number > FEW:
                found += tl.histogram(byte, BINS, mask=agrees)
            elif number > 0:
                cell = counts + (turn * batch_slots + batch_slot) * BINS + byte
                tl.atomic_add(cell, 1, mask=agrees, sem="relaxed")
        tl.atomic_add(here, found, mask=found > 0, sem="relaxed")


@triton.jit
def look(keys, ties, index, live, key_at, tie_at, turn):
    """Return byte ``turn`` of entries, and whether all bytes before it equal the threshold's.

    Reads the keys of entries that are not live, too: whole blocks are loaded faster.
    """
    shift = 24 - 8 * (turn % 4)
    number = tl.load(keys + index).to(tl.uint32, bitcast=True)
    known = key_at
    if turn >= 4:
        live = live & (number == key_at.to(tl.uint32))
        number = tl.load(ties + index, mask=live, other=0).to(tl.uint32, bitcast=True)
        known = tie_at
    number = number >> shift
    # Of the first byte there is nothing before it: 0 on both sides.
    live = live & ((number >> 8) == (known >> (shift + 8)).to(tl.uint32))
    return (number & 255).to(tl.int32), live


@triton.jit
def conclude(total, key_at, tie_at, sought, turn):
    """Extend the threshold by one byte, from the counts ``[256]`` of that byte.

    Returns:
        key_at, tie_at, how many victims are sought inside the chosen value, whether these are all
        of it: then the threshold is complete.
    """
    shift = 24 - 8 * (turn % 4)
    upto = tl.cumsum(total, 0)
    passed = upto < sought
    value = tl.sum(passed.to(tl.int64), 0)
    sought -= tl.max(tl.where(passed, upto, 0), 0)
    inside = tl.sum(tl.where(tl.arange(0, BINS) == value, total, 0), 0)
    settled = (inside == sought).to(tl.int64)
    # All ones below the byte where it is settled.
    byte = (value << shift) + (settled << shift) - settled
    if turn < 4:
        key_at += byte
        tie_at = tl.where(settled == 1, ONES, tie_at)
    else:
        tie_at += byte
    return key_at, tie_at, sought, settled


@triton.jit
def lowest_of_row(keys, ties, start, count, sought, BLOCK: tl.constexpr):
    """Find the threshold of the ``sought`` lowest of ``count`` entries in one program."""
    key_at = tl.zeros([], tl.int64)
    tie_at = tl.zeros([], tl.int64)
    settled = tl.zeros([], tl.int64)
    for turn in range(8):
        if settled == 0:
            total = tl.zeros([BINS], tl.int32)
            for base in range(0, count, BLOCK):
                index = base + tl.arange(0, BLOCK)
                byte, agrees = look(keys, ties, start + index, index < count, key_at, tie_at, turn)
                total += tl.histogram(byte, BINS, mask=agrees)
            key_at, tie_at, sought, settled = conclude(total, key_at, tie_at, sought, turn)
    return key_at, tie_at


@jit
def guard_kernel(
    keys,
    ties,
    plan,
    starts,
    length,
    seqs,
    floor,
    rows,
    capacity,
    BLOCK: tl.constexpr,
):
    """Put the best ``floor`` entries of one row above all others; grid (B, R).

    Floors of a group are no more than its share, so that none of these has to go.
    """
    batch_slot = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(plan + batch_slot * 3) == 0:
        return
    count = tl.load(length + tl.load(seqs + batch_slot) * rows + row)
    below = count - tl.load(floor + batch_slot * rows + row)
    if below >= count:
        return
    start = batch_slot.to(tl.int64) * capacity + tl.load(starts + batch_slot * rows + row)
    count = count.to(tl.int32)
    key_at = tl.zeros([], tl.int64)
    tie_at = tl.zeros([], tl.int64)
    if below > 0:
        key_at, tie_at = lowest_of_row(keys, ties, start, count, below, BLOCK)
    for base in range(0, count, BLOCK):
        offset = base + tl.arange(0, BLOCK)
        live = offset < count
        low = is_victim(keys, ties, start + offset, live, key_at, tie_at) & (below > 0)
        tl.store(keys + start + offset, tl.full([BLOCK], -1, tl.int32), mask=live & ~low)


@jit
def group_kernel(
    keys,
    ties,
    plan,
    starts,
    share,
    threshold,
    rows,
    per_group,
    capacity,
    BLOCK: tl.constexpr,
):
    """Find the threshold of one group of rows, whose entries lie together; grid (B, G)."""
    batch_slot = tl.program_id(0)
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    entries = tl.load(plan + batch_slot * 3).to(tl.int32)
    if entries == 0:
        return
    first = group * per_group
    begin = tl.load(starts + batch_slot * rows + first)
    end = entries
    if first + per_group < rows:
        end = tl.load(starts + batch_slot * rows + first + per_group)
    sought = (end - begin) - tl.load(share + batch_slot * groups + group)
    target = threshold + (batch_slot * groups + group) * 4
    tl.store(target + 2, tl.maximum(sought, 0))
    if sought > 0:
        start = batch_slot.to(tl.int64) * capacity + begin
        key_at, tie_at = lowest_of_row(keys, ties, start, end - begin, sought, BLOCK)
        tl.store(target, key_at)
        tl.store(target + 1, tie_at)


@triton.jit
def is_victim(keys, ties, index, live, key_at, tie_at):
    """Return whether entries are at or below a threshold."""
    key = tl.load(keys + index, mask=live, other=0).to(tl.uint32, bitcast=True)
    level = key_at.to(tl.uint32)
    tied = live & (key == level)
    tie = tl.load(ties + index, mask=tied, other=0).to(tl.uint32, bitcast=True)
    return live & ((key < level) | (tied & (tie <= tie_at.to(tl.uint32))))
