"""LLaVA-OneVision: tiles for a single picture, one grid each for several, and video."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from mmkv.engine.model.families.base import picture_counts
from mmkv.engine.model.families.features import IMAGE, VIDEO, Features, rows_of
from mmkv.engine.model.families.llava_next import LlavaNextFamily


class LlavaOnevisionFamily(LlavaNextFamily):
    """As LLaVA-NeXT, with pooled video frames and a limit on the tiles of a picture."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_onevision",)
    pixel_keys: ClassVar[dict[int, str]] = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}

    def extra_arguments(self, inputs: Mapping[str, Any], pictures: int) -> dict[str, Any]:
        """Return how many pictures stand in the turn: only a lone one was cut into tiles."""
        return {
            "batch_num_images": picture_counts(inputs, pictures),
            "vision_aspect_ratio": self.config.vision_aspect_ratio,
        }

    def video_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all videos of a turn: pooled frames, then one row-end feature a
        video.
        """
        pixels = self.pixels(inputs, "pixel_values_videos", (5,), device)
        # By place: the versions name this argument differently.
        output = self.hf.model.get_video_features(pixels, **self.selection())
        videos, frames = pixels.shape[:2]
        pooled = output.pooler_output.reshape(videos, -1, output.pooler_output.shape[-1])
        vision = self.config.vision_config
        side = math.ceil(vision.image_size // vision.patch_size / 2)
        if pooled.shape[1] == frames * side * side:
            # Older versions add the row-end feature outside get_video_features.
            newline = self.hf.model.image_newline.to(pooled)
            pooled = torch.cat([pooled, newline.expand(videos, 1, -1)], dim=1)
        return Features(rows_of(pooled))
