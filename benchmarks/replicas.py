"""Check that sessions stick to their replica of ``mmkv serve``, and outlive it.

``python -m benchmarks.replicas`` starts two replicas on Ray Serve on this machine (extra ray) and
holds 20 sessions of 10 turns with pictures: every turn of a session has to be answered by the
replica that answered its first. Then it kills one replica (SIGKILL), and each session goes on for a
turn. A single server without Ray holds the same sessions. The session files of both have to hold
the same entries, bit for bit, and all replies have to be the same. The program prints a table and
writes JSON; its exit code is 1 where something differs.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import torch
from safetensors import safe_open

from mmkv.resources import asset
from mmkv.training.measure.record import RESULTS, write_results
from mmkv.training.measure.tables import pipe_table

SERVE = ["--policy", "dbtrimkv", "--budget", "8", "--prefill-chunk", "32", "--memory", "256MiB"]


@contextlib.contextmanager
def serving(folder: Path, replicas: int | None = None) -> Iterator[httpx.Client]:
    """Run ``mmkv serve`` until it answers, from all replicas; yield what speaks to it.

    Raises:
        RuntimeError: it has ended.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = ["--keep-sessions"] if replicas is None else ["--replicas", str(replicas)]
    given = [*SERVE, "--port", str(port), "--session-folder", str(folder), *more]
    # One thread, as Ray gives a replica of one processor.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "mmkv", "serve", *given], env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            _wait(client, process, replicas or 1)
            yield client
    finally:
        process.terminate()
        process.wait(120)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], replicas: int) -> None:
    """Wait until all replicas have answered: Ray's proxy hears of one after the other."""
    until, seen = time.monotonic() + 300, set()
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"mmkv serve has ended with exit code {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):
            answer = client.get("/health", headers={"X-Session-Id": f"probe{time.monotonic()}"})
            if answer.status_code == 200:
                seen.add(answer.headers.get("x-mmkv-replica"))
            if len(seen) == replicas:
                return
        time.sleep(0.2)
    raise RuntimeError("mmkv serve does not answer")


def turn(client: httpx.Client, session: int, number: int) -> tuple[str, str]:
    """Hold one turn; return the reply, and which replica gave it."""
    row, column = 1 + (session + number) % 4, 1 + number % 4
    text = {"type": "text", "text": f"what is at row {row}, column {column}?"}
    picture = base64.b64encode(asset("scene.png").read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    content = [image, text] if number % 4 == 0 else [text]
    body = {
        "model": "tiny-vlm",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = _patient(client, f"/v1/sessions/s{session}/chat/completions", session, body)
    said = answer.json()["choices"][0]["message"]["content"]
    return said, answer.headers.get("x-mmkv-replica", "")


def _patient(client: httpx.Client, path: str, session: int, body: Any) -> httpx.Response:
    """Ask again while Ray still sends requests to a replica that is gone.

    Raises:
        RuntimeError: no answer within two minutes.
    """
    until, last = time.monotonic() + 120, ""
    while time.monotonic() < until:
        try:
            answer = client.post(path, json=body, headers={"X-Session-Id": f"s{session}"})
        except httpx.TransportError as error:
            last = str(error)
        else:
            if answer.status_code == 200:
                return answer
            last = answer.text
            if answer.status_code < 500:
                break
        time.sleep(0.5)
    raise RuntimeError(f"{path}: {last}")


def hold(client: httpx.Client, sessions: int, turns: range) -> list[list[tuple[str, str]]]:
    """Hold turns of all sessions, four at a time; return them by session."""

    def one(session: int) -> list[tuple[str, str]]:
        if turns.start == 0:
            _patient(client, "/v1/sessions", session, {})
        return [turn(client, session, number) for number in turns]

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(one, range(sessions)))


def kept(folder: Path, sessions: int) -> list[dict[str, torch.Tensor]]:
    """Read what the session files hold, by session."""
    found = []
    for session in range(sessions):
        (path,) = (folder / ".sessions" / "public").glob(f"s{session}.*.mmkv")
        with safe_open(path, framework="pt") as file:
            found.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def check(sessions: int, turns: int) -> dict[str, Any]:
    """Hold the sessions on two replicas and on one server; return what was found."""
    more = range(turns, turns + 1)
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
        with serving(Path(shared), 2) as client:
            before = hold(client, sessions, range(turns))
            places = [[place for _, place in one] for one in before]
            moved = sum(place != one[0] for one in places for place in one)
            lost = places[0][0]
            os.kill(int(lost.rpartition(":")[2]), signal.SIGKILL)
            after = hold(client, sessions, more)
        with serving(Path(own)) as client:
            wanted = [
                first + second
                for first, second in zip(
                    hold(client, sessions, range(turns)), hold(client, sessions, more), strict=True
                )
            ]
        replies = [
            [said for said, _ in one] == [said for said, _ in first + second]
            for one, first, second in zip(wanted, before, after, strict=True)
        ]
        same = [
            one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
            for one, other in zip(
                kept(Path(shared), sessions), kept(Path(own), sessions), strict=True
            )
        ]
    return {
        "turns": sessions * turns,
        "moved": moved,
        "sessions": sessions,
        "by replica": sorted(Counter(one[0] for one in places).values()),
        "of the replica that was killed": sum(one[0] == lost for one in places),
        "answered by another after that": sum(
            one[0] == lost != second[0][1] for one, second in zip(places, after, strict=True)
        ),
        "with the same entries as one server": sum(same),
        "with the same replies": sum(replies),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas", description=__doc__)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--output", type=Path, default=RESULTS / "replicas.json")
    args = parser.parse_args(arguments)
    found = check(args.sessions, args.turns)
    print(pipe_table(("what", "count"), found.items()))
    write_results(args.output, {"sessions": args.sessions, "turns": args.turns}, found)
    lost = found["of the replica that was killed"]
    good = (
        found["moved"] == 0
        and 0 < lost == found["answered by another after that"]
        and found["with the same entries as one server"] == args.sessions
        and found["with the same replies"] == args.sessions
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
