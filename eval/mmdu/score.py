"""``mmkv mmdu score``: count exact answers in a folder of answers."""

from __future__ import annotations

from pathlib import Path

from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.data import read_benchmark
from mmkv.eval.mmdu.exact import as_rows, shares
from mmkv.eval.mmdu.files import AnswerFolder
from mmkv.eval.mmdu.run import DataOptions
from mmkv.eval.mmdu.summary import exact_table


def run_score(options: DataOptions, folder: Path) -> int:
    """Print right answers per kind; 0. Raises MmkvError when there is nothing to count, or when
    dialogues have no answers (the others are counted first).
    """
    data, _ = options.source()
    dialogues, problems = read_benchmark(data, options.limit, options.allow_unused_images)
    if not any(dialogue.exact for dialogue in dialogues):
        raise InputError(f"{data} has no exact answers; use mmkv mmdu judge")
    answers = AnswerFolder(folder)
    given = {dialogue.id: answers.answers(dialogue) for dialogue in dialogues}
    found = {name: texts for name, texts in given.items() if texts is not None}
    if not found:
        raise InputError(f"{folder} holds no answers to {data}; run mmkv mmdu first")
    exact_table(as_rows(shares(dialogues, found)), f"Exact answers, {folder}").show()
    missing = len(dialogues) - len(found) + len(problems)
    if missing:
        raise InputError(f"{missing} dialogues have no answers and were not counted; run mmkv mmdu")
    return 0
