"""M-RoPE positions of Qwen2.5-VL by the paper's rule, where transformers 5.23 has another one."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
from torch import Tensor


def with_positions_of_the_paper(model: Any) -> Any:
    """Return the transformers model: what follows a video begins behind its largest position.

    Qwen2-VL's paper, section 2.1; transformers 5.2 and vLLM. Other families stay as they are.
    """
    if model.config.model_type != "qwen2_5_vl":
        return model
    vision = model.config.vision_config
    merge, rate = vision.spatial_merge_size, vision.tokens_per_second

    def get_rope_index(
        input_ids: Tensor,
        mm_token_type_ids: Tensor,
        image_grid_thw: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Any = None,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        pictures = iter([] if image_grid_thw is None else image_grid_thw.tolist())
        videos = iter([] if video_grid_thw is None else video_grid_thw.tolist())
        seconds = iter([] if second_per_grid_ts is None else [float(s) for s in second_per_grid_ts])
        made = torch.ones(3, *input_ids.shape, dtype=torch.long)
        deltas = []
        for row, kinds in enumerate(mm_token_type_ids.tolist()):
            there = [True] * len(kinds) if attention_mask is None else attention_mask[row].bool()
            shown = [kind for kind, one in zip(kinds, there, strict=True) if one]
            after, columns = 0, []
            for kind, group in groupby(shown):
                if kind == 0:
                    columns += [(after + i,) * 3 for i, _ in enumerate(group)]
                else:
                    time, height, width = next(pictures if kind == 1 else videos)
                    apart = rate * next(seconds, 1.0) if kind == 2 else 0
                    columns += [
                        (after + int(t * apart), after + h, after + w)
                        for t in range(time)
                        for h in range(height // merge)
                        for w in range(width // merge)
                    ]
                after = max(max(column) for column in columns) + 1
            made[:, row, torch.as_tensor(there).bool()] = torch.tensor(columns).T
            deltas.append([after - len(kinds)])
        return made, torch.tensor(deltas)

    model.model.get_rope_index = get_rope_index
    return model
