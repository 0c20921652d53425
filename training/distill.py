"""``python -m training.distill``: train retention gates or write gates for a frozen checkpoint.

Needs the ``train`` extra. Several processes: ``torchrun --nproc-per-node N --no-python mmkv
distill`` or ``accelerate launch --no_python mmkv distill``, options as for one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mmkv.engine.interrupts import quiet_imports

with quiet_imports(__name__ == "__main__"):
    import typer

    from mmkv.cli.arguments import on_command_line
    from mmkv.engine.errors import InputError
    from mmkv.training.command import options_of, run_program
    from mmkv.training.settings import DEFAULT, RECIPES, DataSettings, TrainingSettings

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

_THREADS_PER_CORE = 4


def chosen(values: dict[str, Any], others: dict[str, Any]) -> TrainingSettings:
    """Return the settings of the recipe, changed by the options that were given.

    One that is given at the default's value counts as given. Raises InputError.
    """
    context = others["context"]
    given = {name: value for name, value in values.items() if on_command_line(context, name)}
    method = given.get("method")
    recipe = given.pop("recipe", method if method in RECIPES else DEFAULT)
    return TrainingSettings.of(recipe, **given)


@app.command()
@options_of("settings", TrainingSettings, chosen)
@options_of("documents", DataSettings)
def distill(context: typer.Context, settings: TrainingSettings, documents: DataSettings) -> None:
    """Train retention gates or write gates for a frozen checkpoint."""
    if not all(map(importlib.util.find_spec, ("accelerate", "matplotlib"))):
        raise InputError("training needs the train extra: pip install 'mmkv[train]'")
    import torch
    from rich.console import Console

    from mmkv.training.data.examples import PackedExamples, examples
    from mmkv.training.folder import first_process, processes
    from mmkv.training.run import distill as run
    from mmkv.training.run import load_backbone

    most = _THREADS_PER_CORE * (os.cpu_count() or 1)
    if settings.threads > most:  # OpenMP ends the process when it cannot start so many
        raise InputError(f"--threads is {settings.threads}; give {most} or fewer on this machine")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.epochs and documents.pack:
        raise InputError(
            "--pack fills a pass with as many rows as fit, so nobody knows how many steps "
            f"{settings.epochs:g} epochs are; give --steps, or leave --pack out"
        )
    engine = load_backbone(settings)
    console = Console(stderr=True, markup=False)  # file names may hold brackets
    model, data, how = settings.model, documents.data, documents.how
    train = examples(
        model, data, 0, settings.seed, report=console.print, pack=documents.pack, **how
    )
    step = settings.batch * settings.accumulate * processes()
    if settings.epochs:
        rows = sum(map(len, train.mixture.sources))
        settings = settings.for_rows(rows, processes())
        console.print(
            f"{settings.epochs:g} epochs of {rows:,} rows, {step} a step: {settings.steps:,} steps"
        )
    train.length = settings.steps * step
    held = _held_out(model, documents, console.print)
    options = {
        **how,
        "pack": documents.pack,
        "eval_data": documents.eval_data or [],
        "eval_samples": len(held),
    }
    passes = PackedExamples(train) if documents.pack else train
    described = run(settings, engine, passes, held, data, options)
    if left_out := train.encoder.summary():
        console.print(left_out)
    if first_process():
        outcome = described["results"] or "no held-out data given"
        console.print(f"saved gates in {settings.output}: {outcome}")


def _held_out(model: str, documents: DataSettings, report: Callable[[str], None]) -> list[Any]:
    """Return the examples of ``--eval-data``, which are not trained on."""
    from mmkv.training.data.examples import examples

    if not documents.eval_data:
        return []
    count = documents.eval_samples
    watched = examples(
        model, documents.eval_data, count, 0, split="heldout", report=report, **documents.how
    )
    held = [watched[index] for index in range(count)]
    if left_out := watched.encoder.summary():
        report(f"held out: {left_out}")
    return held


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run_program(app, "distill", arguments)


command = typer.Typer(add_completion=False, rich_markup_mode="rich")


@command.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def distill_command(context: typer.Context) -> int:
    """Train retention gates for a checkpoint (as python -m mmkv.training.distill)."""
    return main(context.args)


if __name__ == "__main__":
    from mmkv.cli.entry import leave, let_idle_threads_sleep

    let_idle_threads_sleep()
    code = main()
    if code == 130:  # a Ctrl-C within an import would make Python end by the signal
        leave(code)
    sys.exit(code)
