"""``mmkv eval --reproduce PAPER:TABLE``: a paper's table by one command.

``tables.yaml`` has the tables; benchmarks/notes/reproduce.md says how to use them. A row of a table
is one command. Rows whose results are there are not run again.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.source import locate
from mmkv.engine.paths import is_folder

_EVAL = (
    "mmkv eval --tasks {tasks} --data {data} --model {model} {gates} --policy {policy} {budget} "
    "{samples} {options} {limit} {batch} {device} {dtype} --output {row}"
)


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: ``metric`` of ``task`` (None: its first one), times ``factor``."""

    label: str
    task: str
    metric: str | None
    factor: float


@dataclass(frozen=True)
class TableRow:
    """A row: what the paper calls it, policy and budget (None: no bound), and its figures."""

    label: str
    policy: str
    budget: str | None
    figures: tuple[str, ...]

    @property
    def folder(self) -> str:
        """Return the name of the folder for its results."""
        words = f"{self.policy}-{self.budget}" if self.budget else self.policy
        return re.sub(r"[^\w.+-]+", "-", words)

    @property
    def name(self) -> str:
        """Return the policy's name, without parameters."""
        return re.split(r"[:\[]", self.policy)[0]


@dataclass(frozen=True)
class PaperTable:
    """A table or figure; the attributes are those that ``tables.yaml`` names."""

    name: str
    where: str
    shows: str
    model: str
    rows: tuple[TableRow, ...]
    columns: tuple[TableColumn, ...] = ()
    gates: dict[str, str] = field(default_factory=dict)
    train: dict[str, list[str]] = field(default_factory=dict)
    by_policy: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    commands: tuple[str, ...] = (_EVAL,)
    budget_as: str | None = None
    samples: int | None = None
    parts: tuple[dict[str, Any], ...] = ({},)
    hours: int | None = None
    figures: str = ""
    checked: str = ""
    note: str = ""

    @property
    def tasks(self) -> list[str]:
        """List the tasks of its columns, each once."""
        return list(dict.fromkeys(column.task for column in self.columns))

    @property
    def evaluates(self) -> bool:
        """Whether its rows are runs of ``mmkv eval``."""
        return self.commands == (_EVAL,)


@dataclass(frozen=True)
class TableChoice:
    """What the user says about a table: where data and results are, and what of it to run.

    Attributes:
        model, gates: in place of the table's; policy, budget: only rows with these.
    """

    data: str = "DATA"
    output: str = "lmms-results"
    model: str | None = None
    gates: str | None = None
    policy: str | None = None
    budget: str | None = None
    samples: int | None = None
    limit: float | None = None
    batch_size: int = 1
    device: str | None = None
    dtype: str | None = None
    gen_kwargs: str | None = None


@cache
def tables() -> dict[str, PaperTable]:
    """Read all tables by their names, ``PAPER:TABLE``."""
    text = (resources.files("mmkv.eval.papers") / "tables.yaml").read_text("utf-8")
    content = yaml.safe_load(text)
    return {name: _table(name, given) for name, given in content["tables"].items()}


def find(name: str) -> PaperTable:
    """Return the table of that name. Raises InputError, which names what comes near."""
    found = tables().get(name.lower().replace(" ", ""))
    if found is None:
        near = difflib.get_close_matches(name.lower(), tables(), n=3, cutoff=0.4)
        meant = f"did you mean {' or '.join(near)}; " if near else ""
        raise InputError(f"no table {name}; {meant}--reproduce list shows all")
    return found


def _table(name: str, given: dict[str, Any]) -> PaperTable:
    made = {key: value for key, value in given.items() if key not in ("columns", "rows", "grid")}
    columns = [
        TableColumn(label, task, metric, float(factor))
        for label, (task, metric, factor) in given.get("columns", {}).items()
    ]
    for key in ("options", "commands", "parts"):
        if key in made:
            made[key] = tuple(made[key])
    return PaperTable(
        name=name,
        columns=tuple(columns),
        rows=tuple([*_rows(given.get("rows", "")), *_grid(**given.get("grid", {}))]),
        **made,
    )


def _rows(text: str) -> list[TableRow]:
    made = []
    for line in text.splitlines():
        label, policy, budget, figures = (part.strip() for part in line.split("|"))
        made.append(TableRow(label, policy, budget or None, tuple(figures.split())))
    return made


def _grid(policies: Sequence[str] = (), budgets: Sequence[int] = ()) -> list[TableRow]:
    made = []
    for policy in policies:
        kept = [None] if policy == "full" else list(map(str, budgets))
        made += [TableRow(policy, policy, budget, ()) for budget in kept]
    return made


# --- Commands -------------------------------------------------------------------------------------


