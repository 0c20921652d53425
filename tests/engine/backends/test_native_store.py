"""Keys and values as C stores them, in every form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mmkv.engine.backends.cpu import binding, levels
from mmkv.engine.backends.cpu.cache_views import CacheViews
from mmkv.engine.cache import COLUMNS, KVForm, PagePool, RaggedCache
from mmkv.engine.cache.forms import FORMS
from tests.support.native import needs_native


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("kv", [name for name in FORMS if name != "auto"])
def test_c_rounds_as_torch_does_bit_by_bit(
    kv: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded: Any = binding.library()
    noise = torch.Generator().manual_seed(3)
    for dim in (2, 22, 32, 96, 128):
        pools = [PagePool(8, dim, 20, form=KVForm.of(kv, torch.float32, dim)) for _ in range(2)]
        size = 10.0 ** torch.randint(-9, 4, (2, 160, 1), generator=noise)
        vectors = size * torch.randn(2, 160, dim, generator=noise)
        vectors[:, :8] = vectors[:, :8, :1]  # no range at all
        vectors[:, 8:12] = 0
        vectors[:, 12:24] = vectors[:, 12:24].abs()
        vectors[:, 24:40] = vectors[:, 24:40].round()
        vectors[:, 40:44] *= 1e-44 / size[:, 40:44]  # too small for a scale of 8 bits
        vectors[:, 44:48] = 7e4 + vectors[:, 44:48].abs() / size[:, 44:48]  # beyond float16
        pools[0].store(torch.arange(160), *vectors)
        cache = RaggedCache(pools[1], 1, 1)
        view = CacheViews().of(cache, [cache.open()])
        for slot, (key, value) in enumerate(vectors.transpose(0, 1).clone()):
            loaded.mmkv_store(view._views, slot, key.data_ptr(), value.data_ptr())
        for name in COLUMNS:
            ours, theirs = getattr(pools[1], name), getattr(pools[0], name)
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), (name, dim)


@needs_native
@pytest.mark.parametrize("kv", ["int8", "int4"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, 1e9])
def test_c_stores_nothing_finite_of_what_is_not(wrong: float, kv: str) -> None:
    loaded: Any = binding.library()
    pool = PagePool(8, 32, 1, form=FORMS[kv])
    cache = RaggedCache(pool, 1, 1)
    key, value = torch.ones(32), torch.ones(32)
    key[3] = wrong
    view = CacheViews().of(cache, [cache.open()])
    loaded.mmkv_store(view._views, 2, key.data_ptr(), value.data_ptr())
    assert not pool.keys_at(torch.tensor([2])).isfinite().any()
    assert pool.values_at(torch.tensor([2])).isfinite().all()
