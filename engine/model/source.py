"""Check the name of a checkpoint and find its files, before anything heavy is imported."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmkv.engine import paths
from mmkv.engine.errors import ModelError
from mmkv.engine.model.gguf.config import FILES, gguf_folder, is_gguf, listed_files
from mmkv.engine.model.gguf.file import SUFFIX
from mmkv.engine.paths import is_file, is_folder, is_lfs_pointer, user_path

_LONGEST_ID = 200
# What a checkpoint's folder may have besides: reading it is for others, or would run code.
_READ = {".safetensors", ".json", ".jinja", ".model", ".txt"}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
_FORMS = {
    ".onnx": "a graph for ONNX Runtime",
    ".npz": "arrays of numpy, as MLX has them",
    ".safetensors": "weights without the files that go with them",
    ".json": "one file of a checkpoint",
} | dict.fromkeys(_PICKLES, "a pickle, which can run code when it is read")
_MOST_GROWTH = 64  # characters that a tokenizer may make of one before it splits
_UNICODE = 18  # that NFKC makes of U+FDFA, the most of all
# Normalizers that can make more of a text; also where JSON escapes letters.
_GROWING = re.compile(rb"Replace|Precompiled|ByteLevel|\\u00[4-7]")

# How checkpoints are quantised that are read, and which packings of compressed-tensors.
QUANTISED = ("fp8", "compressed-tensors", "awq", "gptq", "bitsandbytes")
GPTQ_BITS = (2, 3, 4, 8)
_COMPRESSED = {
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
}

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
# The pickles that are read, as tensors alone, where there are no safetensors.
PICKLED_INDEX, PICKLED = "pytorch_model.bin.index.json", "pytorch_model.bin"


def at_hand(name: str) -> str:
    """Return the folder of a model that goes by a name; other names, and folders, as they are.

    Raises:
        ModelError: it has to be fetched first.
    """
    found = paths.named_model(name)
    return name if found is None else str(found)


def locate(name: str) -> str:
    """Return the folder or hub id that transformers is given.

    A GGUF file gives a folder of this process that stands for it.

    Raises:
        ModelError: for a folder without a model, or a path that is not there.
    """
    if not name.strip():
        raise ModelError("the model's name is empty; name a checkpoint folder or a hub id")
    name = at_hand(name)
    folder = user_path(name)
    if is_folder(folder):
        _require_files(name, folder)
        return str(folder)
    if name.lower().endswith(SUFFIX):  # before it is taken for a hub id
        return gguf_folder(name)
    if is_file(folder):
        form = _FORMS.get(folder.suffix.lower())
        what = "a file" if form is None else f"{form}"
        raise ModelError(f"{name} is {what}; name the folder of a transformers checkpoint")
    if page := re.match(r"https?://[^/]+/([\w.-]+/[\w.-]+)", name):
        raise ModelError(f"{name[:200]!r} is an address; name the hub's id alone: {page[1]}")
    # A hub id is "name" or "owner/name"; all else was meant as a path.
    if name[0] in "./~" or name.count("/") > 1 or "\\" in name or name.endswith("/"):
        shown = repr(name if len(name) <= 200 else f"{name[:200]}...")
        raise ModelError(f"no folder {shown}; name a transformers checkpoint folder or a hub id")
    if len(name) > _LONGEST_ID:
        raise ModelError(f"{name[:60]!r}... is too long for a hub id; check the model's name")
    return name


def _require_files(name: str, folder: Path) -> None:
    """Raise ModelError unless the folder can be a checkpoint's, and reading it ends."""
    try:
        files = sorted(path for path in folder.iterdir() if not is_folder(path))
    except OSError as error:
        raise ModelError(f"cannot read the folder {name} ({error.strerror}); mend that") from error
    for path in files:
        if path.suffix in _READ:
            _require_content(name, path)
    there = {path.suffix.lower() for path in files}
    if not is_file(folder / "config.json"):
        raise ModelError(_without_config(name, folder, there))
    known = any(is_file(folder / file) for file in (INDEX, PICKLED, PICKLED_INDEX))
    if ".safetensors" not in there and there & _PICKLES and not known:
        pickled = next(path.name for path in files if path.suffix.lower() in _PICKLES)
        raise ModelError(
            f"{name} has its weights in {pickled} alone, a pickle in a form of its own; take its "
            f"safetensors or {PICKLED}, or load it with transformers where you trust it, then "
            "save_pretrained(NEW)"
        )
    require_normal_growth(name, folder / "tokenizer.json")


def _require_content(name: str, path: Path) -> None:
    """Raise ModelError for a file whose reading may never end, and one that is a pointer."""
    if path.exists() and not is_file(path):
        raise ModelError(f"{path.name} in {name} is no file but a pipe or device; remove it")
    if is_lfs_pointer(path):
        raise ModelError(
            f"{path.name} in {name} is a pointer of Git LFS and not the file; run `git lfs "
            "pull` there"
        )


