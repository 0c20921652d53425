"""Time steps of gate training, beside another commit's.

``python -m eval.bench.training --data scenes:dense`` runs steps of ``mmkv distill`` (data, forward
and backward pass, optimizer) with and without ``--weights bf16``, and with ``--base FOLDER`` those
of another checkout whose C library is built. Each run is a process of its own; they take turns.
CPU seconds of one thread, medians over the steps after the first, and the largest memory of the
process. Figures go to ``training-cpu.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mmkv.eval.bench.harness import BenchError
from mmkv.eval.bench.output import failure, plain_parser, save, table
from mmkv.eval.measure.timing import ratios, spread, take_turns
from mmkv.resources import bundled_model
from mmkv.training.measure.record import ROOT

# Run within either checkout: it uses what both have.
STEPS = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from mmkv.training.data.examples import examples
from mmkv.training.run import HeldOutData, _retention_gates, load_backbone
from mmkv.training.settings import TrainingSettings

asked = json.loads(sys.argv[1])
settings = TrainingSettings(**asked["settings"])
engine = load_backbone(settings)
model, _ = _retention_gates(settings, engine, HeldOutData(engine, []))
count = asked["steps"] * settings.batch
data = examples(settings.model, [asked["data"]], count, 0, max_length=asked["length"])
optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr)
speeds, losses = [], []
for step in range(asked["steps"]):
    begun = time.process_time()
    batch = [data[step * settings.batch + i] for i in range(settings.batch)]
    loss = model(batch)["loss"]
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    took = time.process_time() - begun
    speeds.append(sum(example["labels"].numel() for example in batch) / took)
    losses.append(float(loss))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"speeds": speeds[1:], "losses": losses, "peak": peak * 1024}))
"""


def run(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Run the steps with the code in ``folder``.

    Raises:
        BenchError: they failed.
    """
    made = subprocess.run(
        [sys.executable, "-c", STEPS, json.dumps(asked)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if made.returncode:
        last = (made.stderr.strip().splitlines() or ["no message"])[-1]
        raise BenchError(f"training with the code in {folder} failed: {last}")
    found: dict[str, Any] = json.loads(made.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    made = plain_parser("bench.training", __doc__)
    made.add_argument("--model", type=Path, default=bundled_model())
    made.add_argument("--data", required=True, help="as mmkv distill takes it; files by full path")
    made.add_argument("--length", type=int, default=1024, help="longest document, in tokens")
    made.add_argument("--settings", type=json.loads, default={}, help="of the run, as JSON")
    made.add_argument("--base", type=Path, help="checkout of another commit")
    made.add_argument("--steps", type=int, default=5, help="of a run; the first is not timed")
    made.add_argument("--rounds", type=int, default=3, help="runs of each")
    args: argparse.Namespace = made.parse_args(arguments)
    if args.steps < 2 or args.rounds < 1:
        made.error("give 2 or more --steps, and 1 or more --rounds")
    own = {"output": "unused", "device": "cpu", **args.settings, "model": str(args.model.resolve())}
    asked = {"settings": own, "data": args.data, "steps": args.steps, "length": args.length}
    narrow = {**asked, "settings": {**own, "weights": "bf16"}}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "auto": partial(run, ROOT, asked),
        "bf16": partial(run, ROOT, narrow),
    }
    if args.base is not None:
        ways = {"base": partial(run, args.base.resolve(), asked), **ways}
    try:
        found = take_turns(ways, args.rounds)
    except BenchError as error:
        print(f"eval.bench.training: error: {failure(error)}", file=sys.stderr)
        return 1
    first = next(iter(ways))
    speeds = {name: [spread(one["speeds"])["median"] for one in found[name]] for name in ways}
    cases = [
        {
            "name": name,
            "tokens_per_cpu_second": spread(speeds[name]),
            f"over_{first}": ratios(speeds[name], speeds[first]),
            "peak_bytes": max(one["peak"] for one in found[name]),
            "losses": found[name][0]["losses"],
        }
        for name in ways
    ]
    args.model, args.base = str(args.model), args.base and str(args.base)
    path = save(args, "training-cpu", {"cases": cases})
    rows = [
        [
            case["name"],
            f"{case['tokens_per_cpu_second']['median']:,.1f}",
            f"{case[f'over_{first}']['median']:.2f}",
            f"{case['peak_bytes'] / 1e9:.2f}",
            f"{case['losses'][-1]:.6f}",
        ]
        for case in cases
    ]
    columns = ("weights", "tokens per CPU second", f"over {first}", "peak GB", "last loss")
    table("Training of retention gates", columns, rows)
    print(f"in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
