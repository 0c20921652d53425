"""``python -m eval.lmms.answers``: answers to mmdu from lmms-eval's samples file, for a judge.

``python -m eval.lmms.answers`` writes a folder like that of ``mmkv mmdu``, so that ``mmkv mmdu
judge``, ``score`` and ``table`` can rate answers from lmms-eval. It accepts any model's samples of
the task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmkv.engine.errors import InputError, MmkvError
from mmkv.eval.mmdu.data import AnswerFolder, Dialogue, read_benchmark
from mmkv.eval.mmdu.run import DataOptions


def convert(samples: Path, data: Path, output: Path) -> int:
    """Write ``output``/<id>.json for every sample; how many. Raises InputError.

    ``data``: the benchmark file that the task read.
    """
    dialogues, problems = read_benchmark(data, unused_images=True)
    if problems:
        raise InputError(f"{data}: dialogue {problems[0].dialogue}: {problems[0].cause}")
    rows = [
        _matched(row, dialogues, samples, data)
        for row in read_samples(samples, "*_samples_mmdu*.jsonl")
    ]
    folder = AnswerFolder(output)
    folder.begin({"samples": str(samples.resolve())}, {})
    for dialogue, answers in rows:
        folder.save(dialogue, answers, [])
    return len(rows)


def read_samples(samples: Path, name: str) -> list[dict[str, Any]]:
    """Read a file of samples as lmms-eval writes it.

    Args:
        name: what such a file is called, for the message.

    Raises:
        InputError: it cannot be read, or holds none.
    """
    try:
        lines = samples.read_text(encoding="utf-8").split("\n")  # replies may hold U+2028
        rows = [json.loads(line) for line in lines if line]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {samples} ({error}); name a {name}") from error
    if not rows:
        raise InputError(f"{samples} holds no samples; run the task again")
    return rows


def _matched(
    row: Any, dialogues: Sequence[Dialogue], samples: Path, data: Path
) -> tuple[Dialogue, list[str]]:
    """Find the dialogue that a sample answers, and the answers."""
    number = row.get("doc_id") if isinstance(row, dict) else None
    if isinstance(number, int) and 0 <= number < len(dialogues):
        dialogue, answers = dialogues[number], row.get("filtered_resps")
        fits = isinstance(answers, list) and len(answers) == len(dialogue.questions)
        if fits and row.get("input") == dialogue.questions[0]:
            return dialogue, [str(answer) for answer in answers]
    raise InputError(f"{samples} was not made from {data}: document {number} differs; check --data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert and print the next command."""
    parser = argparse.ArgumentParser(prog="python -m eval.lmms.answers", description=__doc__)
    parser.add_argument("samples", type=Path, help="lmms-eval's *_samples_mmdu_local.jsonl")
    parser.add_argument("output", type=Path, help="folder for the answers")
    parser.add_argument("--data", type=Path, help="the benchmark.json; default: our small set")
    args = parser.parse_args(arguments)
    try:
        data, _ = DataOptions(args.data).source()
        made = convert(args.samples, data, args.output)
    except MmkvError as error:
        print(f"mmkv.eval.lmms.answers: error: {error}", file=sys.stderr)
        return 1
    named = f" --data {args.data}" if args.data else ""
    print(f"{made} dialogues; now: mmkv mmdu score --answers {args.output}{named} (or judge)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
