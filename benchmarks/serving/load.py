"""Put a load on ``mmkv serve``, and count tokens, times and refusals: one program, three loads.

``python -m benchmarks.serving.load speed`` has dialogues of 10 turns with ``mmkv serve`` and with
``transformers serve`` of the same checkpoint, some at a time, in turns. Every reply has the same
number of tokens: the checkpoint's end token is one that is never drawn. Texts are read by the
bundled model's text half, once with and once without transformers' continuous batching. Pictures
are read by a LLaVA of the bundled model's sizes with random weights, which bfloat16 holds as it
does those of published models (both servers compute in float32): to load the bundled model itself
transformers needs torchvision, which has no build for a CPU here.

``streams MODEL --gates GATES`` has 1, 8 and 32 dialogues at a time, whose next question follows
each reply at once, so that prompts wait all the while. A server of its own answers for each line:
under a budget, with the time between tokens that it aims at (``--gap``) and with passes over
prompts that are read whole; and with the full cache. Each gets the memory that so many streams
need with the full cache, so that all are admitted: those count with the whole context, which is
cut to ``--context`` for that. ``mmkv pull smollm2-135m`` gets a model for it,
``assets/gates/smollm2-135m`` has its gates.

``overload`` sends more requests than the server can answer, whether or not it answers. It first
finds out how many a second are answered when as many wait as the server takes at a time. Then
requests arrive at random (Poisson) at shares of that rate, each with a picture that is new. Those
that are admitted have to get their first token about as soon as below capacity; the others have to
be refused at once, with 503 and before their picture is decoded. What the client is late with
itself counts, too, so it stands beside the times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.bench.shape_files import write_endless_text_model, write_llava
from benchmarks.serving.servers import (
    ServerProcess,
    Streamed,
    mmkv_serve,
    picture_url,
    quantiles,
    question,
    run_in_folder,
    stream_chat,
    transformers_serve,
    words,
)

_CLIENT: dict[str, Any] = {
    "timeout": 3600,
    "trust_env": False,
    "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
}
Rows = list[list[str]]


def _ms(times: Mapping[str, float] | None, scale: float = 1e3, form: str = ",.0f") -> str:
    """Return p50 and p99 in milliseconds."""
    return ", ".join(format(scale * times[q], form) for q in ("p50", "p99")) if times else "-"


# Dialogues, some at a time.


@dataclass
class Burst:
    """What came of some dialogues side by side; ``cpu``: processor seconds of the server."""

    seconds: float
    cpu: float
    replies: list[Streamed] = field(repr=False)

    @property
    def tokens(self) -> int:
        """Count the tokens of all replies."""
        return sum(reply.counts()[1] for reply in self.replies)


def summary(bursts: Sequence[Burst]) -> dict[str, Any]:
    """Return times to the first token and between two over all replies."""
    replies = [reply for one in bursts for reply in one.replies]
    return {
        "replies": len(replies),
        "first_token_s": quantiles([one.first for one in replies if one.first is not None]),
        "inter_token_s": quantiles([gap for one in replies for gap in one.gaps]),
        "whole_reply_s": quantiles([one.whole for one in replies]),
    }


async def dialogue(
    client: httpx.AsyncClient,
    model: str,
    seed: int,
    turns: int,
    count: int,
    tokens: int,
    pictures: bool = False,
) -> list[Streamed]:
    """Have a dialogue: each turn asks ``count`` words and sends all that was said before."""
    rng, messages, replies = Random(seed), [], []
    for turn in range(turns):
        picture = picture_url(1000 * seed + turn) if pictures else None
        messages.append(question(words(rng, count), picture))
        body: dict[str, Any] = {"model": model, "messages": messages}
        body |= {"temperature": 0, "max_tokens": tokens}
        if not Path(model).is_absolute():  # transformers refuses it
            body["stream_options"] = {"include_usage": True}
        reply = await stream_chat(client, body)
        if reply.status != 200 or reply.error is not None:
            raise BenchError(f"{model} answered {reply.status}: {reply.error}")
        replies.append(reply)
        messages.append({"role": "assistant", "content": reply.text})
    return replies


def burst(
    server: ServerProcess, model: str, seeds: Iterable[int], *given: Any, **more: Any
) -> Burst:
    """Have a dialogue per seed, all at a time; for the rest see :func:`dialogue`."""

    async def run() -> list[list[Streamed]]:
        async with httpx.AsyncClient(base_url=server.url, **_CLIENT) as client:
            talks = (dialogue(client, model, seed, *given, **more) for seed in seeds)
            return await asyncio.gather(*talks)

    cpu, started = server.cpu_seconds(), time.perf_counter()
    found = asyncio.run(run())
    seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
    return Burst(seconds, cpu, [reply for each in found for reply in each])


# Beside transformers.

OURS, THEIRS, BATCHED = "mmkv serve", "transformers serve", "transformers serve, batching"
_QUESTION = 24  # words


def measure_speed(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time all servers on both kinds of dialogues, in turns."""
    found: dict[str, Any] = {}
    for kind in args.kinds:
        pictures = kind == "pictures"
        write = write_llava if pictures else write_endless_text_model
        model = str(write(folder / kind))
        options = ["--budget", str(args.budget), "--memory", "128MiB", "--policy", "streamingllm"]
        names = {OURS: Path(model).name, THEIRS: model}
        with ExitStack() as stack:
            start = stack.enter_context
            servers = {
                OURS: start(mmkv_serve(model, folder / f"{kind}-mmkv.log", *options)),
                THEIRS: start(transformers_serve(model, folder / f"{kind}-transformers.log")),
            }
            if not pictures:
                log, names[BATCHED] = folder / f"{kind}-batching.log", model
                batching = transformers_serve(model, log, "--continuous-batching")
                servers[BATCHED] = start(batching)
            found[kind] = _beside(args, servers, names, pictures)
        keep(args, found)
    return found


