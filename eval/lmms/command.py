"""``mmkv eval``: run lmms-eval on this engine and check its results file, not its exit code.

lmms-eval 0.7.3 ends with exit code 0 when an evaluation has failed. Nothing is installed here, and
nothing heavy imported: lmms-eval runs in a process of its own.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mmkv.cli import arguments
from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.source import locate
from mmkv.engine.paths import is_folder

_RUN, _MODEL = "Run", arguments.CACHE


def _ignore_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# Ctrl-C reaches lmms-eval's process, too, which would show a traceback: it is ended from here.
_CHILD_IGNORES_CTRL_C = _ignore_ctrl_c if os.name == "posix" else None


class EvaluationError(MmkvError):
    """A task failed, or the evaluation ended without results."""


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def evaluate(
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Tasks, comma-separated or repeated; NAME_local reads --data."),
    ] = None,
    reproduce: Annotated[
        str | None,
        typer.Option(
            metavar="PAPER:TABLE",
            help="Instead: the commands of a paper's table; --policy, --budget choose rows. "
            "list: all tables.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the commands of --reproduce.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Model folder or hub id. Default: the small bundled model."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of local data; tasks then read nothing else."),
    ] = None,
    output: Annotated[
        Path, typer.Option(help="Folder for results and samples.", rich_help_panel=_RUN)
    ] = Path("lmms-results"),
    limit: Annotated[
        float | None,
        typer.Option(help="Documents per task, or a share below 1.", rich_help_panel=_RUN),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Most documents in a decode step.", rich_help_panel=_RUN)
    ] = 1,
    force_simple: Annotated[
        bool,
        typer.Option(
            "--force-simple",
            help="Use the simple form, which likelihood tasks need.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    gen_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Override generation settings of the tasks: max_new_tokens=512,...",
            rich_help_panel=_RUN,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, help="Replies to each question, for tasks with pass@1.", rich_help_panel=_RUN
        ),
    ] = None,
    budget: Annotated[str | None, arguments.option("budget")] = None,
    policy: Annotated[str | None, arguments.option("policy")] = None,
    gates: Annotated[str | None, arguments.option("gates")] = None,
    device: Annotated[str | None, arguments.option("device")] = None,
    dtype: Annotated[str | None, arguments.option("dtype")] = None,
    model_args: Annotated[
        str | None,
        typer.Option(help="Further model arguments: fps=2,seed=1,...", rich_help_panel=_MODEL),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(help="After --: options for lmms-eval itself.")
    ] = None,
) -> None:
    """Evaluate with lmms-eval; exit 1 when a task failed or had no samples."""
    from mmkv.resources import bundled_model, gates_source

    if reproduce is not None:
        if any((tasks, model_args, force_simple, more)):
            raise InputError(
                "a table names its tasks and model arguments; leave out --tasks, --model-args, "
                "--force-simple and options after --, or run the commands of --dry-run yourself"
            )
        choice: dict[str, Any] = {
            "data": None if data is None else str(data),
            "output": str(output),
            **{"model": model, "gates": gates, "policy": policy, "budget": budget},
            **{"samples": samples, "limit": limit, "batch_size": batch_size},
            **{"device": device, "dtype": dtype, "gen_kwargs": gen_kwargs},
        }
        _reproduce(reproduce, choice, dry_run)
        return
    if dry_run:
        raise InputError("--dry-run prints the commands of a table; add --reproduce PAPER:TABLE")
    named = {
        "pretrained": str(bundled_model()) if model is None else model,
        "budget": budget,
        "policy": policy,
        "gates": None if gates is None else gates_source(gates),
        "device": device,
        "dtype": dtype,
    }
    locate(str(named["pretrained"]))
    if gen_kwargs:
        generation = _split([gen_kwargs])
        if (samples or 1) > 1 and {"temperature=0", "do_sample=False"} & set(generation):
            raise InputError("greedy replies to a question are all the same; drop --samples")
        if any(pair.partition("=")[0].strip() == "max_new_tokens" for pair in generation):
            # The user's length of replies holds for models that think, too.
            named["thinking_floor"] = "0"
    settings = _model_args(named, model_args)
    options = ["--batch_size", str(batch_size), "--output_path", str(output), "--log_samples"]
    options += _lmms_options(limit, gen_kwargs, force_simple, more or ())
    raise typer.Exit(EvalJob(_split(tasks or ()), settings, options, output, data, samples).run())


def _lmms_options(
    limit: float | None, gen_kwargs: str | None, force_simple: bool, more: Sequence[str]
) -> list[str]:
    """Return the options that lmms-eval takes as they are. Raises InputError."""
    options: list[str] = []
    if limit is not None:
        if not limit > 0:
            raise InputError(f"--limit is {limit:g}; give a number of documents, or a share")
        options += ["--limit", f"{limit:g}"]
    if gen_kwargs:
        options += ["--gen_kwargs", gen_kwargs]
    if force_simple:
        options.append("--force_simple")
    return [*options, *more]


def _split(given: Sequence[str]) -> list[str]:
    """Return the words between commas, white space and empty ones left out."""
    return [word.strip() for group in given for word in group.split(",") if word.strip()]


def _reproduce(name: str, given: dict[str, Any], dry_run: bool) -> None:
    """Print a table's commands, or run them and print what came out."""
    from mmkv.eval.papers.reproduce import TableChoice, find, lines, listed, run

    if name == "list":
        print(listed())
        return
    table = find(name)
    choice = TableChoice(**{key: value for key, value in given.items() if value is not None})
    if dry_run:
        print("\n".join(lines(table, choice)))
    else:
        print(run(table, choice))


