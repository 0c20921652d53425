"""Small checkpoints with tokenizers, for tests of the chat: random weights, one token a byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    PreTrainedTokenizerFast,
)

import mmkv.reply
from mmkv import Engine
from mmkv.chat.display import Display
from mmkv.chat.options import ChatOptions
from mmkv.chat.repl import Repl
from mmkv.session import Session

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are single bytes: any text has one tokenization."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def _text_sizes(vocabulary: int) -> dict[str, object]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
    }


def save_llama(
    folder: Path,
    template: str | None = CHATML,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **sizes: int,
) -> Path:
    """Return a text-only checkpoint; ``sizes`` replace those of its config."""
    tokenizer = tokenizer or byte_tokenizer(template)
    torch.manual_seed(seed)
    eos = tokenizer.eos_token_id
    shape = _text_sizes(len(tokenizer)) | sizes
    config = LlamaConfig(**shape, eos_token_id=eos, bos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_qwen3_vl(
    folder: Path,
    seed: int = 0,
    positions: int = 2048,
    kind: str = "qwen3_vl",
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Path:
    """Return a Qwen-VL checkpoint: 8-pixel patches, 2 x 2 of them a token.

    Pictures of any size. ``kind``: ``qwen3_vl``, ``qwen3_vl_moe``, ``qwen2_5_vl``, ``qwen2_vl`` or
    ``qwen3_5``.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer or byte_tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}
    text = _text_sizes(len(tokenizer)) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "eos_token_id": ids["<|im_end|>"],
        "max_position_embeddings": positions,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    if kind == "qwen3_vl_moe":
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if kind == "qwen3_5":
        rope = text["rope_parameters"] | {"partial_rotary_factor": 0.25}
        text |= {"head_dim": 32, "rope_parameters": rope, "num_hidden_layers": 3}
        text |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        text |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
        text |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
        vision.pop("deepstack_visual_indexes")
    if kind == "qwen2_vl":
        vision = {key: vision[key] for key in ("depth", "num_heads", "patch_size")}
        vision |= {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        text |= {"bos_token_id": None, "rope_parameters": rope}
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        text |= {"bos_token_id": None, "rope_parameters": rope}
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    Qwen2VLImageProcessorPil(
        **sizes,
        size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    ).save_pretrained(folder)
    rules = sizes | {"size": {"shortest_edge": 2 * 16 * 16, "longest_edge": 8 * 32 * 32}}
    if kind not in ("qwen2_vl", "qwen2_5_vl"):  # on the hub they have none
        (folder / "video_preprocessor_config.json").write_text(json.dumps(rules))
    return folder


def save_qwen2_5_vl(folder: Path, seed: int = 0) -> Path:
    """Return a Qwen2.5-VL checkpoint, see :func:`save_qwen3_vl`."""
    return save_qwen3_vl(folder, seed, kind="qwen2_5_vl")


def save_qwen2_vl(folder: Path, seed: int = 0) -> Path:
    """Return a Qwen2-VL checkpoint, see :func:`save_qwen3_vl`."""
    return save_qwen3_vl(folder, seed, kind="qwen2_vl")


def save_qwen3_vl_moe(folder: Path, seed: int = 0) -> Path:
    """Return a Qwen3-VL checkpoint with experts, see :func:`save_qwen3_vl`."""
    return save_qwen3_vl(folder, seed, kind="qwen3_vl_moe")


LLAVA_TEMPLATE = (
    "{% for m in messages %}{{ m.role | upper }}: "
    "{% for p in m.content %}{{ '<image>\n' if p.type == 'image' else p.text }}{% endfor %}"
    "{{ ' ' if m.role == 'user' else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def save_llava(folder: Path, seed: int = 0) -> Path:
    """Return a LLaVA-1.5 checkpoint with its transformers processor: 16 tokens a picture."""
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = byte_tokenizer(LLAVA_TEMPLATE)
    torch.manual_seed(seed)
    text = _text_sizes(len(tokenizer)) | {"model_type": "llama"}
    vision = _TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    images = CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=LLAVA_TEMPLATE,
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    return folder


def save_llava_next(folder: Path, seed: int = 0, kind: str = "llava_next") -> Path:
    """Return a LLaVA-NeXT checkpoint with tiles of 16 tokens.

    ``kind``: ``llava_next``, or ``llava_next_video`` without its video processor.
    """
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    tokenizer = byte_tokenizer(LLAVA_TEMPLATE)
    tiles = [[32, 64], [64, 32], [64, 64]]
    torch.manual_seed(seed)
    vision = _TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}
    config = CONFIG_MAPPING[kind](
        text_config=_text_sizes(len(tokenizer)) | {"model_type": "llama"},
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=tiles,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32},
        crop_size={"height": 32, "width": 32},
        image_grid_pinpoints=tiles,
    )
    images.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    name = {"llava_next": "LlavaNextProcessor", "llava_next_video": "LlavaNextVideoProcessor"}[kind]
    settings = {
        "processor_class": name,
        "patch_size": 8,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def save_llava_next_video(folder: Path, seed: int = 0) -> Path:
    """Return a LLaVA-NeXT-Video checkpoint, see :func:`save_llava_next`."""
    return save_llava_next(folder, seed, "llava_next_video")


def save_llava_onevision(folder: Path, seed: int = 0) -> Path:
    """Return a LLaVA-OneVision checkpoint without its video processor, which needs torchvision."""
    from transformers.models.llava_onevision import image_processing_pil_llava_onevision as theirs

    tokenizer = byte_tokenizer(LLAVA_TEMPLATE)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<video>"]})
    tiles = [[32, 32], [32, 64], [64, 32], [64, 64]]
    torch.manual_seed(seed)
    vision = _TOWER | {"model_type": "siglip_vision_model"}
    config = LlavaOnevisionConfig(
        text_config=_text_sizes(len(tokenizer)) | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=tiles,
    )
    LlavaOnevisionForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    theirs.LlavaOnevisionImageProcessorPil(
        size={"height": 32, "width": 32}, image_grid_pinpoints=tiles
    ).save_pretrained(folder)
    settings = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 16,
        "vision_feature_select_strategy": "full",
    }
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def save_internvl(folder: Path, seed: int = 0) -> Path:
    """Return an InternVL checkpoint without its video processor: 4 tokens a tile of 32 pixels."""
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    marks = {"start_image_token": "<img>", "end_image_token": "</img>"}
    marks |= {"context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"}
    shown = "{{ '<IMG_CONTEXT>\n' if p.type == 'image' else '<video>\n' if p.type == 'video'"
    tokenizer = byte_tokenizer(LLAVA_TEMPLATE.replace("{{ '<image>\n' if p.type == 'image'", shown))
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks.values())})
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": [32, 32],
        "patch_size": [8, 8],
    }
    torch.manual_seed(seed)
    config = CONFIG_MAPPING["internvl"](
        text_config=_text_sizes(len(tokenizer)) | {"model_type": "qwen2"},
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "extra_special_tokens": marks}))
    GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, crop_to_patches=True, max_patches=4
    ).save_pretrained(folder)
    settings = {"processor_class": "InternVLProcessor", "image_seq_length": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def save_smolvlm(folder: Path, seed: int = 0, kind: str = "smolvlm") -> Path:
    """Return a SmolVLM2 or Idefics3 checkpoint: 4 tokens a tile of 32 pixels, 2 x 2 tiles at most.

    Its template shows no videos, as that of the published ones.
    """
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    tokenizer = byte_tokenizer(SMOLVLM_TEMPLATE)
    places = [f"<row_{row}_col_{at}>" for row in (1, 2) for at in (1, 2)]
    marks = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>", "<video>", *places]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.eos_token = "<end_of_utterance>"
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](
        text_config=_text_sizes(len(tokenizer))
        | {"model_type": "llama", "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
        vision_config={key: size for key, size in _TOWER.items() if key != "num_hidden_layers"}
        | {"num_hidden_layers": 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    SmolVLMImageProcessorPil(
        size={"longest_edge": 64},
        max_image_size={"longest_edge": 32},
        video_sampling={"fps": 1, "max_frames": 6, "video_size": {"longest_edge": 32}},
    ).save_pretrained(folder)
    name = {"smolvlm": "SmolVLMProcessor", "idefics3": "Idefics3Processor"}[kind]
    settings = {"processor_class": name, "image_seq_len": 4}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def save_idefics3(folder: Path, seed: int = 0) -> Path:
    """Return an Idefics3 checkpoint, see :func:`save_smolvlm`."""
    return save_smolvlm(folder, seed, "idefics3")


def save_mistral3(folder: Path, seed: int = 0) -> Path:
    """Return a Mistral 3 checkpoint: pictures of any size, 16 x 16 pixels a token."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    template = LLAVA_TEMPLATE.replace("<image>\n", "[IMG]")
    tokenizer = byte_tokenizer(template)
    marks = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    torch.manual_seed(seed)
    config = CONFIG_MAPPING["mistral3"](
        text_config=_text_sizes(len(tokenizer)) | {"model_type": "mistral", "sliding_window": None},
        vision_config=_TOWER | {"model_type": "pixtral", "image_size": 128},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size=8).save_pretrained(folder)
    settings = {"processor_class": "PixtralProcessor", "patch_size": 8, "spatial_merge_size": 2}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def picture(colour: str = "red", size: tuple[int, int] = (40, 24)) -> Image.Image:
    return Image.new("RGB", size, colour)


def script(monkeypatch: pytest.MonkeyPatch, engine: Engine, replies: list[str]) -> None:
    """Make the model say ``replies``: each is spelled out and ended, whatever the logits are."""
    tokenizer = engine.processor.tokenizer
    spelled = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in replies]
    queue = [token for reply in spelled for token in reply]
    monkeypatch.setattr(mmkv.reply.Sampler, "draw", lambda *_: queue.pop(0))


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the ids that sessions are fed, in order."""
    fed: list[int] = []
    prefill, decode = Session.prefill, Engine.decode

    def prefilling(self: Session, inputs: Any, progress: Any = None) -> torch.Tensor:
        fed.extend(inputs["input_ids"][0].tolist())
        return prefill(self, inputs, progress)

    def decoding(self: Engine, sessions: Any, tokens: Any, guesses: Any = None) -> torch.Tensor:
        fed.extend(tokens)
        return decode(self, sessions, tokens, guesses)

    monkeypatch.setattr(Session, "prefill", prefilling)
    monkeypatch.setattr(Engine, "decode", decoding)
    return fed


def new_repl(engine: Engine, model: str, **changes: Any) -> Repl:
    """Return a chat of short replies."""
    options = ChatOptions(max_new_tokens=5, **changes)
    options.engine = options.engine.__class__(model=model, policy="snapkv", budget=16)
    return Repl(engine, options, Display(options), [], [])
