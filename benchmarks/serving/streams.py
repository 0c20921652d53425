"""Measure the time between two tokens of ``mmkv serve`` while the prompts of many streams wait.

``python -m benchmarks.serving.streams MODEL --gates GATES`` has 1, 8 and 32 dialogues at a time,
whose next question follows each reply at once, so that prompts wait all the while. A server of its
own answers for each line: under a budget, with the time between tokens that it aims at (``--gap``)
and with passes over prompts that are read whole, as before; and with the full cache. Each gets the
memory that so many streams need with the full cache, so that all are admitted: those count with the
whole context, which is cut to ``--context`` for that. Counted are the time to the first piece of
text, the time between two, tokens per second of the server's processor time, and the most memory
that its process took.

``python -m benchmarks.smollm2 FOLDER`` gets a model for it, ``assets/gates/smollm2-135m`` has its
gates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.serving.servers import (
    ServerProcess,
    Streamed,
    mmkv_serve,
    quantiles,
    question,
    run_in_folder,
    stream_chat,
    words,
)

RESULT = "serving-streams-cpu"
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


async def dialogues(server: ServerProcess, args: argparse.Namespace, seeds: range) -> list[Any]:
    """Have a dialogue per seed, all at a time; the replies of all."""
    name = Path(args.model).resolve().name

    async def one(client: httpx.AsyncClient, seed: int) -> list[Streamed]:
        rng, messages, replies = Random(seed), [], []
        for _ in range(args.turns):
            messages.append(question(words(rng, args.words)))
            body: dict[str, Any] = {"model": name, "messages": messages, "temperature": 0}
            more = {"max_tokens": args.tokens, "stream_options": {"include_usage": True}}
            reply = await stream_chat(client, body | more)
            if reply.status != 200 or reply.error is not None or reply.usage is None:
                raise BenchError(f"mmkv serve answered {reply.status}: {reply.error}")
            replies.append(reply)
            messages.append({"role": "assistant", "content": reply.text})
        return replies

    options: dict[str, Any] = {"timeout": 3600, "trust_env": False}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, **options) as client:
        found = await asyncio.gather(*(one(client, seed) for seed in seeds))
    return [reply for each in found for reply in each]


def load(server: ServerProcess, args: argparse.Namespace, streams: int) -> dict[str, Any]:
    """Have so many dialogues at a time; what they came to."""
    asyncio.run(dialogues(server, args, range(10**6, 10**6 + 1)))  # what is imported late
    peak, over = [server.rss()], threading.Event()

    def watch() -> None:
        while not over.wait(_EVERY):
            peak[0] = max(peak[0], server.rss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        cpu, started = server.cpu_seconds(), time.perf_counter()
        replies = asyncio.run(dialogues(server, args, range(streams)))
        seconds, cpu = time.perf_counter() - started, server.cpu_seconds() - cpu
    finally:
        over.set()
        watcher.join()
    tokens = sum(reply.usage["completion_tokens"] for reply in replies)
    return {
        "replies": len(replies),
        "tokens": tokens,
        "prompt_tokens": sum(reply.usage["prompt_tokens"] for reply in replies),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "tokens_per_second": tokens / seconds,
        "tokens_per_cpu_second": tokens / cpu,
        "first_token_s": quantiles([one.first for one in replies if one.first is not None]),
        "inter_token_s": quantiles([gap for one in replies for gap in one.gaps]),
        "whole_reply_s": quantiles([one.whole for one in replies]),
        "peak_rss_mib": peak[0] / 2**20,
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every server with every number of streams."""
    gates = [] if args.gates is None else ["--gates", str(Path(args.gates).resolve())]
    budget = [*gates, "--budget", str(args.budget)]
    kinds = {
        BUDGET: [*budget, "--gap", str(args.gap)],
        WHOLE: [*budget, "--gap", "3600"],
        FULL: ["--policy", "full", "--gap", str(args.gap)],
    }
    found: dict[str, Any] = {}
    model = str(with_context(Path(args.model).resolve(), args.context, folder))
    for streams in args.streams:
        memory = ["--memory", f"{streams * args.memory_each}MiB"]
        places = ["--max-running", str(streams), *memory]
        for kind in args.kinds:
            log = folder / f"{streams}-{list(kinds).index(kind)}.log"
            with mmkv_serve(model, log, *kinds[kind], *places) as server:
                found.setdefault(str(streams), {})[kind] = load(server, args, streams)
            save(args, RESULT, found)
            print(f"{streams} streams, {kind}: done", flush=True)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    columns = ["streams, server", "next, p50 ms", "p99", "first, p50 s", "p99", "reply, p50 s"]
    columns += ["tokens per CPU s", "peak MiB"]
    rows = [
        [
            f"{streams}, {kind}",
            *(f"{1e3 * one['inter_token_s'][q]:.0f}" for q in ("p50", "p99")),
            *(f"{one['first_token_s'][q]:.1f}" for q in ("p50", "p99")),
            f"{one['whole_reply_s']['p50']:.1f}",
            f"{one['tokens_per_cpu_second']:.1f}",
            f"{one['peak_rss_mib']:.0f}",
        ]
        for streams, kinds in found.items()
        for kind, one in kinds.items()
    ]
    table("Streams whose prompts wait", columns, rows)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the result file; return the exit code."""
    parser = plain_parser("serving.streams", __doc__)
    kinds = [BUDGET, WHOLE, FULL]
    parser.add_argument("model", help="folder of a text model")
    parser.add_argument("--gates", default=None, help="its gates (default: those of its folder)")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32], help="at a time")
    parser.add_argument("--turns", type=int, default=2, help="of each dialogue")
    parser.add_argument("--words", type=int, default=200, help="of each question")
    parser.add_argument("--tokens", type=int, default=32, help="of each reply, at most")
    parser.add_argument("--budget", type=int, default=256, help="entries per row")
    parser.add_argument("--gap", type=float, default=0.2, help="seconds between tokens aimed at")
    parser.add_argument("--memory-each", type=int, default=64, help="MiB of cache for a stream")
    parser.add_argument("--context", type=int, default=1024, help="positions of the model")
    args = parser.parse_args(arguments)
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    show(found)
    print(f"written to {save(args, RESULT, found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
