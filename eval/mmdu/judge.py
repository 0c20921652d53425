"""Judge the answers of a run: estimate the cost, ask, and report; compare judged runs.

``mmkv mmdu judge`` makes one call per question, several at a time, and keeps each verdict in a
journal. What it costs is estimated first: calls, tokens, bytes, and money if prices are given.
``mmkv mmdu table`` compares judged runs, each with the first.
"""

from __future__ import annotations

import base64
import hashlib
import math
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from mmkv.engine.errors import InputError, MmkvError
from mmkv.eval.mmdu.client import Endpoint, JudgeClient, NoVerdictError
from mmkv.eval.mmdu.data import (
    AnswerFolder,
    Dialogue,
    Problem,
    find_pictures,
    read_json,
    write_json,
)
from mmkv.eval.mmdu.rubric import RUBRIC, UnreadableScoresError, judge_prompt, read_scores
from mmkv.eval.mmdu.run import DataOptions
from mmkv.eval.mmdu.scores import (
    COLUMNS,
    NO_ANSWER,
    NOT_JUDGED,
    Key,
    Verdict,
    Verdicts,
    aggregate,
    cells,
    overall_sums,
    score_table,
)
from mmkv.training.measure.tables import Table

# Estimates: four characters a token for English; 600 tokens for seven short
# explanations and a dictionary.
CHARACTERS_PER_TOKEN, REPLY_TOKENS = 4, 600
_MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


@dataclass(frozen=True)
class Estimate:
    """Totals over all calls; tokens are estimates, bytes are what is sent for pictures."""

    calls: int
    input_tokens: int
    output_tokens: int
    bytes: int

    def line(self, prices: tuple[float, float] | None = None) -> str:
        """Return one line; ``prices`` in dollars per million tokens, in and out."""
        text = (
            f"{self.calls:,} calls, about {self.input_tokens:,} tokens in and "
            f"{self.output_tokens:,} out, {self.bytes / 2**20:,.1f} MiB of pictures"
        )
        if prices is None:
            return text
        cost = (self.input_tokens * prices[0] + self.output_tokens * prices[1]) / 1e6
        return f"{text}, about ${cost:,.2f}"


def estimate(calls: Iterable[tuple[str, Sequence[Path]]]) -> Estimate:
    """Add up calls of (text, pictures). Raises InputError for a picture that cannot be read."""
    count = tokens = size = 0
    for text, pictures in calls:
        count += 1
        tokens += math.ceil(len(text) / CHARACTERS_PER_TOKEN)
        for picture in pictures:
            of_one, bytes_of_one = _picture(picture)
            tokens, size = tokens + of_one, size + bytes_of_one
    return Estimate(count, tokens, count * REPLY_TOKENS, size)


