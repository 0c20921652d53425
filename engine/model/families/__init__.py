"""Model families: each reads one kind of checkpoint and its processor's output."""

from __future__ import annotations

from typing import Any

from engine.errors import ModelError
from engine.model.families.base import IMAGE, TEXT, VIDEO, Family, Turn
from engine.model.families.llava import LlavaFamily
from engine.model.families.llava_next import LlavaNextFamily
from engine.model.families.llava_onevision import LlavaOnevisionFamily
from engine.model.families.phi3 import Phi3Family
from engine.model.families.qwen3_vl import Qwen3VLFamily
from engine.model.families.text import TextFamily

FAMILIES: tuple[type[Family], ...] = (
    Qwen3VLFamily,
    LlavaFamily,
    LlavaNextFamily,
    LlavaOnevisionFamily,
    TextFamily,
    Phi3Family,
)
_TEXT_TYPES = {"qwen3_vl_text", *TextFamily.model_types, *Phi3Family.model_types}


def family_for(config: Any) -> type[Family]:
    """The family that runs checkpoints of this transformers config.

    Raises:
        ModelError: naming the supported types, or the part of the model that is not supported.
    """
    known = {name: family for family in FAMILIES for name in family.model_types}
    if config.model_type not in known:
        raise ModelError(
            f"model type {config.model_type!r} is not supported; mmkv runs "
            f"{', '.join(sorted(known))}"
        )
    text_type = config.get_text_config().model_type
    if text_type not in _TEXT_TYPES:
        raise ModelError(
            f"this {config.model_type} checkpoint has a {text_type!r} language model, which is "
            f"not supported; mmkv runs {', '.join(sorted(_TEXT_TYPES))}"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            "quantised checkpoints are not supported; use the float16, bfloat16 or float32 one"
        )
    return known[config.model_type]


__all__ = [
    "FAMILIES",
    "IMAGE",
    "TEXT",
    "VIDEO",
    "Family",
    "LlavaFamily",
    "LlavaNextFamily",
    "LlavaOnevisionFamily",
    "Phi3Family",
    "Qwen3VLFamily",
    "TextFamily",
    "Turn",
    "family_for",
]
