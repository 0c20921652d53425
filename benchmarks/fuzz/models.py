"""Small checkpoints of random weights, and engines that several inputs share."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mmkv.api
import mmkv.engine.runtime
from mmkv.api import Engine
from mmkv.resources import bundled_model

_TEXT = {
    "vocab_size": 643,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
_SHARED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_PICTURES = ("preprocessor_config.json", "video_preprocessor_config.json")


def save_vision_model(folder: Path) -> Path:
    """Write the bundled model's files with tiny random weights."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    source = bundled_model()
    config = json.loads((source / "config.json").read_text())
    rope = config["text_config"]["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    config["text_config"] |= _TEXT | {"rope_parameters": rope}
    config["vision_config"] |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "depth": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
    }
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(**config))
    return _save(model, folder, (*_SHARED, *_PICTURES, "generation_config.json"))


def save_text_model(folder: Path) -> Path:
    """Write a Llama checkpoint of tiny random weights with the bundled model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**_TEXT, bos_token_id=None, eos_token_id=638))
    return _save(model, folder, _SHARED)


def _save(model: Any, folder: Path, files: tuple[str, ...]) -> Path:
    model.save_pretrained(folder)
    for name in files:
        shutil.copy(bundled_model() / name, folder)
    return folder


class SharedModels:
    """Loads each checkpoint's weights, tokenizer and picture processing once, while entered.

    Every engine is still built anew, with all checks of its options.
    """

    def __init__(self) -> None:
        self._load, self._processor = mmkv.engine.runtime.load, mmkv.api.load_processor
        self._made: dict[Any, Any] = {}

    def __enter__(self) -> None:
        mmkv.engine.runtime.load = self._once(self._load)
        mmkv.api.load_processor = self._once(self._processor)

    def __exit__(self, *_: object) -> None:
        mmkv.engine.runtime.load, mmkv.api.load_processor = self._load, self._processor

    def _once(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            given = (*arguments, *(value for name, value in named.items() if name != "kernels"))
            key = (make.__name__, *(str(each) for each in given if not callable(each)))
            if key not in self._made:
                self._made[key] = make(*arguments, **named)
            return self._made[key]

        return made


def small_engine(folder: Path, **options: Any) -> Engine:
    """Return an engine on the checkpoint in ``folder``, written there if need be."""
    if not (folder / "config.json").is_file():
        save_vision_model(folder)
    return Engine.from_pretrained(folder, budget=24, page_size=4, **options)
