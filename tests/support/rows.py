"""An eager cache and the same cache as device tensors, for the tests of append and evict."""

from __future__ import annotations

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.buffers import PageTables
from mmkv.engine.cache import COLUMNS, Columns, KVForm, PagePool, RaggedCache
from mmkv.engine.cache.forms import AUTO
from tests.support.kernels import DEVICE


def eager_cache(
    lengths: Tensor,
    page: int,
    pages: int,
    width: int,
    dim: int = 4,
    seed: int = 0,
    form: KVForm = AUTO,
) -> RaggedCache:
    """Sequences with rows of ``lengths [S, L, H]``; free pages in random order, random content.

    Positions of a row are different and below its sequence's longest row; their order is random.
    """
    source = torch.Generator().manual_seed(seed)
    pool = PagePool(page, dim, pages, form=form)
    pool._stack.copy_(torch.randperm(pages, generator=source))
    pool.limit = pages
    cache = RaggedCache(pool, *lengths.shape[1:])
    for length in lengths:
        rows = length.flatten().tolist()
        total, seen = sum(rows), max(max(rows), 1)
        places = [torch.randperm(seen, generator=source)[:count] for count in rows]
        content = {}
        for name in ("key", "value"):
            x = torch.randn(total, dim, generator=source)
            content[f"{name}s"], content[f"{name}_scale"] = getattr(form, name).encode(x)
        content |= {"log_beta": -torch.rand(total, generator=source)}
        content |= {"position": torch.cat(places).int()}
        content |= {"modality": torch.randint(3, (total,), generator=source).to(torch.uint8)}
        cache.import_({"length": length, **content})
    assert lengths.max() <= width * page, "the test's rows are longer than its table"
    table = torch.zeros(*lengths.shape, width, dtype=torch.int64)
    have = min(width, cache.table.shape[-1])  # the eager table is wider than it need be
    table[..., :have] = cache.table[: len(lengths), ..., :have]
    cache.table, cache.length = table, cache.length[: len(lengths)].clone()
    return cache


class Copies(Columns):
    """The pool's tensors, copied to the device."""

    def __init__(self, pool: PagePool) -> None:
        for name in COLUMNS:
            setattr(self, name, getattr(pool, name).clone().to(DEVICE))


def to_device(cache: RaggedCache) -> tuple[PageTables, Columns]:
    """The same state as tensors that share nothing with ``cache``."""
    top = torch.tensor([cache.pool.free_pages], device=DEVICE)
    tensors = (x.clone().to(DEVICE) for x in (cache.length, cache.table, cache.pool._stack))
    return PageTables(*tensors, top, cache.pool.page_size), Copies(cache.pool)


def assert_same(cache: RaggedCache, rows: PageTables, columns: Columns) -> None:
    """Lengths, tables, free pages in their order, and every slot of every column."""
    assert torch.equal(rows.length.cpu(), cache.length)
    used = cache._page_mask(slice(None))
    assert torch.equal(rows.table.cpu()[used], cache.table[used]), "tables differ"
    top = int(rows.top)
    assert top == cache.pool.free_pages
    assert torch.equal(rows.stack[:top].cpu(), cache.pool.free_list()), "free pages differ"
    for name in COLUMNS:
        ours, theirs = getattr(columns, name).cpu(), getattr(cache.pool, name)
        # Bit by bit: NaN equals itself.
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), f"{name} differ"


def snapshot(rows: PageTables, columns: Columns | None = None) -> list[Tensor]:
    """Copies of all tensors that may change."""
    tensors = [rows.length, rows.table, rows.stack, rows.top]
    tensors += [getattr(columns, name) for name in COLUMNS] if columns else []
    return [tensor.clone() for tensor in tensors]


def unchanged(before: list[Tensor], rows: PageTables, columns: Columns | None = None) -> bool:
    """Whether nothing has changed since :func:`snapshot`."""
    now = snapshot(rows, columns)
    return all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
