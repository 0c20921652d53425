"""Make sessions whose caches look as after a long run, without the run.

The time of a decode step depends on the number and place of entries and not on their values. So
rows are filled with random keys, values, retention and positions, in pages that are scattered over
the pool as after many evictions. The logits have no meaning.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmkv.engine.cache import RaggedCache
from mmkv.engine.cache.forms import Codec
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence


def row_lengths(rows: int, total: int, longest: int, skew: float = 1.0, seed: int = 0) -> Tensor:
    """Draw the entries per row, ``[rows]`` int64 in random order, ``total`` in all and
    ``longest`` at most.

    Args:
        skew: the longest row over the mean; 1: all alike. The others follow a geometric series
            down from it (at 10 the shortest rows of a mean of 256 are empty).
    """
    if not 0 <= total <= rows * longest:
        raise ValueError(f"{total} entries do not fit {rows} rows of {longest}")
    mean = total / rows
    skew = min(skew, longest / mean, rows) if total else 1.0
    falling = torch.arange(rows) / max(rows - 1, 1)
    length = (falling * -_steepness(skew)).exp().double()
    length = (length * (total / length.sum())).round().long().clamp(max=longest)
    generator = torch.Generator().manual_seed(seed)
    length = length[torch.randperm(rows, generator=generator)]
    while rest := total - int(length.sum()):
        free = (length < longest) if rest > 0 else (length > 0)
        places = free.nonzero().flatten()
        chosen = places[torch.randperm(len(places), generator=generator)[: abs(rest)]]
        length[chosen] += 1 if rest > 0 else -1
    return length


def _steepness(skew: float) -> float:
    """Find a of ``exp(-a u)``, u in 0 .. 1, whose largest value is ``skew`` times its mean."""
    if skew <= 1.0001:
        return 0.0
    low, high = 1e-6, 10 * skew + 10
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if middle / -math.expm1(-middle) < skew else (low, middle)
    return low


@torch.inference_mode()
def fill_sequence(cache: RaggedCache, lengths: Tensor, seen: int, seed: int = 0) -> int:
    """Open a sequence with random entries; returns its slot.

    Args:
        lengths: ``[L, H]`` int64; seen: tokens seen, above every length. Positions of a row are
            spread evenly below it.
    """
    pool, total = cache.pool, int(lengths.sum())
    generator = torch.Generator(pool.device).manual_seed(seed)
    flat = lengths.to(pool.device).flatten()
    row = torch.repeat_interleave(flat)
    offset = torch.arange(total, device=pool.device) - (flat.cumsum(0) - flat)[row]
    position = (offset * seen).div(flat[row], rounding_mode="floor").int()
    del offset

    def normal(codec: Codec) -> tuple[Tensor, Tensor]:
        """Codes and scales; rotated, such vectors would be drawn alike."""
        made = torch.empty(total, pool.head_dim, dtype=pool.dtype, device=pool.device)
        return codec.encode(made.normal_(generator=generator))

    # log_beta from -1e-4 to -10, about as random gates give.
    power = torch.rand(total, generator=generator, device=pool.device) * 5 - 4
    (keys, key_scale), (values, value_scale) = map(normal, (pool.form.key, pool.form.value))
    return cache.import_(
        {
            "length": lengths,
            "keys": keys,
            "key_scale": key_scale,
            "values": values,
            "value_scale": value_scale,
            "log_beta": -(10**power),
            "position": position,
            "modality": torch.zeros(total, dtype=torch.uint8, device=pool.device),
        }
    )


def scatter_pages(cache: RaggedCache, seed: int = 0) -> None:
    """Hand out the free pages in random order from now on."""
    pool = cache.pool
    order = torch.randperm(pool.free_pages, generator=torch.Generator().manual_seed(seed))
    free = pool.free_list()
    free.copy_(free[order.to(pool.device)])


def pages_for(entries: int, rows: int, page_size: int) -> int:
    """Bound the pages that ``entries`` in ``rows`` rows can take."""
    return min(entries, (entries + rows * (page_size - 1)) // page_size)


@torch.inference_mode()
def synthetic_sessions(
    engine: Runtime, count: int, seen: int, skew: float = 1.0, steps: int = 256, seed: int = 0
) -> list[CachedSequence]:
    """Open sessions at their budget (all ``seen`` tokens, if the policy never evicts).

    Args:
        seen: tokens each has seen; skew: see :func:`row_lengths`; steps: decode steps to come, for
            which pages are set aside now.

    Raises:
        BudgetError: the pool would pass its limit.
    """
    cache, rows = engine.cache, engine.spec.rows
    pool = cache.pool
    entries = most = seen * rows
    if engine.policy.evicts:
        budget = engine.budgets.allowed(engine.budget, seen)
        entries = min(entries, budget)
        most = entries + engine.evict_every * rows
    else:
        most += steps * rows
    pool.reserve(count * pages_for(most, rows, pool.page_size))
    scatter_pages(cache, seed)
    made = []
    for index in range(count):
        lengths = row_lengths(rows, entries, seen, skew, seed + index)
        session = engine.session()
        shape = (engine.spec.num_layers, engine.spec.num_kv_heads)
        filled = fill_sequence(cache, lengths.view(shape), seen, seed + index)
        counts = {"seen": seen, "next_position": seen, "entries": entries}
        session.adopt(filled, session.state() | counts)
        made.append(session)
    return made


@torch.inference_mode()
def rewind(session: CachedSequence, seen: int) -> None:
    """Take back every token after the first ``seen``, of a session that never evicts."""
    session.restore(session.state() | {"seen": seen, "next_position": seen})
    session.roll_back()
    entries = int(session.engine.cache.length[session.seq].sum())
    session.restore(session.state() | {"entries": entries})
