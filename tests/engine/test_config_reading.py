"""A config that is read without its own class says what the class would say."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoConfig, AutoTokenizer

from mmkv.engine.errors import ModelError
from mmkv.engine.model.families.config import LlamaConfig, read_config, whole_config
from mmkv.engine.model.families.loading import load
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


def changes() -> list[tuple[str, Callable[[Raw], Any]]]:
    """Return changes of a config: some are read, some refused."""

    def put(key: str, value: Any) -> Callable[[Raw], Any]:
        return lambda raw: raw.update({key: value})

    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
    values: list[tuple[str, Any]] = [
        ("hidden_size", "192"),
        ("hidden_size", 193),
        ("num_hidden_layers", 0),
        ("num_attention_heads", 0),
        ("vocab_size", 1.5),
        ("rms_norm_eps", 2.0),
        ("dtype", "int8"),
        ("eos_token_id", ["a"]),
        ("head_dim", -1),
        ("rope_parameters", yarn),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": "x"}),
        ("rope_scaling", LLAMA3),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("layer_types", ["x"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("sliding_window", 8),
    ]
    gone = [("num_key_value_heads", lambda raw: raw.pop("num_key_value_heads"))]
    named = [(f"{key}={value}"[:40], put(key, value)) for key, value in values]
    return [("nothing", lambda raw: None), ("older", of_transformers_4), *named, *gone]


@pytest.mark.parametrize("change", [pytest.param(c, id=name) for name, c in changes()])
def test_a_llama_is_read_as_by_its_own_class(change: Callable[[Raw], Any], tmp_path: Path) -> None:
    folder = rewritten(tmp_path, change)

    def outcome(read: Callable[[Path], Any]) -> Any:
        try:
            config = read(folder)
        except Exception as error:
            return type(error)
        return {key: str(value) for key, value in vars(config).items()}, config.to_dict()

    wanted = outcome(AutoConfig.from_pretrained)
    assert outcome(read_config) == wanted
    if not isinstance(wanted, type):
        config = read_config(folder)
        assert type(config) is LlamaConfig and config.get_text_config() is config
        whole = whole_config(config)
        assert type(whole) is transformers.LlamaConfig
        assert vars(whole) == vars(AutoConfig.from_pretrained(folder))


def test_it_has_the_fields_of_its_own_class() -> None:
    both = (LlamaConfig, transformers.LlamaConfig)
    ours, theirs = ({f.name: f.default for f in dataclasses.fields(kind)} for kind in both)
    assert ours == theirs


# Libraries make a list or names of these.
COUNTS = ["num_hidden_layers", "num_attention_heads", "num_experts", "num_labels", "hidden_size"]
INSIDE = [("text_config", "num_hidden_layers"), ("vision_config", "depth")]


@pytest.mark.parametrize("count", [3_000_000, 2**31 - 1])
@pytest.mark.parametrize("path", [*((key,) for key in COUNTS), *INSIDE])
def test_counts_beyond_any_model_are_refused_at_once(
    path: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    def put(raw: Raw) -> None:
        for key in path[:-1]:
            raw = raw.setdefault(key, {})
        raw[path[-1]] = count

    folder = rewritten(tmp_path, put)
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(ModelError, match=rf"config\.json: {'.'.join(path)} is {count}, not"):
        read_config(folder)
    taken, (_, most) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 0.2 and most < 2**20


def test_a_name_for_each_expert_is_made_of_none_that_are_not_there(tmp_path: Path) -> None:
    """Each count may be a model's, and their product none's."""
    folder = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model"))
    huge = {"num_hidden_layers": 4096, "num_local_experts": 4096, "num_experts": 4096}
    rewritten(folder, lambda raw: raw.update(huge), "qwen3_moe")
    started = time.process_time()
    with pytest.raises(ModelError, match=r"more numbers than .* num_hidden_layers"):
        load(folder, "float32", "cpu")
    assert time.process_time() - started < 1


def test_other_families_keep_their_class() -> None:
    for name in ("qwen3_vl", "qwen3", "mistral", "phi3"):
        folder = checkpoint(name)
        assert type(read_config(folder)) is type(AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", None])
def test_the_tokenizer_is_the_same(kind: str | None, tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"tokenizer_class": kind}
    file.write_text(json.dumps({key: value for key, value in settings.items() if value}))
    config = read_config(folder)
    assert type(config) is LlamaConfig
    ours = AutoTokenizer.from_pretrained(folder, config=config)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    assert ours.init_kwargs == theirs.init_kwargs
