"""Load pictures from a path, an http(s) address or a data: URI.

The network is used only for an address that the user gave.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import os
import queue
import re
import stat
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mmkv.engine.errors import STOPS, InputError, as_exception, first_line, plain
from mmkv.engine.paths import user_path

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    ImageSource = str | Path | Image

TIMEOUT_S = 20.0  # without a byte
# For a whole answer, however steadily it drips.
IMAGE_DEADLINE_S, VIDEO_DEADLINE_S = 120.0, 1200.0
MAX_IMAGE_BYTES = 64 * 2**20
MAX_VIDEO_BYTES = 1024 * 2**20
MAX_FILE_BYTES = 1024 * 2**20  # a picture on the disk may be stored without compression
# 120 megapixels: above phone cameras, far below what a small crafted file can unpack to.
MAX_PIXELS = 120_000_000
# In the info of a loaded picture: that it has the size which its message asks for, what the user is
# to be told of it, and the size that it had before a server scaled it down.
SIZED, NOTE, FROM = "mmkv.sized", "mmkv.note", "mmkv.from"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")  # of the other alphabet that base64 has
_PIECE = 64 * 2**10
_BAND = 2**18  # pixels that are scaled at a time
_LONGEST_NAME = 150
_pixel_limit = MAX_PIXELS


class Note(str):
    """A line for the user; a text in a picture's file is none.

    ``kind``: what a conversation says once; by default the line itself.
    """

    kind: str

    def __new__(cls, text: str, kind: str | None = None) -> Self:
        """Make one."""
        made = super().__new__(cls, text)
        made.kind = kind or text
        return made


class TooManyPixelsError(InputError):
    """A picture or video that is too large to be decoded."""


def set_pixel_limit(count: int) -> None:
    """Refuse pictures of more than ``count`` pixels in this process, :data:`MAX_PIXELS` at first.

    A picture takes up to eight bytes a pixel while it is decoded. Raises InputError below 1.
    """
    global _pixel_limit
    from PIL import Image as pil

    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"a pixel limit is a whole number, not a {type(count).__name__}")
    if count < 1:
        raise InputError(f"a limit of {count} pixels leaves no picture; give 1 or more")
    _pixel_limit = count
    # Pillow's own limit, at twice its number, must not be the lower one.
    pil.MAX_IMAGE_PIXELS = max(pil.MAX_IMAGE_PIXELS or 0, count)


def load_image(source: ImageSource) -> Image:
    """Load a picture as RGB, upright.

    ``source``: a path, an http(s) URL, a ``data:`` URI or a PIL image. Raises InputError, one
    line, for anything that is missing, empty, too large, or not a picture.
    """
    from PIL import Image as pil

    if isinstance(source, pil.Image):
        if source.info.get(SIZED) is True and source.mode == "RGB":
            return source
        return _converted(source, "the picture")
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"a picture is a path, URL or PIL image, not a {type(source).__name__}")
    name = describe(source)
    return decode_image(_read(str(source), name), name)


def describe(source: object) -> str:
    """Name a source for messages (a data: URI can be megabytes long, a URL thousands).

    A data: URI may name its file: ``data:image/png;name=a.png;base64,...``.
    """
    text = str(source)
    if _is_data(text):
        header = text[:400].split(",", 1)[0]
        name = re.search(r";name=([^;]+)", header)
        return plain(urllib.parse.unquote(name[1])[:80] if name else f"{header[:40]},...", "")
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."


def check_source(source: str) -> None:
    """Raise InputError when ``source`` is a path at which there is no file; fetches nothing."""
    if not _is_data(source) and not _is_url(source):
        _require_file(user_path(source), source)


@contextmanager
def local_file(source: str | Path) -> Iterator[Path]:
    """Give a path for ``source``; an http(s) URL is fetched to a temporary file meanwhile."""
    text = str(source)
    if not _is_url(text):
        path = user_path(source)
        _require_file(path, text)
        yield path
        return
    content = _fetch(text, MAX_VIDEO_BYTES, VIDEO_DEADLINE_S)
    with tempfile.TemporaryDirectory(prefix="mmkv-") as folder:
        suffix = re.fullmatch(r"\.\w{1,7}", Path(urllib.parse.urlsplit(text).path).suffix)
        path = Path(folder) / f"download{suffix[0] if suffix else ''}"
        path.write_bytes(content)
        yield path


def _read(source: str, name: str) -> bytes:
    if _is_data(source):
        content = data_uri_content(source)
    elif _is_url(source):
        content = _fetch(source, MAX_IMAGE_BYTES, IMAGE_DEADLINE_S)
    else:
        path = user_path(source)
        _require_file(path, name)
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror or error}") from error
        if len(content) > MAX_FILE_BYTES:
            raise InputError(f"{name} is larger than {MAX_FILE_BYTES >> 20} MiB; scale it down")
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
    if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
        raise InputError(f"{name} is no regular file; copy what it gives to one and name that")


def _is_data(source: str) -> bool:
    return source[:5].lower() == "data:"


def _is_url(source: str) -> bool:
    return source.lower().startswith(("http://", "https://"))


def data_uri_content(source: str) -> bytes:
    """Return what a ``data:`` URI holds. Raises InputError."""
    header, comma, payload = source.partition(",")
    if not comma:
        raise InputError("the data: URI has no comma before its content; check the text")
    if len(payload) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise InputError(f"the data: URI is larger than {MAX_IMAGE_BYTES >> 20} MiB; shrink it")
    raw = urllib.parse.unquote_to_bytes(payload)
    if not header.rstrip().lower().endswith(";base64"):
        return raw
    try:
        plain = b"".join(raw.split()).rstrip(b"=").translate(_URL_SAFE)
        return base64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except binascii.Error as error:
        raise InputError(f"the data: URI is not valid base64: {error}; encode it again") from error


def _fetch(url: str, limit: int, deadline: float) -> bytes:
    """Download ``url``, at most ``limit`` bytes within ``deadline`` seconds. Raises InputError.

    A thread of its own downloads: a server that sends a byte now and then, be it of the headers,
    would pass every timeout of a socket.
    """
    answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
    late = threading.Event()

    def download() -> None:
        try:
            answers.put(_downloaded(url, limit, late))
        except STOPS:
            raise
        except BaseException as error:
            answers.put(as_exception(error))

    threading.Thread(target=download, name="mmkv-download", daemon=True).start()
    try:
        found = answers.get(timeout=deadline)
    except queue.Empty:
        raise InputError(
            f"{describe(url)} did not answer whole within {deadline:g} s; download it yourself"
        ) from None
    finally:
        late.set()
    if isinstance(found, Exception):
        raise found
    return found


def _downloaded(url: str, limit: int, late: threading.Event) -> bytes:
    """Download ``url`` (http or https, also after redirects) until ``late`` is set."""
    name = describe(url)
    content = bytearray()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "mmkv"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            if not _is_url(answer.geturl()):
                raise InputError(f"{name} redirects away from http(s); download the file yourself")
            while len(content) <= limit and not late.is_set():
                piece = answer.read1(_PIECE)
                if not piece:
                    break
                content += piece
            if (missing := answer.length) and len(content) <= limit:
                raise InputError(f"{name} broke off {missing:,} bytes early; try again")
    except urllib.error.HTTPError as error:
        raise InputError(f"{name} answered {error.code} {error.reason}; check the URL") from error
    # ValueError: a malformed address; HTTPException: a server that does not speak HTTP.
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise InputError(f"cannot fetch {name}: {reason}; check the URL and network") from error
    if len(content) > limit:
        raise InputError(f"{name} is larger than {limit >> 20} MiB; download and shrink it")
    return bytes(content)


def decode_image(
    content: bytes, name: str, formats: list[str] | None = None, pixels: int | None = None
) -> Image:
    """Decode a picture file as RGB, upright. ``name`` is for messages.

    Args:
        formats: those that are tried, by Pillow's names; None: all.
        pixels: most pixels; None: the limit of this process (:func:`set_pixel_limit`). The size
            is known, and checked, before anything is decoded.

    Raises:
        InputError: one line; TooManyPixelsError among them.
    """
    from PIL import Image as pil

    most = _pixel_limit if pixels is None else pixels
    if (formats is None or "HEIF" in formats) and other_kind(content) == "HEIC":
        _read_heic()
    elif formats is not None:  # Pillow has to know those that it is given
        formats = [one for one in formats if one != "HEIF"]
    try:
        with warnings.catch_warnings():
            # Pillow warns from 89 megapixels on; the check below is ours and is an error.
            warnings.simplefilter("ignore")
            with pil.open(io.BytesIO(content), formats=formats) as picture:
                width, height = picture.size
                if width * height > most:
                    remedy = " or raise --pixel-limit" if pixels is None else ""
                    raise TooManyPixelsError(
                        f"{name} has {width} x {height} pixels, over the limit of "
                        f"{most / 10**6:g} megapixels; scale it down{remedy}"
                    )
                return _converted(picture, name)
    except InputError:
        raise
    except pil.DecompressionBombError as error:
        raise TooManyPixelsError(
            f"{name} would unpack to far too many pixels (a decompression bomb?); scale it down"
        ) from error
    except pil.UnidentifiedImageError as error:
        raise InputError(f"{name} {_unknown(content, formats)}") from error
    except STOPS:
        raise
    except BaseException as error:
        raise _damaged(name, error) from error


def _unknown(content: bytes, formats: list[str] | None) -> str:
    """Say what a file is that Pillow reads no picture of, and what to do."""
    from PIL import Image as pil

    kind = other_kind(content)
    if kind == "video":
        how = "--video, or a part of type video" if formats is None else "a part of type video_url"
        return f"is a video, not a picture; give it as one ({how})"
    if kind == "HEIC" and "HEIF" in pil.OPEN:
        return "is a HEIC picture; it is damaged; get another copy"
    if kind == "HEIC":
        remedy = "run pip install pillow-heif where mmkv runs, or convert it to JPEG"
        return f"is a HEIC picture; {remedy}"
    if content.startswith(_PICTURES):
        return "is damaged; get another copy"
    if content.startswith(_RAW):
        return "is damaged, or a camera's raw file; get another copy, or save it as JPEG"
    known = "that Pillow can read" if formats is None else f"in {', '.join(formats)}"
    told = other(content, "a picture")
    return told or f"is not a picture {known}; convert it to PNG or JPEG"


def other_kind(content: bytes) -> str | None:
    """Return "HEIC" or "video" by a file's first bytes, None where they say neither."""
    if content[4:8] == b"ftyp":
        brands = content[8:12] + content[16:64]
        if any(brand in brands for brand in (b"heic", b"heix", b"hevc", b"heim", b"mif1")):
            return None if b"avif" in brands else "HEIC"
        return None if b"avif" in brands or b"avis" in brands else "video"
    starts = (b"\x1a\x45\xdf\xa3", b"FLV\x01", b"\x00\x00\x01\xba", b"\x00\x00\x01\xb3", b"0&\xb2u")
    if content.startswith(starts) or content[4:8] in (b"moov", b"mdat", b"wide"):
        return "video"
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "video"
    return "video" if content[:1] == b"\x47" == content[188:189] == content[376:377] else None