@cache
def _picture(path: Path) -> tuple[int, int]:
    """Count the tokens and base64 bytes of a picture; its header alone is read."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            width, height = picture.size
        size = path.stat().st_size
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is not a readable picture; get another copy") from error
    return picture_tokens(width, height), math.ceil(size / 3) * 4


def picture_tokens(width: int, height: int) -> int:
    """Count the tokens of a picture under the rule published for GPT-4o: 85, and 170 a tile of 512
    pixels.

    The picture is fitted into 2048 x 2048 and then scaled down to a short side of 768. Other
    judges count otherwise.
    """
    scale = min(1.0, 2048 / max(width, height))
    scale = min(scale, 768 / min(width, height))
    tiles = math.ceil(width * scale / 512) * math.ceil(height * scale / 512)
    return 85 + 170 * tiles


@lru_cache(maxsize=96)  # a few dialogues' pictures
def data_uri(path: Path) -> str:
    """Encode the picture as a data: URI, unchanged if its format is one of the
    web's.

    Raises:
        InputError: it cannot be read.
    """
    import io

    from PIL import Image

    from mmkv.prompt.media import load_image

    try:
        content = path.read_bytes()
        with Image.open(io.BytesIO(content)) as picture:
            kind = _MIME.get(picture.format or "")
    except (OSError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} is not a readable picture; get another copy") from error
    if kind is None:
        buffer = io.BytesIO()
        load_image(path).save(buffer, "PNG")
        content, kind = buffer.getvalue(), "image/png"
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


# The run stops after this many questions in succession without a verdict, because the next one
# would fail, too. A single question may fail for reasons of its own.
GIVE_UP_AFTER = 3


@dataclass(frozen=True)
class Task:
    """One question to be judged. ``text``: the whole prompt; ``pictures``: the dialogue's."""

    dialogue: str
    turn: int
    text: str
    pictures: tuple[Path, ...]

    @property
    def key(self) -> Key:
        """Return the question that the reply answers."""
        return self.dialogue, self.turn

    @property
    def prompt(self) -> str:
        """Return a hash of the request."""
        return hashlib.sha256(self.text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


Reader = Callable[[str], dict[str, int]]  # scores by heading; raises UnreadableScoresError


def judge(client: JudgeClient, task: Task, asks: int, read: Reader = read_scores) -> Verdict:
    """Ask for the verdict on one answer; an unreadable reply is asked for again, ``asks`` times in
    all.

    ``read`` reads the scores in a reply.

    Raises:
        NoVerdictError, MmkvError: there is no reply.
    """
    try:
        images = [data_uri(picture) for picture in task.pictures]
    except InputError as error:
        raise NoVerdictError(str(error)) from error
    failure = detail = text = ""
    usage: dict[str, int] = {}
    for asked in range(1, asks + 1):
        reply = client.ask(task.text, images)
        for name, count in reply.usage.items():
            if isinstance(count, int):
                usage[name] = usage.get(name, 0) + count
        text = reply.text
        if reply.refusal:
            # A filter would decide the same again.
            failure, detail = "refused", reply.refusal[:300]
            break
        try:
            scores = read(reply.text)
        except UnreadableScoresError as error:
            failure, detail = error.kind, str(error)
            if reply.finish_reason == "length":
                detail += " (it was cut off at the token limit)"
            continue
        return Verdict(task.dialogue, task.turn, task.prompt, scores, "", "", text, asked, usage)
    return Verdict(task.dialogue, task.turn, task.prompt, None, failure, detail, text, asked, usage)


def judge_all(
    client: JudgeClient,
    tasks: Sequence[Task],
    asks: int,
    workers: int,
    on_open: Callable[[Task, str], None],
    read: Reader = read_scores,
) -> Iterator[Verdict]:
    """Yield verdicts as they come, in any order.

    Args:
        workers: calls at a time. on_open: called for a question that got no verdict, with the
            reason. read: reads the scores in a reply.

    Raises:
        MmkvError: the judge cannot be used; earlier verdicts have been given.
    """
    todo: queue.SimpleQueue[Task] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Task, Verdict | BaseException]] = queue.SimpleQueue()
    for task in tasks:
        todo.put(task)

    def work() -> None:
        while True:
            try:
                task = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((task, judge(client, task, asks, read)))
            except NoVerdictError as error:
                done.put((task, error))
            except BaseException as error:  # raised again in the main thread
                client.stop()  # at once, or other threads would still send
                done.put((task, error))
                return

    # Daemon threads: Ctrl-C must not wait minutes for an unneeded reply.
    for _ in range(min(workers, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    failed_in_a_row = 0
    try:
        for _ in tasks:
            task, outcome = done.get()
            if isinstance(outcome, Verdict):
                failed_in_a_row = 0
                yield outcome
            elif isinstance(outcome, NoVerdictError):
                failed_in_a_row += 1
                on_open(task, str(outcome))
                if failed_in_a_row >= GIVE_UP_AFTER:
                    raise MmkvError(
                        f"the judge gave no verdict on {failed_in_a_row} questions in succession "
                        f"({outcome}); check it and run the same command again"
                    )
            else:
                raise outcome
    finally:
        client.stop()
        while not todo.empty():
            try:
                todo.get_nowait()
            except queue.Empty:
                break


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
    judged = standing(verdicts, tasks)
    if options.retry_failed:
        judged = {key: verdict for key, verdict in judged.items() if not verdict.failure}
    todo = [task for task in tasks if task.key not in judged]
    if not options.quiet and len(todo) < len(tasks):
        _say(
            console, f"mmkv: {len(tasks) - len(todo)} of {len(tasks)} questions are judged already"
        )
    if todo:
        if not confirmed(options.endpoint, console, todo, options.yes, options.prices):
            return 1
        try:
            asked = (options.asks, options.workers, options.quiet)
            ask_all(options.endpoint, console, verdicts, todo, *asked)
        finally:
            # Also when the judge fails or Ctrl-C ends it: show the verdicts so far.
            _write(options, dialogues, missing, tasks, verdicts)
    result, table = _write(options, dialogues, missing, tasks, verdicts)
    table.show()
    _require_verdicts(options, console, result, problems)
    return 0


def _require_verdicts(
    options: JudgeOptions, console: Console, result: dict[str, Any], problems: Sequence[Problem]
) -> None:
    """Say how many verdicts failed. Raises InputError: some questions have none."""
    if result["failures"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in result["failures"].items())
        _say(console, f"mmkv: failures: {kinds}; {options.folder() / JOURNAL_FILE} has the replies")
    open_ones = result["failures"].get(NOT_JUDGED, 0) + result["failures"].get(NO_ANSWER, 0)
    if open_ones or problems:
        raise InputError(
            f"{open_ones} of {result['questions']} questions have no verdict"
            + (f" and {len(problems)} dialogues could not be judged" if problems else "")
            + "; the causes are above; correct them and run the same command again"
        )


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


def standing(verdicts: Verdicts, tasks: Sequence[Task]) -> dict[Key, Verdict]:
    """Return the verdicts on what the tasks ask now; one on another prompt is left out."""
    known = verdicts.by_key
    return {
        t.key: known[t.key] for t in tasks if t.key in known and known[t.key].prompt == t.prompt
    }


def _identity(options: JudgeOptions) -> dict[str, Any]:
    """Return the settings that decide a verdict; the prompt has a hash of its own."""
    return {"model": options.endpoint.model, "extra": options.endpoint.extra, "asks": options.asks}


def confirmed(
    endpoint: Endpoint,
    console: Console,
    todo: Sequence[Task],
    yes: bool,
    prices: tuple[float, float] | None = None,
) -> bool:
    """Say what judging takes and ask whether to send it, unless ``yes``. Raises InputError."""
    line = estimate((task.text, task.pictures) for task in todo).line(prices)
    _say(console, f"mmkv: judging takes {line}, sent to {endpoint.url}")
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InputError("nothing was sent: there is no terminal to confirm on; add --yes")
    return typer.confirm("Send them?", err=True)


def ask_all(
    endpoint: Endpoint,
    console: Console,
    verdicts: Verdicts,
    todo: Sequence[Task],
    asks: int,
    workers: int,
    quiet: bool,
    read: Reader = read_scores,
) -> None:
    """Judge ``todo``, with a bar, and write each verdict down; arguments as of :func:`judge_all`.

    Raises:
        MmkvError: the judge cannot be used.
    """

    def note(text: str) -> None:
        if not quiet:
            _say(console, f"mmkv: judge: {text}")

    client = JudgeClient(endpoint, note)
    columns = (TextColumn("judging"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = console.is_terminal and not quiet
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        bar = progress.add_task("judging", total=len(todo))
        for verdict in judge_all(
            client,
            todo,
            asks,
            workers,
            lambda task, why: _say(
                console, f"mmkv: failed: dialogue {task.dialogue}, question {task.turn + 1}: {why}"
            ),
            read,
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
    valid = standing(verdicts, tasks)
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


def compare(folders: Sequence[Path], without_failures: bool = False) -> Table:
    """Make a row per run, failures as 0 unless ``without_failures``.

    ``vs first``: Overall as a share of the first run's. ``p``: paired permutation test of Overall
    over the dialogues both have, failures as 0 (mmkv.eval.measure.stats.paired). Raises
    InputError for a folder without scores.
    """
    runs = [(path, page) for folder in folders for path, page in _runs(folder)]
    judges = {str(page["judge"]) for _, page in runs}
    title = "MMDU, without failures" if without_failures else "MMDU, failures as 0"
    if len(judges) > 1:
        title += " (different judges: the rows cannot be compared)"
    columns = ("run", "policy", "budget", *COLUMNS, "failures", "vs first", "p")
    table = Table(title, columns)
    kind = "without_failures" if without_failures else "failures_as_0"
    first = runs[0][1]
    for path, page in runs:
        settings = page.get("run") or {}
        budget = settings.get("budget") or {}
        table.add(
            path.parent if path.name.startswith("judge-") else path,
            settings.get("policy", "-"),
            f"{budget['value']:g} {budget['unit']}" if budget else "-",
            *cells(page[kind]),
            page["questions"] - page["judged"],
            _relative(page[kind], first[kind]),
            "-" if page is first else _p(page["scores"], first["scores"]),
        )
    return table


def _runs(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Find the scores in the folder itself or in the judges' folders of a folder of answers."""
    places = [folder, *sorted(folder.glob("judge-*"))]
    found = [(place, read_json(place / SCORES_FILE)) for place in places]
    pages = [(place, page) for place, page in found if page is not None]
    if not pages:
        raise InputError(f"{folder} holds no {SCORES_FILE}; run mmkv mmdu judge for it first")
    for place, page in pages:
        wanted = ("judge", "failures_as_0", "without_failures", "scores", "questions", "judged")
        if not isinstance(page, dict) or any(key not in page for key in wanted):
            raise InputError(
                f"{place / SCORES_FILE} is not of mmkv mmdu judge; name another folder"
            )
    return pages


def _relative(means: dict[str, float] | None, first: dict[str, float] | None) -> str:
    if not means or not first or not first["Overall Score"]:
        return "-"
    return f"{100 * means['Overall Score'] / first['Overall Score']:.1f} %"


def _p(scores: dict[str, Any], first: dict[str, Any]) -> str:
    from mmkv.eval.measure.stats import paired

    both = [name for name in first if name in scores and len(scores[name]) == len(first[name])]
    if not both:
        return "-"
    mine, theirs = ({name: table[name] for name in both} for table in (scores, first))
    counts = [len(row) for row in mine.values()]
    return f"{paired(overall_sums(mine), overall_sums(theirs), counts).p:.3f}"
