"""Estimate what judging costs: calls, tokens, bytes, and money if prices are given."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from mmkv.engine.errors import InputError

# Estimates: four characters a token for English; 600 tokens for seven short
# explanations and a dictionary.
CHARACTERS_PER_TOKEN, REPLY_TOKENS = 4, 600
_MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


@dataclass(frozen=True)
class Estimate:
    """Totals over all calls; tokens are estimates, bytes are what is sent for pictures."""

    calls: int
    input_tokens: int
    output_tokens: int
    bytes: int

    def line(self, prices: tuple[float, float] | None = None) -> str:
        """Return one line; ``prices`` in dollars per million tokens, in and out."""
        text = (
            f"{self.calls:,} calls, about {self.input_tokens:,} tokens in and "
            f"{self.output_tokens:,} out, {self.bytes / 2**20:,.1f} MiB of pictures"
        )
        if prices is None:
            return text
        cost = (self.input_tokens * prices[0] + self.output_tokens * prices[1]) / 1e6
        return f"{text}, about ${cost:,.2f}"


def estimate(calls: Iterable[tuple[str, Sequence[Path]]]) -> Estimate:
    """Add up calls of (text, pictures). Raises InputError for a picture that cannot be read."""
    count = tokens = size = 0
    for text, pictures in calls:
        count += 1
        tokens += math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        for picture in pictures:
            of_one, bytes_of_one = _picture(picture)
            tokens, size = tokens + of_one, size + bytes_of_one
    return Estimate(count, tokens, count * REPLY_TOKENS, size)


@cache
def _picture(path: Path) -> tuple[int, int]:
    """Count the tokens and base64 bytes of a picture; its header alone is read."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            width, height = picture.size
        size = path.stat().st_size
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is not a readable picture; get another copy") from error
    return picture_tokens(width, height), math.ceil(size / 3) * 4


def picture_tokens(width: int, height: int) -> int:
    """Count the tokens of a picture under the rule published for GPT-4o: 85, and 170 a tile of 512
    pixels.

    The picture is fitted into 2048 x 2048 and then scaled down to a short side of 768. Other
    judges count otherwise.
    """
    scale = min(1.0, 2048 / max(width, height))
    scale = min(scale, 768 / min(width, height))
    tiles = math.ceil(width * scale / 512) * math.ceil(height * scale / 512)
    return 85 + 170 * tiles


@lru_cache(maxsize=96)  # a few dialogues' pictures
def data_uri(path: Path) -> str:
    """Encode the picture as a data: URI, unchanged if its format is one of the
    web's.

    Raises:
        InputError: it cannot be read.
    """
    import io

    from PIL import Image

    from mmkv.prompt.media import load_image

    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as picture:
            kind = _MIME.get(picture.format or "")
    except (OSError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is not a readable picture; get another copy") from error
    if kind is None:
        buffer = io.BytesIO()
        load_image(path).save(buffer, "PNG")
        content, kind = buffer.getvalue(), "image/png"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
