"""Models of transformers for tests, and multimodal positions in the words of Qwen2-VL's paper."""

from __future__ import annotations

import functools
from itertools import groupby
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.factories import CHECKPOINTS, Piece, checkpoint, make_turn
from tests.support.model_configs import config_of


def with_positions_of_the_paper(model: Any) -> Any:
    """Return the transformers model: what follows a video begins behind its largest position.

    Qwen2-VL's paper, section 2.1; transformers 5.2 and vLLM. Other families stay as they are.
    """
    if model.config.model_type not in ("qwen2_vl", "qwen2_5_vl"):
        return model
    vision = model.config.vision_config
    merge, rate = vision.spatial_merge_size, getattr(vision, "tokens_per_second", 1)

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


# Small checkpoints as transformers models, and prompts for them.


TOKENS = 12


@functools.cache
def model_of(name: str) -> Any:
    sees = hasattr(config_of(CHECKPOINTS[name]), "vision_config")
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
    return with_positions_of_the_paper(model)


def prompts_of(name: str) -> list[dict[str, Tensor]]:
    """Return four prompts of different lengths, with 2, 0, 1 and 3 pictures where it sees."""
    pieces: list[list[Piece]] = [
        [3, ("image", 32, 32), 4, ("image", 16, 32), 2],
        [17],
        [5, ("image", 16, 48), 3],
        [1, ("image", 16, 16), 2, ("image", 32, 16), 1, ("image", 16, 16), 4],
    ]
    if not model_of(name).config.to_dict().get("vision_config"):
        pieces = [[40], [7], [23], [31]]
    return [make_turn(name, row, seed=i) for i, row in enumerate(pieces)]


def greedy(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**inputs, **({"max_new_tokens": TOKENS, "do_sample": False} | options))


def registered() -> list[dict[str, Any]]:
    """Return transformers' tables of attention and mask functions."""
    tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    return [{key: table[key] for key in table.valid_keys()} for table in tables]
