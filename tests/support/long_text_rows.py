"""A few rows of each long-text benchmark, in the form and the files in which it is published."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ARTICLE = "The harbour of Oslo has 12 piers. The oldest pier is made of oak."


def qasper() -> list[Row]:
    """LongBench: the first and the last question are of one article."""

    def row(question: str, answers: list[str], context: str) -> Row:
        more = {"length": 12, "dataset": "qasper", "language": "en", "all_classes": None}
        return {"input": question, "context": context, "answers": answers, "_id": question, **more}

    return [
        row("What is the oldest pier made of?", ["oak", "of the oak"], ARTICLE),
        row("How many boats {came}?", ["none"], "No boats came."),
        row("How many piers are there?", ["12 piers"], ARTICLE),
    ]


def trec() -> list[Row]:
    """LongBench: a question to be named by its class."""
    classes = ["Food", "City", "Large City"]
    return [
        {
            "input": "Question: Where is Oslo?\nType:",
            "context": "Question: What is rice?\nType: Food",
            "answers": ["Large City"],
            "all_classes": classes,
            "length": 9,
        }
    ]


def longbench_v2() -> list[Row]:
    """LongBench-v2: a file with a list."""

    def row(number: int, answer: str, difficulty: str, length: str) -> Row:
        choices = {f"choice_{letter}": f"{number}{letter.lower()}" for letter in "ABCD"}
        about = {"domain": "Single-Document QA", "sub_domain": "Legal"}
        asked = {"question": f" Which {number}? ", "context": f" Text {number}.\n", **choices}
        kind = {"difficulty": difficulty, "length": length}
        return {"_id": str(number), **about, **kind, **asked, "answer": answer}

    return [row(1, "B", "easy", "short"), row(2, "D", "hard", "short"), row(3, "A", "hard", "long")]


def longmemeval() -> list[Row]:
    """LongMemEval_S: sessions out of order, a number as answer, a preference, an abstention."""

    def row(name: str, kind: str, answer: Any) -> Row:
        sessions = [
            [{"role": "user", "content": "Bergen is home.", "has_answer": True}],
            [
                {"role": "user", "content": "I have 3 cats."},
                {"role": "assistant", "content": "Lovely."},
            ],
        ]
        return {
            "question_id": name,
            "question_type": kind,
            "question": "How many cats do I have?",
            "answer": answer,
            "question_date": "2023/05/30 (Tue) 23:40",
            "haystack_dates": ["2023/05/21 (Sun) 02:00", "2023/05/20 (Sat) 02:21"],
            "haystack_session_ids": ["s2", "answer_s1"],
            "haystack_sessions": sessions,
            "answer_session_ids": ["answer_s1"],
        }

    return [
        row("a1", "multi-session", 3),
        row("b2", "single-session-user", "three cats"),
        row("c3_abs", "single-session-user", "The user never said so."),
        row("d4", "single-session-preference", "The user likes short answers."),
    ]


def scbench_kv() -> list[Row]:
    """SCBench: three questions about one text."""
    turns = [
        {"input": f'\nKey: "{key}"\nThe value associated with the specified key is: ', "answer": v}
        for key, v in (("k1", "v-77"), ("k2", "v-88"), ("k3", "v-99"))
    ]
    context = '{"k1": "v-77", "k2": "v-88", "k3": "v-99"}' * 20
    return [{"id": 0, "context": context, "multi_turns": turns}]


def scbench_mf() -> list[Row]:
    """SCBench: numbers to find in a list."""
    turns = [
        {
            "input": "You should answer with only one number. The largest number of the list is: ",
            "answer": 94,
        },
        {"input": "The smallest number of the list is: ", "answer": 5},
    ]
    return [{"context": "[5, 94, 31]", "multi_turns": turns}]


CODE = "def add(one, other):\n    total = one + other\n    return total\n"
OTHER = "def show(text):\n    for line in text:\n        print(line, end='')\n"


def scbench_mixed() -> list[Row]:
    """SCBench: functions and values of keys, in two rows of one repository and one of another."""

    def function(name: str, code: str) -> Row:
        task = {"task": "scbench_repoqa", "name": name}
        return {"input": f"Which one is {name}?", "answer": code, **task}

    value = {"input": "Key: k1", "answer": "v-77", "task": "scbench_kv", "name": None}
    about = {"context": CODE + OTHER, "lang": "python", "repo": "a/b"}
    return [
        {**about, "multi_turns": [function("add", CODE), value]},
        {**about, "multi_turns": [function("show", OTHER)]},
        {**about, "repo": "c/d", "multi_turns": [function("else", CODE)]},
    ]


def scbench_choice() -> list[Row]:
    """SCBench: a choice, whose right answer is written out."""
    options = ["Oslo", "Bergen", "Narvik", "Bodo"]
    turn = {"input": "Where?", "options": options, "answer": "Bergen"}
    return [{"context": "He lives in Bergen.", "multi_turns": [turn]}]


def kilt(names: Iterable[str], passages: int) -> list[Row]:
    """HELMET's RAG: a question with passages; the files of examples have the same form."""
    return [
        {
            "question": f"who is {name}",
            "answers": [name.upper(), "nobody"],
            "ctxs": [{"title": f"T{at}", "text": f"{name} {at}."} for at in range(passages)],
        }
        for name in names
    ]


