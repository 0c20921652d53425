"""A process that decodes pictures and videos, and nothing else.

It reads tasks from its standard input and writes what they give to its standard output, each as a
header in JSON and raw bytes. A decoder that crashes, hangs or takes too much memory ends this
process alone. Torch is not imported.

    python -m mmkv.server.media.worker BYTES_OF_ADDRESS_SPACE
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

import numpy as np
from PIL import Image as pil
from PIL import WebPImagePlugin as _webp  # noqa: F401 (else Image.open imports every format)

from mmkv.engine.errors import STOPS, InputError
from mmkv.prompt.media import NOTE, TooManyPixelsError, decode_image, other
from mmkv.prompt.part_settings import MediaSettings
from mmkv.prompt.qwen_vision import VideoRules
from mmkv.prompt.video import (
    REMEDY,
    FrameRule,
    Missing,
    PyAVReader,
    import_reader,
    read_clip,
    unreadable,
)
from mmkv.server.media.limits import FORMATS, TOO_LARGE, UNREADABLE

HEADER = struct.Struct(">IQ")  # lengths of the JSON text and of the bytes after it

MOST_PIXELS = 16 * 10**6  # of a picture, where it is not known what the model reads
_GRACE_S = 5  # beyond the deadline that the server keeps


def pack(header: dict[str, Any], size: int) -> bytes:
    """Return what is sent before ``size`` raw bytes."""
    text = json.dumps(header).encode()
    return HEADER.pack(len(text), size) + text


def main(memory: int) -> None:
    """Decode until the standard input ends."""
    tasks = sys.stdin.buffer
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not garble the results
    _restrict(memory)
    pil.MAX_IMAGE_PIXELS = None  # the size is checked here, before the pixels
    while head := tasks.read(HEADER.size):
        length, size = HEADER.unpack(head)
        task = json.loads(tasks.read(length))
        content = tasks.read(size)
        signal.alarm(int(task["seconds"]) + _GRACE_S)  # in case that nobody is left to end it
        result, pixels = _decoded(task, content)
        del content
        _write(results, result, pixels)
        signal.alarm(0)


def _restrict(memory: int) -> None:
    for kind, amount in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # some systems refuse the first
            resource.setrlimit(kind, (amount, amount))


def _decoded(task: dict[str, Any], content: bytes) -> tuple[dict[str, Any], bytes | memoryview]:
    try:
        if task["kind"] == "video":
            return _video(task, content)
        picture = decode_image(content, task["name"], FORMATS, task["pixels"])
        decoded, note, before = picture.width * picture.height, picture.info.get(NOTE), picture.size
        asked = _sized(picture, task)
        picture = asked or _scaled(picture, task["picture_rules"], task["shown"], task["name"])
        decoded = max(decoded, picture.width * picture.height)
        pixels = picture.tobytes()
        result = {"size": picture.size}
        facts = {"digest": _digest(result, pixels), "decoded": decoded, "note": note}
        facts["from"] = picture.size if asked else before
        return result | facts, pixels
    except TooManyPixelsError as error:
        return {"status": TOO_LARGE, "error": str(error)}, b""
    except InputError as error:
        return {"status": UNREADABLE, "error": str(error)}, b""
    except MemoryError:
        what = f"{task['name']} does not fit into the memory of a decoder; scale it down"
        return {"status": TOO_LARGE, "error": what}, b""


def _sized(picture: pil.Image, task: dict[str, Any]) -> pil.Image | None:
    """Scale a picture to the size that its message asks for; None where it asks for none."""
    settings = MediaSettings(**task["settings"])
    if not settings.scales:
        return None
    factor = VideoRules(**task["rules"]).factor
    rows, columns = settings.picture_size(picture.height, picture.width, factor)
    if rows * columns > task["pixels"]:
        raise TooManyPixelsError(
            f"{task['name']} is to be scaled to {columns} x {rows} pixels, over the request's "
            "limit; ask for a smaller size"
        )
    return picture.resize((columns, rows), pil.Resampling.BICUBIC)


def _scaled(picture: pil.Image, rules: dict[str, Any] | None, shown: int, name: str) -> pil.Image:
    """Scale a large picture down here: in the server that would hold up all replies.

    By the model's rules the pixels are those that its processor makes, which finds nothing left to
    do. Where they are not known, a picture keeps more than any model reads of it.
    """
    width, height = picture.size
    if rules is None:
        shrink = math.sqrt(width * height / max(1, min(MOST_PIXELS, shown)))
        if shrink <= 1:
            return picture
        size = max(1, int(width / shrink)), max(1, int(height / shrink))
        return picture.resize(size, pil.Resampling.BICUBIC)
    rule = VideoRules(**rules)
    try:
        rows, columns = rule.size(1, height, width)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if rows * columns >= width * height or rule.size(1, rows, columns) != (rows, columns):
        return picture
    return picture.resize((columns, rows), pil.Resampling.BICUBIC)


def _video(task: dict[str, Any], content: bytes) -> tuple[dict[str, Any], memoryview]:
    name, rules = task["name"], task["rules"]
    module = import_reader("av")
    if module is None:
        raise InputError(f"this server reads no videos; {REMEDY} on it")
    container = _container(content)
    if container is None:
        told = other(content, "a video") or "is no MP4, WebM, Matroska or AVI; convert it to MP4"
        raise InputError(f"{name} {told}")
    rule = None if rules is None else VideoRules(**rules)
    settings = MediaSettings(**task["settings"])
    frames = FrameRule(**task["frame_rule"])
    try:
        settings.refuse_rates()
        # The format is given, not guessed: a playlist could name files and addresses.
        reader = PyAVReader(module, content, container)
        width, height = reader.size
        if width * height > task["pixels"]:
            raise TooManyPixelsError(
                f"{name} has frames of {width} x {height} pixels, over the limit; scale it down"
            )
        scaled = None if rule is None else rule.scaler_of(settings)

        def choose(total: int, rate: float) -> list[int]:
            indices = frames.chosen(total, rate, settings=settings)
            rows, columns = height, width
            if rule is not None and settings.scales:
                rows, columns = settings.frame_size(len(indices), height, width, rule.factor)
            elif rule is not None:
                rows, columns = rule.size(len(indices), height, width)
            most = min(task["pixels"], task["shown"])
            if len(indices) > task["frames"] or len(indices) * rows * columns > most:
                raise TooManyPixelsError(
                    f"{name} gives {len(indices)} frames of {columns} x {rows} pixels, over the "
                    "request's limit; sample fewer frames, or shorten it"
                )
            return indices

        clip = read_clip(reader, choose, scaled, name)
    except Missing as error:
        raise unreadable(name, content, error) from error
    except (InputError, MemoryError, *STOPS):
        raise
    except BaseException as error:
        raise unreadable(name, content, error) from error
    result = {"shape": clip.frames.shape, "indices": clip.indices, "fps": clip.fps}
    result |= {"total": clip.total, "times": clip.times, "note": clip.note}
    pixels = memoryview(np.ascontiguousarray(clip.frames).reshape(-1))  # type: ignore[arg-type]
    return result | {"digest": _digest(result, pixels)}, pixels


def _container(content: bytes) -> str | None:
    """Return FFmpeg's name of a container by its first bytes."""
    if content[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mp4"
    if content.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    return None


def _digest(header: dict[str, Any], pixels: bytes | memoryview) -> str:
    """Return the SHA-256 of what the model gets to see."""
    made = hashlib.sha256(json.dumps(header).encode())
    made.update(pixels)
    return made.hexdigest()


def _write(results: BinaryIO, header: dict[str, Any], pixels: bytes | memoryview) -> None:
    results.write(pack(header, len(pixels)))
    results.write(pixels)
    results.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
