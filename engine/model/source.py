"""Check the name of a checkpoint and find its files, before anything heavy is imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from engine.errors import ModelError
from engine.paths import is_file, is_folder, user_path

_LONGEST_ID = 200

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


# A folder that training.llava wrote, or its name where no such folder is.
_EYES_ALONE = (
    "{name} holds eyes alone, without their language model; put both together with `python -m "
    "training.llava join --language-model FOLDER --output FOLDER` (docs/smollm2-llava.md), and "
    "name that folder"
)


def refuse_eyes(name: str) -> None:
    """Raise ModelError: ``name`` is that of an adapter which is listed, and no model is there."""
    raise ModelError(_EYES_ALONE.format(name=name))


def locate(name: str) -> str:
    """Return the folder or hub id that transformers is given.

    Raises:
        ModelError: for a folder without a model, or a path that is not there.
    """
    if not name.strip():
        raise ModelError("the model's name is empty; name a checkpoint folder or a hub id")
    folder = user_path(name)
    if is_folder(folder):
        if not is_file(folder / "config.json"):
            if is_file(folder / "adapter.json"):
                raise ModelError(_EYES_ALONE.format(name=name))
            raise ModelError(f"{name} has no config.json; name a transformers checkpoint folder")
        return str(folder)
    if is_file(folder):
        raise ModelError(f"{name} is a file; name the checkpoint's folder")
    # A hub id is "name" or "owner/name"; all else was meant as a path.
    if name[0] in "./~" or name.count("/") > 1 or "\\" in name or name.endswith("/"):
        shown = repr(name if len(name) <= 200 else f"{name[:200]}...")
        raise ModelError(f"no folder {shown}; name a transformers checkpoint folder or a hub id")
    if len(name) > _LONGEST_ID:
        raise ModelError(f"{name[:60]!r}... is too long for a hub id; check the model's name")
    return name


def checkpoint_file(source: str, name: str) -> Path | None:
    """Return a file of a folder or of a hub id in the cache; None where there is none."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(source, name)
        return Path(found) if isinstance(found, str) else None
    return folder / name if (folder / name).is_file() else None


def files_of(find: Callable[[str], Path | None]) -> list[Path] | None:
    """Return the safetensors files of a checkpoint, or None where it has none.

    Args:
        find: gives the path of a file of the checkpoint by its name, None where there is none.
    """
    single = find(SINGLE)
    if single is not None:
        return [single]
    index = find(INDEX)
    if index is None:
        return None
    shards = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    found = [find(name) for name in sorted(shards)]
    return [path for path in found if path is not None] if all(found) else None
