"""Frames: which tokens of a turn stand for which part of which picture or video."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv.engine.contents import MODALITIES

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmkv.prompt.video import Clip

# Longest edge of what is kept of a picture, of a video's frame, in pixels.
PICTURE_EDGE, FRAME_EDGE = 512, 256
MOST_BYTES = 2**24  # of JPEGs that a recorder keeps
_QUALITY = 80


@dataclass(frozen=True)
class Frame:
    """A picture, or what one temporal patch of a video shows, and the tokens that stand for it.

    Attributes:
        kind: an index of ``MODALITIES``; media: number of the picture or video in the session.
        caption: what it is; start: position of its first token; the token of row y and column x is
            ``start + y * stride + x``, for ``high`` rows of ``wide`` columns.
        jpeg: the picture, encoded anew.
    """

    kind: int
    media: int
    caption: str
    start: int
    high: int
    wide: int
    stride: int
    jpeg: bytes


def frames_of(
    inputs: dict[str, Any],
    placeholder: dict[int, int],
    pictures: Sequence[Image],
    clips: Sequence[Clip],
    start: int,
    config: Any,
    before: Sequence[tuple[int, Frame, int]] = (),
) -> list[tuple[int, Frame, int]]:
    """Say which tokens of a turn stand for which part of which picture.

    Args:
        inputs: the model inputs of the turn; start: position of its first token.
        placeholder: token id of each visual modality.
        config: the model's: how many patches of a grid are one token, and the size of a tile.
        before: what this returned for the turns before.

    Returns:
        position of the first token, frame, and the bytes that the frame takes; no more frames
        once those of all turns take :data:`MOST_BYTES`.
    """
    vision = getattr(config, "vision_config", None)
    ids, merge = inputs["input_ids"][0].numpy(), getattr(vision, "spatial_merge_size", 1)
    side, tiled = _side(config, vision), getattr(config, "model_type", "") == "internvl"
    found: list[tuple[int, Frame, int]] = []
    known = max((frame.media + 1 for _, frame, _ in before), default=0)
    room = MOST_BYTES - sum(taken for *_, taken in before)
    kinds = {name: MODALITIES.index(name) for name in ("image", "video")}
    at = np.flatnonzero(ids == placeholder.get(kinds["image"], -1)) + start
    grids = inputs.get("image_grid_thw")
    if grids is not None:
        sizes = [(h // merge, w // merge) for _, h, w in grids.tolist()]
    else:
        sizes = [(0, 0)] * len(pictures)
    runs = [] if grids is not None else np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    for number, (picture, (high, wide)) in enumerate(zip(pictures, sizes, strict=True)):
        if room <= 0:
            return found
        if grids is not None:
            first, at = int(at[0]), at[high * wide :]
            parts = [(0, high, wide, wide)]
        elif number < len(runs) and len(runs) == len(pictures):
            first, count = int(runs[number][0]), len(runs[number])
            parts = layout(count, *picture.size, side, tiled)
        else:
            break  # pictures whose tokens touch cannot be told apart
        jpeg, media = encoded(picture, PICTURE_EDGE), known + number
        for part, (offset, rows, columns, stride) in enumerate(parts):
            caption = f"picture {media + 1}" + (", close up" if part else "")
            place = (first + offset, rows, columns, stride)
            frame = Frame(kinds["image"], media, caption, *place, jpeg)
            found.append((frame.start, frame, 0 if part else len(jpeg)))
        room -= len(jpeg)
    grids = inputs.get("video_grid_thw")
    if grids is None:
        return found
    from PIL import Image as pil

    at = np.flatnonzero(ids == placeholder.get(kinds["video"], -1)) + start
    for number, (clip, (times, high, wide)) in enumerate(zip(clips, grids.tolist(), strict=True)):
        media, high, wide = known + len(pictures) + number, high // merge, wide // merge
        each = math.ceil(len(clip.frames) / times)
        for time in range(times):
            if room <= 0:
                return found
            shown = min(time * each, len(clip.frames) - 1)
            jpeg = encoded(pil.fromarray(clip.frames[shown]), FRAME_EDGE)
            caption = f"video {number + 1} at {clip.timestamps[shown]:.1f} s"
            frame = Frame(kinds["video"], media, caption, int(at[0]), high, wide, wide, jpeg)
            found.append((frame.start, frame, len(jpeg)))
            room -= len(jpeg)
            at = at[high * wide :]
    return found


def _side(config: Any, vision: Any) -> int:
    """Return the tokens along an edge of a tile; 0 where the config does not tell."""
    sizes = [getattr(vision, name, 0) for name in ("image_size", "patch_size")]
    size, patch = (one[0] if isinstance(one, (list, tuple)) else one for one in sizes)
    if not (isinstance(size, int) and isinstance(patch, int) and patch):
        return 0
    return round(size // patch * getattr(config, "downsample_ratio", 1))


def layout(
    count: int, width: int, height: int, side: int, tiled: bool = False
) -> list[tuple[int, int, int, int]]:
    """Lay ``count`` tokens out over a picture: parts of (offset, rows, columns, stride).

    ``side``: tokens along an edge of a tile, 0 where it is not known; ``tiled``: whether a
    picture's tiles lie one after the other (InternVL), so that only one tile has a known place.
    LLaVA-NeXT and LLaVA-OneVision put a thumbnail of ``side x side`` tokens first and then rows
    that end with a token of their own; of the shapes that fit, the nearest to the picture's.
    Nothing is returned for a count that fits neither this nor a tile.
    """
    edge = side or math.isqrt(count)
    if edge * edge == count and (side or not tiled):
        return [(0, edge, edge, edge)]
    rest = count - side * side
    shapes = [(rest // line, line - 1) for line in range(2, max(rest, 0) + 1) if rest % line == 0]
    if not side or tiled or not shapes:
        return []
    high, wide = min(shapes, key=lambda s: abs(math.log(s[1] / s[0] * height / width)))
    return [(0, side, side, side), (side * side, high, wide, wide + 1)]


def encoded(picture: Image, edge: int) -> bytes:
    """Encode a picture as JPEG, no longer than ``edge`` on either side and free of metadata."""
    from PIL import Image as pil

    small = pil.new("RGB", picture.size, "white")
    small.paste(picture, mask=picture.getchannel("A") if "A" in picture.getbands() else None)
    small.thumbnail((edge, edge))
    data = io.BytesIO()
    small.save(data, "JPEG", quality=_QUALITY)
    return data.getvalue()