def _beside(
    args: argparse.Namespace,
    servers: dict[str, ServerProcess],
    names: dict[str, str],
    pictures: bool,
) -> dict[str, Any]:
    def run(name: str, seeds: range, turns: int) -> Burst:
        given = names[name], seeds, turns, _QUESTION, args.tokens, pictures
        made = burst(servers[name], *given)
        for reply in made.replies:
            reply.usage = reply.usage or {"prompt_tokens": 0, "completion_tokens": args.tokens}
            if reply.counts()[1] != args.tokens or reply.finish_reason not in ("length", None):
                ended = f"{reply.counts()[1]} tokens, {reply.finish_reason}: {reply.text[:80]!r}"
                raise BenchError(f"a reply of {name} is not {args.tokens} tokens long ({ended})")
        return made

    found: dict[str, Any] = {}
    seed = 0
    for name in servers:  # nothing is timed before its first reply
        run(name, range(10**6, 10**6 + 1), 1)
    for count in args.dialogues:
        bursts: dict[str, list[Burst]] = {name: [] for name in servers}
        for _ in range(args.rounds):
            seeds, seed = range(seed, seed + count), seed + count
            for name in servers:
                bursts[name].append(made := run(name, seeds, args.turns))
                print(f"{count} x {name}: {made.tokens / made.seconds:.1f} tokens/s", flush=True)
        page = {name: summary(each) for name, each in bursts.items()}
        for name, each in bursts.items():
            rounds = [one.tokens / one.seconds for one in each]
            del page[name]["whole_reply_s"]
            page[name] |= {
                "tokens_per_second": {"median": statistics.median(rounds), "rounds": rounds},
                "tokens_per_cpu_second": statistics.median(one.tokens / one.cpu for one in each),
                "ours_over_it": statistics.median(
                    theirs.seconds / ours.seconds
                    for ours, theirs in zip(bursts[OURS], each, strict=True)
                ),
            }
            cpu = page[OURS]["tokens_per_cpu_second"] / page[name]["tokens_per_cpu_second"]
            page[name]["ours_over_it_cpu"] = cpu
        found[str(count)] = page
    return found


