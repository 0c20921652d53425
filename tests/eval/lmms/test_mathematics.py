"""Answers of mathematics against cases judged by hand, and the tasks' rows in published forms."""

from __future__ import annotations

from typing import Any

import pytest

from mmkv.engine.errors import InputError
from mmkv.eval.lmms.mathematics import answer_in, equal, high, low, question, reference, score
from mmkv.eval.lmms.tasks import share

SAME = [
    ("033", "33"),
    (".5", r"\frac{1}{2}"),
    ("1/2", r"\dfrac{1}{2}"),
    (r"\frac12", r"\tfrac{1}{2}"),
    (r"\frac1{10}", r"\frac{1}{10}"),
    (r"-\frac{3}{4}", r"\frac{-3}{4}"),
    (r"1\frac{1}{2}", r"\frac{3}{2}"),
    (r"-1\frac{1}{2}", r"-\frac{3}{2}"),
    (r"\log 100", "2"),
    ("x*-2", "-2x"),
    ("2^{-1}", "1/2"),
    ("2^-1", "1/2"),
    ("3-2-1", "0"),
    ("8/2/2", "2"),
    (r"12{,}345", "12345"),
    ("$18", "18"),
    (r"\$18.00", "18"),
    (r"50\%", "50"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", r"90 \text{ degrees}"),
    ("5 cm", "5"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"10\text{ cm}^2", "10"),
    (r"15\mbox{ square units}", "15"),
    ("x = 7", "7"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(3, \pi/2)", r"\left(3, \dfrac{\pi}{2}\right)"),
    (r"\{3, 1, 2\}", r"1, 2, 3"),
    (r"2\sqrt{3}+1", r"1 + 2\sqrt3"),
    (r"\sqrt{12}", r"2\sqrt{3}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\frac{x+1}{2}", "(x+1)/2"),
    ("6 - 5i", "-5i+6"),
    (r"\sqrt[3]{8}", "2"),
    ("5!", "120"),
    (r"\cos 0", "1"),
    (r"\text{Evelyn}", "Evelyn"),
    ("(C)", r"\text{C}"),
    (r"\text{even}", r"\textbf{Even}"),
    ("2516_{8}", "2516_8"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)"),
    (
        r"\begin{pmatrix} 1 \\ -\frac12 \end{pmatrix}",
        r"\begin{pmatrix} 1 \\ -1/2 \end{pmatrix}",
    ),
    (r"3\cdot 10^8", r"3 \times 10^{8}"),
    ("p - q", r"p-q."),
    ("11111111100", r"11,\! 111,\! 111,\! 100"),
    (r"1 \text{ and } 2", "1,2"),
    (r"2 \text{ or } 1", "1, 2"),
    ("x=1, x=-2", "1,-2"),
    (r"(3,\infty) \cup (-\infty, 2)", r"(-\infty,2)\cup(3,\infty)"),
    (r"\frac{\sqrt3}3", r"\frac{\sqrt{3}}{3}"),
    (r"\frac\pi3", r"\frac{\pi}{3}"),
]
OTHER = [
    ("0.333", r"\frac{1}{3}"),
    ("123456789012", "123456789013"),
    ("(1,2)", "(2,1)"),
    ("[2,3]", "(2,3)"),
    ("1,2", "1,2,3"),
    ("1,1,2", "1,2,2"),
    ("2x", "x^2"),
    (r"\pi", "3.14159265"),
    (r"\frac{\pi}{10^9}", "0"),
    ("x+1", "y+1"),
    ("-5", "5"),
    ("Evelyn", "Briana"),
    ("", "0"),
    ("1/0", r"\frac{1}{0}1"),
    ("10^{10^{10}}", "5"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ("{" * 190, "5"),
    ("(" * 190 + "5" + ")" * 190, "6"),
    ("__import__('os').system('true')", "0"),
    ("2516_8", "2516_9"),
    ("1{,}5", "15"),
]


@pytest.mark.parametrize(("given", "wanted"), SAME)
def test_answers_that_are_the_same(given: str, wanted: str) -> None:
    assert equal(given, wanted) and equal(wanted, given)


@pytest.mark.parametrize(("given", "wanted"), OTHER)
def test_answers_that_differ(given: str, wanted: str) -> None:
    assert not equal(given, wanted) and not equal(wanted, given)


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        (r"so \boxed{1}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{\left\{ 1, \{2\} \right)}", r"\left\{ 1, \{2\} \right)"),
        (r"first \boxed{3}, then \boxed{4 and the reply ends", "3"),
        (r"\boxed 7.", "7"),
        (r"\boxed{}: the answer is 4", None),
        ("The final answer is $12$", "$12$"),
        ("**Answer:** 12", "12"),
        ("The answer is 3.\nNo, the answer is **12**.", "12"),
        ("it may be 12 or 13 and", None),
        ("", None),
    ],
)
def test_the_answer_in_a_reply(reply: str, wanted: str | None) -> None:
    found = answer_in(reply)
    assert found is None if wanted is None else found is not None and found.strip() == wanted


# A row of each data set as it is published, shortened; the answer by hand.
ROWS: list[tuple[dict[str, Any], str]] = [
    (  # HuggingFaceH4/MATH-500
        {
            "problem": "Convert the point $(0,3)$ to polar coordinates.",
            "solution": r"We have that $r = 3$. Therefore, $\boxed{(3, \pi/2)}$.",
            "answer": r"\left( 3, \frac{\pi}{2} \right)",
            "subject": "Precalculus",
            "level": 2,
            "unique_id": "test/precalculus/807.json",
        },
        r"\left( 3, \frac{\pi}{2} \right)",
    ),
    ({"id": 60, "problem": "p", "solution": "s", "answer": "204", "year": "2024"}, "204"),
    ({"id": 60, "problem": "p", "solution": r"\boxed{204}", "url": "u"}, "204"),  # math-ai/aime24
    ({"ID": "2024-I-4", "Problem": "p", "Solution": "s", "Answer": 116}, "116"),
    ({"id": 0, "question": "q", "answer": "27.0", "url": "u"}, "27.0"),  # math-ai/amc23
    ({"question": "q", "answer": "Half is <<48/2=24>>24 clips.\n#### 1,072"}, "1,072"),  # GSM8K
]


@pytest.mark.parametrize(("row", "wanted"), ROWS)
def test_rows_of_the_published_forms(row: dict[str, Any], wanted: str) -> None:
    assert reference(row) == wanted
    asked = question(row, {"post_prompt": "!"})
    assert asked.endswith("!") and asked[:1] in "Cpq"


def test_rows_of_another_form_are_refused() -> None:
    with pytest.raises(InputError, match="no problem and no question, but a, b"):
        question({"a": 1, "b": 2})
    with pytest.raises(InputError, match="no answer and no boxed solution"):
        reference({"problem": "p"})


def test_pass_at_1_is_the_share_of_right_samples() -> None:
    row = {"problem": "p", "answer": "12"}
    one = score(row, [[r"\boxed{12}", r"\boxed{13}", "cut off", r"\boxed{12.0}"]])
    none = score(row, [["x", "x", r"\boxed{1}", "x"]])
    assert one["pass_at_1"] == {"right": 2, "of": 4} and one["answered"]["right"] == 3
    assert share([one["pass_at_1"], none["pass_at_1"]]) == 0.25
    # Of two questions, a quarter of all draws has each one twice.
    assert low([one["pass_at_1"], none["pass_at_1"]]) == 0.0
    assert high([one["pass_at_1"], none["pass_at_1"]]) == 0.5
    assert score(row, [r"\boxed{12}"])["pass_at_1"] == {"right": 1, "of": 1}
