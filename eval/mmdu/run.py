"""``mmkv mmdu``: answer every dialogue of a set, one file each, and report its memory.

A dialogue is answered in one session; each turn adds its own text and pictures only. ``mmkv mmdu
score`` counts exact answers in a folder of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mmkv.chat.display import Display
from mmkv.chat.options import ChatOptions
from mmkv.engine.errors import ContextError, InputError, MmkvError
from mmkv.environment import versions
from mmkv.eval.mmdu.data import (
    SUMMARY,
    AnswerFolder,
    Dialogue,
    OutputError,
    Problem,
    find_pictures,
    interleave,
    read_benchmark,
    require_folder,
    write_json,
)
from mmkv.eval.mmdu.scores import as_rows, exact_table, memory_table, shares, summarize
from mmkv.training.measure.record import require_output

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.sampling import Sampling


Job = tuple[Dialogue, list[Path]]


@dataclass
class DataOptions:
    """Which dialogues: ``data`` None takes the bundled set, ``images`` None the data's folder."""

    data: Path | None = None
    images: Path | None = None
    limit: int | None = None
    allow_unused_images: bool = False

    def source(self) -> tuple[Path, Path]:
        """Find the benchmark file and the folder of its pictures. Raises MmkvError."""
        if self.data is None:
            from mmkv.resources import bundled_dialogues

            self.data = bundled_dialogues() / "benchmark.json"
        return self.data, self.data.parent if self.images is None else self.images

    def read(self) -> tuple[list[Dialogue], list[Problem], Path]:
        """Read usable dialogues, problems with the others, and the folder. Raises MmkvError."""
        data, folder = self.source()
        dialogues, problems = read_benchmark(data, self.limit, self.allow_unused_images)
        if any(dialogue.images for dialogue in dialogues):
            require_folder(folder)
        return dialogues, problems, folder


def run(data: DataOptions, options: ChatOptions, output: Path) -> int:
    """Answer what is not answered yet and print the summary.

    Returns 0 when every dialogue is answered. Raises MmkvError: nothing could be done, or some
    dialogues failed (each was named on stderr; the others' answers are kept).
    """
    display = Display(options)
    require_output(output)
    dialogues, problems, folder = data.read()
    jobs: list[Job] = []
    for dialogue in dialogues:
        try:
            jobs.append((dialogue, find_pictures(dialogue, folder)))
        except InputError as error:
            problems.append(Problem(dialogue.id, str(error)))
    for problem in problems:
        _report(display, problem)
    total = len(jobs) + len(problems)
    if not jobs:
        raise InputError(f"none of the {total} dialogues can be used: the lines above say why")
    answers = AnswerFolder(output)
    engine = _engine(options, display, any(pictures for _, pictures in jobs))
    answers.begin(_settings(engine, options), {"model": options.model, "versions": versions()})
    finished = _answer_all(engine, options, display, answers, jobs, problems)
    summary = summarize([dialogue for dialogue, _ in jobs], finished, len(problems))
    try:
        write_json(output / SUMMARY, summary)
    finally:  # a disk that is full now leaves the table at least
        _show(engine, options, summary)
    if summary["cut_at_max_new_tokens"]:
        cut = f"{summary['cut_at_max_new_tokens']} of {summary['questions']} answers"
        display.note(f"{cut} ended at --max-new-tokens {options.max_new_tokens}")
    display.note(f"{len(finished)} of {total} dialogues are answered in {output}")
    if problems:
        raise InputError(
            f"{len(problems)} of {total} dialogues failed, for the reasons above; "
            f"{len(finished)} are answered in {output}; correct them and run the same command again"
        )
    return 0


def _show(engine: Engine, options: ChatOptions, summary: dict[str, Any]) -> None:
    """Print the tables of a summary."""
    budget = f", budget {engine.budget.describe()}" if engine.policy.evicts else ""
    name = options.model
    name = Path(name).resolve().name if Path(name).is_dir() else name
    memory_table(summary, f"{name}, {engine.policy.name}{budget}").show()
    if summary["exact"]:
        exact_table(summary["exact"], "Exact answers").show()


def _engine(options: ChatOptions, display: Display, pictures: bool) -> Engine:
    from mmkv.loading import load_engine

    engine = load_engine(
        options.engine,
        display,
        min_pixels=options.min_pixels,
        max_pixels=options.max_pixels,
        generation_config=options.generation_config,
    )
    if pictures and not engine.processor.sees:
        raise InputError(f"{options.model} reads text only; name a model that takes pictures")
    return engine


