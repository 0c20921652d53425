"""Read the config of a checkpoint by transformers, without the modelling code where that works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig

from mmkv.engine.model.families import find

_Types = dict[str, set[type]]
_INT: set[type] = {int}
_FLOAT: set[type] = {int, float}
_NONE: set[type] = {type(None)}
# What an ordinary config says, and of which types. Without one of these, the config relies on
# defaults of transformers' class; with other types, that class says what is wrong.
_REQUIRED: _Types = {
    "eos_token_id": {int, list} | _NONE,
    "hidden_act": {str},
    "hidden_size": _INT,
    "intermediate_size": _INT,
    "max_position_embeddings": _INT,
    "num_attention_heads": _INT,
    "num_hidden_layers": _INT,
    "num_key_value_heads": _INT,
    "rms_norm_eps": _FLOAT,
    "tie_word_embeddings": {bool},
    "vocab_size": _INT,
}
# What may stand there besides; other names mean nothing here.
_OPTIONAL: _Types = {
    "architectures": {list},
    "attention_bias": {bool},
    "attention_dropout": _FLOAT,
    "bos_token_id": _INT | _NONE,
    "dtype": {str},
    "head_dim": _INT | _NONE,
    "initializer_range": _FLOAT,
    "mlp_bias": {bool},
    "model_name": {str},
    "model_type": {str},
    "pad_token_id": _INT | _NONE,
    "pretraining_tp": _INT,
    "rope_parameters": {dict},
    "rope_scaling": {dict} | _NONE,
    "rope_theta": _FLOAT,
    "tokenizer_class": {str} | _NONE,
    "torch_dtype": {str},
}
# Not of an ordinary Llama: its own class is to judge.
_UNUSUAL = {
    "auto_map",
    "layer_types",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "sliding_window",
    "use_sliding_window",
}
_DTYPES = {"float32", "float16", "bfloat16"}
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
# Numbers that each needs besides rope_theta.
_ROPE: dict[str, set[str]] = {
    "default": set(),
    "llama3": _LLAMA3,
}


def read_config(source: str | Path, local_files_only: bool = False) -> Any:
    """Return the config of a folder or hub id.

    transformers' class for Llama imports all of its modelling code, which takes longer than torch.
    A Llama config that says all by itself is held by the base class of configs.

    Raises:
        ModelError: the package that offers the model's family does not load. OSError, ValueError:
            there is no readable config, or transformers does not know its type.
    """
    raw, _ = PreTrainedConfig.get_config_dict(source, local_files_only=local_files_only)
    find(str(raw.get("model_type")))  # may add its config to transformers' auto classes
    plain = _plain_llama(raw, source)
    return _whole(source, local_files_only) if plain is None else plain


def whole_config(config: Any, source: str | Path, local_files_only: bool = False) -> Any:
    """Return the config as an object of the model's own class, which transformers' models need.

    Args:
        config: what :func:`read_config` gave for ``source``. Raises as that does.
    """
    return _whole(source, local_files_only) if type(config) is PreTrainedConfig else config


def _whole(source: str | Path, local_files_only: bool) -> Any:
    return transformers.AutoConfig.from_pretrained(
        source, trust_remote_code=False, local_files_only=local_files_only
    )


def _plain_llama(raw: dict[str, Any], source: str | Path) -> Any | None:
    """Return the config of an ordinary Llama checkpoint, None where only its own class can tell."""
    names = raw.keys()
    if raw.get("model_type") != "llama" or not _REQUIRED.keys() <= names or _UNUSUAL & names:
        return None
    types = _REQUIRED | _OPTIONAL
    raw = {key: value for key, value in raw.items() if key in types}
    if not all(type(value) in types[key] for key, value in raw.items()):
        return None
    dtype, rope = raw.get("dtype", raw.get("torch_dtype")), _rope(raw)
    sizes = [raw[key] for key, kinds in _REQUIRED.items() if kinds == _INT]
    sizes.append(raw.get("head_dim") or 1)
    if dtype not in _DTYPES or rope is None or min(sizes) < 1 or not 0 < raw["rms_norm_eps"] < 1:
        return None
    ends = raw["eos_token_id"]
    if isinstance(ends, list) and not all(type(token) is int for token in ends):
        return None
    if raw["hidden_size"] % raw["num_attention_heads"]:
        return None
    config: Any = PreTrainedConfig()
    own = {"rope_parameters": rope, "dtype": getattr(torch, dtype), "_name_or_path": str(source)}
    aside = {"torch_dtype", "rope_theta", "rope_scaling"}
    for key, value in ({k: v for k, v in raw.items() if k not in aside} | own).items():
        setattr(config, key, value)
    if raw.get("head_dim") is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    config.standardize_rope_params()
    return config


def _rope(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rope parameters in transformers' present form, None for uncommon ones."""
    rope = raw.get("rope_parameters")
    if rope is None:
        rope = {"rope_type": "default"} | (raw.get("rope_scaling") or {})
        rope["rope_theta"] = raw.get("rope_theta")
    needed = _ROPE.get(str(rope.get("rope_type")))
    if needed is None or rope.keys() != needed | {"rope_type", "rope_theta"}:
        return None
    numbers = [rope[key] for key in (*needed, "rope_theta")]
    return dict(rope) if all(type(n) in _FLOAT and n > 0 for n in numbers) else None
