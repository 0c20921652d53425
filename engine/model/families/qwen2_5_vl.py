"""Qwen2.5-VL: pictures and videos of any size, M-RoPE in sections, videos placed by seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from engine.errors import InputError
from engine.model.families.base import Family, required
from engine.model.families.features import VIDEO
from engine.model.families.qwen3_vl import Qwen3VLFamily

_SECONDS = "second_per_grid_ts"


class Qwen25VLFamily(Qwen3VLFamily):
    """As Qwen3-VL, but for three things.

    The frequencies of M-RoPE lie in sections, there is no deepstack, and a video is one run of
    tokens, whose temporal positions are its seconds.

    The text behind a long video starts, as in transformers, at the position that the picture's
    height or width leads to, which the video's seconds may have passed. The next turn starts behind
    all positions used, as the reply does; only where seconds pass the text behind them is this not
    where transformers would put it, had it read the whole conversation at once.
    """

    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    text_places: ClassVar[tuple[tuple[str, str], ...]] = (
        *Family.text_places,
        ("model.", "lm_head.weight"),  # before transformers 4.52
    )
    mrope_section: ClassVar[tuple[int, ...] | None] = (16, 24, 24)
    mrope_interleaved: ClassVar[bool] = False
    frames_apart: ClassVar[bool] = False

    def positions(self, token_ids: Tensor, modality: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        """Return the rope positions int64 ``[3, T]`` of this turn alone, counted from 0.

        The videos' times are set here: transformers before 5.23 rounds the seconds first.

        Raises:
            InputError: as for Qwen3-VL, or where there is not one number for each video.
        """
        made = super().positions(token_ids, modality, inputs)
        grid, videos = self._grid(inputs, VIDEO), (modality == VIDEO).nonzero()[:, 0]
        if grid is None or not len(videos):
            return made
        seconds = self._seconds(inputs, len(grid)) * self.config.vision_config.tokens_per_second
        merged = self.config.vision_config.spatial_merge_size**2
        sizes = (grid.prod(-1) // merged).tolist()
        for tokens, patches, apart in zip(videos.split(sizes), grid[:, 0], seconds, strict=True):
            times = (torch.arange(int(patches)) * apart).long()
            start = made[1, tokens[0]]  # the first row of a video stands where the video does
            made[0, tokens] = start + times.repeat_interleave(len(tokens) // len(times))
        return made

    def _seconds(self, inputs: Mapping[str, Any], videos: int) -> Tensor:
        """Return the seconds between two temporal patches of each video; 1 where none are given."""
        if inputs.get(_SECONDS) is None:
            return torch.ones(videos)
        seconds = required(inputs, _SECONDS).cpu()
        if seconds.shape != (videos,):
            raise InputError(
                f"{_SECONDS} has shape {list(seconds.shape)} for {videos} videos; pass the "
                "processor's output unchanged"
            )
        return seconds

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