def speed_rows(found: Mapping[str, Any]) -> Rows:
    """Return tokens/s and times of each server, by kind and number of dialogues."""
    rows = [["dialogues", "server", "tokens/s", "per CPU second", "first token, ms: p50, p99"]]
    rows[0] += ["next token, ms: p50, p99", "mmkv / it: by the clock, by CPU"]
    for kind, counts in found.items():
        for count, servers in counts.items():
            for name, one in servers.items():
                ratio = f"{one['ours_over_it']:.1f}, {one['ours_over_it_cpu']:.1f}"
                rows.append(
                    [
                        f"{count}, {kind}",
                        f"`{name}`" if "," not in name else name,
                        f"{one['tokens_per_second']['median']:,.0f}",
                        f"{one['tokens_per_cpu_second']:,.0f}",
                        _ms(one["first_token_s"]),
                        _ms(one["inter_token_s"]),
                        "" if name == OURS else ratio,
                    ]
                )
    return rows


def speed_values(results: Path) -> dict[str, Any]:
    """Return what the figure draws: tokens/s by kind, server and dialogues at a time."""
    drawn: dict[str, Any] = {}
    page = json.loads((results / f"{LOADS['speed'].result}.json").read_text())["results"]
    for kind, counts in page.items():
        for count, servers in counts.items():
            for name, one in servers.items():
                first = one["first_token_s"]
                row = [int(count), one["tokens_per_second"]["median"], first["p50"], first["p99"]]
                drawn.setdefault(kind, {}).setdefault(name, []).append(row)
    return drawn


def draw_speed(values: Mapping[str, Any]) -> Any:
    """Return a figure: tokens/s and times to the first token against dialogues at a time."""
    from matplotlib.figure import Figure

    colours = {OURS: "#0b6e4f", THEIRS: "#d1495b"}
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    panels = figure.subplots(1, 2 * len(values))
    for at, (kind, servers) in enumerate(values.items()):
        for name, rows in servers.items():
            colour = colours.get(name, "#8d99ae")
            counts, speeds, middle, late = zip(*rows, strict=True)
            panels[2 * at].plot(counts, speeds, "o-", color=colour, label=name)
            panels[2 * at + 1].plot(counts, middle, "o-", color=colour)
            panels[2 * at + 1].plot(counts, late, "o:", color=colour, markersize=3)
        panels[2 * at].set(title=f"{kind}: tokens/s", ylim=(0, None))
        panels[2 * at + 1].set(title=f"{kind}: first token, s (p50, p99)", yscale="log")
    for panel in panels:
        panel.set_xticks(sorted({int(x) for line in panel.lines for x in line.get_xdata()}))
        panel.set_xlabel("dialogues at a time", fontsize=8)
        panel.title.set_fontsize(9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=8)
    return figure


# Streams whose prompts wait.

BUDGET, WHOLE, FULL = "budget", "budget, passes whole", "full cache"
_EVERY = 0.02  # seconds between two looks at the memory


def with_context(model: Path, context: int, folder: Path) -> Path:
    """Make a folder of the same checkpoint with so many positions, under the same name."""
    made = folder / model.name
    made.mkdir()
    for path in model.iterdir():
        (made / path.name).symlink_to(path.resolve())
    config = json.loads((model / "config.json").read_text())
    (made / "config.json").unlink()
    config.get("text_config", config)["max_position_embeddings"] = context
    (made / "config.json").write_text(json.dumps(config))
    return made


