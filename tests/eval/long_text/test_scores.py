"""The measures, by values of the published scorers or worked out by hand from their definitions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mmkv.engine.errors import InputError
from mmkv.eval.long_text import scores

LABELS, MANY, THIRD = {"0": -2, "1": 3, "2": 1}, {"3": 1, "1": 3, "2": 2}, 1 / math.log2(3)


@pytest.mark.parametrize(
    ("measure", "reply", "more", "wanted"),
    [
        # "the" and the full stop go; 2 of 3 and 2 of 2 words are common.
        (scores.qa_f1, "The red oak tree.", ("oak tree",), 2 * 2 / (3 + 2)),
        (scores.qa_f1, "", ("oak",), 0),
        (scores.chinese_f1, "北京。 A", ("北京市a",), 2 * 3 / (3 + 4)),
        (scores.has_answer, "It is the Oak!", ("an oak",), 1),
        (scores.is_same, "It is oak", ("oak",), 0),
        # Both classes are named; the part of the right one's name does not count.
        (scores.classification, "Large City", ("Large City", ["City", "Large City"]), 1),
        (scores.classification, "City or Food", ("City", ["Food", "City"]), 1 / 2),
        # City and Large are parts of the right one; as published, the second stays in the list.
        (
            scores.classification,
            "Large City",
            ("Large City", ["City", "Large", "Large City"]),
            1 / 2,
        ),
        (scores.classification, "City", ("Food", ["Food", "City"]), 0),
        (scores.number_share, "5, no: 7 or 7", ("7",), 2 / 3),
        (scores.number_share, "none", ("7",), 0),
        (scores.paragraph_share, "Paragraph 3", ("Paragraph 3",), 1),
        # The first line that is no fence and no comment; 2 * 4 / 9 characters match.
        (scores.code_similarity, "\n```py\n# sum\na = b\nc", ("a= b",), 0.89),
        (scores.code_similarity, "# only", ("a",), 0),
        (scores.code_similarity, "# only", ("",), 1),
        (scores.code_similarity, "tide", ("diet",), 0.25),  # and 0.5 the other way round
        # rouge 1.0.1. Words once each, in either order; "the cat" is common.
        (scores.rouge_l, "the cat sat", ("the cat ran",), 2 / 3),
        (scores.rouge_l, "a a b", ("a b c c",), 0.8),
        (scores.rouge_l, "", ("the cat",), 0),
        # Sentences apart: the order of the two does not matter. Of ties the other one counts.
        (scores.rouge_l, "b c.a x", ("a x.b c",), 1),
        (scores.rouge_l, "b a.a", ("a b",), 1),
        (scores.rouge_l, "b", ("a..b",), 2 / 3),
        (scores.choice, "B. Oslo", ("Bergen", "B"), 1),
        (scores.choice, "the answer is: Bergen", ("Bergen", "B"), 1),
        (scores.choice, "I think it is C or so", ("Bergen", "B"), 0),
        (scores.choice, "best is B", ("Bergen", "B"), 1),
        (scores.choice, "not A: my option is B", ("Bergen", "B"), 1),
        (scores.choice, "", ("Bergen", "B"), 0),
        (scores.same_number, "about 94.7", (94,), 1),
        (scores.same_number, "about 94.7", (94.0,), 0),
        (scores.share_found, "VAR a and b", (["var A", "C"],), 1 / 2),
        # sentence_bleu of nltk 3.10.4 with its method4: replies that are short, long, one word,
        # and with one, two and three lengths without a match.
        (scores.bleu, "a b", ("a b c d",), 0.0814443103),
        (scores.bleu, "a b c d e", ("a b c",), 0.2995098144),
        (scores.bleu, "a", ("a b",), math.exp(-1)),
        (scores.bleu, "a a a b", ("a b c c",), 0.1682189500),
        (scores.bleu, "a x y z", ("a b c d e",), 0.0475327198),
        (scores.bleu, "x", ("a",), 0),
        # Ideal gains 3, 1; they come in the other order. A label below 0 gains nothing.
        (scores.ndcg, ["2", "1"], (LABELS,), (1 + 3 * THIRD) / (3 + THIRD)),
        (
            scores.ndcg,
            ["0", "1", "none", "2"],
            (LABELS,),
            (3 * THIRD + 1 / 2.321928095) / (3 + THIRD),
        ),
        (scores.ndcg, ["0"], ({"0": 0},), 0),
        # Of more that are relevant only the best two count, and only the first two places.
        (scores.ndcg, ["3", "1", "2"], (MANY, 2), (1 + 3 * THIRD) / (3 + 2 * THIRD)),
    ],
)
def test_a_measure_is_as_published(
    measure: Callable[..., float], reply: Any, more: tuple[Any, ...], wanted: float
) -> None:
    assert measure(reply, *more) == pytest.approx(wanted, abs=1e-7)


def test_rouge_of_whole_texts_and_line_by_line() -> None:
    # Longest common subsequence "cat the mat": 3 of 4 and 3 of 5 words.
    assert scores.rouge_longest("cat on the mat", "the cat sat the mat") == pytest.approx(
        (3 / 4, 3 / 5, 2 * 3 / 9)
    )
    # rouge_score 0.1.2: lines in another order match each; a word counts as often as both have it,
    # in whatever line; of ties the reply's later word.
    for reply, answer, wanted in (
        ("b c\na a", "a x\nb c", (3 / 4, 3 / 4, 3 / 4)),
        ("a a a\nb", "a x\na a c", (3 / 4, 3 / 5, 2 / 3)),
        ("a b", "a b\na b", (1, 1 / 2, 2 / 3)),
        ("a b\na b", "a b", (1 / 2, 1, 2 / 3)),
        ("c b\nc", "c c", (2 / 3, 1, 4 / 5)),
        ("", "a", (0, 0, 0)),
    ):
        assert scores.rouge_summary(reply, answer) == pytest.approx(wanted)
    stem = {"running": "run"}.get
    found = scores.rouge_longest("run", "Running", lambda word: stem(word, word))
    assert found.f1 == 1 and scores.rouge_longest("run", "Running").f1 == 0


def test_words_of_more_than_three_letters_are_stemmed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(PorterStemmer=lambda: SimpleNamespace(stem=lambda word: word[:-1]))
    for name in ("nltk", "nltk.stem", "nltk.stem.porter"):
        monkeypatch.setitem(sys.modules, name, made)
    scores.porter_stem.cache_clear()
    assert scores.words("The cats ran, 5000!", scores.porter_stem()) == ["the", "cat", "ran", "500"]
    scores.porter_stem.cache_clear()


def test_what_is_read_out_of_a_reply() -> None:
    assert scores.chosen_letter("**The correct answer is (B)**, not A") == "B"
    assert scores.chosen_letter("The correct answer is C.") == "C"
    assert scores.chosen_letter("B") is None
    assert scores.after_prefix("Well.\nanswer: Oslo \nmore") == "Oslo"
    assert scores.after_prefix("Oslo\nmore") == "Oslo"
    assert scores.after_prefix("Answer: answer: Oslo") == "Oslo"
    assert scores.ranking("Ranking: [ID: 3] > ID1 > 3 > 12, or 4 > 5") == ["3", "1", "12"]
    assert scores.ranking("none") == []
    assert scores.first_number("no. 12, 13") == "12"
    code = "def f():\n    return 1"
    assert scores.code_block(f"Here:\n```python\n{code}\n```\nand") == f"{code}\n"
    both = [("f", f"{code} + 1"), ("g", "def g():\n    return 2")]
    assert scores.function_found(f"```\n{code} + 1\n```", "f", both) == 1
    assert scores.function_found(f"```\n{code} + 1\n```", "g", both) == 0
    # Too short for a BLEU of 0.8: exp(1 - 200 / 162); the other way round it is 0.809.
    long = [str(word) for word in range(200)]
    assert scores.function_found(" ".join(long[:162]), "f", [("f", " ".join(long))]) == 0
    with pytest.raises(InputError, match="names no paragraph"):
        scores.paragraph_share("3", "third")
