"""The tables of ``python -m eval.bench_peers_cpu``, and whether its targets hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mmkv.eval.measure.timing import spread

MIB = 2**20
# What Python, torch and the code may take beside weights and entries.
PROGRAM_BYTES = 350 * MIB
# Bits of a weight with its share of a scale: a block of 32 has one of 16 bits.
BITS = {"bf16": 16, "f16": 16, "int8": 8.5, "q8_0": 8.5}
# Prompts are level while the median is within this of the other's.
LEVEL = 1.05


def allowed_bytes(found: Mapping[str, Any], method: str) -> int:
    """Return the most that a process may take: 1.3 x weights, entries, and the program's share.

    Entries are counted in 16 bits, as llama.cpp has them.
    """
    about = found["methods"][method]
    entries = about["memory"]["context"]
    if about["evicts"]:
        entries = min(entries, found["budget"])
    weights = found["sizes"]["parameters"] * BITS[about["weights"]] / 8
    kept = 2 * found["sizes"]["numbers_per_token"] * entries
    return round(1.3 * weights + kept) + PROGRAM_BYTES


def checks(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return every target whose two sides were measured: value, bound, whether it holds."""
    return list(_checks(found))


def _checks(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the targets; ratios are medians over rounds, in each of which both sides ran."""

    def ratio(what: str, case: str, over: str, under: str, wanted: float, least: bool) -> Any:
        methods = found["cases"].get(case, {}).get("methods", {})
        if over not in methods or under not in methods:
            return None
        rounds = (methods[name][f"{found['clock']}_ms"]["rounds"] for name in (over, under))
        value = spread([a / b for a, b in zip(*rounds, strict=True)])
        met = value["median"] >= wanted if least else value["median"] <= wanted
        return {
            "target": what,
            "value": value,
            "wanted": f"{'>=' if least else '<='} {wanted:g}",
        } | {"met": met}

    contexts = sorted(int(case.split()[1]) for case in found["cases"] if case.startswith("context"))
    batches = sorted(int(case.split()[1]) for case in found["cases"] if case.startswith("batch"))
    prompts = [case for case in found["cases"] if case.startswith("prompt")]
    pairs = (("mmkv bf16", "llama.cpp f16"), ("mmkv int8", "llama.cpp Q8_0"))
    made: list[Any] = []
    for ours, theirs in pairs if contexts else ():
        case = f"context {contexts[0]}"
        what = f"ms per token at {contexts[0]} tokens, {ours} / {theirs}"
        made.append(ratio(what, case, ours, theirs, 1, False))
    for ours in ("mmkv int8, budget", "mmkv bf16, budget") if contexts else ():
        what = f"llama.cpp Q8_0 / {ours}, ms per token at {contexts[-1]:,} tokens"
        made.append(ratio(what, f"context {contexts[-1]}", "llama.cpp Q8_0", ours, 3, True))
    for case in prompts:
        for ours, theirs in pairs:
            what = f"ms of a {case} tokens, {ours} / {theirs}"
            made.append(ratio(what, case, ours, theirs, LEVEL, False))
    for ours in ("mmkv bf16", "mmkv int8") if batches else ():
        what = f"tokens/s in a batch of {batches[-1]}, {ours} / mmkv before"
        made.append(ratio(what, f"batch {batches[-1]}", "mmkv before", ours, 2, True))
    yield from filter(None, made)
    for name, about in found["methods"].items():
        ours = name.startswith("mmkv") and name != "mmkv before"
        if ours and about.get("memory", {}).get("peak_rss"):
            value = about["memory"]["peak_rss"] / allowed_bytes(found, name)
            yield {
                "target": f"peak size of the process / allowed, {name}",
                "value": spread([value]),
                "wanted": "<= 1",
                "met": value <= 1,
            }


def case_rows(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row per method: times, tokens/s, and the size of its process."""
    cases = found["cases"]
    yield ["method", *map(_heading, cases), "peak RSS", "PSS", "allowed"]
    for name, about in found["methods"].items():
        cells = []
        for case, measured in cases.items():
            times = measured["methods"].get(name)
            if times is None:
                cells.append("-")
                continue
            times = times[f"{found['clock']}_ms"]
            write: Callable[[float], str] = _plain
            if case.startswith("batch"):
                batch = int(case.split()[1])
                times = spread([1e3 * batch / ms for ms in times["rounds"]])
                write = _whole
            low, high = times["quartiles"]
            cells.append(f"{write(times['median'])} ({write(low)} .. {write(high)})")
        memory = about.get("memory", {})
        sizes = [_mib(memory.get(key)) for key in ("peak_rss", "pss")]
        allowed = _mib(allowed_bytes(found, name)) if memory else "-"
        yield [label(name, found), *cells, *sizes, allowed]


def target_rows(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield a row per target."""
    yield ["target", "measured", "wanted", "holds"]
    for row in found["targets"]:
        low, high = row["value"]["quartiles"]
        measured = f"{row['value']['median']:.2f}"
        if low != high:
            measured += f" ({low:.2f} .. {high:.2f})"
        holds = "yes" if row["met"] else "no"
        yield [
            row["target"].replace("budget", f"M = {found['budget']}"),
            measured,
            row["wanted"],
            holds,
        ]


def label(name: str, found: Mapping[str, Any]) -> str:
    """Return a method's name with the budget it ran in."""
    return name.replace("budget", f"M = {found['budget']}")


def _heading(case: str) -> str:
    kind, _, count = case.partition(" ")
    number = f"{int(count):,}"
    return {
        "prompt": f"prompt of {number}, ms",
        "context": f"at {number}, ms/token",
        "batch": f"batch {number}, tokens/s",
    }[kind]


def _plain(value: float) -> str:
    return f"{value:.1f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _mib(value: int | None) -> str:
    return "-" if value is None else f"{value / MIB:,.0f} MiB"
