"""``python -m training.adapt``: train a model for the bounded cache that it will decode on.

``--method distill`` and ``--method grpo`` after G-KV; see :mod:`mmkv.training.adapt_run`. Needs the
``adapt`` extra.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mmkv.engine.interrupts import quiet_imports

with quiet_imports(__name__ == "__main__"):
    import typer

    from mmkv.cli.arguments import on_command_line
    from mmkv.engine.errors import InputError
    from mmkv.engine.options import declared
    from mmkv.training.command import options_of, run_program
    from mmkv.training.settings import AdaptSettings, DataSettings

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

_NEEDS = {"distill": ("accelerate", "peft"), "grpo": ("accelerate", "datasets", "peft", "trl")}
_READ = ("data", "max_length", "long_chats", "media_root")
_DATA = {"data": "[WEIGHT*][KIND:]PATH, scenes:KIND or tasks:KIND, as training.distill's."}


@app.command()
@options_of("settings", AdaptSettings)
@options_of("documents", DataSettings, names=_READ, helps=_DATA)
def adapt(context: typer.Context, settings: AdaptSettings, documents: DataSettings) -> None:
    """Train a model, or a LoRA adapter, for the bounded cache that it will decode on."""
    require_packages(settings.method)
    import torch
    from rich.console import Console

    from mmkv.training.adapt_run import adapt as run
    from mmkv.training.adapt_run import load_compressed
    from mmkv.training.data.examples import examples

    for name, option in sorted(declared(AdaptSettings).items()):
        if option.field in settings.unread and on_command_line(context, name):
            method = "--full" if settings.full else f"--replies {settings.replies}"
            raise InputError(
                f"--{name.replace('_', '-')} is not read by this run (--method "
                f"{settings.method}, {method}); leave it out"
            )
    if settings.threads:
        torch.set_num_threads(settings.threads)
    console = Console(stderr=True, markup=False)  # file names may hold brackets
    count = settings.steps * settings.documents
    train = examples(
        settings.model, documents.data, count, settings.seed, report=console.print, **documents.how
    )
    run(
        settings,
        load_compressed(settings),
        train,
        trainer_of(settings.method),
        tuple(documents.data),
        documents.how,
    )
    if left_out := train.encoder.summary():
        console.print(left_out)
    console.print(f"saved {'the model' if settings.full else 'the adapter'} in {settings.output}")


def trainer_of(method: str) -> Callable[..., Any]:
    """Return what makes the trainer of a method; only grpo imports TRL."""
    if method == "grpo":
        from mmkv.training.grpo import grpo_trainer

        return grpo_trainer
    from mmkv.training.adapt_run import distill_trainer

    return distill_trainer


def require_packages(method: str) -> None:
    """Raise InputError where a package of the ``adapt`` extra is missing."""
    missing = [name for name in _NEEDS[method] if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--method {method} needs {', '.join(missing)}: pip install 'mmkv[adapt]'")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run_program(app, "adapt", arguments)


if __name__ == "__main__":
    from mmkv.cli.entry import leave, let_idle_threads_sleep

    let_idle_threads_sleep()
    code = main()
    if code == 130:  # as in training.distill
        leave(code)
    sys.exit(code)
