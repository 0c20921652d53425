"""Fill the tables of README.md, docs/ and benchmarks/notes/ from the result files.

A document marks the place of a table: ``<!-- table: NAME -->`` and ``<!-- end -->``.
``python -m benchmarks.document_tables`` writes what belongs between them; ``--check`` writes
nothing and fails when a table is not what the result files say.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.bench_peers_cpu import case_rows, loss_rows, target_rows
from benchmarks.quality.report import interval
from benchmarks.serving import tables as serving
from mmkv.training.measure.record import RESULTS, ROOT
from mmkv.training.measure.tables import pipe_table

Rows = Iterator[Sequence[str]]


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
    """Yield budgets of two kinds of dialogue, of recall on a language model, and with eyes."""
    shown = (
        ("dense pictures", "quality-tiny-vlm-dense", ("1/3", "1/8", "1/16")),
        ("sparse pictures", "quality-tiny-vlm-sparse", ("1/16", "1/32")),
        ("facts in text", "quality-smollm2-recall", ("1/4", "1/8", "1/16")),
    )
    yield ["questions about", "budget", "full", *(f"`{method}`" for method in METHODS)]
    for words, name, budgets in shown:
        page = page_of(results, name)
        for budget in budgets:
            cells = (share(row_of(page, method, budget)) for method in METHODS)
            yield [words, budget, share(row_of(page, "full", "1")), *cells]
    rows = results_of(results, "accuracy-llava")
    eyes = {row["run"]: f"{row['share']:.3f}" for row in rows if row["kind"] == "all"}
    cells = (eyes.get(f"{method} at 1/4", "-") for method in METHODS)
    yield ["newest picture", "1/4", eyes["pictures"], *cells]


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


_QUALITY: dict[str, Callable[[Path], Rows]] = {
    "readme": _readme,
    "pictures": _accuracy("dialogues", _PICTURES, _WITH_OURS),
    "text-tasks": _accuracy("task", _TEXT_TASKS),
    "rules": _gates("quality-rules", _KINDS, _RULES),
    "trimkv-recipe": _gates(
        "quality-trimkv-recipe", {"dense": "dense", "sparse": "sparse"}, _RECIPES
    ),
    "drawn": _differences(
        tuple(
            (name, f"quality-drawn-{name.replace(' ', '-')}", ("1/4", "1/8", "1/16", "1/32"))
            for name in ("dense", "sparse", "256 distractors")
        ),
        [("drawn", "bundled"), ("rank", "bundled"), ("both", "bundled")],
        "budget",
        ["bundled"],
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


_BLOCK = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Program and setting, result file, budgets shown.
_FOUND = (
    ("needles in pictures", "needle-tiny-vlm-pictures", ("16", "32", "64")),
    ("needles in video", "needle-tiny-vlm-video", ("16", "32")),
    ("needles in text", "needle-smollm2-text", ("128", "256")),
    ("sessions, pictures", "sessions-tiny-vlm-scenes", ("16", "32")),
    ("sessions, text", "sessions-smollm2-text", ("64",)),
    ("stream, latest clip", "stream-tiny-vlm", ("32", "64")),
)
_SCENES = {
    "cell": "what is at row r, column c",
    "colour": "colour",
    "read": "read the word or number",
    "list": "name every cell",
    "count": "how many objects",
    "exists": "is there a ... (chance 0.5)",
    "locate": "where is the ...",
    "all single-picture": "**all**",
}
_LLAVA = {
    "one thing": "what is this? (an emoji or a shape)",
    "colour": "what color is the shape?",
    "shape": "what shape is in the image?",
    "easy-VQA colour": "easy-VQA: colour",
    "easy-VQA shape": "easy-VQA: shape",
    "grid": "what is in the third cell? (of 2 x 2)",
    "all": "**all**",
}
_LLAVA_RUNS = ("pictures", "blank pictures", "other pictures", "most frequent answer")
_WEIGHTS = {
    "smollm2": "SmolLM2-135M",
    "tiny-vlm": "bundled model",
    "qwen3-vl-2b": "Qwen3-VL-2B's decoder, random",
}
_SPEEDS = {
    "tiny-vlm": "bundled model, batch 1, `full`",
    "tiny-vlm-evicting": "bundled model, batch 1, 512 tokens, `dbtrimkv` M = 64",
    "tiny-vlm-evicting-batch8": "bundled model, batch 8, 512 tokens, `dbtrimkv` M = 64",
    "smollm2": "SmolLM2-135M, batch 1, `full`",
    "smollm2-2k-evicting": "SmolLM2-135M, batch 1, 2,048 tokens, `dbtrimkv` M = 256",
    "smollm2-4k-batch8-evicting": "SmolLM2-135M, batch 8, 4,096 tokens, `dbtrimkv` M = 256",
}


def documents(root: Path = ROOT) -> list[Path]:
    """Return every document that may mark a table."""
    folders = (root / "docs", root / "benchmarks" / "notes")
    return [root / "README.md", *sorted(page for one in folders for page in one.rglob("*.md"))]


def fill(text: str, results: Path) -> str:
    """Return the document ``text`` with its tables made from the files in ``results``.

    Raises:
        KeyError: a marked table that is not in ``TABLES``.
        OSError, ValueError: a result file that cannot be read.
    """
    return _BLOCK.sub(lambda m: f"{m[1]}{_table(TABLES[m[2]](results))}{m[3]}", text)


def _table(rows: Rows) -> str:
    columns, *body = rows
    return pipe_table(columns, body) + "\n"


def _found(results: Path) -> Rows:
    """Yield shares of right answers of needles, sessions and the stream, by budget in entries."""
    yield ["task", "entries", "full", *(f"`{method}`" for method in METHODS)]
    for words, name, budgets in _FOUND:
        found = results_of(results, name)
        for budget in budgets:
            if name.startswith("stream"):
                rows = [found["rows"][f"{method} at {budget}"] for method in METHODS]
                cells = [f"{row['latest']['value']:.3f}" for row in [found["rows"]["full"], *rows]]
            else:
                page = found["all"] if "all" in found else found["page"]
                rows = [row_of(page, method, budget) for method in METHODS]
                cells = [share(row) for row in [row_of(page, "full", "1"), *rows]]
            yield [words, budget, *cells]


def _dialogues(results: Path) -> Rows:
    """Count right answers of the bundled model by kind of dialogue."""
    yield ["dialogues (100 each)", "tokens", "about", "right", "of", "share"]
    for row in results_of(results, "accuracy-dialogues"):
        if row["kind"] == "all":
            share = f"{row['share']:.3f} [{row['ci'][0]:.3f}, {row['ci'][1]:.3f}]"
            counts = (f"{row[key]:,}" for key in ("right", "of"))
            yield [row["dialogue"], f"{row['mean_tokens']:,.0f}", row["about"], *counts, share]


def _scenes(results: Path) -> Rows:
    """Count right answers of the bundled model about single pictures, by kind of question."""
    found = {row["kind"]: row for row in results_of(results, "accuracy-scenes")}
    yield ["kind", "right", "share", "95 % interval"]
    for kind, words in _SCENES.items():
        row = found[kind]
        low, high = row["ci"]
        share = f"{row['share']:.3f}"
        yield [words, f"{row['right']} / {row['of']}", share, f"{low:.3f} .. {high:.3f}"]


def _llava(results: Path) -> Rows:
    """Show what SmolLM2 with eyes answers with its pictures and without."""
    found = {(row["run"], row["kind"]): row for row in results_of(results, "accuracy-llava")}
    yield ["question", "of", "right", "share", "white pictures", "another talk's", "one answer"]
    for kind, words in _LLAVA.items():
        first, *others = (found[run, kind] for run in _LLAVA_RUNS)
        guesses = [f"{row['share']:.3f}" for row in others]
        yield [words, str(first["of"]), str(first["right"]), _share(first), *guesses]


def _llava_budgets(results: Path) -> Rows:
    """Show what it answers under budgets."""
    rows = [row for row in results_of(results, "accuracy-llava") if row["kind"] == "all"]
    found = {tuple(row["run"].split(" at ")): row for row in rows if " at " in row["run"]}
    budgets = list(dict.fromkeys(budget for _, budget in found))
    yield ["all questions", "full cache", *budgets]
    for policy in dict.fromkeys(policy for policy, _ in found):
        yield [f"`{policy}`", _share(rows[0]), *(_share(found[policy, b]) for b in budgets)]


def _policies(results: Path) -> Rows:
    """Show the decode step of every policy."""
    (case,) = results_of(results, "decode-policies-cpu-tiny-vlm")["cases"]
    names = ["policy", "ms", "/ full", "entries a row", "interval", "graph", "host reads"]
    yield [*names, "evicts on"]
    for name, each in case["policies"].items():
        low, high = each["ms_per_step"]["quartiles"]
        figures = f"{each['ms_per_step']['median']:.2f} ({low:.2f} .. {high:.2f})"
        facts = (each["interval"], each["graph"], each["host_reads_per_step"])
        entries = f"{each['entries_per_row']:.0f}"
        where = each["evicts_on"].partition(":")[0]
        yield [f"`{name}`", figures, f"{each['over_full']:.2f}", entries, *map(str, facts), where]


def _photos(results: Path) -> Rows:
    """Show what SmolLM2 with eyes for photographs says of some, and what a person sees."""
    yield ["photograph", "likeliest class", "probability", "a person", "named in", "first answer"]
    for row in results_of(results, "accuracy-photos")["photographs"]:
        judged = row["seen"] if row["thing"] else "no class for it"
        named = f"{sum(row['named'])} of {len(row['named'])}"
        facts = (row["class"], f"{row['probability']:.2f}", judged, named, row["answers"][0])
        yield [row["picture"].partition(".")[0], *facts]


def _photo_classes(results: Path) -> Rows:
    """Show how often it names a class that a picture is said to show."""
    rows = results_of(results, "accuracy-photos")["classes"]
    found = {(row["question"], row["told"]): row for row in rows}
    yield ["question", "classes", "named, sure", "named, a guess", "of these hedged"]
    for question in dict.fromkeys(row["question"] for row in rows):
        sure, guess = found[question, "sure"], found[question, "guess"]
        counts = (sure["of"], sure["named"], guess["named"], guess["hedged"])
        yield [question, *map(str, counts)]


def _share(row: Mapping[str, Any]) -> str:
    return f"{row['share']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"


def _mmdu(results: Path) -> Rows:
    yield ["policy, budget", "right", "share", "95 % interval"]
    for row in results_of(results, "mmdu-small"):
        name = f"`{row['policy']}`" + (f", {row['budget']}" if row["budget"] else "")
        low, high = row["ci"]
        yield [name, str(row["right"]), f"{row['share']:.3f}", f"{low:.3f} .. {high:.3f}"]


def _memory(results: Path) -> Rows:
    cases = {(c["policy"], c["prompt_tokens"]): c for c in results_of(results, "memory-cpu")}
    columns = "prompt tokens|KV, `dbtrimkv`|physical / logical|peak growth|KV, `full`|peak growth"
    yield columns.split("|")
    for tokens in (1024, 8192, 32768, 131072):
        ours, full = cases["dbtrimkv", tokens], cases["full", tokens]
        yield [
            f"{tokens:,}",
            f"{ours['kv_bytes'] / 2**20:.2f} MiB",
            f"{ours['physical_over_logical']:.3f}",
            f"{ours['peak_growth_bytes'] / 2**20:,.0f} MiB",
            f"{full['kv_bytes'] / 2**20:,.2f} MiB",
            f"{full['peak_growth_bytes'] / 2**20:,.0f} MiB",
        ]


def _speed(results: Path) -> Rows:
    def spread(value: Mapping[str, Any], digits: int) -> str:
        low, high = value["quartiles"]
        return f"{value['median']:,.{digits}f} ({low:,.{digits}f} .. {high:,.{digits}f})"

    peer = "transformers generate, full cache"
    yield ["tokens/s of all sequences", "mmkv", peer, "ratio", "eviction"]
    for name, words in _SPEEDS.items():
        found = results_of(results, f"decode-cpu-{name}")
        ours, theirs, share = found["mmkv"], found["transformers"], found.get("eviction_share")
        yield [
            words,
            spread(ours, 0 if ours["median"] > 500 else 1),
            spread(theirs, 0 if theirs["median"] > 100 else 1),
            spread(found["ratio"], 1),
            f"{100 * share['median']:.1f} % of a step" if share else "-",
        ]


def _generate(results: Path) -> Rows:
    """Yield a row per prompt length: transformers' ``generate`` under retain and without."""
    names = {"prompt": "prompt", "decode": "decode steps", "whole_call": "whole call"}
    yield ["prompt tokens", *(f"{words}, ratio" for words in names.values()), "call, tokens/s"]
    for length, parts in results_of(results, "generate-cpu-tiny-vlm")["prompts"].items():
        ratios = []
        for name in names:
            low, high = parts[name]["ratio"]["quartiles"]
            ratios.append(f"{parts[name]['ratio']['median']:.2f} ({low:.2f} .. {high:.2f})")
        speeds = [f"{parts['whole_call'][one]['median']:,.0f}" for one in ("mmkv", "transformers")]
        yield [length, *ratios, " against ".join(speeds)]


