"""Encode dialogues about scenes as model inputs: token ids, labels, patches of pictures.

:func:`build_tokenizer` makes the bundled model's tokenizer, in which every word of the drawn scenes
is one token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mmkv.training.data.scenes import COLOURS, SHAPES, Scene, SceneTurn, object_names, render

PATCH, MERGE, FPS = 16, 2, 2.0


def patches(picture: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut the patches that the checkpoint's image processor makes of a picture.

    Returns:
        float32 ``[patches, 3 * 2 * 16 * 16]`` in merge order, and the grid (t, h, w) in patches.
    """
    pixels = np.asarray(picture, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1.0
    height, width = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
    cut = pixels.reshape(3, height // MERGE, MERGE, PATCH, width // MERGE, MERGE, PATCH)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cut = np.repeat(cut, 2, axis=5)  # a still picture fills both temporal slots
    return cut.reshape(height * width, -1), (1, height, width)


@dataclass
class Encoded:
    """A dialogue as model inputs.

    Attributes:
        labels: the ids of answers, -100 elsewhere.
        pixels, grids: patches and (t, h, w) of its pictures; clips and clip_grids: of its videos.
    """

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    pixels: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    clips: list[np.ndarray] = field(default_factory=list)
    clip_grids: list[tuple[int, int, int]] = field(default_factory=list)


def encode(turns: list[SceneTurn], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Return token ids, labels, patches and grids of a dialogue."""
    start, end = (tokenizer.convert_tokens_to_ids(f"<|im_{x}|>") for x in ("start", "end"))
    names = ("vision_start", "image_pad", "video_pad", "vision_end")
    first, image, video, last = (tokenizer.convert_tokens_to_ids(f"<|{x}|>") for x in names)

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    newline = plain("\n")
    user, assistant = plain("user\n"), plain("assistant\n")
    made = Encoded()
    for turn in turns:
        prompt = [start, *user]
        for part in turn.parts():
            if isinstance(part, str):
                prompt += plain(part)
            elif isinstance(part, Scene):
                block, grid = patches(render(part))
                made.pixels.append(block)
                made.grids.append(grid)
                prompt += [first, *[image] * (grid[1] * grid[2] // MERGE**2), last]
            else:
                blocks = [patches(render(frame)) for frame in part.frames]
                _, height, width = blocks[0][1]
                made.clips += [block for block, _ in blocks]
                made.clip_grids.append((len(blocks), height, width))
                for index in range(len(blocks)):
                    prompt += plain(timestamp(index))
                    prompt += [first, *[video] * (height * width // MERGE**2), last]
        prompt += [end, *newline, start, *assistant]
        answer = [*plain(turn.question.answer), end]
        made.ids += [*prompt, *answer, *newline]
        made.labels += [*[-100] * len(prompt), *answer, *[-100] * len(newline)]
    return made


def timestamp(patch: int) -> str:
    """Return the text before a temporal patch: the mean time of its frames, two frames a second."""
    return f"<{(2 * patch + 0.5) / FPS:.1f} seconds>"


def collate(rows: list[Encoded], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Pad to the right and stack several dialogues."""
    longest = max(len(row.ids) for row in rows)
    pad = tokenizer.pad_token_id
    ids = torch.full((len(rows), longest), pad)
    labels = torch.full((len(rows), longest), -100)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
        labels[index, : len(row.labels)] = torch.tensor(row.labels)
    image, video = (tokenizer.convert_tokens_to_ids(f"<|{x}_pad|>") for x in ("image", "video"))
    made = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": (ids != pad).long(),
        "mm_token_type_ids": (ids == image).int() + 2 * (ids == video).int(),
    }
    for pixels, grids, blocks, sizes in (
        (
            "pixel_values",
            "image_grid_thw",
            [b for r in rows for b in r.pixels],
            [g for r in rows for g in r.grids],
        ),
        (
            "pixel_values_videos",
            "video_grid_thw",
            [b for r in rows for b in r.clips],
            [g for r in rows for g in r.clip_grids],
        ),
    ):
        if blocks:
            made[pixels] = torch.from_numpy(np.concatenate(blocks))
            made[grids] = torch.tensor(sizes)
    return made


SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_WORDS = (
    "system user assistant what is at in row column of the where which cell how many objects are "
    "there do you see a read word number this colour shape name every list all picture has was "
    "first second both yes no nothing and it an I tell me about image see things can one two "
    "three four five six seven eight nine ten please describe count answer question with not has "
    "What Where Which How Is Do Read Name List seconds on to or same different object letters "
    "ignore remember keep skip video frame start end changed change written were below above left "
    "right beside before after third fourth fifth sixth seventh eighth last next"
).split()

# Renders what the training data is written in; content parts as in the Qwen3-VL template, but for
# the start and end that it puts around a video, whose frames have their own.
CHAT_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|video_pad|>
{%- else -%}
{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: every word of the scenes is one token, anything else its
    bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = sorted(
        {*_WORDS, *COLOURS, *SHAPES, *(part for name in object_names() for part in name.split())}
    )
    vocabulary = [*alphabet, *words, *(f"Ġ{word}" for word in words), *(f"Ġ{d}" for d in range(10))]
    ids = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    # Without merges a word is either in the vocabulary as a whole or falls apart into bytes.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
