"""A config that is read without its own class says what the class would say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from mmkv.engine.model.families.config import read_config, whole_config
from tests.support.chat_models import save_llama
from tests.support.factories import checkpoint

Raw = dict[str, Any]
LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
    "rope_type": "llama3",
}


def rewritten(tmp_path: Path, change: Callable[[Raw], Any], name: str = "llama") -> Path:
    """Return a folder with that checkpoint's config, changed."""
    raw = json.loads((checkpoint(name) / "config.json").read_text())
    change(raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return tmp_path


def of_transformers_4(raw: Raw) -> None:
    """Write the config as transformers 4 did, for Llama 3.2."""
    raw["torch_dtype"] = "bfloat16"
    raw["rope_theta"], raw["rope_scaling"] = 500000.0, LLAMA3
    raw["eos_token_id"] = [1, 2]
    raw["_model_name_or_path"] = raw["rope_interleaved"] = None
    for key in ("dtype", "rope_parameters", "head_dim", "attention_bias", "mlp_bias"):
        raw.pop(key)


def unscaled(raw: Raw) -> None:
    raw.pop("rope_parameters")
    raw["rope_theta"], raw["rope_scaling"] = 10000, None


@pytest.mark.parametrize("name", ["llama", "llama_biased"])
@pytest.mark.parametrize("change", [lambda raw: None, of_transformers_4, unscaled])
def test_it_says_what_the_class_says(
    name: str, change: Callable[[Raw], Any], tmp_path: Path
) -> None:
    folder = rewritten(tmp_path, change, name)
    found, wanted = read_config(folder), AutoConfig.from_pretrained(folder)
    assert type(found) is PreTrainedConfig and type(wanted) is transformers.LlamaConfig
    ours, theirs = found.to_dict(), wanted.to_dict()
    # Not sizes: how the model is run by transformers, and attributes that mmkv does not read.
    aside = {"use_cache", "model_type", "attention_bias", "mlp_bias", "pretraining_tp"}
    aside |= {"initializer_range", "attention_dropout", "rope_interleaved", "_model_name_or_path"}
    aside.add("transformers_version")
    assert {k: v for k, v in theirs.items() if k not in aside and ours.get(k) != v} == {}
    assert found.model_type == wanted.model_type and found.dtype == wanted.dtype
    for bias in ("attention_bias", "mlp_bias"):
        assert getattr(found, bias, False) == getattr(wanted, bias)
    assert found.get_text_config() is found
    assert whole_config(found, folder).to_dict() == theirs


def differing() -> list[tuple[str, Callable[[Raw], Any]]]:
    """Return configs that only the class understands, or refuses."""

    def put(key: str, value: Any) -> Callable[[Raw], Any]:
        return lambda raw: raw.update({key: value})

    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    values: list[tuple[str, Any]] = [
        ("hidden_size", "192"),
        ("hidden_size", 193),
        ("num_hidden_layers", 0),
        ("vocab_size", 1.5),
        ("rms_norm_eps", 2.0),
        ("dtype", "int8"),
        ("eos_token_id", ["a"]),
        ("head_dim", -1),
        ("rope_parameters", yarn),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("layer_types", ["x"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("sliding_window", 8),
    ]
    gone = [("num_key_value_heads", lambda raw: raw.pop("num_key_value_heads"))]
    return [(f"{key}={value}"[:40], put(key, value)) for key, value in values] + gone


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in differing()])
def test_the_class_is_asked_for_all_else(change: Callable[[Raw], Any], tmp_path: Path) -> None:
    folder = rewritten(tmp_path, change)

    def outcome(read: Callable[[Path], Any]) -> Any:
        try:
            return read(folder).to_dict()
        except Exception as error:
            return type(error), str(error)

    assert outcome(read_config) == outcome(AutoConfig.from_pretrained)


def test_other_families_keep_their_class() -> None:
    for name in ("qwen3_vl", "qwen3", "mistral", "phi3"):
        folder = checkpoint(name)
        assert type(read_config(folder)) is type(AutoConfig.from_pretrained(folder))


def test_the_tokenizer_is_the_same(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    config = read_config(folder)
    assert type(config) is PreTrainedConfig
    ours = AutoTokenizer.from_pretrained(folder, config=config)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.init_kwargs == theirs.init_kwargs