def _kv_speed(results: Path) -> Rows:
    """Yield the time of a decode step in every form of the cache."""
    rows = results_of(results, "decode-cpu-kv-smollm2")["rows"]
    yield ["entries per row", "form", "bytes per entry", "ms per step", "times as fast as `bf16`"]
    for row in rows:
        timed = []
        for value in (row["ms_per_step"], row["times_as_fast"]):
            low, high = value["quartiles"]
            timed.append(f"{value['median']:.2f} ({low:.2f} .. {high:.2f})")
        yield [f"{row['kept']:,}", f"`{row['kv']}`", str(row["entry_bytes"]), *timed]


def _weights(results: Path) -> Rows:
    """Yield what each form of weights costs and gains with SmolLM2 on code."""
    found = results_of(results, "weights-smollm2")
    first = next(name for name in found["sources"] if "code" in name)
    yield ["form", "weights", "layers off", "perplexity", "same of 64 tokens", "ms per token"]
    for form in ("auto", "int8", "int4"):
        row, read = found["forms"][form], found["sources"][first][form]
        yield [
            f"`{form}`",
            f"{row['bytes'] / 2**20:.0f} MiB",
            f"{100 * row['errors']['median']:.2f} %",
            f"{read['perplexity']:.2f}",
            f"{64 * read['greedy_same']:.1f}",
            f"{row['ms_per_token']['median']:.1f}",
        ]


