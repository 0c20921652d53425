"""Make dialogues about scenes as training and test examples for the bundled model's gates.

Questions name their cells (``search=False``), because the bundled model never learned to search all
cells. A question that the full cache cannot answer measures nothing about eviction.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmkv.training.data.dialogues import clip, dense, sparse, stream
from mmkv.training.data.scene_encoding import collate, encode
from mmkv.training.data.scenes import Split, Turn

_SPARSE_PICTURES = (16, 24, 32)
_MOST_PICTURES = (160, 192, 256)
_STREAM_CLIPS = (8, 16, 32)


def _dense(seed: int, split: Split) -> list[Turn]:
    rng = random.Random(f"size-{seed}")
    pictures = rng.randint(4, 8)
    return dense(seed, split, pictures, rng.randint(pictures, 12), search=False)


def _sparse(seed: int, split: Split) -> list[Turn]:
    rng = random.Random(f"size-{seed}")
    return sparse(seed, split, rng.choice(_SPARSE_PICTURES), rng.randint(1, 2), 8, search=False)


def _distractors_96(seed: int, split: Split) -> list[Turn]:
    # Three times as many pictures as any training dialogue: attention has much to be diluted by.
    return sparse(seed, split, 96, 2, 8, search=False)


def _distractors_256(seed: int, split: Split) -> list[Turn]:
    return sparse(
        seed, split, random.Random(f"size-{seed}").choice(_MOST_PICTURES), 2, 16, search=False
    )


def _pictures_40(seed: int, split: Split) -> list[Turn]:
    pictures = random.Random(f"size-{seed}").randint(30, 40)
    return dense(seed, split, pictures, 2 * pictures, search=False)


def _clip(seed: int, split: Split) -> list[Turn]:
    return clip(seed, split, 6)


def _stream(seed: int, split: Split) -> list[Turn]:
    return stream(seed, split, random.Random(f"size-{seed}").choice(_STREAM_CLIPS))


KINDS: dict[str, Callable[[int, Split], list[Turn]]] = {
    "dense": _dense,
    "sparse": _sparse,
    "clip": _clip,
    "stream": _stream,
    "40-pictures": _pictures_40,
    "96-distractors": _distractors_96,
    "256-distractors": _distractors_256,
}


def scene_turns(kind: str, seed: int, split: Split) -> list[Turn]:
    """Make the dialogue ``seed`` of a kind.

    Raises:
        ValueError: for an unknown kind, naming those there are.
    """
    if kind not in KINDS:
        raise ValueError(f"no scenes of kind {kind!r}; choose one of {', '.join(KINDS)}")
    return KINDS[kind](seed, split)


def scene_example(turns: list[Turn], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Return what the processor returns for the dialogue (one row), and ``labels [1, t]``."""
    made = collate([encode(turns, tokenizer)], tokenizer)
    return {name: tensor for name, tensor in made.items() if name != "attention_mask"}
