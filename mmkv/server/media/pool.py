"""The processes that decode, and their replacement."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from mmkv.server.media.limits import LATE, UNREADABLE, MediaError
from mmkv.server.media.worker import HEADER, pack

_PIECE = 2**20
MOST_HEADER = 2**20  # of what a decoder says beside pixels: times of some hundred frames


class DecodePool:
    """Runs at most ``workers`` decoding processes for pictures, and as many beside for videos.

    So a picture never waits for a video. Each is started when it is first needed. One event loop
    uses it.

    Args:
        memory: address space of a process, in bytes.
    """

    def __init__(self, workers: int, memory: int) -> None:
        self._free = {kind: asyncio.Semaphore(workers) for kind in ("image", "video")}
        self._memory = memory
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    @property
    def idle(self) -> bool:
        """Whether the next process is one that waits."""
        return any(process.returncode is None for process in self._idle)

    @property
    def processes(self) -> list[int]:
        """Return the ids of the processes that are there."""
        return [process.pid for process in self._all if process.returncode is None]

    async def decode(
        self,
        task: dict[str, Any],
        content: bytes,
        seconds: float,
        hold: Callable[[int], None] = lambda _: None,
    ) -> tuple[dict[str, Any], bytearray]:
        """Decode one medium; see :mod:`mmkv.server.media.worker`.

        A process that crashes, is late, or whose request is cancelled, is killed.

        Args:
            hold: called with the bytes of the pixels, before they are taken; what it raises ends
                the process.

        Raises:
            MediaError: 408, 413 or 422.
        """
        name = task["name"]
        async with self._free[task["kind"]]:
            while True:
                idle = self.idle
                try:
                    async with self._worker() as process, asyncio.timeout(seconds):
                        given = task | {"seconds": seconds}
                        result, pixels = await _exchange(process, given, content, hold)
                    break
                except TimeoutError:
                    raise MediaError(
                        LATE, f"{name} was not decoded within {seconds:g} s; send a smaller one"
                    ) from None
                except (asyncio.IncompleteReadError, ConnectionError) as error:
                    if idle:  # it may have died before: a new one tells whose fault it is
                        continue
                    raise MediaError(
                        UNREADABLE, f"{name} broke the decoder; get another copy, or convert it"
                    ) from error
        if "error" in result:
            raise MediaError(result["status"], result["error"])
        return result, pixels

    async def warm(self) -> None:
        """Start a process now; it is used first."""
        async with self._free["image"], self._worker():
            pass

    async def aclose(self) -> None:
        """End every process."""
        for process in list(self._all):
            await self._kill(process)
        self._idle.clear()

    @contextlib.asynccontextmanager
    async def _worker(self) -> AsyncIterator[asyncio.subprocess.Process]:
        process = await self._start()
        try:
            yield process
        except BaseException:
            await self._kill(process)
            raise
        self._idle.append(process)

    async def _start(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
            self._all.discard(process)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "mmkv.server.media.worker", str(self._memory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Nothing of the server's own: keys may stand there. One thread takes less memory.
            env={
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "PATH": os.defpath,
                "OPENBLAS_NUM_THREADS": "1",
            },
            start_new_session=True,  # Ctrl-C is the server's to handle
            limit=_PIECE,
        )
        self._all.add(process)
        return process

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        self._all.discard(process)
        await asyncio.shield(process.wait())


async def _exchange(
    process: asyncio.subprocess.Process,
    task: dict[str, Any],
    content: bytes,
    hold: Callable[[int], None],
) -> tuple[dict[str, Any], bytearray]:
    tasks, results = process.stdin, process.stdout
    assert tasks is not None and results is not None
    tasks.write(pack(task, len(content)))
    view = memoryview(content)
    for start in range(0, len(content), _PIECE):
        tasks.write(view[start : start + _PIECE])
        await tasks.drain()
    await tasks.drain()
    length, size = HEADER.unpack(await results.readexactly(HEADER.size))
    if length > MOST_HEADER:
        raise ConnectionError("what a decoder says of its result is too long")
    result = json.loads(await results.readexactly(length))
    hold(size)
    pixels = bytearray(size)
    done = 0
    while done < size:
        piece = await results.read(min(_PIECE, size - done))
        if not piece:
            raise asyncio.IncompleteReadError(b"", size - done)
        pixels[done : done + len(piece)] = piece
        done += len(piece)
    return result, pixels