def waiting(server: ServerProcess, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Have so many dialogues at a time; what they came to."""
    given = args.turns, args.words, args.tokens
    name = Path(args.model).resolve().name
    burst(server, name, [10**6], *given)  # what is imported late
    peak, over = [server.rss()], threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY):
            peak[0] = max(peak[0], server.rss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        made = burst(server, name, range(streams), *given)
    finally:
        over.set()
        watcher.join()
    return summary([made]) | {
        "tokens": made.tokens,
        "prompt_tokens": sum(reply.counts()[0] for reply in made.replies),
        "seconds": made.seconds,
        "cpu_seconds": made.cpu,
        "tokens_per_second": made.tokens / made.seconds,
        "tokens_per_cpu_second": made.tokens / made.cpu,
        "peak_rss_mib": peak[0] / 2**20,
    }


def measure_streams(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every server with every number of streams."""
    gates = [] if args.gates is None else ["--gates", str(Path(args.gates).resolve())]
    budget = [*gates, "--budget", str(args.budget)]
    kinds = {
        BUDGET: [*budget, "--gap", str(args.gap)],
        WHOLE: [*budget, "--gap", "3600"],
        FULL: ["--policy", "full", "--gap", str(args.gap)],
    }
    found: dict[str, Any] = {}
    if args.model is None:
        raise BenchError("streams wants the folder of a text model")
    model = str(with_context(Path(args.model).resolve(), args.context, folder))
    for streams in args.streams:
        memory = ["--memory", f"{streams * args.memory_each}MiB"]
        places = ["--max-running", str(streams), *memory]
        for kind in args.kinds:
            log = folder / f"{streams}-{list(kinds).index(kind)}.log"
            with mmkv_serve(model, log, *kinds[kind], *places) as server:
                found.setdefault(str(streams), {})[kind] = waiting(server, args, streams)
            keep(args, found)
            print(f"{streams} streams, {kind}: done", flush=True)
    return found


def streams_rows(found: Mapping[str, Any]) -> Rows:
    """Return the times between tokens, by number of streams and kind of server."""
    rows = [["streams, each with a prompt that waits", "next token, ms: p50, p99"]]
    rows[0] += ["first token, s: p50, p99", "whole reply, s: p50", "tokens per CPU second"]
    rows[0] += ["memory at most, MiB"]
    for count, kinds in found.items():
        for kind, one in kinds.items():
            first = _ms(one["first_token_s"], 1, ".1f")
            whole, speed = one["whole_reply_s"]["p50"], one["tokens_per_cpu_second"]
            row = [f"{count}, {kind}", _ms(one["inter_token_s"]), first, f"{whole:.1f}"]
            rows.append([*row, f"{speed:.1f}", f"{one['peak_rss_mib']:,.0f}"])
    return rows


# More requests than can be answered.

BELOW = 0.8  # the share of capacity that the others are compared with


def bodies(seed: int, count: int, tokens: int) -> list[dict[str, Any]]:
    """Draw requests, each about a picture of its own."""
    rng = Random(seed)
    return [
        {
            "model": "tiny-vlm",
            "messages": [question(words(rng, 24), picture_url(rng.randrange(2**32)))],
            "temperature": 0,
            "max_tokens": tokens,
            "mmkv": {"resume": "never"},
            "user": f"{seed}-{at}",  # a user's prompts are read one after the other
        }
        for at in range(count)
    ]


async def capacity(url: str, at_a_time: int, count: int, tokens: int) -> float:
    """Return how many requests a second are answered when the server has always enough of them."""
    left = bodies(1, count, tokens)

    async def work(client: httpx.AsyncClient) -> None:
        while left:
            body = left.pop()
            while (reply := await stream_chat(client, body)).status == 503:
                await asyncio.sleep(0.01)
            if reply.status != 200:
                raise BenchError(f"the server answered {reply.status}: {reply.error}")

    async with httpx.AsyncClient(base_url=url, **_CLIENT) as client:
        started = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(at_a_time)))
        return count / (time.perf_counter() - started)


