"""Text tasks: answers checked against the text, and their tensors for training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.data.conversations import DataError
from mmkv.training.data.examples import examples
from mmkv.training.data.labels import IGNORED
from mmkv.training.data.text_tasks import KINDS, TaskPiece, needle_chat, text_task
from mmkv.training.data.texts import write

FACT = re.compile(r"The special magic number for (\w+) is: (\d{4})\.")
SEVERAL = re.compile(r"The special magic numbers? for (\w+) (?:is|are): (\d{4}(?:, \d{4})*)\.")
# A fact of each kind, as (name, value); the space before a value is part of the answer.
FACTS = dict.fromkeys(["recall", "needles", "memory", "haystack", "far-memory"], FACT) | {
    "far-needles": SEVERAL,
    "records": re.compile(r'"([0-9a-f]{4})": "([0-9a-f]{4})",\n'),
    "assigned": re.compile(r"(\w+_\w+) = (\d{4})\n"),
}


def answers_by_reading(kind: str, pieces: list[TaskPiece]) -> list[str]:
    """Return what the text last stated of the name before each question's own answer."""
    text, found = "", []
    for piece in pieces:
        if piece.answer:
            # The question and any answer that a fact might have: whose fact it would be.
            asked = text.rpartition("\n")[2] + ("0000" if kind == "records" else " 0000")
            name = FACTS[kind].findall(asked + {"records": '",\n', "assigned": "\n"}.get(kind, "."))
            found.append(dict(FACTS[kind].findall(text))[name[0][0]])
        text += piece.text
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_what_the_text_states_last(kind: str) -> None:
    updates = 0
    for seed in range(40):
        pieces = text_task(kind, seed, "heldout")
        answers = [piece.text for piece in pieces if piece.answer]
        space = "" if kind == "records" else " "
        assert answers == [space + value for value in answers_by_reading(kind, pieces)] and answers
        stated = [name for name, _ in FACTS[kind].findall("".join(p.text for p in pieces))]
        asked = len(answers)
        updates += len(stated) - asked > len(set(stated))
        assert text_task(kind, seed, "heldout") == pieces
        assert text_task(kind, seed, "train") != pieces != text_task(kind, seed + 1, "heldout")
    # Only sessions replace what they said before.
    assert (updates > 20) == (kind in ("memory", "far-memory"))


@pytest.mark.parametrize(("kind", "keys", "least"), [("needles", 10, 34), ("haystack", 4, 68)])
def test_needles_lie_at_all_depths_among_filler(kind: str, keys: int, least: int) -> None:
    depths = []
    for seed in range(1200 // keys):
        document = text_task(kind, seed, "train")[0].text
        facts = [match.start() / len(document) for match in FACT.finditer(document)]
        assert len(facts) == keys and len(document.splitlines()) >= least
        depths += facts
    for low in (0.0, 0.25, 0.5, 0.75):
        assert 0.2 < sum(low <= depth < low + 0.25 for depth in depths) / len(depths) < 0.3


def test_far_needles_have_several_values_and_lie_at_all_depths() -> None:
    depths, counts, sentences = [], set(), []
    for seed in range(60):
        pieces = text_task("far-needles", seed, "train")
        document = pieces[0].text
        facts = list(SEVERAL.finditer(document))
        values = {fact[2].count(",") + 1 for fact in facts}
        assert len(values) == 1 and ("numbers" in document) == (values != {1})
        assert all(piece.text.count(",") + 1 in values for piece in pieces if piece.answer)
        counts |= values
        depths += [fact.start() / len(document) for fact in facts]
        sentences.append(len(document.splitlines()))
    assert counts == {1, 2, 3, 4} and min(sentences) < 200 and max(sentences) > 480
    for low in (0.0, 0.25, 0.5, 0.75):
        assert 0.2 < sum(low <= depth < low + 0.25 for depth in depths) / len(depths) < 0.3


def test_one_to_eight_keys_are_asked_for_and_never_more_than_there_are() -> None:
    def words(texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    replies = [needle_chat(seed, "train", (3000, 3000), words)[1] for seed in range(40)]
    assert {reply.count("\n") + 1 for reply in replies} == set(range(1, 9))


def test_the_labels_of_a_task_are_its_answers() -> None:
    model = str(bundled_model())
    tokenizer = load_processor(model).tokenizer
    data = examples(model, ["tasks:memory"], 3, 0)
    seen = set()
    for index in range(3):
        example = data[index]
        ids, labels = example["input_ids"][0], example["labels"][0]
        assert ids.shape == labels.shape and bool(((labels == IGNORED) | (labels == ids)).all())
        assert 0 < int((labels != IGNORED).sum()) < len(ids) / 4
        seen.add(tokenizer.decode(labels[labels != IGNORED]))
    assert len(seen) == 3


# The bundled model spells texts in bytes.
@pytest.mark.parametrize(("source", "most"), [("tasks:memory", 3000), ("scenes:dense", 250)])
def test_synthetic_documents_respect_the_length_limit(source: str, most: int) -> None:
    notes: list[str] = []
    data = examples(str(bundled_model()), [source], 12, 0, max_length=most, report=notes.append)
    lengths = [data[index]["input_ids"].shape[1] for index in range(12)]
    assert max(lengths) <= most and data.encoder.tally["dropped"] > 0
    assert f"{source}:" in notes[0] and f"--max-length is {most}" in notes[0]


def test_unknown_kinds_are_named() -> None:
    with pytest.raises(DataError, match="no tasks of kind 'riddle'; choose one of recall"):
        examples(str(bundled_model()), ["tasks:riddle"], 1, 0)
    with pytest.raises(ValueError, match="recall, needles, memory"):
        text_task("riddle", 0, "train")


def test_texts_are_split_by_name_and_never_shared(tmp_path: Path) -> None:
    counts = write(tmp_path)
    for kind in ("code", "prose"):
        train, heldout = (
            (tmp_path / f"{kind}.{split}.jsonl").read_text().splitlines()
            for split in ("train", "heldout")
        )
        assert len(train) == counts[f"{kind}.train.jsonl"] > len(heldout) > 0
        assert not set(train) & set(heldout)
    assert write(tmp_path) == counts
