"""What generate can be asked for and cannot be had under retain: one clear line each."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import mmkv
from mmkv import InputError, MmkvError, ModelError
from mmkv.hf import RetainedCache, generate, hosted, loop, retain
from tests.support.factories import CHECKPOINTS, make_model
from tests.support.hf_models import greedy, model_of, prompts_of

REFUSED: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 2},
    "beam sample": {"num_beams": 2, "do_sample": True},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "assisted generation": {"prompt_lookup_num_tokens": 3},
    "dola generation": {"dola_layers": "low"},
    "assistant_model": {"assistant_model": nn.Identity()},
    "custom_generate": {"custom_generate": "somewhere"},
    "guidance_scale": {"guidance_scale": 1.5},
    "negative_prompt_ids": {"negative_prompt_ids": torch.ones(1, 3)},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "cache_implementation='paged'": {"cache_implementation": "paged"},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 4)},
    "position_ids": {"position_ids": torch.zeros(1, 3)},
    "token_healing": {"token_healing": True},
    "labels": {"labels": torch.zeros(1, 3)},
    "DynamicCache": {"past_key_values": transformers.DynamicCache()},
    "is a DynamicCache": {"cache": transformers.DynamicCache()},
    "pass one": {"cache": RetainedCache(), "past_key_values": RetainedCache()},
    "prefill_chunk_size": {"prefill_chunk_size": 4},
}


def test_each_is_refused_by_name() -> None:
    model, prompt = model_of("llama"), prompts_of("llama")[1]
    with retain(model, policy="full"):
        for name, options in REFUSED.items():
            with pytest.raises(InputError) as error:
                greedy(model, prompt, **options)
            assert name in str(error.value) and "\n" not in str(error.value)
        for config in ({"num_beams": 2}, {"cache_implementation": "static"}):
            settings = transformers.GenerationConfig(max_new_tokens=3, **config)
            with pytest.raises(InputError):
                model.generate(**prompt, generation_config=settings)
        # Mistakes that transformers names itself.
        with pytest.raises(ValueError, match="max_new_tokenz"):
            greedy(model, prompt, max_new_tokenz=3)
        with pytest.raises(ValueError, match="pixel_values"):
            greedy(model, prompt, pixel_values=torch.zeros(1, 3, 4, 4))


def test_inputs_that_do_not_fit_the_model() -> None:
    model, prompt = model_of("qwen3_vl"), prompts_of("qwen3_vl")[0]
    ids = prompt["input_ids"]
    with retain(model, policy="full"):
        for match, inputs in {
            "no image came with it": {"input_ids": ids},
            "outside 0": {"input_ids": ids + 4000},
            "attention_mask has shape": prompt | {"attention_mask": torch.ones(1, 3)},
            "prompt is empty": {"input_ids": ids, "attention_mask": torch.zeros_like(ids)},
        }.items():
            with pytest.raises(InputError, match=match):
                greedy(model, inputs)


class Adapter(nn.Linear):
    """Stands for a matrix with an adapter beside it."""


def test_models_that_cannot_be_retained() -> None:
    def refused(kind: type[Exception], match: str, model: Any, **options: Any) -> None:
        with pytest.raises(kind, match=match) as error:
            retain(model, **{"policy": "full", **options})
        assert "\n" not in str(error.value)

    refused(InputError, "merge_and_unload", nn.Linear(2, 2))
    model = make_model(CHECKPOINTS["llama"])
    refused(ModelError, "does not generate; load .* AutoModelForCausalLM", model.model)
    refused(InputError, "takes no device", model, device="cpu")
    refused(InputError, "takes no weights: the model has its own", model, weights="int8")
    refused(InputError, "no option 'bugdet'; did you mean 'budget'", model, bugdet=3)
    with pytest.raises(InputError, match="no option 'max_pixel'; did you mean 'max_pixels'"):
        mmkv.Engine.from_pretrained("nowhere", max_pixel=3)
    with retain(model, policy="full"):
        refused(InputError, "close the other retain", model)
    model.model.layers[1].mlp.up_proj = Adapter(2, 2)
    refused(ModelError, r"layers\.1\.mlp\.up_proj is a Adapter.*merge_and_unload", model)
    model = make_model(CHECKPOINTS["llama"])
    model.model.norm.half()
    refused(ModelError, "float16, torch.float32", model)
    model = make_model(CHECKPOINTS["llama"])
    model.model.norm.to("meta")
    refused(ModelError, "lies on cpu, meta", model)
    model.config.quantization_config = {}
    refused(ModelError, "quantised", model)
    tiny = transformers.BloomConfig(vocab_size=8, hidden_size=8, n_layer=1, n_head=1)
    unknown = transformers.BloomForCausalLM(tiny)
    refused(MmkvError, "'bloom' is not supported: mmkv runs .*qwen3_vl", unknown)


def test_what_is_used_of_transformers_is_there() -> None:
    """Names and forms that have changed between versions, or are private."""
    from transformers.cache_utils import Cache
    from transformers.generation import GenerationMixin

    arguments = inspect.signature(GenerationMixin.generate).parameters
    assert {"custom_generate", "streamer", "assistant_model", "synced_gpus"} <= set(arguments)
    assert "position_ids" in inspect.signature(type(model_of("llama")).forward).parameters
    fields = {"_pad_token_tensor", "_eos_token_tensor"}
    source = inspect.getsource(GenerationMixin._prepare_special_tokens)
    assert all(f"generation_config.{name}" in source for name in fields)
    hand_over = inspect.getsource(GenerationMixin.generate)
    assert "decoding_method = custom_generate" in hand_over
    assert {mode.value for mode in generate._MODES} == {"greedy_search", "sample"}
    config = transformers.GenerationConfig()
    for name in (
        "num_return_sequences return_dict_in_generate output_scores output_logits do_sample "
        "guidance_scale use_cache cache_implementation token_healing output_attentions "
        "output_hidden_states prefill_chunk_size stop_strings"
    ).split():
        assert hasattr(config, name), name
    made = generate.GenerateDecoderOnlyOutput(sequences=None)
    assert {"scores", "logits", generate._CACHE_FIELD} <= {f for f in type(made).__annotations__}
    assert loop.MaxLengthCriteria(max_length=3).max_length == 3
    assert loop.EosTokenCriteria(eos_token_id=[1, 2]).eos_token_id.tolist() == [1, 2]
    assert loop.TemperatureLogitsWarper(0.5).temperature == 0.5
    assert loop.TopKLogitsWarper(3).top_k == 3 and loop.TopPLogitsWarper(0.5).top_p == 0.5
    assert Cache(layers=[]).layers == [] and hasattr(Cache, "is_croppable")
    # For models that run themselves.
    assert {"can_generate", "_can_set_attn_implementation"} <= set(
        dir(transformers.PreTrainedModel)
    )
    assert hosted.AttentionInterface.register and hosted.AttentionMaskInterface.register
    assert model_of("llama").config._attn_implementation == "sdpa"
    taken = list(inspect.signature(hosted.sdpa_attention_forward).parameters)
    assert taken[:5] == ["module", "query", "key", "value", "attention_mask"]
