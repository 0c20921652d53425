"""Start and stop real servers on the loopback, and stream chats from them.

The client notes when the pieces of a reply come.
"""

from __future__ import annotations

import argparse
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
    """A server in a process of its own; a context manager that ends it.

    Args:
        command: after the interpreter; ``{port}`` stands for the port.
        threads: of its tensors; log: a file for what it prints.
        descriptors: most files that it may open; None: as many as this process.
        file_blocks: of 512 bytes, the longest file that it may write, as if the disk were full.
        environment: variables beside those of this process.

    Attributes:
        url: where it answers.

    Raises:
        BenchError: it did not come up.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        threads: int = 1,
        descriptors: int | None = None,
        environment: Mapping[str, str] | None = None,
        file_blocks: int | None = None,
    ) -> None:
        port = _free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        given = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
        interpreter = [sys.executable]
        limits = {"n": descriptors, "f": file_blocks}
        wanted = [f"ulimit -{name} {most}" for name, most in limits.items() if most is not None]
        if wanted:
            limited = "; ".join([*wanted, 'exec "$@"'])
            interpreter = ["sh", "-c", limited, "sh", *interpreter]
        with log.open("ab") as said:
            self.process = subprocess.Popen(
                [*interpreter, *(part.replace("{port}", str(port)) for part in command)],
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=os.environ | given | dict(environment or {}),
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
        """Return the processor seconds of the server's own process so far."""
        numbers = (self._about / "stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> int:
        """Return the bytes that are resident in the server's own process."""
        return int((self._about / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak(self) -> int:
        """Return the most bytes that were resident since the peak was last taken back."""
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


def mmkv_serve(
    model: str | None,
    log: Path,
    *options: str,
    threads: int = 1,
    descriptors: int | None = None,
    environment: Mapping[str, str] | None = None,
    file_blocks: int | None = None,
) -> ServerProcess:
    """Start ``mmkv serve``; None: the bundled model. For the rest see :class:`ServerProcess`."""
    named = [] if model is None else [model]
    command = ["-m", "mmkv", "serve", *named, "--port", "{port}", "--quiet", *options]
    return ServerProcess(command, log, threads, descriptors, environment, file_blocks)


def transformers_serve(model: str, log: Path, *options: str, threads: int = 1) -> ServerProcess:
    """Start ``transformers serve`` of the same environment."""
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    command = ["-c", start, "serve", model, "--host", "127.0.0.1", "--port", "{port}"]
    return ServerProcess([*command, "--device", "cpu", *options], log, threads)


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


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


_WORDS = "what is at row column the red blue green cat frog tree star moon left right two".split()


@dataclass
class Streamed:
    """What came of one request; times are seconds since it was sent.

    Attributes:
        status: of HTTP; 0: the connection broke. first: until the first piece of text.
        gaps: between two pieces; usage: as the server gave it; error: its error object.
    """

    status: int = 0
    text: str = ""
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    whole: float = 0.0
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    finish_reason: str | None = None


async def stream_chat(client: httpx.AsyncClient, body: Mapping[str, Any]) -> Streamed:
    """Ask for a reply as a stream, and read it to its end."""
    found, started = Streamed(), time.perf_counter()
    latest = started
    request = {**body, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
        found.status = answer.status_code
        if answer.status_code != 200:
            content = await answer.aread()
            found.error = _error(content)
            found.whole = time.perf_counter() - started
            return found
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                found.error = event["error"]
                break
            found.usage = event.get("usage") or found.usage
            for choice in event.get("choices") or ():
                found.finish_reason = choice.get("finish_reason") or found.finish_reason
                piece = (choice.get("delta") or {}).get("content")
                if not piece:
                    continue
                now = time.perf_counter()
                if found.first is None:
                    found.first = now - started
                else:
                    found.gaps.append(now - latest)
                latest = now
                found.text += piece
    found.whole = time.perf_counter() - started
    return found


def _error(content: bytes) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        made = {"message": content[:200].decode("utf-8", "replace"), "code": None}
    return made


def _peak(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next(int(one.split()[1]) for one in lines if one.startswith("VmHWM:")) * 1024


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


def words(rng: Random, count: int) -> str:
    """Return a drawn text of ``count`` words that the bundled model's tokenizer knows."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def quantiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return p50 and p99 of seconds; None where there are none."""
    if not values:
        return None
    low, high = np.quantile(np.asarray(values), [0.5, 0.99])
    return {"p50": float(low), "p99": float(high)}
