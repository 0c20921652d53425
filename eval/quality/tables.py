"""Tables of the documents that come from results of ``eval.quality``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmkv.eval.quality.report import interval

METHODS = ("dbtrimkv", "trimkv", "snapkv", "streamingllm")
_WITH_OURS = ("dbtrimkv", "balanced", "trimkv", "snapkv", "streamingllm")
_RULES = {
    "dbtrimkv": "tied, one budget (`dbtrimkv`)",
    "tied-per-head": "tied, a budget per head",
    "untied-global": "untied (`trimkv`'s), one budget",
    "trimkv": "untied, a budget per head (`trimkv`)",
}
_RECIPES = {
    "dbtrimkv": "`dbtrimkv`",
    "trimkv": "`trimkv`, our recipe",
    "trimkv-recipe": "`trimkv`, its paper's",
}
_KINDS = {"dense": "dense", "sparse": "sparse", "256-distractors": "256 distr."}
# Name of the data, result file, part of the data source's name, budgets shown.
_PICTURES = (
    ("dense", "quality-tiny-vlm-dense", "", ("1/3", "1/5", "1/8", "1/16", "1/32")),
    ("sparse", "quality-tiny-vlm-sparse", "", ("1/4", "1/8", "1/16", "1/32")),
    ("256 distractors", "quality-tiny-vlm-256-distractors", "", ("1/4", "1/8", "1/16", "1/64")),
)
_TEXT_TASKS = (
    ("recall", "quality-smollm2-recall", "", ("1/4", "1/8", "1/16", "1/32")),
    ("sparse texts", "quality-smollm2-haystack", "", ("1/8", "1/16", "1/32")),
    ("`records`", "quality-smollm2-unseen", "records", ("1/3", "1/8")),
    ("`assigned`", "quality-smollm2-unseen", "assigned", ("1/3", "1/8")),
)
# Name of the data, result file at equal bytes, budgets shown: bytes of so many entries in bfloat16.
_BYTES = (
    ("dense", "quality-bytes-dense", ("1/4", "1/8", "1/16", "1/32")),
    ("sparse", "quality-bytes-sparse", ("1/16", "1/32")),
    ("256 distractors", "quality-bytes-256-distractors", ("1/8", "1/16", "1/32")),
    ("recall, SmolLM2", "quality-bytes-recall", ("1/16", "1/32")),
    ("sparse texts, SmolLM2", "quality-bytes-haystack", ("1/16", "1/32")),
)
# The same at equal entries.
_ENTRIES = (
    ("dense", "quality-entries-dense", ("1/4", "1/8", "1/16")),
    ("recall, SmolLM2", "quality-entries-recall", ("1/8",)),
)
_FORMS = ("bf16", "int8", "k8v4", "int4")
_BUDGETS_OF_256 = ("1/4", "1/8", "1/16", "1/32", "1/64")

Rows = Iterator[Sequence[str]]


def results_of(results: Path, name: str) -> Any:
    """Read what a result file found."""
    return json.loads((results / f"{name}.json").read_text())["results"]


def page_of(results: Path, name: str) -> Any:
    """Return the only data source of a quality result."""
    (page,) = results_of(results, name).values()
    return page


def row_of(page: Mapping[str, Any], method: str, budget: str) -> Mapping[str, Any]:
    """Return the row of a method at a budget."""
    return next(r for r in page["rows"] if (r["method"], r["budget"]) == (method, budget))


def share(row: Mapping[str, Any]) -> str:
    """Format the share of right answers."""
    return f"{row['accuracy']['value']:.3f}"


def with_interval(row: Mapping[str, Any]) -> str:
    """Format the share of right answers and its interval."""
    return interval(row["accuracy"])


def budgets_of(page: Mapping[str, Any]) -> list[str]:
    """Return the budgets of a page, in its order."""
    return list(dict.fromkeys(row["budget"] for row in page["rows"] if row["method"] != "full"))


def _accuracy(
    first: str,
    shown: Sequence[tuple[str, str, str, Sequence[str]]],
    methods: Sequence[str] = METHODS,
) -> Callable[[Path], Rows]:
    """Return accuracy with intervals.

    Args:
        first: heading of the first column; shown: what to call the data, result file, part of the
            data source's name, and the budgets.
    """

    def rows(results: Path) -> Rows:
        yield [first, "budget", "full", *(f"`{method}`" for method in methods)]
        for words, name, source, budgets in shown:
            pages = results_of(results, name)
            (page,) = (page for key, page in pages.items() if source in key)
            for budget in budgets:
                cells = (with_interval(row_of(page, method, budget)) for method in methods)
                yield [words, budget, with_interval(row_of(page, "full", "1")), *cells]

    return rows


def _readme(results: Path) -> Rows:
    """Yield three budgets of two kinds of dialogue, and of recall on a language model."""
    shown = (
        ("dense pictures", "quality-tiny-vlm-dense", ("1/3", "1/8", "1/16")),
        ("sparse pictures", "quality-tiny-vlm-sparse", ("1/8", "1/16", "1/32")),
        ("facts in text", "quality-smollm2-recall", ("1/4", "1/8", "1/16")),
    )
    yield ["questions about", "budget", "full", *(f"`{method}`" for method in METHODS)]
    for words, name, budgets in shown:
        page = page_of(results, name)
        for budget in budgets:
            cells = (share(row_of(page, method, budget)) for method in METHODS)
            yield [words, budget, share(row_of(page, "full", "1")), *cells]


def _data(results: Path) -> Rows:
    """Yield what was read at equal bytes, and at equal entries."""
    yield ["at equal", "dialogues", "number", "tokens each", "questions", "gate seeds"]
    for unit, shown in (("bytes", _BYTES), ("entries", _ENTRIES)):
        for words, name, budgets in shown:
            page = page_of(results, name)
            tokens = "{least:,} to {most:,}".format(**page["context_tokens"])
            seeds = str(row_of(page, "bf16", budgets[0])["seeds"])
            yield [unit, words, str(page["dialogues"]), tokens, f"{page['questions']:,}", seeds]


def _bytes(results: Path) -> Rows:
    """Yield accuracy and KL of every form of the cache at equal bytes."""
    yield ["dialogues", "bytes of", "full", *(f"`{form}`" for form in _FORMS)]
    for words, name, budgets in _BYTES:
        page = page_of(results, name)
        for budget in budgets:
            rows = [row_of(page, form, budget) for form in _FORMS]
            cells = (f"{with_interval(row)}; {row['kl_per_token']['value']:.3f}" for row in rows)
            yield [words, budget, share(row_of(page, "full", "1")), *cells]


def _perplexity(results: Path) -> Rows:
    """Yield how much larger perplexity is than the full cache's in every form, and KL."""
    yield ["text (pieces)", "bytes of", "full", *(f"`{form}`" for form in _FORMS)]
    for source, page in results_of(results, "quality-bytes-texts").items():
        full = math.exp(row_of(page, "full", "1")["nll_per_token"]["value"])
        kind = Path(source.removeprefix("text:")).name.partition(".")[0]
        for budget in budgets_of(page):
            cells = []
            for form in _FORMS:
                gap = _less(page, budget, form, "full", "nll_per_token")
                times = {name: math.exp(gap[name]) for name in ("value", "low", "high")}
                kl = row_of(page, form, budget)["kl_per_token"]["value"]
                cells.append(f"{interval(times)}; {kl:.3f}")
            yield [f"{kind} ({page['dialogues']})", f"{budget} entries", f"{full:.2f}", *cells]


