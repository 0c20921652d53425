"""Load pictures from a path, an http(s) address or a data: URI.

The network is used only for an address that the user gave.
"""

from __future__ import annotations

import base64
import binascii
import io
import stat
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

    ImageSource = str | Path | Image

TIMEOUT_S = 20.0
MAX_IMAGE_BYTES = 64 * 2**20
MAX_VIDEO_BYTES = 1024 * 2**20
# 120 megapixels: above phone cameras, far below what a small crafted file can unpack to.
MAX_PIXELS = 120_000_000


def load_image(source: ImageSource) -> Image:
    """Load a picture as RGB, upright.

    ``source``: a path, an http(s) URL, a ``data:`` URI or a PIL image. Raises InputError, one
    line, for anything that is missing, empty, too large, or not a picture.
    """
    from PIL import Image as pil

    if isinstance(source, pil.Image):
        return _upright_rgb(source, "picture")
    name = describe(source)
    return _decode(_read(str(source), name), name)


def describe(source: object) -> str:
    """Name a source for messages (a data: URI can be megabytes long)."""
    text = str(source)
    return text.split(",", 1)[0][:40] + ",..." if text.startswith("data:") else text


def check_source(source: str) -> None:
    """Raise InputError when ``source`` is a path at which there is no file; fetches nothing."""
    if not source.startswith("data:") and not _is_url(source):
        _require_file(Path(source).expanduser(), source)


@contextmanager
def local_file(source: str | Path) -> Iterator[Path]:
    """Give a path for ``source``; an http(s) URL is fetched to a temporary file meanwhile."""
    text = str(source)
    if not _is_url(text):
        path = Path(text).expanduser()
        _require_file(path, text)
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="mmkv-") as folder:
        suffix = Path(urllib.parse.urlsplit(text).path).suffix[:8]
        path = Path(folder) / f"download{suffix}"
        path.write_bytes(_fetch(text, MAX_VIDEO_BYTES))
        yield path


def _read(source: str, name: str) -> bytes:
    if source.startswith("data:"):
        content = _decode_data_uri(source)
    elif _is_url(source):
        content = _fetch(source, MAX_IMAGE_BYTES)
    else:
        path = Path(source).expanduser()
        _require_file(path, name)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror or error}") from error
    if not content:
        raise InputError(f"{name} is empty; give a picture file (PNG, JPEG, WebP, ...)")
    return content


def _require_file(path: Path, name: str) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        raise InputError(f"file not found: {name}; check the path") from error
    except (OSError, ValueError) as error:  # no permission, too long, or a NUL byte in it
        raise InputError(f"not a usable file name: {name[:80]!r}; check the path") from error
    if stat.S_ISDIR(mode):
        raise InputError(f"{name} is a folder; name one file in it")


def _is_url(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def _decode_data_uri(source: str) -> bytes:
    header, comma, payload = source.partition(",")
    if not comma:
        raise InputError("the data: URI has no comma before its content; check the text")
    if len(payload) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InputError(f"the data: URI is larger than {MAX_IMAGE_BYTES >> 20} MiB; shrink it")
    raw = urllib.parse.unquote_to_bytes(payload)
    if not header.endswith(";base64"):
        return raw
    try:
        return base64.b64decode(b"".join(raw.split()), validate=True)
    except binascii.Error as error:
        raise InputError(f"the data: URI is not valid base64: {error}; encode it again") from error


def _fetch(url: str, limit: int) -> bytes:
    """Download ``url`` (http or https, also after redirects), at most ``limit`` bytes."""
    request = urllib.request.Request(url, headers={"User-Agent": "mmkv"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            if not _is_url(answer.geturl()):
                raise InputError(f"{url} redirects away from http(s); download the file yourself")
            content = answer.read(limit + 1)
    except urllib.error.HTTPError as error:
        raise InputError(f"{url} answered {error.code} {error.reason}; check the URL") from error
    # ValueError: a malformed address; HTTPException: a server that does not speak HTTP.
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"cannot fetch {url}: {reason}; check the URL and network") from error
    if len(content) > limit:
        raise InputError(f"{url} is larger than {limit >> 20} MiB; download and shrink it")
    return content


def _decode(content: bytes, name: str) -> Image:
    from PIL import Image as pil

    try:
        with warnings.catch_warnings(), _no_patience():
            # Pillow warns from 89 megapixels on; the check below is ours and is an error.
            warnings.simplefilter("ignore")
            with pil.open(io.BytesIO(content)) as picture:
                width, height = picture.size
                if width * height > MAX_PIXELS:
                    raise InputError(
                        f"{name} has {width} x {height} pixels, over the limit of "
                        f"{MAX_PIXELS // 10**6} megapixels; scale it down"
                    )
                picture.load()
                return _upright_rgb(picture, name)
    except InputError:
        raise
    except pil.DecompressionBombError as error:
        raise InputError(
            f"{name} would unpack to far too many pixels (a decompression bomb?); scale it down"
        ) from error
    except pil.UnidentifiedImageError as error:
        raise InputError(f"{name} is not a picture that Pillow can read; convert it") from error
    # Decoders of broken files raise nearly anything: OSError, SyntaxError, struct.error, ...
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{name} is damaged ({reason}); get another copy") from error


@contextmanager
def _no_patience() -> Iterator[None]:
    """Cut files are errors here, also where another package made Pillow fill them up."""
    from PIL import ImageFile

    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _upright_rgb(picture: Image, name: str) -> Image:
    """Apply the EXIF orientation and convert to RGB, transparency over white."""
    from PIL import Image as pil
    from PIL import ImageOps

    if not picture.width or not picture.height:
        raise InputError(f"{name} has no pixels; give another one")
    try:
        upright = ImageOps.exif_transpose(picture)
    except Exception:  # EXIF that cannot be read says nothing about the orientation
        upright = picture.copy()
    if upright.mode.startswith("I;16"):
        # 16-bit grey: Pillow's own conversion clips at 255 and would turn nearly all of it white.
        upright = upright.convert("I").point(lambda value: value / 257).convert("L")
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        white = pil.new("RGBA", layer.size, "white")
        upright = pil.alpha_composite(white, layer)
    made = upright.convert("RGB")
    # Nothing reads the metadata from here on, and a second look at broken metadata would raise.
    made.info.clear()
    return made