def _all_weights(results: Path) -> Rows:
    """Yield the same of every model, form and kind of text."""
    yield [
        *("model", "form", "bytes", "layers off", "embedding off", "held out", "perplexity"),
        *("KL", "same", "before", "ms per token", "times int8's"),
    ]
    for name, model in _WEIGHTS.items():
        found = results_of(results, f"weights-{name}")
        for form, row in found["forms"].items():
            off = row.get("errors")
            cells = [model, form, f"{row['bytes'] / 2**20:,.1f} MiB"]
            cells += (
                ["-", "-"]
                if off is None
                else [
                    f"{100 * off['median']:.2f} % ({100 * off['most']:.2f} %)",
                    f"{100 * off['embedding']:.2f} %",
                ]
            )
            timed = []
            for value in (row["ms_per_token"], row["over_int8"]):
                low, high = value["quartiles"]
                timed.append(f"{value['median']:.2f} ({low:.2f} .. {high:.2f})")
            for source, read in (found["sources"] or {"-": None}).items():
                kind = source.rpartition("/")[2].removesuffix(".heldout.jsonl")
                measured = ["-"] * 4
                if read is not None:
                    values = read[form]
                    measured = [
                        f"{values['perplexity']:.3f}",
                        f"{values['kl_per_token']:.4f}",
                        f"{64 * values['greedy_same']:.1f}",
                        f"{values['greedy_before']:.1f}",
                    ]
                yield [*cells, kind, *measured, *timed]


