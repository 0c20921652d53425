"""Measure needles found in a haystack, by depth, length, policy and budget.

``python -m eval.needle MODEL --domain text|pictures|video --lengths 1024 2048 --method ...`` hides
several keys with several values in text or pictures (``eval.needle.tasks``), evicts down to the
budget, and only then asks. Answers are teacher-forced with eviction after each token. A value is
found when each of its tokens is the most likely one after the true answer so far. The program
writes JSON, a Markdown table and heat maps over depth and length. A killed run continues when it is
started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mmkv.engine.errors import InputError
from mmkv.eval.domains import maker
from mmkv.eval.needle import report
from mmkv.eval.needle.tasks import SIZES, Haystack
from mmkv.eval.quality.command import add_methods, add_options, comparison, finish, running
from mmkv.eval.quality.run import ComparisonRuns

LENGTHS = {"text": [512, 1024, 2048], "pictures": [256, 512, 1024, 2048], "video": [256, 512, 1024]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m eval.needle", description=__doc__)
    add_options(parser, "needle")
    add_methods(parser, ("32", "64", "128", "256"))
    parser.add_argument("--domain", choices=list(SIZES), default="pictures")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=length,
        metavar="TOKENS",
        help="lengths in tokens, such as 512 or 128k",
    )
    for place, name in enumerate(("keys", "values", "queries")):
        usual = ", ".join(f"{domain} {sizes[place]}" for domain, sizes in SIZES.items())
        parser.add_argument(f"--{name}", type=int, help=f"default: {usual}")
    parser.add_argument("--limit", type=int, default=16, help="documents of each length")
    args = parser.parse_args(arguments)
    keys, values, queries = SIZES[args.domain]
    args.lengths = args.lengths or LENGTHS[args.domain]
    with running(args, "mmkv.eval.needle") as (path, journal):
        if args.limit < 1:
            raise InputError(f"--limit {args.limit} reads nothing; give at least 1")
        compared = comparison(args)
        read = []
        with ComparisonRuns(compared, journal, args.workers) as runs:
            for tokens in sorted(set(args.lengths)):
                kind = Haystack.parse(
                    f"needle:{args.domain}:{tokens}:{args.keys or keys}:{args.values or values}:"
                    f"{args.queries or queries}"
                )
                make = maker(args.model, kind.name)
                assert make is not None
                make(0)  # errors show before the long run starts
                raw = runs.of(kind.name, args.limit)
                read.append((kind, raw, [make(index).notes for index in range(args.limit)]))
        page = report.summarise(read, [method.name for method in compared.methods], args.budgets)
        finish(args, path, page, report)


def length(text: str) -> int:
    """Parse a number of tokens: ``512``, ``1k`` (1,024)."""
    try:
        made = int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens") from None
    if made < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens")
    return made


if __name__ == "__main__":
    main()