@dataclass(frozen=True)
class EvalJob:
    """One run of lmms-eval."""

    tasks: list[str]
    model_args: str
    options: list[str]
    output: Path
    data: Path | None
    samples: int | None = None

    def run(self) -> int:
        """Run it and check what it wrote. Raises InputError before, EvaluationError after."""
        from mmkv.eval.lmms import reports
        from mmkv.training.measure.record import require_output

        if not self.tasks:
            raise InputError("no task is named; give --tasks NAME,NAME, or --reproduce PAPER:TABLE")
        require_output(self.output)
        name = f"replies-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        kept = (self.output / name).resolve()
        try:
            code = self._run({reports.REPLIES_VARIABLE: str(kept)})
        except BaseException:
            for place in reports.found(kept)[:1]:
                print(f"mmkv: the replies that were finished are in {place}", file=sys.stderr)
            raise
        for place in reports.found(kept):  # what it holds is in the samples, too
            place.unlink()
        return code

    def _run(self, variables: dict[str, str]) -> int:
        from mmkv.eval.lmms.reports import CAUSE_VARIABLE, cause, cut_prompts
        from mmkv.eval.lmms.tasks import find, require_known, shipped_folder, write
        from mmkv.eval.long_text.benchmarks import expanded

        before, wanted = self._results(), expanded(self.tasks)
        with tempfile.TemporaryDirectory(prefix="mmkv-eval-") as folder:
            names = write(wanted, Path(folder), self.data, self.samples)
            require_known(names, [Path(folder), shipped_folder()])
            # Other names may be groups, tags or patterns, which results list by their tasks.
            single = [n for n in names if find(n, Path(folder)) or find(n, shipped_folder())]
            for given, name in zip(wanted, names, strict=True):
                if given != name:
                    print(f"mmkv: task {given} runs as {name}", file=sys.stderr)
            joined = ",".join(names)
            if is_folder(Path(joined)):
                raise InputError(
                    f"lmms-eval would take the folder ./{joined} for the tasks; run elsewhere"
                )
            cause_file = Path(folder) / "cause.txt"
            env = {**_environment(), **variables, CAUSE_VARIABLE: str(cause_file)}
            code = subprocess.run(
                self._command(joined, folder), env=env, preexec_fn=_CHILD_IGNORES_CTRL_C
            ).returncode
            reason = cause(cause_file)
        if reason:
            raise EvaluationError(reason)
        if code:
            raise EvaluationError(f"lmms-eval ended with exit code {code}; its message is above")
        if os.environ.get("RANK", "0") != "0":
            return 0  # the first process of several writes and checks the results
        found = sorted(self._results() - before)
        if not found:
            raise EvaluationError("lmms-eval ended without results; its message is above")
        for line in cut_prompts(found[-1]):
            print(f"mmkv: {line}", file=sys.stderr)
        if wrong := problems(found[-1], single):
            raise EvaluationError(f"{'; '.join(wrong)} (results in {found[-1]})")
        print(f"mmkv: results in {found[-1]}", file=sys.stderr)
        return 0

    def _command(self, names: str, folder: str) -> list[str]:
        return [
            sys.executable,
            "-P",  # or a folder eval/ or engine/ where the user stands would be imported
            *("-m", "lmms_eval", "--model", "mmkv", "--model_args", self.model_args),
            *("--tasks", names, "--include_path", folder, *self.options),
        ]

    def _results(self) -> set[Path]:
        # lmms-eval makes a folder for each model. Further down there may be a whole disk.
        return {*self.output.glob("*_results.json"), *self.output.glob("*/*_results.json")}


