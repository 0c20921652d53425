"""The tables of the README and of docs/ that hold figures, made from the result files.

A document marks the place: ``<!-- table: NAME -->`` and ``<!-- end -->``; ``python -m eval.report``
fills in what stands between them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.quality.report import interval

_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_SIDES = ("dbtrimkv", "trimkv", "snapkv", "streamingllm")
_KINDS = ("dense", "sparse", "throng")
_GATES = {
    "recipe": "the recipe of that time (log-bias, tying of the paper, global capacity)",
    "none": "one readout per layer and head",
    "logit-scale": "logit-scale gating",
    "trimkv": "`trimkv` (per head, untied, n = 1), log-bias",
    "trimkv-scale": "`trimkv`, logit-scale",
    "trimkv-tt": "`trimkv`, logit-scale, normaliser of its paper",
}
_RULES = {
    "dbtrimkv": "tied, one budget (`dbtrimkv`)",
    "tied-per-head": "tied, a budget per head",
    "untied-global": "untied (`trimkv`'s), one budget",
    "trimkv": "untied, a budget per head (`trimkv`)",
}
_SWEEP = {
    "dbtrimkv": "`dbtrimkv`",
    "dbtrimkv-layer": "one readout per layer",
    "dbtrimkv-none": "one readout per layer and head",
    "dbtrimkv-kv": "gates on [k; v]",
    "dbtrimkv-kl": "KL alone",
    "dbtrimkv-ntp": "NTP alone",
    "dbtrimkv-logit": "logit-scale gating",
    "dbtrimkv-M16": "M = 16",
    "dbtrimkv-M64": "M = 64",
    "dbtrimkv-cap4": "capacity term x 4",
    "trimkv": "`trimkv`",
    "trimkv-M64": "`trimkv`, M = 64",
}
_BUDGET16 = {
    "dbtrimkv-M16": "`dbtrimkv`, M = 16",
    "dbtrimkv": "`dbtrimkv`, M = 32: bundled",
    "trimkv-M16": "`trimkv`, M = 16",
    "trimkv": "`trimkv`, M = 32: bundled",
}
_HALF = {"dbtrimkv-M16": "`dbtrimkv`, M = 16"}
_RECIPES = {
    "dbtrimkv": "the recipe of that time",
    "throngs": "throngs among the documents",
    "both": "throngs and more streams, 700 steps",
    "heavy": "throngs and more streams, capacity term x 16: the recipe of today",
    "trimkv": "`trimkv` of that time",
}
_REMEDIES = {
    "trimkv": "`trimkv`, M = 48",
    "trimkv-n2": "lookahead 2",
    "trimkv-b16": "trained for M = 16",
    "trimkv-scale": "logit-scale gating",
    "trimkv-cap": "capacity term 16 times as heavy",
    "trimkv-tied": "`dbtrimkv`'s gates",
    "trimkv-global": "its own gates, but one budget for all heads",
    "dbtrimkv": "`dbtrimkv`",
    "snapkv": "`snapkv`",
    "streamingllm": "`streamingllm`",
}
_SPEEDS = {
    "tiny-vlm": "bundled model, batch 1, `full`",
    "tiny-vlm-evicting": "bundled model, batch 1, 512 tokens, `dbtrimkv` M = 64",
    "tiny-vlm-evicting-batch8": "bundled model, batch 8, 512 tokens, `dbtrimkv` M = 64",
    "smollm2": "SmolLM2-135M, batch 1, `full`",
    "smollm2-2k-evicting": "SmolLM2-135M, batch 1, 2,048 tokens, `dbtrimkv` M = 256",
    "smollm2-4k-batch8-evicting": "SmolLM2-135M, batch 8, 4,096 tokens, `dbtrimkv` M = 256",
}

ROUND_3 = "round-3"  # results of gates before those of today

Rows = Iterator[Sequence[str]]


def filled(text: str, results: Path) -> str:
    """The document with its tables.

    Raises:
        KeyError: a table nobody knows; OSError, ValueError: a result file that cannot be read.
    """
    return _BLOCK.sub(lambda m: f"{m[1]}{_table(TABLES[m[2]](results))}{m[3]}", text)


def _table(rows: Rows) -> str:
    head, *body = (f"| {' | '.join(row)} |\n" for row in rows)
    return "".join([head, "|" + "---|" * (head.count(" | ") + 1) + "\n", *body])


def _page(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())["results"]


def _row(page: Mapping[str, Any], side: str, budget: str) -> Mapping[str, Any]:
    return next(r for r in page["rows"] if (r["side"], r["budget"]) == (side, budget))


def _short(row: Mapping[str, Any]) -> str:
    return f"{row['accuracy']['value']:.3f}"


def _long(row: Mapping[str, Any]) -> str:
    return interval(row["accuracy"])


def _budgets(page: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["budget"] for row in page["rows"] if row["side"] != "full"))


def _quality(name: str, source: str, others: Mapping[str, str]) -> Callable[[Path], Rows]:
    """Every budget of one result, with intervals; ``others``: more sides, and what to call them."""

    def rows(results: Path) -> Rows:
        page = _page(results, name)[source]
        yield ["budget", *(f"`{side}`" for side in _SIDES), *others.values()]
        for budget in _budgets(page):
            yield [budget, *(_long(_row(page, side, budget)) for side in (*_SIDES, *others))]

    return rows


def _readme_quality(results: Path) -> Rows:
    yield ["dialogues", "budget", "full", *(f"`{side}`" for side in _SIDES)]
    for kind, budgets in (("dense", ("1/3", "1/5", "1/8")), ("sparse", ("1/8", "1/16", "1/32"))):
        page = _page(results, f"quality-tiny-vlm-{kind}")[f"scenes:{kind}"]
        for budget in budgets:
            cells = (_short(_row(page, side, budget)) for side in _SIDES)
            yield [kind, budget, _short(_row(page, "full", "1")), *cells]


def _recall(shown: Callable[[Mapping[str, Any]], str]) -> Callable[[Path], Rows]:
    def rows(results: Path) -> Rows:
        page = _page(results, "quality-smollm2-recall")["tasks:recall"]
        yield ["budget", "full", *(f"`{side}`" for side in _SIDES)]
        for budget in _budgets(page):
            cells = (shown(_row(page, side, budget)) for side in _SIDES)
            yield [budget, shown(_row(page, "full", "1")), *cells]

    return rows


def _far(results: Path) -> Rows:
    sides = ("dbtrimkv", "longer", "streamingllm")
    page = _page(results, "quality-smollm2-far")["tasks:far-needles"]

    def shown(side: str, budget: str) -> str:
        row = _row(page, side, budget)
        return f"{_long(row)}; {row['kl_per_token']['value']:.3f}"

    yield ["entries", "full", *(f"`{side}`" for side in sides)]
    for budget in _budgets(page):
        cells = (shown(side, budget) for side in sides)
        yield [budget, _long(_row(page, "full", "1")), *cells]


def _unseen(results: Path) -> Rows:
    yield ["task", "budget", "full", *(f"`{side}`" for side in _SIDES)]
    for source, page in _page(results, "quality-smollm2-unseen").items():
        for budget in _budgets(page):
            cells = (_long(_row(page, side, budget)) for side in _SIDES)
            task = source.partition(":")[2]
            yield [f"`{task}`", budget, _long(_row(page, "full", "1")), *cells]


def _dialogues(results: Path) -> Rows:
    """Answers of the bundled model by kind of dialogue, all kinds of question together."""
    yield ["dialogues (100 each)", "tokens", "about", "right", "of", "share"]
    for row in _page(results, "dialogue-accuracy"):
        if row["kind"] == "all":
            share = f"{row['share']:.3f} [{row['ci'][0]:.3f}, {row['ci'][1]:.3f}]"
            counts = (f"{row[key]:,}" for key in ("right", "of"))
            yield [row["dialogue"], f"{row['mean_tokens']:,.0f}", row["about"], *counts, share]


def _texts(results: Path) -> Rows:
    sides = ("dbtrimkv", "trimkv", "streamingllm")

    def perplexity(row: Mapping[str, Any]) -> str:
        return f"{math.exp(row['nll_per_token']['value']):.2f}"

    yield ["texts", "budget", "full", *(f"`{side}`" for side in sides)]
    for source, page in _page(results, "quality-smollm2-texts").items():
        kind = Path(source.partition(":")[2]).name.partition(".")[0]
        for budget in _budgets(page):
            cells = (perplexity(_row(page, side, budget)) for side in sides)
            yield [kind, budget, perplexity(_row(page, "full", "1")), *cells]


def _lookahead(results: Path) -> Rows:
    yield ["dialogues", "budget", *(f"n = {n}" for n in (1, 2, 5, "inf"))]
    for kind in ("dense", "sparse"):
        page = _page(results, f"quality-lookahead-{kind}")[f"scenes:{kind}"]
        for budget in _budgets(page):
            sides = (f"dbtrimkv@{n}" for n in (1, 2, 5, "inf"))
            yield [kind, budget, *(_short(_row(page, side, budget)) for side in sides)]


def together(results: Path, names: Sequence[str], kind: str) -> Mapping[str, Any]:
    """The rows of several results over the same dialogues.

    Raises:
        ValueError: a side that several of them hold reads differently in two.
    """
    rows: dict[tuple[str, str], Mapping[str, Any]] = {}
    for name in names:
        for row in _page(results, f"{name}-{kind}")[f"scenes:{kind}"]["rows"]:
            side, budget = place = row["side"], row["budget"]
            if _short(rows.setdefault(place, row)) != _short(row):
                raise ValueError(f"{side} at {budget} of {kind} differs in one of {list(names)}")
    return {"rows": list(rows.values())}


def _variants(
    names: str | Sequence[str],
    words: Mapping[str, str],
    kinds: Sequence[str] = ("dense", "sparse"),
) -> Callable[[Path], Rows]:
    """Gates or rules in the order of ``words``, side by side at every budget of every kind."""
    names = [names] if isinstance(names, str) else names

    def rows(results: Path) -> Rows:
        pages = {kind: together(results, names, kind) for kind in kinds}
        places = [(kind, budget) for kind, page in pages.items() for budget in _budgets(page)]
        yield ["gates", *(f"{kind} {budget}" for kind, budget in places)]
        yield ["full cache", *(_short(_row(pages[kind], "full", "1")) for kind, _ in places)]
        for side, text in words.items():
            cells = (_short(_row(pages[kind], side, budget)) for kind, budget in places)
            yield [text, *cells]

    return rows


def _remedies(results: Path) -> Rows:
    """What was tried for one policy at the tightest budgets."""
    page = _page(results, f"{ROUND_3}/quality-smollm2-remedies")["tasks:recall"]
    yield ["recall", *_budgets(page)]
    for side, text in _REMEDIES.items():
        yield [text, *(_long(_row(page, side, budget)) for budget in _budgets(page))]


def _mmdu(results: Path) -> Rows:
    yield ["policy, budget", "right", "share", "95 % interval"]
    for row in _page(results, "mmdu-small"):
        name = f"`{row['policy']}`" + (f", {row['budget']}" if row["budget"] else "")
        low, high = row["ci"]
        yield [name, str(row["right"]), f"{row['share']:.3f}", f"{low:.3f} .. {high:.3f}"]


def _memory(results: Path) -> Rows:
    cases = _page(results, "memory-cpu")
    yield ["prompt tokens", "KV, `dbtrimkv`", "physical / logical", "peak growth", "KV, `full`",
           "peak growth"]  # fmt: skip
    for tokens in (1024, 8192, 32768, 131072):
        ours, full = (
            next(c for c in cases if (c["policy"], c["prompt_tokens"]) == (policy, tokens))
            for policy in ("dbtrimkv", "full")
        )
        yield [
            f"{tokens:,}", f"{ours['kv_bytes'] / 2**20:.2f} MiB",
            f"{ours['physical_over_logical']:.3f}",
            f"{ours['peak_growth_bytes'] / 2**20:,.0f} MiB",
            f"{full['kv_bytes'] / 2**20:,.2f} MiB",
            f"{full['peak_growth_bytes'] / 2**20:,.0f} MiB",
        ]  # fmt: skip


def _speed(results: Path) -> Rows:
    def spread(value: Mapping[str, Any], digits: int) -> str:
        low, high = value["quartiles"]
        return f"{value['median']:,.{digits}f} ({low:,.{digits}f} .. {high:,.{digits}f})"

    yield ["tokens/s of all sequences", "mmkv", "transformers generate, full cache", "ratio",
           "eviction"]  # fmt: skip
    for name, words in _SPEEDS.items():
        found = _page(results, f"decode-cpu-{name}")
        ours, theirs, share = found["mmkv"], found["transformers"], found.get("eviction_share")
        yield [
            words, spread(ours, 0 if ours["median"] > 500 else 1),
            spread(theirs, 0 if theirs["median"] > 100 else 1), spread(found["ratio"], 1),
            f"{100 * share['median']:.1f} % of a step" if share else "-",
        ]  # fmt: skip


TABLES: dict[str, Callable[[Path], Rows]] = {
    "readme-quality": _readme_quality,
    "readme-recall": _recall(_short),
    "recall": _recall(_long),
    "dense": _quality("quality-tiny-vlm-dense", "scenes:dense", _HALF),
    "sparse": _quality("quality-tiny-vlm-sparse", "scenes:sparse", _HALF),
    "throng": _quality("quality-tiny-vlm-throng", "scenes:throng", _HALF),
    "haystack": _quality("quality-smollm2-haystack", "tasks:haystack", {}),
    "far": _far,
    "unseen": _unseen,
    "dialogues": _dialogues,
    "texts": _texts,
    "lookahead": _lookahead,
    "rules": _variants("quality-rules", _RULES, _KINDS),
    "sweep": _variants(("quality-sweep", "quality-ablation"), _SWEEP, _KINDS),
    "budget16": _variants("quality-budget16", _BUDGET16, _KINDS),
    "recipes": _variants(f"{ROUND_3}/quality-rules", _RECIPES, _KINDS),
    "gates": _variants(f"{ROUND_3}/quality-gates", _GATES),
    "remedies": _remedies,
    "mmdu": _mmdu,
    "memory": _memory,
    "speed": _speed,
}
