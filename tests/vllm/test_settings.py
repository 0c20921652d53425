"""What the plugin reads of vLLM's config and refuses, without vLLM."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from mmkv.engine.errors import MmkvError
from mmkv.vllm.settings import asked, settings_of
from tests.support.model_configs import Checkpoint, config_of


def config(settings: Any, model: str = "qwen3", **changed: Any) -> Any:
    """Return as much of a VllmConfig as is read."""
    text = transformers.AutoConfig.for_model(
        **config_of(Checkpoint(model, 4, 2, 32, layers=4)).to_dict()
    )
    parts: dict[str, Any] = {
        "speculative_config": None,
        "kv_transfer_config": None,
        "enforce_eager": True,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "cache_dtype": "auto",
        "max_num_scheduled_tokens": None,
        **changed,
    }
    every = SimpleNamespace(**parts, block_size=16, max_num_batched_tokens=100)
    every.model_config = SimpleNamespace(
        model="nowhere",
        hf_text_config=text,
        dtype=torch.bfloat16,
        is_multimodal_model=False,
        enforce_eager=every.enforce_eager,
    )
    every.parallel_config = every.cache_config = every.scheduler_config = every
    every.additional_config = settings
    return every


def test_settings_are_the_engines_words() -> None:
    made = settings_of(
        config({"mmkv": {"policy": "snapkv:window=8", "budget": 40, "evict_every": 3}})
    )
    assert (made.policy.name, made.allowed, made.interval.steps) == ("snapkv:window=8", 320, 3)
    assert (made.chunk, made.reserve, made.most, made.layout.page_size) == (100, 7, 42, 16)
    assert settings_of(config({"mmkv": {"policy": "knorm"}})).allowed == 256 * 8
    assert settings_of(config({"mmkv": {"policy": "knorm", "kv": "int4"}})).layout.form.name == (
        "int4"
    )
    assert (
        settings_of(config({"mmkv": {"policy": "knorm"}}, max_num_scheduled_tokens=50)).reserve == 4
    )


def test_a_budget_in_bytes_counts_what_vllm_counts() -> None:
    made = settings_of(config({"mmkv": {"policy": "knorm", "budget": "1MiB"}}))
    page = 16 * 144  # 2 x 64 bytes of key and value, 9 beside them, rounded up to 144
    assert made.allowed == 2**20 // page * 16 - 8 * 15


@pytest.mark.parametrize("given", [{}, None, {"other": 1}])
def test_without_settings_nothing_is_asked(given: Any) -> None:
    assert not asked(config(given))


KNORM = {"policy": "knorm"}


@pytest.mark.parametrize(
    ("settings", "changed", "message"),
    [
        ("knorm", {}, "give an object such as {'budget': 256}"),
        ({"page_size": 8}, {}, "'page_size' is no setting inside vLLM; --block-size says that"),
        ({"bugdet": 8}, {}, "'bugdet' is no setting inside vLLM; give policy, gates, budget"),
        (KNORM | {"budget": "25%"}, {}, "a share of the tokens bounds no request"),
        ({"policy": "full"}, {}, "'full' evicts nothing"),
        ({"policy": "epikv"}, {}, "'epikv' keeps every prompt"),
        ({"policy": "fastv"}, {}, "'fastv' evicts nothing"),
        ({"policy": "expected-attention"}, {}, "reads rope positions of queries"),
        ({"policy": "criticalkv"}, {}, "reads the layers' output matrices"),
        (KNORM, {"speculative_config": 1}, "speculative decoding does not go with eviction"),
        (KNORM, {"kv_transfer_config": 1}, "a KV connector does not go with eviction"),
        (KNORM, {"pipeline_parallel_size": 2}, "leave out --pipeline-parallel-size"),
        (KNORM, {"decode_context_parallel_size": 2}, "context parallelism does not go"),
        (KNORM, {"cache_dtype": "fp8"}, "kv_cache_dtype 'fp8' does not go"),
        (KNORM, {"tensor_parallel_size": 3}, "2 KV heads cannot be split among 3 ranks"),
        ({"policy": "tova"}, {"tensor_parallel_size": 2}, "scores an entry by other heads, too"),
        (
            {"policy": "dbtrimkv", "gates": "random"},
            {"enforce_eager": False},
            "give --enforce-eager",
        ),
        (KNORM, {"model": "gemma3_text"}, "layers with a window or without a cache"),
        (KNORM, {"model": "qwen3_5_text"}, "layers with a window or without a cache"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_in_one_line(
    settings: Any, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(MmkvError, match=re.escape(message)) as error:
        settings_of(config({"mmkv": settings}, **changed))
    assert "\n" not in str(error.value)
