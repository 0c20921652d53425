"""Read a stream far beyond the trained context in one session, at constant memory.

``python -m eval.endless`` shows the bundled model a numbered picture and then clip after clip, each
with a question, until a million tokens have been read: the stream of ``eval.session_stream``, but
with rope positions that are moved together instead of a lifted limit. After every 32nd clip a copy
of the session is asked about the first picture, and the session is saved and loaded again.

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
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tqdm import tqdm

from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.stats import mean
from mmkv.eval.quality.report import interval
from mmkv.eval.session_stream import beginning_turn, clip_turn, predicts_answer
from mmkv.prompt.loading import load_processor
from mmkv.resources import bundled_model
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table

_REMEMBER = 32  # clips between two questions about the beginning
_PARTS, _BLOCK = 10, 16
# The first part has as many tokens as the context; the others share the rest.
Row = dict[str, Any]


def read_stream(engine: Runtime, tokens: int) -> list[Row]:
    """Read clips until so many tokens have been seen; a row for each clip."""
    tokenizer = load_processor(bundled_model()).tokenizer
    rows: list[Row] = []
    session = engine.session()
    with tempfile.TemporaryDirectory() as folder, tqdm(total=tokens, unit="token") as bar:
        while session.seen < tokens:
            index, before, started = len(rows), session.seen, time.process_time()
            row: Row = {"right": predicts_answer(session, clip_turn(index), tokenizer)}
            row["seconds"] = time.process_time() - started
            memory = session.memory()
            row |= {
                "seen": session.seen,
                "tokens": session.seen - before,
                "bytes": memory.kv_bytes,
                "compactions": memory.compactions,
                "position": session.next_position,
            }
            if (index + 1) % _REMEMBER == 0:
                with session.fork() as copy:
                    row["beginning"] = predicts_answer(copy, beginning_turn(index), tokenizer)
                path = Path(folder) / "session"
                session.save(path)
                session.close()
                session, _ = engine.load_session(path)
            rows.append(row)
            bar.update(row["tokens"])
    session.close()
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
        "beginning": _share(rows, "beginning"),
        "most_bytes": max(row["bytes"] for row in rows),
        "highest_position": max(row["position"] for row in rows),
        "compactions": rows[-1]["compactions"],
        "cpu_ms_per_token": 1e3 * sum(row["seconds"] for row in rows) / tokens,
    }


def _share(rows: Sequence[Row], name: str) -> dict[str, float] | None:
    """Return the share of right answers, its interval over blocks of clips; None: none asked."""
    answers = [float(row[name]) for row in rows if name in row]
    blocks = [answers[i : i + _BLOCK] for i in range(0, len(answers), _BLOCK)]
    if not blocks:
        return None
    return asdict(mean([sum(block) for block in blocks], [float(len(block)) for block in blocks]))


def checks(parts: Sequence[Row], context: int) -> list[tuple[str, str, bool]]:
    """Return what has to hold, what was measured, and whether it does."""
    first, rest = parts[0], parts[1:]
    right = sum(part["latest"]["value"] * part["clips"] for part in rest)
    right /= sum(part["clips"] for part in rest)
    gap = right - first["latest"]["value"]
    times = [part["cpu_ms_per_token"] for part in parts]
    spread = max(times) / min(times) - 1
    most = max(part["most_bytes"] for part in rest) / first["most_bytes"]
    highest = max(part["highest_position"] for part in parts)
    return [
        ("latest clip, against the first part", f"{100 * gap:+.1f} points", gap >= -0.01),
        ("bytes held, against the first part", f"{most:.3f}", most <= 1.05),
        ("CPU time per token, slowest to fastest part", f"{100 * spread:+.1f} %", spread <= 0.05),
        (f"highest rope position of {context:,}", f"{highest:,}", highest <= context),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; exit code 1 where something does not hold."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.endless", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--policy", default="dbtrimkv")
    parser.add_argument("--budget", type=float, default=64)
    parser.add_argument("--output", type=Path, default=RESULTS / "endless-tiny-vlm.json")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    engine = Runtime.from_pretrained(
        bundled_model(), policy=args.policy, budget=args.budget, device="cpu", dtype="float32"
    )
    context = engine.spec.max_position
    parts = [about(rows) for rows in parts_of(read_stream(engine, args.tokens), context) if rows]
    columns = ("tokens seen", "clips", "latest clip", "first picture", "bytes", "moved", "ms/token")
    print(
        pipe_table(
            columns,
            [
                (
                    f"{part['seen']:,}",
                    part["clips"],
                    interval(part["latest"]),
                    "-" if part["beginning"] is None else interval(part["beginning"]),
                    f"{part['most_bytes']:,}",
                    part["compactions"],
                    f"{part['cpu_ms_per_token']:.2f}",
                )
                for part in parts
            ],
        )
    )
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
