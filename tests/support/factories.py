"""Small random checkpoints of every family, and inputs shaped like a processor's. No network.

Weights are scaled so that attention is uneven and greedy tokens vary: with tiny standard
deviations every model repeats one token and most bugs stay invisible.
"""

from __future__ import annotations

import functools
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from tests.support.model_configs import (
    IMAGE_ID,
    LINE,
    LINEAR,
    PATCH,
    PINPOINTS,
    SIDE,
    TEXT_IDS,
    TILE,
    VIDEO_END,
    VIDEO_ID,
    VIDEO_START,
    VISION_END,
    VISION_START,
    Checkpoint,
    config_of,
)

_home = tempfile.TemporaryDirectory(prefix="mmkv-checkpoints-")


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


def _long_rope(rot: int, original: int) -> dict[str, Any]:
    sizes = {"original_max_position_embeddings": original}
    factors = {
        "short_factor": [1.0 + 0.05 * i for i in range(rot // 2)],
        "long_factor": [1.5 + 0.4 * i for i in range(rot // 2)],
    }
    rope = _rope("longrope", **factors, **sizes, partial_rotary_factor=0.5)
    return {"max_position_embeddings": 512, **sizes, **rope}


_LLAMA3 = _rope(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=64)
_HALF_TURNED = _rope("default", partial_rotary_factor=0.5)
# Queries of later positions are scaled.
_SCALED = _rope("yarn", factor=4.0, original_max_position_embeddings=192, llama_4_scaling_beta=0.1)

# Three experts of eight; the first layer of the variant is dense.
_MIXED: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [],
}

# Two windowed layers to a global one, whose positions are scaled and whose angles are others.
_GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 20,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

# Only the global layers' angles have a factor.
_GEMMA_YARN = _GEMMA | {
    "rope_parameters": _GEMMA["rope_parameters"] | {"full_attention": _YARN["rope_parameters"]}
}

CHECKPOINTS: dict[str, Checkpoint] = {
    "qwen3_vl": Checkpoint("qwen3_vl", 6, 2, 32, layers=3, tied=True),
    "qwen3_vl_group8": Checkpoint("qwen3_vl", 8, 1, 64, layers=3, seed=1),
    "qwen3_vl_dim128": Checkpoint("qwen3_vl", 2, 2, 128, layers=3, seed=2),
    "qwen3_vl_moe": Checkpoint("qwen3_vl_moe", 4, 2, 32, text=_MIXED),
    "qwen2_5_vl": Checkpoint("qwen2_5_vl", 6, 2, 32, layers=2, tied=True),
    "qwen2_5_vl_dim128": Checkpoint("qwen2_5_vl", 2, 1, 128, seed=2),
    "qwen3_5": Checkpoint("qwen3_5", 4, 2, 32, layers=4, tied=True, text=LINEAR),
    "qwen3_5_text": Checkpoint("qwen3_5_text", 2, 1, 64, layers=4, text=LINEAR, seed=1),
    "qwen3_5_moe": Checkpoint(
        "qwen3_5_moe",
        4,
        1,
        32,
        layers=4,
        text=LINEAR | _MIXED | {"shared_expert_intermediate_size": 40},
    ),
    "qwen2_vl": Checkpoint("qwen2_vl", 4, 2, 32, tied=True),
    "smolvlm": Checkpoint("smolvlm", 3, 1, 64, text_type="llama"),
    "idefics3": Checkpoint("idefics3", 4, 2, 32, tied=True, text_type="llama"),
    "mistral3": Checkpoint(
        "mistral3", 4, 1, 32, text_type="mistral", text={"sliding_window": None}
    ),
    "mistral3_ministral": Checkpoint("mistral3", 2, 2, 32, text_type="ministral3", text=_SCALED),
    "llava": Checkpoint("llava", 8, 2, 64, text_type="llama"),
    "llava_mistral": Checkpoint(
        "llava",
        3,
        3,
        32,
        text_type="mistral",
        text={"sliding_window": None},
        extra={"vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"},
    ),
    "llava_qwen2": Checkpoint("llava", 6, 2, 32, tied=True, text_type="qwen2"),
    "llava_next": Checkpoint("llava_next", 2, 2, 128, text_type="llama"),
    "llava_next_mistral": Checkpoint(
        "llava_next", 8, 2, 32, text_type="mistral", text={"sliding_window": None}
    ),
    "llava_next_video": Checkpoint("llava_next_video", 4, 2, 32, text_type="llama", seed=1),
    "llava_onevision": Checkpoint("llava_onevision", 6, 2, 32, tied=True, text_type="qwen2"),
    "internvl": Checkpoint("internvl", 6, 2, 32, text_type="qwen2", seed=1),
    "photos": Checkpoint("mmkv_photos", 6, 2, 32, tied=True, text_type="llama"),
    "gemma3": Checkpoint("gemma3", 4, 2, 32, layers=3, tied=True, text=_GEMMA),
    "gemma3_wide": Checkpoint(
        "gemma3", 2, 1, 64, layers=3, text=_GEMMA | {"sliding_window": 400}, seed=1
    ),
    "glm4v": Checkpoint("glm4v", 6, 2, 32, layers=3),
    "glm46v": Checkpoint("glm46v", 2, 1, 64, tied=True, seed=1),
    "gemma3_text": Checkpoint("gemma3_text", 4, 2, 32, layers=3, tied=True, text=_GEMMA_YARN),
    "glm4": Checkpoint("glm4", 4, 2, 32, text=_HALF_TURNED | {"attention_bias": True}),
    "qwen3_moe": Checkpoint("qwen3_moe", 4, 2, 32, text=_MIXED | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": Checkpoint(
        "qwen3_moe", 4, 1, 32, tied=True, text=_MIXED | {"mlp_only_layers": [0]}
    ),
    "qwen3": Checkpoint("qwen3", 4, 1, 128, tied=True),
    "qwen3_yarn": Checkpoint("qwen3", 2, 2, 64, text=_YARN),
    "qwen2": Checkpoint("qwen2", 4, 4, 64),
    "qwen2_sliding": Checkpoint(
        "qwen2",
        6,
        2,
        32,
        layers=3,
        tied=True,
        text={"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "llama": Checkpoint("llama", 3, 1, 64, tied=True, text=_LLAMA3),
    "llama_biased": Checkpoint("llama", 8, 2, 32, text={"attention_bias": True, "mlp_bias": True}),
    "mistral": Checkpoint("mistral", 8, 1, 32, text={"sliding_window": 24}),
    "ministral": Checkpoint(
        "ministral",
        4,
        2,
        32,
        text={"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "ministral3": Checkpoint("ministral3", 4, 2, 32, text=_SCALED),
    "phi3": Checkpoint("phi3", 4, 4, 64, text=_long_rope(32, original=256)),
    "phi3_long": Checkpoint("phi3", 3, 1, 32, text=_long_rope(16, original=16), seed=1),
    "phi3_sliding": Checkpoint("phi3", 6, 2, 32, tied=True, text={"sliding_window": 24}),
}

QWEN_VL = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe")
GLM = ("glm4v", "glm46v")
# Pictures are tiles behind one another; their number is in that of the tokens. Frames are pictures.
IN_TILES = ("internvl", "smolvlm", "idefics3")

# Inputs with a number for each token.
ROWS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")

# One checkpoint of each family.
FAMILIES = {spec.model_type: name for name, spec in reversed(CHECKPOINTS.items())}.values()


@functools.cache
def checkpoint(name: str) -> Path:
    """Return the folder of checkpoint ``name``, built on first use and removed with the process."""
    folder = Path(_home.name) / name
    make_model(CHECKPOINTS[name]).save_pretrained(folder)
    return folder


def stored_in_bfloat16(name: str, folder: Path) -> Path:
    """Write checkpoint ``name`` with its tensors in bfloat16, as those on the hub; ``folder``."""
    shutil.copytree(checkpoint(name), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    narrow = {part: tensor.bfloat16() for part, tensor in tensors.items()}
    save_file(narrow, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_model(spec: Checkpoint) -> Any:
    """Return the transformers model of a checkpoint, float32, with lively random weights."""
    config = config_of(spec)
    sees = hasattr(config, "vision_config")
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = kind.from_config(config)
    enliven(model, spec.seed)
    if spec.model_type == "mmkv_photos":
        table, source = model.model.multi_modal_projector, torch.Generator().manual_seed(spec.seed)
        table.lines.copy_(
            torch.randint(len(table.words.weight), table.lines.shape, generator=source)
        )
    model.generation_config = transformers.GenerationConfig()
    return model.float().eval()


@torch.no_grad()
def enliven(model: Any, seed: int) -> None:
    """Fill every parameter with seeded noise of a size that keeps signals alive."""
    source = torch.Generator().manual_seed(seed)
    gemma = "Gemma3" in type(model).__name__  # adds 1 to its gains, and scales its embeddings
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=source)
        if name.endswith(("A_log", "dt_bias")):  # of heads that forget in a few tokens, or in many
            weight.copy_(noise - 1)
        elif "norm" in name and name.endswith("weight"):
            # Sharper attention where queries and keys are normed: their matrices cannot do it.
            weight.copy_(1 - gemma + ("q_norm" in name) + 0.2 * noise)
        elif weight.dim() == 1:
            weight.copy_(0.2 * noise)
        elif "embed" in name and "patch" not in name:
            # Small beside the layers' output, or a tied model echoes its input.
            weight.copy_(0.1 * noise / (weight.shape[1] ** 0.5 if gemma else 1))
        else:
            sharp = any(part in name for part in ("q_proj", "k_proj", "qkv_proj"))
            inputs = weight.shape[-1] if "experts" in name else weight[0].numel()
            weight.copy_((1.5 if sharp else 1.0) * noise / math.sqrt(inputs))


# A turn is written as pieces: 12 (so many text tokens), ("image", height, width) in pixels,
# or ("video", frames, height, width).
Piece = int | tuple[Any, ...]


def make_turn(name: str, pieces: Sequence[Piece], seed: int = 0) -> dict[str, Tensor]:
    """Return the inputs of one turn for checkpoint ``name``, as its processor would return them."""
    source = torch.Generator().manual_seed(seed)
    family = CHECKPOINTS[name].model_type
    ids: list[int] = []
    pictures: list[tuple[int, int]] = []
    videos: list[tuple[int, int, int]] = []
    lone = sum(not isinstance(piece, int) and piece[0] == "image" for piece in pieces) == 1
    for piece in pieces:
        if isinstance(piece, int):
            ids += torch.randint(3, TEXT_IDS, (piece,), generator=source).tolist()
        elif piece[0] == "image":
            pictures.append(piece[1:])
            ids += _image_ids(CHECKPOINTS[name], piece[1:], lone)
        else:
            videos.append(piece[1:])
            ids += _video_ids(family, piece[1:], source)
    tokens = torch.tensor([ids])
    turn = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    noise = functools.partial(torch.randn, generator=source)
    if family in (*QWEN_VL, *GLM):
        # As the processor does, also for text.
        kinds = (tokens == IMAGE_ID).int() + 2 * (tokens == VIDEO_ID).int()
        if family in GLM:
            begun, ended = ((tokens == each).cumsum(1) for each in (VIDEO_START, VIDEO_END))
            kinds += ((tokens == IMAGE_ID) & (begun > ended)).int()
        turn["mm_token_type_ids"] = kinds
        if pictures:
            turn |= _patches([(1, *size) for size in pictures], "pixel_values", "image", noise)
        if videos:
            # Two frames make one temporal patch.
            grids = [(frames // 2, high, wide) for frames, high, wide in videos]
            turn |= _patches(grids, "pixel_values_videos", "video", noise)
            if family == "qwen2_5_vl":
                # Of one and a half frames a second: 4/3 s between two patches.
                turn["second_per_grid_ts"] = torch.full((len(videos),), 2 / 1.5)
        return turn
    if family == "gemma3":  # pictures see all of themselves
        turn["token_type_ids"] = (tokens == IMAGE_ID).int()
    if pictures:
        turn |= _tiles(family, pictures, lone, noise)
    if videos and family in IN_TILES:
        nested = int(family != "internvl")
        pixels = [turn[key] for key in ("pixel_values",) if key in turn]
        pixels += [noise(*[1] * nested, count, 3, TILE, TILE) for count, _, _ in videos]
        turn["pixel_values"] = torch.cat(pixels, nested)
    elif videos:
        frames = [noise(count, 3, TILE, TILE) for count, _, _ in videos]
        turn["pixel_values_videos"] = torch.stack(frames)
    return turn


def join_turns(*turns: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the whole conversation at once, for the transformers reference."""
    joined: dict[str, Tensor] = {}
    for key in {key: None for turn in turns for key in turn}:
        parts = [turn[key] for turn in turns if key in turn]
        row_wise = key in ROWS
        if key == "pixel_values":
            parts = _pad_tiles(parts)
        joined[key] = torch.cat(parts, dim=1 if row_wise else 0)
    return joined


def pad_left(turns: Sequence[dict[str, Tensor]], pad_id: int = 0) -> dict[str, Tensor]:
    """Return a left-padded batch of several turns, for the transformers reference."""
    width = max(turn["input_ids"].shape[1] for turn in turns)
    rows: dict[str, list[Tensor]] = {}
    for turn in turns:
        missing = width - turn["input_ids"].shape[1]
        for key, value in turn.items():
            if key in ROWS:
                fill = pad_id if key == "input_ids" else 0
                value = torch.nn.functional.pad(value, (missing, 0), value=fill)
            rows.setdefault(key, []).append(value)
    if "pixel_values" in rows:
        rows["pixel_values"] = _pad_tiles(rows["pixel_values"])
    return {key: torch.cat(values) for key, values in rows.items()}


def _image_ids(spec: Checkpoint, size: tuple[int, int], lone: bool) -> list[int]:
    family = spec.model_type
    if family in (*QWEN_VL, *GLM):
        count = (size[0] // PATCH // 2) * (size[1] // PATCH // 2)
        return [VISION_START, *[IMAGE_ID] * count, VISION_END]
    if family == "gemma3":
        return [VISION_START, *[IMAGE_ID] * (SIDE * SIDE // 4), VISION_END]
    if family == "internvl":
        whole = _tile_count(size) * SIDE * SIDE // 4
        return [VISION_START, *[IMAGE_ID] * whole, VISION_END]
    if family in IN_TILES:  # their places in the picture stand before the tiles
        tiles = [(VISION_START, 3 + i, *[IMAGE_ID] * 4) for i in range(_split_count(size))]
        return [*(token for tile in tiles for token in tile), VISION_END]
    if family == "mistral3":
        row = [*[IMAGE_ID] * (size[1] // PATCH // 2), VISION_START]
        return [*(row * (size[0] // PATCH // 2))[:-1], VISION_END]
    if family == "mmkv_photos":
        return [IMAGE_ID] * LINE
    if family == "llava":
        whole = spec.extra.get("vision_feature_select_strategy") == "full"
        return [IMAGE_ID] * (SIDE * SIDE + whole)
    if family == "llava_onevision" and not lone:
        return [IMAGE_ID] * (SIDE * SIDE + 1)
    return [IMAGE_ID] * _anyres_tokens(size, 2 if family == "llava_onevision" else None)


def _video_ids(family: str, size: tuple[int, int, int], source: torch.Generator) -> list[int]:
    frames, high, wide = size
    if family == "llava_onevision":
        return [VIDEO_ID] * (frames * math.ceil(SIDE / 2) ** 2 + 1)
    if family == "llava_next_video":
        return [VIDEO_ID] * (frames * (SIDE // 2) ** 2)
    if family in IN_TILES:
        frame = [VISION_START, *[IMAGE_ID] * (SIDE * SIDE // 4), VISION_END]
        return [token for index in range(frames) for token in (3 + index, *frame)]
    if family in ("qwen2_5_vl", "qwen2_vl"):
        count = (frames // 2) * (high // PATCH // 2) * (wide // PATCH // 2)
        return [VISION_START, *[VIDEO_ID] * count, VISION_END]
    ids: list[int] = []
    if family in GLM:
        count = (high // PATCH // 2) * (wide // PATCH // 2)
        for _ in range(frames // 2):  # a timestamp stands behind each temporal patch
            ids += [VISION_START, *[IMAGE_ID] * count, VISION_END]
            ids += torch.randint(3, TEXT_IDS, (3,), generator=source).tolist()
        return [VIDEO_START, *ids, VIDEO_END]
    for _ in range(frames // 2):
        # A timestamp of a few text tokens stands before each temporal patch.
        ids += torch.randint(3, TEXT_IDS, (3,), generator=source).tolist()
        ids += [VISION_START, *[VIDEO_ID] * ((high // PATCH // 2) * (wide // PATCH // 2))]
        ids.append(VISION_END)
    return ids


def _patches(
    grids: Sequence[tuple[int, int, int]], key: str, noun: str, noise: Callable[..., Tensor]
) -> dict[str, Tensor]:
    grid = torch.tensor([(time, high // PATCH, wide // PATCH) for time, high, wide in grids])
    return {
        key: noise(int(grid.prod(-1).sum()), 3 * 2 * PATCH * PATCH),
        f"{noun}_grid_thw": grid,
    }


def _tiles(
    family: str, sizes: Sequence[tuple[int, int]], lone: bool, noise: Callable[..., Tensor]
) -> dict[str, Tensor]:
    if family in ("llava", "mmkv_photos", "gemma3"):
        return {"pixel_values": noise(len(sizes), 3, TILE, TILE)}
    if family == "internvl":
        return {"pixel_values": noise(sum(map(_tile_count, sizes)), 3, TILE, TILE)}
    if family in IN_TILES:
        return {"pixel_values": noise(1, sum(map(_split_count, sizes)), 3, TILE, TILE)}
    if family == "mistral3":
        pixels = _pad_tiles([noise(1, 3, *size) for size in sizes])
        return {"pixel_values": torch.cat(pixels), "image_sizes": torch.tensor(sizes)}
    tiled = family in ("llava_next", "llava_next_video") or lone
    counts = [_tile_count(size) if tiled else 1 for size in sizes]
    pixels = [noise(1, count, 3, TILE, TILE) for count in counts]
    made = {"pixel_values": torch.cat(_pad_tiles(pixels)), "image_sizes": torch.tensor(sizes)}
    if family == "llava_onevision":
        made["batch_num_images"] = torch.tensor([len(sizes)])
    return made


def _tile_count(size: tuple[int, int]) -> int:
    high, wide = select_best_resolution(size, PINPOINTS)
    return 1 + (high // TILE) * (wide // TILE)


def _split_count(size: tuple[int, int]) -> int:
    tiles = math.ceil(size[0] / TILE) * math.ceil(size[1] / TILE)
    return tiles + 1 if tiles > 1 else 1


def _anyres_tokens(size: tuple[int, int], most_tiles: int | None) -> int:
    """Return thumbnail plus the tiles, without the rows or columns that were padding, plus row
    ends.
    """
    high, wide = (edge // TILE * SIDE for edge in select_best_resolution(size, PINPOINTS))
    if size[1] / size[0] > wide / high:
        high -= 2 * ((high - int(round(size[0] * (wide / size[1]), 7))) // 2)
    else:
        wide -= 2 * ((wide - int(round(size[1] * (high / size[0]), 7))) // 2)
    if most_tiles is not None:
        ratio = math.sqrt(high * wide / (most_tiles * SIDE * SIDE))
        if ratio > 1.1:
            high, wide = int(high // ratio), int(wide // ratio)
    return SIDE * SIDE + high * (wide + 1)


def _pad_tiles(pixels: list[Tensor]) -> list[Tensor]:
    """Fill up with zeros to the most tiles, height and width (all axes but the first)."""
    most = [max(sizes) for sizes in zip(*(part.shape for part in pixels), strict=True)]
    made = []
    for part in pixels:
        missing = [most[axis] - part.shape[axis] for axis in range(1, part.dim())]
        ends = [end for count in reversed(missing) for end in (0, count)]
        made.append(torch.nn.functional.pad(part, ends))
    return made
