"""Batches for the bundled model: dialogues as token ids, pictures as patches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from eval.dialogues import clip, dense, grid, sparse, stream
from eval.scenes import Scene, Turn, dialogue, make_scene, questions, render

PATCH, MERGE, FPS = 16, 2, 2.0
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


@dataclass
class Encoded:
    """A dialogue as the model reads it.

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


def encode(turns: list[Turn], tokenizer: PreTrainedTokenizerFast) -> Encoded:
    """Token ids, labels, patches and grids of a dialogue."""
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
    """What stands before a temporal patch: the mean time of its two frames, two frames a second."""
    return f"<{(2 * patch + 0.5) / FPS:.1f} seconds>"


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
        pool = [q for _ in range(5) for q in questions(scene, rng) if q.kind != "list"]
        asked = rng.choices(pool, k=7)
    return [Turn((scene,) if i == 0 else (), question) for i, question in enumerate(asked)]


# The lessons that a round's batches take turns with: what, and dialogues a batch (fewer of long
# ones). "curriculum" is the first round; the others go on from a model that sees full grids.
ROUNDS: dict[str, tuple[tuple[str, int], ...]] = {
    "curriculum": (),
    "dialogues": (
        ("single", 16), ("dense", 8), ("drill", 16), ("long", 5), ("single", 16), ("sparse", 5),
        ("single", 16), ("clip", 12), ("single", 16), ("long", 5),
    ),
    "far": (
        ("gallery", 1), ("single", 16), ("crowd", 1), ("stream", 1), ("gallery", 1), ("long", 5),
        ("gallery", 1), ("sparse", 5), ("stream", 1), ("gallery", 1), ("clip", 12), ("dense", 8),
    ),
    "mixed": (
        ("single", 16), ("gallery", 1), ("single", 16), ("long", 5), ("stream", 1), ("single", 16),
        ("crowd", 1), ("single", 16), ("sparse", 5), ("gallery", 1), ("clip", 12), ("dense", 8),
    ),
}  # fmt: skip


def long_lesson(kind: str, seed: int) -> list[Turn]:
    """A training dialogue of the later rounds: see :mod:`eval.dialogues`.

    Three are 0.7k to 4k tokens long: *crowd* has up to 256 pictures, few of which matter,
    *gallery* up to 40 that all do, *stream* up to 48 clips.
    """
    rng = random.Random(f"{kind}-{seed}")
    if kind == "single":
        return lesson(seed, 1, 4)
    if kind == "drill":
        return drill(rng)
    if kind == "dense":
        pictures = rng.randint(2, 4)
        return dense(seed, "train", pictures, rng.randint(pictures, 8))
    if kind == "long":
        return dense(seed, "train", rng.randint(5, 8), 12)
    if kind == "sparse":
        pictures = rng.choice([12, 16, 24, 32])
        return sparse(seed, "train", pictures, rng.randint(1, 4), 8, rng.randint(1, 4))
    if kind == "crowd":
        pictures = rng.choice([48, 96, 144, 192, 256])
        return sparse(seed, "train", pictures, rng.randint(2, 8), 16, rng.randint(1, 6), False)
    if kind == "gallery":
        pictures = rng.randint(12, 40)
        return dense(seed, "train", pictures, 2 * pictures, search=False)
    if kind == "stream":
        return stream(seed, "train", rng.choice([12, 24, 48]))
    return clip(seed, "train", 6)


def drill(rng: random.Random) -> list[Turn]:
    """Search questions only, on grids of all sizes: finding a name is what comes last."""
    scene = grid(rng, "train", rng.choice([2, 3, 4, 4]))
    pool = [q for _ in range(8) for q in questions(scene, rng) if q.kind in ("exists", "locate")]
    asked = pool[:8]
    return [Turn((scene,) if i == 0 else (), question) for i, question in enumerate(asked)]


class DialogueBatches(IterableDataset[dict[str, Tensor]]):
    """Whole batches of training dialogues, a function of (seed, step) alone.

    Args:
        start: first step, so that a resumed run goes on where it stopped.
        lessons: one of :data:`ROUNDS`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        steps: int,
        batch: int,
        seed: int = 0,
        start: int = 0,
        lessons: str = "curriculum",
    ) -> None:
        self.tokenizer, self.steps, self.batch = tokenizer, steps, batch
        self.seed, self.start, self.round = seed, start, ROUNDS[lessons]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(self.start, self.steps):
            yield self.make(step)

    def make(self, step: int) -> dict[str, Tensor]:
        """The batch of one step, right-padded."""
        if not self.round:
            side = largest_grid(step / self.steps)
            # One count of pictures a batch, so that little of it is padding.
            pictures = (1, 1, 1, 2, 1, 1, 3)[step % 7] if side == CURRICULUM[-1][0] else 1
            dialogues = [lesson(seed, pictures, side) for seed in self._seeds(step, self.batch)]
        else:
            kind, rows = self.round[step % len(self.round)]
            rows = max(1, rows * self.batch // 16)
            dialogues = [long_lesson(kind, seed) for seed in self._seeds(step, rows)]
        return collate([encode(turns, self.tokenizer) for turns in dialogues], self.tokenizer)

    def _seeds(self, step: int, rows: int) -> range:
        first = (self.seed * self.steps + step) * self.batch
        return range(first, first + rows)


def collate(rows: list[Encoded], tokenizer: PreTrainedTokenizerFast) -> dict[str, Tensor]:
    """Right-padded model inputs of several dialogues."""
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
        ("pixel_values", "image_grid_thw", [b for r in rows for b in r.pixels],
         [g for r in rows for g in r.grids]),
        ("pixel_values_videos", "video_grid_thw", [b for r in rows for b in r.clips],
         [g for r in rows for g in r.clip_grids]),
    ):  # fmt: skip
        if blocks:
            made[pixels] = torch.from_numpy(np.concatenate(blocks))
            made[grids] = torch.tensor(sizes)
    return made