def problems(results: Path, names: Sequence[str]) -> list[str]:
    """Find the problems of a results file: tasks that are missing, empty or without a score.

    ``names``: tasks that must be there; all others in the file are looked at too.
    """
    content: dict[str, Any] = json.loads(results.read_text("utf-8"))
    scores, counts = content.get("results", {}), content.get("n-samples", {})
    wrong = [f"task {name} gave no result" for name in names if name not in counts]
    if not counts and not wrong:
        wrong.append("no task gave a result")
    for name, count in counts.items():
        samples = results.name.removesuffix("results.json") + f"samples_{name}.jsonl"
        wanted, there = count.get("effective") or 0, _lines(results.with_name(samples))
        if not wanted or not there:
            wrong.append(f"task {name} has no samples")
        elif there < wanted:
            wrong.append(f"task {name} has {there} of {wanted} samples")
        elif not any(map(_is_score, scores.get(name, {}).items())):
            wrong.append(f"task {name} has no score")
    return wrong


def _is_score(item: tuple[str, Any]) -> bool:
    name, value = item
    if "_stderr" in name or isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value)


def _lines(path: Path) -> int:
    if not path.is_file():
        return 0
    with path.open(encoding="utf-8") as file:
        return sum(1 for _ in file)


def _model_args(named: dict[str, str | None], more: str | None) -> str:
    """Return ``key=value,...``, names and numbers checked: lmms-eval takes half a minute to get
    there.

    Raises InputError, also for a value that this form cannot carry.
    """
    from mmkv.eval.lmms.settings import LmmsSettings

    given = {name: value for name, value in named.items() if value is not None}
    if "policy" in given:  # whose parameters may be split by ; as well
        given["policy"] = given["policy"].replace(",", ";")
    for name, value in given.items():
        if name != "policy" and ("," in value or "=" in value):
            raise InputError(f"{name} {value!r} holds a comma or =, which lmms-eval splits")
    pairs = [pair.partition("=") for pair in (more or "").split(",") if pair]
    if not all(equals for _, equals, _ in pairs):
        raise InputError(f"--model-args {more!r} is not understood; write name=value,name=value")
    given |= {name.strip(): value for name, _, value in pairs}
    if "batch_size" in given:
        raise InputError("batch_size is not a model argument; write --batch-size")
    LmmsSettings.of(given)
    return ",".join(f"{name}={value}" for name, value in given.items())


def _environment() -> dict[str, str]:
    """Return the child's environment: Video-MMMU's task file fails without HF_HOME."""
    home = os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    return {"HF_HOME": home, **os.environ}
