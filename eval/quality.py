"""What eviction costs: accuracy and KL to the full cache against the budget, paired.

``python -m eval.quality MODEL --data scenes:dense --side dbtrimkv:GATES[,GATES] --side snapkv ...``
feeds the same held-out dialogues through every side at every budget, answers given token by token
with real eviction (:mod:`eval.forced`), and writes JSON, a Markdown table and a plot. Killed and
started again, it goes on where it was; with more sides or dialogues it reads only those.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from engine.errors import MmkvError
from eval.quality_report import draw, markdown, summarise
from eval.quality_run import Comparison, Side, compare
from eval.record import RESULTS, write_results

FRACTIONS = ("1/2", "1/3", "1/4", "1/5", "1/8", "1/16", "1/32")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m eval.quality", description=__doc__)
    parser.add_argument("model", nargs="?", default="assets/tiny-vlm")
    parser.add_argument(
        "--data", action="append", required=True, help="as for training.distill; repeatable"
    )
    parser.add_argument("--max-length", type=int, default=8192, help="longest dialogue, tokens")
    parser.add_argument(
        "--side", action="append", required=True, metavar="[NAME=]POLICY[@N][:GATES,..]"
    )
    parser.add_argument("--fractions", nargs="+", default=list(FRACTIONS), help="of the context")
    parser.add_argument("--dialogues", type=int, default=120, help="of each data source")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--workers", type=int, default=1, help="processes that read dialogues")
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs have read")
    parser.add_argument("--name", default="quality", help="the files are NAME.json, .md and .png")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    path = args.output / f"{args.name}.json"
    journal = path.with_suffix(".readings.jsonl")
    args.output.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        journal.unlink(missing_ok=True)
    try:
        sides = tuple(Side.parse(text) for text in args.side)
        comparison = Comparison(
            args.model, args.dtype, sides, tuple(args.fractions), args.max_length
        )
        pages = {}
        for source in args.data:
            raw = compare(comparison, source, args.dialogues, journal, args.workers)
            pages[source] = summarise(raw, [side.name for side in sides], args.fractions)
    except MmkvError as error:
        raise SystemExit(f"eval.quality: error: {error}") from error
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    write_results(path, settings, pages)
    text = markdown(pages)
    path.with_suffix(".md").write_text(text)
    draw(pages, path.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
