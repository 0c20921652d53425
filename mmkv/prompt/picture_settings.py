"""Check how a checkpoint prepares pictures and videos, before a picture is prepared so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmkv.engine.errors import ModelError

_MOST_PIXELS = 2**27  # to enlarge a picture to
_MOST_EDGE = 2**13
_MOST_FRAMES = 2**16
# What this decoder's vision config calls it.
_PATCHES = {
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
}


def require_settings(settings: Any, file: str, vision: Any, pixels: bool) -> None:
    """Raise ModelError for settings that are of a wrong type, absurd, or another model's.

    Args:
        settings: a loaded picture processor, or the content of its file.
        file: for messages. vision: the vision part of the model's config.
        pixels: ``size`` bounds a picture's pixels; otherwise its edges.
    """

    def of(name: str) -> Any:
        return (
            settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)
        )

    def require(right: bool, name: str, wanted: str) -> None:
        if not right:
            raise _wrong(file, name, of(name), wanted)

    for name, theirs in _PATCHES.items() if pixels else ():
        own = getattr(vision, theirs, None)
        value = of(name)
        require(
            value is None or (_whole(value, _MOST_EDGE) and own in (None, value)),
            name,
            f"{own}, as the model's config has it" if own else "a whole number",
        )
    for name in ("image_mean", "image_std"):
        value = of(name)
        some = value is None or (
            isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_real, value))
        )
        require(some and not (name == "image_std" and 0 in (value or ())), name, "three numbers")
    factor = of("rescale_factor")
    require(factor is None or (_real(factor) and factor != 0), "rescale_factor", "a number")
    for name in ("size", "crop_size"):
        value = of(name)
        most = _MOST_PIXELS if pixels else _MOST_EDGE
        edges = _edges(value)
        upper = edges.pop("longest_edge", None) if pixels else None
        require(
            value is None
            or (
                bool(edges or upper)
                and all(_whole(each, most) for each in edges.values())
                and (upper is None or _whole(upper, 2**62))
                and (upper is None or upper >= edges.get("shortest_edge", 1))
            ),
            name,
            f"sizes from 1 to {most:,}",
        )


def require_frames(settings: Mapping[str, Any], file: str, either: bool) -> None:
    """Raise ModelError for settings of videos that name no frames.

    ``either``: ``fps`` and ``num_frames`` exclude each other, as transformers has it for Qwen-VL.
    """
    for name in ("num_frames", "min_frames", "max_frames", "max_video_tokens"):
        value = settings.get(name)
        most = 2**31 if name == "max_video_tokens" else _MOST_FRAMES
        if value is not None and not _whole(value, most):
            raise _wrong(file, name, value, f"a number of frames from 1 to {most:,}")
    rate, shift = settings.get("fps"), settings.get("initial_shift")
    if rate is not None and not (_real(rate) and 0 < rate <= 1000):
        raise _wrong(file, "fps", rate, "frames a second above 0")
    if shift is not None and not isinstance(shift, bool) and not (_real(shift) and shift >= 0):
        raise _wrong(file, "initial_shift", shift, "true, false or a number of frames")
    least, most_frames = settings.get("min_frames"), settings.get("max_frames")
    if least is not None and most_frames is not None and least > most_frames:
        raise _wrong(file, "min_frames", least, f"at most max_frames ({most_frames})")
    if either and rate is not None and settings.get("num_frames") is not None:
        raise ModelError(f"{file}: fps and num_frames exclude each other; set one of them to null")
    for name in ("do_resize", "do_rescale", "do_normalize", "cap_pixels_per_frame"):
        if not isinstance(settings.get(name), (bool, type(None))):
            raise _wrong(file, name, settings[name], "true or false")
    if settings.get("resample") not in (None, *range(6)):
        raise _wrong(file, "resample", settings["resample"], "a filter from 0 to 5")


def require_tile(settings: Any, file: str) -> None:
    """Raise ModelError where a picture processor's tile or filter for it is not known.

    Args: as of :func:`require_settings`.
    """
    size, resample = getattr(settings, "size", None), getattr(settings, "resample", None)
    if not {"height", "width"} <= _edges(size).keys():
        raise _wrong(file, "size", size, "height and width of a tile")
    if resample not in range(6):
        raise _wrong(file, "resample", resample, "a filter from 0 to 5")


def _edges(value: Any) -> dict[str, Any]:
    """Return the sizes by name; transformers has a class of its own for them in some versions."""
    if isinstance(value, int):
        return {"edge": value}
    names = ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
    found = {
        name: value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        for name in names
    }
    return {name: each for name, each in found.items() if each is not None}


def _whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _real(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) < 1e6
    )


def _wrong(file: str, name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(f"{file}: {name} is {ascii(value)[:60]}, not {wanted}; get the original file")
