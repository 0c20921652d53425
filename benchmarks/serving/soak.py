"""Let clients misbehave towards ``mmkv serve`` for 10,000 requests, and kill it while it saves.

``python -m benchmarks.serving.soak`` sends chats, responses and turns of sessions, with and without
pictures, over several turns. A third of the clients leave: before their request is sent whole, in
the queue, while their picture is decoded, in the prompt, or within the reply. Others read slowly,
send what is no picture, or no request. After every few hundred requests the server is left alone
until it is idle; then no page may be held that nothing accounts for, and its resident memory is
read. With ``--process-memory 1GiB`` some clients send large pictures and ask for log probabilities,
too, and the most that was ever resident has to be less. In the end the server is killed (SIGKILL)
over and over while sessions are saved: each file that was there, or whose saving was answered, has
to be readable afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np

from benchmarks.bench.child import BenchError
from benchmarks.bench.harness import plain_parser, save, table
from benchmarks.serving.servers import (
    ServerProcess,
    Streamed,
    mmkv_serve,
    picture_url,
    question,
    run_in_folder,
    stream_chat,
    words,
)
from mmkv.engine.budget import parse_bytes

MODEL = "tiny-vlm"
_WARM = 1000  # requests after which the memory has to be flat
_BAD_PICTURES = (
    "data:image/png;base64,!!!",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAA",
    "data:text/plain,hello",
    "http://127.0.0.1:9/x.png",
    "file:///etc/passwd",
    "https://no-such-host.invalid/x.png",
)


class Client:
    """Sends one kind of request after the other to a server, all drawn from a seed.

    Args:
        large: whether some requests take much memory.

    Attributes:
        seen: answers by their kind and status.
    """

    def __init__(
        self, url: str, http: httpx.AsyncClient, rng: Random, seen: Counter[str], large: bool
    ) -> None:
        self._large = large
        self._http, self._rng, self.seen = http, rng, seen
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 0
        self._messages: list[dict[str, Any]] = []
        self._response: str | None = None
        self._session: str | None = None

    async def one(self) -> None:
        """Send a request, or half of one."""
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._chat: 26,
            self._leave: 30,
            self._respond: 12,
            self._turn: 12,
            self._read_slowly: 8,
            self._send_no_picture: 8,
            self._send_nonsense: 4,
            self._send_much: 8 * self._large,
        }
        (kind,) = self._rng.choices(list(kinds), list(kinds.values()))
        await kind()

    def _asked(self) -> dict[str, Any]:
        rng = self._rng
        if len(self._messages) > 8 or rng.random() < 0.3:
            self._messages = []
        shown = picture_url(rng.randrange(10**6), 64) if rng.random() < 0.25 else None
        asked = question(words(rng, rng.choice((3, 12, 60))), shown)
        body: dict[str, Any] = {"model": MODEL, "messages": [*self._messages, asked]}
        body |= {"max_tokens": rng.choice((1, 4, 16)), "temperature": rng.choice((0, 1))}
        body |= {"n": 2} if rng.random() < 0.05 else {}
        return body

    async def _post(self, kind: str, path: str, **given: Any) -> httpx.Response:
        answer = await self._http.post(path, **given)
        self.seen[f"{kind} {answer.status_code}"] += 1
        return answer

    async def _stream(self, kind: str, body: dict[str, Any], pause: float = 0) -> Streamed:
        reply = await stream_chat(self._http, body, pause)
        self.seen[f"{kind} {reply.status}"] += 1
        return reply

    async def _chat(self) -> None:
        body = self._asked()
        if self._rng.random() < 0.5:
            answer = await self._post("chat", "/v1/chat/completions", json=body)
            if answer.status_code != 200:
                return
            text = answer.json()["choices"][0]["message"]["content"]
        else:
            reply = await self._stream("stream", body)
            if reply.status != 200:
                return
            text = reply.text
        self._messages = [*body["messages"], {"role": "assistant", "content": text}]

    async def _leave(self) -> None:
        """Go away, at a drawn byte of the request or a drawn moment of the answer."""
        rng = self._rng
        body = json.dumps(self._asked() | {"stream": rng.random() < 0.5, "max_tokens": 64}).encode()
        path = rng.choice(("chat/completions", "chat/completions", "responses"))
        if path == "responses":
            given = {"model": MODEL, "input": words(rng, 20), "stream": True}
            body = json.dumps(given).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        reader, writer = await asyncio.open_connection(self._host, self._port)
        with contextlib.suppress(OSError):
            writer.write(sent if rng.random() < 0.9 else sent[: rng.randrange(len(sent))])
            await writer.drain()
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 0.3)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await reader.read(rng.choice((1, 200, 1000)))
        writer.transport.abort() if rng.random() < 0.5 else writer.close()
        self.seen["left"] += 1

    async def _respond(self) -> None:
        body = {"model": MODEL, "input": words(self._rng, 6), "max_output_tokens": 8}
        if self._response is not None:
            body["previous_response_id"] = self._response
        answer = await self._post("response", "/v1/responses", json=body)
        good = answer.status_code == 200 and self._rng.random() < 0.8
        self._response = answer.json()["id"] if good else None

    async def _turn(self) -> None:
        rng = self._rng
        if self._session is None:
            answer = await self._post("session", "/v1/sessions", json={})
            self._session = answer.json()["id"] if answer.status_code == 200 else None
            return
        path = f"/v1/sessions/{self._session}"
        drawn = rng.random()
        if drawn < 0.1:
            answer, self._session = await self._http.delete(path), None
            self.seen[f"session {answer.status_code}"] += 1
        elif drawn < 0.2:
            answer = await self._post("session", f"{path}/fork")
            if answer.status_code == 200:
                self._session = answer.json()["id"]
                await self._http.delete(path)
        else:
            body = {"model": MODEL, "messages": [question(words(rng, 8))], "max_tokens": 8}
            answer = await self._post("session", f"{path}/chat/completions", json=body)
        if answer.status_code == 404:
            self._session = None

    async def _read_slowly(self) -> None:
        await self._stream("slow reader", self._asked() | {"max_tokens": 16}, 0.03)

    async def _send_no_picture(self) -> None:
        body = self._asked()
        body["messages"][-1] = question("what?", self._rng.choice(_BAD_PICTURES))
        await self._post("no picture", "/v1/chat/completions", json=body)

    async def _send_much(self) -> None:
        rng = self._rng
        shown = picture_url(rng.randrange(10**6), rng.choice((400, 800, 1600)))
        body = {"model": MODEL, "messages": [question(words(rng, 400), shown)], "max_tokens": 64}
        body |= {"logprobs": True, "top_logprobs": 20}
        await self._post("large", "/v1/chat/completions", json=body)

    async def _send_nonsense(self) -> None:
        rng = self._rng
        whole = json.dumps(self._asked())
        cut = rng.randrange(len(whole))
        text = rng.choice((whole[:cut], whole[:cut] + "\ud800" + whole[cut:], "[]", "{}"))
        kind = {"Content-Type": "application/json"}
        content = text.encode("utf-8", "surrogatepass")
        await self._post("nonsense", "/v1/chat/completions", content=content, headers=kind)

    async def close(self) -> None:
        """Let the session go."""
        if self._session is not None:
            await self._http.delete(f"/v1/sessions/{self._session}")


async def numbers(http: httpx.AsyncClient) -> dict[str, float]:
    """Return what /metrics says."""
    text = (await http.get("/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


async def idle(http: httpx.AsyncClient) -> dict[str, float]:
    """Wait until no request is under way; the metrics then. Raises BenchError after 60 s."""
    for _ in range(600):
        found = await numbers(http)
        if not found["mmkv_num_requests_running"] + found["mmkv_num_requests_waiting"]:
            return found
        await asyncio.sleep(0.1)
    raise BenchError("requests are under way although nobody asks: a client that left is served")


async def soak(
    server: ServerProcess, requests: int, at_a_time: int, every: int, seed: int, large: bool
) -> Any:
    """Send all requests; pages, memory and answers at each stop."""
    seen: Counter[str] = Counter()
    stops = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=at_a_time)
    options: dict[str, Any] = {"timeout": 120, "trust_env": False, "limits": limits}
    async with httpx.AsyncClient(base_url=server.url, **options) as http:
        clients = [
            Client(server.url, http, Random(f"{seed}/{at}"), seen, large) for at in range(at_a_time)
        ]
        for done in range(0, requests, every):
            left = min(every, requests - done)

            async def work(client: Client, share: int) -> None:
                for _ in range(share):
                    await client.one()

            shares = [left // at_a_time + (at < left % at_a_time) for at in range(at_a_time)]
            await asyncio.gather(*(work(*each) for each in zip(clients, shares, strict=True)))
            found = await idle(http)
            stop = {
                "requests": done + left,
                "rss": server.rss(),
                "peak": server.peak(),
                "decoders_peak": server.decoders_peak(),
                "pages_held": found['mmkv_kv_pages{state="held"}'],
                "pages_lost": found["mmkv_page_leaks_total"],
                "sessions": found['mmkv_sessions{state="idle"}']
                + found['mmkv_sessions{state="file"}'],
            }
            stops.append(stop)
            print(
                f"{stop['requests']:,} requests, {stop['rss'] / 2**20:.1f} MiB, "
                f"{stop['pages_lost']:.0f} pages lost",
                flush=True,
            )
        for client in clients:
            await client.close()
    reason = re.compile(r'mmkv_admission_rejections_total\{reason="(\w+)"\}')
    rejected = {name[1]: count for key, count in found.items() if (name := reason.fullmatch(key))}
    return {"answers": dict(sorted(seen.items())), "rejected": rejected, "stops": stops}


def slope(stops: list[dict[str, Any]]) -> float | None:
    """Return the bytes of resident memory that each request adds, after the first 1,000."""
    later = [one for one in stops if one["requests"] >= _WARM]
    if len(later) < 3:
        return None
    x, y = ([one[key] for one in later] for key in ("requests", "rss"))
    return float(np.polyfit(x, y, 1)[0])


async def kill_while_saving(
    start: Callable[[], ServerProcess], kills: int, seed: int
) -> dict[str, int]:
    """Kill the server while sessions are saved, and read all files back, over and over.

    A file that is not there counts as one that cannot be read.
    """
    rng, there = Random(seed), set[str]()
    counts = Counter(kills=0, saves_answered=0, files_read=0, files_unreadable=0)
    for _ in range(kills + 1):
        with start() as server:
            async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
                for name in sorted(there):
                    answer = await http.post("/v1/sessions", json={"file": name})
                    counts["files_read"] += answer.status_code == 200
                    counts["files_unreadable"] += answer.status_code != 200
                    if answer.status_code == 200:
                        await http.delete(f"/v1/sessions/{answer.json()['id']}")
                if counts["kills"] == kills:
                    break
                saving = [
                    asyncio.create_task(_save(http, at, there, counts, rng)) for at in range(4)
                ]
                await asyncio.sleep(0.5 + rng.random())
                server.kill()
                await asyncio.gather(*saving, return_exceptions=True)
                counts["kills"] += 1
    return dict(counts)


async def _save(
    http: httpx.AsyncClient, at: int, there: set[str], counts: Counter[str], rng: Random
) -> None:
    answer = await http.post("/v1/sessions", json={})
    path, turn = f"/v1/sessions/{answer.json()['id']}", 0
    while True:
        body = {"model": MODEL, "messages": [question(words(rng, 8))], "max_tokens": 2}
        await http.post(f"{path}/chat/completions", json=body)
        for _ in range(8):
            name, turn = f"{at}-{turn % 3}", turn + 1
            saved = await http.post(f"{path}/save", json={"name": name, "overwrite": True})
            if saved.status_code == 200:
                counts["saves_answered"] += 1
                there.add(name)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Soak a server, then kill others."""
    log = folder / "mmkv.log"
    options = ["--budget", "24", "--memory", args.memory, "--max-queue", "16"]
    options += ["--session-folder", str(folder / "sessions"), "--store", "2MiB"]
    bound = args.process_memory
    options += [] if bound is None else ["--process-memory", bound]

    def start() -> ServerProcess:
        return mmkv_serve(None, log, *options)

    given = args.requests, args.clients, args.every, args.seed
    with start() as server:
        found: dict[str, Any] = asyncio.run(soak(server, *given, large=bound is not None))
    found["killed"] = asyncio.run(kill_while_saving(start, args.kills, args.seed))
    refused = (500, 501, 502, 504)
    found["summary"] = {
        "requests": found["stops"][-1]["requests"],
        "left_by_the_client": found["answers"].get("left", 0),
        "pages_lost": max(one["pages_lost"] for one in found["stops"]),
        "rss_bytes_per_request": slope(found["stops"]),
        "peak_bytes": found["stops"][-1]["peak"],
        "decoders_peak_bytes": max(one["decoders_peak"] for one in found["stops"]),
        "above_process_memory": bound is not None
        and found["stops"][-1]["peak"] > parse_bytes(bound),
        "server_errors": sum(
            count
            for kind, count in found["answers"].items()
            if kind != "left" and int(kind.split()[-1]) in refused
        ),
        "tracebacks": log.read_text(errors="replace").count("Traceback"),
        **found["killed"],
    }
    return found


