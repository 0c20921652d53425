"""Each benchmark: rows as published to messages and scores."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.contexts import LEFT_OUT
from mmkv.eval.long_text.benchmarks import (
    MEASURES,
    LongTask,
    expanded,
    groups,
    mean,
    messages,
    no_visual,
    question,
    score,
    task_file,
    tasks,
)
from mmkv.eval.long_text.readers import READERS, drawn, read_rows, split_places, turn_values
from mmkv.eval.long_text.scores import porter_stem
from tests.support.long_text_rows import ARTICLE, CODE, OTHER, write_all, write_banking


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("data"))


def of(name: str, data: Path) -> tuple[LongTask, list[dict[str, Any]]]:
    task = tasks()[name]
    return task, task.documents(data)


def text_of(message: dict[str, Any]) -> str:
    return "".join(part["text"] for part in message["content"])


def context_of(message: dict[str, Any]) -> dict[str, Any]:
    (found,) = [part for part in message["content"] if "context" in part]
    return {"text": found["text"], **found["context"]}


def test_a_line_of_json_may_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    """LongBench's files are written without escapes; its texts hold U+2028 or U+0085."""
    rows = [{"context": f"a{mark}b"} for mark in "\u2028\x85\u2029"]
    path = tmp_path / "rows.jsonl"
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")
    assert read_rows(str(path)) == rows


def test_an_answer_without_a_list_is_no_list_of_letters() -> None:
    assert READERS["plain"]({"answers": "a b", "input": ""}, {}, {})["answers"] == ["a b"]


def test_every_row_of_the_table_can_be_used() -> None:
    for name, task in tasks().items():
        measure = task.spec["measure"]
        named = measure.values() if isinstance(measure, dict) else [measure]
        assert set(named) <= set(MEASURES) and task.spec["reader"] in READERS, name
        assert task.tokens > 0 and task.spec["files"] and task.spec["needs"], name
        assert task.spec["prompt"].count("{context}") == 1, name
    assert len(groups()["longbench"]) == 16 and len(groups()["helmet_32k"]) == 19
    assert expanded(["scbench", "mme"])[-2:] == ["scbench_repoqa_and_kv", "mme"]


@pytest.mark.parametrize(
    ("name", "reply", "values", "wanted"),
    [
        ("qa_f1_first_line", "\noak tree\nno", {"answers": ["x", "oak tree"]}, 1),
        ("rouge_l_first_line", "\na cat\nno", {"answers": ["x", "a cat"]}, 1),
        ("count", "5 or 7", {"answers": ["7"]}, 1 / 2),
        ("retrieval", "Paragraph 3 or 4", {"answers": ["Paragraph 3"]}, 1 / 2),
        ("stands_in_reply", "it is 94.", {"answer": 94}, 1),
        ("stands_in_reply", "9", {"answer": 94}, 0),
        ("any_stands_in_reply", "b", {"answer": "xB"}, 1),
        ("whole_stands_in_reply", " It is OSLO, yes", {"answer": " Oslo"}, 1),
        ("whole_stands_in_reply", "os", {"answer": "Oslo"}, 0),
        ("chinese_f1", "北京", {"answer": ["上海", "北京"]}, 1),
        ("same_number", "94", {"answer": [94, 5]}, 1),
        ("first_number", "12, 13", {"answer": [12, 13]}, 1),
        ("first_number", "13, 12", {"answer": 12}, 0),
        ("rouge_lsum", "a b\nc", {"answer": "a\nc d e"}, 4 / 7),
        ("share_found", "a", {"answer": ["a", "b"]}, 1 / 2),
        ("share_found", "a", {"answer": "b", "answers": ["a"]}, 1),
        ("has_answer", "Answer: Oslo\nBergen", {"answers": ["Bergen"]}, 1),
        ("same_label", "label: 7\nlabel: 8", {"answers": ["7"]}, 1),
        ("option", "I say b. bob", {"answers": ["B", "B. Bob"]}, 1),
        ("option", "Answer: B\nC", {"answers": ["B", "B. Bob"]}, 1),
    ],
)
def test_a_measure_reads_what_its_benchmark_does(
    name: str, reply: str, values: dict[str, Any], wanted: float
) -> None:
    assert MEASURES[name](reply, values) == pytest.approx(wanted)


