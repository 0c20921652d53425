"""Write what a GGUF file says beside its numbers as the small files of a checkpoint.

With these, transformers and mmkv read a GGUF file as they read a folder: ``config.json``,
``generation_config.json``, tokenizer, chat template, and the settings of pictures.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import ModelError
from mmkv.engine.model.gguf.file import PLAIN, SUFFIX, GgufFile, read_gguf, state
from mmkv.engine.model.gguf.text import TEXTS, text_config
from mmkv.engine.model.gguf.tokenizer import special, tokenizer_json, tokens
from mmkv.engine.paths import is_file, user_path

if TYPE_CHECKING:
    from tempfile import TemporaryDirectory

FILES, TOKENIZER = "gguf.json", "tokenizer.json"  # the first names the files of the numbers
# The kind of a projector, and the text architectures with it: the type of the whole model.
_SEEING = {
    ("qwen2vl_merger", "qwen2vl"): "qwen2_vl",
    ("qwen2.5vl_merger", "qwen2vl"): "qwen2_5_vl",
    ("qwen3vl_merger", "qwen3vl"): "qwen3_vl",
    ("qwen3vl_merger", "qwen3vlmoe"): "qwen3_vl_moe",
    ("qwen3vl_merger", "qwen35"): "qwen3_5",
    ("qwen3vl_merger", "qwen35moe"): "qwen3_5_moe",
    ("gemma3", "gemma3"): "gemma3",
    ("mlp", "llama"): "llava",
    ("mlp", "qwen2"): "llava",
}
# Tokens that end a reply wherever they are, beside those that a file names: llama.cpp's list.
_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"}
_ENDS |= {"<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]"}
_ENDS |= {"[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "[e~["}
_ENDS |= {"<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}
_ENDS |= {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|file_sep|>", "<|fim_repo|>"}
_ENDS |= {"<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}
_NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Most and fewest pixels of a picture, where the file does not say: as the makers have them.
_PIXELS = dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (3136, 12845056))
_NEWER = (65536, 16777216)
_PIXELS |= dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _NEWER)
# What stands for a picture in prompts; files may lack it.
_IMAGE = {"llava": "<image>", "gemma3": "<image_soft_token>"}
_QWEN_MARKS = {
    "image": "image_pad",
    "video": "video_pad",
    "vision_start": "vision_start",
    "vision_end": "vision_end",
}
# LLaVA-1.5's prompts, for the files of its makers' form, which have no template and no IMAGE.
_LLAVA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '' if m.role == 'system' else (m.role | upper) + ': ' }}"
    "{% for part in m.content %}{{ '<image>\n' if part.type == 'image' else part.text }}"
    "{% endfor %}{{ eos_token if m.role == 'assistant' else ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
_home: list[TemporaryDirectory[str]] = []


def is_gguf(name: str | Path) -> bool:
    """Whether this names a GGUF file that is there."""
    return str(name).lower().endswith(SUFFIX) and is_file(user_path(name))


def gguf_folder(model: str | Path, mmproj: str | Path | None = None) -> str:
    """Return a folder of this process that stands for a GGUF file, as a checkpoint's does.

    Args:
        mmproj: the file of its vision tower and projector.

    Raises:
        ModelError: no such files, or ones that mmkv does not read.
    """
    # Links are kept: the parts of a split file lie beside each other by their names, on the hub's.
    paths = [user_path(path).absolute() for path in (model, mmproj) if path is not None]
    for path in paths:
        if not is_file(path):
            raise ModelError(f"no file {path}; name a GGUF file")
    return str(_made(tuple((path, state(path)) for path in paths)))


def listed_files(listing: Path) -> list[Path] | None:
    """Return the files that a folder of :func:`gguf_folder` stands for.

    None: another made the folder, whose word on files elsewhere does not count.
    """
    if not _home or Path(_home[0].name).resolve() not in listing.resolve().parents:
        return None
    return [Path(path) for path in json.loads(listing.read_text(encoding="utf-8"))]


@functools.lru_cache(maxsize=64)
def _made(states: tuple[tuple[Path, tuple[int, ...]], ...]) -> Path:
    files = [read_gguf(path) for path, _ in states]
    _require_reader(files)
    try:
        contents = _contents(*files)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"the metadata of {' or '.join(str(file.path) for file in files)} make no sense "
            f"({type(error).__name__}); get the original file"
        ) from error
    import tempfile  # which every command would import otherwise

    if not _home:
        _home.append(tempfile.TemporaryDirectory(prefix="mmkv-gguf-"))
    folder = Path(tempfile.mkdtemp(dir=_home[0].name)) / files[0].path.name
    folder.mkdir()
    for name, content in contents.items():
        if isinstance(content, str):
            (folder / name).write_text(content, encoding="utf-8")
    return folder


def _contents(text: GgufFile, tower: GgufFile | None = None) -> dict[str, str | None]:
    """Return the folder's files by name; None: there is none."""
    config = config_of(text, tower)
    pages: dict[str, Any] = {
        FILES: [str(file.path) for file in (text, tower) if file is not None],
        "config.json": config,
        "generation_config.json": generation(text),
        "tokenizer_config.json": _special_tokens(text, config),
    }
    pages |= _picture_settings(tower, config)
    made: dict[str, str | None] = {n: json.dumps(page, indent=1) for n, page in pages.items()}
    template = text.metadata.get("tokenizer.chat_template")
    extra, kind = config.get("image_token_index") == len(tokens(text)), str(config["model_type"])
    made["chat_template.jinja"] = template or (
        _LLAVA_TEMPLATE if kind == "llava" and extra else None
    )
    return made | {TOKENIZER: tokenizer_json(text, [_IMAGE[kind]] if extra else [])}


