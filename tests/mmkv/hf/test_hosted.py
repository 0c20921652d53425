"""Models that the engine does not know run themselves, over the same cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmkv.hf.handle
from mmkv import ModelError, PolicyError
from mmkv.hf import RetainedCache, retain
from mmkv.hf.handle import HostedRuntime
from tests.support.factories import CHECKPOINTS, enliven, make_model, pad_left
from tests.support.hf_models import greedy, prompts_of, registered
from tests.support.model_configs import NO_SPECIALS, VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    **NO_SPECIALS,
}
# By model type: what is special. Norms after layers; one norm for two branches, scaled logits;
# scaled embeddings and heads of their own size; experts; biases and a sliding window; none.
UNKNOWN: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "cohere": {"logit_scale": 0.5},
    "gemma": {"head_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "starcoder2": {"sliding_window": 20},
    "olmo": {"sliding_window": 8},  # left over: it has no windows
}


def unknown(kind: str) -> Any:
    config = transformers.CONFIG_MAPPING[kind](**SIZES, **UNKNOWN[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    enliven(model, 0)
    model.generation_config = transformers.GenerationConfig()
    return model.float().eval()


def batch() -> dict[str, Tensor]:
    return pad_left(prompts_of("llama"))


@pytest.mark.parametrize("kind", UNKNOWN)
def test_with_room_for_all_the_tokens_are_those_of_transformers(kind: str) -> None:
    model, inputs = unknown(kind), batch()
    before, tables = model.config._attn_implementation, registered()
    left = vars(model.config).pop("sliding_window") if kind == "olmo" else None
    wanted = greedy(model, inputs)
    logits = model(**inputs, use_cache=False).logits
    if left is not None:  # generate would size its cache by it
        model.config.sliding_window = left
    with retain(model, policy="full", prefill_chunk=16) as handle:
        assert isinstance(handle.engine, HostedRuntime)
        assert handle.engine.decode_path == "torch: the forward pass is transformers'"
        assert torch.equal(greedy(model, inputs), wanted)
        # Its own forward pass is what it was, padding included.
        own = inputs["attention_mask"].bool()
        now = model(**inputs, use_cache=False).logits
        torch.testing.assert_close(now[own], logits[own])
    assert model.config._attn_implementation == before
    assert left is not None or torch.equal(greedy(model, inputs), wanted)
    for table, now in zip(tables, registered(), strict=True):
        assert {k: v for k, v in now.items() if k != "mmkv"} == {
            k: v for k, v in table.items() if k != "mmkv"
        }
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("policy", ["dbtrimkv", "snapkv"])
def test_under_a_budget_it_keeps_what_the_engine_keeps(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Llama as if it were not known, beside the engine's own decoder."""
    model, inputs = make_model(CHECKPOINTS["llama_biased"]), batch()
    options: dict[str, Any] = {"policy": policy, "gates": "random", "budget": 20}
    options |= {"prefill_chunk": 16, "page_size": 8}
    later = {"input_ids": torch.arange(4, 16).expand(4, -1)}

    def run() -> tuple[list[Tensor], list[Any]]:
        held = RetainedCache(only_new=True)
        with retain(model, **options):
            made = [greedy(model, part, past_key_values=held) for part in (inputs, later)]
            assert all(row.evicted > 0 for row in held.memory())
            return made, held.retained()

    wanted, kept = run()
    monkeypatch.setattr(mmkv.hf.handle, "find", lambda model_type: None)
    found, ours = run()
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))
    for row, other in zip(ours, kept, strict=True):
        for one, two in zip(row, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_what_cannot_run_itself() -> None:
    def refused(match: str, model: Any, **options: Any) -> None:
        with pytest.raises((ModelError, PolicyError), match=match) as error:
            retain(model, **{"policy": "full", **options})
        assert "\n" not in str(error.value)
        assert "generate" not in vars(model)

    tiny = {"vocab_size": 8, "n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**tiny))
    refused("GPT2LMHeadModel (computes other logits|does not run) over mmkv's cache", gpt2)
    caps = {"attn_logit_softcapping": 20.0, "head_dim": 16, "query_pre_attn_scalar": 16}
    soft = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, **caps))
    refused("a softcap", soft)
    assert soft.config._attn_implementation != "mmkv"
    for policy in ("fastv", "epikv", "criticalkv", "expected-attention"):
        refused("reads more of a model", unknown("olmo2"), policy=policy)
    refused("leave lossless out", unknown("olmo2"), policy="snapkv", lossless=True)