def test_longbench(data: Path) -> None:
    """Questions of one article stand together, and it is read once; the rest is read whole."""
    task, docs = of("longbench_qasper", data)
    assert [(doc["row"], doc["shared"]) for doc in docs] == [(0, True), (2, True), (1, False)]
    (asked,) = task.messages(docs[1], 0, [])
    assert context_of(asked)["text"] == ARTICLE and context_of(asked)["shared"]
    text = text_of(asked)
    assert text.startswith("You are given a scientific article and a question.")
    assert f"Article: {ARTICLE}\n\n Answer the question" in text
    assert text.endswith("Question: How many piers are there?\n\nAnswer:")
    (alone,) = task.messages(docs[2], 0, [])
    assert context_of(alone)["text"] == text_of(alone) and context_of(alone)["cut"] == "middle"
    assert "How many boats {came}?" in text_of(alone)
    # The best answer counts: "of oak" has one of two words of "of the oak", which loses "the".
    assert task.score(docs[0], ["It is of oak"]) == {"qa_f1": [2 * 2 / (4 + 2)]}
    assert task.tokens == 128 and not task.in_rounds

    task, docs = of("longbench_trec", data)
    (asked,) = task.messages(docs[0], 0, [])
    assert asked["raw"] and text_of(asked).endswith("Type: Food\nQuestion: Where is Oslo?\nType:")
    assert task.score(docs[0], ["\nLarge City\nQuestion: Food"]) == {"classification": [1]}


def test_longbench_v2(data: Path) -> None:
    task, docs = of("longbench_v2", data)
    (asked,) = task.messages(docs[0], 0, [])
    assert "<text>\nText 1.\n</text>\n\n" in text_of(asked)
    assert "question: Which 1?\nChoices:\n(A) 1a\n(B) 1b\n(C) 1c\n(D) 1d\n\nFormat" in text_of(
        asked
    )
    right = ["The correct answer is (B)", "The correct answer is (A)", "I say A"]
    found = [task.score(doc, [reply]) for doc, reply in zip(docs, right, strict=True)]
    assert found[0] == {"letter": [1], "easy": [1], "short": [1]}
    assert [one["letter"] for one in found[1:]] == [[0], [0]]
    assert task.metrics(docs) == ["letter", "easy", "hard", "long", "short"]
    whole, docs = of("longbench_v2_whole", data)
    assert context_of(whole.messages(docs[0], 0, [])[0])["cut"] == "leave"
    assert whole.score(docs[0], [f"{LEFT_OUT} 9 tokens]"]) == {}
    assert task_file("longbench_v2", data, data, str)["generation_kwargs"]["temperature"] == 0.1


def test_longbench_v2_with_thought(data: Path) -> None:
    """The thought first; then the answer, without the text."""
    task, docs = of("longbench_v2_cot", data)
    first = messages(docs[0])
    assert text_of(first[0]).endswith("Let’s think step by step:")
    then, over, replies, _ = messages(docs[0], None, 1, [" So B. "], None)
    assert not over and replies == [" So B. "] and then[0]["max_new_tokens"] == 128
    assert "omitted here" in text_of(then[0]) and "Text 1." not in text_of(then[0])
    assert "step by step: So B.\n\nBased on the above" in text_of(then[0])
    assert messages(docs[0], None, 2, ["", ""], None)[:2] == (None, True)
    assert score(docs[0], [["thought", "The correct answer is B"]])["letter"] == [1]
    assert task.tokens == 1024


def test_longmemeval(data: Path) -> None:
    """Sessions by date, as JSON; a number is an answer; two kinds need a judge."""
    task, docs = of("longmemeval_s", data)
    (asked,) = task.messages(docs[0], 0, [])
    history = context_of(asked)
    said = json.dumps([{"role": "user", "content": "Bergen is home."}])
    assert history["text"].endswith(
        f"### Session 2:\nSession Date: 2023/05/21 (Sun) 02:00\nSession Content:\n\n{said}\n"
    )
    assert "has_answer" not in history["text"]
    assert history["shared"] and (history["cut"], history["room"]) == ("end", 1000)
    assert text_of(asked).endswith(
        "\n\nCurrent Date: 2023/05/30 (Tue) 23:40\nQuestion: How many cats do I have?\nAnswer:"
    )
    found = [task.score(doc, [text]) for doc, text in zip(docs, ["3.", "4", "?", ""], strict=True)]
    assert found[0] == {"answer_match": [1], "multi-session": [1], "answered": [1]}
    assert found[1]["single-session-user"] == [0]
    assert found[2:] == [{"answered": [1]}, {"answered": [0]}]
    assert mean([[1, 0, 0], *(one["answer_match"] for one in found[:2])]) == 2 / 5


def test_scbench_asks_each_question_behind_the_context_alone(data: Path) -> None:
    task, docs = of("scbench_kv", data)
    asked = [task.messages(docs[0], at, ["no"] * at) for at in range(task.rounds(docs[0]))]
    assert len(asked) == 3 and all(len(one) == 1 for one in asked)
    assert len({context_of(one[0])["text"] for one in asked}) == 1
    assert context_of(asked[0][0])["shared"]
    assert context_of(asked[0][0])["room"] == 1000 + 2 * 150  # for the replies in between
    assert text_of(asked[1][0]).startswith("Extract the value corresponding to the specified key")
    assert text_of(asked[1][0]).endswith(
        '}\nKey: "k2"\nThe value associated with the specified key is: '
    )
    found = score(docs[0], [["v-77", "it is v-88.", "v-77"]])
    assert found == {
        "stands_in_reply": [1, 1, 0],
        "turn_1": [1],
        "turn_2": [1],
        "turn_3": [0],
    }


