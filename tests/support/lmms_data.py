"""Scenes written in the data formats of lmms-eval's shipped tasks."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import av
import numpy as np
from datasets import Dataset, Image
from PIL import Image as pil

from mmkv.resources import bundled_dialogues
from mmkv.training.data.dialogues import clip
from mmkv.training.data.scenes import Question, Scene, make_scene, object_names, questions, render

LETTERS = "ABCD"
WORD = "\nAnswer the question using a single word or phrase."  # GQA's and TextVQA's last words


def write_all(folder: Path, count: int, reply: Callable[[pil.Image, str], str]) -> None:
    """Local data of nine shipped tasks, ``count`` documents each (two videos), and our MMDU set.

    The bundled model cannot answer in the form that these prompts want, and scores of nothing but
    0 compare badly. So every second document of GQA and TextVQA wants what ``reply`` says to the
    picture and prompt, and of MMStar, Video-MME and VideoMathQA an answer without a letter.
    """
    _mmstar(folder / "mmstar", count)
    _mme(folder / "mme", count // 2)
    _mmmu_pro(folder / "mmmu_pro", count)
    _gqa(folder / "gqa", count, reply)
    _textvqa(folder / "textvqa", count, reply)
    _mathvision(folder / "mathvision", 4)
    for name in ("videomme", "video_mmmu", "videomathqa"):
        _films(folder / name / "data", name == "video_mmmu")
    _videomme(folder / "videomme")
    _video_mmmu(folder / "video_mmmu")
    _videomathqa(folder / "videomathqa")
    shutil.copytree(bundled_dialogues(), folder / "mmdu")


def asked(name: str, kinds: tuple[str, ...]) -> Iterator[tuple[Scene, Question]]:
    """Yield held-out grids of at least 2 x 2 cells, each with a question of one of the kinds.

    Smaller pictures would be enlarged: lmms-eval's models see at least four visual tokens.
    """
    rng = random.Random(name)
    while True:
        scene = make_scene(rng, "heldout")
        found = [q for q in questions(scene, rng) if q.kind in kinds]
        if scene.kind == "grid" and min(scene.rows, scene.columns) > 1 and found:
            yield scene, found[0]


def _mmstar(folder: Path, count: int) -> None:
    source, rows = asked("mmstar", ("cell",)), []
    for index in range(count):
        scene, question = next(source)
        options, letter = _choices(question.answer, index)
        listed = ", ".join(f"{mark}: {name}" for mark, name in zip(LETTERS, options, strict=True))
        rows.append(
            {
                "index": index,
                "question": f"{question.text}\nOptions: {listed}",
                "image": render(scene),
                "answer": letter if index % 4 < 2 else "",
                "category": ("math", "coarse perception")[index % 2],
                "l2_category": ("geometry", "image emotion")[index % 2],
            }
        )
    _parquet(folder / "mmstar.parquet", rows)


def _mme(folder: Path, pairs: int) -> None:
    source, rows = asked("mme", ("cell",)), []
    for index in range(pairs):
        scene, _ = next(source)
        inside = scene.items[0].name if scene.items else object_names()[0]
        outside = next(n for n in object_names() if n not in {i.name for i in scene.items})
        for name, answer in ((inside, "Yes" if scene.items else "No"), (outside, "No")):
            rows.append(
                {
                    "question_id": f"existence/{index:03}.jpg",
                    "image": render(scene),
                    "question": f"is there a {name}? Please answer yes or no.",
                    "answer": answer,
                    "category": "existence",
                }
            )
    _parquet(folder / "data" / "test-00000-of-00001.parquet", rows)


def _mmmu_pro(folder: Path, count: int) -> None:
    source, rows = asked("mmmu", ("cell",)), []
    for index in range(count):
        scene, question = next(source)
        options, letter = _choices(question.answer, index)
        rows.append(
            {
                "id": f"test_Art_{index}",
                "image": render(scene),
                "options": repr(options),
                "answer": letter,
                "subject": ("Art", "Physics")[index % 2],
            }
        )
    _parquet(folder / "vision" / "test-00000-of-00001.parquet", rows)


def _gqa(folder: Path, count: int, reply: Callable[[pil.Image, str], str]) -> None:
    source, asked_of, shown = asked("gqa", ("locate",)), [], []
    for index in range(count):
        scene, question = next(source)
        answer = reply(render(scene), question.text + WORD) if index % 2 else question.answer
        asked_of.append(
            {"id": f"q{index}", "imageId": f"n{index}", "question": question.text, "answer": answer}
        )
        shown.append({"id": f"n{index}", "image": render(scene)})
    _parquet(folder / "testdev_balanced_instructions" / "testdev-0.parquet", asked_of)
    _parquet(folder / "testdev_balanced_images" / "testdev-0.parquet", shown)


def _textvqa(folder: Path, count: int, reply: Callable[[pil.Image, str], str]) -> None:
    source, rows = asked("textvqa", ("cell",)), []
    for index in range(count):
        scene, question = next(source)
        text = question.text.capitalize()
        answer = reply(render(scene), text + WORD) if index % 2 else "something else"
        rows.append(
            {
                "question_id": index,
                "question": question.text,
                "image": render(scene),
                "ocr_tokens": ["a"],
                "answers": [answer] * 10,
            }
        )
    _parquet(folder / "data" / "validation-00000-of-00001.parquet", rows)


def _mathvision(folder: Path, count: int) -> None:
    source, rows = asked("mathvision", ("count",)), []
    for index in range(count):
        scene, question = next(source)
        rows.append(
            {
                "id": str(index),
                "question": question.text,
                "options": ["3", question.answer] if index % 2 else [],
                "decoded_image": render(scene),
                "answer": "B" if index % 2 else question.answer,
                "subject": "counting",
                "level": 1,
            }
        )
    _parquet(folder / "data" / "testmini-00000-of-00001.parquet", rows)


def _films(folder: Path, by_subject: bool) -> None:
    """Two videos: v0.mp4, v1.mp4, or as Video-MMMU names them, with the subject."""
    for index in range(2):
        turn = clip(index, "heldout")[0]
        frames = [render(frame) for frame in turn.pictures[0].frames]  # type: ignore[union-attr]
        name = f"Art/validation_Art_{index}" if by_subject else f"v{index}"
        write_video(folder / f"{name}.mp4", frames)


def _videomme(folder: Path) -> None:
    rows = []
    for index in range(2):
        question = clip(index, "heldout")[0].question
        options, letter = _choices(question.answer, index)
        rows.append(
            {
                "video_id": f"{index:03}",
                "duration": "short",
                "domain": "Knowledge",
                "sub_category": "Geography",
                "videoID": f"v{index}",
                "question_id": f"{index:03}-1",
                "task_type": "Object Recognition",
                "question": question.text,
                "options": [f"{a}. {b}" for a, b in zip(LETTERS, options, strict=True)],
                "answer": letter if index % 2 else "",
            }
        )
    _parquet(folder / "videomme" / "test-00000-of-00001.parquet", rows)


def _video_mmmu(folder: Path) -> None:
    for kind in ("Adaptation", "Comprehension"):
        question = clip(1, "heldout")[0].question
        options, letter = _choices(question.answer, 1)
        row = {
            "id": "validation_Art_1",
            "question": question.text,
            "options": options,
            "answer": letter,
            "question_type": "multiple-choice",
        }
        # One only: the task lets replies go on for 1,024 tokens.
        _parquet(folder / kind / "test-00000-of-00001.parquet", [row])


def _videomathqa(folder: Path) -> None:
    rows = []
    for index in range(2):
        question = clip(index, "heldout")[0].question
        options, letter = _choices(question.answer, index)
        rows.append(
            {
                "question_id": str(index),
                "videoID": f"v{index}",
                "question": question.text,
                "options": [f"({a}) {b}" for a, b in zip(LETTERS, options, strict=True)],
                "answer": letter if index % 2 else "",
                "category": "Counting",
                "length": "short",
            }
        )
    _parquet(folder / "mcq" / "test-00000-of-00001.parquet", rows)


def _choices(answer: str, index: int) -> tuple[list[str], str]:
    """Return four options with the answer among them, and its letter."""
    others = [n for n in object_names() if n != answer][index * 3 : index * 3 + 3]
    place = index % 4
    return [*others[:place], answer, *others[place:]], LETTERS[place]


def _parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Dataset.from_list(rows)
    for name in {"image", "decoded_image"} & set(rows[0]):
        made = made.cast_column(name, Image())
    made.to_parquet(path)


def write_video(path: Path, frames: list[pil.Image], hold: int = 4) -> None:
    """An MP4 file in which every picture stands for ``hold`` frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("mpeg4", rate=4)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        for picture in frames:
            for _ in range(hold):
                frame = av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")
                file.mux(stream.encode(frame))
        file.mux(stream.encode())
