"""LLaVA-1.5 and those that give a picture a row of features as it does.

They differ in tiles: one fixed grid a picture (1.5), tiles of a picture through one tower with four
patches a token (InternVL3), a thumbnail plus the tiles of the best fitting grid (NeXT; with video:
NeXT-Video), tiles for a single picture but one grid each for several, and video (OneVision), none
but a grid of the picture's own size (Mistral 3), tiles and a thumbnail of one size, a square of
whose patches becomes one token by pixel shuffle (Idefics3, SmolVLM).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from mmkv.engine.errors import InputError, ModelError
from mmkv.engine.model.families.base import (
    Family,
    floats,
    picture_counts,
    picture_sizes,
    required,
)
from mmkv.engine.model.families.features import (
    IMAGE,
    VIDEO,
    Features,
    joined,
    passes,
    rows_of,
)

if TYPE_CHECKING:
    from mmkv.engine.policies.base import Merger


# Towers whose patches can be merged, with what is done about a class token.
_MERGING = {("clip_vision_model", "default"), ("siglip_vision_model", "full")}
_MASK = "pixel_attention_mask"


class LlavaFamily(Family):
    """Vision tower and projector of transformers; text positions count tokens."""

    model_types: ClassVar[tuple[str, ...]] = ("llava",)
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (
        *Family.text_places,
        ("language_model.model.", "language_model.lm_head.weight"),  # before transformers 4.52
    )
    pixel_dims: ClassVar[tuple[int, ...]] = (4,)

    def pictures(self, kind: int, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the pixels of each picture or tile; what will be refused is one."""
        if not self.own_sizes:
            return self.apart(kind, inputs, 4)
        try:
            pixels = floats(inputs, "pixel_values")
            sizes = picture_sizes(inputs, len(pixels))
        except InputError:
            return [inputs]
        if pixels.dim() != 4:
            return [inputs]
        return [
            {"pixel_values": row[..., : int(size[0, 0]), : int(size[0, 1])], "image_sizes": size}
            for row, size in zip(pixels.split(1), sizes.split(1), strict=True)
        ]

    @property
    def own_sizes(self) -> bool:
        """Return whether the tower keeps each picture's own size: Pixtral's does."""
        return self.config.vision_config.model_type == "pixtral"

    def apart(self, kind: int, inputs: Mapping[str, Any], dims: int) -> list[Mapping[str, Any]]:
        """Return each row of pixels of so many dimensions; what will be refused is one."""
        key = self.pixel_keys[kind]
        try:
            pixels = floats(inputs, key)
        except InputError:
            return [inputs]
        return [{key: row} for row in pixels.split(1)] if pixels.dim() == dims else [inputs]

    def encode(
        self, kind: int, pictures: Sequence[Mapping[str, Any]], device: torch.device | str
    ) -> list[Features]:
        """Return the features of each of some pictures or videos, read together where that can
        be.
        """
        if len(pictures) == 1 or self.own_sizes:
            return super().encode(kind, pictures, device)
        return self.encode_together(kind, pictures, [1] * len(pictures), device)

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, in order."""
        arguments, side = self.selection(), self.config.vision_config.patch_size
        pixels = self.pixels(inputs, "pixel_values", self.pixel_dims, device)
        patch = side**2 if isinstance(side, int) else math.prod(side)
        made, each = [], passes([math.prod(pixels.shape[-2:]) // patch] * len(pixels))
        sizes = picture_sizes(inputs, len(pixels)) if self.own_sizes else None
        if sizes is not None:  # alone, none needs a mask against the others, nor padding
            each = (slice(i, i + 1) for i in range(len(pixels)))
        for these in each:
            shown = pixels[these]
            if sizes is not None:
                arguments["image_sizes"] = sizes[these]
                shown = self._cropped(shown, sizes[these])
            if self.merger is None:
                made.append(Features(self._rows(shown, arguments)))
            else:
                rows, kept = self.merged(shown, self.merger)
                made.append(Features(rows.flatten(0, 1), kept=kept.flatten()))
        return joined(made)

    @property
    def merges(self) -> bool:
        """Return whether it can ask a merger: of LLaVA-1.5 and NeXT, with one layer of CLIP's or
        SigLIP's tower, whose class token, if it has one, is cut off.
        """
        config, layer = self.config, getattr(self.config, "vision_feature_layer", None)
        if config.model_type not in ("llava", "llava_next") or not isinstance(layer, int):
            return False
        vision = config.vision_config
        tower = vision.model_type, config.vision_feature_select_strategy
        return tower in _MERGING and layer % (vision.num_hidden_layers + 1) > 0

    def merged(self, pixels: Tensor, merger: Merger) -> tuple[Tensor, Tensor]:
        """Return the features ``[n, P, d]`` of n grids of patches, and bool ``[n, P]``, which stay.

        Patches that go have features, too: a chunk may end at one.
        """
        model: Any = self.hf.model
        tower = model.vision_tower
        states = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        at = self.config.vision_feature_layer % len(states)
        layers = getattr(tower, "vision_model", tower).encoder.layers  # transformers has had both
        classed = self.config.vision_feature_select_strategy == "default"
        given = states[at][:, int(classed) :]
        found = [
            merger.merge(own, *_attended(layers[at - 1], read, classed))
            for own, read in zip(given, states[at - 1], strict=True)
        ]
        rows = model.multi_modal_projector(torch.stack([states for states, _ in found]))
        return rows, torch.stack([kept for _, kept in found])

    def _rows(self, pixels: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the features ``[V, d]`` of the pictures of one pass."""
        output = self.hf.model.get_image_features(pixel_values=pixels, **arguments)
        return rows_of(output.pooler_output)

    def _cropped(self, pixels: Tensor, sizes: Tensor) -> Tensor:
        """Return one picture without padding. Raises InputError for a size it cannot have."""
        height, width = (int(edge) for edge in sizes[0])
        least = self.config.vision_config.patch_size * getattr(self.config, "spatial_merge_size", 1)
        if height > pixels.shape[-2] or width > pixels.shape[-1] or min(height, width) < least:
            raise InputError(
                f"image_sizes has a picture of {height}x{width} pixels in pixel_values of "
                f"{pixels.shape[-2]}x{pixels.shape[-1]}; pass the processor's output unchanged"
            )
        return pixels[..., :height, :width]

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
    ) -> Tensor:
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
        if not self.own_sizes and size is not None and tuple(pixels.shape[-2:]) != tuple(size):
            raise InputError(
                f"{key} holds pictures of {pixels.shape[-2]}x{pixels.shape[-1]} pixels and the "
                f"vision tower reads {size[0]}x{size[1]}; use this checkpoint's processor"
            )
        return pixels.to(device=device, dtype=self.hf.model.vision_tower.dtype)


