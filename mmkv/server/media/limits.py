"""Bounds on the media of one request and of all together, and what can be wrong with one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from importlib.util import find_spec

from mmkv.engine.errors import InputError
from mmkv.prompt.media import MAX_IMAGE_BYTES, MAX_PIXELS
from mmkv.prompt.video import MAX_FRAMES

# Of pictures, by Pillow's names; JPEG opens MPO, too.
FORMATS = ["PNG", "JPEG", "WEBP", "GIF", "BMP"]
FORMATS += ["HEIF"] if find_spec("pillow_heif") else []
BAD_FORM = 400
REFUSED = 403
LATE = 408  # clients try 408 again, and it is no fault of the server
TOO_LARGE = 413
UNREADABLE = 422
BUSY = 503


class MediaError(InputError):
    """A picture or video that cannot be had.

    Attributes:
        status: the HTTP status to answer with: 400 for a URL that cannot be followed, 403 for an
            address that is refused, 408 after a deadline, 413 for too many bytes, pixels or
            frames, 422 for content that cannot be decoded, 503 where those of other requests leave
            no room.
        code: the kind in one word, for an error's ``code`` field.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, _CODES[status]


_CODES = {
    BAD_FORM: "media_url",
    REFUSED: "media_refused",
    LATE: "media_timeout",
    TOO_LARGE: "media_too_large",
    UNREADABLE: "media_unreadable",
    BUSY: "media_waiting",
}


DECODED = 4  # bytes of a pixel of a decoded picture; frames of videos take 3


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on the media of one request, and on the processes that decode them.

    Attributes:
        bytes: of all encoded media of a request together.
        pixels: of all decoded pictures and frames of a request together; shown: of these as large
            as the model reads them.
        frames: pictures and frames of a request together.
        picture_s, video_s: seconds in which one medium has to arrive, and again to be decoded.
        request_s: seconds for all media of a request, waiting for a decoder among them.
        fetches: media of one request that are fetched at a time.
        redirects: hops that are followed.
        ports: ports beside 80 for http and 443 for https.
        workers: decoding processes of each kind; worker_bytes: address space of each.
        together: bytes of all requests' media, encoded and decoded, that were not read yet.
        room_s: seconds for which a request waits for some of them.
    """

    bytes: int = MAX_IMAGE_BYTES
    pixels: int = MAX_PIXELS
    shown: int = MAX_PIXELS
    frames: int = MAX_FRAMES
    picture_s: float = 10.0
    video_s: float = 60.0
    request_s: float = 120.0
    fetches: int = 4
    redirects: int = 3
    ports: frozenset[int] = field(default_factory=frozenset)
    workers: int = 1
    worker_bytes: int = 2 * 2**30
    together: int = 768 * 2**20
    room_s: float = 30.0

    def seconds(self, kind: str) -> float:
        """Return the deadline of one medium, in seconds."""
        return self.video_s if kind == "video" else self.picture_s


class MediaRoom:
    """The bytes of all requests' media, from when they come until the engine has read them.

    A request begins while half of the room is free, and waits for that; one that has begun never
    waits, but is refused where the room is full: two that wait for each other would stay forever.

    Attributes:
        most: bytes that there may be; held: those that there are.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self.most, self.held = most, 0
        self._seconds, self._less = seconds, asyncio.Event()

    async def enter(self) -> None:
        """Wait until half of the room is free. Raises MediaError (503) when that takes too long."""
        try:
            async with asyncio.timeout(self._seconds):
                while self.held > self.most // 2:
                    self._less.clear()
                    await self._less.wait()
        except TimeoutError:
            raise self._full() from None

    def take(self, count: int) -> None:
        """Count bytes that are to come. Raises MediaError (503)."""
        if self.held + count > self.most:
            raise self._full()
        self.held += count

    def give_back(self, count: int) -> None:
        """Count bytes that have gone."""
        self.held -= count
        self._less.set()

    def _full(self) -> MediaError:
        return MediaError(
            BUSY,
            f"pictures and videos of {self.most >> 20} MiB that other requests sent are not read "
            "yet; send this one later",
        )


class Allowance:
    """What one request may still take.

    Args:
        room: that it shares with other requests; None: it has one of its own.

    Attributes:
        bytes, pixels, shown, frames: what is left of them.
    """

    def __init__(self, limits: MediaLimits, room: MediaRoom | None = None) -> None:
        self._limits = limits
        self.bytes, self.pixels, self.frames = limits.bytes, limits.pixels, limits.frames
        self.shown = limits.shown
        self._room, self._held = room, 0

    def hold(self, count: int) -> None:
        """Take bytes of the room. Raises MediaError (503)."""
        if self._room is not None:
            self._room.take(count)
            self._held += count

    def let_go(self, count: int | None = None) -> None:
        """Return bytes to the room, by default all that it has."""
        count = self._held if count is None else count
        self._held -= count
        if self._room is not None:
            self._room.give_back(count)

    def take_bytes(self, count: int) -> None:
        """Count encoded bytes. Raises MediaError (413)."""
        self.bytes -= count
        if self.bytes < 0:
            raise MediaError(
                TOO_LARGE,
                f"the media of the request are larger than {self._limits.bytes / 2**20:g} MiB "
                "together; send fewer or smaller ones",
            )

    def take_pixels(self, count: int) -> None:
        """Count decoded pixels. Raises MediaError (413)."""
        self.pixels -= count
        if self.pixels < 0:
            raise MediaError(
                TOO_LARGE,
                f"the media of the request have more than {self._limits.pixels / 10**6:g} "
                "megapixels together; send fewer or scale them down",
            )

    def take_shown(self, count: int) -> None:
        """Count pixels as the model reads them. Raises MediaError (413)."""
        self.shown -= count
        if self.shown < 0:
            raise MediaError(
                TOO_LARGE,
                "the model would read the media of the request with more than "
                f"{self._limits.shown / 10**6:g} megapixels together, which this server has no "
                "memory for; send fewer or smaller ones",
            )

    def take_frames(self, count: int) -> None:
        """Count pictures and frames. Raises MediaError (413)."""
        self.frames -= count
        if self.frames < 0:
            raise MediaError(
                TOO_LARGE,
                f"the request has more than {self._limits.frames} pictures and frames together; "
                "send fewer, or sample videos at a lower rate",
            )
