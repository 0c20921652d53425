"""Qwen3-VL, dense and with experts: pictures and videos of any size, M-RoPE positions (t, h, w),
deepstack features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Family, floats, required
from mmkv.engine.model.families.features import IMAGE, VIDEO, Features, rows_of

_GRID_KEY = {IMAGE: "image_grid_thw", VIDEO: "video_grid_thw"}


class Qwen3VLFamily(Family):
    """The vision side and the rope index are transformers' own; positions are then offset.

    Shifting all three axes alike leaves the relative positions of M-RoPE unchanged, so a turn
    indexed from 0 and shifted equals the same turn indexed inside the whole conversation. The
    model's own ``rope_deltas`` (one for the whole process) is never read.

    Attributes:
        frames_apart: text stands between the frames of a video.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl", "qwen3_vl_moe")
    pixel_keys: ClassVar[dict[int, str]] = {IMAGE: "pixel_values", VIDEO: "pixel_values_videos"}
    rope_axes: ClassVar[int] = 3
    mrope_section: ClassVar[tuple[int, ...] | None] = (24, 20, 20)
    frames_apart: ClassVar[bool] = True

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
        reader = "get_image_features" if kind == IMAGE else "get_video_features"
        arguments = {key: pixels.to(device), _GRID_KEY[kind]: grid.to(device)}
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
