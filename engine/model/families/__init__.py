"""Model families: each reads one kind of checkpoint and its processor's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from mmkv.engine.errors import ModelError
from mmkv.engine.model.families.base import Family, Turn
from mmkv.engine.model.families.features import IMAGE, TEXT, VIDEO, Features
from mmkv.engine.model.families.llava import (
    Gemma3Family,
    IdeficsFamily,
    InternVLFamily,
    LlavaFamily,
    LlavaNextFamily,
    LlavaNextVideoFamily,
    LlavaOnevisionFamily,
    Mistral3Family,
    PhotosFamily,
)
from mmkv.engine.model.families.qwen_vl import (
    Glm4vFamily,
    Qwen2VLFamily,
    Qwen3VLFamily,
    Qwen25VLFamily,
    Qwen35Family,
)
from mmkv.engine.model.families.text import (
    Gemma3TextFamily,
    Phi3Family,
    Qwen35TextFamily,
    TextFamily,
)
from mmkv.engine.registry import Registry

FAMILIES: tuple[type[Family], ...] = (
    Qwen3VLFamily,
    Qwen25VLFamily,
    Qwen35Family,
    Qwen2VLFamily,
    Glm4vFamily,
    IdeficsFamily,
    LlavaFamily,
    LlavaNextFamily,
    LlavaNextVideoFamily,
    LlavaOnevisionFamily,
    InternVLFamily,
    Mistral3Family,
    Gemma3Family,
    PhotosFamily,
    TextFamily,
    Qwen35TextFamily,
    Gemma3TextFamily,
    Phi3Family,
)
_TEXT_TYPES = {
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "qwen3_vl_moe_text",
    *TextFamily.model_types,
    *Phi3Family.model_types,
}
_REGISTRY: Registry[type[Family]] = Registry(
    "model family",
    "mmkv.families",
    {name: family for family in FAMILIES for name in family.model_types},
    ModelError,
)


def register_family(family: type[Family]) -> None:
    """Let this process run checkpoints of the family's ``model_types``.

    A package does the same by an entry point in the group ``mmkv.families``, whose name is the
    model type and whose value is the class.

    Raises:
        ModelError: not a family, one without model types, or one of mmkv's own model types.
    """
    _check(family, str(getattr(family, "__name__", family)))
    if not family.model_types:
        raise ModelError(f"{family.__name__} names no model_types; give those of its config.json")
    for name in family.model_types:
        _REGISTRY.register(name, family)


def find(model_type: str) -> type[Family] | None:
    """Return the family for ``model_type``, None where there is none. Raises ModelError."""
    family = _REGISTRY.find(model_type)
    if family is not None:
        _check(family, model_type)
        family.prepare()
    return family


def find_for(source: str | Path, local_files_only: bool = False) -> type[Family] | None:
    """Return the family for the checkpoint at ``source``, a folder or hub id.

    To be called before transformers' auto classes: the package that offers the family may add its
    config and model to them when it is imported.

    Raises:
        ModelError: the package does not load. OSError, ValueError: there is no readable config.
    """
    config, _ = PreTrainedConfig.get_config_dict(source, local_files_only=local_files_only)
    return find(str(config.get("model_type")))


def names() -> list[str]:
    """Return the model types that :func:`find` knows."""
    return sorted(_REGISTRY.names())


def describe_added() -> list[str]:
    """Return one line for each model type that is not mmkv's own, saying where it comes from."""
    return _REGISTRY.describe_added()


def family_for(config: Any) -> type[Family]:
    """Return the family that runs checkpoints of this transformers config.

    Raises:
        ModelError: naming the supported types, or the part of the model that is not supported.
    """
    family = find(str(config.model_type))
    if family is None:
        raise ModelError(
            f"model type {config.model_type!r} is not supported; mmkv runs {len(names())} such as "
            "qwen3_vl, qwen3_5, internvl, llava and llama, which `mmkv models` lists; to add "
            "others: docs/how-to/add-a-family.md"
        )
    text_type = config.get_text_config().model_type
    text_types = _TEXT_TYPES | {*family.model_types, *family.text_types}
    if text_type not in text_types:
        raise ModelError(
            f"this {config.model_type} checkpoint has a {text_type!r} language model, which is "
            f"not supported; mmkv runs {', '.join(sorted(text_types))}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            "a model that transformers holds quantised cannot be read; load the checkpoint by "
            "Engine.from_pretrained, or the float16, bfloat16 or float32 one"
        )
    return family


def _check(family: object, name: str) -> None:
    if not (isinstance(family, type) and issubclass(family, Family)):
        raise ModelError(
            f"model family {name!r} is {family!r}; it must be a class derived from "
            "mmkv.engine.model.families.Family"
        )


__all__ = [
    "FAMILIES",
    "IMAGE",
    "TEXT",
    "VIDEO",
    "Family",
    "Features",
    "Gemma3Family",
    "Gemma3TextFamily",
    "Glm4vFamily",
    "IdeficsFamily",
    "InternVLFamily",
    "LlavaFamily",
    "LlavaNextFamily",
    "LlavaNextVideoFamily",
    "LlavaOnevisionFamily",
    "Mistral3Family",
    "Phi3Family",
    "PhotosFamily",
    "Qwen2VLFamily",
    "Qwen3VLFamily",
    "Qwen25VLFamily",
    "Qwen35Family",
    "Qwen35TextFamily",
    "TextFamily",
    "Turn",
    "describe_added",
    "family_for",
    "find",
    "find_for",
    "names",
    "register_family",
]
