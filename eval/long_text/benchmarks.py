"""The long-text benchmarks as tasks of lmms-eval: rows to messages, replies to scores.

``benchmarks.yaml`` has a row per set: files, prompt, length of replies, measure. :class:`LongTask`
reads them all. What lmms-eval gets as a document is the place of a row, not the row: contexts are
long, and types differ between rows. Rows that share a context stand together, so that it is read
once (:mod:`mmkv.eval.lmms.contexts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mmkv.engine.errors import InputError
from mmkv.engine.paths import is_folder
from mmkv.eval.lmms.contexts import LEFT_OUT, context_part
from mmkv.eval.long_text import scores
from mmkv.eval.long_text.readers import (
    OMITTED,
    READERS,
    Row,
    Values,
    drawn,
    read_rows,
    split_places,
    turn_values,
)

_TURNS = "_turns"
_ROOM = 1000  # tokens for what follows a shared context
_HERE = "mmkv.eval.long_text.benchmarks"


def _best(measure: Callable[[str, str], float]) -> Callable[[str, Values], float]:
    return lambda reply, values: scores.best(measure, reply, values["answers"])


def _first_line(text: str) -> str:
    return text.lstrip("\n").split("\n")[0]


def _either(measure: Callable[[str, str], float]) -> Callable[[str, Values], float]:
    """HELMET: of the reply, or of what stands behind ``Answer:``, whichever is better."""

    def score(reply: str, values: Values) -> float:
        texts = (reply, scores.after_prefix(reply))
        return max(scores.best(measure, text, values["answers"]) for text in texts)

    return score


def _option(reply: str, values: Values) -> float:
    named = values["answers"][1].lower() in reply.lower()
    return max(float(named), _either(scores.is_same)(reply, values))


def _classes(reply: str, values: Values) -> float:
    names, line = values["all_classes"] or [], _first_line(reply)
    return max(scores.classification(line, answer, names) for answer in values["answers"])


def _as_list(answer: Any) -> Any:
    return answer if isinstance(answer, (list, tuple)) else [answer]


def _match(reply: str, values: Values) -> float:
    return scores.has_answer(reply, values["answer"])


# (reply, values of the row or turn) to a score from 0 to 1.
MEASURES: dict[str, Callable[[str, Values], float]] = {
    "qa_f1": _best(scores.qa_f1),
    "qa_f1_first_line": lambda r, v: _best(scores.qa_f1)(_first_line(r), v),
    "rouge_l": _best(scores.rouge_l),
    "rouge_l_first_line": lambda r, v: _best(scores.rouge_l)(_first_line(r), v),
    "classification": _classes,
    "count": _best(scores.number_share),
    "retrieval": _best(scores.paragraph_share),
    "code_similarity": _best(scores.code_similarity),
    "letter": lambda r, v: float(scores.chosen_letter(r) == v["answer"]),
    "answer_match": _match,
    "stands_in_reply": lambda r, v: float(str(v["answer"]) in r),
    # The published code goes through a text by its letters: any one of them in the reply counts.
    "any_stands_in_reply": lambda r, v: float(any(a.upper() in r.upper() for a in v["answer"])),
    "whole_stands_in_reply": lambda r, v: float(v["answer"].strip().upper() in r.strip().upper()),
    "choice": lambda r, v: scores.choice(r, v["answer"], v["letter"]),
    "chinese_f1": lambda r, v: max(scores.chinese_f1(r, one) for one in _as_list(v["answer"])),
    "same_number": lambda r, v: scores.same_number(r, _as_list(v["answer"])[0]),
    "first_number": lambda r, v: float(scores.first_number(r) == str(_as_list(v["answer"])[0])),
    "rouge_lsum": lambda r, v: scores.rouge_summary(r, v["answer"]).f1,
    "share_found": lambda r, v: scores.share_found(r, v.get("answers") or _as_list(v["answer"])),
    "function_found": lambda r, v: scores.function_found(r, v["name"], v["functions"]),
    "has_answer": _either(scores.has_answer),
    "ndcg_at_10": lambda r, v: scores.ndcg(scores.ranking(r), v["labels"]),
    "same_label": lambda r, v: scores.is_same(scores.after_prefix(r, "label:"), v["answers"][0]),
    "rouge_l_stemmed": _either(lambda r, a: scores.rouge_longest(r, a, scores.porter_stem()).f1),
    "rouge_lsum_stemmed": _either(lambda r, a: scores.rouge_summary(r, a, scores.porter_stem()).f1),
    "option": _option,
}


@dataclass(frozen=True)
class LongTask:
    """One set of one benchmark.

    Attributes:
        name: as ``mmkv eval --tasks`` has it. family: the benchmark.
        spec: its row of the table, with what the whole benchmark says.
        turns: whether SCBench's questions follow each other, each with the earlier right answers.
    """

    name: str
    family: str
    spec: Mapping[str, Any]
    turns: bool = False

    @property
    def in_rounds(self) -> bool:
        """Whether a document asks several times."""
        return "turn" in self.spec or "answer_prompt" in self.spec

    @property
    def tokens(self) -> int:
        """Return the longest reply, in tokens."""
        tokens = self.spec["tokens"]
        return max(tokens.values()) if isinstance(tokens, Mapping) else tokens

    def values(self, doc: Row) -> Values:
        """Read what prompt and measure want of a document's row."""
        row = self.row(doc)
        return READERS[self.spec["reader"]](row, self.spec, doc)

    def row(self, doc: Row) -> Row:
        """Return a document's row."""
        return read_rows(doc["file"])[doc["row"]]

    def rounds(self, doc: Row) -> int:
        """Count the requests of a document."""
        if "turn" in self.spec:
            return len(self.row(doc)["multi_turns"])
        return 2 if self.in_rounds else 1

    def messages(self, doc: Row, index: int, replies: Sequence[str]) -> list[dict[str, Any]]:
        """Return the messages of request ``index``, behind the replies to those before it."""
        values, spec = self.values(doc), self.spec
        asks = {key: spec[key] for key in ("raw", "stop", "begin") if key in spec}
        if "begin" in asks:
            asks["begin"] = "\n" + spec["begin"].format(**values)
        if "turn" in spec:
            return self._turn(doc, values, index)
        if index:
            text = spec["answer_prompt"].format(**values, thought=replies[0].strip())
            return [_user([_text(text)], max_new_tokens=spec["answer_tokens"])]
        return [_user(self._parts(doc, values), **asks)]

    def _parts(self, doc: Row, values: Values, tail: str | None = None) -> list[dict[str, Any]]:
        """Return the prompt: what comes before its context, that, and what follows."""
        spec = self.spec
        head, _, behind = spec["prompt"].partition("{context}")
        head, tail = head.format(**values), behind.format(**values) if tail is None else tail
        shared = bool(spec.get("first") or doc.get("shared"))
        text = values["context"]
        if spec["cut"] in ("middle", "leave") and (not shared or spec["cut"] == "leave"):
            return [context_part(head + text + tail, cut=spec["cut"])]
        room = spec.get("room", _ROOM if shared else None)
        if "turn" in spec:
            room += self.tokens * (self.rounds(doc) - 1)
        cut = "end" if spec["cut"] == "end" else "middle"
        most, omitted = (spec["most"], OMITTED) if "most" in spec else (None, "")
        given: dict[str, Any] = {"room": room, "most": most, "omitted": omitted}
        middle = context_part(text, shared=shared, cut=cut, **given)  # type: ignore[arg-type]
        return [_text(head), middle, _text(tail)] if head else [middle, _text(tail)]

    def _turn(self, doc: Row, values: Values, index: int) -> list[dict[str, Any]]:
        row, form = self.row(doc), self.spec["turn"]
        turns = [turn_values(row, turn, doc) for turn in row["multi_turns"]]
        asked = [form.format(**turn) for turn in turns]
        tokens = self.spec["tokens"]
        if isinstance(tokens, Mapping):
            tokens = tokens[turns[index]["task"]]
        if not self.turns:
            parts = self._parts(doc, values, asked[index])
            return [_user(parts, max_new_tokens=tokens)]
        if "{prefix}" in form:  # what is asked for stands before the context, then
            values, asked[0] = {**values, "prefix": turns[0]["prefix"]}, turns[0]["input"]
        made = [_user(self._parts(doc, values, f"\n\n{asked[0]}"))]
        for before, text in zip(turns, asked[1 : index + 1], strict=False):
            made.append({"role": "assistant", "content": [_text(str(before["answer"]))]})
            made.append(_user([_text(text)]))
        made[-1]["max_new_tokens"] = tokens
        return made

    def score(self, doc: Row, replies: Sequence[str]) -> dict[str, list[float]]:
        """Score a document's replies: per measure, a list."""
        spec = self.spec
        if "turn" in spec:
            return self._turn_scores(doc, replies)
        if any(reply.startswith(LEFT_OUT) for reply in replies):
            return {}
        values = self.values(doc)
        begin = spec["begin"].format(**values) if "begin" in spec else ""
        measure = spec["measure"]
        answered = {"answered": [float(bool(replies[-1].strip()))]}
        if measure == "answer_match" and not _has_exact_answer(values):
            return answered  # a judge alone can tell
        found = MEASURES[measure](begin + replies[-1], values)
        made = {measure: [found]}
        if self.family == "longbench_v2":
            made |= {values["difficulty"]: [found], values["length"]: [found]}
        elif measure == "answer_match":
            made |= {values["question_type"]: [found], **answered}
        return made

    def _turn_scores(self, doc: Row, replies: Sequence[str]) -> dict[str, list[float]]:
        row, made = self.row(doc), dict[str, list[float]]()
        for number, (turn, reply) in enumerate(zip(row["multi_turns"], replies, strict=True), 1):
            measure = self.spec["measure"]
            if isinstance(measure, Mapping):
                measure = measure[turn["task"]]
            found = MEASURES[measure](reply, turn_values(row, turn, doc))
            made.setdefault(measure, []).append(found)
            made.setdefault(f"turn_{number}", []).append(found)
        return made

    def metrics(self, docs: Sequence[Row]) -> list[str]:
        """List the names that :meth:`score` gives for these documents."""
        measure = self.spec["measure"]
        made = list(dict.fromkeys(measure.values() if isinstance(measure, Mapping) else [measure]))
        rows = [self.row(doc) for doc in docs]
        if "turn" in self.spec:
            most = max(map(self.rounds, docs))
            return made + [f"turn_{number}" for number in range(1, most + 1)]
        if self.family == "longbench_v2":
            made += sorted({row["difficulty"] for row in rows} | {row["length"] for row in rows})
        elif measure == "answer_match":
            made += ["answered"]
            made += sorted({row["question_type"] for row in rows if _has_exact_answer(row)})
        return made

    def documents(self, data: Path) -> list[dict[str, Any]]:
        """Find the rows below a folder, check them, and return their places.

        Raises:
            InputError: names the file, row and key that is missing.
        """
        found = data_files(data, self.spec["files"], self.name)
        demos = self._demos(data)
        made, keys = [], dict[int, int]()
        for file in found:
            rows = read_rows(file)
            self._check(file, rows)
            places = list(range(len(rows)))
            more: dict[str, Any] = {}
            if self.family == "helmet":
                if demos == "":  # one file for both
                    places = split_places(len(rows), train=False)
                    more = {"demos": file, "split": True}
                elif demos is not None:
                    more = {"demos": demos}
                kept = drawn([rows[at] for at in places], self.spec)
                places = [places[at] for at in kept]
                if self.spec["reader"] == "rerank":
                    asked = sorted({rows[at]["qid"] for at in places})
                    more |= {"asked": asked, "rows": len(places)}
            for at in places:
                doc = {"task": self.name, "file": file, "row": at, "shared": False, **more}
                made.append(doc)
                keys[len(made) - 1] = hash(_context(rows[at]))
        return _together(made, keys)

    def _demos(self, data: Path) -> str | None:
        pattern = self.spec.get("demos")
        return data_files(data, [pattern], self.name)[0] if pattern else pattern

    def _check(self, file: str, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows, 1):
            missing = [key for key in self.spec["needs"] if key not in row]
            if missing:
                raise InputError(
                    f"{file}, row {number} has no {', '.join(missing)}, which {self.name} needs; "
                    "get the file again"
                )


