"""Tell checkpoints apart by their weights, without reading them whole and without torch."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from mmkv.engine.errors import MmkvError
from mmkv.engine.model.gguf.config import is_gguf
from mmkv.engine.model.gguf.file import SUFFIX, read_gguf
from mmkv.engine.model.source import checkpoint_file, files_of
from mmkv.engine.paths import user_path

SAMPLE = 1024  # bytes of each tensor
_LONGEST_HEADER = 100 * 2**20  # the format's own bound
_INSIDE = "language_model."
# What a damaged or foreign checkpoint raises; the loader says what is wrong with it.
_UNREADABLE = (MmkvError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
_Tensor = tuple[str, str, list[int], bytes]  # name, dtype, shape, the first bytes


def fingerprint(model: str) -> str | None:
    """Hash name, dtype, shape and the first KiB of each tensor of a checkpoint.

    The division into files does not matter. Training changes all of a matrix, so a sample of each
    tells a checkpoint from those trained from it.

    Args:
        model: a folder, or a hub id whose files are in the cache.

    Returns:
        SHA-256 in hex; None where there are no safetensors files or they cannot be read.
    """
    try:
        files = _files(model)
        return None if files is None else _digest(_tensors(files))
    except _UNREADABLE:
        return None


def _files(model: str) -> list[Path] | None:
    if is_gguf(model):
        return [user_path(model)]
    return files_of(lambda name: checkpoint_file(model, name))


def identity(files: Sequence[Path]) -> str:
    """Hash what changes whenever a file of the checkpoint does, and often when none does.

    Beside what :func:`fingerprint` reads these are size, time of the last write, and time of the
    last change of each file: nothing but the system's clock sets the latter.

    Raises:
        OSError: a file cannot be read. ValueError, LookupError, TypeError: it is no such file.
    """
    states = [path.stat() for path in files]
    times = [[state.st_size, state.st_mtime_ns, state.st_ctime_ns] for state in states]
    return hashlib.sha256(json.dumps([times, _digest(_tensors(files))]).encode()).hexdigest()


def language_fingerprint(model: str) -> str | None:
    """Hash the language model inside a vision-language checkpoint, as if it stood alone.

    Gates that were trained for a language model fit what holds its weights.

    Args:
        model: as of :func:`fingerprint`.

    Returns:
        What :func:`fingerprint` gives for the language model's own checkpoint; None where the
        checkpoint is not made of one, or its files cannot be read.
    """
    try:
        files = _files(model)
        tensors = [] if files is None else _tensors(files)
        if files and files[0].suffix.lower() == SUFFIX:  # alone, without its tower's file
            return _digest(_tensors(files[:1]))
    except _UNREADABLE:
        return None
    # "language_model.model.norm" and "model.language_model.norm" are both "model.norm".
    places = ((_INSIDE, ""), (f"model.{_INSIDE}", "model."))
    inside = [
        (own + name.removeprefix(prefix), dtype, shape, sample)
        for name, dtype, shape, sample in tensors
        for prefix, own in places
        if name.startswith(prefix)
    ]
    head = [tensor for tensor in tensors if tensor[0].startswith("lm_head.")]
    return _digest(inside + head) if inside else None


def tensor_shapes(files: Sequence[Path]) -> list[tuple[str, str, list[int]]]:
    """Return name, dtype (as safetensors names it) and shape of each tensor of the files.

    Raises:
        OSError: a file cannot be read. ValueError, LookupError, TypeError: it is no such file.
    """
    found: list[tuple[str, str, list[int]]] = []
    for path in files:
        if path.suffix.lower() == SUFFIX:
            found += read_gguf(path).shapes()
            continue
        with path.open("rb") as file:
            header, _ = _header(file)
        found += [(name, part["dtype"], part["shape"]) for name, part in header.items()]
    return found


def _tensors(files: Sequence[Path]) -> list[_Tensor]:
    parts: list[_Tensor] = []
    for path in files:
        if path.suffix.lower() == SUFFIX:
            parts += _gguf_tensors(path)
            continue
        if path.suffix != ".safetensors":  # of torch.save: the sums of all parts stand at its end
            with zipfile.ZipFile(path) as pickled:
                sums = [[each.filename, each.file_size, each.CRC] for each in pickled.infolist()]
            parts.append((path.name, "", [], json.dumps(sums).encode()))
            continue
        with path.open("rb") as file:
            header, start = _header(file)
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                file.seek(start + begin)
                sample = file.read(max(0, min(SAMPLE, end - begin)))
                parts.append((name, tensor["dtype"], tensor["shape"], sample))
    return parts


def _gguf_tensors(path: Path) -> list[_Tensor]:
    parts: list[_Tensor] = []
    for name, tensor in read_gguf(path).tensors.items():
        with tensor.path.open("rb") as file:
            file.seek(tensor.begin)
            sample = file.read(min(SAMPLE, tensor.nbytes))
            parts.append((name, tensor.kind, list(tensor.shape), sample))
    return parts


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return what a safetensors file says of its tensors, and where their bytes begin."""
    size = int.from_bytes(file.read(8), "little")
    if size > _LONGEST_HEADER:
        raise ValueError("not a safetensors header")
    header: dict[str, Any] = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return header, 8 + size


def _digest(parts: Sequence[_Tensor]) -> str:
    digest = hashlib.sha256()
    for name, dtype, shape, sample in sorted(parts, key=lambda part: part[0]):
        digest.update(json.dumps([name, dtype, shape]).encode())
        digest.update(hashlib.sha256(sample).digest())
    return digest.hexdigest()
