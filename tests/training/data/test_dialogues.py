"""Long dialogues: answers against the pixels, and the properties of each kind."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from mmkv.training.data.dialogues import (
    IGNORE,
    beside,
    caption,
    clip,
    dense,
    grid,
    scene_turns,
    sparse,
    stream,
)
from mmkv.training.data.scene_encoding import build_tokenizer, encode
from mmkv.training.data.scenes import (
    EMPTY,
    Question,
    Scene,
    SceneClip,
    SceneTurn,
    is_heldout,
    object_names,
    render,
)
from mmkv.training.pretrain_tiny import ROUNDS, long_lesson
from tests.training.data.test_scenes import answer_from_pixels, read_cells

Cells = list[list[str]]


def shown(turns: list[SceneTurn]) -> dict[int, Scene]:
    """Return pictures by the number in their caption."""
    found = {}
    for turn in turns:
        assert len(turn.captions) == len(turn.pictures)
        for words, picture in zip(turn.captions, turn.pictures, strict=True):
            if words != IGNORE:
                found[int(re.fullmatch(r"picture (\d+):", words)[1])] = picture
    return found


def answer_about(question: Question, cells: dict[int, Cells], text: dict[int, str]) -> str:
    """Return the right answer to a question that names its pictures, from pixels."""
    numbers = [int(n) for n in re.findall(r"picture (\d+)", question.text)]
    if question.kind == "read":
        return text[numbers[0]]
    if question.kind == "same":
        row, column = (int(n) for n in re.findall(r"(?:row|column) (\d+)", question.text))
        names = [cells[n][row - 1][column - 1] for n in numbers]
        return f"{names[0]} and {names[1]}: {'yes' if names[0] == names[1] else 'no'}"
    without = re.sub(r"picture \d+", "", question.text)
    return answer_from_pixels(cells[numbers[0]], question.kind, without)


def check(turns: list[SceneTurn]) -> set[tuple[str, str]]:
    """Check every answer of a dialogue against the pixels; return the kinds that were asked."""
    pictures = shown(turns)
    drawn = {n: read_cells(render(s)) for n, s in pictures.items() if s.kind == "grid"}
    text = {n: s.text for n, s in pictures.items() if s.kind == "text"}
    kinds, seen = set(), 0
    for turn in turns:
        seen += sum(words != IGNORE for words in turn.captions)
        asked = turn.question
        numbers = [int(n) for n in re.findall(r"picture (\d+)", asked.text)]
        assert all(1 <= n <= seen for n in numbers), "asks about a picture not shown yet"
        kinds.add((asked.about, asked.kind))
        if asked.about == "earlier":
            if pictures[numbers[0]].kind != "free":
                assert asked.answer == answer_about(asked, drawn, text), asked
        elif asked.kind in ("cell", "locate", "exists", "colour", "count") and seen in drawn:
            assert asked.answer == answer_from_pixels(drawn[seen], asked.kind, asked.text), asked
    return kinds


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_dense_dialogues_ask_about_everything_shown(split) -> None:
    kinds = set()
    for seed in range(30):
        turns = dense(seed, split, pictures=5, turns=12)
        assert sorted(shown(turns)) == [1, 2, 3, 4, 5]
        assert len(turns) == 12
        assert not any(turn.pictures for turn in turns[9:]), "the last turns bring no picture"
        kinds |= check(turns)
        for at, turn in enumerate(turns):
            if turn.question.about == "earlier":
                numbers = map(int, re.findall(r"picture (\d+)", turn.question.text))
                assert min(numbers) < sum(len(one.pictures) for one in turns[: at + 1])
    assert {("earlier", k) for k in ("cell", "same", "locate", "colour", "count")} <= kinds
    assert {("latest", k) for k in ("cell", "locate", "exists", "beside")} <= kinds


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_sparse_dialogues_ask_about_kept_pictures_only(split) -> None:
    for seed in range(15):
        turns = sparse(seed, split, pictures=16, kept=2, turns=6)
        captions = [words for turn in turns for words in turn.captions]
        assert captions.count(IGNORE) == 14
        assert [w for w in captions if w != IGNORE] == [caption(1), caption(2)]
        check(turns)


@pytest.mark.parametrize("kind", ["256-distractors", "40-pictures"])
def test_long_held_out_dialogues_have_thousands_of_tokens(kind) -> None:
    tokenizer = build_tokenizer()
    for seed in range(2):
        turns = scene_turns(kind, seed, "heldout")
        assert 1800 < len(encode(turns, tokenizer).ids) < 4000
        assert {about for about, _ in check(turns)} == {"earlier", "latest"} - (
            {"latest"} if kind == "256-distractors" else set()
        )


def test_the_lessons_of_the_far_round_are_longer_than_those_of_any_before() -> None:
    tokenizer = build_tokenizer()

    def longest(lessons: str) -> int:
        kinds = {kind for kind, _ in ROUNDS[lessons]}
        made = (long_lesson(kind, seed) for kind in sorted(kinds) for seed in range(3))
        return max(len(encode(turns, tokenizer).ids) for turns in made)

    assert longest("dialogues") < 700
    assert 2000 < longest("far") < 4200
    check(long_lesson("pictures", 0))


@pytest.mark.parametrize("make", [dense, sparse])
def test_without_search_every_question_is_about_a_cell_or_a_text(make) -> None:
    kinds = {
        turn.question.kind
        for seed in range(20)
        for turn in make(seed, "heldout", 6, *((2,) if make is sparse else ()), 9, search=False)
    }
    assert {"cell", "same", "colour"} <= kinds <= {"cell", "same", "colour", "beside", "read"}


def test_a_clip_changes_one_cell() -> None:
    for seed in range(40):
        turns = clip(seed, "train", 5)
        video = turns[0].pictures[0]
        assert isinstance(video, SceneClip)
        first, last = (read_cells(render(frame)) for frame in (video.frames[0], video.frames[-1]))
        changed = [
            (r, c)
            for r, row in enumerate(first, 1)
            for c, name in enumerate(row, 1)
            if name != last[r - 1][c - 1]
        ]
        assert len(changed) == 1
        (row, column), asked = changed[0], [turn.question for turn in turns]
        for question in asked:
            if question.kind == "change":
                before, after = first[row - 1][column - 1], last[row - 1][column - 1]
                assert question.answer == f"row {row}, column {column}: {before} to {after}"
            else:
                r, c = (int(n) for n in re.findall(r"\d+", question.text))
                cells = first if question.kind == "start" else last
                assert question.answer == cells[r - 1][c - 1]
        for frame in video.frames:
            for item in frame.items:
                assert not is_heldout(item.name, item.x // 32, item.y // 32)


def test_a_stream_asks_about_its_newest_clip_and_its_first_picture() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(6):
        turns = stream(seed, "train", 9, remember=4)
        assert len(turns) == 11 and turns[0].captions == ("picture 1:", "")
        picture = read_cells(render(turns[0].pictures[0]))
        for turn in turns:
            row, column, *number = (int(n) for n in re.findall(r"\d+", turn.question.text))
            cells = picture
            if turn.pictures:
                video = turn.pictures[-1]
                assert isinstance(video, SceneClip) and not number
                cells = read_cells(render(video.frames[0 if "start" in turn.question.text else -1]))
                for frame in video.frames:
                    for item in frame.items:
                        assert not is_heldout(item.name, item.x // 32, item.y // 32)
            assert turn.question.answer == cells[row - 1][column - 1]
            kinds[turn.question.kind] += 1
    assert kinds["cell"] == 12 and min(kinds["start"], kinds["end"]) > 15


def test_beside_names_the_neighbour() -> None:
    rng, outside = random.Random(3), 0
    for _ in range(100):
        scene = grid(rng, "heldout")
        cells = read_cells(render(scene))
        question = beside(scene, rng)
        word, row, column = re.fullmatch(
            r"what is (.+) row (\d+), column (\d+)\?", question.text
        ).groups()
        down, right = {
            "below": (1, 0),
            "above": (-1, 0),
            "right of": (0, 1),
            "left of": (0, -1),
        }[word]
        row, column = int(row) + down, int(column) + right
        inside = 1 <= row <= len(cells) and 1 <= column <= len(cells[0])
        name = cells[row - 1][column - 1] if inside else "no cell"
        assert question.answer == f"row {row}, column {column}: {name}"
        assert name in (*object_names(), EMPTY, "no cell")
        outside += not inside
    assert 10 < outside < 90


def test_dialogues_are_a_function_of_their_seed() -> None:
    assert dense(5, "train", 3, 6) == dense(5, "train", 3, 6)
    assert dense(5, "train", 3, 6) != dense(6, "train", 3, 6)
    assert sparse(5, "train", 9, 2, 5) == sparse(5, "train", 9, 2, 5)
    with pytest.raises(ValueError, match="at least as many turns"):
        dense(1, "train", 3, 2)