def _attended(layer: Any, states: Tensor, classed: bool) -> tuple[Tensor, Tensor]:
    """Return the attention that patches get in a layer of CLIP's form, and their keys.

    Computed anew: a tower's own attention may keep no shares.

    Args:
        states: ``[T, d]`` of one grid of patches, which the layer reads.
        classed: whether the first of T is the class token, whose attention it is.

    Returns:
        float32 ``[P]``, mean over heads and queries; ``[P, H, D]``.
    """
    attention, states = layer.self_attn, layer.layer_norm1(states)
    keys = attention.k_proj(states).unflatten(-1, (attention.num_heads, -1))
    asking = states[:1] if classed else states
    query = attention.q_proj(asking).unflatten(-1, (attention.num_heads, -1))
    logits = torch.einsum("qhd,khd->hqk", query.float(), keys.float())
    shares = (logits * keys.shape[-1] ** -0.5).softmax(-1).mean((0, 1))
    return shares[int(classed) :], keys[int(classed) :]


class InternVLFamily(LlavaFamily):
    """Checkpoints in transformers' form (``OpenGVLab/InternVL3-1B-hf``).

    How many tiles a picture has is in the number of its tokens alone. The processor gives the
    frames of a video as pictures, with picture tokens.
    """

    model_types: ClassVar[tuple[str, ...]] = ("internvl",)


class Mistral3Family(LlavaFamily):
    """Pixtral's tower, which keeps each picture's own size, and four patches a token.

    Text tokens stand between the rows of a picture.
    """

    model_types: ClassVar[tuple[str, ...]] = ("mistral3",)

    def selection(self) -> dict[str, Any]:
        """Return the tower layers that feed the projector."""
        return {
            "vision_feature_layer": self.config.vision_feature_layer,
            "return_dict": True,
        }

    def _rows(self, pixels: Tensor, arguments: dict[str, Any]) -> Tensor:
        """Return the features ``[V, d]`` of one picture.

        transformers fails where V is 1 (it squeezes that axis): such a picture is read twice.
        """
        edge = self.config.vision_config.patch_size * self.config.spatial_merge_size
        if max(pixels.shape[-2:]) >= 2 * edge:
            return super()._rows(pixels, arguments)
        arguments = arguments | {"image_sizes": arguments["image_sizes"].repeat(2, 1)}
        return super()._rows(pixels.repeat(2, 1, 1, 1), arguments)[:1]


