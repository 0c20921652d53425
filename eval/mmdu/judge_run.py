"""Judge the answers of a run: estimate the cost, ask, and report."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mmkv.engine.errors import InputError
from mmkv.eval.mmdu.client import Endpoint, JudgeClient
from mmkv.eval.mmdu.cost import estimate
from mmkv.eval.mmdu.data import Dialogue, Problem, find_pictures
from mmkv.eval.mmdu.files import AnswerFolder, write_json
from mmkv.eval.mmdu.judging import Task, judge_all
from mmkv.eval.mmdu.rubric import RUBRIC, judge_prompt
from mmkv.eval.mmdu.run import DataOptions
from mmkv.eval.mmdu.scores import NO_ANSWER, NOT_JUDGED, aggregate, score_table
from mmkv.eval.mmdu.verdicts import Verdicts
from mmkv.training.measure.tables import Table

SCORES_FILE, MARKDOWN_FILE, JOURNAL_FILE = "scores.json", "scores.md", "journal.jsonl"


@dataclass
class JudgeOptions:
    """The options of the command line."""

    data: DataOptions
    answers: Path
    output: Path | None
    endpoint: Endpoint
    rubric: Path | None = None
    workers: int = 4
    asks: int = 3
    retry_failed: bool = False
    yes: bool = False
    quiet: bool = False
    prices: tuple[float, float] | None = None

    def folder(self) -> Path:
        """Return the path of verdicts and scores."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.endpoint.model).strip("-.") or "judge"
        return self.answers / f"judge-{name}" if self.output is None else self.output

    def rubric_text(self) -> str:
        """Read our rubric, or that of --rubric. Raises InputError."""
        if self.rubric is None:
            return RUBRIC
        try:
            return self.rubric.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the rubric {self.rubric}; name a text file") from error


def run_judge(options: JudgeOptions) -> int:
    """Judge what is not judged yet and print the table.

    Returns 0 when every question of the data has a verdict, 1 when the user says no. Raises
    MmkvError when some have none (each cause was named) or the judge cannot be used; the verdicts
    that came are kept.
    """
    console = Console(stderr=True, highlight=False)
    if not options.answers.is_dir():
        raise InputError(f"no folder of answers at {options.answers}; run mmkv mmdu first")
    dialogues, problems, pictures = options.data.read()
    tasks, missing = _tasks(options, dialogues, pictures, problems)
    for problem in problems:
        cause = " ".join(problem.cause.split())
        _say(console, f"mmkv: failed: dialogue {problem.dialogue}: {cause}")
    if not tasks:
        raise InputError(f"no dialogue of {options.answers} can be judged, for the reasons above")
    verdicts = Verdicts(options.folder() / JOURNAL_FILE, _identity(options))
    standing = {
        task.key: verdicts.by_key[task.key]
        for task in tasks
        if task.key in verdicts.by_key and verdicts.by_key[task.key].prompt == task.prompt
    }
    redo = {key for key, verdict in standing.items() if verdict.failure and options.retry_failed}
    todo = [task for task in tasks if task.key not in standing or task.key in redo]
    if not options.quiet and len(todo) < len(tasks):
        _say(
            console, f"mmkv: {len(tasks) - len(todo)} of {len(tasks)} questions are judged already"
        )
    if todo:
        if not _confirmed(options, console, todo):
            return 1
        try:
            _ask(options, console, verdicts, todo)
        finally:
            # Also when the judge fails or Ctrl-C ends it: show the verdicts so far.
            _write(options, dialogues, missing, tasks, verdicts)
    result, table = _write(options, dialogues, missing, tasks, verdicts)
    table.show()
    if result["failures"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in result["failures"].items())
        _say(console, f"mmkv: failures: {kinds}; {options.folder() / JOURNAL_FILE} has the replies")
    open_ones = sum(result["failures"].get(kind, 0) for kind in (NOT_JUDGED, NO_ANSWER))
    if open_ones or problems:
        raise InputError(
            f"{open_ones} of {result['questions']} questions have no verdict"
            + (f" and {len(problems)} dialogues could not be judged" if problems else "")
            + "; the causes are above; correct them and run the same command again"
        )
    return 0


