"""Window attention over ragged rows, against the eager view and against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.window_scores import window_scores
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.policies.base import CacheView, WindowReduction
from mmkv.engine.scorer_state import QUERIES, window_attention
from tests.conftest import make_spec
from tests.support.kernels import DEVICE, compiled, forms, needs_compiler

FORMS = forms("window_scores", "window_scores")


@dataclass
class Case:
    """Ragged rows of some sequences, and the last queries of each."""

    spec: DecoderSpec
    cache: RaggedCache
    seqs: list[int]
    query: Tensor
    query_position: Tensor
    scale: float
    seen: int

    @classmethod
    def make(
        cls,
        lengths: list[list[int]],
        group: int,
        head_dim: int,
        window: int,
        page: int = 8,
        layers: int = 1,
        known: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Case:
        """Return ``lengths[sequence][layer * heads + head]``; tokens 0 .. seen - 1 were seen."""
        generator = torch.Generator().manual_seed(len(lengths) + group + head_dim)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator) * 1.5).to(dtype).to(DEVICE)

        heads = len(lengths[0]) // layers
        spec = make_spec(layers, heads, 24, group, head_dim)
        cache = RaggedCache(PagePool(page, head_dim, 0, dtype, DEVICE), layers, heads)
        seen = max(max(rows) for rows in lengths) + 5
        seqs = []
        for rows in lengths:
            seq = cache.open()
            slots = cache.append(torch.tensor([seq], device=DEVICE), seen)[0].flatten(0, 1)
            pool = cache.pool
            for row in slots:
                pool.keys.flatten(0, 1)[row] = normal(seen, head_dim)
                order = torch.randperm(seen, generator=generator).to(DEVICE)
                pool.position.view(-1)[row] = order.int()
            keep = torch.tensor(rows, device=DEVICE)[:, None]
            column = torch.arange(seen, device=DEVICE).expand(len(rows), -1)
            cache.drop(seq, (column >= keep).flatten().nonzero().flatten())
            seqs.append(seq)
        count = len(lengths)
        query = normal(count, layers, heads * group, window, head_dim)
        recent = seen - window + torch.arange(window, device=DEVICE)
        if known is not None:
            recent[: window - known] = -1
        at = recent.expand(count, -1).clone()
        return cls(spec, cache, seqs, query, at, head_dim**-0.5, seen)

    def run(
        self, form: Callable[..., Tensor], batch_slots: list[int], out: Tensor | None = None
    ) -> Tensor:
        cache = self.cache
        size = cache.table.shape[-1] * cache.pool.page_size
        if out is None:
            out = torch.full((len(batch_slots), *cache.table.shape[1:3], size), 7.0, device=DEVICE)
        return form(
            self.query,
            self.query_position,
            cache.pool.keys,
            cache.pool.position,
            cache.length,
            cache.table,
            torch.tensor(batch_slots, device=DEVICE),
            self.scale,
            out,
        )

    def spread(self, seq: int, values: Tensor) -> Tensor:
        """Return ``values [N]`` of a sequence's entries as ``[L, H, W P]``, 0 elsewhere."""
        entries = self.cache.entries(seq)
        size = self.cache.table.shape[-1] * self.cache.pool.page_size
        out = torch.zeros(self.cache.rows, size, dtype=values.dtype, device=DEVICE)
        out[entries.row, entries.offset] = values
        return out.view(*self.cache.length.shape[1:], size)

    def eager(self, seq: int) -> Tensor:
        """Compute what a view of the sequence does, from the queries in its ring."""
        cache, window = self.cache, self.query.shape[3]
        at = self.query_position[seq]
        known = at >= 0
        ring = torch.zeros_like(self.query)
        ring[seq][:, :, at[known] % window] = self.query[seq][:, :, known]
        cache.memory[QUERIES] = ring
        live, pool = cache.entries(seq), cache.pool
        view = CacheView(
            self.seen,
            cache.layers,
            cache.kv_heads,
            live.row,
            cache.length[seq].flatten(),
            pool.position.view(-1)[live.slot].long(),
            pool.log_beta.view(-1)[live.slot],
            pool.modality.view(-1)[live.slot],
        )
        return self.spread(seq, window_attention(cache, seq, live, view, WindowReduction()))

    def exact(self, seq: int) -> Tensor:
        """Compute the definition, entry by entry, in float64."""
        cache, group = self.cache, self.spec.group
        live = cache.entries(seq)
        key = cache.pool.keys.flatten(0, 1)[live.slot].double()
        at = cache.pool.position.view(-1)[live.slot]
        total = torch.zeros(live.row.numel(), dtype=torch.float64, device=DEVICE)
        known = self.query_position[seq] >= 0
        for row in range(cache.rows):
            mine = live.row == row
            layer, head = divmod(row, cache.kv_heads)
            for member in range(group):
                for w in known.nonzero().flatten().tolist():
                    query = self.query[seq, layer, head * group + member, w].double()
                    weight = (key[mine] @ query * self.scale).exp()
                    weight = torch.where(at[mine] <= self.query_position[seq, w], weight, 0.0)
                    share = weight / weight.sum() if weight.any() else weight
                    total[mine] += share / (int(known.sum()) * group)
        return self.spread(seq, total)


