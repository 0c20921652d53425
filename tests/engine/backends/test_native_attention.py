"""Attention of a step to one row, at every level of C, beside float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import binding, levels
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import PagePool, RaggedCache
from mmkv.engine.cache.forms import KVForm
from tests.support.native import needs_native

FORMS = ["auto", "bf16", "int8", "k8v4", "int4"]


def filled(form: str, dim: int, page_size: int, length: int) -> tuple[RaggedCache, Tensor, Tensor]:
    """A row of random entries, and its keys and values ``[length, D]`` as they are stored."""
    # C reads queries that are rotated already; here nothing is.
    plain = replace(KVForm.of(form, torch.float32, dim), rotated=False)
    cache = RaggedCache(PagePool(page_size, dim, 0, form=plain), 1, 1)
    slots = cache.append(torch.tensor([cache.open()]), length).flatten()
    noise = torch.Generator().manual_seed(length + dim)
    cache.pool.store(slots, *torch.randn(2, length, dim, generator=noise))
    return cache, cache.pool.keys_at(slots), cache.pool.values_at(slots)


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("form", FORMS)
def test_attention_of_a_row(form: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head sizes that vectors divide or not, groups of one part or more, pages that end within."""
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    assert loaded.level == level
    for dim in (2, 20, 32, 64, 96, 128):
        for page_size, length in ((1, 5), (8, 1), (8, 40), (16, 33), (24, 71)):
            cache, keys, values = filled(form, dim, page_size, length)
            for group in (1, 2, 3, 4, 5, 9):
                query = 2 * torch.randn(group, dim, generator=torch.Generator().manual_seed(group))
                out, scores = torch.full_like(query, torch.nan), torch.empty(group, length)
                with CacheViews().of(cache, [0]) as views:
                    places = query.data_ptr(), group, 0, scores.data_ptr(), out.data_ptr()
                    loaded.mmkv_attend(views, 0, *places)
                shares = (query.double() @ keys.double().T / dim**0.5).softmax(-1)
                torch.testing.assert_close(scores.double(), shares, rtol=0, atol=2e-5)
                wanted = shares @ values.double()
                torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-5)
