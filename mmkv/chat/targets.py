"""Which files the chat may write to: /save and /export overwrite nothing by accident."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

from mmkv.engine.errors import InputError
from mmkv.engine.paths import user_path


def checked_target(
    name: str,
    kind: str,
    is_own: Callable[[Path], bool],
    agreed: Callable[[Path], bool],
    force: str | None = None,
) -> Path:
    """Return the file that ``name`` may be written to: a new one, or one given up on purpose.

    ``~`` is the home. A link is followed, and only to a file that ``is_own``.

    Args:
        kind: what ``is_own`` recognises, for messages: "a session file".
        agreed: asks whether an existing file of that kind may be overwritten.
        force: None if anything that is a plain file may be overwritten (no link); else the words
            that would force it.

    Raises:
        InputError: a folder, device, pipe or dangling link; a file of another kind; not agreed.
    """
    try:
        path = user_path(name)
        linked = path.is_symlink()
        path = path.resolve() if linked else path
        mode = path.stat().st_mode if path.exists() else None
        parent = path.parent.is_dir()
    except (OSError, InputError) as error:
        raise InputError(f"not a usable file name: {name[:80]!r}; choose another") from error
    if linked and mode is None:
        raise InputError(f"{name} is a link to a file that is not there; choose another name")
    if not parent:
        raise InputError(f"there is no folder {path.parent}; make it, or choose another name")
    if mode is None:
        return path
    if not stat.S_ISREG(mode):
        raise InputError(f"{name} is {_described(mode)}; name a file")
    own = is_own(path)
    if linked and not own:
        raise InputError(f"{name} is a link to {path}, not {kind}; choose another name")
    if force is None:
        return path
    if not own:
        raise InputError(f"{name} is not {kind}; choose another name, or {force}")
    if not agreed(path):
        raise InputError(f"{name} exists and stays as it is; choose another name, or {force}")
    return path


def _described(mode: int) -> str:
    for test, words in (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if test(mode):
            return words
    return "a device"
