"""Compare decode speed of mmkv and transformers' generate on a CPU, in one run.

``python -m benchmarks.bench.decode_cpu DIR [DIR ...]`` decodes greedily with both from the same
prompts. The methods take turns within each round, and the order changes from round to round, so
that drift of the machine affects both. Only decode steps are timed, from the first new token to the
last. Figures go to ``benchmarks/results/decode-cpu-<name>.json``. With a policy that evicts they
include the share of a step that eviction takes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from benchmarks.bench.harness import token_times
from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.timing import ratios, spread, take_turns
from mmkv.training.measure.record import RESULTS, write_results

OURS, THEIRS = "mmkv", "transformers"  # names of the methods in result files
# (seconds of all timed steps, the tokens chosen, per sequence)
Run = tuple[float, list[list[int]]]


def random_prompts(model: Any, batch: int, length: int) -> Tensor:
    """Draw seeded token ids ``[batch, length]`` without placeholders of pictures."""
    config = model.config
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    special = [getattr(config, name, None) for name in names]
    below = min([config.get_text_config().vocab_size, *(i for i in special if i)])
    return torch.randint(3, below, (batch, length), generator=torch.Generator().manual_seed(0))


class TransformersInProcess:
    """Runs ``generate`` as users call it, from a cache that already holds the prompts."""

    def __init__(self, model: Any, prompts: Tensor) -> None:
        self.model, self.prompts = model, prompts
        with torch.inference_mode():
            self.cache = model(input_ids=prompts[:, :-1], use_cache=True).past_key_values

    @torch.inference_mode()
    def run(self, tokens: int) -> Run:
        """Decode, and time it from the first new token to the last."""
        times, made = token_times(
            self.model,
            input_ids=self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            past_key_values=copy.deepcopy(self.cache),
            max_new_tokens=tokens + 1,
        )
        return times[-1] - times[0], made[:, self.prompts.shape[1] :].tolist()


class MmkvInProcess:
    """Runs sessions that hold the prompts, forked for every run; one batched step per token."""

    def __init__(self, engine: Runtime, prompts: Tensor) -> None:
        self.engine = engine
        self.sessions = [engine.session() for _ in prompts]
        logits = [
            session.prefill({"input_ids": prompt[None]})
            for session, prompt in zip(self.sessions, prompts, strict=True)
        ]
        self.first = torch.stack(logits).argmax(-1).tolist()

    def run(self, tokens: int) -> Run:
        """Decode greedily."""
        with contextlib.ExitStack() as stack:
            sessions = [stack.enter_context(session.fork()) for session in self.sessions]
            chosen = [self.first]
            start = time.perf_counter()
            for _ in range(tokens):
                chosen.append(self.engine.decode(sessions, chosen[-1]).argmax(-1).tolist())
            seconds = time.perf_counter() - start
        return seconds, [list(row) for row in zip(*chosen, strict=True)]

    def eviction_share(self, tokens: int) -> float:
        """Measure the part of the decode time that goes into eviction: inside C by its clock, and
        around it.
        """
        spent, engine = 0.0, self.engine

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                nonlocal spent
                start = time.perf_counter()
                made = function(*args, **options)
                spent += time.perf_counter() - start
                return made

            return call

        cpu = engine.backends.cpu
        native = cpu.decoder if engine.decode_path == "native" else None
        inside = 0.0 if native is None else native.eviction_seconds
        places: list[tuple[Any, str]] = [(engine.budgets, "cut")]
        if native is not None and cpu.evictor is not None:
            places += [(cpu.evictor, "request"), (cpu.evictor, "commit")]
        with contextlib.ExitStack() as stack:
            for owner, name in places:
                function = timed(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, function))
            seconds, _ = self.run(tokens)
        if native is not None:
            spent += native.eviction_seconds - inside
        return spent / seconds


def bench(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Time both methods on one checkpoint.

    Returns:
        tokens/s of each method (median, quartiles, every round) and the median of the paired
        ratios mmkv / transformers.
    """
    engine = Runtime.from_pretrained(
        folder,
        policy=args.policy,
        budget=args.budget,
        gates=args.gates,
        device="cpu",
        dtype=args.dtype,
    )
    kind = getattr(transformers, engine.family.auto_class)
    model = kind.from_pretrained(folder, dtype=engine.dtype).eval()
    # Both decode the full count: the end token stops neither.
    model.generation_config.eos_token_id = None
    prompts = random_prompts(model, args.batch, args.prompt)
    mine = MmkvInProcess(engine, prompts)
    methods: dict[str, MmkvInProcess | TransformersInProcess] = {
        OURS: mine,
        THEIRS: TransformersInProcess(model, prompts),
    }
    chosen = {name: method.run(args.tokens)[1] for name, method in methods.items()}  # warms both up

    def speed(name: str) -> float:
        return args.batch * args.tokens / methods[name].run(args.tokens)[0]

    speeds = take_turns({name: partial(speed, name) for name in methods}, args.rounds)
    found = {
        "model": folder.name,
        "unit": "tokens/s of all sequences together",
        **{name: spread(values) for name, values in speeds.items()},
        "ratio": ratios(speeds[OURS], speeds[THEIRS]),
        "decode_path": engine.decode_path,
        "same_tokens": chosen[OURS] == chosen[THEIRS],
    }
    if engine.policy.evicts:
        found["eviction_share"] = spread(
            [mine.eviction_share(args.tokens) for _ in range(args.rounds)]
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Time each folder and write its result file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench.decode_cpu", description=__doc__
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps per run")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences decoded together")
    parser.add_argument(
        "--name", default=None, help="name of the result file (default: that of the folder)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each method")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--policy", default="full")
    parser.add_argument("--budget", type=float, default=256)
    parser.add_argument("--gates", default=None, help="gate folder, for policies that need gates")
    parser.add_argument("--dtype", default="float32", help="dtype of both methods")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    for folder in args.folders:
        found = bench(folder.resolve(), args)
        settings = {k: v for k, v in vars(args).items() if k not in ("folders", "output")}
        path = write_results(
            args.output / f"decode-cpu-{args.name or found['model']}.json", settings, found
        )
        for method in (OURS, THEIRS):
            low, high = found[method]["quartiles"]
            print(
                f"{method:>13}: {found[method]['median']:8.1f} tokens/s  ({low:.1f} .. {high:.1f})"
            )
        print(f"{'ratio':>13}: {found['ratio']['median']:8.2f}  of {found['model']}, in {path}")
        if "eviction_share" in found:
            print(f"{'eviction':>13}: {found['eviction_share']['median']:8.1%} of a step")
        elif not found["same_tokens"]:
            print(f"warning: the methods chose different tokens on {folder}", file=sys.stderr)


if __name__ == "__main__":
    main()