def _has_exact_answer(row: Row) -> bool:
    """Say whether a LongMemEval question has an answer in words to look for."""
    preference = row["question_type"] == "single-session-preference"
    return not preference and "_abs" not in row["question_id"]


def _context(row: Row) -> str | None:
    document = row.get("document")  # NarrativeQA's
    found = document.get("text") if isinstance(document, Mapping) else row.get("context")
    return found if isinstance(found, str) else None


def _together(docs: Sequence[dict[str, Any]], keys: Mapping[int, int]) -> list[dict[str, Any]]:
    """Return the documents with those of one context side by side, and marked as sharing it."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for at, doc in enumerate(docs):
        alone = keys[at] == hash(None)
        groups.setdefault(("alone", at) if alone else keys[at], []).append(doc)
    return [{**doc, "shared": len(group) > 1} for group in groups.values() for doc in group]


def data_files(data: Path, patterns: Sequence[str], name: str) -> list[str]:
    """Return a task's files by the first pattern that finds any. Raises InputError."""
    if not is_folder(data):
        raise InputError(f"no folder {data}; --data names the folder that holds {patterns[0]}")
    for pattern in patterns:
        if found := sorted(str(path) for path in data.glob(pattern) if path.is_file()):
            return found
    raise InputError(f"task {name} has no data: no {' and no '.join(patterns)} below {data}")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _user(parts: list[dict[str, Any]], **asks: Any) -> dict[str, Any]:
    return {"role": "user", "content": parts, **asks}


