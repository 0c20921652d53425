"""Settings of one picture or video (fps, min_pixels and so on) in a part of a message.

The keys are those of qwen-vl-utils (``fetch_image``, ``fetch_video``), ``num_frames`` is
transformers'. The numbers are those of qwen-vl-utils 0.0.14: its own functions where it is
installed, the code here where it is not (it wants torchvision) and in a process that decodes for
a server, which loads no torch.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from mmkv.engine.errors import InputError, first_line

# Of qwen-vl-utils, in tokens: of a picture, and of a frame.
_PICTURE_TOKENS, _FRAME_TOKENS = (4, 16384), (128, 768)
_ALL_TOKENS = 128_000 * 0.9  # of a video
_PAIR = 2  # frames are counted in pairs
_MOST_RATIO = 200
MOST_PIXELS = 2**27  # of a picture or frame that a part asks for
MAX_FRAMES = 768  # of a video
LOOSE_FPS = 2.0  # of frames that are given one by one

_PIXELS = ("min_pixels", "max_pixels")
_EDGES = ("resized_height", "resized_width")
_OF_A_PICTURE = (*_PIXELS, *_EDGES)
_SCALING = (*_OF_A_PICTURE, "total_pixels")
_RATES = ("fps", "nframes", "num_frames")
_SAMPLING = (*_RATES, "min_frames", "max_frames", "video_start", "video_end")
_OF_FRAMES = ("fps", "sample_fps", "raw_fps")  # of those given one by one
_COUNTS = ("nframes", "num_frames", "min_frames", "max_frames")
_WHOLE = (*_SCALING, *_COUNTS)


@dataclass(frozen=True)
class MediaSettings:
    """Settings of one picture or video; None: not given.

    Attributes:
        fps: frames taken a second; of frames that are given one by one, their rate.
        nframes, num_frames: frames taken, rounded to pairs, or by the model's own rule.
        min_frames, max_frames: bounds on the frames that ``fps`` gives.
        video_start, video_end: seconds between which frames are taken.
        min_pixels, max_pixels: of a picture, or of each frame.
        total_pixels: of all frames together.
        resized_height, resized_width: in pixels, before they are rounded to patches.
        sample_fps, raw_fps: of frames given one by one, their rate and that of their source.
    """

    fps: float | None = None
    nframes: int | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    sample_fps: float | None = None
    raw_fps: float | None = None

    @classmethod
    def of(cls, kind: str, given: Mapping[str, Any]) -> MediaSettings:
        """Check the settings of a part of ``kind`` ("image" or "video").

        Raises InputError, which names the key: one that is not known, or a value that cannot be
        followed.
        """
        known = _OF_A_PICTURE if kind == "image" else tuple(each.name for each in fields(cls))
        for name in given:
            if name not in known:
                raise InputError(
                    f"{_shown(name)} of the {kind} is not understood; leave it out, or use "
                    + ", ".join(known)
                )
        made = cls(**{name: _number(name, value) for name, value in given.items()})
        made._check()
        return made

    def given(self) -> dict[str, Any]:
        """Return what is set."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def samples(self) -> bool:
        """Return whether it says which frames are taken."""
        return any(name in _SAMPLING for name in self.given())

    @property
    def scales(self) -> bool:
        """Return whether it says which size a picture or frame gets."""
        return any(name in _SCALING for name in self.given())

    def refuse_scaling(self) -> None:
        """Raise InputError, for a model that gives pictures a size of its own."""
        self._refuse(_SCALING, "this model has a size of its own for pictures and frames; drop {}")

    def refuse_sampling(self) -> None:
        """Raise InputError, for a video whose frames are given one by one."""
        self._refuse(
            [name for name in _SAMPLING if name not in _OF_FRAMES],
            "the frames of this video are given one by one, so {} cannot be followed; leave frames "
            "out yourself, and give their rate as fps",
        )

    def refuse_rates(self) -> None:
        """Raise InputError for rates of frames given one by one, of a video in a file."""
        self._refuse(
            ("sample_fps", "raw_fps"),
            "{} is for frames that are given one by one; of a video in a file, give fps",
        )

    def _refuse(self, names: Collection[str], words: str) -> None:
        for name in self.given():
            if name in names:
                raise InputError(words.format(name))

    def _check(self) -> None:
        rates = [name for name in _RATES if name in self.given()]
        if len(rates) > 1:
            raise InputError(f"{' and '.join(rates)} exclude each other; give one of them")
        if len([name for name in _EDGES if name in self.given()]) == 1:
            raise InputError("resized_height and resized_width go together; give both or none")
        for low, high in (_PIXELS, ("min_frames", "max_frames"), ("video_start", "video_end")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least > most:
                raise InputError(f"{low} {least} is above {high} {most}; give {low} <= {high}")

    def frame_span(self, total: int, rate: float) -> tuple[int, int]:
        """Return the first and last frame, of ``total`` at ``rate``, of the section that is asked
        for. Raises InputError for a section with fewer than two.
        """
        if self.video_start is None and self.video_end is None:
            return 0, total - 1
        first, last, _ = _following(_of_qwen().calculate_video_frame_range, self, total, rate)
        return first, last

    def frame_count(self, total: int, rate: float, default: float, least: int, most: int) -> int:
        """Return how many of ``total`` frames at ``rate`` are taken: an even number.

        Args:
            default: frames a second where none are asked for. least, most: bounds on them, alike.

        Raises InputError for a number that the video does not have.
        """
        own = dict[str, Any](self.given())
        if self.nframes is None:
            own = {"fps": default, "min_frames": least, "max_frames": min(most, total)} | own
        return int(_following(_of_qwen().smart_nframes, own, total, rate))

    def picture_size(self, height: int, width: int, factor: int) -> tuple[int, int]:
        """Return the height and width to scale to, multiples of ``factor``; see fetch_image.

        Raises InputError for bounds that leave no size.
        """
        least, most = (tokens * factor**2 for tokens in _PICTURE_TOKENS)
        return self._size(height, width, factor, self.min_pixels or least, self.max_pixels or most)

    def frame_size(self, frames: int, height: int, width: int, factor: int) -> tuple[int, int]:
        """Return the height and width of each of ``frames`` frames; see :meth:`picture_size`."""
        least, most = (tokens * factor**2 for tokens in _FRAME_TOKENS)
        least = self.min_pixels or least
        together = self.total_pixels or _ALL_TOKENS * factor**2
        bound = max(min(most, together / frames * _PAIR), int(least * 1.05))
        return self._size(height, width, factor, least, min(self.max_pixels or bound, bound))

    def _size(
        self, height: int, width: int, factor: int, least: float, most: float
    ) -> tuple[int, int]:
        resize = _of_qwen().smart_resize
        if self.resized_height is not None:
            made = _following(resize, self.resized_height, self.resized_width, factor)
        else:
            made = _following(resize, height, width, factor, least, most)
        rows, columns = made
        if not 0 < rows * columns <= MOST_PIXELS:
            raise InputError(
                f"scaled to {columns} x {rows} pixels, as its settings ask, a picture of "
                f"{width} x {height} cannot be read; change the settings"
            )
        return rows, columns


@dataclass(frozen=True)
class Sourced:
    """A picture or video of a message whose part has settings: where it is, and these."""

    source: Any
    settings: MediaSettings

    def __str__(self) -> str:
        return str(self.source)


def taken_apart(source: Any) -> tuple[Any, MediaSettings]:
    """Return a source by itself, and its settings."""
    if isinstance(source, Sourced):
        return source.source, source.settings
    return source, MediaSettings()


def evenly(first: int, last: int, count: int) -> list[int]:
    """Return ``count`` frame numbers from ``first`` to ``last``, as torch.linspace rounds them."""
    if count == 1:
        return [first]
    # In float32, each half from its own end.
    step = np.float32(last - first) / np.float32(count - 1)
    steps = np.arange(count, dtype=np.float32)
    spread = np.where(
        steps < count // 2,
        np.float32(first) + step * steps,
        np.float32(last) - step * (np.float32(count - 1) - steps),
    )
    return [int(number) for number in spread.round()]


def _number(name: str, value: Any) -> Any:
    whole = name in _WHOLE
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or (whole and value != int(value)):
        raise InputError(f"{name} is {_shown(value)}, not a {'whole ' * whole}number; correct it")
    if value < 0 or (value == 0 and name not in ("video_start", "video_end")):
        raise InputError(f"{name} is {_shown(value)}; it must be above 0")
    most = 1000 if name.endswith("fps") else MAX_FRAMES if name in _COUNTS else 2**40
    if value > most:
        raise InputError(f"{name} is {_shown(value)}; it must be at most {most:,}")
    return int(value) if whole else float(value)


def _shown(value: Any) -> str:
    return ascii(value)[:60]


def _following(rule: Any, settings: Any, *rest: Any) -> Any:
    """Call one of qwen-vl-utils' rules. Raises InputError where it refuses."""
    first = settings.given() if isinstance(settings, MediaSettings) else settings
    try:
        return rule(first, *rest)
    except (AssertionError, ValueError) as error:
        raise InputError(
            f"the settings of the picture or video cannot be followed: {first_line(error)}; change "
            "them"
        ) from error


@cache
def _library() -> Any | None:
    try:
        return importlib.import_module("qwen_vl_utils.vision_process")
    except (ImportError, RuntimeError, OSError, AttributeError):  # absent, or with a broken torch
        return None


def _of_qwen() -> Any:
    own = SimpleNamespace(
        smart_resize=_smart_resize,
        smart_nframes=_smart_nframes,
        calculate_video_frame_range=_frame_range,
    )
    if "torch" not in sys.modules:
        return own
    return _library() or own


def _smart_resize(
    height: int, width: int, factor: int, least: float | None = None, most: float | None = None
) -> tuple[int, int]:
    least, most = (
        tokens * factor**2 if bound is None else bound
        for bound, tokens in zip((least, most), _PICTURE_TOKENS, strict=True)
    )
    if most < least:
        raise ValueError(f"at most {most:g} pixels are below at least {least:g}")
    if max(height, width) / min(height, width) > _MOST_RATIO:
        raise ValueError(f"{width} x {height} pixels are too thin")
    rows, columns = (max(factor, round(edge / factor) * factor) for edge in (height, width))
    if rows * columns > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (math.floor(edge / shrink / factor) * factor for edge in (height, width))
    elif rows * columns < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(edge * grow / factor) * factor for edge in (height, width))
    return rows, columns


def _smart_nframes(given: Mapping[str, Any], total: int, rate: float) -> int:
    if "nframes" in given:
        count = round(given["nframes"] / _PAIR) * _PAIR
    else:
        least = math.ceil(given["min_frames"] / _PAIR) * _PAIR
        most = math.floor(given["max_frames"] / _PAIR) * _PAIR
        wanted = min(min(max(total / rate * given["fps"], least), most), total)
        count = math.floor(wanted / _PAIR) * _PAIR
    if not _PAIR <= count <= total:
        raise ValueError(f"{count} frames of {total}; take {_PAIR} to {total}")
    return count


def _frame_range(given: Mapping[str, Any], total: int, rate: float) -> tuple[int, int, int]:
    seconds = total / rate
    start, end = given.get("video_start"), given.get("video_end")
    first = 0 if start is None else math.ceil(min(start, seconds) * rate)
    last = total - 1 if end is None else min(math.floor(min(end, seconds) * rate), total - 1)
    if first >= last:
        raise ValueError(
            f"frames {first} to {last} of {total} ({seconds:.1f} s) are no section of a video"
        )
    return first, last, last - first + 1
