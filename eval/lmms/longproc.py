"""LongProc's rules: which replies of its tasks are right (github.com/princeton-pli/LongProc).

Rows are those of PrincetonPLI/LongProc: ``input_prompt``, ``reference_output``, and ``metadata``, a
JSON text or an object. A reply marks its result, by a tag or a fence; ``extracted`` says whether it
did. All but HTML to TSV are right as a whole or wrong. Nothing of a reply is run.
"""

from __future__ import annotations

import csv
import json
import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mmkv.engine.errors import InputError

_PUNCTUATION = str.maketrans("", "", string.punctuation + "’")


def prompt(doc: dict[str, Any], kwargs: dict[str, Any] | None = None) -> str:
    """Return the prompt as published. Raises InputError."""
    return _column(doc, "input_prompt")


def reference(doc: dict[str, Any]) -> str:
    """Return the reference output. Raises InputError."""
    return _column(doc, "reference_output")


def _column(doc: dict[str, Any], name: str) -> str:
    text = doc.get(name)
    if not isinstance(text, str):
        raise InputError(f"a row of LongProc has no {name}, but {', '.join(doc)}")
    return text


def _about(doc: dict[str, Any]) -> dict[str, Any]:
    given = doc.get("metadata")
    about = json.loads(given) if isinstance(given, str) else given
    if not isinstance(about, dict):
        raise InputError(f"a row of LongProc has no metadata, but {', '.join(doc)}")
    return about


def tagged(reply: str, tag: str) -> str | None:
    """Return what stands between the first opening and the first closing tag, None without."""
    start, end = reply.find(f"<{tag}>"), reply.find(f"</{tag}>")
    return None if start < 0 or end < 0 else reply[start + len(tag) + 2 : end].strip()


def _scores(result: object, right: bool) -> dict[str, float]:
    return {"accuracy": float(right), "extracted": float(result is not None)}


def score_path_traversal(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 where the route equals the reference."""
    route = tagged(results[0], "Route")
    return _scores(route, route == reference(doc).strip())


# --- Beliefs --------------------------------------------------------------------------------------

_NO_MATTER = re.compile(
    r"\b(?:a|an|the|on|in|at|step|thinks?|believes?|is|are|of|location|knows?|belief)\b"
)


def score_tom_tracking(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 where every step of the trace equals that of the reference, words alone."""
    steps = beliefs(results[0])
    return _scores(steps or None, steps == beliefs(reference(doc)))


def beliefs(text: str) -> list[str]:
    """Return the steps of a text's last trace, without the words and signs that do not matter."""
    listed = "\n".join(line for line in text.splitlines() if line.strip().startswith("-"))
    steps = []
    for line in listed[max(listed.rfind("- Step 0:"), 0) :].strip().split("\n"):
        if re.match(r"- Step \d+:", line):
            words = line[1:].lower().translate(_PUNCTUATION)
            steps.append(" ".join(_NO_MATTER.sub(" ", words).split()))
    return steps


# --- Countdown ------------------------------------------------------------------------------------

_EQUATION = re.compile(r"\s*(-?\d{1,9})\s*([-+*/])\s*(-?\d{1,9})\s*=\s*(-?\d{1,18})\s*")


def score_countdown(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 where three equations make the target of the four numbers, each used once."""
    solution, about = tagged(results[0], "Solution"), _about(doc)
    right = solution is not None and reaches(solution, about["nums"], about["target"])
    return _scores(solution, right)


def reaches(solution: str, numbers: Sequence[int], target: int) -> bool:
    """Whether the equations, one a line, use up the numbers and end with the target."""
    lines, left = solution.split("\n"), Counter(numbers)
    if len(lines) != 3:
        return False
    for line in lines:
        found = _EQUATION.fullmatch(line)
        if found is None:
            return False
        first, sign, second, result = int(found[1]), found[2], int(found[3]), int(found[4])
        if sign != "+" and min(first, second) < 0:
            return False  # not read by the published rule, either
        right = {
            "+": first + second == result,
            "-": first - second == result,
            "*": first * second == result,
            "/": second != 0 and second * result == first,
        }[sign]
        left[first] -= 1
        left[second] -= 1
        if not right or min(left.values()) < 0:
            return False
        left[result] += 1
    return left[target] == 1 and sum(left.values()) == 1


# --- Travel planning ------------------------------------------------------------------------------

_FLIGHT = re.compile(r".*Day (\d+).*from (\w+) to (\w+)")
_STAY = re.compile(r"(\d+)-(\d+)")


def score_travel_planning(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return 1 where the plan has the reference's cities and lengths of stay, in order."""
    plan, about = tagged(results[0], "Plan"), _about(doc)
    cities = [city for city in about["ground_truth_cities"].split("**") if city]
    days = [int(length) for length in about["ground_truth_durations"].split("**") if length]
    wanted = list(zip(cities, days, strict=True))
    return _scores(plan, plan is not None and stays(plan)[: len(wanted)] == wanted)


def stays(plan: str) -> list[tuple[str, int]]:
    """Return a plan's cities and how many days each is visited; days of flights count twice."""
    lines = plan.split("\n")
    ends = [int(found[2]) for line in lines if (found := _STAY.search(line))]
    flights = [found.groups() for line in lines if (found := _FLIGHT.search(line))]
    if not ends or not flights:
        return []
    days = [1, *(int(day) for day, _, _ in flights), ends[-1]]
    cities = [flights[0][1], *(city for _, _, city in flights)]
    return [(city, days[at + 1] - days[at] + 1) for at, city in enumerate(cities)]


# --- HTML to TSV ----------------------------------------------------------------------------------


def score_html_to_tsv(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return precision, recall and F1 of rows, each right as a whole."""
    reply = results[0]
    fenced = re.search(r"```tsv([\s\S]*)```", reply)
    text = fenced[1] if fenced else reply.rpartition("```tsv")[2]
    found, wanted = rows(text), rows(reference(doc))
    if not found or not wanted or len(found[0]) != len(wanted[0]):
        return {"f1": 0.0, "precision": 0.0, "recall": 0.0, "extracted": 0.0}
    precision = sum(row in wanted for row in found) / len(found)
    recall = sum(row in found for row in wanted) / len(wanted)
    both = precision + recall
    f1 = 2 * precision * recall / both if both else 0.0
    return {"f1": f1, "precision": precision, "recall": recall, "extracted": 1.0}


def rows(text: str) -> list[list[str]]:
    """Return the rows below the header, cells normalized.

    A last row that is too short is no row; any other with a wrong number of cells matches nothing
    but its like.
    """
    try:
        header, *read = list(csv.reader(text.strip().split("\n"), delimiter="\t")) or [[]]
    except csv.Error:
        return []
    if read and len(read[-1]) != len(header):
        read.pop()
    missing = ["N/A"] * len(header)
    return [[_cell(c) for c in (row if len(row) == len(header) else missing)] for row in read]


def _cell(text: str) -> str:
    """Return a cell without case, punctuation, articles and blanks."""
    words = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return "".join(re.sub(r"\b(?:a|an|the)\b", " ", words).split())
