"""Count the sequences that fit in a stated memory: from page bytes, and by opening them.

``python -m benchmarks.bench.capacity`` computes how many sequences of 32k tokens fit into the
memory that the weights leave. It counts the worst case of a sequence: pages (with the last page of
every row nearly empty), block tables, and the entries of one prefill chunk, which only one sequence
at a time needs. Then it opens that many sessions with random entries in uneven rows, under a page
limit of that memory, decodes one step with all of them, and reports whether the count was right.
Figures go to ``gpu-capacity-<shape>.json``.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.bench.methods import (
    WORKSPACE,
    DecodePlan,
    concerns_one_method,
    dense_count,
    plan,
    synthetic_sessions,
)
from benchmarks.bench.output import device_note, failure, parser, save, table, where
from benchmarks.bench.shapes import SHAPES, Shape, build_engine
from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import BudgetError, MmkvError
from mmkv.engine.runtime import Runtime


@torch.inference_mode()
def open_sessions(
    made: DecodePlan, base: Runtime, shape: Shape, args: argparse.Namespace
) -> dict[str, Any]:
    """Open the planned sessions under the planned page limit and decode with all of them.

    Returns:
        ``sessions`` opened and decoded, ``pages`` held of ``limit``, and ``one_more_fits``:
        whether yet another would have fitted, since rows are rarely at their worst.
    """
    device, dtype = where(args)
    policy = "full" if made.budget is None else "dbtrimkv"
    budget = made.budget or 256
    options: dict[str, Any] = {"device": device, "dtype": dtype, "weights_of": base}
    page_bytes = base.cache.pool.page_bytes
    limit = made.count * made.pages + made.chunk_bytes // page_bytes
    engine = build_engine(shape, policy, budget, kv_limit=limit * page_bytes, **options)
    engine.backends.cpu.switch_off()
    steps = 1 if made.budget is None else 0
    seen = args.context - steps  # the full cache's steps are the last of its tokens
    sessions = synthetic_sessions(engine, made.count, seen, args.skew, steps)
    pool = engine.cache.pool
    held = pool.num_pages - pool.free_pages
    for start in range(0, len(sessions), args.decode_batch):
        part = sessions[start : start + args.decode_batch]
        engine.decode_many(part, [1] * len(part), 1)
    return {
        "sessions": len(sessions),
        "pages": held,
        "limit": limit,
        "one_more_fits": limit - held >= made.pages + made.chunk_bytes // page_bytes,
        "allocated_bytes": torch.cuda.memory_allocated(device) if device.type == "cuda" else None,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; 1 when a count that was computed did not hold."""
    options = parser("bench_capacity", __doc__)
    options.add_argument("--shape", default="qwen3-vl-8b", choices=SHAPES)
    options.add_argument("--memory", type=float, nargs="+", default=[80, 100, 141], metavar="GB")
    options.add_argument(
        "--context", type=int, default=32768, help="tokens that each sequence has seen"
    )
    options.add_argument("--budgets", type=int, nargs="+", default=[64, 128, 256, 512, 1024, 2048])
    options.add_argument(
        "--chunk", type=int, default=EngineConfig.prefill_chunk, help="tokens per prefill chunk"
    )
    options.add_argument("--workspace", type=float, default=WORKSPACE / 1e9, metavar="GB")
    options.add_argument("--skew", type=float, default=4.0, help="longest row over the mean")
    options.add_argument("--decode-batch", type=int, default=32)
    options.add_argument("--most-tried", type=int, default=2048, help="most sessions to open")
    options.add_argument(
        "--try",
        dest="tried",
        choices=["auto", "never", "always"],
        default="auto",
        help="allocate for real (auto: on a GPU that has the memory)",
    )
    args = options.parse_args(arguments)
    try:
        device, dtype = where(args)
    except MmkvError as error:
        options.error(str(error))
    shape, work = SHAPES[args.shape], int(args.workspace * 1e9)
    rows: list[list[Any]] = []
    found: list[dict[str, Any]] = []
    note, wrong, base = device_note(device), False, None
    for memory in args.memory:
        dense = dense_count(shape, args.context, memory * 1e9, dtype, work)
        for budget in [None, *args.budgets]:
            made = plan(
                shape, budget, args.context, memory * 1e9, dtype, args.chunk, workspace=work
            )
            case: dict[str, Any] = {"memory_gb": memory, "dense": dense, **vars(made)}
            if 0 < made.count <= args.most_tried and _to_try(args, device, memory):
                try:
                    if base is None:
                        base = build_engine(shape, "full", device=device, dtype=dtype)
                    case["tried"] = open_sessions(made, base, shape, args)
                except (BudgetError, RuntimeError) as error:
                    if not concerns_one_method(error):
                        raise
                    case["tried"], wrong = {"failed": failure(error)}, True
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            found.append(case)
            path = save(args, f"gpu-capacity-{args.shape}", {"note": note, "cases": found})
            rows.append(_row(case))
    names = ("memory", "M", "sequences", "dense cache", "MB each", "tried")
    table(f"Sequences of {args.context:,} tokens, {args.shape}", names, rows)
    print(f"in {path}; {note}")
    return int(wrong)


def _to_try(args: argparse.Namespace, device: torch.device, memory: float) -> bool:
    if args.tried != "auto":
        return bool(args.tried == "always")
    if device.type != "cuda":
        return False
    return bool(memory * 1e9 <= torch.cuda.get_device_properties(device).total_memory)


def _row(case: dict[str, Any]) -> list[Any]:
    tried = case.get("tried")
    if tried is None:
        outcome = "not tried"
    elif "failed" in tried:
        outcome = tried["failed"]
    else:
        share = tried["pages"] / tried["limit"]
        outcome = f"{tried['sessions']} opened and decoded, {share:.0%} of pages"
    budget = "all" if case["budget"] is None else case["budget"]
    each = f"{case['sequence_bytes'] / 1e6:,.1f}"
    return [f"{case['memory_gb']:g} GB", budget, case["count"], case["dense"], each, outcome]


if __name__ == "__main__":
    sys.exit(main())