def _require_reader(files: list[GgufFile]) -> None:
    """Raise ModelError where numbers are quantised and the package that reads them is missing."""
    kinds = {tensor.kind for file in files for tensor in file.tensors.values()} - PLAIN
    if kinds and importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"numbers in {', '.join(sorted(kinds))} are read by the package gguf, which is not "
            "installed; pip install 'mmkv[gguf]'"
        )


def config_of(text: GgufFile, tower: GgufFile | None) -> dict[str, Any]:
    """Return what ``config.json`` says. Raises ModelError for what mmkv does not read."""
    if text.architecture == "clip":
        raise ModelError(
            f"{text.path} is a vision tower (mmproj); name the language model's file, and this one "
            "with --mmproj"
        )
    kind = text.metadata.get("general.type", "model")
    what = text.architecture if kind == "model" else kind
    if kind != "model" or what not in TEXTS:
        raise ModelError(
            f"{text.path} is of the kind {ascii(what)[:60]}, which mmkv does not read from GGUF; "
            f"it reads {', '.join(TEXTS)}"
        )
    if tower is None:
        return text_config(text, TEXTS[text.architecture], sees=False)
    kind, hidden = _kind_of(text, tower), text.whole("embedding_length")
    if (width := _out(tower)) != hidden:
        raise ModelError(
            f"{tower.path} gives features of {width} numbers and {text.path} takes {hidden}; name "
            "the tower of this model"
        )
    mark = _IMAGE.get(kind)
    inner = f"{kind}_text" if mark is None else TEXTS[text.architecture]
    whole = text_config(text, inner, sees=mark is None)
    common = {name: whole[name] for name in ("tie_word_embeddings", "dtype")}
    common["text_config"] = whole
    if mark is not None:
        if mark not in tokens(text) and len(tokens(text)) == whole["vocab_size"]:
            whole["vocab_size"] += 1  # it is added to them
        common["image_token_index"] = _image_id(text, whole, mark)
        return common | (_gemma3(text, tower) if kind == "gemma3" else _llava(tower))
    vision = _qwen_vision(tower, kind) | {"out_hidden_size": hidden}
    if kind == "qwen2_vl":
        vision |= {"embed_dim": vision["hidden_size"], "hidden_size": hidden}
    ids = {f"{name}_token_id": _id_of(text, f"<|{mark}|>") for name, mark in _QWEN_MARKS.items()}
    return common | ids | {"model_type": kind, "vision_config": vision}


def _kind_of(text: GgufFile, tower: GgufFile) -> str:
    """Return the type of the whole model. Raises ModelError where there is none of these two."""
    if tower.architecture != "clip":
        raise ModelError(f"{tower.path} is no vision tower (mmproj), but {tower.architecture}")
    projector = _projector(tower)
    kind = _SEEING.get((projector, text.architecture))
    if kind is None:
        known = ", ".join(f"{one} with {other}" for one, other in _SEEING)
        raise ModelError(
            f"{tower.path} has a projector of kind {ascii(projector)[:40]}, which mmkv does not "
            f"read beside a {text.architecture}; it reads {known}"
        )
    return kind


