"""LongProc's rules, on rows of the published form with replies judged by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mmkv.engine.errors import InputError
from mmkv.eval.lmms import longproc, tasks


def row(reference: str = "", **about: Any) -> dict[str, Any]:
    made = {"input_prompt": "p", "reference_output": reference, "metadata": json.dumps(about)}
    return {"id": "x_0", **made}


ROUTE = "From Leeds, take a bus to London.\nFrom London, take a train to Kitchener."
TRACE = (
    "Ann's belief on the fuse:\n"
    "- Step 0: (initial state) {Ann location: hall; fuse location: patio's ledge; "
    "Ann's belief on fuse: None}\n"
    "- Step 1: (Ann location changed) {Ann location: patio; Ann's belief on fuse: patio's ledge}\n"
    "Final Answer: the patio's ledge"
)
PLAN = (
    "**Day 1-3:** Arriving in Rome and visit Rome for 3 days.\n"
    "**Day 3:** Fly from Rome to Oslo.\n"
    "**Day 3-7:** Visit Oslo for 5 days.\n"
    "**Day 7:** Fly from Oslo to Riga.\n"
    "**Day 7-8:** Visit Riga for 2 days."
)
TRIP = {"ground_truth_cities": "Rome**Oslo**Riga", "ground_truth_durations": "3**5**2"}
SOLUTION = "40 - 19 = 21\n21 - 7 = 14\n14 + 23 = 37"
SUM = {"nums": [40, 19, 23, 7], "target": 37}
NEGATIVE, BELOW = {"nums": [5, 7, 4, 3], "target": 5}, "5 - 7 = -2"


def solved(text: str) -> str:
    return f"# Search Procedure\n<Solution>\n{text}\n</Solution>"


COUNTED = [
    # As published, a sum alone may have a number below 0.
    ([5, 7, 4, 3], 9, f"{BELOW}\n4 - -2 = 6\n6 + 3 = 9", 0),
    ([5, 7, 4, 3], -5, f"{BELOW}\n-2 * 4 = -8\n-8 + 3 = -5", 0),
    ([8, 2, 3, 1], 7, "8 / 2 = 4\n4 * 1 = 4\n4 + 3 = 7", 1),
    ([7, 2, 3, 1], 7, "7 / 2 = 3\n3 + 3 = 6\n6 + 1 = 7", 0),
]
CASES = [
    ("path_traversal", row(ROUTE), f"so\n<Route>\n{ROUTE}\n</Route>\n</Route>", (1, 1)),
    ("path_traversal", row(ROUTE), f"<Route>{ROUTE.replace('bus', 'ferry')}</Route>", (0, 1)),
    ("path_traversal", row(ROUTE), f"<Route>{ROUTE}", (0, 0)),
    ("tom_tracking", row(TRACE), TRACE, (1, 1)),
    # Articles, case and signs do not matter; an earlier trace, as in a draft, neither.
    ("tom_tracking", row(TRACE), f"- Step 0: x\n{TRACE.replace('patio', 'the Patio')}", (1, 1)),
    ("tom_tracking", row(TRACE), TRACE.replace("ledge}", "table}"), (0, 1)),
    ("tom_tracking", row(TRACE), "\n".join(TRACE.split("\n")[:2]), (0, 1)),
    ("tom_tracking", row(TRACE), "the patio's ledge", (0, 0)),
    ("countdown", row(**SUM), solved(SOLUTION), (1, 1)),
    ("countdown", row(**SUM), solved(SOLUTION.replace("37", "38")), (0, 1)),
    # A number twice; one too few; no equation.
    ("countdown", row(**SUM), solved("40 - 7 = 33\n33 - 7 = 26\n26 + 11 = 37"), (0, 1)),
    ("countdown", row(**SUM), solved("40 - 19 = 21\n21 + 16 = 37"), (0, 1)),
    ("countdown", row(**SUM), solved("open('x')\n1 + 1 = 2\n1 / 0 = 1"), (0, 1)),
    ("countdown", row(**SUM), SOLUTION, (0, 0)),
    ("countdown", row(nums=[40, 19, 23, 7, 5], target=37), solved(SOLUTION), (0, 1)),  # 5 is left
    ("countdown", row(**NEGATIVE), solved(f"{BELOW}\n-2 + 4 = 2\n2 + 3 = 5"), (1, 1)),
    *(("countdown", row(nums=n, target=t), solved(text), (ok, 1)) for n, t, text, ok in COUNTED),
    ("travel_planning", row(**TRIP), f"<Plan>\n{PLAN}\n</Plan>", (1, 1)),
    ("travel_planning", row(**TRIP), f"<Plan>{PLAN.replace('Riga', 'Bern')}</Plan>", (0, 1)),
    ("travel_planning", row(**TRIP), f"<Plan>{PLAN.replace('7-8', '7-9')}</Plan>", (0, 1)),
    ("travel_planning", row(**TRIP), f"<Plan>{PLAN[:90]}</Plan>", (0, 1)),
    ("travel_planning", row(**TRIP), f"<Plan>{PLAN}\n**Day 8:** from Riga to Bern.</Plan>", (1, 1)),
    ("travel_planning", row(**TRIP), "<Plan></Plan>", (0, 1)),
    ("travel_planning", row(**TRIP), PLAN, (0, 0)),
]


@pytest.mark.parametrize(("task", "doc", "reply", "wanted"), CASES)
def test_replies_judged_by_hand(
    task: str, doc: dict[str, Any], reply: str, wanted: tuple[int, int]
) -> None:
    found = getattr(longproc, f"score_{task}")(doc, [reply])
    assert (found["accuracy"], found["extracted"]) == wanted


TABLE = "name\tyear\tprice\nThe Duck\t1989\t$5.00\nA Goose\t1990\t6\nSwan\t1991\t7\nCoot\t1992\t8"


@pytest.mark.parametrize(
    ("reply", "precision", "recall"),
    [
        (f"here:\n```tsv\n{TABLE}\n```", 1, 1),
        (f"```tsv\n{TABLE}", 1, 1),  # cut off before the fence
        ("```tsv\nNAME\tyear\tprice\ngoose\t1990\t6\nduck\t1989\t500\n```", 1, 1 / 2),  # any order
        ("n\ty\tp\nSwan\t1991\t7\nSwan\t1991\t9\nCoot\t1992\t8\nHeron", 2 / 3, 1 / 2),
        ("n\ty\tp\nSwan\t1991\t7\nSwan\t1991\t7\nThat\tis\tall\t.", 1, 1 / 4),  # twice, words
        ("n\ty\tp\nSwan\t1991\nCoot\t1992\t8", 1 / 2, 1 / 4),  # a broken row in between
        ("n\ty\nSwan\t1991\nCoot\t1992", 0, 0),  # a column is missing
        ("no table", 0, 0),
        ("", 0, 0),
    ],
)
def test_rows_of_a_table_are_counted(reply: str, precision: float, recall: float) -> None:
    found = longproc.score_html_to_tsv(row(TABLE), [reply])
    assert found["precision"] == pytest.approx(precision)
    assert found["recall"] == pytest.approx(recall)
    f1 = 2 * precision * recall / (precision + recall) if precision else 0
    assert found["f1"] == pytest.approx(f1)


def test_rows_of_another_form_are_refused() -> None:
    with pytest.raises(InputError, match="a row of LongProc has no input_prompt, but problem"):
        longproc.prompt({"problem": "p"})
    with pytest.raises(InputError, match="a row of LongProc has no metadata, but input_prompt"):
        longproc.score_countdown({"input_prompt": "p", "metadata": None}, ["x"])


def test_every_set_has_its_rule_and_the_published_length() -> None:
    names = [name for name in tasks.local_names() if name.startswith("longproc_")]
    assert len(names) == 14
    for name in names:
        made, size = tasks.local_form(name), name.rpartition("_")[2]
        task = name.removeprefix("longproc_").removesuffix(f"_{size}")
        assert made["process_results"].endswith(f".score_{task}")
        assert hasattr(longproc, f"score_{task}")
        lengths = {"0.5k": 1024, "2k": 3072, "8k": 10240}
        assert made["generation_kwargs"]["max_new_tokens"] == lengths[size]
        metrics = {one["metric"] for one in made["metric_list"]}
        scored = {"f1", "precision", "recall"} if task == "html_to_tsv" else {"accuracy"}
        assert metrics == scored | {"extracted"}
