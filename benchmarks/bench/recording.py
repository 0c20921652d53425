"""Time a decode step whose evictions are recorded against one whose are not.

``python -m benchmarks.bench.recording`` decodes the bundled model and a text model of
SmolLM2-135M's sizes with random weights, at their budgets, so that every step evicts; in C and in
torch. CPU time of one thread; recorded and unrecorded steps take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.bench.output import parser, save, table
from benchmarks.bench.shapes import Shape, build_engine
from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.timing import spread, take_turns
from mmkv.resources import bundled_model

SMOLLM2 = Shape("llama", 30, 576, 9, 3, 64, 1536, 49152, True, 1e5, 1e-5)


def build(model: str, policy: str, budget: int, native: bool) -> Runtime:
    """Build an engine in float32, whose steps run in C or in torch."""
    if model == "tiny-vlm":
        gates = "random" if policy == "dbtrimkv" else None
        made = Runtime.from_pretrained(
            bundled_model(),
            policy=policy,
            budget=budget,
            dtype="float32",
            device="cpu",
            gates=gates,
        )
    else:
        made = build_engine(SMOLLM2, policy, dtype=torch.float32, budget=budget)
    if not native:
        made.backends.cpu.switch_off()
    return made


def decode(engine: Runtime, budget: int, steps: int, recorded: bool) -> float:
    """Return milliseconds of CPU time a step, once the sequence stands at its budget."""
    with engine.session() as session:
        session.prefill({"input_ids": torch.arange(3, 3 + budget + 16)[None] % 500})
        if recorded:
            session.record()
        for token in range(8):
            session.decode(3 + token)
        begun = time.process_time()
        for token in range(steps):
            session.decode(3 + token % 500)
        took = time.process_time() - begun
        if recorded:
            assert session.recorder is not None
            deaths = session.recorder.read(session).deaths
            assert len(deaths) >= steps * engine.spec.rows, "every step evicts"
    return 1000 * took / steps


def percent(cost: dict[str, Any]) -> str:
    """Write a share with its quartiles."""
    low, high = cost["quartiles"]
    return f"{100 * cost['median']:.1f} % ({100 * low:.1f} .. {100 * high:.1f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program."""
    made = parser("bench.recording", __doc__)
    made.set_defaults(rounds=9, device="cpu", dtype="float32")
    made.add_argument("--steps", type=int, default=100, help="timed decode steps of a round")
    made.add_argument("--models", nargs="+", default=["tiny-vlm", "smollm2-135m"])
    made.add_argument("--policies", nargs="+", default=["dbtrimkv", "snapkv"])
    made.add_argument("--budget", type=int, default=64)
    args: argparse.Namespace = made.parse_args(argv)
    torch.set_num_threads(1)
    cases: list[dict[str, Any]] = []
    for model in args.models:
        for policy in args.policies:
            for path in ("C", "torch"):
                engine = build(model, policy, args.budget, path == "C")
                steps = args.steps if model == "tiny-vlm" else max(args.steps // 10, 1)
                run = partial(decode, engine, args.budget, steps)
                ways: dict[str, Callable[[], float]] = {
                    "off": partial(run, recorded=False),
                    "on": partial(run, recorded=True),
                }
                run(recorded=True)
                times = take_turns(ways, args.rounds)
                pairs = [on / off - 1 for on, off in zip(times["on"], times["off"], strict=True)]
                cases.append(
                    {
                        "model": model,
                        "policy": policy,
                        "path": path,
                        "off_ms": spread(times["off"]),
                        "on_ms": spread(times["on"]),
                        "cost": spread(pairs),
                    }
                )
                save(args, "recording-cpu", {"cases": cases})
    rows = [
        [
            case["model"],
            case["policy"],
            case["path"],
            f"{case['off_ms']['median']:.3f}",
            f"{case['on_ms']['median']:.3f}",
            percent(case["cost"]),
        ]
        for case in cases
    ]
    table(
        f"A decode step at a budget of {args.budget}, ms of CPU time",
        ["model", "policy", "step", "off", "recorded", "cost, median (quartiles)"],
        rows,
    )
    print(f"written to {args.output}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