def chosen_rows(table: PaperTable, choice: TableChoice) -> list[TableRow]:
    """Return the rows that the user wants. Raises InputError: there is none."""
    rows = [
        row
        for row in table.rows
        if choice.policy in (None, row.policy, row.name) and choice.budget in (None, row.budget)
    ]
    if not rows:
        there = sorted({row.policy for row in table.rows})
        budgets = dict.fromkeys(row.budget for row in table.rows if row.budget is not None)
        raise InputError(
            f"{table.name} has no such row; it has the policies {', '.join(there)} and the budgets "
            f"{', '.join(budgets)}"
        )
    return rows


def row_folder(table: PaperTable, row: TableRow, choice: TableChoice) -> Path:
    """Return the folder for a row's results."""
    return Path(choice.output) / table.name.replace(":", "-") / row.folder


def commands(table: PaperTable, row: TableRow, choice: TableChoice) -> list[list[str]]:
    """Return the commands of a row, as words."""
    gates = choice.gates or table.gates.get(row.name)
    gates = gates if row.name in table.gates else None
    # evict_every=N: mmkv eval takes it as a model argument, other commands as --evict-every N.
    evict_every = table.by_policy.get(row.name)
    budget_option = row.budget if table.budget_as is None else None
    model_args = [f"{table.budget_as}={row.budget}"] if row.budget and table.budget_as else []
    model_args += [evict_every] if evict_every else []
    made = []
    for part in table.parts:
        samples = choice.samples or part.get("samples", table.samples)
        values = {
            "tasks": shlex.quote(",".join(part.get("tasks", table.tasks))),
            "data": shlex.quote(choice.data),
            "model": shlex.quote(choice.model or table.model),
            "gates": _given("gates", gates),
            "policy": shlex.quote(row.policy),
            "method": shlex.quote(f"{row.policy}:{gates}" if gates else row.policy),
            "budget": _given("budget", budget_option),
            "samples": _given("samples", samples),
            "options": shlex.join(_options(table, part, model_args, choice)),
            "interval": _given("evict-every", (evict_every or "").partition("=")[2]),
            "limit": _given("limit", choice.limit and f"{choice.limit:g}"),
            "batch": _given("batch-size", choice.batch_size if choice.batch_size != 1 else None),
            "device": _given("device", choice.device),
            "dtype": _given("dtype", choice.dtype),
            "row": shlex.quote(str(row_folder(table, row, choice))),
        }
        made += [shlex.split(one.format(**values)) for one in table.commands]
    return made


def _given(name: str, value: object) -> str:
    """Return an option with its value, as a shell reads it; nothing for what is not set."""
    return f"--{name} {shlex.quote(str(value))}" if value else ""


def _options(
    table: PaperTable, part: dict[str, Any], model_args: Sequence[str], choice: TableChoice
) -> list[str]:
    """Return the options of a table and its part, the row's model arguments, the user's settings.

    What is given twice is joined by a comma.
    """
    words = [*table.options, *part.get("options", ())]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    pairs += [("--model-args", one) for one in model_args]
    pairs += [("--gen-kwargs", choice.gen_kwargs)] if choice.gen_kwargs else []
    made: dict[str, list[str]] = {}
    for name, value in pairs:
        made.setdefault(name, []).append(value)
    if choice.limit:
        made.pop("--limit", None)
    return [word for name, values in made.items() for word in (name, ",".join(values))]


def differs(table: PaperTable) -> str:
    """Return where a table stands, its hours, and how its commands differ, as a shell comment."""
    hours = "" if table.hours is None else f", a guess of {table.hours} hours on one H100"
    return f"# {table.where}{hours}: {_one_line(table.note)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def lines(table: PaperTable, choice: TableChoice) -> list[str]:
    """Return the commands of all rows that the user wants, those that train first.

    Comments say how they differ from the paper.
    """
    rows = chosen_rows(table, choice)
    wanted: set[str | None] = {choice.model or table.model}
    wanted |= set() if choice.gates else {table.gates.get(row.name) for row in rows}
    return [
        *(_one_line(one) for name, text in table.train.items() if name in wanted for one in text),
        differs(table),
        *(shlex.join(command) for row in rows for command in commands(table, row, choice)),
    ]


# --- What is missing ------------------------------------------------------------------------------


def missing(table: PaperTable, choice: TableChoice) -> list[str]:
    """List what has to be there before the first command can run: models, gates, data."""
    rows, found = chosen_rows(table, choice), []
    model = choice.model or table.model
    sources = [] if model == "random weights" else [("model", model)]
    for row in rows:
        needs = row.name in table.gates
        sources += [("gates", choice.gates or table.gates[row.name])] if needs else []
    for kind, source in dict.fromkeys(sources):
        if source in table.train and not is_folder(Path(source)):
            found.append(f"{kind} {source}: to be trained, see --dry-run")
        elif problem := _not_there(kind, source):
            found.append(problem)
    if table.columns and not is_folder(Path(choice.data)):
        found.append(f"data: no folder {choice.data}; give --data FOLDER")
    elif table.columns:
        found += without_data(table.tasks, Path(choice.data))
    return found


