"""Start and stop real servers on the loopback, and stream replies from them.

The client notes when the pieces of a reply come.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Self

import httpx
import numpy as np

from benchmarks.bench.child import BenchError
from mmkv.engine.errors import MmkvError
from mmkv.training.measure.record import ROOT

PATIENCE_S = 180


class ServerProcess:
    """A server in a process of its own, with one thread for its tensors; a context manager.

    Args:
        command: after the interpreter; ``{port}`` stands for the port.
        log: a file for what it prints.

    Attributes:
        url: where it answers.

    Raises:
        BenchError: it did not come up.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        with log.open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, *(part.replace("{port}", str(port)) for part in command)],
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | given,
                start_new_session=True,
            )
        self._about = Path(f"/proc/{self.process.pid}")
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise

    def _wait(self) -> None:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if self.process.poll() is not None:
                last = (self.log.read_text(errors="replace").strip().splitlines() or [""])[-1]
                raise BenchError(f"the server ended with {self.process.returncode}: {last[:200]}")
            try:
                if httpx.get(f"{self.url}/health", trust_env=False, timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        raise BenchError(f"the server was not up within {PATIENCE_S} s")

    def cpu_seconds(self) -> float:
        """Return the processor seconds of the server's own process so far; its clock ticks."""
        numbers = (self._about / "stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> int:
        """Return the bytes that are resident in the server's own process."""
        return int((self._about / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak(self) -> int:
        """Return the most bytes that were resident so far."""
        return _peak(self._about)

    def decoders_peak(self) -> int:
        """Return the sum of the most bytes that were resident in each decoding process there is."""
        children = (self._about / "task" / str(self.process.pid) / "children").read_text()
        return sum(_peak(Path(f"/proc/{name}")) for name in children.split())

    def kill(self) -> None:
        """End it as a power cut would."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        """Let it end by itself, and kill it if it does not."""
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _peak(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith("VmHWM:")) * 1024


def mmkv_serve(model: str | None, log: Path, *options: str) -> ServerProcess:
    """Start ``mmkv serve``; None: the bundled model. For the rest see :class:`ServerProcess`."""
    named = [] if model is None else [model]
    command = ["-m", "mmkv", "serve", *named, "--port", "{port}", "--quiet", *options]
    return ServerProcess(command, log)


def transformers_serve(model: str, log: Path, *options: str) -> ServerProcess:
    """Start ``transformers serve`` of the same environment."""
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    command = ["-c", start, "serve", model, "--host", "127.0.0.1", "--port", "{port}"]
    return ServerProcess([*command, "--device", "cpu", *options], log)


def run_in_folder(
    measure: Callable[[argparse.Namespace, Path], Any], args: argparse.Namespace
) -> tuple[Path, Any]:
    """Call ``measure`` with a new folder for models and logs.

    Returns:
        The folder, which stays, and what was found; None where a server failed, which is printed.
    """
    folder = Path(tempfile.mkdtemp(prefix="mmkv-serving-"))
    try:
        return folder, measure(args, folder)
    except (MmkvError, httpx.HTTPError) as error:
        what = str(error) or type(error).__name__
        print(f"serving: error: {what}; logs are in {folder}", file=sys.stderr)
        return folder, None


@dataclass
class Streamed:
    """What came of one chat completion; times are seconds since its request.

    Attributes:
        status: of HTTP; 0: the connection broke. first: until the first piece of text.
        gaps: between two pieces; whole: until the end.
        usage: as the server gave it; error: its error object.
    """

    status: int = 0
    text: str = ""
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self._started = self._latest = time.perf_counter()

    def take(self, line: str) -> None:
        """Read a line of the stream."""
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        text = ""
        for choice in event.get("choices") or ():
            text += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if not text:
            return
        now = time.perf_counter()
        if self.first is None:
            self.first = now - self._started
        else:
            self.gaps.append(now - self._latest)
        self._latest, self.text = now, self.text + text

    def end(self, status: int, refusal: bytes) -> Streamed:
        """Note the end of the stream, or what the server said in its place; returns itself."""
        self.status, self.whole = status, time.perf_counter() - self._started
        if status != 200:
            try:
                self.error = json.loads(refusal)["error"]
            except (ValueError, KeyError, TypeError):
                said = refusal[:200].decode("utf-8", "replace")
                self.error = {"message": said, "code": None}
        return self

    def counts(self) -> tuple[int, int]:
        """Return the tokens of the prompt and of the reply."""
        usage = self.usage or {}
        return usage["prompt_tokens"], usage["completion_tokens"]


async def stream_chat(
    client: httpx.AsyncClient, body: Mapping[str, Any], pause: float = 0
) -> Streamed:
    """Ask for a reply as a stream, and read it to its end, with pauses of so many seconds."""
    found, request = Streamed(), {**body, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
        if answer.status_code != 200:
            return found.end(answer.status_code, await answer.aread())
        async for line in answer.aiter_lines():
            await asyncio.sleep(pause)
            found.take(line)
    return found.end(200, b"")


_WORDS = "what is at row column the red blue green cat frog tree star moon left right two".split()


def words(rng: Random, count: int) -> str:
    """Return a drawn text of ``count`` words that the bundled model's tokenizer knows."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def picture_url(seed: int, size: int = 96) -> str:
    """Return a drawn picture as a data: URL; each seed's is another one."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((size, size), Image.Resampling.NEAREST).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def question(text: str, picture: str | None = None) -> dict[str, Any]:
    """Return a message of the user."""
    if picture is None:
        return {"role": "user", "content": text}
    part = {"type": "image_url", "image_url": {"url": picture}}
    return {"role": "user", "content": [part, {"type": "text", "text": text}]}


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99 of seconds; None where there are none."""
    if not values:
        return None
    low, high = np.quantile(np.asarray(values), [0.5, 0.99])
    return {"p50": float(low), "p99": float(high)}
