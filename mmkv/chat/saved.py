"""What a session file says about itself, read without a model and without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import SessionError

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from mmkv.api import Engine

_KEY = "mmkv.chat"
# Options of the command line without which a session file cannot go on.
_KEPT = ("model", "policy", "lookahead", "evict_every", "gates", "dtype", "kv")


def chat_extra(engine: Engine, config: EngineConfig, model: str) -> dict[str, str]:
    """Return what a chat adds to its session files: the options to open them again with."""
    values = {name: getattr(config, name) for name in _KEPT}
    values["model"], values["dtype"] = model, str(engine.dtype).removeprefix("torch.")
    for name in ("model", "gates"):
        if values[name] is not None and Path(values[name]).exists():
            values[name] = str(Path(values[name]).resolve())
    return {_KEY: json.dumps({name: v for name, v in values.items() if v is not None})}


def is_session(path: Path) -> bool:
    """Return whether ``path`` is a session file by its header."""
    try:
        return str(_metadata(path).get("format", "")).startswith("mmkv-session")
    except SessionError:
        return False


def chat_options(path: Path) -> dict[str, Any]:
    """Return the options that a chat stored in a session file; {} where it was another program.

    Raises:
        SessionError: there is no file, or it is no session file.
    """
    if not is_session(path):
        _metadata(path)
        raise SessionError(f"{path} is not a session file of mmkv; name another file")
    try:
        stored = json.loads(json.loads(_metadata(path)["extra"])[_KEY])
        return {name: stored[name] for name in _KEPT if isinstance(stored.get(name), str | int)}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    try:
        if not path.is_file():
            raise SessionError(f"no session file at {path}; check the path")
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise SessionError(f"{path} is not a session file of mmkv; name another file") from error