def _not_there(kind: str, source: str) -> str | None:
    try:
        place = locate(source) if kind == "model" else source
    except MmkvError as error:
        return str(error)
    if is_folder(Path(place)) or (kind == "gates" and re.fullmatch(r"[\w.-]+", place)):
        return None
    if place.startswith((".", "/", "~")) or place.count("/") != 1:
        return f"{kind} {source}: no such folder"
    if os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0"):
        return None  # it is fetched
    from huggingface_hub import try_to_load_from_cache

    names = ("config.json",) if kind == "model" else ("gates.safetensors", "trimkv_weights.pth")
    if any(isinstance(try_to_load_from_cache(place, name), str) for name in names):
        return None
    return f"{kind} {source}: not in the cache, and HF_HUB_OFFLINE is set; hf download {source}"


def without_data(tasks: Sequence[str], data: Path) -> list[str]:
    """Say of each task that finds no rows below ``data`` what it lacks."""
    from mmkv.eval.lmms.tasks import write

    found = []
    with tempfile.TemporaryDirectory(prefix="mmkv-reproduce-") as folder:
        for task in tasks:
            try:
                write([task], Path(folder), data)
            except MmkvError as error:
                found.append(str(error))
    return found


# --- Running --------------------------------------------------------------------------------------


def run(table: PaperTable, choice: TableChoice) -> str:
    """Run the rows that have no results yet; the table of figures, ours beside the paper's.

    Raises InputError: something is missing; a row failed.
    """
    if lacking := missing(table, choice):
        raise InputError(f"{table.name} cannot run: {'; '.join(lacking)}")
    rows = chosen_rows(table, choice)
    print(differs(table), file=sys.stderr)
    for number, row in enumerate(rows, 1):
        folder = row_folder(table, row, choice)
        if (folder / _DONE).is_file():
            print(f"mmkv: {row.folder} is there ({folder})", file=sys.stderr)
            continue
        wanted = commands(table, row, choice)
        folder.mkdir(parents=True, exist_ok=True)
        for words in wanted:
            print(f"mmkv: {number} of {len(rows)}: {shlex.join(words)}", file=sys.stderr)
            code = subprocess.run(_started(words)).returncode
            if code:
                raise InputError(f"{row.folder} ended with exit code {code}; its message is above")
        (folder / _DONE).write_text("\n".join(map(shlex.join, wanted)) + "\n")
    return compared(table, choice)


_DONE = "command.txt"  # in a row's folder once it is finished


def _started(words: Sequence[str]) -> list[str]:
    """Return a command for this Python, whatever PATH has."""
    if words[0] == "mmkv":
        return [sys.executable, "-P", "-m", "mmkv", *words[1:]]
    return [sys.executable, *words[1:]]


def compared(table: PaperTable, choice: TableChoice) -> str:
    """Return a Markdown table: for each row and column our figure, and the paper's in brackets.

    Of a table that is not made by ``mmkv eval``: where its results are, and the paper's figures.
    """
    if not table.evaluates:
        place = Path(choice.output) / table.name.replace(":", "-")
        paper = f"\nthe paper's figures: {_one_line(table.figures)}" if table.figures else ""
        return f"results are below {place}{paper}"
    heads = ["", *(column.label for column in table.columns)]
    made = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in chosen_rows(table, choice):
        label = f"{row.label}, {row.budget}" if row.budget else row.label
        found = _results(row_folder(table, row, choice))
        cells = []
        for at, column in enumerate(table.columns):
            paper = row.figures[at] if row.figures else "-"
            ours = _figure(found, column)
            shown = "-" if ours is None else f"{ours:.{_digits(paper)}f}"
            cells.append(shown if paper == "-" else f"{shown} ({paper})")
        made.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(made)


def _digits(figure: str) -> int:
    return len(figure.partition(".")[2]) if "." in figure else 1


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the scores of a row's newest results files, by task."""
    found: dict[str, dict[str, Any]] = {}
    files = [*folder.glob("*_results.json"), *folder.glob("*/*_results.json")]
    for path in sorted(files, key=lambda path: path.name):
        found |= json.loads(path.read_text("utf-8"))["results"]
    return found


def _figure(found: dict[str, dict[str, Any]], column: TableColumn) -> float | None:
    names = (f"{column.task}_local", f"{column.task}_mmkv", column.task)
    scores = next((found[name] for name in names if name in found), {})
    for key, value in scores.items():
        metric, comma, _ = key.partition(",")
        right = metric == column.metric or (column.metric is None and comma)
        if right and "stderr" not in metric and isinstance(value, int | float):
            return value * column.factor
    return None


# --- The list ------------------------------------------------------------------------------------


def listed() -> str:
    """Return a line for each table."""
    width = max(map(len, tables()))
    return "\n".join(f"{table.name:{width}}  {table.shows}" for table in tables().values())
