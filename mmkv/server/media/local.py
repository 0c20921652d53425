"""Read files of the one folder that requests may name."""

from __future__ import annotations

import os
import stat
import urllib.parse
from pathlib import Path

from mmkv.server.media.errors import BAD_FORM, REFUSED, MediaError
from mmkv.server.media.limits import Allowance


def read_local(url: str, folder: Path | None, allowance: Allowance) -> bytes:
    """Read the file that a ``file:`` URL names, if it lies in ``folder`` or below.

    Links are followed while they stay in the folder. Whether a file exists outside of it is not
    told: the answer is the same.

    Raises:
        MediaError: 400 without a folder, 403 for what is no regular file in it, 413 above what
            ``allowance`` has left.
    """
    if folder is None:
        raise MediaError(
            BAD_FORM,
            "file: URLs are not allowed here; send a data: URL, or start the server with "
            "--allowed-local-media-path",
        )
    refused = MediaError(
        REFUSED, "the file: URL names no file in the folder that is allowed; check the path"
    )
    try:
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.parse.unquote(parts.path, errors="strict"))
        if parts.netloc not in ("", "localhost") or not path.is_absolute():
            raise refused
        root = folder.resolve(strict=True)
        inner = path.resolve(strict=True).relative_to(root)
        descriptor = _open_below(root, inner)
    except (OSError, ValueError, RuntimeError):  # a NUL byte, a loop of links, ...
        raise refused from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise refused
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(allowance.bytes + 1)
    allowance.take_bytes(len(content))
    return content


def _open_below(root: Path, inner: Path) -> int:
    """Open a resolved path folder by folder: what has become a link since then is refused."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *above, name = inner.parts or (".",)
        for part in above:
            inside = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inside
        # O_NONBLOCK: a pipe without a writer would wait for one.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=folder)
    finally:
        os.close(folder)
