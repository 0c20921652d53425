"""Check the values that a checkpoint's config names, before anything is built of them."""

from __future__ import annotations

import math
from typing import Any

from mmkv.engine.errors import ModelError
from mmkv.engine.model.spec import (
    GEMMA_TYPES,
    GLOBAL,
    LOCAL,
    PARTIAL_TYPES,
    WIDTH_TYPES,
    head_width,
)

# From 1 to bounds well above any model: what is made of a larger one would fill the memory first.
_TEXT = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "max_position_embeddings": 2**31,
    "sliding_window": 2**31,
    "query_pre_attn_scalar": 2**14,
    "num_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": 2**22,
    "shared_expert_intermediate_size": 2**22,
    "decoder_sparse_step": 2**12,
    "linear_conv_kernel_dim": 2**6,
    "linear_key_head_dim": 2**10,
    "linear_value_head_dim": 2**10,
    "linear_num_key_heads": 2**10,
    "linear_num_value_heads": 2**10,
}
# Of weights with this in their names, the fields that they depend on.
_FIELDS = {
    "deepstack": "deepstack_visual_indexes or hidden_size of vision_config",
    "multi_modal_projector": "vision_feature_layer, or hidden_size of a part",
    "linear_attn": "layer_types or a linear_ size",
    "self_attn": "attention_bias, num_attention_heads, num_key_value_heads or head_dim",
    "shared_expert": "shared_expert_intermediate_size",
    "expert": "num_experts, mlp_only_layers, decoder_sparse_step or moe_intermediate_size",
    "mlp": "intermediate_size, mlp_bias, num_experts, mlp_only_layers, decoder_sparse_step",
    "embed_tokens": "vocab_size or hidden_size",
    "lm_head": "vocab_size or tie_word_embeddings",
    "patch_embed": "patch_size, temporal_patch_size or the channels of vision_config",
    "patch_conv": "patch_size or num_channels of vision_config",
    "pos": "image_size, patch_size or num_position_embeddings of vision_config",
}
# Text models whose head_dim may be null.
_NO_HEAD_WIDTH = ("mistral", "ministral3", *WIDTH_TYPES)
# 0 is none of these: a dense model, to transformers too. Files have one name or the other.
_OR_NONE = {"num_experts": "num_experts or num_local_experts"}
_VISION = {
    "depth": 2**10,
    "num_hidden_layers": 2**10,
    "hidden_size": 2**16,
    "out_hidden_size": 2**20,
    "intermediate_size": 2**20,
    "num_heads": 2**10,
    "num_attention_heads": 2**10,
    "num_channels": 2**6,
    "in_channels": 2**6,
    "in_chans": 2**6,
    "image_size": 2**13,
    "patch_size": 2**10,
    "temporal_patch_size": 2**6,
    "spatial_merge_size": 2**6,
    "num_position_embeddings": 2**20,
}

_MOST_LAYERS = 2**12
_COUNTS = _VISION | _TEXT | {"num_labels": 2**16}


def require_counts(raw: Any, where: str = "") -> None:
    """Raise ModelError for a count in config.json that is beyond any model.

    transformers makes lists of some while it reads a config: of 3,000,000 layers in seconds, of
    2**31 never.

    Args:
        raw: the object in the file, or one inside. where: what leads to it.
    """
    for name, value in raw.items() if isinstance(raw, dict) else ():
        if isinstance(value, dict):
            require_counts(value, f"{where}{name}.")
        most = _MOST_LAYERS if "layer" in name or name == "depth" else _COUNTS.get(name)
        if most is not None and type(value) is int and value > most:
            raise _wrong(f"{where}{name}", value, f"{most:,} at most")


def require_sizes(config: Any) -> None:
    """Raise ModelError for sizes that are no whole numbers, below 1, or beyond any model."""
    text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        raise ModelError(
            "per_layer_config gives layers sizes of their own, which this decoder does not have; "
            "run the model with transformers"
        )
    if getattr(config, "is_causal", True) is False:  # by which some vision models mask their text
        raise _wrong("is_causal", False, "true: an encoder generates nothing")
    _require(text, _TEXT, "")
    _require(config, {"mm_tokens_per_image": 2**16}, "")
    if (vision := getattr(config, "vision_config", None)) is not None:
        _require(vision, _VISION, "vision_config.")
        _require_vision(vision)
    epsilon = getattr(text, "rms_norm_eps", 1e-6)
    if not _real(epsilon) or not 0 <= epsilon <= 1:
        raise _wrong("rms_norm_eps", epsilon, "a number from 0 to 1")
    _require_heads(text)
    _require_layers(text)
    ropes = getattr(text, "rope_parameters", None)
    if text.model_type in GEMMA_TYPES and isinstance(ropes, dict):
        for kind in {GLOBAL, LOCAL} & {*text.layer_types}:
            _require_rope(text, ropes.get(kind), f"rope_parameters.{kind}")
    else:
        _require_rope(text, ropes)


