"""Convert pictures and videos for Qwen-VL models: patches, grids and expanded placeholders.

transformers' processor of these families needs torchvision even for plain pictures, because it
loads a video processor. Its image processor does not, so the pictures go through that one; video
frames are cut into patches here by the same rules and give the same numbers on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.errors import InputError
from mmkv.prompt.video import Clip, FrameMap

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"
FRAME_START, FRAME_END = "<|vision_start|>", "<|vision_end|>"


# What older files call the bounds.
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_SETTINGS = {"patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std"}
_SETTINGS |= {*_EDGES.values()}


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
        """Compute the height and width to scale to: multiples of a merged patch, within the pixel
        bounds.
        """
        if not self.frames_apart:
            return self._bounded(height, width, 1, 1)
        factor = self.patch_size * self.merge_size
        if height < factor or width < factor:
            grow = max(factor / height, factor / width)
            height, width = int(height * grow), int(width * grow)
        step = self.temporal_patch_size
        frames = max(frames, step)  # a single frame is repeated to fill its patch
        return self._bounded(height, width, frames, round(frames / step) * step)

    def _bounded(self, height: int, width: int, frames: int, filled: int) -> tuple[int, int]:
        """Round to merged patches; ``filled``: frames that the rounded volume counts."""
        if max(height, width) > 200 * min(height, width):
            raise InputError(f"video frames of {width} x {height} are too thin; crop them")
        factor = self.patch_size * self.merge_size
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
        from PIL import Image as pil

        rows, columns = self.size(frames, height, width)

        def scale(frame: np.ndarray) -> np.ndarray:
            if frame.shape[:2] == (rows, columns):
                return frame
            return np.asarray(pil.fromarray(frame).resize((columns, rows), pil.Resampling.BICUBIC))

        return scale

    def patches(self, clip: Clip) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Cut patches float32 [n, 3 * temporal * patch * patch] in merge order, and the grid t,
        h, w.

        The last frame is repeated when the number of frames does not fill the temporal patch.
        """
        scale = self.scaler(len(clip.frames), *clip.frames.shape[1:3])
        frames = np.stack([scale(frame) for frame in clip.frames])
        missing = -len(frames) % self.temporal_patch_size
        frames = np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)])
        pixels = frames.astype(np.float32) / np.float32(255)
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
            f"<{seconds:.1f} seconds>{FRAME_START}{tokens}{FRAME_END}"
            for seconds in self.timestamps(clip)
        )

    def times(self, clips: Sequence[Clip]) -> dict[str, list[float]]:
        """Return the seconds between two temporal patches of each video, if the model asks."""
        if self.frames_apart:
            return {}
        step = self.temporal_patch_size
        return {"second_per_grid_ts": [step / clip.sampled_fps for clip in clips]}


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
)


def prepare(
    text: str,
    images: Sequence[Image],
    clips: Sequence[Clip],
    image_processor: Any,
    rules: VideoRules,
    image_size: dict[str, int] | None,
) -> tuple[str, dict[str, Any]]:
    """Expand the placeholders of ``text`` and make the pixel inputs (torch tensors).

    ``image_size``: bounds on a picture's pixels as {"shortest_edge", "longest_edge"}, or None
    for the checkpoint's own.
    """
    import torch

    pixels: dict[str, Any] = {}
    fills: dict[str, list[str]] = {IMAGE: [], VIDEO: []}
    if images:
        options = {"size": image_size} if image_size else {}
        made = image_processor(list(images), return_tensors="pt", **options)
        pixels |= {key: made[key] for key in ("pixel_values", "image_grid_thw")}
        merged = made["image_grid_thw"].prod(-1) // image_processor.merge_size**2
        fills[IMAGE] = [IMAGE * count for count in merged.tolist()]
    if clips:
        cut = [rules.patches(clip) for clip in clips]
        pixels["pixel_values_videos"] = torch.from_numpy(np.concatenate([part for part, _ in cut]))
        pixels["video_grid_thw"] = torch.tensor([grid for _, grid in cut])
        pixels |= {key: torch.tensor(values) for key, values in rules.times(clips).items()}
        fills[VIDEO] = [
            rules.expand(clip, grid) for clip, (_, grid) in zip(clips, cut, strict=True)
        ]
    waiting = {token: iter(fill) for token, fill in fills.items()}
    pattern = "|".join(map(re.escape, waiting))
    return re.sub(pattern, lambda match: next(waiting[match[0]]), text), pixels