@cache
def table() -> dict[str, Any]:
    """Read ``benchmarks.yaml``: per benchmark, what all its sets have, and its sets."""
    text = resources.files("mmkv.eval.long_text").joinpath("benchmarks.yaml").read_text("utf-8")
    return yaml.safe_load(text)


@cache
def tasks() -> dict[str, LongTask]:
    """Return all long-text tasks by their names."""
    made: dict[str, LongTask] = {}
    for family, whole in table().items():
        common = {key: value for key, value in whole.items() if key not in ("sets", "lengths")}
        for name, own in whole["sets"].items():
            full = f"{family}_{name}" if name else family
            spec = {**common, **own}
            spec["files"] = [pattern.replace("{set}", name) for pattern in spec["files"]]
            for at, (length, count) in enumerate(whole.get("lengths", {}).items()):
                one = _of_length(spec, at, count)
                made[f"{full}_{length}"] = LongTask(f"{full}_{length}", family, one)
            if "lengths" not in whole:
                made[full] = LongTask(full, family, spec)
            if "turn" in spec:
                made[full + _TURNS] = LongTask(full + _TURNS, family, spec, turns=True)
    return made


def _of_length(spec: Mapping[str, Any], at: int, length: int) -> dict[str, Any]:
    """Return a set's row for one of HELMET's lengths."""
    made = {**spec}
    chosen = {key: values[at] for key, values in spec.get("by_length", {}).items()}
    made |= chosen
    named = {"length": length, **chosen}
    made["files"] = [
        pattern.format(**named) if "{" in pattern else pattern for pattern in spec["files"]
    ]
    if "spare" in spec:
        made["most"] = length - spec["spare"]
    return made