def find_adapter(name: str) -> tuple[Path, Path]:
    """Return config and weights of a LoRA adapter: a folder, or a hub id that is in the cache.

    Raises:
        ModelError: no adapter is there.
    """
    folder = user_path(name)
    source = str(folder) if is_folder(folder) else name
    plain = is_folder(folder) or re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    config = checkpoint_file(source, _ADAPTER_CONFIG) if plain else None
    if config is None:
        if is_folder(folder):
            raise ModelError(f"{name} has no {_ADAPTER_CONFIG}; name the folder of a PEFT adapter")
        raise ModelError(
            f"no adapter {name[:200]!a} is here; name the folder of a PEFT adapter, or fetch one "
            "from the hub first: mmkv pull OWNER/NAME"
        )
    found = (checkpoint_file(source, file) for file in _ADAPTERS)
    weights = next((path for path in found if path is not None), None)
    if weights is None:
        raise ModelError(f"{name} has no {_ADAPTERS[0]}; get the whole adapter")
    return config, weights


def _without_config(name: str, folder: Path, there: set[str]) -> str:
    """Say what a folder without config.json seems to be."""
    if is_file(folder / "adapter.json"):
        return (
            f"{name} holds eyes alone, without their language model; `python -m "
            "mmkv.training.llava join` puts both together (`mmkv pull smollm2-llava` does)"
        )
    if is_file(folder / _ADAPTER_CONFIG):
        base = _json(folder / _ADAPTER_CONFIG).get("base_model_name_or_path")
        of = ascii(base)[1:120].rstrip("'") if base else "BASE"
        return (
            f"{name} is an adapter (PEFT) of {of if base else 'another model'}, no model; name "
            f"both: mmkv chat {of} --adapter {name}"
        )
    if ".gguf" in there:
        return f"{name} has no config.json, but GGUF files; name one of these"
    for suffix in (".onnx", ".npz"):
        if suffix in there:
            return (
                f"{name} has no config.json, but {_FORMS[suffix]}; name the transformers "
                "checkpoint that it was made of"
            )
    if is_file(folder / "params.json"):
        return (
            f"{name} has params.json and no config.json: weights as their maker has them; name "
            "the checkpoint in transformers' form (on the hub often NAME-hf)"
        )
    return f"{name} has no config.json; name a transformers checkpoint folder"


def require_normal_growth(name: str, file: Path) -> None:
    """Raise ModelError where a tokenizer's normalizer blows texts up beyond all use.

    Replacements one after the other multiply: thirty of one letter by two make a billion of it.
    """
    try:
        raw = file.read_bytes() if is_file(file) else b""
    except OSError:
        return  # whoever reads it says so
    if not _GROWING.search(raw):
        return
    growth = _growth(_json(file).get("normalizer"))
    if growth > _MOST_GROWTH:
        raise ModelError(
            f"the normalizer in tokenizer.json of {name} can make {growth:,.0f} characters of one; "
            "get the original file"
        )


def _growth(normalizer: object) -> float:
    """Return how many characters a normalizer can make of one, at most.

    What Unicode's own forms make of a character of the text is left out, once.
    """
    grown, unicode, parts = 1.0, _UNICODE, [normalizer]
    while parts:
        part = parts.pop()
        if not isinstance(part, dict):
            continue
        kind, inner = part.get("type"), part.get("normalizers")
        if kind == "Sequence" and isinstance(inner, list):
            parts += inner
        elif kind == "ByteLevel":
            grown *= 4
        elif kind == "Precompiled":
            grown *= max(_longest(part.get("precompiled_charsmap")) / unicode, 1.0)
            unicode = 1
        elif kind == "Replace":
            grown *= _replaced(part.get("pattern"), part.get("content"))
        grown = min(grown, 1e300)
    return grown


def _replaced(pattern: object, content: object) -> float:
    """Return how many characters a replacement makes of one; Unicode's forms may follow."""
    if not isinstance(pattern, dict) or not isinstance(content, str):
        return 1.0
    length, text = _decomposed(content), pattern.get("String")
    if isinstance(text, str):
        return max(length / max(len(text), 1), 1.0)
    return 1.0 + length  # an expression may match between any two characters


def _longest(table: object) -> int:
    """Return the most characters that SentencePiece's table of characters has for one.

    The table is base64 of the bytes of a trie, as four bytes say first, and of texts that end with
    a zero byte.
    """
    try:
        raw = base64.b64decode(table if isinstance(table, str) else "")
    except ValueError:
        return 1  # whoever reads it says so
    texts = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
    return max(_decomposed(text.decode(errors="replace")) for text in texts)


