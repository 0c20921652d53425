"""What ``generate`` can be asked for and this cache cannot give, each refused by its name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMode

from mmkv.engine.errors import InputError

# Arguments of generate that mean another way of decoding, or inputs that the engine makes itself.
_ARGUMENTS = (
    "assistant_model",
    "assistant_tokenizer",
    "custom_generate",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "synced_gpus",
    "inputs_embeds",
    "position_ids",
    "cache_position",
    "encoder_outputs",
    "mm_encoder_outputs",
)
# The argument and the field of outputs that hold the cache: transformers 5.24 renamed them.
CACHE_NAMES = ("cache", "past_key_values")
# What transformers hands on to a decoding function of its own accord.
_HANDED_ON = {
    *CACHE_NAMES,
    "attention_mask",
    "position_ids",
    "use_cache",
    "logits_to_keep",
    "mm_encoder_outputs",
}
# Names of the cache that grows; transformers drops "hybrid" itself.
_CACHES = (None, "dynamic", "hybrid")
_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


def effective_config(given: Mapping[str, Any], default: GenerationConfig) -> GenerationConfig:
    """Return the settings of a call as transformers will put them together.

    Args:
        given: the arguments of ``generate``; default: the model's own settings.
    """
    config = copy.copy(given.get("generation_config") or GenerationConfig())
    for name, value in vars(default).items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    for name, value in given.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def check_call(given: Mapping[str, Any], config: GenerationConfig) -> None:
    """Check a call before transformers sees it.

    Args:
        given: the arguments of ``generate``; config: what :func:`effective_config` made of them.

    Raises:
        InputError: naming the first that cannot be met.
    """
    for name in _ARGUMENTS:
        if (value := given.get(name)) is not None and value is not False:
            raise _refused(name)
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise _refused(str(mode.value).replace("_", " "))
    if config.guidance_scale not in (None, 1):
        raise _refused("guidance_scale")
    if config.use_cache is False:
        raise _refused("use_cache=False")
    if config.cache_implementation not in _CACHES:
        raise _refused(f"cache_implementation={config.cache_implementation!r}")
    for name in ("token_healing", "output_attentions", "output_hidden_states"):
        if getattr(config, name):
            raise _refused(name)
    if config.prefill_chunk_size is not None:
        raise InputError(
            "prefill_chunk_size is set per model here; pass prefill_chunk to mmkv.hf.retain"
        )


def check_rest(rest: Mapping[str, Any]) -> None:
    """Check what transformers would hand on to the model. Raises InputError."""
    for name, value in rest.items():
        if name not in _HANDED_ON and value is not None:
            raise _refused(name)


def _refused(what: str) -> InputError:
    return InputError(
        f"mmkv.hf.retain does not run {what}; leave it out, or call generate after the context"
    )
