"""What the prompts and measures of the long-text benchmarks want of a row.

A reader returns the values of a row by name: those that the prompt's braces name, ``context`` among
them, and those that the measure compares with. HELMET draws questions, examples and labels by
seeds; they are drawn here as there, by numpy's and Python's generators, so the same rows come out.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mmkv.engine.errors import InputError
from mmkv.eval.long_text.scores import LETTERS

Row = Mapping[str, Any]
Values = dict[str, Any]
SEED = 42  # of HELMET
OMITTED = " ... [the rest of the text is omitted]"  # HELMET's words behind a text that was cut


@lru_cache(maxsize=4)
def read_rows(path: str) -> list[Row]:
    """Read the rows of a file: JSON, a line of JSON each, or Parquet. Raises InputError."""
    if path.endswith(".parquet"):
        from pyarrow import ArrowException, parquet

        try:
            return parquet.read_table(path).to_pylist()
        except (OSError, ArrowException) as error:
            raise InputError(f"{path} cannot be read ({error}); get the file again") from error
    try:
        text = Path(path).read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            # Not splitlines: texts may hold U+2028 and its like as they are.
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}); get the file again") from error
    if isinstance(found, dict) and isinstance(found.get("data"), list):
        found = found["data"]
    rows = [found] if isinstance(found, dict) else found
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} holds no rows; get the file again")
    return rows


def _plain(row: Row, spec: Row, doc: Row) -> Values:
    """LongBench: the row as it is; a single answer is a list of one."""
    return {**row, "answers": _flat(row["answers"])}


def _stripped(row: Row, spec: Row, doc: Row) -> Values:
    """LongBench-v2: no blanks around texts."""
    return {key: one.strip() if isinstance(one, str) else one for key, one in row.items()}


def _chats(row: Row, spec: Row, doc: Row) -> Values:
    """LongMemEval: all sessions in the order of their dates, each as JSON."""
    # The published code sorts by the date's text.
    sessions = sorted(
        zip(row["haystack_dates"], row["haystack_sessions"], strict=True), key=lambda one: one[0]
    )
    history = ""
    for number, (date, turns) in enumerate(sessions, 1):
        said = [{key: turn[key] for key in turn if key != "has_answer"} for turn in turns]
        history += (
            f"\n### Session {number}:\nSession Date: {date}\n"
            f"Session Content:\n\n{json.dumps(said)}\n"
        )
    return {**row, "context": history, "answer": str(row["answer"])}


def _turns(row: Row, spec: Row, doc: Row) -> Values:
    """SCBench: the context; its turns are read by :func:`turn_values`."""
    first = row["multi_turns"][0]["input"]
    return {"context": row.get("context") or row.get("input"), "prefix": first}


def turn_values(row: Row, turn: Row, doc: Row) -> Values:
    """Return the values of one turn of SCBench."""
    made: Values = {**turn}
    if options := turn.get("options"):
        made |= dict(zip(LETTERS, options, strict=False))
        made["letter"] = LETTERS[list(options).index(turn["answer"])]
    if target := re.search(r"The .+ is", str(turn["input"])):
        made["prefix"] = f"What is {target[0].lower()[:-3]}?"
    if row.get("repo") is not None and turn.get("name") is not None:
        # All functions that are asked for in the repository, in any row of the file.
        rows = (one for one in read_rows(doc["file"]) if one.get("repo") == row["repo"])
        asked = (one for other in rows for one in other["multi_turns"] if one.get("name"))
        made["functions"] = [(one["name"], one["answer"]) for one in asked]
    return made


def _ruler(row: Row, spec: Row, doc: Row) -> Values:
    found = row["answer"] if "answer" in row else row["outputs"]
    answers = [found] if isinstance(found, str) else found
    return {**row, "answers": list(map(str, answers))}


def _json_kv(row: Row, spec: Row, doc: Row) -> Values:
    shown = row["demos"][: spec["shots"]]
    demos = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in shown)
    return {**row, "demos": demos, "answers": _flat(row["answer"])}


def _rag(row: Row, spec: Row, doc: Row) -> Values:
    def passages(one: Row) -> str:
        found = (f"Document (Title: {c['title']}): {c['text']}" for c in one["ctxs"])
        return "\n\n".join(found)

    demos = "".join(
        f"{passages(one)}\n\nQuestion: {one['question']}\nAnswer: {one['answers'][0]}\n\n"
        for one in _examples(row, spec, doc, _question_key(row), always_others=False)
    )
    shown = {"demos": demos, "context": passages(row)}
    return {"question": row["question"], "answers": _flat(row["answers"]), **shown}


def _rerank(row: Row, spec: Row, doc: Row) -> Values:
    def passages(one: Row, titled: bool) -> str:
        title = " (Title: {title})" if titled else ""
        form = "[ID: {id}] Document" + title + ": {text}"
        return "\n\n".join(form.format(**c) for c in one["ctxs"])

    titled = "title" in row["ctxs"][0]
    demos = ""
    for one in _examples(row, spec, doc, "qid", always_others=True):
        ranked = sorted(one["ctxs"], key=lambda c: c["label"], reverse=True)
        order = " > ".join(c["id"] for c in ranked)
        demos += f"{passages(one, titled)}\n\nQuery: {one['query']}\nRanking: {order}\n\n"
    labels = {c["id"]: int(c["label"]) for c in row["ctxs"]}
    shown = {"demos": demos, "context": passages(row, titled)}
    return {"question": row["query"], "labels": labels, **shown}


def _labels(row: Row, spec: Row, doc: Row) -> Values:
    """Many examples, as many of each label as of any other; labels are numbers drawn anew for each
    question.
    """
    train = _split(doc["demos"], train=True) if doc.get("split") else read_rows(doc["demos"])
    key = spec["label"]
    rng, by_label = random.Random(SEED), dict[Any, list[Row]]()
    for one in train:
        by_label.setdefault(one[key], []).append(one)
    rounds = math.ceil(spec["shots"] / len(by_label))
    made: list[list[Row]] = [[] for _ in range(rounds)]
    for samples in by_label.values():
        places = rng.sample(range(len(samples)), rounds % len(samples))
        while len(places) < rounds:
            more = min(rounds - len(places), len(samples))
            places += rng.sample(range(len(samples)), more)
        for group, place in zip(made, places, strict=False):
            group.append(samples[place])
    for group in made:
        rng.shuffle(group)
    names = list(range(spec["labels"]))
    random.Random((_hash(row["text"]) + SEED) % 2**31).shuffle(names)
    shown = [one for group in made for one in group][: spec["shots"]]
    context = "\n\n".join(f"{one['text']}\nlabel: {names[int(one[key])]}" for one in shown)
    return {
        "context": context,
        "question": row["text"],
        "answers": [str(names[int(row[key])])],
    }


def _story(row: Row, spec: Row, doc: Row) -> Values:
    """NarrativeQA. The published examples are drawn without a seed; there are none here."""
    answers = [one["text"] for one in row["answers"]]
    shown = {"context": row["document"]["text"], "question": row["question"]["text"]}
    return {**shown, "answers": answers, "demos": ""}


def _book(row: Row, spec: Row, doc: Row) -> Values:
    """InfiniteBench, with the answers to two other books' questions as examples."""
    others = [one for one in read_rows(doc["file"]) if one["id"] != row["id"]]
    demos = "\n\n".join(
        _book_example(others[at]) for at in _order(len(others), SEED)[: spec["shots"]]
    )
    opening = f"For example:\n\n{demos}\n\nNow, read the following story:\n\n"
    made = {"question": row["input"], "demos": opening, "context": row["context"]}
    if row.get("options"):
        made |= {"options": _options(row), "answers": _option_answers(row)}
        return made
    return {**made, "answers": _flat(row["answer"])}


