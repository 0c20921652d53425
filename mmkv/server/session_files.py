"""The files that sessions are saved to and read from."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from mmkv.engine.errors import SessionError
from mmkv.server.conversation import digest_of
from mmkv.server.errors import ApiError
from mmkv.server.lasting import NotWrittenError, told

if TYPE_CHECKING:
    from pathlib import Path

    from mmkv.server.kept import Kept
    from mmkv.server.room import Caller, Room

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
NAMED = "named by letters, digits, dots, dashes and underscores"
_SUFFIX = ".mmkv"
_SAVING = ".saving"  # of a folder in which a new name is taken


@dataclass(frozen=True)
class Saved:
    """A session file: its name, size, and when it was written, in seconds since 1970."""

    name: str
    bytes: int
    saved_at: int

    def shown(self) -> dict[str, Any]:
        """Return it as requests see it."""
        return {
            "id": self.name,
            "object": "saved_session",
            "bytes": self.bytes,
            "saved_at": self.saved_at,
        }


class SessionFiles:
    """Writes and reads memories, on the engine's thread; whoever asks waits in the event loop."""

    def __init__(self, room: Room) -> None:
        self._room = room

    def path(self, name: str, caller: Caller) -> Path:
        """Return where a saved session lies; callers with different keys have different folders.

        Raises:
            ApiError: 400, the name cannot be one, or this server has no folder.
        """
        folder = self._room.settings.session_folder
        if folder is None:
            raise ApiError(
                400,
                "this server saves no sessions; start it with --session-folder",
                "no_session_folder",
            )
        if not re.fullmatch(NAME, name):
            raise ApiError(
                400,
                f"a file is {NAMED}",
                "invalid_value",
                "name",
            )
        return folder / (caller.tenant[:32] or "public") / f"{name}{_SUFFIX}"

    async def of(self, caller: Caller) -> list[Saved]:
        """Return a caller's files, by name. Raises ApiError (400): this server has no folder."""
        folder = self.path("any", caller).parent

        def read() -> list[Saved]:
            found = []
            for path in sorted(folder.glob(f"*{_SUFFIX}")):
                with contextlib.suppress(OSError):  # deleted meanwhile, a broken link
                    about = path.stat()
                    name = path.name.removesuffix(_SUFFIX)
                    if stat.S_ISREG(about.st_mode) and re.fullmatch(NAME, name):
                        found.append(Saved(name, about.st_size, int(about.st_mtime)))
            return found

        return await asyncio.to_thread(read)

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove a file. Raises ApiError: there is none (404), the disk refuses it (507)."""
        path = self.path(name, caller)

        def remove() -> None:
            try:
                path.unlink()
            except FileNotFoundError:
                raise no_such_file(name, "name") from None
            except OSError as error:
                raise ApiError(
                    507,
                    f"the file cannot be removed: {error.strerror}; see to the disk of "
                    "--session-folder",
                    "cannot_remove",
                ) from error

        await asyncio.to_thread(remove)

    async def write(self, kept: Kept, path: Path, over: bool = True) -> None:
        """Write a session file.

        Args:
            over: whether one that is there may be replaced.

        Raises:
            NotWrittenError: the disk refuses it; ApiError: 409, there is one.
        """

        def write() -> None:
            with told():
                if over:
                    kept.save(path)
                else:
                    _save_new(kept, path)

        try:
            await self._room.worker.call(write)
        except SessionError as error:
            # Where the files lie is no affair of who asks.
            shown = str(error).replace(f"{path.parent}{os.sep}", "")
            raise NotWrittenError(shown) from error

    async def load(self, path: Path, name: str, tenant: str) -> Kept:
        """Read a session file of a tenant.

        Args:
            name: of the file, for messages.

        Raises:
            SessionError: it cannot be read; CapacityError: there is no room now.
        """
        machine = self._room.worker.machine
        assert machine is not None
        shelf = machine.shelf
        # What other settings or cuts it was made with is not known: it resumes nothing else.
        root = digest_of([self._room.facts.root, secrets.token_hex(16)])
        weight = self._room.weights.get(tenant, 1.0)
        return await self._room.worker.call(lambda: shelf.load(path, name, root, weight))


def _save_new(kept: Kept, path: Path) -> None:
    """Write a session file where there is none; of two at once the second is refused."""
    with FileLock(path.with_name(_SAVING)):  # among all servers with this folder
        if path.exists():
            raise saved_already(path.stem)
        kept.save(path)


def no_such_file(name: str, param: str) -> ApiError:
    """Return the error of a request that names a file which is not there."""
    message = f"there is no saved session {name}; save one first"
    return ApiError(404, message, "file_not_found", param)


def saved_already(name: str) -> ApiError:
    """Return the error of a name that is taken, where the caller does not want it replaced."""
    return ApiError(409, f"there is a file {name} already; set overwrite", "file_exists", "name")
