"""Time decode steps over keys and values in each form of the cache, at equal entries.

``python -m benchmarks.bench.kv_forms DIR`` fills sessions to their budget with random entries and
decodes from them with eviction at every step, in bursts
(:meth:`mmkv.engine.runtime.Runtime.decode_many`). The forms share the weights and take turns within
a round, in an order that turns round each time. ``--shape`` takes random weights in published sizes
instead, for a GPU. The figures, ms per step and how many times as fast as the first form each of
the others is, round by round, go to ``benchmarks/results/decode-<device>-kv-<name>.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.bench.methods import synthetic_sessions
from benchmarks.bench.shapes import SHAPES, build_engine
from mmkv.engine.config import KV_FORMS
from mmkv.engine.errors import InputError, MmkvError
from mmkv.engine.model.families.loading import resolve_device
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.measure.timing import spread, synchronize, take_turns
from mmkv.resources import bundled_model_name
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table

FORMS = tuple(form for form in KV_FORMS if form != "auto")


def seconds(sessions: Sequence[CachedSequence], tokens: int, clock: str) -> float:
    """Decode ``tokens`` greedily in copies of ``sessions``, all in a batch; seconds per step.

    Args:
        clock: ``wall``, or ``cpu`` for that of this process, which a loaded machine disturbs less.
    """
    now = {"wall": time.perf_counter, "cpu": time.process_time}[clock]
    engine = sessions[0].engine
    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(session.fork()) for session in sessions]
        first = [1] * len(copies)
        engine.decode_many(copies, first, 2)  # takes the copies' first pages; records a graph
        synchronize(engine.device)
        start = now()
        engine.decode_many(copies, first, tokens)
        synchronize(engine.device)
        return (now() - start) / tokens


def bench(base: Runtime, kept: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all forms with ``kept`` entries per layer and KV head.

    Args:
        base: whose weights, gates and policy all share.
    """
    seen = min(2 * kept, base.spec.max_position - args.tokens - 2)
    if seen < kept:
        raise InputError(
            f"--kept {kept}: the model was trained for {base.spec.max_position:,} positions, and "
            f"{args.tokens} tokens follow; give fewer entries"
        )
    sessions = {}
    for kv in args.forms:
        engine = Runtime(
            base.family,
            base.spec,
            base.decoder.weights,
            base._gates,
            base.policy,
            kept,
            kv=kv,
        )
        sessions[kv] = synthetic_sessions(engine, args.batch, seen)
    runs = {kv: partial(seconds, held, args.tokens, args.clock) for kv, held in sessions.items()}
    for run in runs.values():  # warms up
        run()
    times = take_turns(runs, args.rounds)
    first = times[args.forms[0]]
    rows = []
    for kv, held in sessions.items():
        engine, pool, memory = held[0].engine, held[0].engine.cache.pool, held[0].memory()
        rows.append(
            {
                "kept": kept,
                "kv": kv,
                "entries": memory.entries,
                "entry_bytes": pool.layout.entry_bytes(),
                "physical_bytes": memory.kv_bytes + memory.metadata_bytes,
                "ms_per_step": spread([1e3 * value for value in times[kv]]),
                "times_as_fast": spread([a / b for a, b in zip(first, times[kv], strict=True)]),
                "decode_path": engine.many_path
                if engine.device.type == "cuda"
                else engine.reply_path,
            }
        )
        for session in held:
            session.close()
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Make the table: a line per kept entries and form."""
    first = rows[0]["kv"]
    head = ("kept", "form", "bytes per entry", "ms per step", f"times as fast as {first}", "step")
    lines = []
    for row in rows:
        timed = [row["ms_per_step"], row["times_as_fast"]]
        cells = [
            f"{one['median']:.2f} ({one['quartiles'][0]:.2f} .. {one['quartiles'][1]:.2f})"
            for one in timed
        ]
        lines.append((f"{row['kept']:,}", row["kv"], row["entry_bytes"], *cells))
        lines[-1] += (row["decode_path"],)
    return pipe_table(head, [[str(cell) for cell in line] for line in lines])


def main(arguments: Sequence[str] | None = None) -> None:
    """Time all forms, print a table and write the result file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench.kv_forms", description=__doc__
    )
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--shape", choices=SHAPES, help="random weights in these sizes instead")
    parser.add_argument("--device", default="cpu", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--batch", type=int, default=1, help="sequences of a step")
    parser.add_argument("--kept", type=int, nargs="+", default=[256, 4096], metavar="M")
    parser.add_argument(
        "--forms", nargs="+", choices=KV_FORMS, default=list(FORMS), help="the first is compared to"
    )
    parser.add_argument("--gates", default="random", help="gate folder; times do not depend on it")
    parser.add_argument("--tokens", type=int, default=48, help="decode steps per run")
    parser.add_argument("--rounds", type=int, default=15, help="timed runs of each form")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--name", default=None, help="of the result file (default: the folder's)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    try:
        if min(args.tokens, args.rounds, args.threads, args.batch, *args.kept) < 1:
            raise InputError("--kept, --tokens, --rounds, --threads and --batch take 1 or more")
        device = resolve_device(args.device)
        if args.shape is not None:
            dtype = getattr(torch, args.dtype)
            base = build_engine(SHAPES[args.shape], device=device, dtype=dtype)
        else:
            options = {"gates": args.gates, "device": args.device, "dtype": args.dtype}
            base = Runtime.from_pretrained(args.model, policy="dbtrimkv", **options)
        rows = [row for kept in args.kept for row in bench(base, kept, args)]
    except MmkvError as error:
        parser.error(str(error))
    settings = {name: value for name, value in vars(args).items() if name != "output"}
    name = args.name or args.shape or Path(args.model).resolve().name
    file = args.output / f"decode-{device.type}-kv-{name}.json"
    path = write_results(file, settings, {"rows": rows})
    print(markdown(rows))
    print(f"in {path}")


if __name__ == "__main__":
    main()
