"""LLaVA-1.5 (and checkpoints of the same architecture): one fixed grid of features a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Family, floats, picture_sizes
from mmkv.engine.model.families.features import Features, rows_of


class LlavaFamily(Family):
    """Vision tower and projector of transformers; text positions count tokens."""

    model_types: ClassVar[tuple[str, ...]] = ("llava",)
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (
        *Family.text_places,
        ("language_model.model.", "language_model.lm_head.weight"),  # before transformers 4.52
    )
    pixel_dims: ClassVar[tuple[int, ...]] = (4,)

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, in order."""
        arguments = self.selection()
        pixels = self.pixels(inputs, "pixel_values", self.pixel_dims, device)
        if self.config.vision_config.model_type == "pixtral":
            # The one tower that keeps each picture's own size.
            arguments["image_sizes"] = picture_sizes(inputs, len(pixels))
        output = self.hf.model.get_image_features(
            pixel_values=pixels,
            **arguments,
        )
        return Features(rows_of(output.pooler_output))

    def selection(self) -> dict[str, Any]:
        """Return the tower layers that feed the projector, and whether the class token is cut off.

        Passed explicitly, with the form of the result, so that neither depends on how a
        transformers version fills in what is left out.
        """
        return {
            "vision_feature_layer": self.config.vision_feature_layer,
            "vision_feature_select_strategy": self.config.vision_feature_select_strategy,
            "return_dict": True,
        }

    def pixels(
        self,
        inputs: Mapping[str, Any],
        key: str,
        dims: tuple[int, ...],
        device: torch.device | str,
    ) -> torch.Tensor:
        """Return ``inputs[key]`` on ``device`` in the tower's dtype.

        Raises:
            InputError: for another number of dimensions or another picture size.
        """
        pixels = floats(inputs, key)
        if pixels.dim() not in dims or pixels.shape[-3] != 3:
            raise InputError(
                f"{key} has shape {list(pixels.shape)}, not {' or '.join(map(str, dims))} "
                "dimensions with 3 colours; use this checkpoint's processor"
            )
        size = getattr(self.config.vision_config, "image_size", None)
        size = (size, size) if isinstance(size, int) else size
        fixed = self.config.vision_config.model_type != "pixtral"
        if fixed and size is not None and tuple(pixels.shape[-2:]) != tuple(size):
            raise InputError(
                f"{key} holds pictures of {pixels.shape[-2]}x{pixels.shape[-1]} pixels and the "
                f"vision tower reads {size[0]}x{size[1]}; use this checkpoint's processor"
            )
        return pixels.to(device=device, dtype=self.hf.model.vision_tower.dtype)
