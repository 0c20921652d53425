"""``python -m training.adapt``: train a model for the bounded cache that it will decode on.

``--method distill`` and ``--method grpo`` after G-KV; see :mod:`mmkv.training.adapt_run`. Needs the
``adapt`` extra.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from mmkv.engine.interrupts import quiet_imports

with quiet_imports(__name__ == "__main__"):
    import typer

    from mmkv.engine.errors import InputError
    from mmkv.training.distill import option, run_program

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)

_DATA, _CACHE, _WEIGHTS, _LOSS, _RUN = "Data", "Cache", "Weights", "Loss", "Run"
_NEEDS = {"distill": ("accelerate", "peft"), "grpo": ("accelerate", "datasets", "peft", "trl")}


@app.command()
def adapt(
    context: typer.Context,
    model: Annotated[str, option("Checkpoint folder or hub id.", _RUN)],
    data: Annotated[
        list[str],
        option("[WEIGHT*][KIND:]PATH, scenes:KIND or tasks:KIND, as training.distill's.", _DATA),
    ],
    output: Annotated[str, option("Folder for the adapter, checkpoints and card.", _RUN)],
    method: Annotated[
        str,
        option(
            "distill (predictions of the full cache), or grpo (rewards for right replies).", _RUN
        ),
    ] = "distill",
    policy: Annotated[str, option("Eviction policy, as mmkv chat --policy.", _CACHE)] = "dbtrimkv",
    gates: Annotated[
        str | None, option("Gates of the policy; default: those of the checkpoint.", _CACHE)
    ] = None,
    budget: Annotated[
        str,
        option("Entries per layer and KV head (64), or a share of each document (1/16).", _CACHE),
    ] = "256",
    prefill_chunk: Annotated[int, option("Tokens of a prompt between cuts.", _CACHE)] = 2048,
    interval: Annotated[
        int | None, option("Decode steps between cuts; default: the policy's own.", _CACHE)
    ] = None,
    full: Annotated[bool, option("Train all text weights, without an adapter.", _WEIGHTS)] = False,
    rank: Annotated[int, option("Rank of the LoRA adapter.", _WEIGHTS)] = 16,
    alpha: Annotated[int, option("Scale of the adapter, divided by the rank.", _WEIGHTS)] = 32,
    target: Annotated[
        list[str] | None,
        option("Matrix that gets an adapter, such as q_proj; default: all.", _WEIGHTS),
    ] = None,
    replies: Annotated[
        str, option("distill: replies drawn from the teacher, or those of the data.", _LOSS)
    ] = "teacher",
    temperature: Annotated[
        float, option("Temperature of drawn replies, and of distill's loss.", _LOSS)
    ] = 0.6,
    max_reply: Annotated[int, option("Most tokens of a drawn reply.", _LOSS)] = 256,
    documents: Annotated[int, option("Documents (grpo: prompts) of a step.", _RUN)] = 4,
    group: Annotated[int, option("grpo: replies to each prompt.", _LOSS)] = 8,
    reward: Annotated[
        str,
        option("grpo: a reply is right if it is exact, contains the answer, or its number.", _LOSS),
    ] = "exact",
    epsilon: Annotated[float, option("grpo: clip of the ratio.", _LOSS)] = 0.2,
    max_length: Annotated[int, option("Longest document, in tokens.", _DATA)] = 4096,
    long_chats: Annotated[
        str, option("Chats longer than that: drop them, or cut them after a reply.", _DATA)
    ] = "cut",
    media_root: Annotated[
        str | None, option("Folder that relative paths of pictures start from.", _DATA)
    ] = None,
    steps: Annotated[int, option("Optimiser steps.", _RUN)] = 100,
    lr: Annotated[float, option("Peak learning rate; G-KV has 1e-6 with --full.", _RUN)] = 1e-4,
    schedule: Annotated[
        str, option("Schedule of the learning rate: cosine or linear.", _RUN)
    ] = "cosine",
    warmup: Annotated[float, option("Share of steps for warm-up.", _RUN)] = 0.03,
    weight_decay: Annotated[float, option("AdamW's.", _RUN)] = 0.0,
    clip: Annotated[float, option("Largest gradient norm; 0: any.", _RUN)] = 1.0,
    checkpointing: Annotated[
        bool, option("Recompute layers instead of keeping activations.", _RUN)
    ] = False,
    dtype: Annotated[str, option("auto, float32 or bfloat16.", _RUN)] = "auto",
    device: Annotated[str, option("auto, cpu or cuda.", _RUN)] = "auto",
    seed: Annotated[int, option("Seed of the adapter, data order and draws.", _RUN)] = 0,
    log_every: Annotated[int, option("Steps between log lines.", _RUN)] = 1,
    save_every: Annotated[int, option("Steps between checkpoints.", _RUN)] = 50,
    threads: Annotated[int, option("Torch threads; 0: its default.", _RUN)] = 0,
    resume: Annotated[bool, option("Continue from the last checkpoint in --output.", _RUN)] = False,
) -> None:
    """Train a model, or a LoRA adapter, for the bounded cache that it will decode on."""
    values = dict(locals())
    require_packages(method)
    import torch
    from rich.console import Console

    from mmkv.training.adapt_run import AdaptSettings, load_compressed
    from mmkv.training.adapt_run import adapt as run
    from mmkv.training.data.examples import examples

    fields = AdaptSettings.__dataclass_fields__
    named: dict[str, Any] = {name: values[name] for name in fields if name in values}
    settings = AdaptSettings(**named, targets=tuple(target or ()))
    for name in sorted(settings.unread):
        option_name = name.removesuffix("s") if name == "targets" else name
        source = context.get_parameter_source(option_name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"--{option_name.replace('_', '-')} is not read by this run (--method {method}"
                f"{', --full' if full else f', --replies {replies}'}); leave it out"
            )
    if threads:
        torch.set_num_threads(threads)
    console = Console(stderr=True, markup=False)  # file names may hold brackets
    how: dict[str, Any] = {
        "max_length": max_length,
        "long_chats": long_chats,
        "media_root": media_root,
    }
    count = settings.steps * settings.documents
    train = examples(model, data, count, seed, report=console.print, **how)
    run(settings, load_compressed(settings), train, tuple(data), how)
    if left_out := train.encoder.summary():
        console.print(left_out)
    console.print(f"saved {'the model' if full else 'the adapter'} in {output}")


def require_packages(method: str) -> None:
    """Raise InputError where a package of the ``adapt`` extra is missing."""
    missing = [name for name in _NEEDS.get(method, ()) if importlib.util.find_spec(name) is None]
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
