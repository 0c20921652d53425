"""Tell checkpoints apart by their weights, without reading them whole and without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.model.source import checkpoint_file, files_of

SAMPLE = 1024  # bytes of each tensor
_LONGEST_HEADER = 100 * 2**20  # the format's own bound


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
        files = files_of(lambda name: checkpoint_file(model, name))
        return None if files is None else _digest(files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # the loader says what is wrong with them


def _digest(files: Sequence[Path]) -> str:
    parts: list[tuple[str, str, list[int], bytes]] = []
    for path in files:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _LONGEST_HEADER:
                raise ValueError("not a safetensors header")
            header: dict[str, Any] = json.loads(file.read(size))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                begin, end = tensor["data_offsets"]
                file.seek(8 + size + begin)
                sample = file.read(max(0, min(SAMPLE, end - begin)))
                parts.append((name, tensor["dtype"], tensor["shape"], sample))
    digest = hashlib.sha256()
    for name, dtype, shape, sample in sorted(parts, key=lambda part: part[0]):
        digest.update(json.dumps([name, dtype, shape]).encode())
        digest.update(hashlib.sha256(sample).digest())
    return digest.hexdigest()
