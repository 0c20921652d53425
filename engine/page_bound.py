"""The most pages that a sequence can hold, known before it begins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmkv.engine.policies import Budget
    from mmkv.engine.runtime import Runtime


@dataclass(frozen=True)
class PageBound:
    """The most pages of one sequence.

    Attributes:
        steady: between two chunks, while it decodes and afterwards.
        chunk: what one chunk of a prompt takes beside them, until the cache is cut back.
    """

    steady: int
    chunk: int


@dataclass(frozen=True)
class Extent:
    """How far a sequence has come: tokens seen, entries held, tokens that came in prompts."""

    seen: int = 0
    entries: int = 0
    prompt_tokens: int = 0


def page_bound(
    engine: Runtime,
    budget: Budget,
    prompt: int,
    generated: int = 0,
    start: Extent | None = None,
    chunk: int | None = None,
) -> PageBound:
    """Bound the pages of a sequence that reads ``prompt`` tokens and then decodes ``generated``.

    With R rows, pages of P entries and b entries after an eviction, a policy that evicts holds at
    most ``ceil((b + s R + R (P - 1)) / P)`` pages (s: ``evict_every``), and a chunk of C tokens
    takes ``C R`` entries more. A share of the tokens is counted at the sequence's end. No bound
    is above what all tokens would take.

    Args:
        start: where the sequence stands; None: an empty one.
        chunk: tokens in a chunk; None: the engine's.
    """
    start = start or Extent()
    rows, pool, policy = engine.spec.rows, engine.cache.pool, engine.policy
    every = start.entries + (prompt + generated) * rows
    if not policy.evicts:
        return PageBound(_pages(every, rows, pool.page_size), 0)
    seen = start.seen + prompt + generated
    kept = budget.entries(rows, seen, pool.page_size, pool.page_bytes, engine.slack)
    kept += (start.prompt_tokens + prompt) * rows if policy.keeps_prompt else 0
    # Between two evictions a sequence may stand above its budget, and a step adds to that.
    kept = max(kept + engine.slack, start.entries) + (rows if generated else 0)
    in_chunk = kept + min(chunk or engine.prefill_chunk, prompt) * rows
    steady = _pages(min(every, kept), rows, pool.page_size)
    return PageBound(steady, _pages(min(every, in_chunk), rows, pool.page_size) - steady)


def lasting_pages(engine: Runtime, budget: Budget) -> int | None:
    """Bound the pages of a sequence of any length under a budget of its own, between its chunks.

    None: there is no bound.
    """
    if not engine.policy.evicts or engine.policy.keeps_prompt or budget.kind == "fraction":
        return None
    rows, pool = engine.spec.rows, engine.cache.pool
    kept = budget.entries(rows, 0, pool.page_size, pool.page_bytes, engine.slack)
    return _pages(kept + engine.evict_every * rows, rows, pool.page_size)


def _pages(entries: int, rows: int, page_size: int) -> int:
    """Count pages at the worst: every row's last page holds one entry."""
    return math.ceil((entries + rows * (page_size - 1)) / page_size)
