"""Take all that ``mmkv serve`` can give, and measure what it takes: memory, time, disk.

``python -m benchmarks.serving.floods`` starts a server for each phase on the loopback and sends
bounded
traffic: heads that never end, connections that say nothing while there are few file descriptors,
bodies of very many JSON values, pictures that wait in the queue, pictures that fill the context,
log probabilities, clients that never read, a folder for idle memories that vanishes, and a disk
that takes no session. Measured are the peak of the server's resident memory, for how long a healthy
client was not answered, and how much the log grew. The program fails where the server's process
takes more than it said at its start, or a phase more than the parts of that which it is about.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import random
import re
import shutil
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.bench.output import plain_parser, save, table
from benchmarks.serving.servers import ServerProcess, mmkv_serve, question, run_in_folder

MODEL = "tiny-vlm"
_RETURN_S = 15  # in which memory goes back
Start = Callable[..., AbstractContextManager[ServerProcess]]
_MIB = 2**20


class Watched:
    """A server, and what it has taken since :meth:`begin`."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self._about = Path(f"/proc/{server.process.pid}")
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        with contextlib.suppress(OSError):
            (self._about / "clear_refs").write_text("5")  # the peak is what is resident now
        self._rss, self._log = self.server.rss(), self.server.log.stat().st_size

    def grown(self) -> int:
        """Return the most bytes that were resident, less what was in the beginning."""
        return max(self.server.peak() - self._rss, 0)

    def kept(self) -> int:
        """Return the bytes that are resident now, less what was in the beginning."""
        return self.server.rss() - self._rss

    def logged(self) -> int:
        """Return the bytes that the log has grown by."""
        return self.server.log.stat().st_size - self._log


def stated(server: ServerProcess) -> dict[str, int]:
    """Return the most bytes that the server's process takes, by part, as it says itself."""
    text = httpx.get(f"{server.url}/metrics", timeout=30, trust_env=False).text
    found = re.findall(r'^mmkv_process_memory_limit_bytes{part="(\w+)"} (\S+)$', text, re.M)
    return {name: int(float(value)) for name, value in found}


class Healthy:
    """A client with one short question after the other, and the longest time without an answer."""

    def __init__(self, url: str, path: str = "/health") -> None:
        self._url, self._path, self._over = url, path, threading.Event()
        self.answers: Counter[int] = Counter()
        self.longest = 0.0
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        latest = time.monotonic()
        while not self._over.is_set():
            try:
                status = httpx.get(
                    f"{self._url}{self._path}", timeout=5, trust_env=False
                ).status_code
            except httpx.HTTPError:
                status = 0
            now = time.monotonic()
            self.answers[status] += 1
            self.longest = max(self.longest, now - latest)
            if status == 200:
                latest = now
            self._over.wait(0.1)

    def __enter__(self) -> Healthy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)


def _post(url: str, path: str, body: bytes) -> socket.socket:
    """Send a whole request over a connection of its own, whose answer nobody has read."""
    made = _connect(url)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return made


def _asked(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [question("what is red?")], "temperature": 0} | fields


_ENDLESS = {"logit_bias": {"638": -100}, "temperature": 2}  # without the token that ends a turn


@contextlib.contextmanager
def _open_all(count: int, make: Callable[[], socket.socket]) -> Iterator[list[socket.socket]]:
    """Hold so many connections; those that the server refuses are left out."""
    made = []
    for _ in range(count):
        with contextlib.suppress(OSError):
            made.append(make())
    try:
        yield made
    finally:
        for one in made:
            one.close()


def heads(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """Heads of a MiB that never end."""

    def begun() -> socket.socket:
        made = _connect(server.url)
        made.settimeout(2)
        with contextlib.suppress(OSError):
            made.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"a" * _MIB)
        return made

    with start() as server:
        watched = Watched(server)
        with Healthy(server.url) as healthy, _open_all(args.heads, begun):
            time.sleep(1)
            grown = watched.grown()
        return {"heads": args.heads, "rss": grown, "locked_out_s": healthy.longest}


