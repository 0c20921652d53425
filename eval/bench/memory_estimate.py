"""Estimate the memory that the methods of the speed programs need, from sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mmkv.engine.cache import PagePool
from mmkv.engine.config import EngineConfig
from mmkv.eval.bench.methods import SPARE_COLUMNS
from mmkv.eval.bench.shapes import Shape
from mmkv.eval.bench.synthetic_cache import pages_for

# Memory besides weights and cache: activations of a chunk and of a step, libraries.
WORKSPACE = 3 * 10**9
_OWN_REST, _PEER_REST = 2 * 10**9, 3 * 10**9  # the same for one method of the decode benchmark


def own_bytes(
    shape: Shape,
    batch: int,
    context: int,
    budget: float | None,
    steps: int,
    dtype: torch.dtype,
    page: int = EngineConfig.page_size,
    skew: float = 1.0,
) -> int:
    """Estimate the bytes that one of our methods needs, weights included: an estimate from above.

    Pages at their worst case, block tables and eviction scratch for the longest row (twice, as
    tables may double), logits in two precisions, and 2 GB for all else. Pages that a pool on a GPU
    takes ahead of need, where memory is free, are not counted.
    """
    rows, spare = shape.rows, max(steps, SPARE_COLUMNS)
    if budget is None:
        entries, longest = (context + steps) * rows, context + spare
    else:
        entries = int((budget + 1) * rows)
        longest = int(min(context, budget * skew)) + spare
    width = 2 * (longest // page + 2)
    each = pages_for(entries, rows, page) * _page_bytes(shape, dtype, page)
    each += rows * width * 8 + shape.vocab * 8
    if budget is not None:
        each += 8 * rows * width * page
    return shape.weight_bytes(dtype.itemsize) + batch * each + _rest(shape, _OWN_REST)


def peer_bytes(shape: Shape, batch: int, tokens: int, dtype: torch.dtype) -> int:
    """Estimate the bytes of a peer with all ``tokens``: weights, cache, one layer's copy, 3 GB."""
    held = batch * tokens * shape.kv_token_bytes(dtype.itemsize)
    rest = _rest(shape, _PEER_REST)
    return shape.weight_bytes(dtype.itemsize) + held + 2 * held // shape.layers + rest


@dataclass(frozen=True)
class Plan:
    """The bytes that ``count`` sequences need.

    Attributes:
        budget: M, or None when everything is kept; pages: the most one sequence holds.
    """

    budget: int | None
    count: int
    sequence_bytes: int
    pages: int
    chunk_bytes: int
    left: int


def plan(
    shape: Shape,
    budget: int | None,
    context: int,
    memory: float,
    dtype: torch.dtype,
    chunk: int = EngineConfig.prefill_chunk,
    page: int = 16,
    workspace: int = WORKSPACE,
) -> Plan:
    """Compute how many sequences of ``context`` tokens fit ``memory`` bytes with the weights."""
    rows = shape.rows
    kept = context if budget is None else min(budget, context)
    entries = (kept + (budget is not None)) * rows  # a step appends before it evicts
    pages = pages_for(entries, rows, page)
    page_bytes = _page_bytes(shape, dtype, page)
    # Columns for the longest row: all of a head's tokens at worst, but not more than four means.
    width = min(context, 4 * kept) // page + 2
    each = pages * page_bytes + rows * (width + 1) * 8
    growing = 0 if budget is None else min(chunk, context) * rows // page * page_bytes
    left = int(memory) - shape.weight_bytes(dtype.itemsize) - workspace - growing
    return Plan(budget, max(0, left // each), each, pages, growing, max(left, 0))


def dense_count(
    shape: Shape, context: int, memory: float, dtype: torch.dtype, workspace: int
) -> int:
    """Count the sequences that a dense cache of exactly their tokens would allow."""
    left = int(memory) - shape.weight_bytes(dtype.itemsize) - workspace
    return max(0, left // (context * shape.kv_token_bytes(dtype.itemsize)))


def _page_bytes(shape: Shape, dtype: torch.dtype, page: int) -> int:
    return PagePool(page, shape.head_dim, 0, dtype).page_bytes


def _rest(shape: Shape, nbytes: int) -> int:
    """Allow next to nothing for shapes that only show that a program runs."""
    return nbytes if shape.vocab > 10_000 else 10**6
