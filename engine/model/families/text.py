"""Text-only models: Llama, Mistral, Ministral (3), Qwen2/2.5, Qwen3, Qwen3-MoE, GLM-4-0414.

Phi-3 and Phi-4-mini: fused projections, partial rotary, long-context rope factors.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from mmkv.engine.model.families.base import Family


class TextFamily(Family):
    """Models whose every token is text, at rope position = token index."""

    model_types: ClassVar[tuple[str, ...]] = (
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "glm4",
    )
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (("model.", "lm_head.weight"),)
    has_vision: ClassVar[bool] = False
    pixel_keys: ClassVar[dict[int, str]] = {}

    @staticmethod
    def text_model(hf_model: Any) -> nn.Module:
        """Return the module with embed_tokens, layers, norm and rotary_emb."""
        return hf_model.model


class Qwen35TextFamily(TextFamily):
    """The language model of Qwen3.5 by itself (:class:`.qwen_vl.Qwen35Family`)."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text")


class Gemma3TextFamily(TextFamily):
    """The language model of Gemma 3 by itself (:class:`.llava.Gemma3Family`)."""

    model_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)


class Phi3Family(TextFamily):
    """As other text models to a session.

    What differs lies below: q, k, v and gate, up arrive fused (``engine.weights``), a part of
    each head may stay unrotated, and ``longrope`` checkpoints have two sets of frequencies, of
    which a whole sequence must use one (``engine.spec``).
    """

    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
