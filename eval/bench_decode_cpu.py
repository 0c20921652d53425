"""Decode speed of mmkv beside transformers' generate on a CPU, in one run.

``python -m eval.bench_decode_cpu DIR [DIR ...]`` decodes the same greedy tokens with both from
the same prompt. The sides take turns within each round and swap who goes first, so that drift
of the machine falls on both. Only decode steps are timed (from the first new token to the
last); the prompt is not. Figures go to ``eval/results/decode-cpu-<model>.json``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from engine.runtime import Engine
from eval.record import RESULTS, write_results

# (seconds of all timed steps, the tokens chosen)
Run = tuple[float, list[int]]


def random_prompt(model: Any, length: int) -> Tensor:
    """Seeded ordinary token ids ``[1, length]``; placeholders of pictures are left out."""
    config = model.config
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = [getattr(config, name, None) for name in names]
    below = min([config.get_text_config().vocab_size, *(i for i in special if i)])
    return torch.randint(3, below, (1, length), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def run_transformers(model: Any, prompt: Tensor, tokens: int) -> Run:
    """``generate`` as users call it; a stopping criterion that never stops reads the clock."""
    clock: list[float] = []

    def note(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        clock.append(time.perf_counter())
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    made = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens + 1,
        do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([note]),
    )
    return clock[-1] - clock[0], made[0, prompt.shape[1] :].tolist()


def run_mmkv(engine: Engine, prompt: Tensor, tokens: int) -> Run:
    """Greedy decoding of one session."""
    with engine.session() as session:
        chosen = [int(session.prefill({"input_ids": prompt}).argmax())]
        start = time.perf_counter()
        for _ in range(tokens):
            chosen.append(int(session.decode(chosen[-1]).argmax()))
        return time.perf_counter() - start, chosen


def bench(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time both sides on one checkpoint.

    Returns:
        tokens/s of each side (median, quartiles, every round) and the median of the paired
        ratios mmkv / transformers.
    """
    engine = Engine.from_pretrained(
        folder, policy=args.policy, budget=args.budget, gates=args.gates, device="cpu",
        dtype=args.dtype,
    )  # fmt: skip
    kind = getattr(transformers, engine.family.auto_class)
    model = kind.from_pretrained(folder, dtype=engine.dtype).eval()
    # Both decode the full count: the end token stops neither.
    model.generation_config.eos_token_id = None
    prompt = random_prompt(model, args.prompt)
    sides: dict[str, Callable[[], Run]] = {
        "mmkv": lambda: run_mmkv(engine, prompt, args.tokens),
        "transformers": lambda: run_transformers(model, prompt, args.tokens),
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    chosen = {name: run()[1] for name, run in sides.items()}  # also warms both up
    for round_ in range(args.rounds):
        for name in list(sides) if round_ % 2 == 0 else reversed(sides):
            seconds, _ = sides[name]()
            speeds[name].append(args.tokens / seconds)
    ratios = [a / b for a, b in zip(speeds["mmkv"], speeds["transformers"], strict=True)]
    return {
        "model": folder.name,
        "unit": "tokens/s",
        **{name: _summary(values) for name, values in speeds.items()},
        "ratio": _summary(ratios),
        "same_tokens": chosen["mmkv"] == chosen["transformers"],
    }


def _summary(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "quartiles": [low, high], "rounds": values}


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each folder and write its result file."""
    parser = argparse.ArgumentParser(prog="python -m eval.bench_decode_cpu", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps per run")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each side")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", type=float, default=256)
    parser.add_argument("--gates", default=None, help="for policies that need them")
    parser.add_argument("--dtype", default="float32", help="of both sides")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    for folder in args.folders:
        found = bench(folder.resolve(), args)
        settings = {k: v for k, v in vars(args).items() if k not in ("folders", "output")}
        path = write_results(args.output / f"decode-cpu-{found['model']}.json", settings, found)
        for side in ("mmkv", "transformers"):
            low, high = found[side]["quartiles"]
            print(f"{side:>13}: {found[side]['median']:8.1f} tokens/s  ({low:.1f} .. {high:.1f})")
        print(f"{'ratio':>13}: {found['ratio']['median']:8.2f}  of {found['model']}, in {path}")
        if not found["same_tokens"]:
            print(f"warning: the sides chose different tokens on {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