def _peers(
    rows: Callable[[Mapping[str, Any]], Rows], name: str = "peers-cpu"
) -> Callable[[Path], Rows]:
    """Return a table of a comparison with other engines on a CPU."""
    return lambda results: rows(results_of(results, name))


def _startup(results: Path) -> Rows:
    yield ["seconds (times an import of torch)", "now", "before"]
    for name, found in results_of(results, "startup-cpu").items():
        yield [
            f"`{name}`" if name.startswith(("mmkv", "python")) else name,
            *(
                f"{at['best']:.2f} ({at['ratio']:.2f})" if at else ""
                for at in map(found.get, ("now", "before"))
            ),
        ]


# What was the default of these when the leaderboard was made.
_AT_EACH_STEP = {name: f"{name}:interval=1" for name in ("rkv", "gkv")}


def _leaderboard(
    name: str, named: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Path], Rows]:
    """Return all policies of a comparison, the most accurate at the first budget first.

    ``named``: methods whose names in the file say less than they would today.
    """

    def rows(results: Path) -> Rows:
        page = page_of(results, name)
        budgets = budgets_of(page)
        head = [f"{of} at {budget}" for budget in budgets for of in ("accuracy", "kB")]
        yield ["policy", *head, f"KL at {budgets[0]}", "tokens/s", "in eviction"]
        full = next(row for row in page["rows"] if row["method"] == "full")
        names = {row["method"] for row in page["rows"]} - {"full"}
        ranked = sorted(
            ([row_of(page, method, budget) for budget in budgets] for method in names),
            key=lambda found: (-found[0]["accuracy"]["value"], found[0]["method"]),
        )
        for found in [[full] * len(budgets), *ranked]:
            cells = [
                cell for row in found for cell in (with_interval(row), f"{row['bytes'] / 1e3:,.0f}")
            ]
            speed = found[0]["speed"]
            yield [
                f"`{named.get(found[0]['method'], found[0]['method'])}`",
                *cells,
                f"{found[0]['kl_per_token']['value']:.3f}",
                f"{speed['tokens_per_second']:,.0f}",
                f"{speed['eviction_share']:.0%}",
            ]

    return rows


