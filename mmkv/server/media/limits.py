"""Bounds on the media of one request."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmkv.prompt.media import MAX_IMAGE_BYTES, MAX_PIXELS
from mmkv.prompt.video import MAX_FRAMES
from mmkv.server.media.errors import TOO_LARGE, MediaError


@dataclass(frozen=True)
class MediaLimits:
    """Bounds on the media of one request, and on the processes that decode them.

    Attributes:
        bytes: of all encoded media of a request together.
        pixels: of all decoded pictures and frames of a request together.
        frames: pictures and frames of a request together.
        picture_s, video_s: seconds in which one medium has to arrive, and again to be decoded.
        request_s: seconds for all media of a request, waiting for a decoder among them.
        fetches: media of one request that are fetched at a time.
        redirects: hops that are followed.
        ports: ports beside 80 for http and 443 for https.
        workers: decoding processes of each kind; worker_bytes: address space of each.
    """

    bytes: int = MAX_IMAGE_BYTES
    pixels: int = MAX_PIXELS
    frames: int = MAX_FRAMES
    picture_s: float = 10.0
    video_s: float = 60.0
    request_s: float = 120.0
    fetches: int = 4
    redirects: int = 3
    ports: frozenset[int] = field(default_factory=frozenset)
    workers: int = 1
    worker_bytes: int = 2 * 2**30

    def seconds(self, kind: str) -> float:
        """Return the deadline of one medium, in seconds."""
        return self.video_s if kind == "video" else self.picture_s


class Allowance:
    """What one request may still take.

    Attributes:
        bytes, pixels, frames: what is left of them.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self.bytes, self.pixels, self.frames = limits.bytes, limits.pixels, limits.frames

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

    def take_frames(self, count: int) -> None:
        """Count pictures and frames. Raises MediaError (413)."""
        self.frames -= count
        if self.frames < 0:
            raise MediaError(
                TOO_LARGE,
                f"the request has more than {self._limits.frames} pictures and frames together; "
                "send fewer, or sample videos at a lower rate",
            )