_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
_RAW = (b"II*\0", b"MM\0*")  # of a TIFF, too
_STARTS = {
    b"%PDF": ("a PDF", "save its page as a picture"),
    b"PK\3\4": ("a ZIP archive", "name a file out of it"),
    b"\x1f\x8b": ("packed with gzip", "unpack it"),
    b"ID3": ("a sound", "give another file"),
    b"fLaC": ("a sound", "give another file"),
    b"version https://git-lfs": ("a pointer of Git LFS", "run git lfs pull where it lies"),
}


def other(content: bytes, wanted: str) -> str | None:
    """Return what a file is that is none of ``wanted`` (a picture, a video), and what to do.

    Args:
        content: its first bytes. Where they do not tell, None is returned.
    """
    told = next((told for start, told in _STARTS.items() if content.startswith(start)), None)
    head = content[:512].strip()
    if content[8:12] == b"WAVE":
        told = _STARTS[b"ID3"]
    elif content.startswith(_PICTURES[:2]) or other_kind(content) == "HEIC":  # a GIF can be both
        told = ("a picture", "give it as one")
    elif told is None and head and not re.search(rb"[^\t\n\f\r -~\x80-\xff]", head):
        told = ("a text", "check the file")
        if b"<svg" in head:
            told = ("a drawing in SVG", "save it as PNG")
        elif re.match(rb"<(!doctype|html|\?xml|head|body)", head, re.IGNORECASE):
            told = ("a web page", "download the file itself")
    return told and f"is {told[0]}, not {wanted}; {told[1]}"


