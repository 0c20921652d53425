"""The bundled model before training: tokenizer, configuration, processor files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from mmkv.training.data.tokenizer import SPECIAL

IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    # One 32-pixel cell up to 16 x 16 of them: 1 to 256 visual tokens a picture.
    "min_pixels": 32 * 32,
    "max_pixels": 512 * 512,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512},
}
VIDEO_PROCESSOR = {
    **IMAGE_PROCESSOR,
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 512 * 512 * 4},
}
del VIDEO_PROCESSOR["image_processor_type"]


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """Return a freshly initialised model, float32, about 4 M parameters."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    torch.manual_seed(seed)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "max_position_embeddings": 8192,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_heads": 4,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 192,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    return model


def save(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Write a complete Hugging Face directory, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {k: v.to(torch.bfloat16) for k, v in model.state_dict().items()}
    del state["lm_head.weight"]  # tied to the embedding
    model.config.dtype = torch.bfloat16
    # The Trainer turns it off; the saved model must decode with a cache.
    model.config.use_cache = model.config.text_config.use_cache = True
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(VIDEO_PROCESSOR, indent=2) + "\n"
    )
