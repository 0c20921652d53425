"""Compare policies on mmkv's own MMDU set, whose answers are checked exactly.

``python -m benchmarks.mmdu_small`` runs ``mmkv mmdu`` with the bundled model once for every row of
the table in benchmarks/notes/mmdu.md, and writes the numbers of right answers to
``mmdu-small.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from mmkv.cli.app import run
from mmkv.engine.errors import MmkvError
from mmkv.eval.mmdu.data import SUMMARY
from mmkv.resources import asset
from mmkv.training.measure.record import RESULTS, write_results

#: Policy and budget, entries per layer and KV head.
ROWS: tuple[tuple[str, int | None], ...] = (
    ("full", None),
    ("dbtrimkv", 64),
    ("dbtrimkv", 32),
    ("dbtrimkv", 16),
    ("trimkv", 64),
    ("trimkv", 32),
    ("snapkv", 64),
    ("snapkv", 32),
    ("streamingllm", 64),
    ("streamingllm", 32),
)
TRIMKV_GATES = "gates/tiny-vlm-trimkv-0"  # in assets/ of a checkout


def answered(policy: str, budget: int | None, limit: int | None = None) -> dict[str, Any]:
    """Run one setting: the row ``all`` of its exact answers, and its memory at the end.

    Args:
        policy: preset; ``trimkv`` runs on gates of its own. budget: mean entries per layer and KV
            head, None for the policy that never evicts. limit: only the first dialogues.

    Raises:
        SystemExit: the command failed and has reported why.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["mmdu", "--policy", policy, "--output", folder, "--device", "cpu"]
        arguments += [] if budget is None else ["--budget", str(budget)]
        arguments += ["--gates", str(asset(TRIMKV_GATES))] if policy == "trimkv" else []
        arguments += [] if limit is None else ["--limit", str(limit)]
        if code := run([*arguments, "--quiet"]):
            raise SystemExit(code)
        summary = json.loads((Path(folder) / SUMMARY).read_text())
    everything = next(row for row in summary["exact"] if row["kind"] == "all")
    kept = {key: summary[key] for key in ("entries_kept_mean", "kv_bytes_mean")}
    return {"policy": policy, "budget": budget, **everything, **kept}


def table(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Tabulate right answers and their share, as benchmarks/notes/mmdu.md shows them."""
    made = [["policy, budget", "right", "share", "95 % interval"]]
    for row in rows:
        name = f"`{row['policy']}`" + (f", {row['budget']}" if row["budget"] else "")
        low, high = row["ci"]
        made.append([name, str(row["right"]), f"{row['share']:.3f}", f"{low:.3f} .. {high:.3f}"])
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mmdu_small", description=__doc__)
    parser.add_argument("--limit", type=int, help="only the first dialogues")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args(arguments)
    try:
        rows = [answered(policy, budget, args.limit) for policy, budget in ROWS]
    except MmkvError as error:
        parser.error(str(error))
    write_results(
        args.output / "mmdu-small.json", {"limit": args.limit}, rows, {"mmdu": table(rows)}
    )


if __name__ == "__main__":
    main()
