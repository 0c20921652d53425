"""Finding what ships with mmkv: the small bundled model and its demo picture."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from engine.errors import InputError, ModelError

BUNDLED_MODEL = "tiny-vlm"


def bundled_model() -> Path:
    """Return the directory of the bundled model. Raises ModelError when it is not there."""
    for folder in _asset_folders():
        if (folder / BUNDLED_MODEL / "config.json").is_file():
            return folder / BUNDLED_MODEL
    raise ModelError(
        "the bundled model assets/tiny-vlm was not found; name a model directory or hub id, "
        "or set MMKV_ASSETS to the folder that holds tiny-vlm"
    )


def bundled_dialogues() -> Path:
    """Return the folder of the bundled dialogues in MMDU's format.

    It holds ``benchmark.json`` and ``pictures/``. The pictures are kept as one archive, which the
    first call unpacks to the user's cache folder.

    Raises:
        ModelError: the assets are not there. InputError: the cache folder cannot be written.
    """
    packed = bundled_model().parent / "mmdu"
    archive = packed / "pictures.zip"
    digest = hashlib.sha256((packed / "benchmark.json").read_bytes() + archive.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmkv"
    folder = cache / digest.hexdigest()[:16] / "mmdu"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as draft:
            made = Path(draft) / "mmdu"
            with zipfile.ZipFile(archive) as pictures:
                pictures.extractall(made / "pictures")
            shutil.copy(packed / "benchmark.json", made)
            try:
                made.rename(folder)
            except OSError:  # another process was first
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise InputError(
            f"cannot unpack the bundled pictures to {folder} ({error.strerror}); set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _asset_folders() -> Iterator[Path]:
    """Where assets may lie: the folder the user names, a checkout, an installed wheel."""
    if named := os.environ.get("MMKV_ASSETS"):
        yield Path(named)
    package = Path(__file__).resolve().parent
    yield package.parent / "assets"
    yield package / "assets"