def fields_of(weight: str) -> str:
    """Name the fields of config.json that decide the shape of such a weight, or if there is one."""
    own = (fields for part, fields in _FIELDS.items() if part in weight)
    return next(own, "hidden_size, or a size in vision_config")


def _require_heads(text: Any) -> None:
    heads = text.num_attention_heads
    pairs = getattr(text, "num_key_value_heads", None) or heads
    if heads % pairs:
        raise _wrong("num_key_value_heads", pairs, f"a divisor of num_attention_heads ({heads})")
    key_heads, value_heads = (getattr(text, f"linear_num_{n}_heads", 1) for n in ("key", "value"))
    if value_heads % key_heads:
        wanted = f"a multiple of linear_num_key_heads ({key_heads})"
        raise _wrong("linear_num_value_heads", value_heads, wanted)
    own, width = getattr(text, "head_dim", None), head_width(text)
    if text.model_type in WIDTH_TYPES and own not in (None, width):
        wanted = f"{width}: a {text.model_type} model divides hidden_size by num_attention_heads"
        raise _wrong("head_dim", own, wanted)
    if own is None and hasattr(text, "head_dim") and text.model_type not in _NO_HEAD_WIDTH:
        raise _wrong("head_dim", own, "a number, or left out")


def _require_layers(text: Any) -> None:
    """Check which layers there are, and their experts."""
    kinds, count = getattr(text, "layer_types", None), text.num_hidden_layers
    if kinds is not None and (not isinstance(kinds, (list, tuple)) or len(kinds) != count):
        raise _wrong("layer_types", kinds, f"a list of {count} names")
    chosen, experts = (getattr(text, n, None) for n in ("num_experts_per_tok", "num_experts"))
    if experts and chosen is not None and chosen > experts:
        raise _wrong("num_experts_per_tok", chosen, f"at most num_experts ({experts})")


def _require_vision(vision: Any) -> None:
    """Check the heads and patches of a vision tower."""
    width = getattr(vision, "hidden_size", None)
    for name in ("num_heads", "num_attention_heads"):
        heads = getattr(vision, name, None)
        # Rotary towers turn pairs of numbers by two axes each.
        each = 4 if hasattr(vision, "spatial_merge_size") else 1
        if heads is not None and width is not None and width % (each * heads):
            raise _wrong(f"vision_config.{name}", heads, f"a divisor of {width // each}")
    patch = getattr(vision, "patch_size", None)
    if isinstance(patch, (list, tuple)) and not vision.model_type.startswith("internvl"):
        raise _wrong("vision_config.patch_size", patch, "a whole number")


def _require_rope(text: Any, rope: Any, name: str = "rope_parameters") -> None:
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_type"), str):
        raise _wrong(name, rope, "an object with a rope_type")
    theta = rope.get("rope_theta", 1.0)
    if not _real(theta) or not theta > 0:
        raise _wrong(f"{name}.rope_theta", theta, "a number above 0")
    width, share = head_width(text), rope.get("partial_rotary_factor", 1.0)
    if not _real(share) or not 0 < share <= 1:
        raise _wrong(f"{name}.partial_rotary_factor", share, "a number above 0, at most 1")
    rotated = int(width * share)
    for each in ("short_factor", "long_factor") if rope["rope_type"] == "longrope" else ():
        factors = rope.get(each)
        if not isinstance(factors, list) or len(factors) != rotated // 2:
            wanted = "a list of numbers for half of what is rotated of a head (head_dim)"
            raise _wrong(f"{name}.{each}", factors, wanted)
    section = rope.get("mrope_section")
    half = (rotated if text.model_type in PARTIAL_TYPES else width) / 2
    if section is not None and not _makes(section, half):
        wanted = f"three counts that make {int(half)}, half of what is rotated of a head (head_dim)"
        raise _wrong(f"{name}.mrope_section", section, wanted)


def _makes(section: Any, half: float) -> bool:
    """Whether these are three counts of that sum."""
    three = isinstance(section, (list, tuple)) and len(section) == 3
    return three and all(_whole(n, 2**14) for n in section) and sum(section) == half


def _require(config: Any, bounds: dict[str, int], where: str) -> None:
    for name, most in bounds.items():
        value = getattr(config, name, None)
        if name in _OR_NONE and value == 0:
            continue
        if value is not None and not _whole(value, most):
            shown = f"{where}{_OR_NONE.get(name, name)}"
            raise _wrong(shown, value, f"a whole number from 1 to {most:,}")


def _whole(value: Any, most: int) -> bool:
    if isinstance(value, (list, tuple)):  # height and width
        return len(value) == 2 and all(_whole(each, most) for each in value)
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _real(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and abs(value) < 1e300
        and math.isfinite(value)
    )


def _wrong(name: str, value: Any, wanted: str) -> ModelError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ModelError(f"config.json: {name} is {shown}, not {wanted}; get the complete checkpoint")