@dataclass
class Arrived:
    """What came of the requests of one rate, and of who sent and who answered them.

    Attributes:
        late: seconds between the moment that was drawn for a request and that at which it was sent.
        seconds: until all were answered; client_cpu, server_cpu: processor seconds of both.
        own_first: sum of the times to a first token as the server counts them (from when a request
            was parsed); own_count: of how many.
    """

    replies: list[Streamed] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    seconds: float = 0.0
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    own_first: float = 0.0
    own_count: float = 0.0

    async def arrive(
        self, server: ServerProcess, rate: float, count: int, tokens: int, seed: int
    ) -> None:
        """Send ``count`` requests at random moments, ``rate`` a second on average."""
        rng, given = Random(seed), bodies(seed, count, tokens)
        async with httpx.AsyncClient(base_url=server.url, **_CLIENT) as client:
            own = await _own_first(client)
            cpu, server_cpu = time.process_time(), server.cpu_seconds()
            started = at = time.perf_counter()
            tasks = []
            for body in given:
                at += rng.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.perf_counter()))
                self.late.append(time.perf_counter() - at)
                tasks.append(asyncio.create_task(stream_chat(client, body)))
            self.replies += await asyncio.gather(*tasks)
            self.seconds += time.perf_counter() - started
            self.client_cpu += time.process_time() - cpu
            self.server_cpu += server.cpu_seconds() - server_cpu
            now = await _own_first(client)
            self.own_first += now[0] - own[0]
            self.own_count += now[1] - own[1]

    def summary(self) -> dict[str, Any]:
        """Return the figures. Raises BenchError for an answer that is neither 200 nor 503."""
        statuses = Counter(reply.status for reply in self.replies)
        if set(statuses) - {200, 503}:
            raise BenchError(f"the server answered {dict(statuses)}")
        refused = [reply for reply in self.replies if reply.status == 503]
        admitted = [reply for reply in self.replies if reply.status == 200]
        return {
            "requests": len(self.replies),
            "refused": len(refused),
            "codes": dict(Counter((reply.error or {}).get("code") for reply in refused)),
            "first_token_s": quantiles([one.first or one.whole for one in admitted]),
            "whole_s": quantiles([one.whole for one in admitted]),
            "refused_s": quantiles([one.whole for one in refused]),
            "own_first_token_mean_s": self.own_first / max(self.own_count, 1),
            "sent_late_s": quantiles(self.late),
            "client_cpu_share": self.client_cpu / self.seconds,
            "server_cpu_share": self.server_cpu / self.seconds,
        }


async def _own_first(client: httpx.AsyncClient) -> tuple[float, float]:
    """Return the server's own sum and count of times to a first token."""
    text, name = (await client.get("/metrics")).text, "mmkv_time_to_first_token_seconds"
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name))
    return float(found[f"{name}_sum"]), float(found[f"{name}_count"])