def _book_example(row: Row) -> str:
    if row.get("options"):
        return (
            f"[story text]\nQuestion: {row['input']}\nOptions:\n{_options(row)}\n"
            f"Answer: {_option_answers(row)[0]}"
        )
    answer = _flat(row["answer"])[0]
    asked = f"Question: {row['input']}\nAnswer: {answer}" if row["input"] else ""
    return f"[story text]\n{asked or f'Summary: {answer.strip()}'}"


def _options(row: Row) -> str:
    return "\n".join(f"{a}. {one}" for a, one in zip(LETTERS, row["options"], strict=False))


def _option_answers(row: Row) -> list[str]:
    right = _flat(row["answer"])[0]
    letter = LETTERS[list(row["options"]).index(right)]
    return [letter, f"{letter}. {right}"]


def _lawsuit(row: Row, spec: Row, doc: Row) -> Values:
    """Multi-LexSum. The published examples are drawn without a seed; there are none here."""
    shown = {"context": "\n\n".join(row["sources"]), "demos": ""}
    return {**shown, "answers": [row["summary/short"]]}


READERS: dict[str, Callable[[Row, Row, Row], Values]] = {
    "plain": _plain,
    "stripped": _stripped,
    "chats": _chats,
    "turns": _turns,
    "ruler": _ruler,
    "json_kv": _json_kv,
    "rag": _rag,
    "rerank": _rerank,
    "labels": _labels,
    "story": _story,
    "book": _book,
    "lawsuit": _lawsuit,
}


