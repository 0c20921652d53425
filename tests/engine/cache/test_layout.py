"""The columns of the cache are named once; C, which names them again, agrees.

To add a column, four files are touched: ``engine/cache/layout.py`` names it, ``COLUMNS`` of
``native.h`` does so for C, ``fill_kernel`` of ``evict_triton.py`` moves it, and ``store_kernel`` of
``store_triton.py`` takes it; ``make test-triton`` compares all columns. That carries it through
growth, eviction, fork and session files. Whoever fills or reads it comes on top: for a value of
every token ``torch/step.py``, ``append_entry`` of ``pages.c`` and ``store.py``; for a value that
policies see ``CacheView``, ``CachedSequence.view`` and ``_view`` of ``kernels/evict.py``.
``test_memory_equals_a_count_of_pages`` counts the bytes of columns that it names.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from mmkv.engine.backends.cpu.binding import Cache, library
from mmkv.engine.cache import COLUMNS, KVForm, PagePool, RaggedCache
from mmkv.engine.cache.forms import FORMS
from tests.support.native import needs_native

C_TYPES = {
    None: "void",
    torch.float16: "uint16_t",
    torch.float32: "float",
    torch.int32: "int32_t",
    torch.uint8: "uint8_t",
}


@needs_native
def test_c_has_the_columns_in_their_order() -> None:
    """Its structure, and what moves an entry, are made of one list."""
    loaded = library()
    assert not isinstance(loaded, str), loaded
    told = ctypes.CFUNCTYPE(ctypes.c_char_p)(("mmkv_columns", loaded))().decode()
    assert told == "".join(f"{C_TYPES[column.dtype]} *{name};" for name, column in COLUMNS.items())
    assert [field[0] for field in Cache._fields_[: len(COLUMNS)]] == list(COLUMNS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_bytes_and_shapes_are_those_of_the_tensors(name: str, dtype: torch.dtype) -> None:
    form = KVForm.of(name, dtype, 6)
    pool = PagePool(8, 6, 5, dtype, state_size=3, form=form)
    assert pool.page_bytes == sum(column[0].nbytes for column in pool.columns())
    kept = (pool.keys, pool.values, pool.key_scale, pool.value_scale)
    assert pool.kv_page_bytes == sum(column[0].nbytes for column in kept)
    for column, tensor in zip(COLUMNS.values(), pool.columns(), strict=True):
        assert column.dtype in (None, tensor.dtype) and tensor.is_contiguous()
        assert tensor.shape[:2] == (5, 8)
    if form.plain:
        assert pool.keys.dtype == pool.values.dtype == dtype
        assert pool.keys.shape[-1] == pool.values.shape[-1] == 6
        assert pool.key_scale.numel() == pool.value_scale.numel() == 0
    pool.grow(9)
    assert {tensor.shape[0] for tensor in pool.columns()} == {9}


def test_what_is_exported_has_every_column() -> None:
    cache = RaggedCache(PagePool(4, 2, 8), 1, 2)
    seq = cache.open()
    cache.append(torch.tensor([seq]), 3)
    assert list(cache.export(seq)) == ["length", *COLUMNS]