def idle(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """Connections that say nothing, to a server of few descriptors with sessions in files."""
    with start("--keep-sessions", descriptors=args.descriptors) as server:
        client = httpx.Client(base_url=server.url, timeout=5, trust_env=False)
        name = client.post("/v1/sessions", json={}).json()["id"]
        path = f"/v1/sessions/{name}"
        turn = _asked(max_tokens=2)
        assert client.post(f"{path}/chat/completions", json=turn).status_code == 200
        watched, said = Watched(server), Counter[str]()
        began = time.monotonic()
        with Healthy(server.url) as healthy, _open_all(args.idle, lambda: _connect(server.url)):
            while time.monotonic() < began + args.seconds:
                try:
                    answer = client.get(path)
                    found = answer.json()
                    code = found.get("error", {}).get("message", "")[:60]
                    said[f"{answer.status_code} {code}".strip()] += 1
                except httpx.HTTPError as error:
                    said[type(error).__name__] += 1
                time.sleep(0.5)
            logged = watched.logged()
        client.close()
        return {
            "connections": args.idle,
            "descriptors": args.descriptors,
            "locked_out_s": healthy.longest,
            "log_bytes_a_minute": logged * 60 / args.seconds,
            "session": dict(said),
            "rss": watched.grown(),
        }


def values(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """A body of very many JSON values, beside the stream of another client."""
    with start() as server:
        watched, gaps, over = Watched(server), [0.0], threading.Event()

        def listen() -> None:
            with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
                latest = time.monotonic()
                while not over.is_set():
                    body = _asked(stream=True, max_tokens=2000, **_ENDLESS)
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        for _ in answer.iter_lines():
                            gaps.append(time.monotonic() - latest)
                            latest = time.monotonic()
                            if over.is_set():
                                break

        listening = threading.Thread(target=listen)
        listening.start()
        time.sleep(1)
        watched.begin()
        whole = json.dumps(_asked())[:-1].encode() + b', "metadata": ['
        body = whole + b"[]," * (args.body * _MIB // 3) + b"[]]}"
        made = _post(server.url, "/v1/chat/completions", body)
        made.settimeout(120)
        status = made.recv(64).split(b" ")[1].decode()
        made.close()
        over.set()
        listening.join()
        return {"body": len(body), "status": status, "rss": watched.grown(), "stall_s": max(gaps)}


def queued(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """Chats with large pictures that wait for one long reply."""
    with start("--max-running", "1") as server:
        shown = f"data:image/png;base64,{'A' * (args.body * _MIB)}"
        body = json.dumps(_asked() | {"messages": [question("what?", shown)]}).encode()
        first = _post(
            server.url,
            "/v1/chat/completions",
            json.dumps(_asked(**_ENDLESS, stream=True, max_tokens=8000, n=8)).encode(),
        )
        first.settimeout(60)
        first.recv(64)
        watched, said = Watched(server), Counter[str]()
        with _open_all(
            args.pictures, lambda: _post(server.url, "/v1/chat/completions", body)
        ) as waiting:
            time.sleep(1)
            grown = watched.grown()
            for one in waiting:
                one.settimeout(0.2)
                with contextlib.suppress(OSError):
                    said[one.recv(64).split(b" ")[1].decode()] += 1
        first.close()
        return {"pictures": args.pictures, "body": len(body), "rss": grown, "refused": dict(said)}


def pictures(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """Chats at once whose pictures, of 64 tokens each, fill the context."""
    with start("--memory", "256MiB") as server:
        noise, said = random.Random(907), Counter[int]()
        shown = [_noise(noise) for _ in range(args.shown)]
        watched = Watched(server)

        def ask(at: int) -> None:
            parts = [*shown[at:], *shown[:at], {"type": "text", "text": "what?"}]
            asked = _asked(max_tokens=2) | {"messages": [{"role": "user", "content": parts}]}
            with httpx.Client(base_url=server.url, timeout=400, trust_env=False) as client:
                said[client.post("/v1/chat/completions", json=asked).status_code] += 1

        asking = [threading.Thread(target=ask, args=[at]) for at in range(args.viewers)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        grown = watched.grown()
        time.sleep(_RETURN_S)
        found = {"chats": args.viewers, "pictures": args.shown, "rss": grown}
        return found | {"rss_after": watched.kept(), "said": _named(said)}


def _noise(rng: random.Random) -> dict[str, Any]:
    """Return the part of a picture that hardly shrinks."""
    from PIL import Image

    picture, file = Image.frombytes("RGB", (256, 256), rng.randbytes(3 * 256**2)), io.BytesIO()
    picture.save(file, "PNG", compress_level=1)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _named(said: Counter[int]) -> dict[str, int]:
    return {str(key): count for key, count in said.items()}


def scored(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """Log probabilities of as many tokens as a whole answer may have."""
    with start() as server:
        client = httpx.Client(base_url=server.url, timeout=300, trust_env=False)
        whole = {"n": 8, "max_tokens": args.tokens, "logprobs": True, "top_logprobs": 20}
        found: dict[str, Any] = {}
        watched = Watched(server)
        answer = client.post("/v1/chat/completions", json=_asked(**whole, **_ENDLESS))
        tokens, grown = 0, watched.grown()
        if answer.status_code == 200:
            tokens = answer.json()["usage"]["completion_tokens"]
        found |= {"status": answer.status_code, "rss": grown, "tokens": tokens}
        del answer
        # As many as are taken.
        watched.begin()
        fewer = whole | {"n": 4, "max_tokens": min(args.tokens, 1100)}
        answer = client.post("/v1/chat/completions", json=_asked(**fewer, **_ENDLESS))
        if answer.status_code == 200:
            tokens = answer.json()["usage"]["completion_tokens"]
            found |= {"taken_tokens": tokens, "taken_rss": watched.grown()}
            found["rss_a_token"] = found["taken_rss"] / tokens
            found["rss"] = max(found["rss"], found["taken_rss"])
        client.close()
        return found


def unread(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """Streams that nobody reads; then all of them leave."""
    with start() as server:
        whole = {"n": 8, "max_tokens": args.tokens, "logprobs": True, "top_logprobs": 20}
        body = json.dumps(_asked(stream=True, **_ENDLESS, **whole)).encode()
        watched = Watched(server)

        def ask() -> socket.socket:
            made = socket.socket()
            made.settimeout(10)
            # Before it connects, so that little of the answer is taken in.
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            parts = urlsplit(server.url)
            made.connect((parts.hostname or "", parts.port or 0))
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            head += "Content-Type: application/json\r\n"
            made.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            return made

        with _open_all(args.unread, ask):
            until = time.monotonic() + args.patience
            while time.monotonic() < until:
                time.sleep(1)
            grown = watched.grown()
        time.sleep(_RETURN_S)
        return {"streams": args.unread, "rss": grown, "rss_after": watched.kept()}


def vanished(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """A folder for idle memories that is gone and cannot be made again, under stored responses."""
    folder = args.folder / "state"
    folder.mkdir()
    with start("--store", "1GiB", "--memory", "2MiB", folder=folder, environment=folder) as server:
        client = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
        said, chats = Counter[int](), Counter[int]()
        shutil.rmtree(folder)
        folder.write_text("in the way")
        watched = Watched(server)
        for at in range(args.responses):
            body = {"model": MODEL, "input": f"what is red? {at}", "max_output_tokens": 2}
            said[client.post("/v1/responses", json=body).status_code] += 1
        for _ in range(10):
            answer = client.post("/v1/chat/completions", json=_asked(max_tokens=2))
            chats[answer.status_code] += 1
        health = client.get("/health").json()
        client.close()
        return {
            "responses": _named(said),
            "chats": _named(chats),
            "health": health,
            "log_bytes": watched.logged(),
            "rss": watched.grown(),
        }


def full(start: Start, args: argparse.Namespace) -> dict[str, Any]:
    """A disk that takes no file of a session's size, under sessions that are to be kept."""
    with start("--keep-sessions", file_blocks=16) as server:
        client = httpx.Client(base_url=server.url, timeout=60, trust_env=False)
        made, turns, chats = Counter[int](), Counter[int](), Counter[int]()
        watched = Watched(server)
        for at in range(args.responses):
            answer = client.post("/v1/sessions", json={})
            made[answer.status_code] += 1
            if answer.status_code >= 300:
                continue
            path = f"/v1/sessions/{answer.json()['id']}/chat/completions"
            turns[client.post(path, json=_asked(max_tokens=2)).status_code] += 1
            body = _asked(max_tokens=2, cache_salt=str(at))
            chats[client.post("/v1/chat/completions", json=body).status_code] += 1
        found = {"sessions": _named(made), "turns": _named(turns), "chats": _named(chats)}
        client.close()
        return found | {"log_bytes": watched.logged(), "rss": watched.grown()}


# What the memory of a phase is about, of the parts that the server states.
PHASES: dict[Callable[..., dict[str, Any]], tuple[str, ...]] = {
    heads: ("connections",),
    idle: ("connections", "texts"),
    values: ("bodies", "values"),
    queued: ("connections", "bodies"),
    pictures: ("bodies", "media", "reading"),
    scored: ("scored", "unsent"),
    unread: ("scored", "unsent"),
    vanished: ("stored", "texts"),
    full: ("texts",),
}
_STILL = 2**26  # bytes that any phase may take beside: the heap, and what is imported late


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the phases."""
    args.folder = folder
    found: dict[str, Any] = {}
    for phase, about in PHASES.items():
        if args.phases and phase.__name__ not in args.phases:
            continue
        log = folder / f"{phase.__name__}.log"
        sizes: dict[str, int] = {}

        @contextlib.contextmanager
        def start(
            *options: str,
            folder: Path = folder / phase.__name__,
            environment: Path | None = None,
            log: Path = log,
            about: tuple[str, ...] = about,
            sizes: dict[str, int] = sizes,
            **limits: Any,
        ) -> Iterator[ServerProcess]:
            own = ["--budget", "24", *options]
            if "--memory" not in options:
                own += ["--memory", "24MiB"]
            if args.process_memory:
                own += ["--process-memory", args.process_memory]
            given = {}
            if environment is None:
                own += ["--session-folder", str(folder)]
            else:  # where the server looks by itself
                given = {"XDG_STATE_HOME": str(environment), "TMPDIR": str(environment)}
            with mmkv_serve(None, log, *own, environment=given, **limits) as server:
                parts = stated(server)
                yield server
                sizes["most"], sizes["stated"] = server.peak(), sum(parts.values())
                sizes["stated_parts"] = sum(parts[name] for name in (*about, "cache")) + _STILL

        print(f"{phase.__name__} ...", flush=True)
        found[phase.__name__] = phase(start, args)
        page = found[phase.__name__]
        page["tracebacks"] = log.read_text(errors="replace").count("Traceback")
        page |= sizes
        page["within"] = page["most"] <= page["stated"] and page["rss"] <= page["stated_parts"]
        print(json.dumps(found[phase.__name__]), flush=True)
    return found


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = plain_parser("serving.floods", __doc__)
    parser.add_argument("--phases", nargs="+", choices=[one.__name__ for one in PHASES])
    parser.add_argument("--process-memory", help="of the servers, for example 1280MiB")
    parser.add_argument("--heads", type=int, default=1200, help="heads of a MiB")
    parser.add_argument("--idle", type=int, default=300, help="connections that say nothing")
    parser.add_argument("--descriptors", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=15, help="that they stay")
    parser.add_argument("--body", type=int, default=31, help="MiB of a large body")
    parser.add_argument("--pictures", type=int, default=22, help="that wait")
    parser.add_argument("--viewers", type=int, default=6, help="chats of many pictures at once")
    parser.add_argument("--shown", type=int, default=100, help="pictures of each")
    parser.add_argument("--tokens", type=int, default=1500, help="of a scored reply")
    parser.add_argument("--unread", type=int, default=4, help="streams that nobody reads")
    parser.add_argument("--patience", type=float, default=40, help="seconds with them")
    parser.add_argument("--responses", type=int, default=30, help="stored, without a folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table and write the result file."""
    args = parsed(arguments)
    folder, found = run_in_folder(measure, args)
    del args.folder
    if found is None:
        return 1
    rows = [[name, key, one] for name, page in found.items() for key, one in page.items()]
    table("Floods", ["phase", "", ""], rows)
    print(f"written to {save(args, 'serving-floods', found)}")
    shutil.rmtree(folder)
    beyond = [name for name, page in found.items() if not page["within"]]
    for name in beyond:
        print(f"serving.floods: error: {name} took more memory than the server states")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