def drawn(rows: Sequence[Row], spec: Row) -> list[int]:
    """Return which rows HELMET asks, in its order: ``spec["samples"]`` of them, by its seed."""
    count, reader = spec["samples"], spec["reader"]
    places = list(range(len(rows)))
    if reader == "lawsuit":
        places = [at for at in places if rows[at]["summary/short"] is not None]
    if reader in ("rag", "rerank"):  # questions are drawn; all rows of one are asked
        if "popularity" in spec:
            bound = spec["popularity"]
            places = [at for at in places if math.log10(rows[at]["s_pop"]) < bound]
        key = "qid" if reader == "rerank" else _question_key(rows[0])
        names = sorted({rows[at][key] for at in places})
        kept = set(random.Random(SEED).sample(names, min(count, len(names))))
        return [at for at in places if rows[at][key] in kept]
    if reader in ("labels", "lawsuit") and len(places) <= count:
        return places
    return [places[at] for at in _order(len(places), SEED)[:count]]


def split_places(count: int, train: bool) -> list[int]:
    """Return the rows of one part of NLU's only file: a tenth to ask, the rest as examples."""
    asked = math.ceil(0.1 * count)
    order = _order(count, SEED)
    return order[asked:] if train else order[:asked]


@lru_cache(maxsize=1)
def _split(path: str, train: bool) -> list[Row]:
    rows = read_rows(path)
    return [rows[at] for at in split_places(len(rows), train)]


def _examples(row: Row, spec: Row, doc: Row, key: str, always_others: bool) -> list[Row]:
    """Draw a question's examples by the hash of its key, each question once.

    Those of the question itself are left out where examples and questions share a file, for
    reranking (``always_others``) always.
    """
    rows = read_rows(doc["demos"])
    if spec.get("popularity"):
        rows = [one for one in rows if math.log10(one["s_pop"]) < spec["popularity"]]
    if always_others or spec.get("popularity"):
        names = set(doc["asked"]) if len(rows) > 2 * doc["rows"] and always_others else {row[key]}
        rows = [one for one in rows if one[key] not in names]
    found: dict[Any, Row] = {}
    for at in _order(len(rows), _hash(str(row[key])) % 2**31):
        found.setdefault(rows[at][key], rows[at])
        if len(found) == spec["shots"]:
            break
    return list(found.values())


def _question_key(row: Row) -> str:
    return "id" if "id" in row else "question"


def _hash(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)


def _order(count: int, seed: int) -> list[int]:
    """Return the order of ``datasets.Dataset.shuffle(seed)``."""
    return np.random.default_rng(seed).permutation(count).tolist()


def _flat(answers: Any) -> list[str]:
    if isinstance(answers, str):
        return [answers]
    return [text for one in answers for text in ([one] if isinstance(one, str) else one)]