def test_scbench_in_turns_has_the_right_answers_before_a_question(data: Path) -> None:
    task, docs = of("scbench_kv_turns", data)
    first, answer, second = task.messages(docs[0], 1, ["wrong"])
    assert text_of(first).endswith(
        '}\n\n\nKey: "k1"\nThe value associated with the specified key is: '
    )
    assert (answer["role"], text_of(answer)) == ("assistant", "v-77")
    assert text_of(second).startswith('\nKey: "k2"')
    task, docs = of("scbench_mf_turns", data)
    first, answer, second = task.messages(docs[0], 1, ["wrong"])
    assert text_of(first).startswith(
        "What is the largest number of the list?\n\n[5, 94, 31]\n\nYou"
    )
    assert text_of(answer) == "94"
    assert text_of(second).startswith("What is the smallest number of the list?\n\nThe smallest")
    assert task.score(docs[0], ["94.", "94"])["same_number"] == [1, 0]


def test_scbench_scores_functions_among_those_of_the_repository(data: Path) -> None:
    task, docs = of("scbench_repoqa_and_kv", data)
    lengths = [task.messages(docs[0], at, [])[0]["max_new_tokens"] for at in range(2)]
    assert lengths == [1024, 80]
    good = task.score(docs[0], [f"```python\n{CODE}```", "v-77"])
    assert (good["function_found"], good["stands_in_reply"]) == ([1], [1])
    # The other function of the repository, which stands in another row.
    assert task.score(docs[0], [f"```\n{OTHER}```", "v"])["function_found"] == [0]
    row = task.row(docs[0])
    asked = turn_values(row, row["multi_turns"][0], docs[0])["functions"]
    assert asked == [("add", CODE), ("show", OTHER)]
    task, docs = of("scbench_choice_eng", data)
    assert task.score(docs[0], ["B"])["choice"] == [1]


def test_helmet_draws_questions_and_examples_as_published(data: Path) -> None:
    """The order of Dataset.shuffle, by numpy's generator, and of random.sample."""
    task, docs = of("helmet_nq_8k", data)
    (asked,) = task.messages(docs[0], 0, [])
    assert asked["raw"] and asked["stop"] == ["\n"] and asked["begin"] == "\nAnswer:"
    text = text_of(asked)
    assert text.endswith("Document (Title: T3): ann 3.\n\nQuestion: who is ann")
    # Two examples, of two questions; "dan" stands in the file four times.
    for doc in docs:
        found = re.findall(r"Question: who is (\w+)", text_of(task.messages(doc, 0, [])[0]))
        assert len(found) == len(set(found)) == 3
    rare = [{"question": str(at), "s_pop": 10**at} for at in range(1, 6)]
    assert drawn(rare, {"samples": 9, "reader": "rag", "popularity": 3}) == [0, 1]
    assert task.score(docs[0], [" it is Ann\n"]) == {"has_answer": [1]}
    assert context_of(asked)["cut"] == "end"

    task, docs = of("helmet_infbench_choice_8k", data)
    assert [doc["row"] for doc in docs] == np.random.default_rng(42).permutation(4).tolist()
    (asked,) = task.messages(docs[0], 0, [])
    assert context_of(asked)["most"] == 8192 - 200 - 10
    assert text_of(asked).count("[story text]") == 2
    for doc in docs:  # the examples are of other books
        assert text_of(task.messages(doc, 0, [])[0]).count(f"Who in {doc['row']}?") == 1
    scored = [task.score(docs[0], [one])["option"] for one in ("B", "Answer: b", "A", "b. ann3")]
    assert scored == [[1], [1], [0], [1]]
    rest, asked_of = split_places(25, train=True), split_places(25, train=False)
    assert len(asked_of) == 3 and sorted(rest + asked_of) == list(range(25))


