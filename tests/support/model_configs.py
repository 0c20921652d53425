"""Configurations of small random checkpoints, one function a family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

VOCAB = 160
IMAGE_ID, VIDEO_ID, VISION_START, VISION_END = 150, 151, 152, 153
VIDEO_START, VIDEO_END = 154, 155  # of GLM, whose frames have the tokens of pictures
# Random text draws from ids below this: never a placeholder or a special token.
TEXT_IDS = 148
NO_SPECIALS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
TILE, PATCH = 16, 4
SIDE = TILE // PATCH
LINE = 7  # words by which a photograph is told
PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48], [48, 16]]


@dataclass(frozen=True)
class Checkpoint:
    """One random checkpoint: its family's ``model_type`` and the shape that makes it special."""

    model_type: str
    heads: int
    kv_heads: int
    head_dim: int
    layers: int = 2
    tied: bool = False
    seed: int = 0
    text_type: str = ""
    text: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> int:
        """Return query heads per KV head."""
        return self.heads // self.kv_heads


def config_of(spec: Checkpoint) -> Any:
    """Return the transformers configuration of a checkpoint."""
    build = {
        "qwen3_vl": _qwen3_vl,
        "qwen3_vl_moe": _qwen3_vl,
        "qwen2_5_vl": _qwen2_5_vl,
        "qwen3_5": _qwen3_5,
        "qwen3_5_moe": _qwen3_5,
        "qwen2_vl": _qwen2_vl,
        "idefics3": _idefics,
        "smolvlm": _idefics,
        "internvl": _internvl,
        "llava": _llava,
        "llava_next": _llava_next,
        "llava_next_video": _llava_next,
        "mistral3": _mistral3,
        "mmkv_photos": _photos,
        "gemma3": _gemma3,
        "glm4v": _glm4v,
        "glm46v": _glm4v,
        "llava_onevision": _llava_onevision,
    }.get(spec.model_type)
    return _text_config(spec, spec.model_type) if build is None else build(spec)


def _text_config(spec: Checkpoint, text_type: str) -> Any:
    hidden = spec.heads * spec.head_dim
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": 512,
        "tie_word_embeddings": spec.tied,
        **NO_SPECIALS,
        **spec.text,
    }
    return transformers.CONFIG_MAPPING[text_type](**values)


# A tower of layers as CLIP has them, and one as Qwen has it.
_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": TILE, "patch_size": PATCH},
}
_MERGING = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2},
    **{"patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2},
}


def _clip(_: Checkpoint) -> Any:
    return transformers.CLIPVisionConfig(**_TOWER | {"num_hidden_layers": 3}, projection_dim=16)


def _around(spec: Checkpoint, vision: Any, **values: Any) -> Any:
    """Return the configuration of a tower before a text model, with the tokens it is given."""
    return transformers.CONFIG_MAPPING[spec.model_type](
        vision_config=vision,
        text_config=_text_config(spec, spec.text_type),
        tie_word_embeddings=spec.tied,
        **values | spec.extra,
    )


def _llava(spec: Checkpoint) -> Any:
    values = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    return _around(spec, _clip(spec), image_token_index=IMAGE_ID, **values | spec.extra)


def _mistral3(spec: Checkpoint) -> Any:
    vision = transformers.PixtralVisionConfig(**_TOWER | {"image_size": 64})
    return _around(spec, vision, image_token_index=IMAGE_ID)


def _photos(spec: Checkpoint) -> Any:
    # Here, because it imports transformers' modelling code.
    from mmkv.engine.model.families.photos_model import EfficientNetLiteConfig, PhotosConfig

    vision = EfficientNetLiteConfig(
        stages=((1, 3, 1, 1, 8), (2, 5, 2, 6, 12)),
        stem=8,
        hidden_size=24,
        image_size=TILE,
        patch_size=PATCH,
        id2label={number: f"thing {number}" for number in range(9)},
    )
    return PhotosConfig(
        vision_config=vision,
        text_config=_text_config(spec, spec.text_type),
        image_token_index=IMAGE_ID,
        image_seq_length=LINE,
        table_size=20,
        tie_word_embeddings=spec.tied,
        **spec.extra,
    )


