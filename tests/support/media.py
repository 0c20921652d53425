"""Pictures and videos as files, good and malicious."""

from __future__ import annotations

import asyncio
import base64
import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmkv.server.media.limits import MediaError
from mmkv.server.media.resolver import MediaResolver, Source

FRAMES, RATE = 24, 8


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def two_colours() -> Image.Image:
    """Return a picture of 4 x 2 pixels, red on the left and blue on the right."""
    picture = Image.new("RGB", (4, 2), (255, 0, 0))
    picture.paste((0, 0, 255), (2, 0, 4, 2))
    return picture


PICTURE = encoded(two_colours())


def png_bomb(side: int = 60_000, size: int = 0) -> bytes:
    """Return a PNG that claims ``side`` x ``side`` pixels.

    It has black ones for about ``size`` bytes of file.
    """

    def chunk(name: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        )

    deflate = zlib.compressobj()
    start = deflate.compress(b"") + deflate.flush(zlib.Z_FULL_FLUSH)
    block = deflate.compress(bytes(2**20)) + deflate.flush(zlib.Z_FULL_FLUSH)
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = start + block * (size // len(block)) + deflate.flush()
    body = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def write_clip(path: Path, **options: str) -> Path:
    """Write three seconds in which frame n, of 64 x 48 pixels, is grey of level 10 n.

    Args:
        options: of FFmpeg's container.
    """
    import av

    with av.open(str(path), "w", options=options) as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.bit_rate = 4_000_000
        for number in range(FRAMES):
            level = np.full((48, 64, 3), 10 * number, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(level, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def refusal(
    runner: asyncio.Runner, resolver: MediaResolver, *urls: str, kind: str = "image"
) -> Any:
    """Return the error that the media at ``urls`` meet; it is one line."""
    with pytest.raises(MediaError) as caught:
        runner.run(resolver.resolve([Source(kind, url) for url in urls]))
    assert "\n" not in str(caught.value) and ";" in str(caught.value)
    return caught.value
