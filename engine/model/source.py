"""Check the name of a checkpoint before anything heavy is imported."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ModelError


def locate(name: str) -> str:
    """Return the folder or hub id that transformers is given.

    Raises:
        ModelError: for a folder without a model, or a path that is not there.
    """
    folder = Path(name).expanduser()
    if not name.strip():
        raise ModelError("the model's name is empty; name a checkpoint folder or a hub id")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{name} has no config.json; name a transformers checkpoint folder")
        return str(folder)
    if folder.is_file():
        raise ModelError(f"{name} is a file; name the checkpoint's folder")
    # A hub id is "name" or "owner/name"; all else was meant as a path.
    if name[0] in "./~" or name.count("/") > 1 or "\\" in name or name.endswith("/"):
        raise ModelError(f"no folder {name!r}; name a transformers checkpoint folder or a hub id")
    return name
