"""Write checkpoints as GGUF, as llama.cpp's converter documents it; names are the package's own."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
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
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen3_vl_text": "qwen3vl",
    "qwen3_vl_moe_text": "qwen3vlmoe",
    "qwen2_vl_text": "qwen2vl",
    "qwen2_5_vl_text": "qwen2vl",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "glm4": "glm4",
    "glm4v_text": "glm4",
}
_OFFSET = ("gemma3", "qwen35", "qwen35moe")  # whose gains are 1 + weight in transformers
_PROJECTORS = {
    "llava": "mlp",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "gemma3": "gemma3",
}
_MARKS = {
    IMAGE_ID: "<|image_pad|>",
    VIDEO_ID: "<|video_pad|>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
}
_Change = tuple[Callable[[np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]] | None
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
        architecture: of the text's file, where several have such a model.
        metadata: of the text's file, by the package's keys; None: there is no such entry.
        more: further tensors of it; None: there is no such tensor.
    """

    def __init__(
        self,
        source: Path,
        folder: Path,
        kind: Kind,
        split: int = 0,
        architecture: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        more: Mapping[str, np.ndarray | None] | None = None,
        **settings: Any,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._split, self._metadata, self._more = split, metadata or {}, more or {}
        self._architecture = architecture
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
        name = self._architecture or ARCHITECTURES[config["model_type"]]
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
        self._write_rope(writer, name, config, width)
        if "num_local_experts" in config or "num_experts" in config:
            writer.add_expert_count(config.get("num_local_experts", config.get("num_experts")))
            writer.add_expert_used_count(config["num_experts_per_tok"])
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in config:
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        if name.startswith("qwen35"):
            writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
            writer.add_ssm_state_size(config["linear_key_head_dim"])
            writer.add_ssm_group_count(config["linear_num_key_heads"])
            values = config["linear_num_value_heads"]
            writer.add_ssm_time_step_rank(values)
            writer.add_ssm_inner_size(values * config["linear_value_head_dim"])
            writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
        if name in ("gemma3", "phi3"):
            writer.add_sliding_window(config.get("sliding_window") or 0)
        if name == "gemma3":
            local = [kind == "sliding_attention" for kind in config["layer_types"]]
            writer.add_sliding_window_pattern(local)
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
            theirs = names.get_name(plain.replace("dt_bias", "dt_proj.bias"), (".weight", ".bias"))
            assert theirs is not None, plain
            self._add(writer, theirs, ours, values, _change(name, plain, config))
        for plain, each in experts.items():
            theirs = names.get_name(plain, (".weight",))
            stack = [each[index] for index in range(len(each))]
            made = self._quantised(np.stack([values for _, values in stack]))
            writer.add_tensor(theirs, made[0], raw_dtype=made[1])
            for (ours, _), numbers in zip(stack, made[2], strict=True):
                self._numbers[ours] = torch.from_numpy(numbers.copy())
        for theirs, values in self._more.items():
            for part in writer.tensors:
                part.pop(theirs, None)
            if values is not None:
                writer.add_tensor(theirs, values)
        for key, value in self._metadata.items():
            set_metadata(writer, key.format(arch=name), value)
        finish(writer)

    def _write_rope(self, writer: Any, name: str, config: Mapping[str, Any], width: int) -> None:
        whole = config["rope_parameters"]
        rope = whole.get("full_attention", whole)
        writer.add_rope_freq_base(rope["rope_theta"])
        if "sliding_attention" in whole:
            writer.add_rope_freq_base_swa(whole["sliding_attention"]["rope_theta"])
        turned = int(width * rope.get("partial_rotary_factor", 1.0))
        side = turned // 6
        seeing = name.startswith("qwen35") or "vl" in name
        own = [turned // 2 - 2 * side, side, side] if seeing else []
        if sections := rope.get("mrope_section", own):
            writer.add_rope_dimension_sections([*sections, 0])
        if name in ("llama", "mistral3", "phi3", "glm4") or name.startswith("qwen35"):
            writer.add_rope_dimension_count(turned)
        match rope["rope_type"]:
            case "yarn":
                writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
                writer.add_rope_scaling_factor(rope["factor"])
                writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            case "linear":
                writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
                writer.add_rope_scaling_factor(rope["factor"])
            case "llama3":
                writer.add_tensor("rope_freqs.weight", _llama3(rope, width))
            case "longrope":
                old = rope["original_max_position_embeddings"]
                longer = config["max_position_embeddings"] / old
                writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
                writer.add_rope_scaling_orig_ctx_len(old)
                writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(longer) / np.log(old)))
                for part in ("long", "short"):
                    factors = np.array(rope[f"{part}_factor"], np.float32)
                    writer.add_tensor(f"rope_factors_{part}.weight", factors)
        if beta := rope.get("llama_4_scaling_beta"):
            writer.add_attn_temperature_scale(beta)

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
        width = vision.get("embed_dim", vision["hidden_size"])
        sizes = {
            "block_count": layers,
            "embedding_length": width,
            "feed_forward_length": int(width * vision["mlp_ratio"])
            if "mlp_ratio" in vision  # qwen2_vl reads no other
            else vision["intermediate_size"],
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
        if "qwen" in kind and pictures:
            size = pictures["size"]
            writer.add_uint32("clip.vision.image_min_pixels", size["shortest_edge"])
            writer.add_uint32("clip.vision.image_max_pixels", size["longest_edge"])
        if kind in ("llava", "gemma3"):
            writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision["layer_norm_eps"])
        if kind == "gemma3":
            each = int(config["mm_tokens_per_image"] ** 0.5) * vision["patch_size"]
            writer.add_uint32("clip.vision.projector.scale_factor", vision["image_size"] // each)
            writer.add_bool("clip.use_gelu", True)
        elif kind == "qwen2_5_vl":
            writer.add_uint32("clip.vision.n_wa_pattern", vision["fullatt_block_indexes"][0] + 1)
            writer.add_uint32("clip.vision.window_size", vision["window_size"])
        elif kind.startswith("qwen3"):
            deep = vision.get("deepstack_visual_indexes", [])
            marks = [n in deep for n in range(layers)]
            writer.add_array("clip.vision.is_deepstack_layers", marks)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(layers, 3))
        for ours, tensor in self._source.items():
            plain = re.sub(r"^model\.visual\.", "visual.", ours)
            plain = plain.replace("vision_tower.", "vision_tower.vision_model.")
            if not plain.startswith(("visual.", "vision_tower.", "multi_modal")):
                continue
            values = tensor.numpy()
            if plain.endswith(("mm_input_projection_weight", "mm_soft_emb_norm.weight")):
                shifts = (np.float32(1), np.float32(-1)) if "norm" in plain else (0, 0)
                change = tuple(functools.partial(np.add, np.float32(shift)) for shift in shifts)
                theirs = "mm.soft_emb_norm" if "norm" in plain else "mm.input_projection"
                self._add(writer, f"{theirs}.weight", ours, values, change)
            elif "multi_modal_projector.linear_" in plain:
                number = 0 if "linear_1" in plain else 2
                self._add(writer, f"mm.{number}.{plain.rpartition('.')[2]}", ours, values)
            elif plain.endswith("visual.patch_embed.proj.weight"):
                first, second = np.ascontiguousarray(np.moveaxis(values, 2, 0))
                for end, frame in (("", first), (".1", second)):
                    writer.add_tensor(f"v.patch_embd.weight{end}", frame)
                self._numbers[ours] = tensor
            elif kind in ("qwen2_vl", "qwen2_5_vl") and ".qkv." in plain:
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

    def _add(
        self, writer: Any, theirs: str, ours: str, values: np.ndarray, change: _Change = None
    ) -> None:
        there, back = change or (_same, _same)
        stored, kind, numbers = self._quantised(np.ascontiguousarray(there(values)))
        writer.add_tensor(theirs, stored, raw_dtype=kind)
        self._numbers[ours] = torch.from_numpy(np.ascontiguousarray(back(numbers)))

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
    writer.add_token_merges(["\u0120 \u0120"])  # of no tokens; llama.cpp wants one
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


