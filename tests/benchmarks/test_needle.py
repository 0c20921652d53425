"""Needles: the documents against their own text and pixels, the runs against plain sessions."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.needle import found, main
from benchmarks.tasks import needles
from benchmarks.tasks.needles import Haystack, Needle, maker, place_needles
from mmkv.engine.errors import InputError
from mmkv.engine.policies import Budget
from mmkv.engine.runtime import Runtime
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.data.scenes import SceneClip, SceneTurn, render
from mmkv.training.measure.teacher_forced import FullCache, read_at, spans
from tests.training.data.test_dialogues import check
from tests.training.data.test_scenes import read_cells

MODEL = str(bundled_model())
STATED = re.compile(r"The special magic numbers for (\w+) are: ([\d, ]+)\.\n")


def made(name: str, index: int) -> Any:
    return maker(name, MODEL, load_processor(MODEL))(index)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[list[SceneTurn]]:
    """Return the turns behind the documents that a test makes."""
    seen: list[list[SceneTurn]] = []
    plain = needles.scene_document

    def noted(made: list[SceneTurn], tokenizer: Any) -> Any:
        seen.append(made)
        return plain(made, tokenizer)

    monkeypatch.setattr(needles, "scene_document", noted)
    return seen


def test_text_needles_stand_where_their_notes_say() -> None:
    tokenizer = load_processor(MODEL).tokenizer
    name, asked = "needle:text:6000:8:4:4", Counter()
    for index in range(4):
        document = made(name, index)
        ids, labels = (document.example[key][0] for key in ("input_ids", "labels"))
        cuts = document.example["cuts"]
        haystack = tokenizer.decode(ids[: cuts[0]])
        known = dict(STATED.findall(haystack))
        assert len(known) == 8 and 6000 <= cuts[0] < 6150
        assert len({v for values in known.values() for v in values.split(", ")}) == 32
        for note, cut, (start, stop) in zip(
            document.notes, cuts, spans(labels.tolist()), strict=True
        ):
            question = tokenizer.decode(ids[cut:start])
            (key,) = re.findall(r"^\nThe special magic numbers for (\w+) are:$", question)
            assert tokenizer.decode(ids[start:stop]) == f" {known[key]}"
            values = [tokenizer.decode(ids[start:stop][slice(*value)]) for value in note.values]
            assert values == [f" {value}" for value in known[key].split(", ")]
            sentence = tokenizer.decode(ids[slice(*note.where)])
            assert sentence == f"The special magic numbers for {key} are: {known[key]}.\n"
            assert note.haystack == (0, cuts[0])
            where = len(tokenizer.encode(haystack[: haystack.index(f"for {key} ")])) / cuts[0]
            assert abs(where - note.depth) < 0.1
            asked[int(note.depth * 8)] += 1
        assert made(name, index).notes == document.notes
    assert set(asked) == set(range(8)) and set(asked.values()) == {2}


def test_picture_needles_match_the_pixels(turns: list[list[SceneTurn]]) -> None:
    for index in range(6):
        document = made("needle:pictures:400:4:3:2", index)
        check(turns[index])
        assert len(document.notes) == 6 == len(turns[index])
        numbered = [c for turn in turns[index] for c in turn.captions if c.startswith("picture")]
        assert numbered == [f"picture {n}:" for n in range(1, 5)]
        depth = {}
        for turn, note in zip(turns[index], document.notes, strict=True):
            key = int(re.findall(r"picture (\d)", turn.question.text)[0])
            assert int(note.depth * 4) == key - 1 and turn.question.answer != "nothing"
            depth[key] = note.depth
            needle = load_processor(MODEL).tokenizer.decode(
                document.example["input_ids"][0][slice(*note.where)]
            )
            pads = "<[|]image_pad[|]>"
            words = f"picture {key}:<[|]vision_start[|]>({pads})+<[|]vision_end[|]>"
            assert re.fullmatch(words, needle)
        assert len(depth) == 2
        # Nothing of the first question stands before the cut, and the whole question behind it.
        ids, (cut,) = document.example["input_ids"][0], document.example["cuts"]
        text = load_processor(MODEL).tokenizer.decode(ids[cut:])
        assert text.startswith(turns[index][0].question.text + "<|im_end|>")
        assert 400 <= cut <= 440


def test_video_needles_match_the_frames(turns: list[list[SceneTurn]]) -> None:
    parts, when = [], set()
    for index in range(8):
        document = made("needle:video:300:1:4:1", index)
        pictures = turns[index][0].pictures
        (clip,) = (picture for picture in pictures if isinstance(picture, SceneClip))
        cells = {w: read_cells(render(clip.frames[i])) for w, i in (("start", 0), ("end", -1))}
        assert cells["start"] != cells["end"]
        for turn in turns[index]:
            row, column = map(int, re.findall(r"(?:row|column) (\d+)", turn.question.text))
            kind = turn.question.text.rstrip("?").split()[-1]
            assert turn.question.answer == cells[kind][row - 1][column - 1]
            when.add(kind)
        (depth,) = {note.depth for note in document.notes}
        parts.append(int(depth * 4))
        place = pictures.index(clip) / (len(pictures) - 1)
        assert abs(place - depth) < 0.35
    assert when == {"start", "end"} and sorted(parts) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_placed_needles_keep_order_length_and_depth() -> None:
    rng = random.Random(3)
    filler = ((f"f{n}", rng.randint(3, 9)) for n in range(10**6))
    lines, places = place_needles([("a", 10), ("b", 20), ("c", 5)], filler, 1000, [0.0, 0.5, 1.0])
    assert places[0] == (0, 10) and places[2][1] - places[2][0] == 5 and 1000 <= places[2][1] < 1009
    assert places[1][1] - places[1][0] == 20 and abs(places[1][0] - 500) < 30
    assert lines[0] == "a" and lines[-1] == "c" and 0.45 < lines.index("b") / len(lines) < 0.55
    with pytest.raises(InputError, match="needles alone take 30 tokens"):
        place_needles([("a", 30)], iter([]), 20, [0.5])


@pytest.mark.slow(reason="runs whole dialogues with the bundled model")
@pytest.mark.long(reason="a run for each budget")
def test_several_budgets_at_once_equal_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against sessions fed one after the other with nothing shared, the prompt cut in two."""
    engine = Runtime.from_pretrained(MODEL, policy="snapkv", dtype="float32")
    document = made("needle:pictures:256:4:2:2", 1)
    inputs = {k: v for k, v in document.example.items() if k not in ("labels", "cuts")}
    labels, cuts = document.example["labels"][0], document.example["cuts"]
    turn = engine.family.turn(inputs, 0)
    full = FullCache.of(engine, turn, labels)
    for chunk in (2048, 100):  # the prompt in one chunk, whose start is shared, and in several
        monkeypatch.setattr(engine, "prefill_chunk", chunk)
        budgets = [Budget.of(20), Budget.of(60)]
        together = read_at(engine, turn, labels, budgets, full, cuts)
        for budget, run in zip(budgets, together, strict=True):
            session, done = engine.session(budget), 0
            for answer, (start, stop) in zip(run.answers, spans(labels.tolist()), strict=True):
                for part in [*(cut for cut in cuts if done < cut < start), start]:
                    logits, done = session.extend(turn.part(done, part)), part
                best = []
                for token in labels[start:stop].tolist():
                    best.append(int(logits.argmax()))
                    logits = session.decode(token)
                done = stop
                target = labels[start:stop].tolist()
                miss = [(i, b) for i, (b, t) in enumerate(zip(best, target, strict=True)) if b != t]
                assert list(answer.wrong) == miss and answer.right == (not miss)
            memory = session.memory()
            assert run.nbytes == memory.pages * engine.cache.pool.page_bytes
            assert (run.entries, run.evicted) == (memory.entries, memory.evicted)
            assert run.per_row == engine.cache.length[session.seq].tolist()
            session.close()
        assert together[0].evicted > together[1].evicted > 0
    engine.cache.check()


def test_a_value_is_found_when_all_its_tokens_are() -> None:
    notes = [Needle(0.1, ((0, 2), (3, 5))), Needle(0.9, ((0, 1),))]
    record = {"wrong": [[[2, 7], [4, 9]], []]}
    assert found(record, notes) == [[True, False], [True]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lengths", "20"], r"needles alone take \d+ tokens; give --lengths of more"),
        (["--domain", "video", "--keys", "2"], "a document holds one video; give --keys 1"),
        (["--keys", "2", "--queries", "3"], "no more queries than keys"),
        (["--method", "dbtrimkv"], "write dbtrimkv:GATES"),
        (["--limit", "0"], "reads nothing"),
        (["--domain", "text", "--lengths", "9k"], "give shorter dialogues"),
    ],
)
def test_mistakes_give_one_line(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message) as caught:
        main([MODEL, "--output", str(tmp_path), *options])
    assert "\n" not in str(caught.value)


def test_malformed_names_are_refused() -> None:
    with pytest.raises(InputError, match="choose one of text, pictures, video"):
        Haystack.parse("needle:maze:100:1:1:1")
    with pytest.raises(InputError, match="write needle:DOMAIN:LENGTH"):
        Haystack.parse("needle:text:many")
