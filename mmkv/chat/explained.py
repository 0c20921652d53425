"""``/explain`` and ``mmkv explain``: pages and figures of what a session kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmkv.chat.targets import checked_target
from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import InputError
from mmkv.engine.paths import user_path

if TYPE_CHECKING:
    from mmkv.explain import Trace

_MARK = b"<title>What the cache kept</title>"


def is_report(path: Path) -> bool:
    """Return whether a file is a page of a trace, by its head."""
    try:
        with path.open("rb") as file:
            return _MARK in file.read(2048)
    except OSError:
        return False


def report_target(
    name: str, agreed: Callable[[Path], bool] = lambda _: True, force: str | None = ""
) -> Path:
    """Return where a page may be written: nowhere over a file of another kind. Raises InputError.

    Args:
        agreed: asks whether an older page may be overwritten.
        force: the words that overwrite anything, or None where they have been said.
    """
    words = None if force is None else force or "move that file away first"
    return checked_target(name, "a page of mmkv explain", is_report, agreed, words)


def figures_folder(name: str) -> Path:
    """Return the folder for figures: one that is there, or can be made.

    Raises:
        InputError: nothing can be written there, or there is no matplotlib.
    """
    from mmkv.explain.figures import require_matplotlib

    require_matplotlib()
    path = user_path(name)
    if path.exists() and not path.is_dir():
        raise InputError(f"{name} is no folder; figures are several files, name a folder")
    if not path.exists() and not path.absolute().parent.is_dir():
        raise InputError(f"there is no folder {path.parent}; make it, or choose another name")
    return path


def write_report(trace: Trace, path: Path) -> str:
    """Write the page and say so in one line. Raises InputError."""
    written = trace.report(path)
    return f"wrote {path} ({format_bytes(written.stat().st_size)}); open it in a browser"


def write_figures(trace: Trace, folder: Path) -> str:
    """Write the PNG files and say so in one line. Raises InputError."""
    names = [path.name for path in trace.figures(folder)]
    return f"wrote {', '.join(names)} to {folder}"
