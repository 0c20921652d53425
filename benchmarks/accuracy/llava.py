"""Ask SmolLM2 with eyes about held-out pictures: with the picture, without, and under budgets.

``python -m benchmarks.accuracy.llava FOLDER`` asks a checkpoint that ``python -m training.llava
join`` made, about talks of ``training.llava``'s held-out half. With the full cache each talk is
read with its own pictures, with white ones, and with those of the next talk that has as many; then
under each method of ``--method`` and budget of ``--budgets``. Beside it stands what the most
frequent answer to each kind of question would get. An answer is right when greedy decoding would
have given all of it, with the true answers before it; intervals are bootstraps over talks.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.quality.methods import Cell, ComparedMethod
from mmkv.engine.errors import InputError, MmkvError, one_line
from mmkv.engine.runtime import Runtime
from mmkv.eval.measure.stats import mean, paired
from mmkv.prompt.loading import load_processor
from mmkv.training.data.labels import IGNORED
from mmkv.training.llava.pictures import PIXELS, EasyVQA, PictureTurn, easy_vqa_folder, talk
from mmkv.training.llava.teach import encode, opening
from mmkv.training.measure.record import require_output, write_results
from mmkv.training.measure.teacher_forced import FullCache, read_at, spans

_SIGHTS = ("pictures", "blank pictures", "other pictures")
_CONSTANT, _ALL = "most frequent answer", "all"
Scores = dict[str, list[dict[str, list[int]]]]  # run -> per talk: kind -> [right, of]


def inputs_of(
    processor: Any, turns: Sequence[PictureTurn], pictures: Sequence[Image.Image]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what the checkpoint's processor makes of a talk with these pictures, and labels."""
    first = processor.tokenizer.encode(opening(processor.tokenizer), add_special_tokens=False)
    ids, labels, _ = encode(turns, processor.tokenizer)
    pixels = processor.processor.image_processor(list(pictures), return_tensors="pt")
    made = {"input_ids": torch.tensor([first + ids]), "pixel_values": pixels["pixel_values"]}
    return made, torch.tensor([IGNORED] * len(first) + labels)


def pictures_of(turns: Sequence[PictureTurn]) -> list[Image.Image]:
    return [turn.shown.picture() for turn in turns if turn.shown]


def partners(talks: Sequence[Sequence[PictureTurn]]) -> list[int]:
    """Return for each talk the next one, in a circle, with as many pictures; at worst itself."""
    counts = [sum(turn.shown is not None for turn in turns) for turns in talks]
    found = []
    for index, count in enumerate(counts):
        later = (*range(index + 1, len(talks)), *range(index + 1))
        found.append(next(other for other in later if counts[other] == count))
    return found


def run(args: argparse.Namespace) -> Scores:
    """Read every talk in every way."""
    engine = Runtime.from_pretrained(args.model, policy="full", device="cpu", dtype=args.dtype)
    processor: Any = load_processor(args.model)
    easy = EasyVQA.of(args.easy_vqa or easy_vqa_folder(), "heldout")
    talks = [talk(args.first + n, "heldout", easy, args.turns) for n in range(args.talks)]
    budgets = list(dict.fromkeys(args.budgets))
    methods = {
        f"{method.name} {gate}" if len(method.gates) > 1 else method.name: [
            Cell(method.policy, method.lookahead, gate, budget, method.kv) for budget in budgets
        ]
        for method in map(ComparedMethod.parse, args.method)
        for gate in method.gates or (None,)
    }
    engines = {name: cells[0].engine(engine, args.model) for name, cells in methods.items()}
    other = partners(talks)
    runs = (f"{name} at {budget}" for name, budget in itertools.product(methods, budgets))
    scores: Scores = {name: [] for name in (*_SIGHTS, _CONSTANT, *runs)}
    scores[_CONSTANT] = constant(talks)
    for index, turns in enumerate(track(talks, "asking", console=Console(stderr=True))):
        own = pictures_of(turns)
        blank = [Image.new("RGB", (PIXELS, PIXELS), "white")] * len(own)
        sights = (own, blank, pictures_of(talks[other[index]]))
        for name, shown in zip(_SIGHTS, sights, strict=True):
            inputs, labels = inputs_of(processor, turns, shown)
            made = engine.family.turn(inputs, 0, engine.device)
            full = FullCache.of(engine, made, labels)
            scores[name].append(by_kind(turns, rights_of(full, labels)))
            if name != _SIGHTS[0]:
                continue
            for method, cells in methods.items():
                allowed = [cell.budget_for(made.token_ids.numel()) for cell in cells]
                results = read_at(engines[method], made, labels, allowed, full)
                for budget, result in zip(budgets, results, strict=True):
                    rights = [answer.right for answer in result.answers]
                    scores[f"{method} at {budget}"].append(by_kind(turns, rights))
    return scores


