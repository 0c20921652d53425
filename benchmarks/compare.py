"""Compare policies on equal budgets: accuracy, closeness to the full cache, bytes and speed.

``python -m benchmarks.compare MODEL --data scenes:dense --policies all --budgets 1/8 1/16`` runs
the held-out dialogues of :mod:`benchmarks.quality` through every policy, times decoding under each,
and writes a leaderboard: JSON, Markdown, and a plot of accuracy against physical bytes. A killed
run continues when it is started again; with more policies, budgets or dialogues only those are run.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.experiment import (
    ComparisonRuns,
    Page,
    Runs,
    Table,
    add_options,
    curve,
    difference,
    finish,
    interval,
    named,
    row_at,
    row_of,
    running,
)
from benchmarks.quality.methods import Cell, ComparedMethod, Comparison
from mmkv.engine.errors import InputError
from mmkv.engine.policies import make_policy, names
from mmkv.engine.policies.preset import PolicyText
from mmkv.engine.runtime import Runtime
from mmkv.engine.sequence import CachedSequence
from mmkv.training.measure.record import Journal

STEPS, ROUNDS = 48, 3


class Speeds:
    """Measured speeds, from the journal or new ones.

    Args:
        context: tokens of the random prompt before the timed steps.
    """

    def __init__(self, comparison: Comparison, journal: Journal, context: int) -> None:
        self.comparison, self.journal, self.context = comparison, journal, context
        self._base: Runtime | None = None
        self._where = f"speed of {comparison.described()} {context}"

    def of(self, cell: Cell) -> dict[str, Any]:
        """Return ``tokens_per_second`` (median of rounds), ``eviction_share`` and ``path``.

        Raises:
            InputError: the model's context does not hold the prompt and the steps.
        """
        key = cell.key()
        done = [row for row in self.journal.rows("where", self._where) if row["cell"] == key]
        if done:
            return dict(done[-1]["record"])
        found = self._measure(cell)
        self.journal.add([{"where": self._where, "cell": key, "record": found}])
        return found

    def _measure(self, cell: Cell) -> dict[str, Any]:
        compared = self.comparison
        if self._base is None:
            self._base = Runtime.from_pretrained(
                compared.model, policy="full", dtype=compared.dtype, device=compared.device
            )
        base = self._base
        if self.context + STEPS > base.spec.max_position:
            raise InputError(
                f"--context {self.context} and {STEPS} steps pass position "
                f"{base.spec.max_position:,}, which the model was trained for; give a shorter one"
            )
        engine = cell.engine(base, compared.model)
        if cell.budget is not None:
            engine.budget = cell.budget_for(self.context)
        below = min([base.spec.vocab_size, *base.family.placeholder.values()])
        prompt = torch.randint(3, below, (1, self.context), generator=torch.manual_seed(0))
        with engine.session() as session:
            first = int(session.prefill({"input_ids": prompt}).argmax())
            greedy(session, first, 4)  # warms up
            seconds = [greedy(session, first, STEPS) for _ in range(ROUNDS)]
            share = eviction_share(session, first) if engine.policy.evicts else 0.0
        return {
            "tokens_per_second": STEPS / statistics.median(seconds),
            "eviction_share": share,
            "path": engine.decode_path,
        }


def greedy(session: CachedSequence, token: int, steps: int) -> float:
    """Time greedy steps of a copy of the session, in seconds."""
    with session.fork() as copy:
        start = time.perf_counter()
        for _ in range(steps):
            token = int(session.engine.decode([copy], [token]).argmax())
        return time.perf_counter() - start


def eviction_share(session: CachedSequence, token: int) -> float:
    """Measure the part of the decode time that goes into eviction: inside C by its clock, and
    around it.
    """
    spent, engine = 0.0, session.engine

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal spent
            start = time.perf_counter()
            made = function(*args, **options)
            spent += time.perf_counter() - start
            return made

        return call

    cpu = engine.backends.cpu
    native = cpu.decoder if engine.decode_path == "native" else None
    inside = 0.0 if native is None else native.eviction_seconds
    places: list[tuple[Any, str]] = [(engine.budgets, "cut")]
    if native is not None and cpu.evictor is not None:
        places += [(cpu.evictor, "request"), (cpu.evictor, "commit")]
    with contextlib.ExitStack() as stack:
        for owner, name in places:
            function = timed(getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, function))
        seconds = greedy(session, token, STEPS)
    if native is not None:
        spent += native.eviction_seconds - inside
    return spent / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    add_options(parser, "compare")
    parser.add_argument(
        "--data", action="append", required=True, help="as for benchmarks.quality; repeatable"
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
    with running(args, "benchmarks.compare") as (path, journal):
        methods = tuple(chosen(args.policies, gates_of(args.gates, args.model)))
        comparison = Comparison(
            args.model, args.dtype, methods, tuple(args.budgets), args.max_length, args.device
        )
        speeds = Speeds(comparison, journal, args.context)
        pages = {}
        with ComparisonRuns(comparison, journal, args.workers) as runs:
            for source in args.data:
                raw = runs.of(source, args.dialogues, args.skip)
                pages[source] = summarise(raw, comparison.cells(), speeds.of)
        finish(args, path, pages, tables(pages), draw)


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


def chosen(policies: str, gates: Mapping[str, tuple[str, ...]]) -> Iterator[ComparedMethod]:
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
        if everything and policy.merger is not None:
            print(
                f"benchmarks.compare: left out, policy {text!r} merges what CLIP's tower gives; "
                "name it for a model that has one",
                file=sys.stderr,
            )
            continue
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
                print(f"benchmarks.compare: left out, {remedy}", file=sys.stderr)
                continue
        yield ComparedMethod(policy.name, text, None, folders)


def _with_parameter(text: str, pair: str) -> str:
    """Return a policy as a command line names it, with one parameter more."""
    return f"{text[:-1]},{pair}]" if text.endswith("]") else f"{text}[{pair}]"


def summarise(
    raw: Mapping[str, Runs],
    cells: Mapping[str, Sequence[Cell]],
    speed: Callable[[Cell], Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a row for the full cache and for every method at every budget.

    Each row has the measures of ``benchmarks.quality``, physical bytes at the end of a dialogue,
    the speed of its first gates, and paired differences from the first method at the same budget
    and from the full cache.

    Args:
        raw: what :meth:`ComparisonRuns.of` returns; cells: what it ran.
    """
    full = raw["full"][0]
    questions = [len(row["right"]) for row in full]
    tokens = [sum(row["tokens"]) for row in full]
    first: dict[str, str] = {}
    rows = []
    for name, runs in raw.items():
        method, _, budget = name.partition(" at ")
        row = row_of(method, budget or "1", runs, questions, tokens)
        del row["entries_by_row"]
        row["bytes"] = float(np.mean([one["bytes"] for run in runs for one in run]))
        row["speed"] = dict(speed(cells[name][0]))
        if name != "full":
            reference = first.setdefault(budget, name)
            row["from_full"] = difference(runs, raw["full"], "right", questions)
            row["from_first"] = {
                "of": reference.partition(" at ")[0],
                **difference(runs, raw[reference], "right", questions),
            }
        rows.append(row)
    return {"dialogues": len(full), "questions": sum(questions), "rows": rows}