def _tasks(
    options: JudgeOptions, dialogues: Sequence[Dialogue], pictures: Path, problems: list[Problem]
) -> tuple[list[Task], set[str]]:
    """Return the questions that can be judged, and the ids of dialogues without answers."""
    answers, rubric = AnswerFolder(options.answers), options.rubric_text()
    tasks: list[Task] = []
    missing: set[str] = set()
    for dialogue in dialogues:
        given: list[str] | None = None
        try:
            given = answers.answers(dialogue)
            if given is None:
                raise InputError("it has no answers yet; run mmkv mmdu")
            found = tuple(find_pictures(dialogue, pictures))
            estimate([("", found)])  # opens every picture
        except InputError as error:
            problems.append(Problem(dialogue.id, str(error)))
            if given is None:
                missing.add(dialogue.id)
            continue
        for turn, (question, reference, answer) in enumerate(
            zip(dialogue.questions, dialogue.references, given, strict=True)
        ):
            text = judge_prompt(question, reference, answer, rubric)
            tasks.append(Task(dialogue.id, turn, text, found))
    return tasks, missing


def _identity(options: JudgeOptions) -> dict[str, Any]:
    """Return the settings that decide a verdict; the prompt has a hash of its own."""
    return {"model": options.endpoint.model, "extra": options.endpoint.extra, "asks": options.asks}


def _confirmed(options: JudgeOptions, console: Console, todo: Sequence[Task]) -> bool:
    line = estimate((task.text, task.pictures) for task in todo).line(options.prices)
    _say(console, f"mmkv: judging takes {line}, sent to {options.endpoint.url}")
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise InputError("nothing was sent: there is no terminal to confirm on; add --yes")
    return typer.confirm("Send them?", err=True)


def _ask(options: JudgeOptions, console: Console, verdicts: Verdicts, todo: Sequence[Task]) -> None:
    def note(text: str) -> None:
        if not options.quiet:
            _say(console, f"mmkv: judge: {text}")

    client = JudgeClient(options.endpoint, note)
    columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not options.quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        bar = progress.add_task("judging", total=len(todo))
        for verdict in judge_all(
            client,
            todo,
            options.asks,
            options.workers,
            lambda task, why: _say(
                console, f"mmkv: failed: dialogue {task.dialogue}, question {task.turn + 1}: {why}"
            ),
        ):
            verdicts.add(verdict)
            progress.advance(bar)


def _write(
    options: JudgeOptions,
    dialogues: Sequence[Dialogue],
    missing: set[str],
    tasks: Sequence[Task],
    verdicts: Verdicts,
) -> tuple[dict[str, Any], Table]:
    """Write scores.json, scores.md and the official files; return the scores and their table."""
    folder = options.folder()
    valid = {
        task.key: verdicts.by_key[task.key]
        for task in tasks
        if task.key in verdicts.by_key and verdicts.by_key[task.key].prompt == task.prompt
    }
    result = aggregate(dialogues, missing, valid)
    run = AnswerFolder(options.answers).settings()
    page = {"judge": _identity(options), "run": run, **result}
    write_json(folder / SCORES_FILE, page)
    table = score_table(result, f"{options.answers.resolve().name}, {options.endpoint.model}")
    try:
        (folder / MARKDOWN_FILE).write_text(table.markdown(), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {folder / MARKDOWN_FILE}: {error.strerror}") from error
    for dialogue in dialogues:
        # The layout of the benchmark's own statistics: a file of judged questions per dialogue.
        keys = [(dialogue.id, turn) for turn in range(len(dialogue.questions))]
        scores = [valid[key].scores for key in keys if key in valid and valid[key].scores]
        write_json(folder / "dialogues" / f"{dialogue.id}.json", scores)
    return result, table


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