def groups() -> dict[str, list[str]]:
    """Return the tasks of each name that stands for several: a benchmark, or HELMET at a length."""
    made: dict[str, list[str]] = {}
    for name, task in tasks().items():
        if task.family == "helmet":
            made.setdefault(f"helmet_{name.rpartition('_')[2]}", []).append(name)
        elif task.family in ("longbench", "scbench") and not task.turns:
            made.setdefault(task.family, []).append(name)
        elif task.turns:
            made.setdefault(f"{task.family}{_TURNS}", []).append(name)
    return made


def expanded(names: Sequence[str]) -> list[str]:
    """Return the tasks that names stand for, groups as their tasks."""
    known = groups()
    return [one for name in names for one in known.get(name.removesuffix("_local"), [name])]


def task_file(
    name: str, data: Path, output: Path, function: Callable[[str], Any]
) -> dict[str, Any]:
    """Write the documents of a task to ``output`` and return its settings for lmms-eval.

    ``function`` makes the value of a setting that names a function. Raises InputError.
    """
    task = tasks()[name]
    docs = task.documents(data)
    if "stemmed" in str(task.spec["measure"]):
        scores.porter_stem()
    rows = output / f"{name}_rows.json"
    rows.write_text(json.dumps(docs), encoding="utf-8")
    kind = "generate_until_multi_round" if task.in_rounds else "generate_until"
    names = {
        "doc_to_visual": "no_visual",
        "doc_to_text": "question",
        "doc_to_target": "target",
        "doc_to_messages": "messages",
        "process_results": "score",
    }
    return {
        "task": f"{name}_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": [str(rows)]}},
        "test_split": "test",
        "output_type": kind,
        **{key: function(f"{_HERE}.{value}") for key, value in names.items()},
        "generation_kwargs": {
            "max_new_tokens": task.tokens,
            "temperature": task.spec.get("temperature", 0),
        },
        "metric_list": [
            {
                "metric": metric,
                "aggregation": function(f"{_HERE}.mean"),
                "higher_is_better": True,
            }
            for metric in task.metrics(docs)
        ],
        "metadata": [{"version": 1.0}],
    }


