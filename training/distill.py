"""``python -m training.distill``: train retention gates or write gates for a frozen checkpoint.

Needs the ``train`` extra. Several processes: ``torchrun --nproc-per-node N --no-python mmkv
distill`` or ``accelerate launch --no_python mmkv distill``, options as for one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from mmkv.engine.interrupts import quiet_imports

with quiet_imports(__name__ == "__main__"):
    import typer

    from mmkv.engine.errors import InputError, MmkvError, one_line

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

_RESUME = "the same command with --resume continues from the last checkpoint in --output"
_THREADS_PER_CORE = 4
_DATA, _GATES, _LOSS, _RUN = "Data", "Gates", "Loss", "Run"


def option(help: str, panel: str, *names: str) -> Any:
    """Return an option with its help, in a panel of --help."""
    return typer.Option(*names, help=help, rich_help_panel=panel)


@app.command()
def distill(
    context: typer.Context,
    model: Annotated[str, option("Checkpoint folder or hub id; stays frozen.", _RUN)],
    data: Annotated[
        list[str],
        option(
            "[WEIGHT*][KIND:]PATH, kinds chat, llava, mmdu, pairs, text (found by content when "
            "left out); or [WEIGHT*]NAME[:FOLDER], a paper's set: m4-instruct, llava-video, "
            "r1-onevision, openr1-math, llava-next, synthlong, booksum, buddhi, longalpaca, "
            "fineweb-edu, nemotron-math, deepscaler; or niah[:LOW-HIGH], needles in texts of so "
            "many tokens; or mixture:FILE (also FILE.toml), mixture:dbtrimkv[:FOLDER] and "
            "mixture:trimkv-long[:FOLDER], the papers'; or [WEIGHT*]scenes:KIND for the bundled "
            "model (dense, sparse, clip, stream, 40-pictures, 96-distractors, 256-distractors); or "
            "[WEIGHT*]tasks:KIND (recall, needles, memory, far-needles, far-memory, records, "
            "assigned, haystack). Repeatable.",
            _DATA,
        ),
    ],
    output: Annotated[str, option("Folder for gates, checkpoints, curve and card.", _RUN)],
    eval_data: Annotated[
        list[str] | None,
        option("Held-out data, as --data. Without it nothing is measured.", _DATA),
    ] = None,
    eval_samples: Annotated[int, option("Held-out conversations to use.", _DATA)] = 32,
    max_length: Annotated[int, option("Longest document, in tokens.", _DATA)] = 4096,
    long_chats: Annotated[
        str, option("Chats longer than that: drop them, or cut them after a reply.", _DATA)
    ] = "cut",
    pack: Annotated[
        bool,
        option(
            "Fill each pass up to --max-length with documents, which do not see each other.", _DATA
        ),
    ] = False,
    media_root: Annotated[
        str | None, option("Folder that relative paths of pictures start from.", _DATA)
    ] = None,
    recipe: Annotated[
        str,
        option(
            "mmkv (the defaults shown here), or the papers' numbers: dbtrimkv, trimkv, wgkv (the "
            "default with --method wgkv); options that you give override it.",
            _RUN,
        ),
    ] = "mmkv",
    method: Annotated[
        str,
        option("retention gates, or wgkv: write gates, with recipe wgkv (WG-KV).", _RUN),
    ] = "retention",
    gating: Annotated[
        str, option("log-bias (DBTrimKV) or logit-scale (TRIM-KV).", _GATES)
    ] = "log-bias",
    gate: Annotated[
        str,
        option(
            "tied (two layers, a block of them per head), rg (TRIM-KV: one hidden layer), rg10 "
            "(as DBTrimKV's authors published) or linear.",
            _GATES,
        ),
    ] = "tied",
    d_gate: Annotated[int, option("Width of the gates' hidden layers.", _GATES)] = 512,
    tying: Annotated[
        str, option("One readout for all (paper), per layer, or per head (none).", _GATES)
    ] = "paper",
    gate_input: Annotated[
        str,
        option("Input of the gates: the layer's normed input (x) or keys and values (kv).", _GATES),
    ] = "x",
    bias: Annotated[float, option("Start value of the readout's bias.", _GATES)] = 18.0,
    loss: Annotated[
        str, option("kl+ntp, kl, ntp, reverse-kl or reverse-kl+ntp.", _LOSS)
    ] = "kl+ntp",
    scope: Annotated[
        str, option("Capacity over all heads (global) or each (head).", _LOSS)
    ] = "global",
    budget: Annotated[float, option("M, mean entries per layer and KV head.", _LOSS)] = 256.0,
    least_budget: Annotated[
        float,
        option(
            "Above 0: each document draws its M log-uniformly from this to half of its tokens.",
            _LOSS,
        ),
    ] = 0.0,
    lambda_rank: Annotated[
        float,
        option("Weight of the term that ranks entries by their future attention.", _LOSS),
    ] = 0.0,
    rank_window: Annotated[
        int, option("Tokens ahead whose queries count for --lambda-rank; 0: all.", _LOSS)
    ] = 0,
    lambda_cap: Annotated[float, option("Weight of the capacity term.", _LOSS)] = 1.0,
    normaliser: Annotated[str, option("relative or tt (TRIM-KV).", _LOSS)] = "relative",
    capacity_rates: Annotated[
        int, option("0: exact count; K: approximate it with K decay rates.", _LOSS)
    ] = 0,
    window: Annotated[
        int, option("wgkv: tokens for which every entry stays (W_local).", _GATES)
    ] = 256,
    lambda_sparse: Annotated[float, option("wgkv: weight of the sparsity term.", _LOSS)] = 0.04,
    threshold: Annotated[
        float,
        option("wgkv: gate value from which measurements count an entry as admitted.", _GATES),
    ] = 0.1,
    steps: Annotated[int, option("Optimiser steps.", _RUN)] = 1000,
    epochs: Annotated[
        float, option("Above 0: as many steps as read each row of --data this often.", _RUN)
    ] = 0.0,
    batch: Annotated[int, option("Documents per process and forward pass.", _RUN)] = 1,
    accumulate: Annotated[int, option("Forward passes per step.", _RUN)] = 1,
    lr: Annotated[float, option("Peak learning rate.", _RUN)] = 2e-4,
    schedule: Annotated[
        str, option("Schedule of the learning rate to 0: cosine or linear.", _RUN)
    ] = "cosine",
    warmup: Annotated[float, option("Share of steps for warm-up.", _RUN)] = 0.03,
    weight_decay: Annotated[float, option("AdamW's.", _RUN)] = 1e-6,
    clip: Annotated[float, option("Largest gradient norm; 0: any.", _RUN)] = 1.0,
    checkpointing: Annotated[
        bool, option("Recompute layers instead of keeping activations.", _RUN)
    ] = False,
    dtype: Annotated[str, option("auto, float32 or bfloat16.", _RUN)] = "auto",
    weights: Annotated[
        str, option("On a CPU: auto, or bf16: products of bfloat16, faster.", _RUN)
    ] = "auto",
    device: Annotated[str, option("auto, cpu or cuda.", _RUN)] = "auto",
    seed: Annotated[int, option("Seed of gates and data order.", _RUN)] = 0,
    log_every: Annotated[int, option("Steps between log lines.", _RUN)] = 10,
    save_every: Annotated[int, option("Steps between checkpoints.", _RUN)] = 200,
    eval_every: Annotated[int, option("Steps between held-out runs; 0: at the end.", _RUN)] = 200,
    held_out_budget: Annotated[float, option("M of the held-out runs; 0: --budget.", _RUN)] = 0.0,
    threads: Annotated[int, option("Torch threads; 0: its default.", _RUN)] = 0,
    store: Annotated[
        str, option("Trunks in the gate file: float32, or float16 at half the size.", _RUN)
    ] = "float32",
    resume: Annotated[bool, option("Continue from the last checkpoint in --output.", _RUN)] = False,
) -> None:
    """Train retention gates or write gates for a frozen checkpoint by distillation."""
    values = dict(locals())
    if not all(map(importlib.util.find_spec, ("accelerate", "matplotlib"))):
        raise InputError("training needs the train extra: pip install 'mmkv[train]'")
    import torch
    from rich.console import Console

    from mmkv.training.data.examples import PackedExamples, examples
    from mmkv.training.folder import first_process, processes
    from mmkv.training.run import distill as run
    from mmkv.training.run import load_backbone
    from mmkv.training.settings import TrainingSettings

    for name, value in (("--threads", threads), ("--eval-samples", eval_samples)):
        if value < 0:
            raise InputError(f"{name} is {value}; give 0 or more")
    most = _THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads > most:  # OpenMP ends the process when it cannot start so many
        raise InputError(f"--threads is {threads}; give {most} or fewer on this machine")
    if threads:
        torch.set_num_threads(threads)
    given = {}
    for name in TrainingSettings.__dataclass_fields__.keys() - {"recipe"}:
        if not _is_default(context, name):
            given[name] = values[name]
    if method == "wgkv" and _is_default(context, "recipe"):
        recipe = "wgkv"
    settings = TrainingSettings.of(recipe, **given)
    if settings.epochs and pack:
        raise InputError(
            "--pack fills a pass with as many rows as fit, so nobody knows how many steps "
            f"{settings.epochs:g} epochs are; give --steps, or leave --pack out"
        )
    engine = load_backbone(settings)
    console = Console(stderr=True, markup=False)  # file names may hold brackets
    how: dict[str, Any] = {
        "max_length": max_length,
        "long_chats": long_chats,
        "media_root": media_root,
    }
    train = examples(model, data, 0, seed, report=console.print, pack=pack, **how)
    step = settings.batch * settings.accumulate * processes()
    if settings.epochs:
        rows = sum(map(len, train.mixture.sources))
        settings = settings.for_rows(rows, processes())
        console.print(
            f"{settings.epochs:g} epochs of {rows:,} rows, {step} a step: {settings.steps:,} steps"
        )
    train.length = settings.steps * step
    held = []
    if eval_data:
        watched = examples(
            model, eval_data, eval_samples, 0, split="heldout", report=console.print, **how
        )
        held = [watched[index] for index in range(eval_samples)]
        if left_out := watched.encoder.summary():
            console.print(f"held out: {left_out}")
    options = {**how, "pack": pack, "eval_data": eval_data or [], "eval_samples": len(held)}
    documents = PackedExamples(train) if pack else train
    described = run(settings, engine, documents, held, data, options)
    if left_out := train.encoder.summary():
        console.print(left_out)
    if first_process():
        outcome = described["results"] or "no held-out data given"
        console.print(f"saved gates in {output}: {outcome}")


def _is_default(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is None or source.name == "DEFAULT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return run_program(app, "distill", arguments)


def run_program(program: typer.Typer, name: str, arguments: Sequence[str] | None) -> int:
    """Run a program that trains, with one line for what goes wrong; return the exit code."""
    with quiet_imports(__name__ == "__main__"):
        from safetensors import SafetensorError
    try:
        shown = "mmkv distill" if program is app else f"python -m mmkv.training.{name}"
        code = program(args=arguments, prog_name=shown, standalone_mode=False)
    except MmkvError as error:
        return _fail(name, str(error), 1)
    except typer.BadParameter.__mro__[1] as error:  # type: ignore[misc]
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        return _fail(name, f"{text.rstrip('.')}; see --help", 2)
    except (OSError, SafetensorError) as error:
        # A disk that is full, most of all; torch and safetensors have errors of their own for it.
        reason = getattr(error, "strerror", None) or error
        text = f"cannot read or write a file: {reason}; free space, then {_RESUME}"
        return _fail(name, text, 1)
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        return _fail(name, f"a checkpoint cannot be written; free space, then {_RESUME}", 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:  # typer makes this of a KeyboardInterrupt
        print(f"mmkv.training.{name}: interrupted; {_RESUME}", file=sys.stderr)
    return code if isinstance(code, int) else 0


command = typer.Typer(add_completion=False, rich_markup_mode="rich")


@command.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def distill_command(context: typer.Context) -> int:
    """Train retention gates for a checkpoint (as python -m mmkv.training.distill)."""
    return main(context.args)


def _fail(name: str, message: str, code: int) -> int:
    print(f"mmkv.training.{name}: error: {one_line(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    from mmkv.cli.entry import leave, let_idle_threads_sleep

    let_idle_threads_sleep()
    code = main()
    if code == 130:  # a Ctrl-C within an import would make Python end by the signal
        leave(code)
    sys.exit(code)