def assert_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-5, atol=1e-7)


# Rows: empty, one entry, a page less one, a page, a page and one, several blocks of 64.
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("group", "head_dim", "window", "page", "dtype"),
    [
        (1, 32, 16, 8, torch.float32),
        (2, 64, 16, 16, torch.float16),
        (3, 96, 5, 8, torch.float32),
        (4, 128, 16, 16, torch.float16),
        (8, 128, 16, 64, torch.float32),
        (2, 256, 16, 16, torch.float32),
        (5, 256, 16, 16, torch.float16),
        (7, 32, 16, 8, torch.float16),
        (5, 64, 1, 8, torch.float32),
        (6, 32, 32, 16, torch.float16),
        (7, 32, 64, 16, torch.float32),  # more queries than a tile
    ],
)
def test_matches_the_eager_window(
    form: Callable[..., Tensor],
    group: int,
    head_dim: int,
    window: int,
    page: int,
    dtype: torch.dtype,
) -> None:
    lengths = [[0, 1, 7, 8], [9, 64, 65, 130]] if page == 8 else [[1, 16], [17, 200]]
    case = Case.make(lengths, group, head_dim, window, page, layers=2, dtype=dtype)
    got = case.run(form, [1, 0])
    assert got.dtype == torch.float32
    for batch_slot, seq in enumerate((1, 0)):
        assert_close(got[batch_slot], case.eager(seq))
    # Shares of a row add up to 1: nothing is lost between blocks or splits.
    filled = case.cache.length[[1, 0]] > 0
    sums = got.sum(-1)
    assert (sums[~filled] == 0).all() and (sums[filled] <= 1 + 1e-5).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("known", [1, 3, 6])
def test_definition_in_float64(form: Callable[..., Tensor], known: int) -> None:
    """Causal by position whatever the storage order; only queries seen so far count."""
    case = Case.make([[5, 70, 1]], 2, 32, 6, known=known)
    case.query_position[case.query_position >= 0] -= 4
    got = case.run(form, [0])
    assert_close(got[0], case.exact(0))
    before = case.cache.entries(0)
    late = case.cache.pool.position.view(-1)[before.slot] > case.query_position.max()
    assert late.any() and not got[0].flatten(0, 1)[before.row, before.offset][late].any()


@pytest.mark.parametrize("form", FORMS)
def test_queries_without_any_entry_to_see_count_as_zeros(form: Callable[..., Tensor]) -> None:
    case = Case.make([[12, 3]], 2, 32, 4)
    rows = case.cache.entries(0)
    case.cache.pool.position.view(-1)[rows.slot] = 50 + rows.offset.int()
    case.query_position[0] = torch.tensor([49, 50, 52, 200])
    got = case.run(form, [0])
    assert_close(got[0], case.exact(0))
    torch.testing.assert_close(got.sum(-1).flatten().cpu(), torch.tensor([0.75, 0.75]))


