"""The eager cache beside its copy on the device, both evicting: for the tests of the kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.append import empty_room, make_room
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction
from mmkv.engine.cache import RaggedCache
from mmkv.engine.cache.forms import FORMS as KV
from mmkv.engine.policies import CacheView, Policy
from mmkv.engine.policies.allocation import GlobalAllocation
from tests.support.kernels import DEVICE
from tests.support.rows import assert_same, eager_cache, to_device

# Three sequences of 2 layers and 2 heads: empty rows, single entries, whole pages, long rows.
LENGTHS = torch.tensor(
    [[[0, 1], [33, 8]], [[5, 5], [5, 5]], [[16, 16], [40, 7]]], dtype=torch.int64
)
ROWS = 4
# Few values, and the same positions in most rows: ties everywhere. Or all of them different.
LEVELS = {
    "ties": [0.0, -0.0, -1e-9, -1.5e-8, -1e-3, -0.6931472, -2.0, -50.0, -1e30],
    "one score": [0.0],
    "not a number": [math.nan, -math.inf, -0.5, math.nan],
    "all different": None,
}


def on_device(values: list[int]) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def needs_eviction(cache: RaggedCache, policy: Policy, seq: int, budget: int, slack: int) -> bool:
    """Whether all rows together, or one that has a budget of its own, stand above it."""
    length = cache.length[seq].flatten().tolist()
    if isinstance(policy.allocation, GlobalAllocation):
        return sum(length) > budget + slack
    rows = len(length)
    return any(n > (budget + rows - 1 - r) // rows + slack // rows for r, n in enumerate(length))


def eager_evict(cache: RaggedCache, policy: Policy, seq: int, seen: int, budget: int) -> int:
    """The session's own way: how many went."""
    return eager_counts(cache, policy, seq, seen, budget)[0]


def eager_counts(
    cache: RaggedCache, policy: Policy, seq: int, seen: int, budget: int
) -> tuple[int, int]:
    """The session's own way: how many went, and how many of them had a score that is NaN."""
    entries, pool = cache.entries(seq), cache.pool
    view = CacheView(
        seen,
        cache.layers,
        cache.kv_heads,
        entries.row,
        cache.length[seq].flatten(),
        pool.position.view(-1)[entries.slot].long(),
        pool.log_beta.view(-1)[entries.slot],
        pool.modality.view(-1)[entries.slot],
    )
    victims = policy.victims(view, budget)
    cache.drop(seq, victims, entries)
    return victims.numel(), int(policy.scores(view, budget).value[victims].isnan().sum())


class Machine:
    """The eager cache and its copy on the device, taken through the same steps."""

    def __init__(
        self, policy: Policy, levels: str, seed: int, page: int = 8, kv: str = "auto"
    ) -> None:
        self.policy, self.levels = policy, LEVELS[levels]
        self.random = torch.Generator().manual_seed(seed)
        self.cache = eager_cache(
            LENGTHS * page // 8, page, pages=160, width=12, seed=seed, form=KV[kv]
        )
        pool = self.cache.pool
        pool.log_beta.copy_(self.rates(pool.log_beta.numel()).view_as(pool.log_beta))
        self.rows, self.columns = to_device(self.cache)
        self.seen = [int(length.max()) for length in self.cache.length]
        self.work = empty_eviction(3, self.rows)
        self.nan = [0, 0, 0]
        self.room = empty_room(3, self.rows)

    def rates(self, count: int) -> Tensor:
        if self.levels is None:
            return -(10 ** (torch.rand(count, generator=self.random) * 10 - 9))
        chosen = torch.randint(len(self.levels), (count,), generator=self.random)
        return torch.tensor(self.levels)[chosen]

    def draw(self, *values: int) -> int:
        return values[int(torch.randint(len(values), (), generator=self.random))]

    def append(self, seqs: list[int]) -> None:
        """One token of each sequence, with the same content on both sides."""
        slots = make_room(self.room, self.rows, on_device(seqs)).cpu()
        live = torch.tensor([seq for seq in seqs if seq >= 0])
        place = self.cache.append(live, 1)[..., 0]
        assert torch.equal(slots[torch.tensor(seqs) >= 0], place)
        position = torch.tensor([self.seen[seq] for seq in live]).view(-1, 1, 1).expand_as(place)
        content = {"position": position.flatten().int(), "log_beta": self.rates(place.numel())}
        for name in ("keys", "values"):
            content[name] = torch.randn(place.numel(), 4, generator=self.random)
        content["modality"] = content["position"].to(torch.uint8) % 3
        for name, column in content.items():
            getattr(self.cache.pool, name).flatten(0, 1)[place.flatten()] = column
            ours = getattr(self.columns, name)
            ours.flatten(0, 1)[place.flatten().to(DEVICE)] = column.to(DEVICE)
        for seq in live.tolist():
            self.seen[seq] += 1

    def evict(self, form: Any, seqs: list[int], budgets: list[int], slack: int) -> list[int]:
        """On both sides; the whole state must agree afterwards."""
        seen = [self.seen[seq] for seq in seqs]  # of an idle batch slot: any number
        dropped = form(
            self.work,
            self.policy,
            self.rows,
            self.columns,
            on_device(seqs),
            on_device(seen),
            on_device(budgets),
            slack,
        )
        expected = []
        for slot, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            gone = nan = 0
            if seq >= 0 and needs_eviction(self.cache, self.policy, seq, budget, slack):
                gone, nan = eager_counts(self.cache, self.policy, seq, self.seen[seq], budget)
            expected.append(gone)
            self.nan[slot] += nan
        assert dropped is self.work.dropped
        assert dropped.tolist() == expected
        assert self.work.nan.tolist() == self.nan
        assert_same(self.cache, self.rows, self.columns)
        return expected

    def step(self, form: Any) -> list[int]:
        """A decode step of a random batch, and an eviction by little, by much or by nothing."""
        order = torch.randperm(3, generator=self.random).tolist()
        seqs = [seq if self.draw(1, 1, 1, 0) else -1 for seq in order]
        if max(seqs) >= 0:
            self.append(seqs)
        held = [int(self.cache.length[seq].sum()) for seq in seqs]
        budgets = [max(n - self.draw(-3, 0, 1, 4, 5, n // 4, n), ROWS) for n in held]
        return self.evict(form, seqs, budgets, slack=self.draw(0, 0, ROWS))
