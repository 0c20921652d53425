"""Write checkpoints as GGUF, as llama.cpp's converter documents it; names are the package's own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from tests.support.model_configs import IMAGE_ID, VIDEO_ID, VISION_END, VISION_START, VOCAB

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen2_5_vl_text": "qwen2vl",
}
_PROJECTORS = {"llava": "mlp", "qwen2_5_vl": "qwen2.5vl_merger"}
_MARKS = {
    IMAGE_ID: "<|image_pad|>",
    VIDEO_ID: "<|video_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
}
# The package quantises no type with superblocks: their bytes are drawn, but for their scales, in
# float16 at these places.
_DRAWN = {Kind.Q4_K: (144, (0, 2)), Kind.Q5_K: (176, (0, 2)), Kind.Q6_K: (210, (208,))}


class Written:
    """Files in GGUF, and the checkpoint of the same numbers.

    Attributes:
        truth: a folder with the numbers that the package makes of the files' bytes.

    Args:
        split: tensors of each part of the text's file, whose first part has metadata alone; 0: it
            is whole.
    """

    def __init__(
        self, source: Path, folder: Path, kind: Kind, split: int = 0, **settings: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._split = split
        self.text, self.mmproj = folder / "model.gguf", folder / "mmproj.gguf"
        self.truth = folder / "truth"
        shutil.copytree(source, self.truth)
        self._source, self._kind = load_file(source / "model.safetensors"), kind
        self._random = np.random.default_rng(0)
        self._numbers: dict[str, torch.Tensor] = {}
        config = json.loads((source / "config.json").read_text())
        text = config.get("text_config", config)
        self._write_text(text, {**config, **text}, settings)
        if "vision_config" in config:
            self._write_tower(config)
        save_file(self._numbers, self.truth / "model.safetensors", {"format": "pt"})

    def _write_text(self, config: Mapping[str, Any], whole: Any, settings: Any) -> None:
        name = ARCHITECTURES[config["model_type"]]
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        pairs, width = config["num_key_value_heads"], config["head_dim"]
        writer = gguf.GGUFWriter(
            self.text, name, split_max_tensors=self._split, small_first_shard=bool(self._split)
        )
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(layers)
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        writer.add_head_count_kv(pairs)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rope = config["rope_parameters"]
        writer.add_rope_freq_base(rope["rope_theta"])
        if "mrope_section" in rope:
            writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(rope["factor"])
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope["rope_type"] == "llama3":
            writer.add_tensor("rope_freqs.weight", _llama3(rope, width))
        if config["model_type"] == "mistral" and config.get("sliding_window"):
            writer.add_sliding_window(config["sliding_window"])
        if "num_local_experts" in config:
            writer.add_expert_count(config["num_local_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if (self.truth / "tokenizer.json").is_file():
            add_byte_level(writer, self.truth)
        else:
            add_tokenizer(writer, **settings)
        names = gguf.get_tensor_name_map(
            {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[name], layers
        )
        experts: dict[str, dict[int, tuple[str, np.ndarray]]] = {}
        for ours, tensor in self._source.items():
            plain = re.sub(r"^(model\.language_model\.|language_model\.model\.)", "model.", ours)
            plain = plain.removeprefix("language_model.")
            if plain.startswith(("visual.", "model.visual.", "vision_tower.", "multi_modal")):
                continue
            values = tensor.numpy()
            one = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", plain)
            if one:
                experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = (ours, values)
                continue
            if plain.endswith(("experts.gate_up_proj", "experts.down_proj")):
                self._add_stack(writer, names, ours, plain, values)
                continue
            theirs = names.get_name(plain, (".weight", ".bias"))
            assert theirs is not None, plain
            turned = 0
            if name == "llama" and re.search(r"[qk]_proj\.", plain):
                turned = heads if "q_proj" in plain else pairs
            self._add(writer, theirs, ours, values, turned)
        for plain, each in experts.items():
            theirs = names.get_name(plain, (".weight",))
            stack = [each[index] for index in range(len(each))]
            made = self._quantised(np.stack([values for _, values in stack]))
            writer.add_tensor(theirs, made[0], raw_dtype=made[1])
            for (ours, _), numbers in zip(stack, made[2], strict=True):
                self._numbers[ours] = torch.from_numpy(numbers.copy())
        finish(writer)

    def _add_stack(self, writer: Any, names: Any, ours: str, plain: str, values: Any) -> None:
        """Write stacked experts, whose gate and up llama.cpp has apart."""
        at = plain.rpartition(".")[0]
        parts = {"down_proj": values}
        if plain.endswith("gate_up_proj"):
            gate, up = np.split(values, 2, 1)
            parts = {"gate_proj": gate, "up_proj": up}
        back = []
        for part, each in parts.items():
            made = self._quantised(np.ascontiguousarray(each))
            theirs = names.get_name(f"{at}.{part}.weight", (".weight",))
            writer.add_tensor(theirs, made[0], raw_dtype=made[1])
            back.append(made[2])
        self._numbers[ours] = torch.from_numpy(np.concatenate(back, 1))

    def _write_tower(self, config: Mapping[str, Any]) -> None:
        vision, kind = config["vision_config"], config["model_type"]
        writer = gguf.GGUFWriter(self.mmproj, "clip")
        writer.add_string("clip.projector_type", _PROJECTORS.get(kind, "qwen3vl_merger"))
        writer.add_bool("clip.has_vision_encoder", True)
        layers = vision.get("depth", vision.get("num_hidden_layers"))
        sizes = {
            "block_count": layers,
            "embedding_length": vision["hidden_size"],
            "feed_forward_length": vision["intermediate_size"],
            "attention.head_count": vision.get("num_heads", vision.get("num_attention_heads")),
            "patch_size": vision["patch_size"],
            "image_size": vision.get("image_size", 560),
        }
        for name, size in sizes.items():
            writer.add_uint32(f"clip.vision.{name}", size)
        pictures: dict[str, Any] = {}
        for name in ("processor_config.json", "preprocessor_config.json"):
            if (self.truth / name).is_file():
                found = json.loads((self.truth / name).read_text())
                pictures = found.get("image_processor", found)
        writer.add_array("clip.vision.image_mean", pictures.get("image_mean", [0.5] * 3))
        writer.add_array("clip.vision.image_std", pictures.get("image_std", [0.5] * 3))
        if kind != "llava" and pictures:
            size = pictures["size"]
            writer.add_uint32("clip.vision.image_min_pixels", size["shortest_edge"])
            writer.add_uint32("clip.vision.image_max_pixels", size["longest_edge"])
        if kind == "llava":
            writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
        elif kind == "qwen2_5_vl":
            writer.add_uint32("clip.vision.n_wa_pattern", vision["fullatt_block_indexes"][0] + 1)
            writer.add_uint32("clip.vision.window_size", vision["window_size"])
        else:
            deep = vision["deepstack_visual_indexes"]
            marks = [n in deep for n in range(layers)]
            writer.add_array("clip.vision.is_deepstack_layers", marks)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 3))
        for ours, tensor in self._source.items():
            plain = re.sub(r"^model\.visual\.", "visual.", ours)
            plain = plain.replace("vision_tower.", "vision_tower.vision_model.")
            if not plain.startswith(("visual.", "vision_tower.", "multi_modal")):
                continue
            values = tensor.numpy()
            if "multi_modal_projector.linear_" in plain:
                number = 0 if "linear_1" in plain else 2
                self._add(writer, f"mm.{number}.{plain.rpartition('.')[2]}", ours, values)
            elif plain.endswith("visual.patch_embed.proj.weight"):
                first, second = np.ascontiguousarray(np.moveaxis(values, 2, 0))
                for end, frame in (("", first), (".1", second)):
                    writer.add_tensor(f"v.patch_embd.weight{end}", frame)
                self._numbers[ours] = tensor
            elif kind == "qwen2_5_vl" and ".qkv." in plain:
                back = []
                for part, rows in zip("qkv", np.split(values, 3), strict=True):
                    made = self._quantised(rows)
                    theirs = names.get_name(plain.replace("qkv", part), (".weight", ".bias"))
                    writer.add_tensor(theirs, made[0], raw_dtype=made[1])
                    back.append(made[2])
                self._numbers[ours] = torch.from_numpy(np.concatenate(back))
            else:
                theirs = names.get_name(plain, (".weight", ".bias")) or _merger(plain, config)
                self._add(writer, theirs, ours, values)
        finish(writer)

    def _add(self, writer: Any, theirs: str, ours: str, values: np.ndarray, heads: int = 0) -> None:
        stored, kind, numbers = self._quantised(_turned(values, heads) if heads else values)
        writer.add_tensor(theirs, stored, raw_dtype=kind)
        if heads:
            numbers = _turned_back(numbers, heads)
        self._numbers[ours] = torch.from_numpy(np.ascontiguousarray(numbers))

    def _quantised(self, values: np.ndarray) -> tuple[np.ndarray, Kind, np.ndarray]:
        """Return bytes, their type, and the numbers that they stand for."""
        kind = self._kind
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        if values.ndim == 1 or values.ndim > 3 or values.shape[-1] % block:
            return values, Kind.F32, values
        if kind in _DRAWN:
            size, scales = _DRAWN[kind]
            shape = (*values.shape[:-1], values.shape[-1] // block, size)
            raw = self._random.integers(0, 256, shape, np.uint8)
            for at in scales:
                drawn = self._random.uniform(1e-4, 1e-3, shape[:-1]).astype(np.float16)
                raw[..., at : at + 2] = drawn[..., None].view(np.uint8)
            stored = raw.reshape(*values.shape[:-1], -1)
        else:
            stored = gguf.quantize(values, kind)
        return stored, kind, gguf.dequantize(stored, kind).reshape(values.shape)


def add_tokenizer(
    writer: Any, marks: Mapping[int, str] = _MARKS, count: int = VOCAB, **fields: Any
) -> None:
    """Write tokens that are found whole in a text; ``fields``: further metadata, as text."""
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([marks.get(index, f"t{index}") for index in range(count)])
    writer.add_token_types([control if index in marks else normal for index in range(count)])
    writer.add_token_merges([])
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)


def add_byte_level(writer: Any, folder: Path) -> None:
    """Write the byte-level tokenizer and the chat template of a checkpoint."""
    page = json.loads((folder / "tokenizer.json").read_text())
    special = {one["content"]: one["id"] for one in page["added_tokens"]}
    ids = page["model"]["vocab"] | special
    named = sorted(ids, key=ids.__getitem__)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(named)
    writer.add_token_types([kinds.CONTROL if t in special else kinds.NORMAL for t in named])
    writer.add_token_merges([" ".join(pair) for pair in page["model"]["merges"]])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text())


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _turned(values: np.ndarray, heads: int) -> np.ndarray:
    rows = values.shape[0] // heads // 2
    shaped = values.reshape(heads, 2, rows, *values.shape[1:])
    return np.ascontiguousarray(shaped.swapaxes(1, 2).reshape(values.shape))


def _turned_back(values: np.ndarray, heads: int) -> np.ndarray:
    rows = values.shape[0] // heads // 2
    return values.reshape(heads, rows, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _merger(plain: str, config: Mapping[str, Any]) -> str:
    """Return the name of a part of Qwen3-VL's mergers, which the package does not map."""
    stem, _, kind = plain.rpartition(".")
    level = re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(.+)", stem)
    if level:
        layer = config["vision_config"]["deepstack_visual_indexes"][int(level[1])]
        return f"v.deepstack.{layer}.{level[2].removeprefix('linear_')}.{kind}"
    whole = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
    return f"{whole[stem.removeprefix('visual.merger.')]}.{kind}"


def _llama3(rope: Mapping[str, Any], width: int) -> np.ndarray:
    """Return what Llama 3.1 divides its frequencies by, as the converter computes it."""
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    made = []
    for freq in 1.0 / rope["rope_theta"] ** (np.arange(0, width, 2) / width):
        wave = 2 * np.pi / freq
        if wave < old / high:
            made.append(1.0)
        elif wave > old / low:
            made.append(factor)
        else:
            smooth = (old / wave - low) / (high - low)
            made.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(made, np.float32)
