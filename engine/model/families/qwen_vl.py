"""Qwen-VL: pictures and videos of any size, M-RoPE positions (t, h, w).

Qwen3-VL, dense and with experts, adds features to the first layers (deepstack); Qwen2-VL and
Qwen2.5-VL have M-RoPE in sections, and the latter places videos by seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Family, floats, required
from mmkv.engine.model.families.features import (
    IMAGE,
    MOST_PATCHES,
    VIDEO,
    Features,
    joined,
    passes,
    rows_of,
)

_GRID_KEY = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}


class Qwen3VLFamily(Family):
    """The vision side and the rope index are transformers' own; positions are then offset.

    Shifting all three axes alike leaves the relative positions of M-RoPE unchanged, so a turn
    indexed from 0 and shifted equals the same turn indexed inside the whole conversation. The
    model's own ``rope_deltas`` (one for the whole process) is never read.

    Attributes:
        frames_apart: text stands between the frames of a video.
        like_qwen: pictures and videos are scaled and written into prompts as Qwen's processors do.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl", "qwen3_vl_moe")
    pixel_keys: ClassVar[dict[int, str]] = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
    rope_axes: ClassVar[int] = 3
    mrope_section: ClassVar[tuple[int, ...] | None] = (24, 20, 20)
    frames_apart: ClassVar[bool] = True
    like_qwen: ClassVar[bool] = True

    def positions(self, token_ids: Tensor, modality: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rope positions int64 ``[3, T]`` of this turn alone, counted from 0.

        Raises:
            InputError: when runs of visual tokens and the grids do not match one to one.
        """
        if not bool((modality > 0).any()):
            return torch.arange(token_ids.numel()).expand(3, -1)
        grids = {kind: self._grid(inputs, kind) for kind in (IMAGE, VIDEO)}
        self._check_runs(modality, grids)
        positions, _ = self.hf.model.get_rope_index(
            input_ids=token_ids[None],
            # From the ids, not from the processor: what is replaced and what is placed on a
            # grid are then the same tokens.
            mm_token_type_ids=modality[None].int(),
            image_grid_thw=grids[IMAGE],
            video_grid_thw=grids[VIDEO],
        )
        return positions[:, 0].long()

    def split(self, inputs: Mapping[str, Any], spans: Sequence[Tensor]) -> list[Mapping[str, Any]]:
        """Return per span of tokens the grids of its pictures and videos.

        Grids that do not end where a span does are left for :meth:`positions` to name.
        """
        if len(spans) == 1:
            return [inputs]
        own: list[dict[str, Any]] = [{} for _ in spans]
        for kind, key in _GRID_KEY.items():
            grid = self._grid(inputs, kind)
            if grid is None:
                continue
            ends = (grid.prod(-1) // self.config.vision_config.spatial_merge_size**2).cumsum(0)
            tokens = torch.tensor([int((span == kind).sum()) for span in spans]).cumsum(0)
            after = torch.searchsorted(ends, tokens, right=True).tolist()
            for part, first, last in zip(own, [0, *after], after, strict=False):
                if last > first:
                    part[key] = grid[first:last]
        return [*own]

    def pictures(self, kind: int, inputs: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return patches and grid of each picture or video; what will be refused is one."""
        key = self.pixel_keys[kind]
        try:
            pixels, grid = floats(inputs, key), self._grid(inputs, kind)
        except InputError:
            return [inputs]
        if grid is None or pixels.dim() != 2 or len(pixels) != int(grid.prod(-1).sum()):
            return [inputs]
        patches = pixels.split(grid.prod(-1).tolist())
        return [
            {key: own, _GRID_KEY[kind]: sizes[None]}
            for own, sizes in zip(patches, grid, strict=True)
        ]

    def encode(
        self, kind: int, pictures: Sequence[Mapping[str, Any]], device: torch.device | str
    ) -> list[Features]:
        """Return the features of each of some pictures or videos, which are read together."""
        if len(pictures) == 1:
            return super().encode(kind, pictures, device)
        rows = [len(picture[self.pixel_keys[kind]]) for picture in pictures]
        merged = self.config.vision_config.spatial_merge_size**2
        rows = [count // merged for count in rows]
        return self.encode_together(kind, pictures, rows, device)

    def image_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of all pictures of a turn, in order, with their deepstack levels."""
        return self._visual(inputs, IMAGE, device)

    def video_features(self, inputs: Mapping[str, Any], device: torch.device | str) -> Features:
        """Return the features of a turn's videos, frame by frame, with their deepstack levels."""
        return self._visual(inputs, VIDEO, device)

    def _visual(self, inputs: Mapping[str, Any], kind: int, device: torch.device | str) -> Features:
        key = self.pixel_keys[kind]
        pixels, grid = floats(inputs, key), self._grid(inputs, kind)
        if grid is None:
            grid = required(inputs, _GRID_KEY[kind])  # which says that it is missing
        patches = int(grid.prod(-1).sum())
        vision = self.config.vision_config
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        if pixels.dim() == 2 and pixels.shape[1] != width:
            raise InputError(
                f"{key} has patches of {pixels.shape[1]} numbers and the model reads {width}; use "
                "this checkpoint's processor"
            )
        if pixels.dim() != 2 or pixels.shape[0] != patches:
            raise InputError(
                f"{key} has shape {list(pixels.shape)} and {_GRID_KEY[kind]} asks for {patches} "
                "patches; pass the processor's output unchanged"
            )
        if patches > MOST_PATCHES:
            # No frame sees another, so that those of a video are as good as pictures.
            grid = grid.new_tensor([(1, *row[1:]) for row in grid.tolist() for _ in range(row[0])])
        sizes, made, first = grid.prod(-1).tolist(), [], 0
        for own in passes(sizes):
            after = first + sum(sizes[own])
            made.append(self._pass(kind, pixels[first:after].to(device), grid[own].to(device)))
            first = after
        return joined(made)

    def _pass(self, kind: int, pixels: Tensor, grid: Tensor) -> Features:
        reader = "get_image_features" if kind == IMAGE else "get_video_features"
        arguments = {self.pixel_keys[kind]: pixels, _GRID_KEY[kind]: grid}
        output = getattr(self.hf.model, reader)(**arguments, return_dict=True)
        return Features(
            rows_of(output.pooler_output),
            tuple(rows_of(level) for level in getattr(output, "deepstack_features", None) or ()),
        )

    def _grid(self, inputs: Mapping[str, Any], kind: int) -> Tensor | None:
        """Return ``[n, 3]`` patches per picture or video (t, h, w), or None."""
        if inputs.get(_GRID_KEY[kind]) is None:
            return None
        grid = required(inputs, _GRID_KEY[kind]).cpu().long()
        if grid.dim() != 2 or grid.shape[1] != 3 or bool((grid < 1).any()):
            raise InputError(
                f"{_GRID_KEY[kind]} has shape {list(grid.shape)}, not [n, 3] counts; pass the "
                "processor's output unchanged"
            )
        merge = self.config.vision_config.spatial_merge_size
        if bool((grid[:, 1:] % merge != 0).any()):
            raise InputError(
                f"{_GRID_KEY[kind]} has a height or width that {merge} does not divide, the "
                "patches of a token's edge; pass the processor's output unchanged"
            )
        return grid

    def _check_runs(self, modality: Tensor, grids: dict[int, Tensor | None]) -> None:
        """Check that each picture and video frame is one unbroken run of tokens."""
        merged = self.config.vision_config.spatial_merge_size**2
        wanted: dict[int, list[int]] = {IMAGE: [], VIDEO: []}
        for kind, grid in grids.items():
            for time, height, width in [] if grid is None else grid.tolist():
                runs = time if kind == VIDEO and self.frames_apart else 1
                wanted[kind] += [time * height * width // merged // runs] * runs
        found: dict[int, list[int]] = {IMAGE: [], VIDEO: []}
        for kind, group in groupby(modality.tolist()):
            if kind:
                found[kind].append(len(list(group)))
        for kind, noun in ((IMAGE, "image"), (VIDEO, "video")):
            if found[kind] != wanted[kind]:
                raise InputError(
                    f"the {noun} tokens stand in runs of {found[kind]} and {_GRID_KEY[kind]} asks "
                    f"for {wanted[kind]}; pass the processor's output of this turn unchanged"
                )


class Qwen35Family(Qwen3VLFamily):
    """Qwen3.5, dense and with experts; most layers follow the gated delta rule.

    Pictures are read and placed as Qwen3-VL's are, without deepstack; a quarter of each head is
    rotated.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_5", "qwen3_5_moe")
    text_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text", "qwen3_5_moe_text")
    mrope_section: ClassVar[tuple[int, ...] | None] = (11, 11, 10)


class Glm4vFamily(Qwen3VLFamily):
    """GLM-4.1V and GLM-4.6V: pictures and videos of any size, M-RoPE in sections, no deepstack.

    One token stands for patches of pictures and of videos' frames; those of a video are between
    its begin and its end. A half of each head is rotated, in pairs of features.
    """

    model_types: ClassVar[tuple[str, ...]] = ("glm4v", "glm46v")
    text_types: ClassVar[tuple[str, ...]] = ("glm4v_text",)
    mrope_section: ClassVar[tuple[int, ...] | None] = (8, 12, 12)
    mrope_interleaved: ClassVar[bool] = False
    like_qwen: ClassVar[bool] = False

    def _modality(self, token_ids: Tensor) -> Tensor:
        """Return uint8 ``[T]``: 0 text, 1 image, 2 video."""
        begun = (token_ids == self.config.video_start_token_id).cumsum(0)
        in_video = begun > (token_ids == self.config.video_end_token_id).cumsum(0)
        kinds = torch.where(in_video, VIDEO, IMAGE)
        return kinds.where(token_ids == self.config.image_token_id, 0).to(torch.uint8)


_SECONDS = "second_per_grid_ts"


class Qwen2VLFamily(Qwen3VLFamily):
    """As Qwen3-VL, but the frequencies of M-RoPE lie in sections, there is no deepstack, and a
    video is one run of tokens.

    What follows a video starts behind the largest of its positions, as Qwen2-VL's paper has it
    (section 2.1), and the weights were trained: transformers 5.2 and vLLM do so. transformers 5.23
    starts it where the height or width of the frames ends, which a long video has passed.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    text_types: ClassVar[tuple[str, ...]] = ("qwen2_vl_text",)
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (
        *Family.text_places,
        ("model.", "lm_head.weight"),  # before transformers 4.52
    )
    mrope_section: ClassVar[tuple[int, ...] | None] = (16, 24, 24)
    mrope_interleaved: ClassVar[bool] = False
    frames_apart: ClassVar[bool] = False

    def positions(self, token_ids: Tensor, modality: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rope positions int64 ``[3, T]`` of this turn alone, counted from 0.

        The videos' times, and where the text behind them starts, are set here: transformers before
        5.23 rounds the seconds first, and 5.23 starts the text too early.

        Raises:
            InputError: as for Qwen3-VL, or where there is not one number for each video.
        """
        made = super().positions(token_ids, modality, inputs)
        grid, videos = self._grid(inputs, VIDEO), (modality == VIDEO).nonzero()[:, 0]
        if grid is None or not len(videos):
            return made
        made = made.clone()
        steps = self._steps(inputs, len(grid))
        merged = self.config.vision_config.spatial_merge_size**2
        sizes = (grid.prod(-1) // merged).tolist()
        for tokens, patches, apart in zip(videos.split(sizes), grid[:, 0], steps, strict=True):
            times = (torch.arange(int(patches)) * apart).long()
            start = made[1, tokens[0]]  # the first row of a video stands where the video does
            made[0, tokens] = start + times.repeat_interleave(len(tokens) // len(times))
            behind = int(tokens[-1]) + 1
            if behind < made.shape[1]:
                made[:, behind:] += made[:, tokens].max() + 1 - made[1, behind]
        return made

    def _steps(self, inputs: Mapping[str, Any], videos: int) -> Tensor:
        """Return how far the positions of two temporal patches of each video lie apart."""
        return torch.ones(videos)


class Qwen25VLFamily(Qwen2VLFamily):
    """As Qwen2-VL, but the temporal positions of a video are its seconds."""

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    text_types: ClassVar[tuple[str, ...]] = ()

    def _steps(self, inputs: Mapping[str, Any], videos: int) -> Tensor:
        """Return the seconds between two temporal patches, 1 where none are given, in steps."""
        rate = self.config.vision_config.tokens_per_second
        if inputs.get(_SECONDS) is None:
            return torch.ones(videos) * rate
        seconds = required(inputs, _SECONDS).cpu()
        if seconds.shape != (videos,):
            raise InputError(
                f"{_SECONDS} has shape {list(seconds.shape)} for {videos} videos; pass the "
                "processor's output unchanged"
            )
        return seconds * rate

    def split(self, inputs: Mapping[str, Any], spans: Sequence[Tensor]) -> list[Mapping[str, Any]]:
        """Return per span of tokens the grids of its pictures and videos, and the videos' times."""
        parts = super().split(inputs, spans)
        if len(spans) == 1 or inputs.get(_SECONDS) is None:
            return parts
        seconds, timed, first = required(inputs, _SECONDS), [], 0
        for part in parts:
            after = first + len(part.get("video_grid_thw", ()))
            timed.append({**part, _SECONDS: seconds[first:after]})
            first = after
        return [*timed]