def set_metadata(writer: Any, key: str, value: Any) -> None:
    """Replace an entry; None: there is none."""
    for part in writer.kv_data:
        part.pop(key, None)
    kinds = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
    if value is not None:
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)


def _same(values: np.ndarray) -> np.ndarray:
    return values


def _change(name: str, plain: str, config: Mapping[str, Any]) -> _Change:
    """Return how llama.cpp's converter changes the numbers of a tensor, and the way back."""
    width = config["head_dim"]
    delta = re.search(r"linear_attn\.(\w+)", plain)
    if name in ("llama", "mistral3") and re.search(r"[qk]_proj\.", plain):
        return _heads(width, lambda rows: rows.reshape(2, -1, rows.shape[-1]).swapaxes(0, 1))
    if config["model_type"] == "glm4v_text" and re.search(r"[qk]_proj\.", plain):
        turned = int(width * config["rope_parameters"]["partial_rotary_factor"])
        order = [*range(0, turned, 2), *range(1, turned, 2), *range(turned, width)]
        return _heads(width, lambda rows: rows[order])
    if delta is None and plain.endswith("norm.weight") and name in _OFFSET:
        return lambda gains: gains + np.float32(1), lambda gains: gains - np.float32(1)
    if delta is None or delta[1] == "norm":
        return None
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    each = 1 if delta[1] in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else 0
    each = each or config["linear_value_head_dim"]
    tiled = np.arange(values).reshape(keys, -1).T.reshape(-1, 1) * each + np.arange(each)
    order = tiled.reshape(-1)
    if delta[1] in ("in_proj_qkv", "conv1d"):
        first = 2 * keys * config["linear_key_head_dim"]
        order = np.concatenate([np.arange(first), first + order])
    back = np.argsort(order)
    match delta[1]:
        case "A_log":
            return (
                lambda logs: -np.exp(logs[order]),
                lambda decays: torch.from_numpy(-decays[back]).log().numpy(),
            )
        case "conv1d":
            return lambda rows: rows[order, 0], lambda rows: rows[back][:, None]
        case "out_proj":
            return lambda rows: rows[:, order], lambda rows: rows[:, back]
    return lambda rows: rows[order], lambda rows: rows[back]


def _heads(width: int, turn: Callable[[np.ndarray], np.ndarray]) -> _Change:
    """Return a change of the rows of each head of that width."""
    order = turn(np.arange(width)[:, None]).reshape(-1)

    def by(own: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        return lambda rows: rows.reshape(-1, width, *rows.shape[1:])[:, own].reshape(rows.shape)

    return by(order), by(np.argsort(order))


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
