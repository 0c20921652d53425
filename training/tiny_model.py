"""The bundled model before training: tokenizer, configuration, processor files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from eval.scenes import COLOURS, SHAPES, object_names

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
_WORDS = (
    "system user assistant what is at in row column of the where which cell how many objects are "
    "there do you see a read word number this colour shape name every list all picture has was "
    "first second both yes no nothing and it an I tell me about image see things can one two "
    "three four five six seven eight nine ten please describe count answer question with not has "
    "What Where Which How Is Do Read Name List seconds on to or same different object letters "
    "ignore remember keep skip video frame start end changed change written were below above left "
    "right beside before after third fourth fifth sixth seventh eighth last next"
).split()

# Renders what the training data is written in; content parts as in the Qwen3-VL template, but for
# the start and end that it puts around a video, whose frames have their own.
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|video_pad|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

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


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer: every word of the world is one token, anything else its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = sorted(
        {*_WORDS, *COLOURS, *SHAPES, *(part for name in object_names() for part in name.split())}
    )
    vocabulary = [*alphabet, *words, *(f"Ġ{word}" for word in words), *(f"Ġ{d}" for d in range(10))]
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    # Without merges a word is either in the vocabulary as a whole or falls apart into bytes.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3VLForConditionalGeneration:
    """A freshly initialised model, float32, about 4 M parameters."""
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
    # The Trainer turns it off, and who loads the model would decode without a cache.
    model.config.use_cache = model.config.text_config.use_cache = True
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2) + "\n")
    (folder / "video_preprocessor_config.json").write_text(
        json.dumps(VIDEO_PROCESSOR, indent=2) + "\n"
    )
