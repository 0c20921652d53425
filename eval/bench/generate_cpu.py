"""Compare ``generate`` of a transformers model with and without ``mmkv.hf.retain``, on a CPU.

``python -m eval.bench.generate_cpu DIR`` calls the same ``generate`` on the same prompts, in turns.
A stopping criterion notes the time of every token, so decode steps are timed from the first new
token to the last; whole calls, prompts included, are timed beside them. Figures go to
``eval/results/generate-cpu-<name>.json``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from engine.model.families import find_for
from eval.bench.decode_cpu import OURS, THEIRS, random_prompts
from mmkv.hf import retain
from mmkv.measure.record import RESULTS, write_results
from mmkv.measure.timing import spread, take_turns


def timed(model: Any, prompts: Tensor, tokens: int) -> tuple[float, float]:
    """Generate ``tokens`` greedily after every prompt.

    Returns:
        tokens/s of the decode steps and of the whole call, all sequences together.
    """
    clock: list[float] = []

    def note(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        clock.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    started = time.perf_counter()
    model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([note]),
    )
    count = prompts.shape[0]
    decoding = count * (tokens - 1) / (clock[-1] - clock[0])
    whole = count * tokens / (time.perf_counter() - started)
    return decoding, whole


def bench(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time both in turns; medians and quartiles of tokens/s, and of the paired ratios."""
    family = find_for(folder)
    assert family is not None, f"{folder} is of a model type that mmkv does not run"
    model = getattr(transformers, family.auto_class).from_pretrained(folder, dtype="float32").eval()
    model.generation_config.eos_token_id = None  # both generate the full count
    prompts = random_prompts(model, args.batch, args.prompt)
    options = {"gates": args.gates, "policy": args.policy, "budget": args.budget}
    paths: set[str] = set()
    whole: dict[str, list[float]] = {OURS: [], THEIRS: []}

    def run(name: str) -> float:
        if name == THEIRS:
            decoding, call = timed(model, prompts, args.tokens)
        else:
            with retain(model, **options) as handle:
                paths.add(handle.engine.decode_path)
                timed(model, prompts[:, :32], 2)  # the first call prepares the C step
                decoding, call = timed(model, prompts, args.tokens)
        whole[name].append(call)
        return decoding

    for name in whole:
        run(name)
    whole = {OURS: [], THEIRS: []}
    decode = take_turns({name: partial(run, name) for name in (OURS, THEIRS)}, args.rounds)

    def compared(speeds: dict[str, list[float]]) -> dict[str, Any]:
        ratios = [a / b for a, b in zip(speeds[OURS], speeds[THEIRS], strict=True)]
        found = {name: spread(values) for name, values in speeds.items()}
        return {**found, "ratio": spread(ratios)}

    return {
        "model": folder.name,
        "unit": "tokens/s of all sequences together",
        "decode_path": sorted(paths),
        "decode": compared(decode),
        "whole_call": compared(whole),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Time one checkpoint and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m eval.bench.generate_cpu", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a call")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--batch", type=int, default=8, help="rows")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each")
    parser.add_argument("--policy", default=None)
    parser.add_argument("--budget", type=float, default=64)
    parser.add_argument("--gates", default=None)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default=None, help="of the result file (default: the folder's)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    found = bench(args.folder.resolve(), args)
    settings = {k: v for k, v in vars(args).items() if k not in ("folder", "output")}
    path = write_results(
        args.output / f"generate-cpu-{args.name or found['model']}.json", settings, found
    )
    for part in ("decode", "whole_call"):
        for name in (OURS, THEIRS, "ratio"):
            row = found[part][name]
            low, high = row["quartiles"]
            print(f"{part:>10} {name:>13}: {row['median']:9.1f}  ({low:.1f} .. {high:.1f})")
    print(f"in {path}")


if __name__ == "__main__":
    main()
