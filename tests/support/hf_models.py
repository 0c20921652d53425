"""Small checkpoints as transformers models, and prompts for them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.support.factories import CHECKPOINTS, Piece, checkpoint, make_turn
from tests.support.model_configs import config_of
from tests.support.mrope import with_positions_of_the_paper

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