class Gemma3Family(LlavaFamily):
    """One size of pictures, or of crops where the processor makes some, and so many tokens each.

    The tokens of a picture see each other: none may be cut in two by the chunks of a prompt.
    """

    model_types: ClassVar[tuple[str, ...]] = ("gemma3",)
    text_types: ClassVar[tuple[str, ...]] = ("gemma3_text",)
    whole_pictures: ClassVar[bool] = True

    @property
    def least_chunk(self) -> int:
        """Return the tokens of a picture."""
        return int(self.config.mm_tokens_per_image)

    def selection(self) -> dict[str, Any]:
        """Return nothing but the form of the result."""
        return {"return_dict": True}


class LlavaNextFamily(LlavaFamily):
    """The number of tokens of a picture follows from its size in pixels (``image_sizes``)."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_next",)
    pixel_dims: ClassVar[tuple[int, ...]] = (4, 5)

    def pictures(self, kind: int, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return all of a turn as one: each is padded to the tiles of the largest."""
        return [inputs]

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, unpadded, with the row-end feature of the
        model.
        """
        pixels = self.pixels(inputs, "pixel_values", self.pixel_dims, device)
        # Sizes steer Python control flow: on the CPU they cost no device round trip.
        sizes = picture_sizes(inputs, len(pixels))
        try:
            if self.merger is not None:
                return self._packed(pixels, sizes, self.merger)
            output = self.hf.model.get_image_features(
                pixel_values=pixels,
                image_sizes=sizes,
                **self.selection(),
                **self.extra_arguments(inputs, len(pixels)),
            )
        except RuntimeError as error:
            if "split_with_sizes" not in str(error):
                raise
            raise ModelError(
                "image_grid_pinpoints of config.json asks for other tiles than pictures were cut "
                "into; use the config.json and preprocessor_config.json of one checkpoint"
            ) from error
        return Features(rows_of(output.pooler_output))

    def _packed(self, pixels: Tensor, sizes: Tensor, merger: Merger) -> Features:
        """Return the features of pictures whose tiles are merged one by one; row ends all stay."""
        model: Any = self.hf.model
        module = import_module("transformers.models.llava_next.modeling_llava_next")
        grids, side = self.config.image_grid_pinpoints, self.config.vision_config.image_size
        counts = [module.image_size_to_num_patches(size, grids, side) for size in sizes]
        if pixels.dim() == 5:
            pixels = torch.cat([own[:n] for own, n in zip(pixels, counts, strict=True)])

        def packed(tiles: Tensor, newline: Tensor) -> Tensor:
            strategy = self.config.vision_feature_select_strategy
            return rows_of(
                model.pack_image_features(tiles.split(counts), sizes, strategy, newline)[0]
            )

        rows, kept = self.merged(pixels, merger)
        stays = packed(kept[..., None], kept.new_ones(1))
        return Features(packed(rows, model.image_newline), kept=stays.flatten())

    def extra_arguments(self, inputs: Mapping[str, Any], pictures: int) -> dict[str, Any]:
        """Return further arguments of this family's vision tower, for so many pictures."""
        return {}


class LlavaNextVideoFamily(LlavaNextFamily):
    """As LLaVA-NeXT, with pooled video frames, all of one grid."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_next_video",)
    pixel_keys: ClassVar[dict[int, str]] = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}

    def pictures(self, kind: int, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return each video; the pictures of a turn, padded to one number of tiles, are one."""
        return self.apart(kind, inputs, 5) if kind == VIDEO else [inputs]

    def video_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all videos of a turn, frame by frame."""
        pixels = self.pixels(inputs, "pixel_values_videos", (5,), device)
        # By place: the versions name this argument differently.
        output = self.hf.model.get_video_features(pixels, **self.selection())
        return Features(rows_of(output.pooler_output))


class LlavaOnevisionFamily(LlavaNextVideoFamily):
    """As LLaVA-NeXT, with pooled video frames and a limit on the tiles of a picture."""

    model_types: ClassVar[tuple[str, ...]] = ("llava_onevision",)

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


class PhotosFamily(LlavaFamily):
    """A classifier and a table of words in place of LLaVA's tower and projector.

    A picture becomes the words that name what it shows, in front of a Llama; ``python -m
    mmkv.training.llava.photos`` writes such checkpoints.
    """

    model_types: ClassVar[tuple[str, ...]] = ("mmkv_photos",)

    @classmethod
    def prepare(cls) -> None:
        """Add config and model to transformers' auto classes; they import its modelling code."""
        import_module("mmkv.engine.model.families.photos_model")


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
