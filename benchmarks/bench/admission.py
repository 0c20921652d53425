"""Time the prefill of a long prompt under a write gate against the share of entries it admits.

``python -m benchmarks.bench.admission`` reads random tokens through two layers of SmolLM2-135M's
sizes with random weights, in chunks; on a GPU in ``--dtype``. What is admitted is drawn (as in the
speed figures of WG-KV, arXiv 2512.17452, section 5.3), apart for each head. All runs take turns
with full attention.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.bench.harness import device_note, parser, save, shown, table, take_turns, where
from benchmarks.bench.shapes import Shape, build_engine
from mmkv.engine.backends.torch.write_step import WriteGatePass
from mmkv.engine.errors import MmkvError
from mmkv.engine.model.gates import WriteGates
from mmkv.engine.model.gates.write import make_random_write_gates
from mmkv.engine.policies import make_policy
from mmkv.engine.runtime import Runtime
from mmkv.eval.step import spread, wall

# SmolLM2-135M has 30 of these layers; a small vocabulary, since one row of logits is computed.
SHAPE = Shape("llama", 2, 576, 9, 3, 64, 1536, 512, True, 1e5, 1e-5)
FULL = "full attention"


@dataclass
class DrawnGates(WriteGates):
    """Write gates that admit a share of the entries, drawn at random."""

    rate: float = 1.0

    def log_g(self, layer: int, key_pre: Tensor, key_post: Tensor) -> Tensor:
        """Compute the gates as others do, and then say 1 or 0 by lot."""
        drawn = torch.rand_like(super().log_g(layer, key_pre, key_post)) < self.rate
        return torch.where(drawn, 0.0, -math.inf)

    def to(self, device: torch.device, dtype: torch.dtype) -> DrawnGates:
        """See :class:`WriteGates`; they go on drawing."""
        placed = super().to(device, dtype)
        return DrawnGates(placed.layers, placed.tensors, rate=self.rate)


def engines(args: argparse.Namespace) -> dict[str, Runtime]:
    """Build one engine a method, of the same weights."""
    device, dtype = where(args)
    dtype = torch.float32 if device.type == "cpu" else dtype
    full = build_engine(SHAPE, "full", device=device, dtype=dtype, prefill_chunk=args.chunk)
    made = {FULL: full}
    for rate in args.rates:
        drawn = make_random_write_gates(full.spec)
        gates = DrawnGates(drawn.layers, drawn.tensors, rate=rate)
        policy = make_policy(f"wgkv:window={args.window}")
        made[f"{rate:g} admitted"] = Runtime(
            full.family,
            full.spec,
            full.decoder.weights,
            gates,
            policy,
            prefill_chunk=args.chunk,
        )
    return made


def prefill(engine: Runtime, prompt: Tensor, held: dict[str, float], name: str) -> float:
    """Time one prefill in seconds; notes the share of entries that are held at the end."""
    with engine.session() as session:
        seconds = wall(lambda: session.prefill({"input_ids": prompt}), engine.device)
        held[name] = session.entries / (prompt.numel() * engine.spec.rows)
    return seconds


def share_of_tiles(engine: Runtime, prompt: Tensor) -> float | None:
    """Return the tiles of entries that a prefill multiplies, as a share of causal attention's.

    None where no kernel counts them.
    """
    counted: list[tuple[Tensor, Tensor]] = []
    WriteGatePass.tiles = counted
    try:
        with engine.session() as session:
            session.prefill({"input_ids": prompt})
    finally:
        WriteGatePass.tiles = None
    if not counted:
        return None
    computed, whole = (sum(map(int, each)) for each in zip(*counted, strict=True))
    return computed / whole


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    made = parser("bench.admission", __doc__)
    made.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    made.add_argument("--rates", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.1])
    made.add_argument("--window", type=int, default=256, help="W_local")
    made.add_argument("--chunk", type=int, default=2048, help="prefill chunk, tokens")
    made.add_argument("--threads", type=int, default=1, help="torch threads")
    args = made.parse_args(argv)
    torch.set_num_threads(args.threads)
    try:
        running = engines(args)
    except MmkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    prompt = torch.randint(1, SHAPE.vocab, (1, args.length))
    held: dict[str, float] = {}
    timed: dict[str, Callable[[], float]] = {
        name: partial(prefill, engine, prompt, held, name) for name, engine in running.items()
    }
    times = take_turns(timed, args.rounds)
    found: dict[str, Any] = {"length": args.length, "methods": {}}
    base, rows = spread(times[FULL])["median"], []
    for name, seconds in times.items():
        one = found["methods"][name] = {
            "seconds": spread(seconds),
            "times_faster": base / spread(seconds)["median"],
            "held": held[name],
            "tiles": share_of_tiles(running[name], prompt),
        }
        tiles = "-" if one["tiles"] is None else f"{100 * one['tiles']:.0f} %"
        held_share = f"{100 * one['held']:.0f} %"
        faster = f"{one['times_faster']:.2f}"
        rows.append([name, shown(one["seconds"], ".2f"), faster, held_share, tiles])
    device = running[FULL].device
    on = f"{args.threads} thread" if device.type == "cpu" else device_note(device)
    columns = ("method", "seconds", "times faster", "entries held", "tiles computed")
    table(f"Prefill of {args.length:,} tokens, two layers of SmolLM2's sizes, {on}", columns, rows)
    print(f"written to {save(args, f'admission-{device.type}', found)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
