"""Qwen2.5-VL: pictures and videos of any size, M-RoPE in sections, videos placed by seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmkv.engine.errors import InputError
from mmkv.engine.model.families.base import Family, required
from mmkv.engine.model.families.features import VIDEO
from mmkv.engine.model.families.qwen3_vl import Qwen3VLFamily

_SECONDS = "second_per_grid_ts"


class Qwen25VLFamily(Qwen3VLFamily):
    """As Qwen3-VL, but for three things.

    The frequencies of M-RoPE lie in sections, there is no deepstack, and a video is one run of
    tokens, whose temporal positions are its seconds.

    What follows a video starts behind the largest of its positions, as Qwen2-VL's paper has it
    (section 2.1), and the weights were trained: transformers 5.2 and vLLM do so. transformers 5.23
    starts it where the height or width of the frames ends, which the seconds of a long video have
    passed.
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
        seconds = self._seconds(inputs, len(grid)) * self.config.vision_config.tokens_per_second
        merged = self.config.vision_config.spatial_merge_size**2
        sizes = (grid.prod(-1) // merged).tolist()
        for tokens, patches, apart in zip(videos.split(sizes), grid[:, 0], seconds, strict=True):
            times = (torch.arange(int(patches)) * apart).long()
            start = made[1, tokens[0]]  # the first row of a video stands where the video does
            made[0, tokens] = start + times.repeat_interleave(len(tokens) // len(times))
            behind = int(tokens[-1]) + 1
            if behind < made.shape[1]:
                made[:, behind:] += made[:, tokens].max() + 1 - made[1, behind]
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