def rights_of(full: FullCache, labels: torch.Tensor) -> list[bool]:
    """Return of each answer whether full attention gives all of its tokens."""
    hits = iter([int(logits.argmax()) for logits in full.logits()])
    return [
        all([next(hits) == label for label in labels[start:stop].tolist()])
        for start, stop in spans(labels.tolist())
    ]


def by_kind(turns: Sequence[PictureTurn], rights: Sequence[bool]) -> dict[str, list[int]]:
    """Count answers of a talk: kind -> [right, of]."""
    made: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for turn, right in zip(turns, rights, strict=True):
        for name in (turn.question.kind, _ALL):
            made[name][0] += right
            made[name][1] += 1
    return dict(made)


def constant(talks: Sequence[Sequence[PictureTurn]]) -> list[dict[str, list[int]]]:
    """Count what the answer that is most often right would get, given to all of a kind."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for turn in itertools.chain.from_iterable(talks):
        answers[turn.question.kind][turn.question.answer] += 1
    said = {kind: counts.most_common(1)[0][0] for kind, counts in answers.items()}
    return [
        by_kind(turns, [turn.question.answer == said[turn.question.kind] for turn in turns])
        for turns in talks
    ]


def rows_of(scores: Scores) -> list[dict[str, Any]]:
    """Return a row per way of reading and kind: counts, share, interval, difference to pictures."""
    kinds = sorted({kind for talk in scores[_SIGHTS[0]] for kind in talk})
    rows = []
    for name, kind in itertools.product(scores, kinds):
        with_kind = [n for n, talk in enumerate(scores[name]) if kind in talk]
        right, of = zip(*(scores[name][n][kind] for n in with_kind), strict=True)
        share = mean(right, of)
        row: dict[str, Any] = {"run": name, "kind": kind, "right": sum(right), "of": sum(of)}
        row |= {"share": share.value, "low": share.low, "high": share.high}
        if name != _SIGHTS[0] and kind == _ALL:
            best = [scores[_SIGHTS[0]][n][kind][0] for n in with_kind]
            gap = paired(right, best, of)
            row |= {"difference": [gap.value, gap.low, gap.high], "p": gap.p}
        rows.append(row)
    return rows


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy.llava", description=__doc__
    )
    parser.add_argument("model", help="a joined checkpoint")
    parser.add_argument("--easy-vqa", type=Path, help="its folder data; else the package's")
    parser.add_argument("--talks", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4, help="questions of a talk")
    parser.add_argument("--first", type=int, default=10**6, help="number of the first talk")
    parser.add_argument(
        "--method",
        action="append",
        default=[],
        help="POLICY[:GATES], as of benchmarks.quality; may be repeated",
    )
    parser.add_argument("--budgets", nargs="+", default=["1/2", "1/4"], help="shares of a talk")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/accuracy-llava.json")
    )
    args = parser.parse_args()
    try:
        if args.threads < 1 or args.talks < 1 or not args.budgets:
            raise InputError("--threads and --talks take 1 or more, --budgets one or more")
        torch.set_num_threads(args.threads)
        require_output(args.output.parent)
        rows = rows_of(run(args))
    except (MmkvError, OSError) as error:
        sys.exit(f"benchmarks.accuracy.llava: error: {one_line(str(error))}")
    table = Table(title=f"Whole answers, {args.talks} held-out talks, {args.model}")
    for name in ("run", "kind", "right", "of", "share", "95 % interval"):
        table.add_column(name)
    for row in rows:
        shown = f"{row['low']:.3f} .. {row['high']:.3f}"
        counts = (str(row["right"]), str(row["of"]), f"{row['share']:.3f}", shown)
        table.add_row(row["run"], row["kind"], *counts)
    Console().print(table)
    settings = {k: v for k, v in vars(args).items() if k != "output"}
    write_results(args.output, settings, rows)


if __name__ == "__main__":
    main()
