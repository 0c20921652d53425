"""Write checkpoints for engines that read files: random weights, or a part of the bundled model.

:mod:`benchmarks.bench.shapes` has the sizes of text decoders for models built in memory. Here a
whole vision-language model in a published shape gets a folder that transformers, mmkv and
OpenVINO's exporter load: one tensor at a time, so that it takes little memory. Tokenizer and
processor are the bundled model's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mmkv.resources import bundled_model

# Bytes of one file of weights.
_FILE_BYTES = 2**30
# config.json of Qwen3-VL-2B-Instruct, without what has no part in speed.
_TEXT = {
    "model_type": "qwen3_vl_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
        "rope_theta": 5e6,
        "rope_type": "default",
    },
}
_VISION = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "depth": 24,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}
# Changes of the bundled model's configuration: what the text half and the tower have.
CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-2b": (_TEXT, _VISION),
    "qwen3-vl-tiny": ({}, {}),
}
# Bounds on the pixels of a picture and of a video, as the published model has them.
_SIZES = {
    "preprocessor_config.json": {"shortest_edge": 65536, "longest_edge": 16777216},
    "video_preprocessor_config.json": {"shortest_edge": 4096, "longest_edge": 25165824},
}


@torch.no_grad()
def write_checkpoint(name: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint of :data:`CHECKPOINTS` in bfloat16 to ``folder``; it appears when whole.

    Matrices are drawn from N(0, 0.02^2), gains are 1, biases 0.
    """
    import transformers

    draft = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    source = bundled_model()
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", *_SIZES):
        shutil.copyfile(source / file, draft / file)
    for file, size in _SIZES.items():
        own = json.loads((draft / file).read_text())
        own = {key: value for key, value in own.items() if not key.endswith("_pixels")}
        (draft / file).write_text(json.dumps(own | {"size": size}))
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    for part, changes in zip(("text_config", "vision_config"), CHECKPOINTS[name], strict=True):
        config[part] |= {**changes, "dtype": "bfloat16"}
    (draft / "config.json").write_text(json.dumps(config, indent=1))
    settings = transformers.AutoConfig.from_pretrained(draft)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(settings)
    _write_tensors(model.state_dict(), draft, seed)
    draft.rename(folder)
    return folder


def write_gates(model: Path, folder: Path, width: int = 512) -> Path:
    """Write untrained gates for a checkpoint with trunks of the published ``width``."""
    import transformers

    from mmkv.engine.model.gates.files import save_gates
    from mmkv.engine.model.gates.module import make_random_gates
    from mmkv.engine.model.spec import DecoderSpec

    config = transformers.AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        made = transformers.AutoModelForImageTextToText.from_config(config)
    decoder = made.model.language_model
    decoder.rotary_emb = type(decoder.rotary_emb)(config.text_config)  # with its frequencies
    spec = DecoderSpec.from_hf(decoder)
    save_gates(make_random_gates(spec, d_gate=width), folder, spec, torch.bfloat16)
    return folder


def _write_tensors(shapes: Mapping[str, torch.Tensor], folder: Path, seed: int) -> None:
    """Write random tensors of these shapes in files of a gigabyte; a tied head is left out."""
    generator = torch.Generator().manual_seed(seed)
    held: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    size = 0

    def write() -> None:
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(held, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(held, file))
        held.clear()

    for name, like in shapes.items():
        if name == "lm_head.weight":
            continue
        value = torch.empty(like.shape, dtype=torch.bfloat16)
        if like.dim() > 1:
            value.normal_(0.0, 0.02, generator=generator)
        else:
            value.fill_(0.0 if name.endswith("bias") else 1.0)
        held[name] = value
        size += value.nbytes
        if size >= _FILE_BYTES:
            write()
            size = 0
    if held:
        write()
    total = sum(like.numel() * 2 for name, like in shapes.items() if name in index)
    page = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(page))


# Small checkpoints of the bundled model's sizes, for servers.

NEVER = 642  # a token that these models do not draw, in place of the end of a reply


def write_text_model(folder: Path) -> Path:
    """Write the bundled model's text half as a Qwen3 checkpoint, and return its folder.

    With all three axes of a position alike, as those of text are, M-RoPE is plain RoPE.
    """
    source, text = bundled_model(), "model.language_model."
    config = json.loads((source / "config.json").read_text())["text_config"]
    rope = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    tensors = load_file(source / "model.safetensors")
    part = {
        name.replace(text, "model."): tensor
        for name, tensor in tensors.items()
        if name.startswith(text)
    }
    save_file(part, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())
    return folder


def write_llava(folder: Path) -> Path:
    """Write a LLaVA of the bundled model's sizes with random weights: 256 tokens a picture.

    Its file is float32, and bfloat16 holds its numbers, as it does those of published models.
    """
    import torch
    from transformers import (
        AutoTokenizer,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    source = bundled_model()
    given = json.loads((source / "config.json").read_text())
    text, vision = given["text_config"], given["vision_config"]
    names = "vocab_size hidden_size intermediate_size num_hidden_layers head_dim"
    names += " num_attention_heads num_key_value_heads max_position_embeddings"
    sizes = {name: text[name] for name in names.split()}
    side, patch = 224, 14  # pixels of a picture
    tokenizer = AutoTokenizer.from_pretrained(source)
    template = (source / "chat_template.jinja").read_text()
    torch.manual_seed(0)
    config = LlavaConfig(
        text_config={"model_type": "llama", **sizes, "bos_token_id": None, "eos_token_id": NEVER},
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": vision["hidden_size"],
            "intermediate_size": vision["intermediate_size"],
            "num_hidden_layers": vision["depth"],
            "num_attention_heads": vision["num_heads"],
            "image_size": side,
            "patch_size": patch,
        },
        image_token_index=given["image_token_id"],
        image_seq_length=(side // patch) ** 2,
        eos_token_id=NEVER,
    )
    model = LlavaForConditionalGeneration(config).bfloat16().float()
    texts = tokenizer.batch_decode(
        [[token] for token in range(config.text_config.vocab_size)], True
    )
    silent = [token for token, text in enumerate(texts) if not (text.isascii() and text.strip())]
    model.lm_head.weight.data[[*silent, NEVER]] = 0  # another token is always likelier
    model.save_pretrained(folder)
    pictures = CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        chat_template=template,
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    _rename_end(folder)
    return folder


def write_endless_text_model(folder: Path) -> Path:
    """Write the bundled model's text half, with an end token that is never drawn."""
    made = write_text_model(folder)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"eos_token_id": NEVER}))
    _rename_end(made)
    return made


def _rename_end(folder: Path) -> None:
    """Have the tokenizer call a token the end that is never drawn."""
    from transformers import AutoTokenizer

    path = folder / "tokenizer_config.json"
    end = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(NEVER)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": end}))
