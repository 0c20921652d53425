"""Compare ``generate`` of a transformers model with and without ``mmkv.hf.retain``, on a CPU.

``python -m benchmarks.bench.generate_cpu DIR`` calls the same ``generate`` on the same prompts, in
turns. A stopping criterion notes the time of every token, so the prompt is timed up to the first
new token and decode steps from there to the last; whole calls are timed beside them. Times are the
process's CPU seconds, of all its threads together. Figures go to
``benchmarks/results/generate-cpu-<name>.json``.
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

from benchmarks.bench.decode_cpu import OURS, THEIRS, random_prompts
from benchmarks.bench.harness import token_times
from mmkv.engine.model.families import find_for
from mmkv.eval.measure.timing import ratios, spread, take_turns
from mmkv.hf import retain
from mmkv.training.measure.record import RESULTS, write_results

PARTS = ("prompt", "decode", "whole_call")


def timed(model: Any, prompts: Tensor, tokens: int) -> dict[str, float]:
    """Generate ``tokens`` greedily after every prompt.

    Returns:
        by :data:`PARTS`: tokens/s of the prompts; new tokens/s of the decode steps and of the whole
        call. All sequences together.
    """
    started = time.process_time()
    clock, _ = token_times(
        model,
        time.process_time,
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
    )
    count, width = prompts.shape
    took = (clock[0] - started, clock[-1] - clock[0], time.process_time() - started)
    read = (count * width, count * (tokens - 1), count * tokens)
    return {part: n / max(t, 1e-9) for part, n, t in zip(PARTS, read, took, strict=True)}


def bench(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time both in turns; medians and quartiles of tokens/s, and of the paired ratios."""
    family = find_for(folder)
    assert family is not None, f"{folder} is of a model type that mmkv does not run"
    model = getattr(transformers, family.auto_class).from_pretrained(folder, dtype="float32").eval()
    model.generation_config.eos_token_id = None  # both generate the full count
    options = {"gates": args.gates, "policy": args.policy, "budget": args.budget}
    paths: set[str] = set()

    def run(name: str, prompts: Tensor) -> dict[str, float]:
        if name == THEIRS:
            return timed(model, prompts, args.tokens)
        with retain(model, **options) as handle:
            paths.add(handle.engine.decode_path)
            timed(model, prompts[:, :32], 2)  # the first call prepares the C step
            return timed(model, prompts, args.tokens)

    found = {}
    for length in args.prompt:
        prompts = random_prompts(model, args.batch, length)
        calls = {name: partial(run, name, prompts) for name in (OURS, THEIRS)}
        for call in calls.values():
            call()
        found[str(length)] = _compared(take_turns(calls, args.rounds))
    return {
        "model": folder.name,
        "unit": "tokens a CPU second, of all sequences together",
        "decode_path": sorted(paths),
        "prompts": found,
    }


def _compared(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Give the spread of each part's speeds and of their ratios."""
    made = {}
    for part in PARTS:
        speeds = {name: [speed[part] for speed in rounds[name]] for name in (OURS, THEIRS)}
        made[part] = {name: spread(values) for name, values in speeds.items()}
        made[part]["ratio"] = ratios(speeds[OURS], speeds[THEIRS])
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Time one checkpoint and write the result file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench.generate_cpu", description=__doc__
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a call")
    parser.add_argument(
        "--prompt",
        type=int,
        nargs="+",
        default=[8, 32, 128, 512],
        help="tokens of a prompt",
    )
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
    for length, parts in found["prompts"].items():
        for part in PARTS:
            row = parts[part]
            ours, theirs = (row[name]["median"] for name in (OURS, THEIRS))
            low, high = row["ratio"]["quartiles"]
            ratio = f"{row['ratio']['median']:.2f} times ({low:.2f} .. {high:.2f})"
            print(f"{length:>5} tokens, {part:>10}: {ours:8.0f} against {theirs:8.0f}, {ratio}")
    print(f"in {path}")


if __name__ == "__main__":
    main()