def table_of(found: Mapping[str, Any]) -> list[list[str]]:
    """Return what the requests of misbehaving clients came to, under an empty heading."""
    one = found["summary"]
    return [
        ["", ""],
        [
            "requests, of which clients left",
            f"{one['requests']:,}, {one['left_by_the_client']:,}",
        ],
        ["pages lost", f"{one['pages_lost']:.0f}"],
        [
            "resident memory per request after the first 1,000",
            f"{one['rss_bytes_per_request'] or 0:.0f} bytes",
        ],
        [
            "server errors other than 503; tracebacks",
            f"{one['server_errors']}; {one['tracebacks']}",
        ],
        [
            "SIGKILL while four sessions were saved: times; saves answered",
            f"{one['kills']}; {one['saves_answered']:,}",
        ],
        [
            "session files read afterwards; unreadable or missing",
            f"{one['files_read']:,}; {one['files_unreadable']}",
        ],
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the result file; exit code 1 if something was lost."""
    parser = plain_parser("serving.soak", __doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=24, help="at a time")
    parser.add_argument("--every", type=int, default=250, help="requests between two stops")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--memory", default="24MiB", help="of the server's cache")
    parser.add_argument("--process-memory", help="of the server's process, for example 1GiB")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    folder, found = run_in_folder(measure, args)
    if found is None:
        return 1
    rows = table_of(found)
    table("Soak", rows[0], rows[1:])
    table("Answers", ["", ""], list(found["answers"].items()))
    print(f"written to {save(args, 'serving-soak', found, {'serving-soak': rows})}")
    summary = found["summary"]
    bad = ("pages_lost", "server_errors", "tracebacks", "files_unreadable", "above_process_memory")
    lost = any(summary[key] for key in bad)
    if lost:
        print(f"logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
