"""Arguments of other types and beyond their limits: one sentence, whatever they are."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mmkv
from mmkv.engine.cache import PagePool
from mmkv.engine.errors import BudgetError, InputError, MmkvError, PolicyError
from mmkv.engine.memory import free_bytes
from mmkv.eval.fuzz.target import failure_of
from mmkv.eval.fuzz.targets.api import PythonApi
from mmkv.prompt.template import take_media
from mmkv.sampling import distribution

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    st.sampled_from(
        [
            object(),
            int,
            print,
            1j,
            (1, 2),
            {1},
            Path("x"),
            torch.zeros(3),
            torch.tensor(2),
            torch.zeros(0),
            np.float32(0.5),
            np.int64(3),
            Image.new("RGB", (2, 2)),
            mmkv.Budget("entries", 20),
        ]
    ),
)
CALLS: dict[str, Any] = {
    **{
        f"Sampling {name}": lambda value, name=name: mmkv.Sampling(**{name: value})
        for name in ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    },
    **{
        f"EngineConfig {name}": lambda value, name=name: mmkv.EngineConfig(**{name: value})
        for name in (
            "model budget lookahead evict_every prefill_chunk page_size gates device dtype kv "
            "kv_limit"
        ).split()
    },
    "Budget.of": mmkv.Budget.of,
    "Budget value": lambda value: mmkv.Budget.of(mmkv.Budget("entries", value)),
    "Budget kind": lambda value: mmkv.Budget.of(mmkv.Budget(value, 20)),
    "messages": lambda value: take_media(value),
    "message": lambda value: take_media([value]),
    "role": lambda value: take_media([{"role": value, "content": "x"}]),
    "content": lambda value: take_media([{"role": "user", "content": value}]),
    "part": lambda value: take_media([{"role": "user", "content": [value]}]),
}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CALLS)), ODD)
def test_odd_arguments_get_one_sentence(call: str, value: Any) -> None:
    try:
        CALLS[call](value)
    except (MmkvError, TypeError) as error:
        text = str(error)
        assert text and "\n" not in text
        if isinstance(error, TypeError):  # in our words, not by an operator that failed
            assert "must be" in text or "is a list of messages" in text, text


@pytest.mark.parametrize("name", [name for name in mmkv.__all__ if name.endswith("Error")])
def test_errors_are_exported(name: str) -> None:
    assert issubclass(getattr(mmkv, name), mmkv.MmkvError)
    assert name in dir(mmkv)


def test_every_error_of_the_engine_is_exported() -> None:
    from mmkv.engine import errors

    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    ours = {name for name, kind in kinds.items() if issubclass(kind, errors.MmkvError)}
    assert ours == {name for name in mmkv.__all__ if name.endswith("Error")}


@pytest.mark.parametrize("value", [1e308, 1e300, 2.0**62, 1e18])
@pytest.mark.parametrize("kind", ["entries", "bytes"])
def test_huge_budgets_keep_everything(kind: Any, value: float) -> None:
    made = mmkv.Budget.of(mmkv.Budget(kind, value))
    assert 2**31 < made.entries(48, 100, 16, 4096) < 2**62
    assert made.describe()
    with pytest.raises(BudgetError):
        mmkv.Budget.of(f"{'9' * 400}GiB")


@settings(max_examples=60, deadline=None)
@given(
    st.floats(min_value=5e-324, max_value=1e-6, allow_subnormal=True),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20),
    st.integers(0, 5),
)
def test_small_temperatures_take_the_likeliest(
    temperature: float, logits: list[float], top_k: int
) -> None:
    made = torch.tensor(logits)
    sampling = mmkv.Sampling(temperature=temperature, top_k=top_k, top_p=0.9)
    probabilities = distribution(made, sampling)
    assert torch.isfinite(probabilities).all()
    assert math.isclose(float(probabilities.sum()), 1.0, rel_tol=1e-5)
    assert made[probabilities > 0].min() >= made.max() - 1e-3


@pytest.mark.parametrize("page_size", [1025, 10_000_000, 2**62])
def test_page_sizes_are_bounded(page_size: int) -> None:
    with pytest.raises(PolicyError, match=r"page_size is .* at most 1,024"):
        mmkv.EngineConfig(page_size=page_size)


def test_a_pool_that_cannot_fit_is_refused_before_it_is_made() -> None:
    pool = PagePool(16, 64, 4)
    before = pool.num_pages, pool.free_pages
    free = free_bytes(torch.device("cpu"))
    assert free is not None and free > 2**20
    for pages in (2 * free // pool.page_bytes, 2**60):
        with pytest.raises(BudgetError, match=r"GiB are free; lower"):
            pool.reserve(pages)
        with pytest.raises(BudgetError, match=r"GiB are free; lower"):
            pool.take(pages)
    assert (pool.num_pages, pool.free_pages) == before
    assert pool.take(3).tolist() == [0, 1, 2]


def test_a_small_limit_of_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmkv.engine.cache.pool.free_bytes", lambda _: 100 * 2**20)
    pool = PagePool(16, 64, 4)
    pool.reserve(60 * 2**20 // pool.page_bytes)
    with pytest.raises(BudgetError, match=r"0\.1 GiB are free"):
        pool.reserve(200 * 2**20 // pool.page_bytes)


def test_a_conversation_is_no_text() -> None:
    for odd in ("hello", b"x", 5, {"role": "user"}):
        with pytest.raises(TypeError, match="list of messages"):
            take_media(odd)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="empty"):
        take_media([])


def test_odd_arguments_of_any_call_lead_to_one_sentence(tmp_path: Path) -> None:
    target, rng = PythonApi(), Random(21)
    target.prepare(tmp_path)
    refused = 0
    for _ in range(150):
        case = target.make(rng)
        try:
            target.run(case)
        except Exception as error:
            assert failure_of(error) is None, f"{case}: {type(error).__name__}: {error}"
            refused += 1
        assert target.leaked() is None
    assert refused > 60
