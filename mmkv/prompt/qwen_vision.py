"""Convert pictures and videos for Qwen-VL models: patches, grids and expanded placeholders.

transformers' processor of these families needs torchvision even for plain pictures, because it
loads a video processor. Its image processor does not, so the pictures go through that one; video
frames are cut into patches here by the same rules and give the same numbers on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from mmkv.engine.errors import InputError
from mmkv.prompt.media import SIZED
from mmkv.prompt.part_settings import MediaSettings
from mmkv.prompt.video import DEFAULT_FPS, Clip, FrameMap, FrameRule, SizeRule

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
FRAME_START, FRAME_END = "<|vision_start|>", "<|vision_end|>"


# What older files call the bounds.
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_SETTINGS = {"patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"}
_SETTINGS |= {"do_resize", "resample", "do_rescale", "rescale_factor", "do_normalize"}
_SETTINGS |= {"cap_pixels_per_frame", "max_video_tokens", *_EDGES.values()}


@dataclass(frozen=True)
class VideoRules:
    """The settings that turn frames into patches; defaults as in transformers' processor of
    Qwen3-VL.

    Attributes:
        shortest_edge, longest_edge: bounds on frames x height x width, in pixels; of height x
            width where ``frames_apart`` is False.
        frames_apart: the frames stand behind timestamps. Otherwise a video is one run of tokens,
            and the model is told the seconds between them (Qwen2.5-VL).
    """

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    shortest_edge: int = 128 * 32 * 32
    longest_edge: int = 768 * 32 * 32
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    frames_apart: bool = True
    do_resize: bool = True
    resample: int = 3
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    cap_pixels_per_frame: bool = False
    max_video_tokens: int = 768

    @property
    def factor(self) -> int:
        """Return the edge of a token's square in pixels."""
        return self.patch_size * self.merge_size

    def changed(self, config: Mapping[str, Any]) -> VideoRules:
        """Read a ``video_preprocessor_config.json`` (unknown keys do not matter here)."""
        size = config.get("size") or {}
        named: dict[str, Any] = {
            _EDGES.get(key, key): tuple(value) if isinstance(value, list) else value
            for key, value in {**config, **size}.items()
            if _EDGES.get(key, key) in _SETTINGS and value is not None
        }
        return replace(self, **named)

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Compute the height and width to scale frames to, as transformers' video processors do.

        Multiples of a merged patch. The bounds are on frames x height x width, or on each frame
        alone where ``frames_apart`` is False.
        """
        factor = self.factor
        if not self.do_resize:
            if height % factor or width % factor:
                raise InputError(
                    f"{width} x {height} pixels are not scaled for this model (do_resize), and are "
                    f"no multiple of {factor}; scale them"
                )
            return height, width
        if self.cap_pixels_per_frame:
            return self._capped(frames).size(frames, height, width)
        if not self.frames_apart:
            return self._bounded(height, width, 1, 1)  # a frame by itself
        if height < factor or width < factor:
            grow = max(factor / height, factor / width)
            height, width = int(height * grow), int(width * grow)
        step = self.temporal_patch_size
        frames = max(frames, step)  # a single frame is repeated to fill its patch
        # Compared with the bounds are whole temporal patches; scaled by are the frames there are.
        return self._bounded(height, width, frames, round(frames / step) * step)

    def _capped(self, frames: int) -> VideoRules:
        """Return the rules with a longest edge that bounds each frame, too."""
        least, square = int(1.05 * self.shortest_edge), self.factor**2
        if self.frames_apart:
            own = self.max_video_tokens * square
            most = max(min(own, self.longest_edge // frames), least) * frames
        else:
            together = int(self.max_video_tokens * square * 0.9) * self.temporal_patch_size
            most = max(min(self.longest_edge, together // frames), least)
        return replace(self, longest_edge=most, cap_pixels_per_frame=False)

    def _bounded(self, height: int, width: int, frames: int, filled: int) -> tuple[int, int]:
        """Round to merged patches; ``filled``: frames that the rounded volume counts."""
        if max(height, width) > 200 * min(height, width):
            raise InputError(f"{width} x {height} pixels are too thin; crop them")
        factor = self.factor
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        volume, ideal = filled * rows * columns, frames * height * width
        if volume > self.longest_edge:
            shrink = math.sqrt(ideal / self.longest_edge)
            rows = max(factor, math.floor(height / shrink / factor) * factor)
            columns = max(factor, math.floor(width / shrink / factor) * factor)
        elif volume < self.shortest_edge:
            grow = math.sqrt(self.shortest_edge / ideal)
            rows = math.ceil(height * grow / factor) * factor
            columns = math.ceil(width * grow / factor) * factor
        return rows, columns

    def scaler(self, frames: int, height: int, width: int) -> FrameMap:
        """Return a function that scales one frame [height, width, 3] to the size for this video."""
        return self._to(*self.size(frames, height, width))

    def scaler_of(self, settings: MediaSettings) -> SizeRule:
        """Return the rule that scales frames as a message asks; see :meth:`scaler`."""
        if not settings.scales:
            return self.scaler

        def rule(frames: int, height: int, width: int) -> FrameMap:
            return self._to(*settings.frame_size(frames, height, width, self.factor))

        return rule

    def _to(self, rows: int, columns: int) -> FrameMap:
        from PIL import Image as pil

        def scale(frame: np.ndarray) -> np.ndarray:
            if frame.shape[:2] == (rows, columns):
                return frame
            shape = (columns, rows)
            return np.asarray(pil.fromarray(frame).resize(shape, pil.Resampling(self.resample)))

        return scale

    def patches(self, clip: Clip) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Cut patches float32 [n, 3 * temporal * patch * patch] in merge order, and the grid t,
        h, w.

        The last frame is repeated when the number of frames does not fill the temporal patch.
        """
        frames = clip.frames
        if not clip.sized:
            scale = self.scaler(len(frames), *frames.shape[1:3])
            frames = np.stack([scale(frame) for frame in frames])
        missing = -len(frames) % self.temporal_patch_size
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
        pixels = frames.astype(np.float32)
        if self.do_rescale:
            pixels *= np.float32(self.rescale_factor)
        if self.do_normalize:
            mean, std = (np.asarray(v, np.float32) for v in (self.image_mean, self.image_std))
            pixels = (pixels - mean) / std
        patch, merge = self.patch_size, self.merge_size
        grid = (
            len(frames) // self.temporal_patch_size,
            frames.shape[1] // patch,
            frames.shape[2] // patch,
        )
        cut = pixels.reshape(
            grid[0],
            self.temporal_patch_size,
            grid[1] // merge,
            merge,
            patch,
            grid[2] // merge,
            merge,
            patch,
            3,
        )
        # -> time, merged row, merged column, row and column in it, channel, frame, pixel
        ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return np.ascontiguousarray(ordered).reshape(math.prod(grid), -1), grid

    def timestamps(self, clip: Clip) -> list[float]:
        """Compute the seconds per temporal patch: the mean of its first and last frame's time."""
        step = self.temporal_patch_size
        times = clip.timestamps
        times += times[-1:] * (-len(times) % step)
        return [(times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step)]

    def expand(self, clip: Clip, grid: tuple[int, int, int]) -> str:
        """Write the text for one video placeholder: each temporal patch's time and tokens, or the
        tokens alone.
        """
        if not self.frames_apart:
            return VIDEO * (math.prod(grid) // self.merge_size**2)
        tokens = VIDEO * (grid[1] * grid[2] // self.merge_size**2)
        return "".join(
            f"{time_text(seconds)}{FRAME_START}{tokens}{FRAME_END}"
            for seconds in self.timestamps(clip)
        )

    def times(self, clips: Sequence[Clip]) -> dict[str, list[float]]:
        """Return the seconds between two temporal patches of each video, if the model asks."""
        if self.frames_apart:
            return {}
        step = self.temporal_patch_size
        return {"second_per_grid_ts": [step / clip.sampled_fps for clip in clips]}


def time_text(seconds: float) -> str:
    """Write the time of a frame as Qwen3-VL was trained with it."""
    return f"<{seconds:.1f} seconds>"


# Of Qwen2.5-VL. Where a checkpoint has no video settings the bounds are the defaults of
# transformers' video processor, not the wider ones of its pictures, which transformers then takes
# for videos: a frame of 12 million pixels would be 16,000 tokens.
RUN = VideoRules(
    patch_size=14,
    shortest_edge=128 * 28 * 28,
    longest_edge=768 * 28 * 28,
    image_mean=(0.48145466, 0.4578275, 0.40821073),
    image_std=(0.26862954, 0.26130258, 0.27577711),
    frames_apart=False,
    max_video_tokens=128_000,
)


def frame_rule(config: Mapping[str, Any], apart: bool) -> FrameRule:
    """Read which frames are taken from a ``video_preprocessor_config.json``.

    ``apart``: see :class:`VideoRules`. Where it names no rate it is 2 frames a second: transformers
    then reads every frame for Qwen2.5-VL, whose files say so (``do_sample_frames``) whoever wrote
    them, and whose cards give the frames of qwen-vl-utils, 2 a second.
    """
    count = config.get("num_frames")
    rate = config.get("fps", None if count or not apart else DEFAULT_FPS)
    if apart and config.get("do_sample_frames") is False:
        rate = count = None
    elif not apart and not count:
        rate = rate or DEFAULT_FPS
    bounds = {key: config[key] for key in ("min_frames", "max_frames") if config.get(key)}
    way: Any = "spread" if apart else "strided"
    step = config.get("temporal_patch_size") or VideoRules.temporal_patch_size
    return FrameRule(way, rate, count, step=step, **bounds)


def prepare(
    images: Sequence[Image],
    clips: Sequence[Clip],
    image_processor: Any,
    rules: VideoRules,
    image_size: dict[str, int] | None,
) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return what stands for each picture and video in the text, by placeholder, and the pixel
    inputs (torch tensors).

    ``image_size``: bounds on a picture's pixels as {"shortest_edge", "longest_edge"}, or None
    for the checkpoint's own.
    """
    import torch

    pixels: dict[str, Any] = {}
    fills: dict[str, list[str]] = {IMAGE: [], VIDEO: []}
    if images:
        options: dict[str, Any] = {"size": image_size} if image_size else {}
        runs = [
            image_processor(
                list(run), return_tensors="pt", **({"do_resize": False} if sized else options)
            )
            for sized, run in groupby(images, lambda image: SIZED in image.info)
        ]
        pixels |= {
            key: torch.cat([made[key] for made in runs])
            for key in ("pixel_values", "image_grid_thw")
        }
        merged = pixels["image_grid_thw"].prod(-1) // image_processor.merge_size**2
        fills[IMAGE] = [IMAGE * count for count in merged.tolist()]
    if clips:
        cut = [rules.patches(clip) for clip in clips]
        pixels["pixel_values_videos"] = torch.from_numpy(np.concatenate([part for part, _ in cut]))
        pixels["video_grid_thw"] = torch.tensor([grid for _, grid in cut])
        pixels |= {key: torch.tensor(values) for key, values in rules.times(clips).items()}
        fills[VIDEO] = [
            rules.expand(clip, grid) for clip, (_, grid) in zip(clips, cut, strict=True)
        ]
    return fills, pixels
