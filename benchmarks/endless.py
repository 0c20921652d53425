"""Read a stream far beyond the trained context in one session, at constant memory.

``python -m benchmarks.endless`` shows the bundled model a numbered picture and then clip after
clip, each with a question, until a million tokens have been read: the stream of
``benchmarks.session_stream``, but with rope positions that are moved together instead of a lifted
limit. After every 32nd clip a copy of the session is asked about the first picture, and the session
is saved and loaded again.

It prints a table by parts of the stream, checks what has to hold, and writes JSON. Times are CPU
seconds of the process, on one thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tqdm import tqdm

from benchmarks.quality.report import interval
from benchmarks.session_stream import beginning_turn, clip_turn, predicts_answer
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.eval.measure.stats import mean, paired
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.data.scenes import SceneTurn
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table

_REMEMBER = 32  # clips between two questions about the beginning
_YOUNG = 6  # those copies, spread over the context
_PARTS, _BLOCK = 10, 16
# The first part has as many tokens as the context; the others share the rest.
Row = dict[str, Any]


def read_stream(engine: Runtime, tokens: int, paired: int = 4) -> list[Row]:
    """Read clips until so many tokens have been seen; a row for each clip.

    Args:
        paired: clips from one that a young copy of the session reads, too, to the next.
    """
    tokenizer = load_processor(bundled_model()).tokenizer
    rows: list[Row] = []
    session, young = engine.session(), list[CachedSequence]()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=tokens, unit="token") as bar:
        while session.seen < tokens:
            index, before = len(rows), session.seen
            turn = clip_turn(index)
            row: Row = {}

            def read(
                one: CachedSequence, name: str, turn: SceneTurn = turn, row: Row = row
            ) -> None:
                started = time.process_time()
                row[name] = predicts_answer(one, turn, tokenizer)
                row[f"{name}_seconds"] = time.process_time() - started

            pairs = bool(session.compactions and index % paired == 0)
            if not pairs or index % (2 * paired):
                read(session, "right")
            if pairs:
                with young[index // paired % len(young)].fork() as copy:
                    read(copy, "young")
            if "right" not in row:
                read(session, "right")
            memory = session.memory()
            row |= {
                "seen": session.seen,
                "tokens": session.seen - before,
                "bytes": memory.kv_bytes,
                "compactions": memory.compactions,
                "position": session.next_position,
            }
            share = session.next_position * (_YOUNG + 2) / engine.spec.max_position
            if not memory.compactions and len(young) < min(_YOUNG, int(share)):
                young.append(session.fork())
            if (index + 1) % _REMEMBER == 0:
                asked = beginning_turn(index)
                for name, one in [
                    ("beginning", session),
                    ("beginning_young", (young or [session])[-1]),
                ]:
                    with one.fork() as copy:
                        row[name] = predicts_answer(copy, asked, tokenizer)
                path = Path(folder) / "session"
                session.save(path)
                session.close()
                session, _ = engine.load_session(path)
            rows.append(row)
            bar.update(row["tokens"])
    for one in (session, *young):
        one.close()
    return rows


def parts_of(rows: Sequence[Row], context: int) -> list[list[Row]]:
    """Cut the rows: those within the context, then parts of equal length."""
    first = [row for row in rows if row["seen"] <= context]
    rest = list(rows[len(first) :])
    size = -(-len(rest) // _PARTS) or 1
    return [first, *(rest[i : i + size] for i in range(0, len(rest), size))]


def about(rows: Sequence[Row]) -> Row:
    """Sum up one part of the stream."""
    tokens = sum(row["tokens"] for row in rows)
    return {
        "seen": rows[-1]["seen"],
        "clips": len(rows),
        "latest": _share(rows, "right"),
        "against_young": _against_young(rows),
        "beginning": _share(rows, "beginning"),
        "beginning_young": _share(rows, "beginning_young"),
        "most_bytes": max(row["bytes"] for row in rows),
        "highest_position": max(row["position"] for row in rows),
        "compactions": rows[-1]["compactions"],
        "cpu_ms_per_token": 1e3 * sum(row["right_seconds"] for row in rows) / tokens,
    }


def _share(rows: Sequence[Row], name: str) -> dict[str, float] | None:
    """Return the share of right answers, its interval over blocks of clips; None: none asked."""
    answers = [float(row[name]) for row in rows if name in row]
    blocks = [answers[i : i + _BLOCK] for i in range(0, len(answers), _BLOCK)]
    if not blocks:
        return None
    return asdict(mean([sum(block) for block in blocks], [float(len(block)) for block in blocks]))


def _against_young(rows: Sequence[Row]) -> Row | None:
    """Compare with a copy from within the context, over the clips that both read."""
    both = [row for row in rows if "young" in row]
    if not both:
        return None
    pairs = [(float(row["right"]), float(row["young"])) for row in both]
    blocks = [pairs[i : i + _BLOCK] for i in range(0, len(pairs), _BLOCK)]
    first, second = ([sum(pair[i] for pair in block) for block in blocks] for i in (0, 1))
    ratio = median(row["right_seconds"] / row["young_seconds"] for row in both)
    return {
        "clips": len(pairs),
        "difference": asdict(paired(first, second, [float(len(block)) for block in blocks])),
        "time": ratio,
    }


def mean_of(parts: Sequence[Row], name: str) -> float:
    """Return the mean of a share over parts, each as often as it has clips."""
    asked = [part for part in parts if part[name] is not None]
    total = sum(part["clips"] for part in asked) or 1
    return float(sum(part[name]["value"] * part["clips"] for part in asked) / total)


def checks(parts: Sequence[Row], context: int) -> list[tuple[str, str, bool]]:
    """Return what has to hold, what was measured, and whether it does."""
    first, rest = parts[0], parts[1:]
    compared = [part["against_young"] for part in rest]
    clips = sum(one["clips"] for one in compared)
    gap = sum(one["difference"]["value"] * one["clips"] for one in compared) / clips
    forgot = mean_of(rest, "beginning") - mean_of(rest, "beginning_young")
    slow = max(compared, key=lambda one: abs(one["time"] - 1))["time"] - 1
    most = max(part["most_bytes"] for part in rest) / first["most_bytes"]
    highest = max(part["highest_position"] for part in parts)
    return [
        (f"latest clip, {clips:,} pairs", f"{100 * gap:+.1f} points", gap >= -0.01),
        ("first picture, against a young copy", f"{100 * forgot:+.1f} points", forgot >= -0.01),
        ("bytes held, against the first part", f"{most:.3f}", most <= 1.05),
        ("CPU time of a pair, farthest part", f"{100 * slow:+.1f} %", abs(slow) <= 0.05),
        (f"highest rope position of {context:,}", f"{highest:,}", highest <= context),
    ]


COLUMNS = (
    "tokens seen",
    "clips",
    "latest clip",
    "less a young copy's",
    "its time as a multiple",
    "bytes",
    "moved",
)


def table_row(part: Row) -> tuple[str, ...]:
    """Return the row of a part, below :data:`COLUMNS`."""
    pair = part["against_young"]
    return (
        f"{part['seen']:,}",
        f"{part['clips']:,}",
        interval(part["latest"]),
        "-" if pair is None else interval(pair["difference"]),
        "-" if pair is None else f"{pair['time']:.3f}",
        f"{part['most_bytes']:,}",
        str(part["compactions"]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; exit code 1 where something does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.endless", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--policy", default="dbtrimkv")
    parser.add_argument("--budget", type=float, default=64)
    parser.add_argument("--paired", type=int, default=4, help="every so many clips are paired")
    parser.add_argument("--output", type=Path, default=RESULTS / "endless-tiny-vlm.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    engine = Runtime.from_pretrained(
        bundled_model(), policy=args.policy, budget=args.budget, device="cpu", dtype="float32"
    )
    context = engine.spec.max_position
    parts = [
        about(rows)
        for rows in parts_of(read_stream(engine, args.tokens, args.paired), context)
        if rows
    ]
    print(pipe_table(COLUMNS, [table_row(part) for part in parts]))
    found = checks(parts, context)
    print(
        pipe_table(("what", "measured", "holds"), [(*a, "yes" if b else "no") for *a, b in found])
    )
    asked = {name: str(value) for name, value in vars(args).items() if name != "output"}
    results = {
        "context": context,
        "parts": parts,
        "checks": [dict(zip(("what", "measured", "holds"), row, strict=True)) for row in found],
    }
    write_results(args.output, asked, results)
    return 0 if all(row[-1] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
