"""Scenes against their pixels, and the bundled model's own files."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mmkv.prompt.loading import load_processor
from mmkv.prompt.video import Clip
from mmkv.resources import bundled_model
from mmkv.training.data.dialogues import clip, sparse
from mmkv.training.data.scene_encoding import build_tokenizer, encode, patches
from mmkv.training.data.scenes import (
    CELL,
    COLOURS,
    EMPTY,
    SHAPES,
    Scene,
    dialogue,
    make_scene,
    object_names,
    questions,
    render,
    tile,
)
from mmkv.training.pretrain_tiny import IMAGE_PROCESSOR, ROUNDS, DialogueBatches, build_model, save


def read_cells(picture: Image.Image) -> list[list[str]]:
    """Name every cell by its pixels alone: the reader that questions are checked against."""
    known = {}
    for name in object_names():
        cell = Image.new("RGB", (CELL, CELL), "white")
        cell.paste(tile(name), (0, 0), tile(name))
        known[cell.tobytes()] = name
    known[Image.new("RGB", (CELL, CELL), "white").tobytes()] = EMPTY
    assert len(known) == len(object_names()) + 1, "two objects look the same"
    return [
        [
            known[picture.crop((x, y, x + CELL, y + CELL)).tobytes()]
            for x in range(0, picture.width, CELL)
        ]
        for y in range(0, picture.height, CELL)
    ]


def answer_from_pixels(cells: list[list[str]], kind: str, text: str) -> str:
    """Return the right answer, worked out from what the pixels show."""
    flat = [name for row in cells for name in row]
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    named = [name for name in object_names() if re.search(rf"\b{name}\b", text)]
    if kind in ("cell", "colour"):
        name = cells[numbers[0] - 1][numbers[1] - 1]
        return name if kind == "cell" else name.split()[0]
    if kind == "list":
        return "; ".join(", ".join(row) for row in cells)
    if kind == "count":
        return str(sum(name != EMPTY for name in flat))
    if kind == "exists":
        return "yes" if max(named, key=len) in flat else "no"
    assert kind == "locate"
    index = flat.index(max(named, key=len))
    return f"row {index // len(cells[0]) + 1}, column {index % len(cells[0]) + 1}"


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_match_the_pixels(split) -> None:
    rng = random.Random(split)
    kinds: set[str] = set()
    for _ in range(150):
        scene = make_scene(rng, split)
        if scene.kind != "grid":
            continue
        cells = read_cells(render(scene))
        for question in questions(scene, rng):
            expected = answer_from_pixels(cells, question.kind, question.text)
            assert question.answer == expected, question
            kinds.add(question.kind)
    assert kinds == {"cell", "colour", "list", "count", "exists", "locate"}


def test_comparisons_match_the_pixels() -> None:
    asked = 0
    for seed in range(120):
        turns = dialogue(seed, "heldout", pictures=2, turns=6)
        scenes = [scene for turn in turns for scene in turn.pictures]
        for question in (turn.question for turn in turns if turn.question.kind == "compare"):
            first, second = (read_cells(render(scene)) for scene in scenes)
            if question.text.startswith("what"):
                row, column = (int(n) for n in re.findall(r"\d+", question.text))
                assert question.answer == first[row - 1][column - 1]
            else:
                name = re.fullmatch(r"which picture has the (.+)\?", question.text)[1]
                inside = [any(name in row for row in cells) for cells in (first, second)]
                words = {(1, 1): "both", (1, 0): "the first", (0, 1): "the second"}
                assert question.answer == words[tuple(map(int, inside))]
            asked += 1
    assert asked > 50


def combinations(scene: Scene) -> set[tuple]:
    if scene.kind == "text":
        return {(scene.text,)}
    where = "free" if scene.kind == "free" else "grid"
    return {(where, item.name, item.x // CELL, item.y // CELL) for item in scene.items}


def test_held_out_scenes_never_appear_in_training() -> None:
    rng = random.Random(0)
    trained: set[tuple] = set()
    for _ in range(6000):
        trained |= combinations(make_scene(rng, "train"))
    assert len(trained) > 1200
    for _ in range(400):
        assert combinations(make_scene(rng, "heldout")) - trained


def test_dialogues_are_a_function_of_their_seed() -> None:
    for pictures, turns in itertools.product((1, 3), (4, 6)):
        assert dialogue(5, "heldout", pictures, turns) == dialogue(5, "heldout", pictures, turns)
        assert dialogue(5, "heldout", pictures, turns) != dialogue(6, "heldout", pictures, turns)
    made = dialogue(1, "heldout", 3, 6)
    assert [len(turn.pictures) for turn in made] == [1, 0, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="at least as many turns"):
        dialogue(1, "train", 3, 2)


@pytest.mark.parametrize("text", ["what is at row 2?", "naïve 漢字 🙂\n\ttab", "KLMA 0417", ""])
def test_tokenizer_round_trip(text) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_words_of_the_scenes_are_one_token() -> None:
    tokenizer = build_tokenizer()
    for word in [*COLOURS, *SHAPES, *(n for n in object_names() if " " not in n)]:
        assert len(tokenizer.encode(f" {word}")) == 1, word
    assert len(tokenizer) < 1500


@pytest.mark.parametrize("size", [(32, 32), (128, 96), (64, 128)])
def test_training_patches_equal_the_image_processor(size) -> None:
    from transformers import Qwen2VLImageProcessor

    noise = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    settings = {k: v for k, v in IMAGE_PROCESSOR.items() if not k.endswith(("_type", "_class"))}
    made = Qwen2VLImageProcessor(**settings)(images=[picture], return_tensors="pt")
    block, grid = patches(picture)
    assert made["image_grid_thw"].tolist() == [list(grid)]
    torch.testing.assert_close(torch.from_numpy(block), made["pixel_values"], rtol=0, atol=1e-6)


def test_training_text_equals_the_chat_template() -> None:
    tokenizer = build_tokenizer()
    turns = dialogue(3, "train", pictures=2, turns=4) + sparse(3, "train", 6, 2, 4)
    made = encode(turns, tokenizer)
    messages = []
    for turn in turns:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in turn.parts()
        ]
        messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": turn.question.answer})
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    squeezed = re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", tokenizer.decode(made.ids))
    assert squeezed == rendered
    learned = tokenizer.decode([label for label in made.labels if label != -100])
    assert learned == "".join(turn.question.answer + "<|im_end|>" for turn in turns)
    assert [len(block) for block in made.pixels] == [h * w for _, h, w in made.grids]


def test_a_training_clip_equals_the_input_of_chat() -> None:
    processor = load_processor(bundled_model())
    turns = clip(4, "train", 1)
    made = encode(turns, build_tokenizer())
    drawn = [np.asarray(render(frame)) for frame in turns[0].pictures[0].frames]
    frames = np.stack([frame for frame in drawn for _ in range(2)])
    video = Clip(frames, tuple(range(len(frames))), 2.0)
    messages = [
        {
            "role": "user",
            "content": [{"type": "video"}, {"type": "text", "text": turns[0].question.text}],
        },
        {"role": "assistant", "content": turns[0].question.answer},
    ]
    text = build_tokenizer().apply_chat_template(messages, tokenize=False)
    inputs = processor.encode(text, clips=[video])
    assert inputs["input_ids"][0].tolist() == made.ids
    assert inputs["video_grid_thw"].tolist() == [list(grid) for grid in made.clip_grids]
    block = torch.from_numpy(np.concatenate(made.clips))
    torch.testing.assert_close(block, inputs["pixel_values_videos"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("lessons", ROUNDS)
def test_a_resumed_run_sees_the_same_batches(lessons: str) -> None:
    tokenizer = build_tokenizer()
    whole = list(DialogueBatches(tokenizer, 6, batch=2, lessons=lessons))
    resumed = list(DialogueBatches(tokenizer, 6, batch=2, start=4, lessons=lessons))
    assert len(resumed) == 2
    for a, b in zip(whole[4:], resumed, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_saved_model_decodes_with_a_cache(tmp_path: Path) -> None:
    """The Trainer turns the cache off in a configuration; what is saved must not."""
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, 0)
    model.config.use_cache = model.config.text_config.use_cache = False
    save(model, tokenizer, tmp_path)
    written = [path.read_text() for path in tmp_path.glob("*config.json")]
    assert len(written) >= 2 and not any('"use_cache": false' in text for text in written)
