"""Media of one request in, pixels out: check, fetch and decode within its limits."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmkv.engine.errors import InputError
from mmkv.prompt.media import FROM, NOTE, SIZED, Note, data_uri_content, describe
from mmkv.prompt.part_settings import MediaSettings
from mmkv.prompt.video import Clip, FrameRule
from mmkv.server.media.fetch import (
    Fetcher,
    Resolver,
    SystemResolver,
    is_public,
    parse_url,
    read_local,
    show,
)
from mmkv.server.media.limits import (
    BAD_FORM,
    DECODED,
    LATE,
    UNREADABLE,
    Allowance,
    MediaError,
    MediaLimits,
    MediaRoom,
)
from mmkv.server.media.worker import HEADER, pack

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmkv.prompt.qwen_vision import VideoRules


log = logging.getLogger("mmkv.server")
_MOST_DIGESTS = 2**13  # that are kept, of 0.2 KB each
_NO_SETTINGS = MediaSettings()
_PIECE = 2**20
MOST_HEADER = 2**20  # of what a decoder says beside pixels: times of some hundred frames
TEXTS = 2  # data: URLs and files that are read at a time; a URL takes several times its length


@dataclass(frozen=True)
class Source:
    """A picture or video that a request names, with the settings of its part.

    ``frame``: the picture is one of a video, which is scaled when all its frames are known.
    """

    kind: Literal["image", "video"]
    url: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    frame: bool = False


@dataclass(frozen=True)
class Medium:
    """A decoded picture (RGB) or video.

    ``digest``: SHA-256 of the pixels with their shape and times, in hex.
    """

    kind: Literal["image", "video"]
    content: Image | Clip
    digest: str

    @property
    def part(self) -> dict[str, Any]:
        """Return the part of a message that holds it, as :meth:`mmkv.Session.send` takes it."""
        return {"type": self.kind, self.kind: self.content}


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


class MediaResolver:
    """Fetches and decodes the media of requests.

    Nothing is imported or started before it is needed. One event loop uses a resolver; the task
    that awaits :meth:`resolve` may be cancelled at any time, and nothing of it stays.

    Args:
        folder: where ``file:`` URLs may point; None: nowhere.
        rules: how the model scales the frames of videos; None: they stay as they are.
        picture_rules: how it scales pictures; None: only very large ones are scaled down.
        frame_rule: which frames of a video it is shown.
        resolve_host, allowed: how names become addresses, and which of them may be dialled
            (:func:`mmkv.server.media.fetch.is_public`).
    """

    def __init__(
        self,
        limits: MediaLimits | None = None,
        folder: Path | None = None,
        rules: VideoRules | None = None,
        resolve_host: Resolver | None = None,
        allowed: Callable[[str], bool] = is_public,
        picture_rules: VideoRules | None = None,
        frame_rule: FrameRule | None = None,
    ) -> None:
        self.limits = limits or MediaLimits()
        self.folder = folder
        self.pool = DecodePool(self.limits.workers, self.limits.worker_bytes)
        self.room = MediaRoom(self.limits.together, self.limits.room_s)
        self.texts = asyncio.Semaphore(TEXTS)
        self._rules = None if rules is None else dataclasses.asdict(rules)
        self._picture_rules = None if picture_rules is None else dataclasses.asdict(picture_rules)
        self._frame_rule = dataclasses.asdict(frame_rule or FrameRule())
        self._digests: dict[bytes, str] = {}
        self._names = SystemResolver()
        self._fetcher = Fetcher(self.limits, resolve_host or self._names, allowed)

    def check(self, sources: Sequence[Source]) -> None:
        """Refuse what can be refused without fetching anything. Raises MediaError."""
        Allowance(self.limits).take_frames(len(sources))
        for source in sources:
            scheme = _scheme(source.url)
            if scheme == "data":
                if len(source.url) > self.limits.bytes * 3 + 1024:  # each byte as %XX, at most
                    Allowance(self.limits).take_bytes(len(source.url))
            elif scheme == "file":
                if self.folder is None:
                    read_local(source.url, None, Allowance(self.limits))
            else:
                parse_url(source.url, self.limits.ports)
            self._settings(source)

    def digest(self, url: str) -> str:
        """Return SHA-256 of what a data: URL holds, in hex; any thread may ask.

        A chat sends its pictures again at each turn. They are known by their URLs then, which
        takes a fifth of decoding them. Raises MediaError.
        """
        key = hashlib.sha256(url.encode("utf-8", "surrogatepass")).digest()
        found = self._digests.get(key)
        if found is None:
            try:
                found = hashlib.sha256(data_uri_content(url)).hexdigest()
            except InputError as error:
                raise MediaError(BAD_FORM, str(error)) from error
            if len(self._digests) >= _MOST_DIGESTS:
                self._digests.clear()
            self._digests[key] = found
        return found

    def _settings(self, source: Source) -> MediaSettings:
        if not source.settings:
            return _NO_SETTINGS
        try:
            settings = MediaSettings.of(source.kind, source.settings)
            settings.refuse_rates()  # no frames come one by one
            if self._rules is None:
                settings.refuse_scaling()
        except InputError as error:
            raise MediaError(BAD_FORM, str(error)) from error
        return settings

    async def warm(self) -> None:
        """Start a decoding process, so that the first picture need not wait for it."""
        await self.pool.warm()

    async def resolve(
        self, sources: Sequence[Source], allowance: Allowance | None = None
    ) -> list[Medium]:
        """Return the media in the order of ``sources``.

        Args:
            allowance: what is left of a request that has resolved others before.

        Raises:
            MediaError: the first that is wrong; the others are dropped then.
        """
        self.check(sources)
        allowance = allowance or Allowance(self.limits)
        turn = asyncio.Semaphore(self.limits.fetches)

        async def one(source: Source) -> Medium:
            async with turn:
                return await self._one(source, allowance)

        try:
            async with asyncio.timeout(self.limits.request_s), asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(source)) for source in sources]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        except TimeoutError:
            raise MediaError(
                LATE,
                f"the media of the request took over {self.limits.request_s:g} s; send fewer",
            ) from None
        return [task.result() for task in tasks]

    async def aclose(self) -> None:
        """End the decoding processes."""
        self._names.close()
        await self.pool.aclose()

    async def _one(self, source: Source, allowance: Allowance) -> Medium:
        settings = self._settings(source)
        content = await self._content(source, allowance)
        allowance.take_frames(source.kind == "image")
        task = {
            "kind": source.kind,
            "name": _name(source.url),
            "pixels": allowance.pixels,
            "shown": allowance.shown,
            "frames": allowance.frames,
            "settings": settings.given(),
            "frame_rule": self._frame_rule,
            "rules": self._rules,
            "picture_rules": None if source.frame else self._picture_rules,
        }
        seconds = self.limits.seconds(source.kind)
        a_pixel = DECODED if source.kind == "image" else 3

        def hold(size: int) -> None:
            allowance.take_shown(size // 3)
            allowance.hold(size // 3 * a_pixel)

        result, pixels = await self.pool.decode(task, content, seconds, hold)
        allowance.let_go(len(content))
        del content
        allowance.take_pixels(result.get("decoded", len(pixels) // 3))
        if source.kind == "image":
            from PIL import Image as pil

            picture = pil.frombuffer("RGB", tuple(result["size"]), pixels, "raw", "RGB", 0, 1)
            if settings.scales:
                picture.info[SIZED] = True
            picture.info[FROM] = tuple(result["from"])
            if result["note"] is not None:
                picture.info[NOTE] = Note(result["note"])
            return Medium("image", picture, result["digest"])
        import numpy as np

        frames = np.frombuffer(pixels, np.uint8).reshape(result["shape"])
        allowance.take_frames(len(frames))
        times = result["times"] and tuple(result["times"])
        facts = (tuple(result["indices"]), result["fps"], result["total"], times, result["note"])
        clip = Clip(frames, *facts, sized=self._rules is not None)
        if clip.note is not None:
            log.warning("%s", clip.note)
        return Medium("video", clip, result["digest"])

    async def _content(self, source: Source, allowance: Allowance) -> bytes:
        scheme, seconds = _scheme(source.url), self.limits.seconds(source.kind)
        try:
            async with asyncio.timeout(seconds):
                if scheme == "data":
                    async with self.texts:
                        content = await asyncio.to_thread(data_uri_content, source.url)
                        allowance.hold(len(content))
                    allowance.take_bytes(len(content))
                elif scheme == "file":
                    async with self.texts:
                        content = await asyncio.to_thread(
                            read_local, source.url, self.folder, allowance
                        )
                        allowance.hold(len(content))
                else:
                    content = await self._fetcher.fetch(source.url, allowance)
        except TimeoutError:
            raise MediaError(
                LATE, f"{_name(source.url)} did not arrive within {seconds:g} s; send it as data:"
            ) from None
        except MediaError:
            raise
        except InputError as error:
            raise MediaError(BAD_FORM, str(error)) from error
        if not content:
            raise MediaError(BAD_FORM, f"{_name(source.url)} is empty; give a picture or video")
        return content


def _scheme(url: str) -> str:
    return url[:8].partition(":")[0].lower()


def _name(url: str) -> str:
    return describe(url) if _scheme(url) == "data" else show(url)


def _first(errors: BaseExceptionGroup) -> BaseException:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found
