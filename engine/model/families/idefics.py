"""Idefics3 and SmolVLM: a picture is tiles and a thumbnail of one size, each so many tokens.

The tower's patches go into fewer tokens by pixel shuffle: those of a square become one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Family, floats, required
from mmkv.engine.model.families.features import Features, joined, passes, rows_of

_MASK = "pixel_attention_mask"


class IdeficsFamily(Family):
    """How many tiles a picture has is in the number of its tokens alone.

    The processor gives the frames of a video as pictures, with picture tokens.
    """

    model_types: ClassVar[tuple[str, ...]] = ("idefics3", "smolvlm")
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (("model.text_model.", "lm_head.weight"),)

    @staticmethod
    def text_model(hf_model: Any) -> nn.Module:
        """Return the module with embed_tokens, layers, norm and rotary_emb."""
        return hf_model.model.text_model

    def pictures(self, kind: int, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the pixels of each tile; what will be refused is one."""
        try:
            tiles = self._tiles(inputs)
        except InputError:
            return [inputs]
        return [{"pixel_values": tile[None]} for tile in tiles.split(1)]

    def encode(
        self, kind: int, pictures: Sequence[Mapping[str, Any]], device: torch.device | str
    ) -> list[Features]:
        """Return the features of each of some tiles, which are read together."""
        if len(pictures) == 1:
            return super().encode(kind, pictures, device)
        return self.encode_together(kind, pictures, [1] * len(pictures), device)

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, in order."""
        tiles, vision = self._tiles(inputs), self.hf.model.vision_model
        side = self.config.vision_config.patch_size
        made = []
        for these in passes([tiles.shape[-1] * tiles.shape[-2] // side**2] * len(tiles)):
            pixels = tiles[these].to(device=device, dtype=vision.dtype)
            output = self.hf.model.get_image_features(pixel_values=pixels[None], return_dict=True)
            made.append(Features(rows_of(output.pooler_output)))
        return joined(made)

    def _tiles(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return ``[tiles, 3, height, width]``; those that fill up a batch, all zeros, are left
        out, as transformers leaves them.

        Raises:
            InputError: for another shape, or a tile of which a part is padding.
        """
        pixels, size = floats(inputs, "pixel_values"), self.config.vision_config.image_size
        if pixels.dim() != 5 or tuple(pixels.shape[2:]) != (3, size, size):
            raise InputError(
                f"pixel_values has shape {list(pixels.shape)}, not [prompts, tiles, 3, {size}, "
                f"{size}]; use this checkpoint's processor"
            )
        there = (pixels != 0).flatten(2).any(-1)
        if inputs.get(_MASK) is not None:
            mask = required(inputs, _MASK)
            if mask.shape != (*pixels.shape[:2], size, size):
                raise InputError(
                    f"{_MASK} has shape {list(mask.shape)} for pixel_values of "
                    f"{list(pixels.shape)}; pass the processor's output unchanged"
                )
            if not bool(mask.to(there.device)[there].bool().all()):
                raise InputError(
                    f"{_MASK} masks a part of a tile, which this tower does not do here; let the "
                    "processor scale pictures (do_resize)"
                )
        return pixels[there]