@pytest.mark.parametrize("form", FORMS)
def test_no_query_yet(form: Callable[..., Tensor]) -> None:
    case = Case.make([[12, 0]], 2, 32, 4, known=0)
    assert not case.run(form, [0]).any()


@pytest.mark.parametrize("form", FORMS)
def test_idle_batch_slots_leave_the_buffer_alone(form: Callable[..., Tensor]) -> None:
    case = Case.make([[12, 66], [3, 9]], 2, 32, 4)
    got = case.run(form, [-1, 1, -1])
    assert (got[[0, 2]] == 7).all()
    assert_close(got[1], case.eager(1))
    again = case.run(form, [0, -1, 1], got)
    assert again is got
    assert_close(got[0], case.eager(0))
    assert_close(got[1], case.eager(1))
    assert_close(got[2], case.eager(1))


@pytest.mark.parametrize("form", FORMS)
def test_a_ring_may_hold_the_queries_in_any_order(form: Callable[..., Tensor]) -> None:
    case = Case.make([[33]], 2, 32, 5)
    first = case.run(form, [0]).clone()
    turn = torch.tensor([3, 4, 0, 1, 2])
    case.query = case.query[:, :, :, turn].contiguous()
    case.query_position = case.query_position[:, turn].contiguous()
    assert_close(case.run(form, [0]), first)


@pytest.mark.parametrize("form", FORMS)
def test_equal_and_huge_logits(form: Callable[..., Tensor]) -> None:
    """Equal keys share evenly; logits of +-1e4 neither overflow nor lose the largest."""
    case = Case.make([[70]], 1, 32, 3)
    keys, live = case.cache.pool.keys.flatten(0, 1), case.cache.entries(0)
    case.cache.pool.position.zero_()
    keys[live.slot] = 1.0
    got = case.run(form, [0])[0, 0, 0]
    torch.testing.assert_close(got[:70].cpu(), torch.full((70,), 1 / 70))
    assert not got[70:].any()
    case.query[:] = 1.0
    keys[live.slot] = -2000.0
    keys[live.slot[40]] = 2000.0
    got = case.run(form, [0])[0, 0, 0]
    assert got[40] == 1 and got.sum() == 1


@pytest.mark.parametrize("form", [pytest.param(window_scores, id="dispatch"), *FORMS[1:]])
def test_without_a_place_it_makes_zeros(form: Callable[..., Tensor]) -> None:
    case = Case.make([[12, 3], [4, 9]], 2, 32, 4)
    cache, seqs = case.cache, torch.tensor([1, -1], device=DEVICE)
    got = form(
        case.query,
        case.query_position,
        cache.pool.keys,
        cache.pool.position,
        cache.length,
        cache.table,
        seqs,
        case.scale,
    )
    assert got.shape == (2, 1, 2, cache.table.shape[-1] * cache.pool.page_size)
    assert not got[1].any()
    assert_close(got[0], case.eager(1))


@needs_compiler
@pytest.mark.parametrize(("group", "dtype"), [(4, "bfloat16"), (8, "bfloat16"), (8, "float32")])
def test_kernels_fit_a_hopper_sm(group: int, dtype: str) -> None:
    """head_dim 128, 16 queries, pages of 16: tensor cores, no spills, two programs per SM.

    float32 (tests and small models) takes an SM for itself: <= 227 KB.
    """
    programs = 1 if dtype == "float32" else 2
    for code in compiled("window", queries=16, group=group, dtype=dtype):
        assert code.spills == 0
        assert code.registers * 32 * code.warps <= 65_536 // programs
        assert code.shared <= 227 * 1024 // programs
        assert "wgmma" in code.ptx
