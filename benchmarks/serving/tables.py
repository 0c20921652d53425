"""What the documents show of the server's result files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SPEED = "serving-speed-cpu"
_TIMES = (("first_token_s", 1e3), ("inter_token_s", 1e3))


def _results(results: Path, name: str) -> Any:
    return json.loads((results / f"{name}.json").read_text())["results"]


def speed(results: Path) -> Iterator[Sequence[str]]:
    """Yield tokens/s and times of each server, by kind and number of dialogues."""
    yield [
        "dialogues",
        "server",
        "tokens/s",
        "per CPU second",
        "first token, ms: p50, p99",
        "next token, ms: p50, p99",
        "mmkv / it: by the clock, by CPU",
    ]
    for kind, counts in _results(results, SPEED).items():
        for count, servers in counts.items():
            for name, one in servers.items():
                times = (
                    ", ".join(f"{scale * one[key][q]:,.0f}" for q in ("p50", "p99"))
                    for key, scale in _TIMES
                )
                ratio = f"{one['ours_over_it']:.1f}, {one['ours_over_it_cpu']:.1f}"
                yield [
                    f"{count}, {kind}",
                    f"`{name}`" if "," not in name else name,
                    f"{one['tokens_per_second']['median']:,.0f}",
                    f"{one['tokens_per_cpu_second']:,.0f}",
                    *times,
                    "" if name == "mmkv serve" else ratio,
                ]


def streams(results: Path) -> Iterator[Sequence[str]]:
    """Yield the times between tokens, by number of streams and kind of server."""
    yield [
        "streams, each with a prompt that waits",
        "next token, ms: p50, p99",
        "first token, s: p50, p99",
        "whole reply, s: p50",
        "tokens per CPU second",
        "memory at most, MiB",
    ]
    for count, kinds in _results(results, "serving-streams-cpu").items():
        for kind, one in kinds.items():
            gap, first = one["inter_token_s"], one["first_token_s"]
            yield [
                f"{count}, {kind}",
                f"{1e3 * gap['p50']:,.0f}, {1e3 * gap['p99']:,.0f}",
                f"{first['p50']:.1f}, {first['p99']:.1f}",
                f"{one['whole_reply_s']['p50']:.1f}",
                f"{one['tokens_per_cpu_second']:.1f}",
                f"{one['peak_rss_mib']:,.0f}",
            ]


def overload(results: Path) -> Iterator[Sequence[str]]:
    """Yield what became of requests that came at shares of the capacity."""
    yield [
        "of capacity",
        "requests",
        "refused (503)",
        "first token, ms: p50, p99",
        "p99 / at 0.8",
        "refusal, ms: p50, p99",
    ]
    for share, one in _results(results, "serving-overload")["shares"].items():
        times = [
            ", ".join(f"{1e3 * one[key][q]:,.0f}" for q in ("p50", "p99")) if one[key] else "-"
            for key in ("first_token_s", "refused_s")
        ]
        counts = f"{one['requests']:,}", f"{one['refused']:,}"
        yield [share, *counts, times[0], f"{one['p99_over_below_capacity']:.2f}", times[1]]


def soak(results: Path) -> Iterator[Sequence[str]]:
    """Yield what 10,000 requests of misbehaving clients came to."""
    found = _results(results, "serving-soak")["summary"]
    yield ["", ""]
    for words, key in (
        ("requests, of which clients left", "left_by_the_client"),
        ("pages lost", "pages_lost"),
        ("resident memory per request after the first 1,000", "rss_bytes_per_request"),
        ("server errors other than 503; tracebacks", "server_errors"),
        ("SIGKILL while four sessions were saved: times; saves answered", "kills"),
        ("session files read afterwards; unreadable or missing", "files_read"),
    ):
        shown = {
            "left_by_the_client": f"{found['requests']:,}, {found['left_by_the_client']:,}",
            "pages_lost": f"{found['pages_lost']:.0f}",
            "rss_bytes_per_request": f"{found['rss_bytes_per_request'] or 0:.0f} bytes",
            "server_errors": f"{found['server_errors']}; {found['tracebacks']}",
            "kills": f"{found['kills']}; {found['saves_answered']:,}",
            "files_read": f"{found['files_read']:,}; {found['files_unreadable']}",
        }
        yield [words, shown[key]]


def floods(results: Path) -> Iterator[Sequence[str]]:
    """Yield what a server took before its bounds, and with them."""
    pages = [_results(results, f"serving-floods{end}") for end in ("-before", "")]
    yield ["", "without", "with the bounds"]

    def mib(phase: str, key: str) -> list[str]:
        return [f"{page[phase][key] / 2**20:,.1f}" for page in pages]

    now = pages[-1]
    heads, idle, body = (now[name] for name in ("heads", "idle", "values"))
    shared = f"{now['queued']['body'] / 2**20:.0f} MiB"
    many = f"{pages[0]['heads']['heads']} and {heads['heads']:,}"
    yield [f"{many} heads of 1 MiB: memory, MiB", *mib("heads", "rss")]
    silent = f"{idle['connections']} silent connections, {idle['descriptors']} descriptors"
    yield [
        f"{silent}: longest time without an answer, s",
        *(f"{page['idle']['locked_out_s']:.1f}" for page in pages),
    ]
    yield [
        "... the log, bytes a minute",
        *(f"{page['idle']['log_bytes_a_minute']:,.0f}" for page in pages),
    ]
    yield [f"{body['body'] / 2**20:.0f} MiB of empty lists: memory, MiB", *mib("values", "rss")]
    yield [
        "... another stream stands, s",
        *(f"{page['values']['stall_s']:.1f}" for page in pages),
    ]
    yield [
        f"{now['queued']['pictures']} chats of {shared} wait: memory, MiB",
        *mib("queued", "rss"),
    ]
    yield [
        f"{now['unread']['streams']} scored streams that nobody reads: memory, MiB",
        *mib("unread", "rss"),
    ]
    yield [
        "the folder of idle memories is gone: chats refused",
        *(
            f"{page['vanished']['chats'].get('503', 0)} of "
            f"{sum(page['vanished']['chats'].values())}"
            for page in pages
        ),
    ]


def process(results: Path) -> Iterator[Sequence[str]]:
    """Yield what the server's process took in each phase, and what it had stated."""
    found = _results(results, "serving-floods")
    yield [
        "phase",
        "grew by, MiB",
        "its parts may take",
        "the process at most, MiB",
        "stated",
        "stays when clients have left, MiB",
    ]
    for name, page in found.items():
        if not isinstance(page, Mapping):
            continue
        sizes = (page[key] / 2**20 for key in ("rss", "stated_parts", "most", "stated"))
        after = f"{page['rss_after'] / 2**20:,.0f}" if "rss_after" in page else ""
        yield [f"`{name}`", *(f"{size:,.0f}" for size in sizes), after]


