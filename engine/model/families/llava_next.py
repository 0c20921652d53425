"""LLaVA-NeXT (1.6): a picture is a thumbnail plus tiles of the best fitting grid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from mmkv.engine.model.families.base import picture_sizes
from mmkv.engine.model.families.features import Features, rows_of
from mmkv.engine.model.families.llava import LlavaFamily


class LlavaNextFamily(LlavaFamily):
    """The number of tokens of a picture follows from its size in pixels (``image_sizes``)."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_next",)
    pixel_dims: ClassVar[tuple[int, ...]] = (4, 5)

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, unpadded, with the row-end feature of the
        model.
        """
        pixels = self.pixels(inputs, "pixel_values", self.pixel_dims, device)
        output = self.hf.model.get_image_features(
            pixel_values=pixels,
            # Sizes steer Python control flow: on the CPU they cost no device round trip.
            image_sizes=picture_sizes(inputs, len(pixels)),
            **self.selection(),
            **self.extra_arguments(inputs, len(pixels)),
        )
        return Features(rows_of(output.pooler_output))

    def extra_arguments(self, inputs: Mapping[str, Any], pictures: int) -> dict[str, Any]:
        """Return further arguments of this family's vision tower, for so many pictures."""
        return {}