def _decomposed(text: str) -> int:
    """Count the characters of a text, or of its longest form in Unicode."""
    return max(len(text), len(unicodedata.normalize("NFKD", text)))


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def checkpoint_file(source: str, name: str) -> Path | None:
    """Return a file of a folder, or of a hub id in the cache; None where there is none.

    Raises:
        ModelError: the model goes by a name, and has to be fetched first.
    """
    folder = Path(at_hand(source))
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, name)
        return Path(found) if isinstance(found, str) else None
    return folder / name if (folder / name).is_file() else None


def files_of(
    find: Callable[[str], Path | None], single: str = SINGLE, index: str = INDEX
) -> list[Path] | None:
    """Return the weight files of a checkpoint, or None where it has none: its safetensors, or GGUF.

    Args:
        find: gives the path of a file of the checkpoint by its name, None where there is none.
        single: name of the file of all weights; index: of what names several.

    Raises:
        ModelError: its index names a file outside of it.
    """
    named = find(FILES)
    if named is not None and (listed := listed_files(named)) is not None:
        return listed
    whole = find(single)
    if whole is not None:
        return [whole]
    list_of_files = find(index)
    if list_of_files is None:
        return None
    shards = {str(name) for name in json.loads(list_of_files.read_text())["weight_map"].values()}
    for name in shards:
        if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name:
            raise ModelError(
                f"{index} names {name[:80]!a}, which lies outside of the checkpoint; get the "
                "original file"
            )
    found = [find(name) for name in sorted(shards)]
    return [path for path in found if path is not None] if all(found) else None


def require_known_quantisation(settings: Mapping[str, Any]) -> None:
    """Raise ModelError, one line, unless a checkpoint with these settings can be read."""
    method = quantisation_method(settings)
    if method not in QUANTISED:
        raise ModelError(
            f"this checkpoint is quantised by {method!r}, which mmkv does not read; take one by "
            f"{', '.join(QUANTISED)}, or the one that it was made of"
        )
    if variant := _unread_variant(method, settings):
        raise ModelError(
            f"this checkpoint is quantised by {method} {variant}, which mmkv does not read; take "
            "another variant (docs/reference/weights.md), or the one that it was made of"
        )


def quantisation_method(settings: Mapping[str, Any]) -> str:
    """Return the name of the method, as ``quant_method`` gives it."""
    named = settings.get("quant_method")
    if named is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        return "bitsandbytes"
    return ascii(getattr(named, "value", named))[:80].strip("'")


def gptq_packing(settings: Mapping[str, Any]) -> Any:
    """Return how a GPTQ checkpoint is packed: ``gptq``, ``gptq_v2`` or another name."""
    return settings.get("checkpoint_format", settings.get("format")) or "gptq"


def _unread_variant(method: str, settings: Mapping[str, Any]) -> str:
    """Name the variant that is not read; empty: this one is."""
    bits = settings.get("bits", settings.get("w_bit", 4))
    match method:
        case "awq":
            version = str(settings.get("version", "gemm")).lower()
            if bits != 4:
                return f"in {bits!r} bits"
            return "" if version == "gemm" else f"in the packing {version[:40]!r}"
        case "gptq":
            packing = gptq_packing(settings)
            if bits not in GPTQ_BITS:
                return f"in {bits!r} bits"
            if settings.get("is_marlin_format"):
                packing = "marlin"
            return "" if packing in ("gptq", "gptq_v2") else f"in the packing {packing!r:.40}"
        case "compressed-tensors":
            kind = settings.get("format", "dense")
            sparse = (settings.get("sparsity_config") or {}).get("format", "dense")
            if kind not in _COMPRESSED or sparse != "dense":
                return f"in the format {kind if sparse == 'dense' else sparse!r:.40}"
            return "with rotations (transform_config)" if settings.get("transform_config") else ""
    return ""


def hub_reachable() -> bool:
    """Return whether the hub resolves; its client would retry for half a minute offline."""
    import socket
    import urllib.request
    from urllib.parse import urlsplit

    import huggingface_hub.constants as hub

    if hub.is_offline_mode():
        return False
    host = urlsplit(hub.ENDPOINT).hostname
    if host is None or urllib.request.getproxies():
        return True
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return False
    return True


def config_digest(model: str) -> str:
    """Return SHA-256 of the ``config.json`` of a model, as ``sha256sum`` gives it.

    Args:
        model: a folder, hub id or GGUF file.

    Raises:
        OSError: there is none, or it is out of reach.
    """
    from transformers.utils import cached_file

    model = at_hand(model)
    if is_gguf(model):
        model = gguf_folder(model)
    local = Path(model).is_dir() or not hub_reachable()
    found = cached_file(model, "config.json", local_files_only=local)
    return hashlib.sha256(Path(found).read_bytes()).hexdigest()