def _read_heic() -> None:
    """Let Pillow read HEIC where pillow-heif is installed."""
    with suppress(ImportError, RuntimeError, OSError, AttributeError):
        importlib.import_module("pillow_heif").register_heif_opener()


def _converted(picture: Image, name: str) -> Image:
    """Decode an opened picture, upright and RGB. Raises InputError."""
    try:
        with warnings.catch_warnings(), _no_patience():
            warnings.simplefilter("ignore")  # of garbled EXIF data
            picture.load()
            return _upright_rgb(picture, name)
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(f"{name} does not fit into memory; scale it down") from error
    except STOPS:
        raise
    # Decoders of broken files raise nearly anything: OSError, SyntaxError, struct.error, ...
    except BaseException as error:
        raise _damaged(name, error) from error


def _damaged(name: str, error: BaseException) -> InputError:
    return InputError(f"{name} is damaged ({first_line(error)}); get another copy")


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
    noted = picture.info.get(NOTE)
    if not isinstance(noted, Note):  # a file may have a text of that name
        noted = _of_several(picture, name)
    try:
        upright = ImageOps.exif_transpose(picture)
    except STOPS:
        raise
    except BaseException:  # EXIF that cannot be read says nothing about the orientation
        upright = picture.copy()
    upright = _eight_bits(upright, picture.format)
    if upright.has_transparency_data:
        layer = upright.convert("RGBA")
        white = pil.new("RGBA", layer.size, "white")
        upright = pil.alpha_composite(white, layer)
    made = upright.convert("RGB")
    # Nothing reads the metadata from here on, and a second look at broken metadata would raise.
    made.info.clear()
    if noted is not None:
        made.info[NOTE] = noted
    return made


