"""Expand the paths that users type; open regular files alone; write files whole."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# Names of gates that are at hand and their folders; mmkv puts its own here.
gate_sets: Callable[[], Mapping[str, Path]] = dict
# The folder of a model that goes by a name, None for other names; likewise.
named_model: Callable[[str], Path | None] = dict[str, Path]().get

DRAFT = ".mmkv-draft"  # ends the name of a folder with a file that is not written whole yet
_ABANDONED = 3600  # seconds after which a draft belongs to no living program
_swept: set[Path] = set()  # folders where this process has looked for such drafts


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


def open_regular(path: Path, follow: bool = True) -> BinaryIO:
    """Open a file to read it, if it is a regular one: reading a pipe or a device may never end.

    Args:
        follow: whether ``path`` may be a link.

    Raises:
        OSError: it is none, or cannot be opened.
    """
    # Opening a pipe would wait for somebody who writes to it.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is a folder, a pipe or a device", str(path))


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

    A kill or an error leaves the old file as it was; after an error the draft is gone, too. What a
    kill leaves of a private one goes with the first that another process writes to the folder.

    Args:
        path: its folder must be there.
        private: only this user may read the file, and several threads may write it at once.
        sync: the content is on the disk when this returns.

    Raises:
        OSError: the draft cannot be made, or ``path`` cannot be replaced.
    """
    place, draft = None, path.with_name(f"{path.name}.part")
    if private:
        import tempfile  # which every command would import otherwise

        if path.parent not in _swept:
            _swept.add(path.parent)
            drop_drafts(path.parent)
        # A folder, for writers may make drafts of their own: safetensors does.
        place = tempfile.mkdtemp(dir=path.parent, prefix=".", suffix=DRAFT)
        draft = Path(place) / path.name
    try:
        yield draft
        if private:
            draft.chmod(0o600)
        if sync:
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        if place is not None:
            _remove_folder(place)
        with suppress(OSError):  # its folder has gone, or may no longer be written
            draft.unlink(missing_ok=True)


def drop_drafts(folder: Path) -> None:
    """Remove the drafts of private files whose writer was killed: those older than an hour."""
    with suppress(OSError):
        for draft in folder.glob(f".*{DRAFT}"):
            if draft.lstat().st_mtime < time.time() - _ABANDONED and not draft.is_symlink():
                _remove_folder(draft)


def _remove_folder(folder: str | Path) -> None:
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