def measure_overload(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Find the capacity, then send at each share of it, in turns."""
    if BELOW not in args.shares:
        raise BenchError(f"--shares needs {BELOW}, which the others are compared with")
    options = ["--budget", "64", "--memory", "64MiB", "--max-running", str(args.running)]
    options += ["--max-queue", str(args.queue)]
    with mmkv_serve(None, folder / "mmkv.log", *options) as server:
        asyncio.run(capacity(server.url, args.running, 4 * args.running, args.tokens))
        rates = []
        found = {share: Arrived() for share in args.shares}
        for round_ in range(args.rounds):
            most = args.running + args.queue
            rates.append(asyncio.run(capacity(server.url, most, 8 * args.running, args.tokens)))
            for share, arrived in found.items():
                rate = share * rates[-1]
                count, seed = max(20, round(rate * args.seconds)), hash((round_, share)) % 2**31
                asyncio.run(arrived.arrive(server, rate, count, args.tokens, seed))
                print(f"{share} x {rates[-1]:.1f} requests/s: sent", flush=True)
    page = {str(share): arrived.summary() for share, arrived in found.items()}
    below = page[str(BELOW)]["first_token_s"]["p99"]
    for one in page.values():
        one["p99_over_below_capacity"] = one["first_token_s"]["p99"] / below
    return {"capacity_per_s": {"median": statistics.median(rates), "rounds": rates}, "shares": page}


def overload_rows(found: Mapping[str, Any]) -> Rows:
    """Return what became of requests that came at shares of the capacity."""
    rows = [["of capacity", "requests", "refused (503)", "first token, ms: p50, p99"]]
    rows[0] += ["p99 / at 0.8", "refusal, ms: p50, p99"]
    for share, one in found["shares"].items():
        counts, over = (f"{one[k]:,}" for k in ("requests", "refused")), one["first_token_s"]
        ratio = f"{one['p99_over_below_capacity']:.2f}"
        rows.append([share, *counts, _ms(over), ratio, _ms(one["refused_s"])])
    return rows


@dataclass(frozen=True)
class Load:
    """A load: what measures it, its table and result file, and its options with their defaults."""

    measure: Callable[[argparse.Namespace, Path], dict[str, Any]]
    rows: Callable[[Mapping[str, Any]], Rows]
    name: str
    result: str
    options: dict[str, Any]


LOADS = {
    "speed": Load(
        measure_speed,
        speed_rows,
        "serving-speed",
        "serving-speed-cpu",
        {
            "kinds": ["texts", "pictures"],
            "dialogues": [1, 4, 8],
            "turns": 10,
            "tokens": 32,
            "budget": 128,
            "rounds": 3,
        },
    ),
    "streams": Load(
        measure_streams,
        streams_rows,
        "serving-streams",
        "serving-streams-cpu",
        {
            "model": None,
            "gates": None,
            "kinds": [BUDGET, WHOLE, FULL],
            "streams": [1, 8, 32],
            "turns": 2,
            "words": 200,
            "tokens": 32,
            "budget": 256,
            "gap": 0.2,
            "memory_each": 64,
            "context": 1024,
        },
    ),
    "overload": Load(
        measure_overload,
        overload_rows,
        "serving-overload",
        "serving-overload",
        {
            "shares": [0.5, BELOW, 1.0, 2.0, 4.0],
            "seconds": 15.0,
            "rounds": 3,
            "tokens": 8,
            "running": 4,
            "queue": 2,
        },
    ),
}
_HELP = {
    "kinds": "texts or pictures; of streams: the servers, by their names in its table",
    "dialogues": "at a time",
    "turns": "of each dialogue",
    "tokens": "of each reply, at most",
    "budget": "entries per row, of mmkv's cache",
    "rounds": "of each case",
    "gates": "of the model (default: those of its folder)",
    "streams": "at a time",
    "words": "of each question",
    "gap": "seconds between tokens aimed at",
    "memory_each": "MiB of cache for a stream",
    "context": "positions of the model",
    "shares": "of the capacity",
    "seconds": "of each share, in each round",
    "running": "requests served at a time",
    "queue": "requests that may wait",
}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """Return the arguments; those that a load does not have are left out."""
    parser = plain_parser("serving.load", __doc__)
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("model", nargs="?", help="of streams: folder of a text model")
    kinds: dict[str, Any] = {}
    for load in LOADS.values():
        kinds |= load.options
    for name, about in _HELP.items():
        value = kinds[name]
        one = value[0] if isinstance(value, list) else value
        several: dict[str, Any] = {"nargs": "+"} if isinstance(value, list) else {}
        kind = str if one is None else type(one)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=about, **several)
    args = parser.parse_args(arguments)
    own = LOADS[args.load].options
    for name in ("model", *_HELP):
        if name not in own:
            if getattr(args, name) is not None:
                parser.error(f"{args.load} takes no {name.replace('_', '-')}")
            delattr(args, name)
        elif getattr(args, name) is None:
            setattr(args, name, own[name])
    if unknown := set(getattr(args, "kinds", ())) - set(own.get("kinds", ())):
        parser.error(f"--kinds {unknown.pop()!r} is none of {', '.join(own['kinds'])}")
    return args


def keep(args: argparse.Namespace, found: dict[str, Any]) -> Path:
    """Write what has been found so far."""
    load = LOADS[args.load]
    return save(args, load.result, found, {load.name: load.rows(found)})


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the result file; 1 where a server failed."""
    args = parsed(arguments)
    load = LOADS[args.load]
    folder, found = run_in_folder(load.measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    columns, *rows = load.rows(found)
    table(args.load, columns, rows)
    print(f"written to {keep(args, found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
