"""What Triton compiles, and when: after a first reply nothing, whatever comes then."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.kernels import asked, needs_compiler
from tests.support.tiers import long_but

# Odd numbers of heads, whose views begin at odd addresses; codes; windows; linear layers; experts;
# scores in Triton, from the newest queries, in torch, summed up; budgets a row, a layer, with
# floors; none.
CASES = [
    ("odd", "dbtrimkv", {}),
    ("odd", "trimkv", {}),
    ("odd", "balanced", {}),
    ("odd", "snapkv", {}),
    ("odd", "adakv", {}),
    ("odd", "h2o", {}),
    ("odd", "full", {}),
    ("qwen3", "pyramidkv", {}),
    ("qwen3", "expected-attention", {}),
    ("qwen3", "dbtrimkv", {"kv": "k8v4"}),
    ("gemma3_text", "dbtrimkv", {}),
    ("qwen3_5_moe", "dbtrimkv", {}),
    ("qwen3", "dbtrimkv", {"prefill_chunk": 128}),
]


@needs_compiler
def test_products_are_compiled_for_sizes_of_a_batch_and_not_for_those_of_matrices() -> None:
    """Four tiles, of up to 16, 32 and 64 tokens and of more, for all matrices of a model."""
    request = {"model": "qwen3_vl", "policy": "dbtrimkv", "settings": {}, "weights": "int8"}
    warm, later = asked(kind="warm_and_later", **request)
    assert not later
    products = {name: n for name, n in Counter(warm).items() if name.startswith("product.")}
    assert products == {"product.code_kernel": 1, "product.integer_kernel": 4}


@needs_compiler
@pytest.mark.parametrize(
    ("model", "policy", "settings"),
    long_but([CASES[at] for at in (0, 5, 9, 11)], CASES, "four have most of it"),
    ids=str,
)
def test_after_a_first_reply_nothing_is_compiled(
    model: str, policy: str, settings: dict[str, Any]
) -> None:
    warm, later = asked(kind="warm_and_later", model=model, policy=policy, settings=settings)
    assert not later
    # Long and short chunks, norms with a sum and without, layers with a window and without, codes
    # of keys and of values, both products of an expert: all others are compiled once.
    most = {"pointwise.rms_norm_kernel": 2, "forms.encode_kernel": 2, "experts.expert_kernel": 2}
    most |= {"prefill_attention.prefill_kernel": 2, "decode_attention.decode_kernel": 2}
    assert {name: n for name, n in Counter(warm).items() if n > most.get(name, 1)} == {}
    assert {"store.store_kernel", "decode_attention.decode_kernel"} <= set(warm)