def _eight_bits(picture: Image, format: str | None) -> Image:
    """Return a picture of at most 8 bits a colour, in a mode that Pillow converts."""
    if picture.mode == "La":
        return picture.convert("LA")
    if picture.mode in ("I", "F") or picture.mode.startswith("I;16"):
        # Pillow scales those of a PGM to 16 bits, and knows no deeper PNG.
        return _shallow(picture, picture.mode != "F" and format in ("PPM", "PNG"))
    clear = picture.info.get("transparency") or (0,)
    if picture.mode == "RGB" and max(clear) > 255:
        # 16-bit colours, of which Pillow keeps the upper byte.
        picture.info["transparency"] = tuple(colour >> 8 for colour in clear)
    return picture


def _of_several(picture: Image, name: str) -> Note | None:
    """Return a note where a file holds more pictures than the one that is read."""
    count = getattr(picture, "n_frames", 1) if picture.format != "MPO" else 1
    if count < 2:
        return None
    if picture.format in ("TIFF", "HEIF"):
        parts = "pages" if picture.format == "TIFF" else "pictures"
        return Note(f"{name} has {count} {parts}; the first one is read")
    return Note(
        f"{name} is animated; the first of its {count} frames is read (as a video, all are)"
    )


def _shallow(picture: Image, sixteen: bool) -> Image:
    """Scale a grey picture of more than 8 bits to 8, its transparent level to an alpha channel.

    Pillow's own conversion clips at 255. ``sixteen``: it has 16 bits, whatever its mode says, whose
    white is 65,535. 32 bits and floats have no white that a file names: it is 1 for floats up to
    that, 255 for levels up to that, 65,535 for those up to that; others are stretched from the
    least to the greatest.
    """
    import numpy as np
    from PIL import Image as pil

    sixteen = sixteen or picture.mode.startswith("I;16")
    levels = np.asarray(picture.convert("I") if sixteen else picture)
    # Rows at a time: as float64 a picture at the limit takes gigabytes.
    rows = max(1, _BAND // max(picture.width, 1))
    bands = [levels[top : top + rows] for top in range(0, len(levels), rows)]
    least, most = (0.0, 65535.0) if sixteen else _range(bands, picture.mode)
    shown = np.empty(levels.shape, np.uint8)
    for top, band in zip(range(0, len(levels), rows), bands, strict=True):
        scaled = (band.astype(np.float64) - least) * (255 / (most - least))
        scaled = np.nan_to_num(scaled, copy=False, nan=0, posinf=255, neginf=0)
        shown[top : top + rows] = np.clip(scaled.round(), 0, 255)
    made, clear = pil.fromarray(shown), picture.info.get("transparency")
    if isinstance(clear, int):
        made.putalpha(pil.fromarray(np.where(levels == clear, 0, 255).astype(np.uint8)))
    return made


def _range(bands: Sequence[np.ndarray], mode: str) -> tuple[float, float]:
    """Return the levels of black and white in a picture of 32 bits or floats."""
    import numpy as np

    finite = (band[np.isfinite(band)] for band in bands)
    ends = [(float(some.min()), float(some.max())) for some in finite if some.size]
    least = min((low for low, _ in ends), default=0.0)
    most = max((high for _, high in ends), default=0.0)
    if least < 0 or most > 65535:
        return least, most
    whites = (1.0, 255.0, 65535.0) if mode == "F" else (255.0, 65535.0)
    return 0.0, next(white for white in whites if most <= white)
