"""What eviction costs: accuracy and KL to the full cache against the budget, paired.

``python -m eval.quality MODEL --data scenes:dense --side dbtrimkv:GATES[,GATES] --side snapkv ...``
feeds the same held-out dialogues through every side at every budget, answers given token by token
with real eviction (:mod:`eval.forced`), and writes JSON, a Markdown table and a plot.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.progress import track

from engine.errors import InputError, MmkvError
from engine.gates import load_gates
from engine.policies import Budget, make_policy
from engine.runtime import Engine
from eval.forced import Reading, full_logits, read
from eval.quality_report import draw, markdown, summarise
from eval.record import RESULTS, write_results
from training.sources import examples

FRACTIONS = ("1/2", "1/3", "1/4", "1/5", "1/8", "1/16", "1/32")


@dataclass(frozen=True)
class Side:
    """One of the things compared.

    Attributes:
        name: what tables call it. lookahead: n of the retention score, None for the preset's.
        gates: gate folders, one per training seed; their readings are averaged.
    """

    name: str
    policy: str
    lookahead: float | None
    gates: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Side:
        """``[NAME=]POLICY[@LOOKAHEAD][:GATES[,GATES]]``.

        Raises:
            InputError: for a lookahead that is no number.
        """
        name, _, rest = text.rpartition("=")
        policy, _, gates = rest.partition(":")
        policy, _, lookahead = policy.partition("@")
        try:
            number = float(lookahead) if lookahead else None
        except ValueError:
            raise InputError(
                f"--side {text!r}: lookahead {lookahead!r} is not a number; write POLICY@5:GATES"
            ) from None
        return cls(
            name or rest.partition(":")[0], policy, number, tuple(filter(None, gates.split(",")))
        )

    def engines(self, base: Engine) -> list[Engine]:
        """One engine per gate folder over the weights of ``base``."""
        policy = make_policy(self.policy, 2 if self.lookahead is None else self.lookahead)
        made = [load_gates(folder, base.spec) for folder in self.gates] or [None]
        if policy.scoring.needs_gates and policy.evicts and not self.gates:
            raise InputError(f"side {self.name!r} needs gates: write {self.policy}:GATES")
        return [
            Engine(base.family, base.spec, base.decoder.weights, gates, policy) for gates in made
        ]


def record(reading: Reading) -> dict[str, Any]:
    """What the result file keeps of one dialogue."""
    return {
        "right": [answer.right for answer in reading.answers],
        "tokens": [answer.tokens for answer in reading.answers],
        "kl": [round(answer.kl, 5) for answer in reading.answers],
        "agree": [answer.agree for answer in reading.answers],
        "seen": reading.tokens_seen,
        "entries": reading.entries,
        "evicted": reading.evicted,
        "visual": sum(n for name, n in reading.by_modality.items() if name != "text"),
        "per_row": reading.per_row,
    }


@torch.inference_mode()
def compare(
    base: Engine,
    model: str,
    sides: Sequence[Side],
    source: str,
    count: int,
    fractions: Sequence[str],
    max_length: int = 8192,
) -> dict[str, list[list[dict[str, Any]]]]:
    """Read every dialogue through every side.

    Returns:
        ``"side at fraction"`` -> per gate folder -> per dialogue what :func:`record` keeps. The
        full cache stands under ``"full"``.
    """
    engines = {side.name: side.engines(base) for side in sides}
    found: dict[str, list[list[dict[str, Any]]]] = {"full": [[]]}
    for side, fraction in itertools.product(sides, fractions):
        found[f"{side.name} at {fraction}"] = [[] for _ in engines[side.name]]
    data = examples(model, [source], count, seed=0, max_length=max_length, split="heldout")
    console = Console(stderr=True)
    for index in track(range(count), f"reading {source}", console=console):
        example = data[index]
        inputs = {name: value for name, value in example.items() if name != "labels"}
        labels = example["labels"].flatten().clone()
        labels[0] = -100
        turn = base.family.turn(inputs, 0, base.device)
        full = full_logits(base, turn, labels)
        found["full"][0].append(record(read(base, inputs, labels, full=full)))
        for side, fraction in itertools.product(sides, fractions):
            # The budget is a share of the whole dialogue, known to none of the sides in advance.
            budget = max(1.0, float(Fraction(fraction)) * labels.numel())
            for index, engine in enumerate(engines[side.name]):
                reading = read(engine, inputs, labels, Budget.of(budget), full)
                found[f"{side.name} at {fraction}"][index].append(record(reading))
    return found


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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--name", default="quality", help="the files are NAME.json, .md and .png")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result files")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    try:
        sides = [Side.parse(text) for text in args.side]
        base = Engine.from_pretrained(args.model, policy="full", dtype=args.dtype)
        pages = {}
        for source in args.data:
            raw = compare(
                base, args.model, sides, source, args.dialogues, args.fractions, args.max_length
            )
            pages[source] = summarise(raw, [side.name for side in sides], args.fractions)
    except MmkvError as error:
        raise SystemExit(f"eval.quality: error: {error}") from error
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    path = write_results(args.output / f"{args.name}.json", settings, pages)
    text = markdown(pages)
    path.with_suffix(".md").write_text(text)
    draw(pages, path.with_suffix(".png"))
    print(text)


if __name__ == "__main__":
    main()
