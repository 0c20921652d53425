"""Measure time to the first token and peak memory of long prompts, with eviction and without.

``python -m benchmarks.bench.prefill`` runs prompts of 4k .. 512k random tokens through a shape with
random weights. Methods take turns: chunks with eviction to M after each, the same engine with a
full cache, and transformers in one pass with its own attention. Memory is the peak above the
weights. Figures go to ``gpu-prefill-<shape>.json`` after each length.
"""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.bench.harness import (
    attempt,
    device_note,
    on_gpu,
    parser,
    release,
    save,
    shown,
    table,
    take_turns,
    where,
)
from benchmarks.bench.shapes import SHAPES, Shape, build_engine, build_model
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import MmkvError
from mmkv.engine.runtime import Runtime
from mmkv.eval.step import spread, wall

LENGTHS = (4096, 16384, 65536, 131072, 200_000, 524_288)
EVICTING, FULL, PEER = "mmkv, evicting", "mmkv, full cache", "transformers, one pass"


class PrefillMethod(ABC):
    """One way to read a prompt; ``run`` returns seconds and notes memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: int | None = None  # bytes; known on a GPU only
        self.kv = 0

    def prepare(self) -> None:  # noqa: B027 - nothing, for most
        """Do what is not timed."""

    @abstractmethod
    def read(self, prompt: torch.Tensor) -> None:
        """Read the prompt and choose the first token; sets ``kv``."""

    def release(self) -> None:  # noqa: B027
        """Release what :meth:`prepare` made."""

    def run(self, prompt: torch.Tensor) -> float:
        """Time a prefill, in seconds to the first token."""
        release()
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device) if cuda else 0
        self.prepare()
        try:
            seconds = wall(lambda: self.read(prompt), self.device)
        finally:
            self.release()
        if cuda:
            peak = torch.cuda.max_memory_allocated(self.device) - before
            self.peak = max(self.peak or 0, peak)
        return seconds


class OwnPrefill(PrefillMethod):
    """A session of our engine, with a pool that starts empty each time."""

    def __init__(self, make: Callable[[], Runtime], device: torch.device) -> None:
        super().__init__(device)
        self.make = make
        self.engine: Runtime | None = None

    def prepare(self) -> None:
        """Build an engine."""
        self.engine = self.make()

    def release(self) -> None:
        """Release the engine and its pool."""
        self.engine = None

    def read(self, prompt: torch.Tensor) -> None:
        """Prefill in chunks."""
        assert self.engine is not None
        with self.engine.session() as session:
            int(session.prefill({"input_ids": prompt}).argmax())
            self.kv = session.memory().kv_bytes


class Peer(PrefillMethod):
    """transformers: the whole prompt in one forward pass."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device)
        self.model = build_model(shape, device, dtype)
        self.token_bytes = shape.kv_token_bytes(dtype.itemsize)

    @torch.inference_mode()
    def read(self, prompt: torch.Tensor) -> None:
        """Run one forward pass with logits of the last token only."""
        made = self.model(
            input_ids=prompt.to(self.device), use_cache=True, logits_to_keep=1, return_dict=True
        )
        int(made.logits[0, -1].argmax())
        self.kv = prompt.numel() * self.token_bytes


def methods_of(args: argparse.Namespace) -> dict[str, PrefillMethod]:
    """Return the methods that were asked for."""
    device, dtype = on_gpu(args)
    shape = SHAPES[args.shape]
    base = build_engine(shape, "full", device=device, dtype=dtype)
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "weights_of": base,
        "prefill_chunk": args.chunk,
    }

    def engine(policy: str) -> Callable[[], Runtime]:
        return lambda: build_engine(shape, policy, args.budget, **options)

    made: dict[str, PrefillMethod] = {EVICTING: OwnPrefill(engine("dbtrimkv"), device)}
    if args.full_longest:
        made[FULL] = OwnPrefill(engine("full"), device)
    if args.peer_longest:
        made[PEER] = Peer(shape, device, dtype)
    return made


def measure(
    args: argparse.Namespace, methods: dict[str, PrefillMethod], length: int
) -> dict[str, Any]:
    """Time all methods on one prompt.

    Long prompts get fewer rounds (``--seconds``), 1 at least.
    """
    longest = {FULL: args.full_longest, PEER: args.peer_longest}
    vocab, generator = SHAPES[args.shape].vocab, torch.Generator().manual_seed(length)
    prompt = torch.randint(1, vocab, (1, length), generator=generator)
    found: dict[str, Any] = {"length": length, "methods": {}}
    running: dict[str, Callable[[], float]] = {}
    first: dict[str, list[float]] = {}
    for name, method in methods.items():
        if length > longest.get(name, length):
            found["methods"][name] = {"failed": f"not asked for above {longest[name]} tokens"}
            continue
        method.peak = None
        run = partial(method.run, prompt)
        if length == args.lengths[0] and attempt(found["methods"], name, run) is None:  # compiles
            continue
        if seconds := attempt(found["methods"], name, run):
            first[name], running[name] = [seconds], run
    once = sum(times[0] for times in first.values())
    rounds = min(args.rounds, int(args.seconds / max(once, 1e-9)))
    for name, times in (take_turns(running, rounds) if rounds else first).items():
        found["methods"][name] = {
            "seconds": spread(times),
            "peak_bytes": methods[name].peak,
            "kv_bytes": methods[name].kv,
        }
    ours = found["methods"][EVICTING].get("seconds")
    for method in found["methods"].values():
        if ours and "seconds" in method:
            method["over_evicting"] = method["seconds"]["median"] / ours["median"]
    return found


def show(args: argparse.Namespace, found: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    rows: list[list[Any]] = []
    for case in found:
        length = f"{case['length']:,}"
        for name, method in case["methods"].items():
            if "failed" in method:
                rows.append([length, name, "-", "-", "-", method["failed"]])
                continue
            over = f"{method['over_evicting']:.2f}" if "over_evicting" in method else "-"
            peak = "-" if method["peak_bytes"] is None else f"{method['peak_bytes'] / 1e9:.2f}"
            kv = f"{method['kv_bytes'] / 1e9:.3f} GB KV at the end"
            rows.append([length, name, shown(method["seconds"]), over, peak, kv])
    names = ("tokens", "method", "seconds to first token", "x evicting", "peak GB", "")
    table(f"Prefill, {args.shape}, M = {args.budget:g}, chunks of {args.chunk}", names, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 when our evicting method failed."""
    options = parser("bench_prefill", __doc__)
    options.add_argument("--shape", default="qwen3-4b", choices=SHAPES)
    options.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    options.add_argument("--budget", type=float, default=256, help="M, entries per row")
    options.add_argument(
        "--chunk", type=int, default=EngineConfig.prefill_chunk, help="tokens per prefill chunk"
    )
    options.add_argument("--full-longest", type=int, default=200_000, help="0: leave it out")
    options.add_argument("--peer-longest", type=int, default=200_000, help="0: leave it out")
    options.add_argument(
        "--seconds", type=float, default=20, help="seconds for the rounds of one length"
    )
    args = options.parse_args(arguments)
    args.lengths.sort()
    try:
        methods = methods_of(args)
    except MmkvError as error:
        options.error(str(error))
    note = device_note(where(args)[0])
    print(note)
    found: list[dict[str, Any]] = []
    for length in args.lengths:
        found.append(measure(args, methods, length))
        path = save(args, f"gpu-prefill-{args.shape}", {"note": note, "lengths": found})
    show(args, found)
    print(f"in {path}")
    return int(any("failed" in case["methods"][EVICTING] for case in found))


if __name__ == "__main__":
    sys.exit(main())
