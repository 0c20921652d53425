"""What the files of each tenant may take on the disk; pictures, which make way when it is too much.

With API keys, who owns files is who has the key. Without, each browser is a tenant and can make
any number of itself: there the address owns what its browsers have written.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from mmkv.engine.budget import format_bytes
from mmkv.engine.errors import SessionError
from mmkv.engine.paths import open_regular, whole_file
from mmkv.prompt.media import MAX_IMAGE_BYTES, other_kind
from mmkv.server.store import KEPT, TENANT, folder_of


class QuotaError(SessionError):
    """The files of a tenant take as much as they may."""

    status, code = 507, "tenant_storage_full"


class DiskQuota:
    """Bounds the files of each owner: of an API key, or without keys of an address.

    Its saved and kept sessions count, pictures and idle sessions in files. Any thread may call the
    methods.

    Args:
        folder: the server's ``--session-folder``; media: the folder of pictures.
        most: bytes of an owner; None: as many as are left free on the disk, so that nobody can fill
            it and who comes later finds room. files: how many there may be.
        idle: returns bytes and number of an owner's idle sessions that lie in files.
    """

    def __init__(
        self,
        folder: Path | None,
        media: Path,
        most: int | None,
        files: int,
        idle: Callable[[str], tuple[int, int]] = lambda _: (0, 0),
    ) -> None:
        self._folder, self._media, self._most, self._files = folder, media, most, files
        self._idle, self._lock = idle, threading.Lock()
        self._names: dict[str, set[str]] = {}  # folders of each owner's tenants, with files
        # What is being written, by owner: a tenant's folder, bytes, files.
        self._coming: dict[str, list[tuple[str, int, int]]] = {}

    @contextlib.contextmanager
    def writing(self, owner: str, tenant: str, size: int, files: int = 1) -> Iterator[None]:
        """Count bytes and files more than there are while they are written. Raises QuotaError."""
        one = folder_of(tenant), max(size, 0), max(files, 0)
        with self._lock:
            self._names.setdefault(owner, set()).add(one[0])
            if size > 0 or files > 0:
                self._require(owner, size, files)
            self._names[owner].add(one[0])  # it was forgotten if it has no file yet
            coming = self._coming.setdefault(owner, [])
            coming.append(one)
        try:
            yield
        finally:
            with self._lock:
                coming.remove(one)
                if not coming:
                    del self._coming[owner]

    def fits(self, owner: str, size: int, files: int) -> bool:
        """Return whether an owner has room for so much more; below 0: once so much is removed."""
        with self._lock, contextlib.suppress(QuotaError):
            self._require(owner, size, files)
            return True
        return False

    def owner_of(self, name: str) -> str:
        """Return the owner of a tenant's folder; its own name where nobody has written to it."""
        with self._lock:
            return next((owner for owner, names in self._names.items() if name in names), name)

    def _require(self, owner: str, size: int, files: int) -> None:
        held, number = self._idle(owner)
        coming = self._coming.get(owner, ())
        found = [*self._sizes(owner), *((size, files) for _, size, files in coming)]
        held, number = held + sum(size for size, _ in found), number + sum(n for _, n in found)
        most = self._most
        if most is None:
            place = self._media.parent if self._folder is None else self._folder
            most = shutil.disk_usage(place).free if place.is_dir() else held + size
        if held + size > most:
            raise QuotaError(
                f"your files take {format_bytes(held)} and this one {format_bytes(size)}, of the "
                f"{format_bytes(most)} that you may have here; delete sessions or saved ones"
            )
        if number + files > self._files:
            raise QuotaError(
                f"you have {number:,} files of sessions and pictures here, of the {self._files:,} "
                "that you may have; delete sessions or saved ones"
            )

    def _sizes(self, owner: str) -> Iterator[tuple[int, int]]:
        """Yield bytes and 1 for each file of an owner; forget tenants that have none."""
        names = self._names[owner]
        found = {name for name, *_ in self._coming.get(owner, ())}
        places = [] if self._folder is None else [self._folder, self._folder / KEPT]
        for name, place in itertools.product(names, places):
            for _, about in _files_in(place / name):
                found.add(name)
                yield about.st_size, 1
        for file, about in _files_in(self._media):
            if (name := file.partition("-")[0]) in names:
                found.add(name)
                yield about.st_size, 1
        names.intersection_update(found)


