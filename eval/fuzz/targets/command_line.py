"""The command line: options, their values, what is piped in, and closed streams."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import typer.main

from mmkv.cli.app import run
from mmkv.eval.fuzz import mutate
from mmkv.eval.fuzz.models import SharedModels, small_engine
from mmkv.eval.fuzz.target import Case, Target, Wrong, as_bytes, as_text
from mmkv.resources import asset

_ENGINE = (
    "--budget --budget-bytes --budget-fraction --policy --lookahead --evict-every --prefill-chunk "
    "--page-size --gates --device --dtype"
).split()
_OPTIONS: dict[str, list[str]] = {
    "chat": [
        *_ENGINE,
        *(
            "-p --system --image --video --fps --num-frames --min-pixels --max-pixels "
            "--max-new-tokens --temperature --top-p --top-k --seed --stop"
        ).split(),
    ],
    "mmdu": [*_ENGINE, *"--data --images --limit --output --max-new-tokens --system".split()],
    "bench": [*_ENGINE, *"--batch --context --steps --rounds".split()],
    "eval": (
        "--tasks --model --data --output --limit --batch-size --gen-kwargs --budget --policy "
        "--gates --device --dtype --model-args"
    ).split(),
    "distill": (
        "--model --data --output --eval-data --eval-samples --max-length --long-chats --media-root "
        "--recipe --method --gating --gate --d-gate --tying --gate-input --bias --loss --scope "
        "--budget --lambda-cap --normaliser --capacity-rates --window --lambda-sparse --threshold "
        "--steps --batch --accumulate --lr --schedule --warmup --weight-decay --clip --dtype "
        "--device --seed --log-every --save-every --eval-every --held-out-budget --threads --store"
    ).split(),
    "policies": [],
    "env": [],
}
_FLAGS = "--json --quiet -q --no-stream -i --interactive --help --version --resume --bogus".split()
_VALUES = (
    "0 1 -1 2 16 64 0.5 1e-40 1e308 inf nan -inf 10000000 99999999999999999999 25% 64MiB 1e3 "
    "auto cpu cuda cuda:9 mps float32 bfloat16 float128 random none dbtrimkv snapkv trimkv wgkv "
    "streamingllm:sink=2 snapkv:window=-1 full nope , = a=b a=b,c=d"
).split()
_LINES = (
    "hello",
    "/help",
    "/stats",
    "/undo",
    "/clear",
    "/set temperature 1e-40",
    "/set top_k x",
    "/budget 1e308",
    "/budget 5%",
    "/image x",
    "/image -",
    "/save",
    "/save /",
    "/load x",
    "/load ~nobody/x",
    "/fork a",
    "/fork main",
    "/system be short",
    "//x",
    '"""',
    "\\",
    "/nope",
)


class CommandLine(Target):
    """Arguments of every command, with odd values; text, bytes or slash commands on stdin."""

    name = "command line"

    def prepare(self, folder: Path) -> None:
        super().prepare(folder)
        self._model = str(folder / "model")
        small_engine(folder / "model")
        self._shared = SharedModels()
        # Made anew for every input, these would take longer than all else.
        self._command = functools.cache(typer.main.get_command)
        self._entry_points = functools.cache(importlib.metadata.entry_points)
        self._paths = [self._model, str(asset("scene.png")), str(folder), "x", "notes.txt"]

    def make(self, rng: Random) -> Case:
        command = rng.choice(("chat", "chat", "chat", *sorted(_OPTIONS)))
        argv = [command]
        if command == "chat":
            argv += [self._model] if rng.random() < 0.9 else [self._value(rng)]
            if rng.random() < 0.7:
                argv += ["-p", "what?"]
        elif command == "bench":
            argv += [self._model, "--rounds", "1", "--steps", "1", "--context", "8"]
        elif command == "mmdu":
            argv += ["--model", self._model, "--limit", "1"]
        elif command == "eval":
            argv += ["--tasks", "mme"]
        elif command == "distill":
            argv += ["--model", self._model, "--data", str(asset("mmdu/benchmark.json"))]
            argv += ["--output", str(self.folder / "gates"), "--steps", "1"]
        if command in ("chat", "mmdu"):
            argv += ["--max-new-tokens", "2"]
        for _ in range(rng.randrange(3)):
            name = rng.choice(_OPTIONS[command] or _FLAGS)
            argv += [name, self._value(rng)]
        if rng.random() < 0.2:
            argv.append(rng.choice(_FLAGS))
        if rng.random() < 0.1:
            rng.shuffle(argv)
        lines = "\n".join(rng.choice(_LINES) for _ in range(rng.randrange(6))).encode()
        stdin = lines if rng.random() < 0.8 else mutate.text(rng).encode("utf-8", "surrogatepass")
        if "-i" in argv or "--interactive" in argv:
            stdin = lines
        streams = rng.choice(("open",) * 12 + ("no stdin", "no stdout", "broken stdout"))
        return {"argv": argv, "stdin": as_text(stdin), "streams": streams}

    def _value(self, rng: Random) -> str:
        what = rng.random()
        if what < 0.5:
            return rng.choice(_VALUES)
        if what < 0.7:
            return rng.choice(self._paths)
        return mutate.text(rng) if what < 0.95 else str(mutate.number(rng))

    def run(self, case: Case) -> None:
        # The operating system ends arguments at a NUL byte, and reads them as bytes.
        argv = [_argument(text) for text in case["argv"]]
        stdin: Any = io.TextIOWrapper(io.BytesIO(as_bytes(case["stdin"])), encoding="utf-8")
        stdout: Any = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
        stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        if case["streams"] == "no stdin":
            stdin = None
        elif case["streams"] == "no stdout":
            stdout = None
        elif case["streams"] == "broken stdout":
            stdout = io.TextIOWrapper(_Broken(), encoding="utf-8")
        with (
            mock.patch.multiple(sys, stdin=stdin, stdout=stdout, stderr=stderr),
            mock.patch("mmkv.training.run.distill", _trained),
            mock.patch("mmkv.eval.lmms.command.subprocess", SimpleNamespace(run=_ended)),
            mock.patch("mmkv.eval.measure.timing.copy_bandwidth", lambda *_: 1e9),
            mock.patch("os.dup2"),
            mock.patch("typer.main.get_command", self._command),
            mock.patch("mmkv.engine.registry.entry_points", self._entry_points),
            self._shared,
        ):
            code = run(argv)
        stderr.flush()
        said = stderr.buffer.getvalue().decode()
        if code not in (0, 1, 2, 130):
            raise Wrong(f"exit code {code}")
        if "Traceback" in said:
            raise Wrong(said)
        if code and code != 130 and case["streams"] == "open" and not said.strip():
            raise Wrong(f"exit code {code} without a word on stderr")


class _Broken(io.RawIOBase):
    """A pipe whose reader has gone."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        return 1


def _argument(text: str) -> str:
    given = text.split("\0")[0].encode("utf-8", "surrogatepass")
    return given.decode("utf-8", "surrogateescape")


def _trained(*arguments: Any, **options: Any) -> dict[str, Any]:
    return {"results": None}


def _ended(*arguments: Any, **options: Any) -> Any:
    return subprocess.CompletedProcess(arguments, 1)
