"""Finding what ships with mmkv: the small bundled model and its demo picture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.errors import ModelError

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


def _asset_folders() -> Iterator[Path]:
    """Where assets may lie: the folder the user names, a checkout, an installed wheel."""
    if named := os.environ.get("MMKV_ASSETS"):
        yield Path(named)
    package = Path(__file__).resolve().parent
    yield package.parent / "assets"
    yield package / "assets"
