"""Random paged caches for the attention kernels' tests, and dense float64 attention over them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmkv.engine.cache import EncodedKV
from mmkv.engine.cache.forms import Codec
from tests.support.kernels import DEVICE


@dataclass(frozen=True)
class Paged:
    """Pools ``[pages, P, D]``, ``length [S, L, H]``, ``table [S, L, H, W]`` on one device."""

    keys: Tensor | EncodedKV
    values: Tensor | EncodedKV
    length: Tensor
    table: Tensor

    def row(self, seq: int, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[entries, D]`` of one row in float64, gathered slot by slot."""
        size, count = self.keys.shape[1], int(self.length[seq, layer, head])
        pages = self.table[seq, layer, head].tolist()
        slots = [(pages[i // size], i % size) for i in range(count)]
        index = (
            torch.tensor(slots, dtype=torch.int64, device=self.table.device).view(-1, 2).unbind(1)
        )
        return self.keys[index].double(), self.values[index].double()


def paged(
    length: Tensor, page: int, dim: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Paged:
    """Return the rows of ``length [S, L, H]`` entries in shuffled pages.

    Slots without an entry hold NaN, unused table columns a page of NaN: whoever reads them fails.
    """
    generator = torch.Generator().manual_seed(seed)
    held = (length + page - 1) // page
    width, count = int(held.max()) + 1, int(held.sum())
    order = torch.randperm(count, generator=generator) + 1
    inside = torch.arange(width) < held[..., None]
    table = torch.zeros(*length.shape, width, dtype=torch.int64)
    table[inside] = order
    pools = []
    for _ in range(2):
        pool = torch.randn(count + 1, page, dim, generator=generator).to(dtype)
        pool[0] = torch.nan
        last = table.gather(-1, (held - 1).clamp(min=0)[..., None])[..., 0]
        for seat, used in zip(last.flatten(), (length % page).flatten(), strict=True):
            if used:
                pool[seat, used:] = torch.nan
        pools.append(pool.to(device))
    return Paged(pools[0], pools[1], length.to(device), table.to(device))


def rounded(cache: Paged, key_bits: int, value_bits: int) -> Paged:
    """The same rows with their keys and values in codes; NaN stays NaN, or -inf."""

    def stored(pool: Tensor, bits: int) -> EncodedKV:
        codec = Codec(bits)
        return EncodedKV(*codec.encode(pool), codec, pool.dtype)

    keys, values = stored(cache.keys, key_bits), stored(cache.values, value_bits)
    return replace(cache, keys=keys, values=values)


def beside_a_sink(bits: int, dim: int = 64) -> tuple[Paged, Tensor]:
    """Return a row of float16 with values of ``bits``, and a query ``[1, 1, dim]`` of scale 0.2.

    The first entry is 8 nats above all others, which have values of size 0.1 and outweigh its own.
    """
    cache = paged(torch.tensor([[[512]]]), 16, dim, torch.float16, DEVICE)
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(512, generator=generator)
    score[0] = score.max() + 8
    value = torch.randn(512, dim, generator=generator) * 0.1 + 0.05
    value[0] *= 0.01
    pages = cache.table[0, 0, 0, :32]
    cache.keys[pages, :, 0] = score.view(32, 16).to(cache.keys)
    cache.values[pages] = value.view(32, 16, dim).to(cache.values)
    query = torch.zeros(1, 1, dim, dtype=torch.float16, device=DEVICE)
    query[..., 0] = 5
    return replace(cache, values=rounded(cache, bits, bits).values), query


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute plain float64 attention of ``query [Q, D]``; no keys give zeros and -inf."""
    scores = query.double() @ key.T * scale
    if not len(key):
        return torch.zeros_like(query, dtype=torch.float64), scores.logsumexp(-1)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)
