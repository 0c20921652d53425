"""Check where a long run is to write before it does any work."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from mmkv.engine.errors import InputError

LEAST_FREE = 16 * 2**20
_PROBE = 64 * 2**10


def require_output(folder: Path, option: str = "--output") -> None:
    """Make a folder, and write and remove a file of 64 KiB in it.

    Args:
        option: what the message tells the user to change.

    Raises:
        InputError: it is a file, cannot be made or written, or its disk has under 16 MiB left.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; name a folder with {option}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=".mmkv-") as probe:
            probe.write(bytes(_PROBE))
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(folder).free
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"cannot write to {str(folder)[:200]!r} ({reason}); free space or name another {option}"
        ) from error
    if free < LEAST_FREE:
        raise InputError(
            f"the disk of {folder} has {free / 2**20:.1f} MiB left; free at least "
            f"{LEAST_FREE >> 20} MiB or name another {option}"
        )