def long_dialogue(results: Path) -> Iterator[Sequence[str]]:
    """Yield what the turns of dialogues of 50 pictures read, and their times."""
    found = _results(results, "serving-long-dialogue")
    ways = {way: one for way, one in found.items() if isinstance(one, Mapping)}
    yield ["", *ways]
    any_way = next(iter(ways.values()))
    for key in any_way:
        if key == "first_token_s":
            continue
        scale, digits = (1e3, 0) if "_s_" in key else (1, 2 if key == "late_over_early" else 0)
        words = key.replace("_s_", ", ms, ").replace("_", " ")
        yield [words, *(f"{scale * one[key]:,.{digits}f}" for one in ways.values())]


AGENT = "serving-agent"


def _agents(results: Path) -> dict[str, Any]:
    """Return what was found of each server, the latest run of each: ours, then others."""
    found: dict[str, Any] = {}
    for end in ("-full", "", "-peers", "-llama"):
        found |= _results(results, f"{AGENT}{end}")
    return found


def agent(results: Path) -> Iterator[Sequence[str]]:
    """Yield what steps of an agent took on each server."""
    found = _agents(results)
    steps = list(next(iter(found.values()))["at"])
    yield [
        "server",
        "step",
        "tokens so far",
        "read",
        "first token: CPU s",
        "... s",
        "cache, MiB",
        "process, MiB",
    ]
    for name, one in found.items():
        for step in steps:
            at = one["at"].get(step)
            if not at:
                continue
            cache = "" if at["kv_bytes"] is None else f"{at['kv_bytes'] / 2**20:,.1f}"
            yield [
                f"`{name}`" if "," not in name else name,
                step,
                f"{at['prompt']:,.0f}",
                f"{at['read']:,.0f}",
                f"{at['cpu']:,.2f}",
                f"{at['first']:,.2f}",
                cache,
                f"{at['rss'] / 2**20:,.0f}",
            ]