def _less(
    page: Mapping[str, Any], budget: str, one: str, two: str, value: str = "accuracy"
) -> Mapping[str, float]:
    """Return the paired difference of two methods, its interval and p."""
    tests = {test["of"]: test[value] for test in page["tests"] if test["budget"] == budget}
    if f"{one} - {two}" in tests:
        return tests[f"{one} - {two}"]
    found = tests[f"{two} - {one}"]
    return {
        "value": -found["value"],
        "low": -found["high"],
        "high": -found["low"],
        "p": found["p"],
    }


def _differences(
    shown: Sequence[tuple[str, str, Sequence[str]]],
    pairs: Sequence[tuple[str, str]],
    unit: str,
    base: Sequence[str] = (),
) -> Callable[[Path], Rows]:
    """Return paired differences of accuracy, in points, with p.

    Args:
        shown: what to call the data, result file, and the budgets; unit: heading of the budgets.
        base: methods whose accuracy stands before them.
    """

    def rows(results: Path) -> Rows:
        less = (f"`{one}` less `{two}`" for one, two in pairs)
        yield ["dialogues", unit, *(f"`{method}`" for method in base), *less]
        for words, name, budgets in shown:
            page = page_of(results, name)
            for budget in budgets:
                cells = [share(row_of(page, method, budget)) for method in base]
                for pair in pairs:
                    found = _less(page, budget, *pair)
                    value, low, high = (
                        round(100 * found[key], 1) + 0.0 for key in ("value", "low", "high")
                    )
                    cells.append(f"{value:+.1f} [{low:+.1f}, {high:+.1f}], p = {found['p']:.2g}")
                yield [words, budget, *cells]

    return rows


def _gates(
    prefix: str, kinds: Mapping[str, str], gates: Mapping[str, str]
) -> Callable[[Path], Rows]:
    """Return a table of gates side by side, at every budget of every kind of dialogue.

    Args:
        prefix: of the result files; kinds: what follows it -> heading; gates: method -> words.
    """

    def rows(results: Path) -> Rows:
        pages = {words: page_of(results, f"{prefix}-{kind}") for kind, words in kinds.items()}
        places = [(kind, budget) for kind, page in pages.items() for budget in budgets_of(page)]
        yield ["gates", *(f"{kind} {budget}" for kind, budget in places)]
        yield ["full cache", *(share(row_of(pages[kind], "full", "1")) for kind, _ in places)]
        for method, words in gates.items():
            cells = (share(row_of(pages[kind], method, budget)) for kind, budget in places)
            yield [words, *cells]

    return rows


TABLES: dict[str, Callable[[Path], Rows]] = {
    "readme": _readme,
    "pictures": _accuracy("dialogues", _PICTURES, _WITH_OURS),
    "text-tasks": _accuracy("task", _TEXT_TASKS),
    "rules": _gates("quality-rules", _KINDS, _RULES),
    "trimkv-recipe": _gates(
        "quality-trimkv-recipe", {"dense": "dense", "sparse": "sparse"}, _RECIPES
    ),
    "bytes-data": _data,
    "bytes": _bytes,
    "bytes-less": _differences(
        _BYTES,
        [("int8", "bf16"), ("k8v4", "bf16"), ("int4", "bf16"), ("k8v4", "int8"), ("int4", "k8v4")],
        "bytes of",
    ),
    "entries": _differences(_ENTRIES, [(form, "bf16") for form in _FORMS[1:]], "entries", ["bf16"]),
    "256-distractors": _differences(
        (("256 distractors", "quality-tiny-vlm-256-distractors", _BUDGETS_OF_256),),
        [("dbtrimkv", "trimkv"), ("balanced", "dbtrimkv"), ("balanced", "trimkv")],
        "budget",
    ),
    "kv-perplexity": _perplexity,
}
