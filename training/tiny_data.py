"""Batches for the bundled model: dialogues as token ids, pictures as patches."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from eval.scenes import Turn, dialogue, make_scene, questions, render

PATCH, MERGE = 16, 2
# (largest grid side, share of the run) from easy to hard: straight on 4 x 4 grids nothing is
# learned for a long time.
CURRICULUM = ((1, 0.06), (2, 0.12), (3, 0.17), (4, 0.65))


def patches(picture: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """What the checkpoint's image processor makes of a picture whose sides are multiples of 32.

    Returns:
        float32 ``[patches, 3 * 2 * 16 * 16]`` in merge order, and the grid (t, h, w) in patches.
    """
    pixels = np.asarray(picture, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1.0
    height, width = pixels.shape[1] // PATCH, pixels.shape[2] // PATCH
    cut = pixels.reshape(3, height // MERGE, MERGE, PATCH, width // MERGE, MERGE, PATCH)
    cut = cut.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
    cut = np.repeat(cut, 2, axis=5)  # a still picture fills both temporal slots
    return cut.reshape(height * width, -1), (1, height, width)


def encode(
    turns: list[Turn], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int], list[np.ndarray], list[tuple[int, int, int]]]:
    """Token ids, labels (-100 outside answers), patches and grids of a dialogue."""
    start, end = (tokenizer.convert_tokens_to_ids(f"<|im_{x}|>") for x in ("start", "end"))
    vision = [
        tokenizer.convert_tokens_to_ids(f"<|{x}|>")
        for x in ("vision_start", "image_pad", "vision_end")
    ]

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    newline = plain("\n")
    user, assistant = plain("user\n"), plain("assistant\n")
    ids: list[int] = []
    labels: list[int] = []
    pixels: list[np.ndarray] = []
    grids: list[tuple[int, int, int]] = []
    for turn in turns:
        prompt = [start, *user]
        for scene in turn.pictures:
            block, grid = patches(render(scene))
            pixels.append(block)
            grids.append(grid)
            prompt += [vision[0], *[vision[1]] * (grid[1] * grid[2] // MERGE**2), vision[2]]
        prompt += [*plain(turn.question.text), end, *newline, start, *assistant]
        answer = [*plain(turn.question.answer), end]
        ids += [*prompt, *answer, *newline]
        labels += [*[-100] * len(prompt), *answer, *[-100] * len(newline)]
    return ids, labels, pixels, grids


def largest_grid(progress: float) -> int:
    """Largest grid side at ``progress`` (0 .. 1) of the run."""
    passed = 0.0
    for side, share in CURRICULUM:
        passed += share
        if progress < passed:
            return side
    return CURRICULUM[-1][0]


def lesson(seed: int, pictures: int, side: int) -> list[Turn]:
    """A training dialogue.

    On the small grids of the curriculum, naming every cell comes first: that answer alone holds
    a target per cell, and without it the same run learns nothing for hundreds of steps. On full
    grids it mostly stays away, for a list in the text is easier to read than the picture: a
    model that always has one never learns to answer from the picture.
    """
    rng = random.Random(seed)
    if pictures > 1:
        return dialogue(seed, "train", pictures, 2 * pictures, side)
    scene = make_scene(rng, "train", side)
    asked = questions(scene, rng)
    named = [q for q in asked if q.kind == "list"]
    others = [q for q in asked if q.kind != "list"]
    if side < CURRICULUM[-1][0] or (named and rng.random() < 0.15):
        asked = [*named, *others[:3]]
    elif named:
        more = [q for q in questions(scene, rng) + questions(scene, rng) if q.kind != "list"]
        asked = (others + more)[:7]
        rng.shuffle(asked)
    return [Turn((scene,) if i == 0 else (), question) for i, question in enumerate(asked)]


class DialogueBatches(IterableDataset[dict[str, Tensor]]):
    """Whole batches of training dialogues, a function of (seed, step) alone.

    Args:
        start: first step, so that a resumed run goes on where it stopped.
        curriculum: begin with small grids; without it every step is of the last phase.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        steps: int,
        batch: int,
        seed: int = 0,
        start: int = 0,
        curriculum: bool = True,
    ) -> None:
        self.tokenizer, self.steps, self.batch = tokenizer, steps, batch
        self.seed, self.start, self.curriculum = seed, start, curriculum

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.start, self.steps):
            yield self.make(step)

    def make(self, step: int) -> dict[str, Tensor]:
        """The batch of one step, right-padded."""
        side = largest_grid(step / self.steps if self.curriculum else 1.0)
        # One count of pictures a batch, so that little of it is padding.
        pictures = (1, 1, 1, 2, 1, 1, 3)[step % 7] if side == CURRICULUM[-1][0] else 1
        encoded = []
        for index in range(self.batch):
            seed = (self.seed * self.steps + step) * self.batch + index
            turns = lesson(seed, pictures, side)
            encoded.append(encode(turns, self.tokenizer))
        longest = max(len(ids) for ids, *_ in encoded)
        pad, image = self.tokenizer.pad_token_id, "<|image_pad|>"
        ids = torch.full((self.batch, longest), pad)
        labels = torch.full((self.batch, longest), -100)
        for row, (tokens, targets, _, _) in enumerate(encoded):
            ids[row, : len(tokens)] = torch.tensor(tokens)
            labels[row, : len(targets)] = torch.tensor(targets)
        return {
            "input_ids": ids,
            "labels": labels,
            "attention_mask": (ids != pad).long(),
            "mm_token_type_ids": (ids == self.tokenizer.convert_tokens_to_ids(image)).int(),
            "pixel_values": torch.from_numpy(
                np.concatenate([block for *_, blocks, _ in encoded for block in blocks])
            ),
            "image_grid_thw": torch.tensor([grid for *_, grids in encoded for grid in grids]),
        }