def remembered(results: Path) -> Iterator[Sequence[str]]:
    """Yield the answers about screens of some steps ago, by policy and budget."""
    found = _results(results, f"{AGENT}-remember")
    ages = found["ages"]
    yield ["policy", "cache, KiB", *(f"{age} steps ago" if age != "0" else "now" for age in ages)]
    for name, size in found["bytes"].items():
        cells = (one["right"][name] for one in ages.values())
        shown = (f"{c['value']:.3f} [{c['low']:.3f}, {c['high']:.3f}]" for c in cells)
        yield [f"`{name.partition(' at ')[0]}`", f"{size / 1024:,.0f}", *shown]


def agent_values(results: Path) -> dict[str, Any]:
    """Return what the figure of the agent draws: steps, CPU seconds and MiB by server.

    A step that was read with others before it, for which no reply was asked, is left out.
    """
    drawn = {}
    for name, one in _agents(results).items():
        rows = one["rows"]
        before = dict(zip(rows["step"], [0, *rows["step"]], strict=False))
        whole = dict(zip(rows["step"], zip(rows["read"], rows["prompt"], strict=True), strict=True))
        own = [n == before[n] + 1 or whole[n][0] == whole[n][1] for n in rows["step"]]
        drawn[name] = [
            [value for value, kept in zip(rows[key], own, strict=True) if kept]
            for key in ("step", "cpu", "rss")
        ]
    return drawn


def draw_agent(values: Mapping[str, Any]) -> Any:
    """Return a figure: CPU seconds to the first token and memory by step of an agent."""
    from matplotlib.figure import Figure

    colours = ("#0b6e4f", "#7fb69e", "#3d7ea6", "#d1495b", "#8d99ae")
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    times, sizes = figure.subplots(1, 2)
    for (name, (steps, seconds, size)), colour in zip(values.items(), colours, strict=False):
        mark = "o-" if len(steps) < 40 else "-"
        times.plot(steps, seconds, mark, color=colour, label=name, markersize=3, linewidth=1)
        sizes.plot(
            steps, [one / 2**20 for one in size], mark, color=colour, markersize=3, linewidth=1
        )
    times.set(title="CPU seconds to the first token", yscale="log")
    sizes.set(title="memory of the process, MiB", yscale="log")
    for panel in (times, sizes):
        panel.set_xlabel("step, a picture each", fontsize=8)
        panel.title.set_fontsize(9)
        panel.grid(alpha=0.25)
    figure.legend(
        *times.get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=7
    )
    return figure


def speed_values(results: Path) -> dict[str, Any]:
    """Return what the figure draws: tokens/s by kind, server and dialogues at a time."""
    drawn: dict[str, Any] = {}
    for kind, counts in _results(results, SPEED).items():
        for count, servers in counts.items():
            for name, one in servers.items():
                row = [
                    int(count),
                    one["tokens_per_second"]["median"],
                    one["first_token_s"]["p50"],
                    one["first_token_s"]["p99"],
                ]
                drawn.setdefault(kind, {}).setdefault(name, []).append(row)
    return drawn


def draw_speed(values: Mapping[str, Any]) -> Any:
    """Return a figure: tokens/s and times to the first token against dialogues at a time."""
    from matplotlib.figure import Figure

    colours = dict(zip(("mmkv serve", "transformers serve"), ("#0b6e4f", "#d1495b"), strict=True))
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    panels = figure.subplots(1, 2 * len(values))
    for at, (kind, servers) in enumerate(values.items()):
        for name, rows in servers.items():
            colour = colours.get(name, "#8d99ae")
            counts = [row[0] for row in rows]
            panels[2 * at].plot(counts, [row[1] for row in rows], "o-", color=colour, label=name)
            first = panels[2 * at + 1]
            first.plot(counts, [row[2] for row in rows], "o-", color=colour)
            first.plot(counts, [row[3] for row in rows], "o:", color=colour, markersize=3)
        panels[2 * at].set(title=f"{kind}: tokens/s", ylim=(0, None))
        panels[2 * at + 1].set(title=f"{kind}: first token, s (p50, p99)", yscale="log")
    for panel in panels:
        panel.set_xticks(sorted({int(x) for line in panel.lines for x in line.get_xdata()}))
        panel.set_xlabel("dialogues at a time", fontsize=8)
        panel.title.set_fontsize(9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    return figure
