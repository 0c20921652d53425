"""Count what the inputs led to."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv.training.measure.tables import pipe_table

_KINDS = ("traceback", "hang", "leak", "harm")


class Report:
    """The counts of a run, per class."""

    def __init__(self, seed: int, classes: list[str]) -> None:
        self.seed, self.classes = seed, classes
        self.inputs: Counter[str] = Counter()
        self.slowest: dict[str, float] = dict.fromkeys(classes, 0.0)
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.failures: dict[tuple[str, str, str], dict[str, Any]] = {}
        self._started, self.minutes = time.monotonic(), 0.0

    @classmethod
    def joined(cls, pages: Sequence[dict[str, Any]]) -> Report:
        """Add up result files of several runs."""
        results = [page["results"] for page in pages]
        classes = list(dict.fromkeys(name for each in results for name in each["classes"]))
        made = cls(pages[0]["settings"]["seed"], classes)
        for each in results:
            made.minutes += each["minutes"]
            for name, counts in each["classes"].items():
                made.inputs[name] += counts["inputs"]
                made.seconds[name] += counts["seconds"]
                made.slowest[name] = max(made.slowest[name], counts["slowest_s"])
                for kind in _KINDS:
                    made.counts[name, kind] += counts[f"{kind}s"]
            for found in each["failures"]:
                key = (found["class"], found["kind"], found["place"])
                known = made.failures.setdefault(key, found | {"file": "", "times": 0})
                known["times"] += found["times"]
        return made

    def add(self, line: dict[str, Any]) -> None:
        """Count one input as the worker reports it."""
        name = line["class"]
        self.inputs[name] += 1
        self.slowest[name] = max(self.slowest[name], line["seconds"])
        self.seconds[name] += line["seconds"]
        if "kind" not in line:
            return
        self.counts[name, line["kind"]] += 1
        key = (name, line["kind"], line["place"])
        if key not in self.failures:
            self.failures[key] = {
                "class": name,
                "kind": line["kind"],
                "place": line["place"],
                "message": line["message"],
                "first": line["number"],
                "file": line["file"],
                "times": 0,
            }
        self.failures[key]["times"] += 1

    def died(self, current: dict[str, Any], how: str, cases: Path) -> None:
        """Count the input during which the process died or stopped answering."""
        name, number = current["class"], current["number"]
        cases.mkdir(parents=True, exist_ok=True)
        file = cases / f"{name.replace(' ', '-')}-{self.seed}-{number}.json"
        file.write_text(json.dumps({"class": name, "case": current["case"]}, indent=1) + "\n")
        kind = "hang" if how == "hang" else "traceback"
        line = {"class": name, "number": number, "seconds": 0.0, "kind": kind}
        self.add(line | {"place": how, "message": how, "file": str(file)})

    def table(self) -> str:
        """Return the counts as a table, and below it every kind of failure."""
        rows = []
        for name in (*self.classes, "all"):
            mine = self.classes if name == "all" else [name]
            counts = [sum(self.counts[each, kind] for each in mine) for kind in _KINDS]
            inputs = sum(self.inputs[each] for each in mine)
            slowest = max(self.slowest[each] for each in mine)
            rows.append((name, f"{inputs:,}", *counts, f"{slowest:.1f} s"))
        head = ("class", "inputs", "tracebacks", "hangs", "leaks", "files harmed", "slowest, CPU")
        lines = [pipe_table(head, rows)]
        for found in sorted(self.failures.values(), key=lambda each: -each["times"]):
            lines.append(
                f"{found['times']} x {found['class']}: {found['kind']}: {found['place']}: "
                f"{found['message'].splitlines()[0] if found['message'] else ''} "
                f"(seed {self.seed}, input {found['first']}, {found['file']})"
            )
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Return the counts, without what the run was asked to do."""
        return {
            "minutes": round(self.minutes or (time.monotonic() - self._started) / 60, 1),
            "classes": {
                name: {
                    "inputs": self.inputs[name],
                    **{f"{kind}s": self.counts[name, kind] for kind in _KINDS},
                    "seconds": round(self.seconds[name], 1),
                    "slowest_s": self.slowest[name],
                }
                for name in self.classes
            },
            "failures": [
                {key: value for key, value in found.items() if key != "file"}
                for found in self.failures.values()
            ],
        }
