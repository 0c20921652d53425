"""The folder of packed weights: list and clear it, bound it, take turns in writing to it.

Nothing here imports torch; :mod:`mmkv.engine.model.panel_files` reads and writes the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from mmkv.engine.budget import format_bytes, parse_bytes
from mmkv.engine.errors import BudgetError, ModelError
from mmkv.engine.paths import cache_folder, open_regular

SWITCH = "MMKV_PANELS"  # 0: keep none; an amount of memory: what all files may take
MOST_BYTES = 20 * 10**9
FORMAT = "mmkv panels 1"
# What a file of other content raises while it is read.
FOREIGN = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
_SPARE = 2**30  # that a disk keeps free
_PATIENCE = 60.0  # seconds that another process may take for its next matrix, or to sync


@dataclass(frozen=True)
class KeptFile:
    """A file of packed weights.

    Attributes:
        model: the checkpoint as it was named; form: of the weights; bytes: of the file.
        part: of the checkpoint: ``text``, or ``vision`` for its tower and projector.
        used: when it was last used, in seconds since 1970.
    """

    path: Path
    model: str
    form: str
    part: str
    bytes: int
    used: float

    def as_json(self) -> dict[str, Any]:
        """Return what ``mmkv cache --json`` prints of it."""
        return asdict(self) | {"path": str(self.path)}


def folder() -> Path:
    """Return the folder of all files; it need not exist."""
    return cache_folder() / "panels"


def kept(model: str | None = None) -> list[KeptFile]:
    """List the files, the last used one first. What is no such file is left out.

    Args:
        model: a checkpoint as it was named, or the last part of that name; None: all.
    """
    found = []
    for path in folder().glob("*.safetensors"):
        try:
            with open_regular(path) as file:
                about, state = read_header(file)[1]["__metadata__"], path.stat()
            name, form, part = (str(about[key]) for key in ("model", "form", "part"))
        except FOREIGN:
            continue
        if model is None or model in (name, Path(name).name):
            found.append(KeptFile(path, name, form, part, state.st_size, state.st_mtime))
    return sorted(found, key=lambda file: -file.used)


def clear(model: str | None = None) -> list[KeptFile]:
    """Delete the files of a checkpoint, or all. Processes that have one mapped keep it.

    Args:
        model: as of :func:`kept`.

    Returns:
        What was deleted.

    Raises:
        ModelError: there is none of that name, or one cannot be deleted.
    """
    wanted = kept(model)
    if model is not None and not wanted:
        raise ModelError(f"no packed weights of {model} are kept; `mmkv cache` lists what is")
    _drop_left_drafts(folder())
    for file in wanted:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            raise ModelError(f"cannot delete {file.path} ({error.strerror})") from error
    return wanted


def limit() -> int | None:
    """Return what all files together may take: 0: there are to be none; None: nobody said."""
    text = os.environ.get(SWITCH, "").strip()
    try:
        return parse_bytes(text) if text else None
    except BudgetError as error:
        raise ModelError(
            f"{SWITCH}: {error}; it bounds the packed weights on disk, 0 keeps none"
        ) from error


def read_header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """Return where the tensors begin, and the header. Raises what FOREIGN lists."""
    size = int.from_bytes(file.read(8), "little")
    if size > os.fstat(file.fileno()).st_size:
        raise ValueError("not a safetensors file")
    header = json.loads(file.read(size))
    if header["__metadata__"]["format"] != FORMAT:
        raise ValueError("not a file of packed weights")
    return 8 + size, header


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock on the draft of ``path``: one process writes, and others wait for it.

    Raises:
        OSError: that process makes no headway, or nothing can be written there.
    """
    draft = path.with_name(f"{path.name}.part")
    size, since = -1, time.monotonic()
    while True:
        # Not where a link leads: who may write to this folder could have any file overwritten.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(draft, flags, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one before may have renamed or deleted it meanwhile.
            if _same_file(lock, draft):
                break
        except BlockingIOError:
            if (now := os.fstat(lock).st_size) != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > _PATIENCE:
                os.close(lock)
                raise OSError("another process has been writing them for too long") from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        time.sleep(0.1)
    try:
        yield
    finally:
        # What is left of it is nothing that anyone may use.
        if _same_file(lock, draft):
            draft.unlink(missing_ok=True)
        os.close(lock)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def make_room(place: Path, need: int, most: int | None, deletes: bool = True) -> None:
    """Delete the files that were used longest ago until ``need`` bytes fit.

    Args:
        most: bytes that all may take together; None: 20 GB, and at most half of what is free.
        deletes: whether files of others may go.

    Raises:
        OSError: they never will; nothing has been deleted then.
    """
    _drop_left_drafts(place)
    files = kept()
    held, free = sum(file.bytes for file in files), shutil.disk_usage(place).free
    most = min(MOST_BYTES, (held + free) // 2) if most is None else most
    most = min(most, held + free - _SPARE)
    left = most if deletes else most - held
    if need > left:
        raise OSError(f"they take {format_bytes(need)}, and may take {format_bytes(max(left, 0))}")
    while files and held + need > most:
        oldest = files.pop()
        oldest.path.unlink(missing_ok=True)
        held -= oldest.bytes


def _drop_left_drafts(place: Path) -> None:
    """Delete drafts of processes that were killed."""
    for draft in place.glob("*.part"):
        with contextlib.suppress(OSError), open_regular(draft, follow=False) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # It may have been finished, and the next one begun, since it was opened.
            if _same_file(file.fileno(), draft):
                draft.unlink(missing_ok=True)
