"""Expand the paths that users type; write files whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

# Names of gates that are at hand and their folders; mmkv puts its own here.
gate_sets: Callable[[], Mapping[str, Path]] = dict
# The folder of a model that goes by a name, None for other names; likewise.
named_model: Callable[[str], Path | None] = dict[str, Path]().get


def user_path(name: str | os.PathLike[str]) -> Path:
    """Return the path that ``name`` stands for, ``~`` expanded. Nothing is looked up on the disk.

    Raises:
        InputError: for what cannot be a path: a NUL byte, text that is no file name, the home of a
            user who is not there. TypeError: ``name`` is neither text nor a path.
    """
    # Not above: this module is imported with the package, before Ctrl-C is looked after.
    from mmkv.engine.errors import InputError

    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f"a path is text or a pathlib.Path, not a {type(name).__name__}")
    text = os.fspath(name)
    if not isinstance(text, str):
        raise TypeError("a path is text, not bytes; decode it with os.fsdecode")
    shown = ascii(text[:80])
    try:
        os.fsencode(text)
    except UnicodeEncodeError as error:
        raise InputError(f"{shown} cannot be a file name; check the path") from error
    if "\0" in text:
        raise InputError(f"{shown} holds a NUL byte, which no path has; check the path")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InputError(f"{shown}: no such user's home folder; write the whole path") from error


def cache_folder() -> Path:
    """Return the folder of what can be made anew at any time; it need not exist."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of these variables ignores relative paths.
    if Path(named).is_absolute():
        return Path(named) / "mmkv"
    try:
        home = Path.home()
    except RuntimeError:  # a service without HOME, of a user that the system does not know
        home = Path(os.sep)
    return home / ".cache" / "mmkv"


def is_file(path: Path) -> bool:
    """Return whether a file is there; False also where the name is too long to be one."""
    try:
        return path.is_file()
    except OSError:
        return False


def is_folder(path: Path) -> bool:
    """Return whether a folder is there; False also where the name is too long to be one."""
    try:
        return path.is_dir()
    except OSError:
        return False


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file of a clone made without Git LFS stands in another one's place."""
    try:
        with path.open("rb") as file:
            return file.read(40).startswith(b"version https://git-lfs")
    except OSError:
        return False


@contextmanager
def whole_file(path: Path, private: bool = False, sync: bool = False) -> Iterator[Path]:
    """Yield a draft beside ``path``, which takes its place when it has been written.

    A kill or an error leaves the old file as it was; after an error the draft is gone, too.

    Args:
        path: its folder must be there.
        private: only this user may read the file, and several threads may write it at once.
        sync: the content is on the disk when this returns.

    Raises:
        OSError: the draft cannot be made, or ``path`` cannot be replaced.
    """
    if private:
        import tempfile  # which every command would import otherwise

        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
        os.close(handle)
        draft = Path(name)
    else:
        draft = path.with_name(f"{path.name}.part")
    try:
        yield draft
        if sync:
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        with suppress(OSError):  # its folder has gone, or may no longer be written
            draft.unlink(missing_ok=True)