def msmarco(names: Iterable[str]) -> list[Row]:
    """HELMET's reranking: labels from 0 to 3."""
    ctxs = [{"id": str(at), "text": f"text {at}", "label": at % 4} for at in (10, 11, 12)]
    return [{"qid": name, "query": f"q {name}", "ctxs": ctxs} for name in names]


def needles() -> list[Row]:
    """HELMET's recall, from RULER: two numbers for one word."""
    about = {"type_needle_v": "numbers", "query": "oak", "context": "oak: 12. oak: 34."}
    return [{"index": 0, **about, "outputs": ["12", "34"]}]


def pairs() -> list[Row]:
    """HELMET's recall, from a JSON object."""
    demos = [["a", "1"], ["b", "2"], ["c", "3"]]
    about = {"context": '{"k": "v"}', "question": "k", "answer": "v-77", "num_kvs": 1}
    return [{**about, "demos": demos}]


def banking() -> tuple[list[Row], list[Row]]:
    """HELMET's examples and questions with labels."""
    train = [{"text": f"example {at}", "label": at % 7} for at in range(21)]
    return train, [{"text": "my card is lost", "label": 2}]


def books() -> list[Row]:
    """InfiniteBench: a choice about each of four books."""
    return [
        {
            "id": at,
            "context": f"Story {at}. " + "It rains. " * 40,
            "input": f"Who in {at}?",
            "answer": [f"Ann{at}"],
            "options": ["Bob", f"Ann{at}", "Cid", "Dan"],
        }
        for at in range(4)
    ]


def write_all(folder: Path) -> Path:
    """Write all of them below a folder as --data expects it; return the folder."""
    lines = {
        "longbench/data/qasper": qasper(),
        "longbench/data/trec": trec(),
        "scbench/data/scbench_kv": scbench_kv(),
        "scbench/data/scbench_mf": scbench_mf(),
        "scbench/data/scbench_choice_eng": scbench_choice(),
        "scbench/data/scbench_repoqa_and_kv": scbench_mixed(),
        "helmet/data/kilt/nq-dev-multikilt_1000_k50_dep6": kilt(("ann", "bob", "cid"), 4),
        "helmet/data/kilt/nq-train-multikilt_1000_k3_dep6": kilt(["dan"] * 4 + ["eve", "fay"], 1),
        "helmet/data/msmarco/test_reranking_data_k50_dep3": msmarco("abc"),
        "helmet/data/msmarco/test_reranking_data_k10_dep3": msmarco("abcdefgh"),
        "helmet/infinitebench/longbook_choice_eng": books(),
        "helmet/data/ruler/niah_multivalue/validation_8192": needles(),
        "helmet/data/json_kv/test_k105_dep6": pairs(),
    }
    for name, rows in lines.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, rows in (
        ("longbench_v2/data", longbench_v2()),
        ("longmemeval/longmemeval_s", longmemeval()),
    ):
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows))
    return folder


def write_banking(folder: Path) -> None:
    """Write HELMET's labels as Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / "helmet" / "icl" / "banking77" / "data"
    path.mkdir(parents=True)
    for name, rows in zip(("train", "test"), banking(), strict=True):
        parquet.write_table(pa.Table.from_pylist(rows), path / f"{name}-00000-of-00001.parquet")