def generation(file: GgufFile) -> dict[str, Any]:
    """Return what ``generation_config.json`` says: ends of a reply, and how to draw if it does."""
    ends = {special(file, name) for name in _NAMED_ENDS}
    ends |= {number for number, token in enumerate(tokens(file)) if token in _ENDS}
    if {"<|call|>", "<|return|>"} <= {*tokens(file)}:  # whose turns have parts
        ends -= {number for number, token in enumerate(tokens(file)) if token == "<|end|>"}
    made: dict[str, Any] = {"eos_token_id": sorted(end for end in ends if end is not None)}
    if not made["eos_token_id"]:
        made = {}
    if never := file.metadata.get("tokenizer.ggml.suppress_tokens"):
        made["suppress_tokens"] = [number for number in never if 0 <= number < len(tokens(file))]
    drawn = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    drawn["penalty_repeat"] = "repetition_penalty"
    drawn |= {name: name for name in ("xtc_probability", "mirostat")}  # which are told of
    found = {
        ours: value
        for theirs, ours in drawn.items()
        if (value := file.metadata.get(f"general.sampling.{theirs}")) is not None
    }
    if found.get("temperature") == 0:
        return made | {"do_sample": False}
    return made | ({"do_sample": True} | found if found else {})


def _special_tokens(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Return what ``tokenizer_config.json`` says."""
    made: dict[str, Any] = {
        "tokenizer_class": "TokenizersBackend",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.get("text_config", config)["max_position_embeddings"],
    }
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        if (number := special(file, theirs)) is not None:
            made[f"{ours}_token"] = tokens(file)[number]
    if config["model_type"] == "gemma3":  # which its processor asks for
        marks = {"image": _IMAGE["gemma3"], "boi": "<start_of_image>", "eoi": "<end_of_image>"}
        made["extra_special_tokens"] = {f"{name}_token": mark for name, mark in marks.items()}
    return made


def _projector(tower: GgufFile) -> str:
    found = tower.metadata.get("clip.projector_type", tower.get("vision.projector_type"))
    return str(found)


def _out(tower: GgufFile) -> int:
    """Return the numbers of a feature: the rows of the projector's last matrix; Gemma's columns."""
    for name, axis in (("mm.2.weight", 0), ("mm.input_projection.weight", -1)):
        if (last := tower.tensors.get(name)) is not None:
            return last.shape[axis]
    raise ModelError(f"{tower.path} has no projector (mm.2.weight); get the original file")


def _id_of(file: GgufFile, token: str) -> int:
    try:
        return tokens(file).index(token)
    except ValueError as error:
        raise ModelError(
            f"the tokenizer of {file.path} has no {token}, which stands for pictures; name the "
            "file without --mmproj"
        ) from error


def _image_id(file: GgufFile, config: dict[str, Any], mark: str) -> int:
    """Return the id of the token for pictures, which may have been added to the file's."""
    last = config["vocab_size"] - 1
    return last if last == len(tokens(file)) else _id_of(file, mark)


def _qwen_vision(tower: GgufFile, kind: str) -> dict[str, Any]:
    depth, patch = tower.layers("vision.block_count"), tower.whole("vision.patch_size")
    made: dict[str, Any] = {
        "model_type": kind,
        "depth": depth,
        "hidden_size": tower.whole("vision.embedding_length"),
        "intermediate_size": tower.whole("vision.feed_forward_length"),
        "num_heads": tower.whole("vision.attention.head_count"),
        "patch_size": patch,
        "spatial_merge_size": tower.whole("vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    if kind == "qwen2_vl":
        act = "gelu" if tower.metadata.get("clip.use_gelu") else "quick_gelu"
        ratio = made["intermediate_size"] // max(made["hidden_size"], 1)
        return made | {"hidden_act": act, "mlp_ratio": ratio}
    if kind == "qwen2_5_vl":
        every = tower.whole("vision.n_wa_pattern", 0)
        whole = [n for n in range(depth) if every and (n + 1) % every == 0]
        if (listed := tower.get("vision.wa_layer_indexes")) is not None:
            whole = listed
        return made | {
            "hidden_act": "silu",
            "fullatt_block_indexes": whole,
            "window_size": tower.whole("vision.window_size", 112),
            "tokens_per_second": 2,
        }
    levels = tower.get("vision.is_deepstack_layers", [])
    places = tower.tensors.get("v.position_embd.weight")
    return made | {
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": [n for n, deep in enumerate(levels) if deep],
        "num_position_embeddings": 0 if places is None else places.shape[0],
    }


def _square(tower: GgufFile, kind: str) -> dict[str, Any]:
    """Return the config of a tower that sees pictures of one size, as transformers' CLIP has it."""
    return {
        "model_type": kind,
        "hidden_size": tower.whole("vision.embedding_length"),
        "intermediate_size": tower.whole("vision.feed_forward_length"),
        "num_hidden_layers": tower.layers("vision.block_count"),
        "num_attention_heads": tower.whole("vision.attention.head_count"),
        "image_size": tower.whole("vision.image_size"),
        "patch_size": tower.whole("vision.patch_size"),
    }


def _gemma3(text: GgufFile, tower: GgufFile) -> dict[str, Any]:
    """Return what the config of a Gemma 3 has beside its language model."""
    vision = _square(tower, "siglip_vision_model")
    merged = tower.whole("vision.projector.scale_factor", 4) or 4
    side = vision["image_size"] // max(vision["patch_size"], 1) // merged
    vision |= {"hidden_act": "gelu_pytorch_tanh", "vision_use_head": False}
    vision["layer_norm_eps"] = tower.real("vision.attention.layer_norm_epsilon", 1e-6)
    ends = {"boi": "<start_of_image>", "eoi": "<end_of_image>"}
    return {
        "model_type": "gemma3",
        "vision_config": vision,
        "mm_tokens_per_image": side * side,
        **{f"{name}_token_index": _id_of(text, token) for name, token in ends.items()},
    }


def _llava(tower: GgufFile) -> dict[str, Any]:
    """Return what the config of a LLaVA-1.5 has beside its language model."""
    if tower.get("vision.image_grid_pinpoints"):
        raise ModelError(
            f"{tower.path} cuts pictures into tiles (LLaVA-NeXT), which mmkv does not read from "
            "GGUF; name the transformers checkpoint that it was made of"
        )
    if "v.class_embd" not in tower.tensors:
        raise ModelError(f"{tower.path} is no CLIP (it has no v.class_embd), which mmkv needs here")
    vision = _square(tower, "clip_vision_model") | {
        "layer_norm_eps": tower.real("vision.attention.layer_norm_epsilon", 1e-5),
        "hidden_act": "gelu" if tower.metadata.get("clip.use_gelu") else "quick_gelu",
        "projection_dim": 1,
    }
    depth = vision["num_hidden_layers"]
    # The output before CLIP's last block. llama.cpp's converter leaves that block out, and says
    # that it wrote a LLaVA.
    layers = tower.get("vision.feature_layer")
    if not isinstance(layers, list) or not layers:
        layers = [depth if tower.get("has_llava_projector") else depth - 1]
    return {
        "model_type": "llava",
        "vision_config": vision,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": layers[0] if len(layers) == 1 else layers,
        "vision_feature_select_strategy": "default",
    }


def _picture_settings(tower: GgufFile | None, config: dict[str, Any]) -> dict[str, Any]:
    """Return how pictures and videos are prepared."""
    if tower is None:
        return {}
    kind = str(config["model_type"])
    shades = {f"image_{n}": tower.get(f"vision.image_{n}", [0.5] * 3) for n in ("mean", "std")}
    patch = tower.whole("vision.patch_size")
    side = tower.whole("vision.image_size", 0)
    if kind == "gemma3":
        count = {"image_seq_length": config["mm_tokens_per_image"]}
        images = shades | count | {"image_processor_type": "Gemma3ImageProcessor"}
        images["size"] = {"height": side, "width": side}
        whole = {"processor_class": "Gemma3Processor", "image_processor": images} | count
        return {"processor_config.json": whole, "preprocessor_config.json": images}
    if kind == "llava":
        images = shades | {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": side},
            "crop_size": {"height": side, "width": side},
        }
        whole = {
            "processor_class": "LlavaProcessor",
            "image_processor": images,
            "image_token": _IMAGE[kind],
            "patch_size": patch,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        }
        return {"processor_config.json": whole, "preprocessor_config.json": images}
    fewest, most = _PIXELS[kind]
    fewest = tower.get("vision.image_min_pixels", fewest)
    most = tower.get("vision.image_max_pixels", most)
    common = shades | {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": tower.whole("vision.spatial_merge_size", 2),
    }
    images = common | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": fewest, "longest_edge": most},
    }
    pages: dict[str, Any] = {"preprocessor_config.json": images}
    if kind not in ("qwen2_vl", "qwen2_5_vl"):
        pages["video_preprocessor_config.json"] = common | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"shortest_edge": 4096, "longest_edge": 25165824},
        }
    return pages
