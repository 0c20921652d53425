"""Compare policies on equal budgets: accuracy, closeness to the full cache, bytes and speed.

``python -m eval.compare MODEL --data scenes:dense --policies all --budgets 1/8 1/16`` runs the
held-out dialogues of :mod:`mmkv.eval.quality` through every policy, times decoding under each, and
writes a leaderboard: JSON, Markdown, and a plot of accuracy against physical bytes. A killed run
continues when it is started again; with more policies, budgets or dialogues only those are run.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mmkv.engine.errors import InputError
from mmkv.engine.policies import make_policy, names
from mmkv.engine.policies.preset import PolicyText
from mmkv.eval.compare import report
from mmkv.eval.compare.speed import Speeds
from mmkv.eval.quality.command import add_options, finish, running
from mmkv.eval.quality.methods import Comparison, Method
from mmkv.eval.quality.run import ComparisonRuns


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m eval.compare", description=__doc__)
    add_options(parser, "compare")
    parser.add_argument(
        "--data", action="append", required=True, help="as for eval.quality; repeatable"
    )
    parser.add_argument(
        "--policies",
        default="all",
        help="names, split by commas, with parameters in brackets; the first is what others are "
        "compared with (default: all, dbtrimkv first)",
    )
    parser.add_argument(
        "--gates",
        action="append",
        default=[],
        metavar="POLICY=FOLDER[,FOLDER]",
        help="gates of a policy, one folder per seed; default: dbtrimkv with the model's own",
    )
    parser.add_argument("--budgets", nargs="+", default=["1/4", "1/8", "1/16", "1/32"])
    parser.add_argument("--max-length", type=int, default=8192, help="longest dialogue, tokens")
    parser.add_argument("--dialogues", type=int, default=120, help="dialogues of each data source")
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="leave out the first N dialogues"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens before timed steps")
    args = parser.parse_args(arguments)
    if args.skip < 0 or args.dialogues < 1 or args.context < 1:
        parser.error("--skip takes 0 or more, --dialogues and --context 1 or more")
    with running(args, "mmkv.eval.compare") as (path, journal):
        methods = tuple(chosen(args.policies, gates_of(args.gates, args.model)))
        comparison = Comparison(
            args.model, args.dtype, methods, tuple(args.budgets), args.max_length, args.device
        )
        speeds = Speeds(comparison, journal, args.context)
        pages = {}
        with ComparisonRuns(comparison, journal, args.workers) as runs:
            for source in args.data:
                raw = runs.of(source, args.dialogues, args.skip)
                pages[source] = report.summarise(raw, comparison.cells(), speeds.of)
        finish(args, path, pages, report)


def gates_of(texts: Sequence[str], model: str) -> dict[str, tuple[str, ...]]:
    """Return gate folders by policy: what ``--gates`` names, and the model's own for dbtrimkv.

    Raises:
        InputError: a text without a policy or a folder.
    """
    own = Path(model) / "gates"
    found: dict[str, tuple[str, ...]] = {}
    if (own / "gates.json").is_file():
        found["dbtrimkv"] = (str(own),)
    for text in texts:
        policy, _, folders = text.partition("=")
        if not policy or not folders:
            raise InputError(f"--gates {text!r}: write POLICY=FOLDER, such as trimkv=FOLDER")
        found[policy] = tuple(folders.split(","))
    return found


def chosen(policies: str, gates: Mapping[str, tuple[str, ...]]) -> Iterator[Method]:
    """Yield a method for each policy; of ``all``, those that lack gates are named on stderr.

    Raises:
        InputError: a named policy that needs gates, and none given.
    """
    everything = policies == "all"
    texts = names() if everything else re.split(r",(?![^\[]*\])", policies)
    for text in texts:
        policy = make_policy(text)
        if not policy.evicts and policy.pruner is None and policy.admission is None:
            continue  # the full cache is always read
        folders: tuple[str, ...] = ()
        if policy.gates:
            name = PolicyText.parse(text).name
            # Of wgkv+X: X's retention gates, and wgkv's write gates.
            first, _, last = name.partition("+")
            like = last if policy.gates == "retention" else first
            folders = gates.get(text) or gates.get(name) or gates.get(like, ())
            lacking = "" if folders else name
            if policy.admission is not None and policy.gates == "retention":
                if not policy.admission.gates and first in gates:
                    text = _with_parameter(text, f"write_gates={gates[first][0]}")
                elif not policy.admission.gates:
                    lacking = first
            if lacking:
                remedy = f"policy {text!r} needs gates: give --gates {lacking}=FOLDER"
                if not everything:
                    raise InputError(remedy)
                print(f"mmkv.eval.compare: left out, {remedy}", file=sys.stderr)
                continue
        yield Method(policy.name, text, None, folders)


def _with_parameter(text: str, pair: str) -> str:
    """Return a policy as a command line names it, with one parameter more."""
    return f"{text[:-1]},{pair}]" if text.endswith("]") else f"{text}[{pair}]"


if __name__ == "__main__":
    main()
