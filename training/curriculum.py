"""The bundled model's curriculum: batches of dialogues, from easy to hard."""

from __future__ import annotations

import random
from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerFast

from mmkv.training.data.dialogues import clip, dense, grid, sparse, stream
from mmkv.training.data.scene_encoding import collate, encode
from mmkv.training.data.scenes import Turn, dialogue, make_scene, questions

# (largest grid side, share of the run) from easy to hard: straight on 4 x 4 grids nothing is
# learned for a long time.
CURRICULUM = ((1, 0.06), (2, 0.12), (3, 0.17), (4, 0.65))


def largest_grid(progress: float) -> int:
    """Return largest grid side at ``progress`` (0 .. 1) of the run."""
    passed = 0.0
    for side, share in CURRICULUM:
        passed += share
        if progress < passed:
            return side
    return CURRICULUM[-1][0]


def lesson(seed: int, pictures: int, side: int) -> list[Turn]:
    """Return a training dialogue.

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


def _round(lessons: str) -> tuple[tuple[str, int], ...]:
    """Parse ``KIND:DIALOGUES ...`` into pairs."""
    pairs = (lesson.split(":") for lesson in lessons.split())
    return tuple((kind, int(dialogues)) for kind, dialogues in pairs)


# The lessons that the batches of a round take in turn, as KIND:DIALOGUES of a batch (fewer of long
# ones). "curriculum" is the first round; the others continue from a model that reads full grids.
ROUNDS: dict[str, tuple[tuple[str, int], ...]] = {
    "curriculum": (),
    "dialogues": _round(
        "single:16 dense:8 drill:16 long:5 single:16 sparse:5 single:16 clip:12 single:16 long:5"
    ),
    "far": _round(
        "pictures:1 single:16 distractors:1 stream:1 pictures:1 long:5 "
        "pictures:1 sparse:5 stream:1 pictures:1 clip:12 dense:8"
    ),
    "mixed": _round(
        "single:16 pictures:1 single:16 long:5 stream:1 single:16 "
        "distractors:1 single:16 sparse:5 pictures:1 clip:12 dense:8"
    ),
}


# The seed of a dialogue holds the name that its kind had when the bundled model was trained. A new
# word would draw other dialogues.
_SEED_WORDS = {"distractors": "crowd", "pictures": "gallery"}


def long_lesson(kind: str, seed: int) -> list[Turn]:
    """Draw a training dialogue of the later rounds (:mod:`mmkv.training.data.dialogues`).

    Three kinds are 0.7k to 4k tokens long: *distractors* has up to 256 pictures, few of which
    matter; *pictures* has up to 40, which all matter; *stream* has up to 48 clips.
    """
    rng = random.Random(f"{_SEED_WORDS.get(kind, kind)}-{seed}")
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
    if kind == "distractors":
        pictures = rng.choice([48, 96, 144, 192, 256])
        return sparse(seed, "train", pictures, rng.randint(2, 8), 16, rng.randint(1, 6), False)
    if kind == "pictures":
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
        start: first step, so that a resumed run continues where it stopped.
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
        """Return the batch of one step, right-padded."""
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