def _files_in(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the regular files of a folder, but for those that begin with a dot."""
    with contextlib.suppress(OSError), os.scandir(place) as found:
        for one in found:
            with contextlib.suppress(OSError):  # removed meanwhile
                if one.name[0] != "." and one.is_file(follow_symlinks=False):
                    yield one.name, one.stat(follow_symlinks=False)


MOST_MEDIA = 512 * 2**20  # bytes of all pictures and videos that are kept for clients
_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"BM": "image/bmp",
    b"\x1aE\xdf\xa3": "video/webm",
}


def media_type_of(content: bytes) -> str:
    """Return the type of a picture or video by its first bytes."""
    if content[:4] == b"RIFF":
        return "image/webp" if content[8:12] == b"WEBP" else "video/x-msvideo"
    if content[4:8] == b"ftyp":
        return "video/mp4" if other_kind(content) == "video" else "image/heic"
    found = (kind for begin, kind in _BEGINNINGS.items() if content.startswith(begin))
    return next(found, "application/octet-stream")


class MediaStore:
    """Pictures and videos of sessions, as they were sent, so that a client can show them again.

    The files are named by tenant and SHA-256. Where all together pass ``most`` bytes, those of the
    owner that has the most go first, and of these those that were not asked for the longest. An
    owner whose files take as much as they may loses its own. Any thread may call the methods.

    Args:
        folder: where they lie; it is made when the first one comes.
    """

    def __init__(self, folder: Path, quota: DiskQuota, most: int = MOST_MEDIA) -> None:
        self._folder, self._quota, self._most = folder, quota, most
        self._lock = threading.Lock()

    def put(self, owner: str, tenant: str, digest: str, content: bytes) -> None:
        """Keep one. Raises OSError; QuotaError: its owner has no room, nor pictures to give up."""
        path = self._path(tenant, digest)
        with self._lock:
            if path.is_file() and not path.is_symlink():
                os.utime(path)
                return
            self._folder.mkdir(exist_ok=True)
            own: list[tuple[int, int, Path]] | None = None
            while True:
                try:
                    with (
                        self._quota.writing(owner, tenant, len(content)),
                        whole_file(path, private=True) as draft,
                    ):
                        draft.write_bytes(content)
                    break
                except QuotaError:
                    if own is None:
                        own = self._kept().get(owner, [])
                        held = sum(size for _, size, _ in own)
                        if not self._quota.fits(owner, len(content) - held, 1 - len(own)):
                            raise  # they would make way for nothing
                    if not own:
                        raise
                    own.pop()[2].unlink(missing_ok=True)
            self._make_room()

    def get(self, tenant: str, digest: str) -> bytes | None:
        """Return one; None where it is not kept."""
        path = self._path(tenant, digest)
        try:
            with open_regular(path, follow=False) as file:
                content = file.read(MAX_IMAGE_BYTES + 1)
            os.utime(path)
        except OSError:
            return None
        return content if hashlib.sha256(content).hexdigest() == digest else None

    def remove(self, tenant: str, digest: str) -> None:
        """Remove one, if it is kept."""
        with contextlib.suppress(OSError):
            self._path(tenant, digest).unlink()

    def _path(self, tenant: str, digest: str) -> Path:
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            digest = "none"
        return self._folder / f"{folder_of(tenant)}-{digest}"

    def _kept(self) -> dict[str, list[tuple[int, int, Path]]]:
        """Return time, bytes and path of each owner's files, the latest first."""
        found: dict[str, list[tuple[int, int, Path]]] = {}
        for name, about in _files_in(self._folder):
            tenant, _, digest = name.partition("-")
            if TENANT.fullmatch(tenant) and re.fullmatch("[0-9a-f]{64}", digest):
                one = about.st_mtime_ns, about.st_size, self._folder / name
                found.setdefault(self._quota.owner_of(tenant), []).append(one)
        for ones in found.values():
            ones.sort(reverse=True)
        return found

    def _make_room(self) -> None:
        found = self._kept()
        held = {owner: sum(size for _, size, _ in ones) for owner, ones in found.items()}
        while sum(held.values()) > self._most:
            most = max(held, key=held.__getitem__)
            _, size, path = found[most].pop()
            path.unlink(missing_ok=True)
            held[most] -= size