def _pool(results: Path) -> Rows:
    """Yield one budget for 8 sessions beside equal shares."""
    from benchmarks.pool import table_rows

    return table_rows(results_of(results, "pool-tiny-vlm")["summary"])


def _replicas(results: Path) -> Rows:
    """Yield what became of sessions on two replicas of a server."""
    yield "what", "count"
    yield from ((name, str(count)) for name, count in results_of(results, "replicas").items())


def _mutants(results: Path) -> Rows:
    """Yield by room what bugs were made, and found before and after tests were added."""
    yield "room", "made", "equivalent", "harmless", "matter", "found before", "found now"
    for row in results_of(results, "mutants")["counts"]:
        matter = row["made"] - row["equivalent"] - row["harmless"]
        found = [f"{row[k]} ({row[k] / matter:.0%})" for k in ("found_first", "found")]
        counts = (row[k] for k in ("made", "equivalent", "harmless"))
        yield (row["room"], *map(str, counts), str(matter), *found)


def _endless(results: Path) -> Rows:
    """Yield the parts of a stream of a million tokens in one session."""
    yield "tokens seen", "clips", "latest clip", "first picture", "KV bytes, most", "compactions"
    for part in results_of(results, "endless-tiny-vlm")["parts"]:
        yield (
            f"{part['seen']:,}",
            f"{part['clips']:,}",
            interval(part["latest"]),
            interval(part["beginning"]),
            f"{part['most_bytes']:,}",
            str(part["compactions"]),
        )


