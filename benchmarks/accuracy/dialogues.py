"""Measure exact answers in long held-out dialogues with the full cache.

``python -m benchmarks.accuracy.dialogues`` reads the answers teacher-forced. An answer is right
when every token is the most likely one, which is what greedy decoding would have generated after
the same history (:mod:`mmkv.training.measure.teacher_forced`).
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from itertools import islice
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.accuracy.scenes import wilson
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model_name
from mmkv.training.data.dialogues import clip, dense, scene_example, sparse, stream
from mmkv.training.data.scene_encoding import build_tokenizer
from mmkv.training.data.scenes import SceneTurn
from mmkv.training.measure.record import write_results
from mmkv.training.measure.teacher_forced import FullCache, spans

# Dialogues by name, each a function of a seed.
DIALOGUES: dict[str, Callable[[int], list[SceneTurn]]] = {
    "dense, 8 pictures, 12 turns": lambda seed: dense(seed, "heldout", 8, 12, search=False),
    "dense, 4 pictures, 8 turns": lambda seed: dense(seed, "heldout", 4, 8, search=False),
    "dense, 4 pictures, 8 turns, search": lambda seed: dense(seed, "heldout", 4, 8),
    "sparse, 2 of 24 pictures": lambda seed: sparse(seed, "heldout", 24, 2, 8, search=False),
    "sparse, 2 of 96 pictures": lambda seed: sparse(seed, "heldout", 96, 2, 8, search=False),
    "sparse, 2 of 192 pictures": lambda seed: sparse(seed, "heldout", 192, 2, 8, search=False),
    "dense, 32 pictures, 64 turns": lambda seed: dense(seed, "heldout", 32, 64, search=False),
    "stream of 32 clips": lambda seed: stream(seed, "heldout", 32),
    "clip": lambda seed: clip(seed, "heldout", 6),
}


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=bundled_model_name())
    parser.add_argument("--dialogues", type=int, default=100, help="dialogues of each kind")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/accuracy-dialogues.json")
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Runtime.from_pretrained(args.model, policy="full", dtype="float32")
    tokenizer = build_tokenizer()
    right: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    jobs = [(name, seed) for name in DIALOGUES for seed in range(args.dialogues)]
    for name, seed in track(jobs, "reading", console=Console(stderr=True)):
        turns = DIALOGUES[name](seed)
        example = scene_example(turns, tokenizer)
        labels = example.pop("labels")[0]
        read = engine.family.turn(example, 0, engine.device)
        generated = (int(logits.argmax()) for logits in FullCache.of(engine, read, labels).logits())
        lengths[name].append(labels.numel())
        for turn, (start, stop) in zip(turns, spans(labels.tolist()), strict=True):
            hit = list(islice(generated, stop - start)) == labels[start:stop].tolist()
            right[name, turn.question.about, "all"].append(hit)
            right[name, turn.question.about, turn.question.kind].append(hit)
    table = Table(title=f"Exact answers, {args.model}, full cache")
    for column in ("dialogue", "tokens", "about", "kind", "right", "share", "95 % interval"):
        table.add_column(column)
    rows = []
    for (name, about, kind), hits_ in sorted(right.items()):
        low, high = wilson(sum(hits_), len(hits_))
        tokens = sum(lengths[name]) / len(lengths[name])
        row = {
            "dialogue": name,
            "mean_tokens": tokens,
            "about": about,
            "kind": kind,
            "right": sum(hits_),
            "of": len(hits_),
            "share": sum(hits_) / len(hits_),
            "ci": [low, high],
        }
        rows.append(row)
        table.add_row(
            name,
            f"{tokens:.0f}",
            about,
            kind,
            f"{row['right']} / {row['of']}",
            f"{row['share']:.3f}",
            f"{low:.3f} {high:.3f}",
        )
    Console().print(table)
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    write_results(args.output, settings, rows)


if __name__ == "__main__":
    main()
