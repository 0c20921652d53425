"""Send ``mmkv serve`` more requests than it can answer, whether or not it answers.

``python -m benchmarks.serving.overload`` first finds out how many requests a second the server
answers when as many wait as it takes at a time. Then requests arrive at random (Poisson) at shares
of that rate, from half to four times. Each shows a picture that the server has not seen. Those that
are admitted have to get their first token about as soon as below capacity; the others have to be
refused at once, with 503 and before their picture is decoded.

Times are the client's, so what it is late with itself counts, too: how much later than drawn it
sent requests, what share of a processor it and the server took, and the mean time to a first token
as the server counts it (from when a request was parsed) stand beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.serving.servers import (
    Streamed,
    mmkv_serve,
    picture_url,
    quantiles,
    question,
    run_in_folder,
    stream_chat,
    words,
)

BELOW = 0.8  # the share of capacity that the others are compared with
_OPTIONS: dict[str, Any] = {
    "timeout": 120,
    "trust_env": False,
    "limits": httpx.Limits(max_connections=None, max_keepalive_connections=256),
}


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
    waiting = bodies(1, count, tokens)

    async def work(client: httpx.AsyncClient) -> None:
        while waiting:
            body = waiting.pop()
            while (reply := await stream_chat(client, body)).status == 503:
                await asyncio.sleep(0.01)
            if reply.status != 200:
                raise BenchError(f"the server answered {reply.status}: {reply.error}")

    async with httpx.AsyncClient(base_url=url, **_OPTIONS) as client:
        started = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(at_a_time)))
        return count / (time.perf_counter() - started)


@dataclass
class Arrived:
    """What came of the requests of one rate, and of who sent and who answered them.

    Attributes:
        late: seconds between the moment that was drawn for a request and that at which it was sent.
        seconds: until all were answered; client_cpu, server_cpu: processor seconds of both.
        own_first: sum of the times to a first token as the server counts them; own_count: of how
            many.
    """

    replies: list[Streamed] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    seconds: float = 0.0
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    own_first: float = 0.0
    own_count: float = 0.0


async def arrive(
    url: str,
    rate: float,
    count: int,
    tokens: int,
    seed: int,
    into: Arrived,
    server_seconds: Callable[[], float],
) -> None:
    """Send ``count`` requests at random moments, ``rate`` a second on average.

    Args:
        into: what is found is added here.
        server_seconds: returns the processor seconds of the server so far.
    """
    rng, given = Random(seed), bodies(seed, count, tokens)
    async with httpx.AsyncClient(base_url=url, **_OPTIONS) as client:
        own = await _own_first(client)
        cpu, server_cpu = time.process_time(), server_seconds()
        started = at = time.perf_counter()
        tasks = []
        for body in given:
            at += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            into.late.append(time.perf_counter() - at)
            tasks.append(asyncio.create_task(stream_chat(client, body)))
        into.replies += await asyncio.gather(*tasks)
        into.seconds += time.perf_counter() - started
        into.client_cpu += time.process_time() - cpu
        into.server_cpu += server_seconds() - server_cpu
        now = await _own_first(client)
        into.own_first += now[0] - own[0]
        into.own_count += now[1] - own[1]


async def _own_first(client: httpx.AsyncClient) -> tuple[float, float]:
    """Return the server's own sum and count of times to a first token."""
    text, name = (await client.get("/metrics")).text, "mmkv_time_to_first_token_seconds"
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(name))
    return float(found[f"{name}_sum"]), float(found[f"{name}_count"])


def summary(arrived: Arrived) -> dict[str, Any]:
    """Return the figures of one rate."""
    replies = arrived.replies
    statuses = Counter(reply.status for reply in replies)
    if set(statuses) - {200, 503}:
        raise BenchError(f"the server answered {dict(statuses)}")
    refused = [reply for reply in replies if reply.status == 503]
    admitted = [reply for reply in replies if reply.status == 200]
    return {
        "requests": len(replies),
        "refused": len(refused),
        "codes": dict(Counter((reply.error or {}).get("code") for reply in refused)),
        "first_token_s": quantiles([one.first or one.whole for one in admitted]),
        "whole_s": quantiles([one.whole for one in admitted]),
        "refused_s": quantiles([one.whole for one in refused]),
        "own_first_token_mean_s": arrived.own_first / max(arrived.own_count, 1),
        "sent_late_s": quantiles(arrived.late),
        "client_cpu_share": arrived.client_cpu / arrived.seconds,
        "server_cpu_share": arrived.server_cpu / arrived.seconds,
    }


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Find the capacity, then send at each share of it, in turns."""
    options = ["--budget", "64", "--memory", "64MiB", "--max-running", str(args.running)]
    options += ["--max-queue", str(args.queue)]
    with mmkv_serve(None, folder / "mmkv.log", *options) as server:
        asyncio.run(capacity(server.url, args.running, 4 * args.running, args.tokens))
        rates = []
        found = {share: Arrived() for share in args.shares}
        for round_ in range(args.rounds):
            most = args.running + args.queue
            rates.append(asyncio.run(capacity(server.url, most, 8 * args.running, args.tokens)))
            for share in args.shares:
                rate = share * rates[-1]
                count = max(20, round(rate * args.seconds))
                seed = hash((round_, share)) % 2**31
                given = rate, count, args.tokens, seed, found[share], server.cpu_seconds
                asyncio.run(arrive(server.url, *given))
                print(f"{share} x {rates[-1]:.1f} requests/s: sent", flush=True)
    page = {str(share): summary(arrived) for share, arrived in found.items()}
    below = page[str(BELOW)]["first_token_s"]["p99"]
    for one in page.values():
        one["p99_over_below_capacity"] = one["first_token_s"]["p99"] / below
    return {"capacity_per_s": {"median": statistics.median(rates), "rounds": rates}, "shares": page}


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the result file; return the exit code."""
    parser = plain_parser("serving.overload", __doc__)
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, BELOW, 1.0, 2.0, 4.0])
    parser.add_argument("--seconds", type=float, default=15, help="of each share, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8, help="of each reply, at most")
    parser.add_argument("--running", type=int, default=4, help="requests served at a time")
    parser.add_argument("--queue", type=int, default=2, help="requests that may wait")
    args = parser.parse_args(arguments)
    if BELOW not in args.shares:
        parser.error(f"--shares needs {BELOW}, which the others are compared with")
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    shutil.rmtree(folder)
    columns = ["share of capacity", "requests", "refused", "first token, p50 ms", "p99"]
    columns += ["p99 / at 0.8", "refusal, p50 ms", "p99", "own mean, ms"]
    columns += ["sent late, p99 ms", "client CPU", "server CPU"]
    rows = []
    for share, one in found["shares"].items():
        times = [one["first_token_s"], one["refused_s"] or {"p50": 0.0, "p99": 0.0}]
        first, refused = [[f"{1e3 * each[q]:.0f}" for q in ("p50", "p99")] for each in times]
        ratio = f"{one['p99_over_below_capacity']:.2f}"
        own = [
            f"{1e3 * one['own_first_token_mean_s']:.0f}",
            f"{1e3 * one['sent_late_s']['p99']:.0f}",
        ]
        own += [f"{one[f'{who}_cpu_share']:.2f}" for who in ("client", "server")]
        rows.append([share, one["requests"], one["refused"], *first, ratio, *refused, *own])
    table(f"{found['capacity_per_s']['median']:.1f} requests/s", columns, rows)
    print(f"written to {save(args, 'serving-overload', found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