def tables(pages: Mapping[str, Page]) -> dict[str, Table]:
    """Make a leaderboard and paired differences; of several sources one each, by their number."""
    made: dict[str, Table] = {}
    for number, page in enumerate(pages.values(), 1):
        end = f"-{number}" if len(pages) > 1 else ""
        made[f"leaderboard{end}"] = leaderboard(page)
        made[f"differences{end}"] = rows = [["policy", "budget", "less", "accuracy", "p"]]
        for row in page["rows"][1:]:
            gap = row["from_first"]
            cells = (gap["of"], interval(gap, sign=True), f"{gap['p']:.4f}")
            rows.append([f"`{row['method']}`", row["budget"], *cells])
    return made


def leaderboard(page: Page) -> Table:
    """Tabulate all policies, the most accurate at the first budget first."""
    budgets, full = named(page, "budget"), page["rows"][0]
    head = [f"{of} at {budget}" for budget in budgets for of in ("accuracy", "kB")]
    ranked = sorted(
        ([row_at(page, method, budget) for budget in budgets] for method in named(page, "method")),
        key=lambda found: (-found[0]["accuracy"]["value"], found[0]["method"]),
    )
    made = [["policy", *head, f"KL at {budgets[0]}", "tokens/s", "in eviction"]]
    for found in [[full] * len(budgets), *ranked]:
        first, speed = found[0], found[0]["speed"]
        made.append([f"`{first['method']}`"])
        for row in found:
            made[-1] += [interval(row["accuracy"]), f"{row['bytes'] / 1e3:,.0f}"]
        made[-1] += [f"{first['kl_per_token']['value']:.3f}"]
        made[-1] += [f"{speed['tokens_per_second']:,.0f}", f"{speed['eviction_share']:.0%}"]
    return made


def draw(pages: Mapping[str, Page], path: Path) -> None:
    """Draw accuracy against physical bytes, a panel per data source and a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4 * len(pages), 4.8), layout="constrained")
    panels = figure.subplots(1, len(pages), squeeze=False)[0]
    for panel, (source, page) in zip(panels, pages.items(), strict=True):
        for number, method in enumerate(["full", *named(page, "method")]):
            mine = [row for row in page["rows"] if row["method"] == method]
            mine.sort(key=lambda row: row["bytes"])
            x = [row["bytes"] / 1e3 for row in mine]
            # Ten colours: policies of one colour differ by their mark.
            curve(panel, x, [row["accuracy"] for row in mine], method, "so^vD*"[number // 10 % 6])
        panel.set(title=source, xscale="log", ylim=(0, 1.02))
        panel.set(xlabel="physical bytes of keys and values, kB", ylabel="accuracy")
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
