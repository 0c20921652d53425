"""Where the chat keeps its own files, by the XDG base directory specification."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder of history and autosaved chats; it need not exist."""
    return _base("XDG_STATE_HOME", ".local/state") / "mmkv"


def config_file() -> Path:
    """Return the file with the user's defaults; it need not exist."""
    return _base("XDG_CONFIG_HOME", ".config") / "mmkv.toml"


def _base(variable: str, otherwise: str) -> Path:
    named = os.environ.get(variable, "")
    # The specification ignores relative paths.
    return Path(named) if Path(named).is_absolute() else _home() / otherwise


def _home() -> Path:
    """Return the user's home, the root for one who has none, as containers name it."""
    try:
        return Path.home()
    except RuntimeError:  # a service without HOME, of a user that the system does not know
        return Path(os.sep)
