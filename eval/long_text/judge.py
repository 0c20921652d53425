"""``python -m eval.long_text.judge``: have a model judge the answers to LongMemEval.

The questions are those of the published evaluation, by type and for abstentions, with its settings:
temperature 0, ten tokens, right where the reply holds "yes". Client, estimate and journal are those
of ``mmkv mmdu judge``; a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from mmkv.engine.errors import InputError, MmkvError
from mmkv.eval.lmms.answers import read_samples
from mmkv.eval.long_text.benchmarks import LongTask, question, table, tasks
from mmkv.eval.long_text.readers import Row
from mmkv.eval.mmdu.client import Endpoint
from mmkv.eval.mmdu.data import write_json
from mmkv.eval.mmdu.judge import JOURNAL_FILE, SCORES_FILE, Task, ask_all, confirmed, standing
from mmkv.eval.mmdu.scores import Verdicts
from mmkv.training.measure.tables import Table

NAME = "longmemeval_s"
SETTINGS = {"temperature": 0, "max_tokens": 10, "n": 1}
_ABSTENTION = "abstention"


def asked(samples: Path, data: Path) -> list[tuple[Row, Task]]:
    """Return the rows that a samples file answers, each with what the judge is asked.

    Raises:
        InputError: the file was not made from this data.
    """
    task = tasks()[NAME]
    docs, made = task.documents(data), []
    for sample in read_samples(samples, f"*_samples_{NAME}_local.jsonl"):
        number = sample.get("doc_id")
        doc = docs[number] if isinstance(number, int) and 0 <= number < len(docs) else None
        if doc is None or sample.get("input") != question(doc):
            raise InputError(
                f"{samples} was not made from {data}: document {number} differs; check --data"
            )
        row = task.row(doc)
        prompt = judge_prompt(task, row, str(sample.get("filtered_resps", "")))
        made.append((row, Task(row["question_id"], 0, prompt, ())))
    return made


def judge_prompt(task: LongTask, row: Row, reply: str) -> str:
    """Write what the judge is asked about one reply. Raises InputError for an unknown type."""
    prompts = table()[task.family]["judge"]
    kind = _ABSTENTION if _abstains(row) else row["question_type"]
    if kind not in prompts:
        raise InputError(
            f"question {row['question_id']} is of the type {kind}, which LongMemEval has not; "
            "get the file again"
        )
    shown = {key: str(row[key]) for key in ("question", "answer")}
    return prompts[kind].format(**shown, reply=reply)


def read_verdict(reply: str) -> dict[str, int]:
    """Return whether the judge says yes."""
    return {"right": int("yes" in reply.lower())}


def aggregate(rows: Sequence[Row], right: Mapping[str, int]) -> dict[str, Any]:
    """Compute the shares of right answers: of all, by type, over types, of abstentions.

    Args:
        right: 1 or 0 by question_id; questions that are not judged are left out.
    """
    kinds: dict[str, list[int]] = {}
    abstentions, every = [], []
    for row in rows:
        if row["question_id"] in right:
            found = right[row["question_id"]]
            every.append(found)
            kinds.setdefault(row["question_type"], []).append(found)
            abstentions += [found] if _abstains(row) else []
    means = {kind: sum(found) / len(found) for kind, found in sorted(kinds.items())}
    return {
        "questions": len(rows),
        "judged": len(every),
        "accuracy": sum(every) / len(every) if every else None,
        "task_averaged": sum(means.values()) / len(means) if means else None,
        "abstention": sum(abstentions) / len(abstentions) if abstentions else None,
        "by_type": {kind: [means[kind], len(kinds[kind])] for kind in means},
    }


def score_table(result: Mapping[str, Any], title: str) -> Table:
    """Return the shares as a table."""
    made = Table(title, ("questions", "accuracy", "judged"))
    made.add("all", _share(result["accuracy"]), result["judged"])
    for kind, (value, count) in result["by_type"].items():
        made.add(kind, _share(value), count)
    made.add("mean of the types", _share(result["task_averaged"]), result["judged"])
    made.add("abstentions", _share(result["abstention"]), "")
    return made


def run(
    samples: Path, data: Path, endpoint: Endpoint, output: Path, yes: bool, workers: int
) -> int:
    """Judge what is not judged yet and print the table; 1 when the user says no.

    Raises:
        MmkvError: the judge cannot be used, or left a question open; verdicts that came are kept.
    """
    console = Console(stderr=True, highlight=False)
    pairs = asked(samples, data)
    identity = {"model": endpoint.model, "extra": endpoint.extra, "asks": 1}
    verdicts = Verdicts(output / JOURNAL_FILE, identity)

    def right() -> dict[str, int]:
        valid = standing(verdicts, [task for _, task in pairs]).values()
        return {one.dialogue: one.scores["right"] for one in valid if one.scores}

    judged = right()
    todo = [task for _, task in pairs if task.dialogue not in judged]
    if todo:
        if not confirmed(endpoint, console, todo, yes):
            return 1
        ask_all(endpoint, console, verdicts, todo, 1, workers, False, read_verdict)
    result = aggregate([row for row, _ in pairs], right())
    write_json(output / SCORES_FILE, {"judge": identity, "samples": str(samples), **result})
    score_table(result, f"LongMemEval_S, {samples.name}, {endpoint.model}").show()
    left = result["questions"] - result["judged"]
    if left:
        raise InputError(f"{left} questions have no verdict; run the same command again")
    return 0


def _abstains(row: Row) -> bool:
    return "_abs" in row["question_id"]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge by the command line."""
    parser = argparse.ArgumentParser(prog="python -m eval.long_text.judge", description=__doc__)
    parser.add_argument("samples", type=Path, help=f"lmms-eval's *_samples_{NAME}_local.jsonl")
    parser.add_argument("--data", type=Path, required=True, help="the folder of mmkv eval --data")
    parser.add_argument("--base-url", required=True, help="for example https://api.openai.com/v1")
    parser.add_argument("--judge-model", required=True, help="the published one: gpt-4o-2024-08-06")
    parser.add_argument("--output", type=Path, help="folder; default: beside the samples")
    parser.add_argument("--api-key-env", default="OPENAI_API_KEY", help="variable with the key")
    parser.add_argument(
        "--extra-body",
        type=json.loads,
        default={},
        help='JSON put into every request, such as {"max_tokens": 512} for a judge that thinks',
    )
    parser.add_argument("--workers", type=int, default=4, help="calls at a time")
    parser.add_argument("--yes", action="store_true", help="do not ask before sending")
    args = parser.parse_args(arguments)
    key = os.environ.get(args.api_key_env, "").strip() or None
    output = args.output or args.samples.with_name(f"{args.samples.stem}-judged")
    try:
        endpoint = Endpoint(args.base_url, args.judge_model, key, SETTINGS | args.extra_body)
        return run(args.samples, args.data, endpoint, output, args.yes, args.workers)
    except MmkvError as error:
        print(f"mmkv.eval.long_text.judge: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