# What task files name.


def messages(
    doc: Row,
    lmms_eval_specific_kwargs: Any = None,
    round_idx: int | None = None,
    previous_output: Sequence[str] = (),
    previous_round_info: Any = None,
) -> Any:
    """Return the messages of the first request; for later ones (messages, over, outputs, info)."""
    task = tasks()[doc["task"]]
    if round_idx is None:
        return task.messages(doc, 0, [])
    over = round_idx >= task.rounds(doc)
    given = None if over else task.messages(doc, round_idx, previous_output)
    return given, over, list(previous_output), None


def no_visual(doc: Row) -> list[Any]:
    """Refuse: lmms-eval's simple form asks for pictures, and would leave the context out."""
    raise InputError(
        f"task {doc['task']} is given in messages, which the simple form has not; leave "
        "--force-simple out"
    )


def question(doc: Row, lmms_eval_specific_kwargs: Any = None) -> str:
    """Return where the document stands; the samples file shows this and not the long text."""
    return f"{Path(doc['file']).name}, row {doc['row'] + 1}"


def target(doc: Row) -> str:
    """Return the right answers, as the samples file shows them."""
    row = tasks()[doc["task"]].row(doc)
    found = [turn["answer"] for turn in row["multi_turns"]] if "multi_turns" in row else None
    return json.dumps(found or row.get("answers") or row.get("answer"), default=str)


def score(doc: Row, results: Sequence[Any]) -> dict[str, Any]:
    """Score a document: per metric, a list that :func:`mean` averages over all documents."""
    task, found = tasks()[doc["task"]], results[0]
    replies = list(found) if isinstance(found, (list, tuple)) else [str(found)]
    return task.score(doc, replies)


def mean(results: Sequence[Sequence[float]]) -> float:
    """Average over all questions of all documents."""
    values = [value for one in results for value in one]
    return sum(values) / len(values)