def _gemma3(spec: Checkpoint) -> Any:
    return transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**_TOWER, vision_use_head=False),
        text_config=_text_config(spec, "gemma3_text"),
        image_token_index=IMAGE_ID,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        mm_tokens_per_image=SIDE * SIDE // 4,
        tie_word_embeddings=spec.tied,
        **spec.extra,
    )


def _turned(spec: Checkpoint, text_type: str, share: float = 1.0, **more: Any) -> Any:
    """Return a text model whose heads turn in a share of their numbers, by three axes."""
    text, turned = _text_config(spec, text_type), int(spec.head_dim * share) // 2
    side = turned // 3
    text.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    text.rope_parameters |= {} if share == 1 else {"partial_rotary_factor": share}
    text.rope_parameters |= {"mrope_section": [turned - 2 * side, side, side], **more}
    return text


def _glm4v(spec: Checkpoint) -> Any:
    return transformers.CONFIG_MAPPING[spec.model_type](
        text_config=_turned(spec, "glm4v_text", 0.5).to_dict(),
        vision_config=_MERGING | _wide(spec) | {"image_size": 2 * TILE},
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        image_start_token_id=VISION_START,
        image_end_token_id=VISION_END,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
        tie_word_embeddings=spec.tied,
    )


def _wide(spec: Checkpoint) -> dict[str, int]:
    return {"out_hidden_size": spec.heads * spec.head_dim}


def _idefics(spec: Checkpoint) -> Any:
    return _around(spec, dict(_TOWER), image_token_id=IMAGE_ID, scale_factor=2)


def _llava_next(spec: Checkpoint) -> Any:
    video = {"video_token_index": VIDEO_ID} if spec.model_type == "llava_next_video" else {}
    tokens = {"image_token_index": IMAGE_ID, "image_grid_pinpoints": PINPOINTS}
    return _around(spec, _clip(spec), **tokens, **video)


def _llava_onevision(spec: Checkpoint) -> Any:
    tower = _TOWER | {"num_hidden_layers": 3, "vision_use_head": False}
    return _around(
        spec,
        transformers.SiglipVisionConfig(**tower),
        image_token_index=IMAGE_ID,
        video_token_index=VIDEO_ID,
        image_grid_pinpoints=PINPOINTS,
        # Fewer tiles than the largest grid has, so that the shrinking path runs too.
        vision_aspect_ratio="anyres_max_2",
    )


def _internvl(spec: Checkpoint) -> Any:
    vision = transformers.InternVLVisionConfig(**_TOWER)
    tokens = {"image_token_id": IMAGE_ID, "image_seq_length": SIDE * SIDE // 4}
    return _around(spec, vision, **tokens)


def _qwen(spec: Checkpoint, text: Any, **vision: Any) -> Any:
    return transformers.CONFIG_MAPPING[spec.model_type](
        text_config=text.to_dict(),
        vision_config=_MERGING | vision,
        image_token_id=IMAGE_ID,
        video_token_id=VIDEO_ID,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=spec.tied,
    )


def _qwen2_vl(spec: Checkpoint) -> Any:
    vision = {"embed_dim": 32, "mlp_ratio": 2, "hidden_size": spec.heads * spec.head_dim}
    return _qwen(spec, _turned(spec, "qwen2_vl_text"), **vision)


def _qwen2_5_vl(spec: Checkpoint) -> Any:
    # One of the layers sees windows of 2 x 2 merged patches.
    windows = {"window_size": 4 * PATCH, "fullatt_block_indexes": [1], "tokens_per_second": 2}
    return _qwen(spec, _turned(spec, "qwen2_5_vl_text"), **windows, **_wide(spec))


def _qwen3_vl(spec: Checkpoint) -> Any:
    text = _turned(spec, f"{spec.model_type}_text", mrope_interleaved=True)
    deep = {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    return _qwen(spec, text, **deep, **_wide(spec))


def _qwen3_5(spec: Checkpoint) -> Any:
    text = _turned(spec, f"{spec.model_type}_text", 0.25, mrope_interleaved=True)
    return _qwen(spec, text, num_position_embeddings=64, **_wide(spec))


# Not as many value heads for a key head as there are key heads, so that no order of them is
# another; as in the real models, every fourth layer or so attends.
LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
