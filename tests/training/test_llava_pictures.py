"""The pictures and talks that an adapter is trained on, and what it says it sees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import transformers
from PIL import Image

from mmkv.resources import BUNDLED_ADAPTER, asset
from mmkv.training.data.scenes import EMPTY, Question
from mmkv.training.llava.adapter import LlavaAdapter, load, vision_config, with_image_token
from mmkv.training.llava.pictures import PLACES, EasyVQA, PictureTurn, Shown, all_names, talk
from mmkv.training.llava.teach import Eyes, Language, WordTable, caption, entries, install

pytest_plugins = ("tests.support.llava_fixtures",)


def test_easy_vqa_tells_colour_and_shape_through_negations(easy: Path) -> None:
    read = EasyVQA.of(easy, "train")
    names = [one.names[0] for one in read.pictures]
    assert names == ["teal circle", "gray triangle", "brown circle"]


def test_held_out_talks_ask_what_training_never_shows(easy: Path) -> None:
    data = {split: EasyVQA.of(easy, split) for split in ("train", "heldout")}
    seen = {split: [talk(n, split, data[split]) for n in range(400)] for split in data}  # type: ignore[arg-type]
    trained = {part for turns in seen["train"] for turn in turns for part in parts(turn)}
    known = {name for name, _ in trained}
    asked: Counter[str] = Counter()
    for turns in seen["heldout"]:
        shown = Shown(())
        for turn in turns:
            shown = turn.shown or shown
            if shown.file is not None:
                continue
            about = (shown.names[0], shown.background)
            if turn.question.kind == "grid":
                where = next(place for place in PLACES if place in turn.question.text)
                about = (turn.question.answer, where)
                assert shown.names[PLACES.index(where)] == turn.question.answer
            assert about not in trained and about[0] in {*known, EMPTY}
            asked[turn.question.kind] += 1
    assert min(asked[kind] for kind in ("one thing", "colour", "shape", "grid")) > 30
    assert known <= set(all_names())


def parts(turn: PictureTurn) -> set[tuple[str, str]]:
    """Return name and background, and in a grid name and place, of what a drawn picture shows."""
    if turn.shown is None or turn.shown.file is not None:
        return set()
    names = turn.shown.names
    shown = {(name, turn.shown.background) for name in names}
    if len(names) > 1:
        shown |= set(zip(names, PLACES, strict=True))
    return {each for each in shown if each[0] != EMPTY}


def test_a_caption_says_what_stands_where() -> None:
    shown = Shown(("apple", EMPTY, "red circle", "frog"))
    told = caption(shown)
    assert len(told) == 16
    at = told.index("third")
    assert told[at : at + 6] == ["third", "red", "circle", "fourth", "frog", ","]
    alone = caption(Shown(("teal circle",)))
    assert len(alone) == 16 and [e for e in alone if " " not in e] == ["teal", "circle"]
    colours = shown.picture().resize((2, 2), Image.Resampling.BOX)
    assert colours.getpixel((1, 0)) == (255, 255, 255)
    red, _, blue = colours.getpixel((0, 1))  # type: ignore[misc]
    assert red > blue + 50


def test_a_projector_gives_the_vector_of_the_entry_that_is_seen(language: Path, easy: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(language, dtype=torch.float32)
    tokenizer = with_image_token(transformers.AutoTokenizer.from_pretrained(language))
    table = WordTable(Language(model, tokenizer))
    adapter = LlavaAdapter(vision_config(16, 1), model.config)
    eyes = Eyes(adapter, table)
    shown = [Shown(("frog",)), Shown(("apple", "bus", EMPTY, "key"))]
    lines = table.lines(shown)
    for sure in (4.0, 20.0):
        # A classifier that says these entries whatever it sees: their logit is high.
        said = torch.full((len(table.vectors),), -sure)
        said[lines[0, 8]] = sure
        with torch.no_grad():
            eyes.classify.weight.zero_()
            eyes.classify.bias.copy_(said)
        install(eyes, table)
        made = adapter(shown)
        torch.testing.assert_close(
            made, table.vectors[lines[0, 8]].expand_as(made), atol=2e-3, rtol=2e-3
        )


def test_the_bundled_eyes_read_held_out_pictures() -> None:
    text = transformers.LlamaConfig(hidden_size=576, num_attention_heads=9)
    adapter = load(asset(BUNDLED_ADAPTER), text)
    # The projector's second matrix holds the vectors, in the table's order.
    vectors = adapter.multi_modal_projector.linear_2.weight[:, : len(entries())].T
    names = list(entries())
    none = EasyVQA((Shown((EMPTY,)),), ((Question("easy-VQA", "?", "?"),),))
    turns = [talk(number, "heldout", none, turns=1)[0] for number in range(80)]
    shown = [turn.shown for turn in turns if turn.shown]
    with torch.no_grad():
        nearest = torch.cdist(adapter(shown).flatten(0, 1), vectors).argmin(-1).view(len(turns), -1)
    read: Counter[str] = Counter()
    asked = Counter(turn.question.kind for turn in turns)
    for turn, one, lines in zip(turns, shown, nearest.tolist(), strict=True):
        read[turn.question.kind] += [names[at] for at in lines] == caption(one)
    for kind in ("one thing", "grid"):
        assert asked[kind] > 10 and read[kind] >= 0.8 * asked[kind], (kind, read, asked)