def _endless_pairs(results: Path) -> Rows:
    """Yield the parts of a stream of which copies from within the context read the clips, too."""
    yield (
        "tokens seen",
        "pairs",
        "latest clip, less the copy's",
        "CPU time, the copy's as 1",
        "compactions",
    )
    for part in results_of(results, "endless-tiny-vlm-pairs")["parts"][1:]:
        pair = part["against_young"]
        yield (
            f"{part['seen']:,}",
            str(pair["clips"]),
            interval(pair["difference"]),
            f"{pair['time']:.3f}",
            str(part["compactions"]),
        )


def _streaming(results: Path) -> Rows:
    """Yield the ways of reading a stream: how often each is right, and what it costs."""
    found = results_of(results, "streaming-tiny-vlm")
    kinds = list(found["questions"])
    yield (
        "way",
        *kinds,
        "ms to first token",
        "tokens a question",
        "KV bytes",
        "ms a second, between",
    )
    for name, way in found["ways"].items():
        yield (
            name,
            *(interval(way["right"][kind]) for kind in kinds),
            f"{way['first_token_ms']:.1f}",
            f"{way['tokens_per_question']:.0f}",
            f"{way['mean_bytes']:,.0f}",
            f"{way['cpu_ms_between_per_second']:.1f}",
        )


TABLES: dict[str, Callable[[Path], Rows]] = {
    **_QUALITY,
    "found": _found,
    "pool": _pool,
    "endless": _endless,
    "endless-pairs": _endless_pairs,
    "streaming": _streaming,
    "replicas": _replicas,
    "scenes": _scenes,
    "llava": _llava,
    "llava-budgets": _llava_budgets,
    "photo-classes": _photo_classes,
    "photos": _photos,
    "policies": _policies,
    "dialogues": _dialogues,
    "mmdu": _mmdu,
    "memory": _memory,
    "speed": _speed,
    "weights": _weights,
    "weights-all": _all_weights,
    "kv-speed": _kv_speed,
    "generate": _generate,
    "peers": _peers(case_rows),
    "peers-targets": _peers(target_rows),
    **{
        f"peers-{shape}{part}": _peers(rows, f"peers-cpu-{shape}")
        for shape in ("smollm2", "qwen3-vl-2b", "qwen3-vl-2b-warm")
        for part, rows in (("", case_rows), ("-targets", target_rows), ("-losses", loss_rows))
    },
    "startup": _startup,
    "mutants": _mutants,
    "serving-speed": serving.speed,
    "serving-streams": serving.streams,
    "serving-overload": serving.overload,
    "serving-soak": serving.soak,
    "serving-floods": serving.floods,
    "serving-process": serving.process,
    "serving-long-dialogue": serving.long_dialogue,
    "serving-agent": serving.agent,
    "serving-agent-remember": serving.remembered,
    "compare-dense": _leaderboard("compare-tiny-vlm-dense", _AT_EACH_STEP),
    "compare-sparse": _leaderboard("compare-tiny-vlm-sparse", _AT_EACH_STEP),
    "compare-smollm2": _leaderboard("compare-smollm2-recall", _AT_EACH_STEP),
    "compare-rivals": _leaderboard("compare-rivals-dense"),
    "interval-dense": _leaderboard("compare-interval-dense"),
    "interval-sparse": _leaderboard("compare-interval-sparse"),
    "interval-recall": _leaderboard("compare-interval-recall"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill or check the tables of every document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.document_tables", description=__doc__
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if one is stale")
    args = parser.parse_args(arguments)
    for path in documents():
        text = path.read_text()
        try:
            made = fill(text, args.results)
        except (KeyError, ValueError, OSError) as error:
            cause = f"the tables of {path} cannot be made: {error!r}"
            raise SystemExit(f"benchmarks.document_tables: error: {cause}") from error
        if made == text:
            continue
        if args.check:
            raise SystemExit(f"{path} is stale; run python -m benchmarks.document_tables")
        path.write_text(made)
        print(path)


if __name__ == "__main__":
    main()