def _settings(engine: Engine, options: ChatOptions) -> dict[str, Any]:
    """Collect all that an answer depends on, so that a folder never mixes two runs.

    The set itself is not among it: every file is compared with its own dialogue, and a corrected
    row must not make the finished ones worthless.
    """
    budget = {"unit": engine.budget.kind, "value": engine.budget.value}
    return {
        **{f"engine_{key}": value for key, value in engine.identity().items()},
        "policy": engine.policy.name,
        "budget": budget if engine.policy.evicts else None,
        "prefill_chunk": engine.prefill_chunk,
        "page_size": engine.cache.pool.page_size,
        "max_new_tokens": options.max_new_tokens,
        "system": options.system,
        "min_pixels": options.min_pixels,
        "max_pixels": options.max_pixels,
    }


def _answer_all(
    engine: Engine,
    options: ChatOptions,
    display: Display,
    folder: AnswerFolder,
    jobs: Sequence[Job],
    problems: list[Problem],
) -> dict[str, dict[str, Any]]:
    """Answer what is left and return finished rows by dialogue id; failures join ``problems``."""
    from mmkv.sampling import Sampling

    finished: dict[str, dict[str, Any]] = {}
    skipped = 0
    # A benchmark is greedy, whatever the checkpoint's generation_config.json says.
    sampling = Sampling.greedy(max_new_tokens=options.max_new_tokens or 512)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("questions"),
        TimeRemainingColumn(),
    )
    hidden = not display.animated
    with Progress(*columns, console=display.console, transient=True, disable=hidden) as progress:
        bar = progress.add_task("", total=sum(len(dialogue.questions) for dialogue, _ in jobs))
        done = 0
        for dialogue, pictures in jobs:
            progress.update(bar, completed=done, description=f"dialogue {dialogue.id}")
            done += len(dialogue.questions)
            try:
                row = folder.load(dialogue)
                if row is None:
                    made = answer(
                        engine,
                        dialogue,
                        pictures,
                        sampling,
                        options.system,
                        lambda: progress.advance(bar),
                    )
                    folder.save(dialogue, *made)
                    row = folder.load(dialogue)
                else:
                    skipped += 1
                assert row is not None
                finished[dialogue.id] = row
            except OutputError:
                raise  # what is answered after it would be lost, too
            except MmkvError as error:
                problems.append(Problem(dialogue.id, str(error)))
                _report(display, problems[-1])
            progress.update(bar, completed=done)
    if skipped:
        display.note(f"{skipped} dialogues were already answered and were left as they are")
    return finished


def _report(display: Display, problem: Problem) -> None:
    cause = " ".join(problem.cause.split())
    display.say(f"mmkv: failed: dialogue {problem.dialogue}: {cause}")


def answer(
    engine: Engine,
    dialogue: Dialogue,
    pictures: Sequence[Path],
    sampling: Sampling,
    system: str | None = None,
    answered: Callable[[], None] = lambda: None,
) -> tuple[list[str], list[dict[str, Any]]]:
    """Ask the questions in order; the history holds the model's own answers.

    Args:
        pictures: files of ``dialogue.images``. answered: called after each turn.

    Returns:
        The answers, and the numbers of each turn: ``prompt_tokens`` that it added before its answer
        (the last token of the answer before is among them) and ``generated`` ones,
        ``finish_reason``, ``tokens_seen`` of the session so far (the last token of an answer
        enters with the next turn), ``entries_kept`` now and ``entries_evicted`` in all (layer,
        head, token), ``pages`` held, whole, and ``kv_bytes`` of their keys and values. Not those
        of metadata: block tables are as wide as the longest dialogue so far needed, and the
        numbers of a dialogue must not depend on those before it.

    Raises:
        MmkvError: a picture or question cannot be used, or the dialogue is too long for the
            model. Nothing of the dialogue is dropped to make it fit.
    """
    waiting = iter(pictures)
    answers: list[str] = []
    records: list[dict[str, Any]] = []
    with engine.session() as session:
        for number, question in enumerate(dialogue.questions, 1):
            parts = interleave(question, waiting)
            first = system if number == 1 else None
            answers.append("".join(session.send(parts, system=first, sampling=sampling)))
            reply = session.last
            assert reply is not None and reply.memory is not None
            if reply.finish_reason == "context":
                raise ContextError(
                    f"answer {number} of {len(dialogue.questions)} used up the model's "
                    f"{engine.spec.max_position:,} positions; lower --max-new-tokens or "
                    "--max-pixels, or take a model with a longer context"
                )
            records.append(
                {
                    "prompt_tokens": reply.prompt_tokens,
                    "generated": len(reply.token_ids),
                    "finish_reason": reply.finish_reason,
                    "tokens_seen": reply.memory.tokens_seen,
                    "entries_kept": reply.memory.entries,
                    "entries_evicted": reply.memory.evicted,
                    "pages": reply.memory.pages,
                    "kv_bytes": reply.memory.kv_bytes,
                }
            )
            answered()
    return answers, records


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
