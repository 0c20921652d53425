"""The command line: every command with odd options, odd text on stdin, streams that are closed."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import typer.main
from hypothesis import given
from hypothesis import strategies as st

from mmkv.cli.app import run
from mmkv.resources import asset
from tests.fuzz.strategies import numbers, texts
from tests.fuzz.trial import Wrong, examples, trial
from tests.support.chat_models import save_qwen3_vl

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
MODEL = "MODEL"  # stands for the checkpoint
_PATHS = (MODEL, str(asset("scene.png")), "..", "x", "notes.txt")
_STARTS: dict[str, list[str]] = {
    "chat": ["--max-new-tokens", "2"],
    "bench": [MODEL, "--rounds", "1", "--steps", "1", "--context", "8"],
    "mmdu": ["--model", MODEL, "--limit", "1", "--max-new-tokens", "2"],
    "eval": ["--tasks", "mme"],
    "distill": [
        *("--model", MODEL, "--data", str(asset("mmdu/benchmark.json"))),
        *("--output", "gates", "--steps", "1"),
    ],
}
_odd = st.sampled_from(_VALUES) | st.sampled_from(_PATHS) | texts | numbers.map(str)


@st.composite
def _arguments(draw: st.DrawFn) -> list[str]:
    command = draw(st.sampled_from(("chat", "chat", "chat", *sorted(_OPTIONS))))
    argv = [command, *_STARTS.get(command, ())]
    if command == "chat":
        argv.append(draw(st.sampled_from([MODEL] * 9) | _odd))
        argv += draw(st.sampled_from(([], ["-p", "what?"], ["-p", "what?"])))
    for name in draw(st.lists(st.sampled_from(_OPTIONS[command] or _FLAGS), max_size=2)):
        argv += [name, draw(_odd)]
    if command == "chat" and draw(st.integers(0, 3)) == 0:
        argv.append("-i")
    argv += draw(st.lists(st.sampled_from(_FLAGS), max_size=1))
    return argv if draw(st.integers(0, 9)) else draw(st.permutations(argv))


_lines = st.lists(st.sampled_from(_LINES), max_size=5).map("\n".join)
_STREAMS = ("open",) * 12 + ("no stdin", "no stdout", "broken stdout")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_qwen3_vl(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Start no training, no program and no measurement, and make commands once."""
    nothing: Any = SimpleNamespace(run=lambda *given, **_: subprocess.CompletedProcess(given, 1))
    known = functools.cache(typer.main.get_command)
    entry_points = functools.cache(importlib.metadata.entry_points)
    with (
        mock.patch("mmkv.training.run.distill", lambda *_, **__: {"results": None}),
        mock.patch("mmkv.eval.lmms.command.subprocess", nothing),
        mock.patch("mmkv.eval.step.copy_bandwidth", lambda *_: 1e9),
        mock.patch("os.dup2"),
        mock.patch("typer.main.get_command", known),
        mock.patch("mmkv.engine.registry.entry_points", entry_points),
    ):
        yield


@pytest.mark.usefixtures("loaded_once", "quick")
@examples(12)
@given(
    argv=_arguments(),
    lines=_lines,
    other=st.none() | texts,
    streams=st.sampled_from(_STREAMS),
)
def test_command_line(
    model: str, argv: list[str], lines: str, other: str | None, streams: str
) -> None:
    talks = "-i" in argv or "--interactive" in argv
    stdin = lines if talks or other is None else other
    content = io.BytesIO(stdin.encode("utf-8", "surrogatepass"))
    given: Any = io.TextIOWrapper(content, encoding="utf-8")
    stdout: Any = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    given = None if streams == "no stdin" else given
    if streams == "no stdout":
        stdout = None
    elif streams == "broken stdout":
        stdout = io.TextIOWrapper(_Broken(), encoding="utf-8")
    with trial(), mock.patch.multiple(sys, stdin=given, stdout=stdout, stderr=stderr):
        code = run([_argument(model if each == MODEL else each) for each in argv])
        stderr.flush()
    said = stderr.buffer.getvalue().decode()
    if code not in (0, 1, 2, 130):
        raise Wrong(f"exit code {code}")
    if "Traceback" in said:
        raise Wrong(said)
    if code and code != 130 and streams == "open" and not said.strip():
        raise Wrong(f"exit code {code} without a word on stderr")


def _argument(text: str) -> str:
    """Return an argument as the system hands it over: bytes that end at a NUL."""
    given = text.split("\0")[0].encode("utf-8", "surrogatepass")
    return given.decode("utf-8", "surrogateescape")


class _Broken(io.RawIOBase):
    """A pipe whose reader has gone."""

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        return 1