def test_helmet_ranks_and_labels(data: Path) -> None:
    task, docs = of("helmet_msmarco_8k", data)
    (asked,) = task.messages(docs[0], 0, [])
    # Examples are of other questions than those that are asked.
    assert not any(f"Query: q {name}\nRanking" in text_of(asked) for name in "abc")
    assert text_of(asked).count("Ranking: 11 > 10 > 12") == 2
    # Of a file with few others, those are examples, too, but for the question itself.
    few = READERS["rerank"](task.row(docs[0]), {"shots": 99}, docs[0] | {"rows": 99})["demos"]
    names = {row["qid"] for row in read_rows(docs[0]["demos"])} - {task.row(docs[0])["qid"]}
    assert {*re.findall(r"Query: q (\w+)\n", few)} == names > {*docs[0]["asked"]} & names
    assert task.score(docs[0], [" 11 > 10 > 12"]) == {"ndcg_at_10": [1]}

    pytest.importorskip("pyarrow")
    write_banking(data)
    task, docs = of("helmet_banking77_8k", data)
    (asked,) = task.messages(docs[0], 0, [])
    shown = [part.split("\nlabel: ") for part in context_of(asked)["text"].split("\n\n")]
    assert len(shown) == 360
    # Each text of one label has the same number; the numbers are drawn by the question's hash.
    names = list(range(77))
    drawn_by = int(hashlib.sha256(b"my card is lost").hexdigest(), 16)
    random.Random((drawn_by + 42) % 2**31).shuffle(names)
    numbers = {int(text.split()[1]) % 7: number for text, number in shown}
    assert {(int(text.split()[1]) % 7, number) for text, number in shown} == set(numbers.items())
    assert [numbers[label] for label in range(7)] == [str(name) for name in names[:7]]
    assert task.score(docs[0], [f" {numbers[2]}\n"]) == {"same_label": [1]}
    assert task.score(docs[0], [f" x\nlabel: {numbers[2]}"]) == {"same_label": [0]}


def test_helmet_recalls(data: Path) -> None:
    task, docs = of("helmet_niah_mv_8k", data)
    (asked,) = task.messages(docs[0], 0, [])
    assert text_of(asked).endswith("numbers for oak mentioned in the provided text?")
    assert asked["begin"].endswith("numbers for oak mentioned in the provided text are")
    assert task.score(docs[0], [" 34 and 5"]) == {"share_found": [0.5]}
    task, docs = of("helmet_json_kv_8k", data)
    (asked,) = task.messages(docs[0], 0, [])
    demos = "Key: a\nCorresponding value: 1\n\nKey: b\nCorresponding value: 2\n\n"
    assert text_of(asked).endswith(f"JSON object below.\n\n{demos}Key: k")
    assert task.score(docs[0], [" V-77."]) == {"has_answer": [1]}


def test_helmet_reads_stories_and_lawsuits(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"text": "a wolf"}]
    row = {"document": {"text": "Once."}, "question": {"text": "Who?"}, "answers": answers}
    made = READERS["story"](row, {}, {})
    assert (made["context"], made["question"], made["answers"]) == ("Once.", "Who?", ["a wolf"])
    sued = {"sources": ["one", "two"], "summary/short": "He sued."}
    made = READERS["lawsuit"](sued, {}, {})
    assert (made["context"], made["answers"]) == ("one\n\ntwo", ["He sued."])
    assert drawn([sued, {**sued, "summary/short": None}], {"samples": 9, "reader": "lawsuit"}) == [
        0
    ]
    file, asked = data / "books.jsonl", ["q", "Why?", ""]
    rows = [{"id": at, "context": "c", "input": q, "answer": ["a "]} for at, q in enumerate(asked)]
    file.write_text("\n".join(map(json.dumps, rows)))
    demos = READERS["book"](rows[0], {"shots": 2}, {"file": str(file)})["demos"].split("\n\n")
    assert {"[story text]\nQuestion: Why?\nAnswer: a ", "[story text]\nSummary: a"} < {*demos}
    # Their measures need nltk's stemmer, which is said before lmms-eval starts.
    for name in ("nltk", "nltk.stem", "nltk.stem.porter"):
        monkeypatch.setitem(sys.modules, name, None)
    porter_stem.cache_clear()
    file = data / "helmet" / "infinitebench" / "longbook_qa_eng.jsonl"
    file.write_text('{"id": 1, "context": "c", "input": "q", "answer": ["a"], "options": []}\n')
    with pytest.raises(InputError, match="needs nltk; run pip install nltk"):
        task_file("helmet_infbench_qa_8k", data, data, str)
    monkeypatch.undo()
    porter_stem.cache_clear()


def test_what_is_wrong_with_the_data_is_named(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"longbench_qasper has no data: no longbench/data/qasper"):
        of("longbench_qasper", tmp_path)
    file = tmp_path / "longbench" / "qasper.jsonl"
    file.parent.mkdir()
    file.write_text('{"input": "a", "context": "b", "answers": []}\n')
    with pytest.raises(InputError, match=r"qasper.jsonl, row 1 has no all_classes"):
        of("longbench_qasper", tmp_path)
    (tmp_path / "longbench" / "trec.jsonl").write_text("{")
    with pytest.raises(InputError, match=r"trec.jsonl cannot be read .*; get the file again"):
        of("longbench_trec", tmp_path)
    _, docs = of("longbench_trec", data)
    with pytest.raises(InputError, match="leave --force-simple out"):
        no_visual(docs[0])
    assert question(docs[0]) == "trec.jsonl, row 1"
