"""``make first-hour``: what somebody with a GPU runs first, and sends in.

Steps run one after the other, each in a process of its own, since a fault leaves a card unusable to
the process that made it. None stops the others. A step prints a verdict, what it found and what is
expected; all of it, with the machine, the benchmarks' figures and the end of each step's output,
stands in one file, which is written anew after every step. Expected times are of one H100 and no
more than counted.

``--fake`` runs the steps on the fake card of the tests, to try this program without a GPU; times
mean nothing there. ``--only NAME`` is a part of them. To add a step, write a function with
``@check``: it returns a few words, and what it raises is its failure; then name it, or a command,
in :func:`steps`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "assets" / "tiny-vlm"
PATIENCE = 480  # seconds of a step
TAIL = 3000  # characters of its output that are kept


@dataclass(frozen=True)
class Step:
    """A step: ``command`` are the arguments of Python, or ``check`` runs in a process of its own.

    Attributes:
        expected: what a sound machine gives; needs: a program that it cannot do without.
    """

    name: str
    expected: str
    command: Sequence[str] = ()
    check: Callable[[], str] | None = field(default=None, repr=False)
    needs: str = ""


CHECKS: dict[str, Step] = {}


def check(name: str, expected: str) -> Callable[[Callable[[], str]], Step]:
    """Make a function a step."""

    def added(function: Callable[[], str]) -> Step:
        CHECKS[name] = Step(name, expected, check=function)
        return CHECKS[name]

    return added


def require(holds: bool, why: str) -> None:
    """Raise AssertionError where something does not hold."""
    if not holds:
        raise AssertionError(why)


@check("the machine", "compute capability 8.0 or more")
def the_machine() -> str:
    import torch

    major, minor = torch.cuda.get_device_capability()
    name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1] / 2**30
    asked = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    clocks = "no nvidia-smi"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        clocks = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    require(major >= 8, f"{name} has compute capability {major}.{minor}")
    return f"{name}, {major}.{minor}, {memory:.0f} GiB; {asked}: {clocks}"


def _engine(device: str = "cuda", **options: Any) -> Any:
    from mmkv import Engine

    return Engine.from_pretrained(MODEL, device=device, **({"dtype": "float32"} | options))


def _prompted(engine: Any, count: int = 1, tokens: int = 60) -> list[Any]:
    import torch

    from mmkv.engine.runtime import Runtime

    source = torch.Generator().manual_seed(0)
    made = [Runtime.session(engine) for _ in range(count)]
    for session in made:
        ids = torch.randint(3, 120, (1, tokens), generator=source)
        session.prefill({"input_ids": ids})
    return made


@check("a graph beside single steps of torch", "no differing token in 64, logits within 1e-3")
def graph_beside_torch() -> str:
    engines = [_engine(budget=24) for _ in range(2)]
    (one,), (two,) = (_prompted(engine) for engine in engines)
    require(engines[0].decode_path == "CUDA graph", engines[0].decode_path)
    engines[1].backends.cuda.off = True
    require(engines[1].decode_path.startswith("torch"), engines[1].decode_path)
    token, apart = 5, 0.0
    for step in range(64):
        mine, theirs = (each.engine.decode([each], [token])[0] for each in (one, two))
        apart = max(apart, float((mine - theirs).abs().max() / theirs.abs().max()))
        token = int(theirs.argmax())
        require(int(mine.argmax()) == token, f"token {step} differs; logits by {apart:.1e}")
    require(apart < 1e-3, f"logits differ by {apart:.1e}")
    return f"64 tokens alike, logits within {apart:.1e}"


@check("chat beside the CPU", "the same words")
def chat_beside_the_cpu() -> str:
    from mmkv import Sampling

    said = []
    for device in ("cuda", "cpu"):
        session, picture = _engine(device, budget=64).session(), str(ROOT / "assets" / "scene.png")
        question = "What is in the picture?"
        sampling = Sampling(temperature=0, max_new_tokens=24)
        said.append("".join(session.send(question, [picture], sampling=sampling)))
    require(said[0] == said[1], f"{said[0]!r} for {said[1]!r}")
    return repr(said[0])


@check("time to the first token, nothing compiled", "under 60 s; then under 2 s")
def first_token() -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        engine, times = _engine(budget=24), []
        for _ in range(2):
            started = time.perf_counter()
            engine.decode_many(_prompted(engine), [5], 16)
            times.append(time.perf_counter() - started)
        files = len(list(Path(folder).glob("*")))
    return f"{times[0]:.1f} s with {files} compiled files, then {times[1]:.2f} s"


@check("a profile of a burst", "300 launches a step, 90 % of the time busy")
def profile() -> str:
    import torch
    from torch.profiler import ProfilerActivity

    if _fake():  # torch's profiler ends the process there
        return "nothing to see"
    engine, steps = _shaped("qwen3-vl-2b"), 16
    sessions = _prompted(engine)
    engine.decode_many(sessions, [5], steps)
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as seen:
        started = time.perf_counter()
        engine.decode_many(sessions, [6], steps)
        torch.cuda.synchronize()
        taken = time.perf_counter() - started
    events = [each for each in seen.events() if each.device_type.name == "CUDA"]
    if not events:
        return "the profiler saw no kernels"
    busy = sum(each.device_time for each in events) / 1e6
    return f"{len(events) / steps:.0f} launches a step, {busy / taken:.0%} busy"


def _shaped(shape: str, **sizes: Any) -> Any:
    """Return an engine with random weights; on the fake card a small one."""
    from dataclasses import replace

    import torch

    from benchmarks.bench.shapes import SHAPES, build_engine

    made = replace(SHAPES["tiny" if _fake() else shape], **sizes)
    return build_engine(made, device="cuda", dtype=torch.bfloat16)


@check("heads of 256", "two chunks, a second turn and a burst, all numbers finite")
def heads_of_256() -> str:
    import torch

    engine = _shaped("qwen3-vl-2b", head_dim=256, layers=4)
    (session,) = _prompted(engine, tokens=1500)
    logits = session.prefill({"input_ids": torch.arange(40)[None] + 3})
    require(bool(logits.isfinite().all()), "logits are not finite")
    said = engine.decode_many([session], [5], 32)
    return f"{len(said[0])} tokens, {session.entries} entries"


@check("every policy, 64 tokens in a graph", "all of them")
def every_policy() -> str:
    from mmkv.engine.errors import PolicyError
    from mmkv.engine.policies import PRESETS

    good, bad, left = [], [], []
    for name in PRESETS:
        try:
            engine = _engine(policy=name, gates="random", budget=24)
            require(engine.many_path == "graph", engine.many_path)
            engine.decode_many(_prompted(engine, 2), [5, 6], 64)
            good.append(name)
        except PolicyError:
            left.append(name)  # not for this model
        except Exception as error:
            bad.append(f"{name}: {type(error).__name__} {str(error)[:80]}")
    require(not bad, "; ".join(bad))
    return f"{len(good)} of {len(good)}; not for this model: {', '.join(left) or 'none'}"


@check("with a stop string and without", "at most 1.3 times as long")
def stop_string() -> str:
    from mmkv import Sampling

    engine, times = _engine(budget=64, policy="streamingllm"), []
    for stop in ((), ("zebra crossing",)):
        sampling = Sampling(temperature=0.7, seed=1, max_new_tokens=96, stop=stop)
        for timed in (False, True):
            started, session = time.perf_counter(), engine.session()
            list(session.send("Tell me all that you know about cats.", sampling=sampling))
            if timed:
                tokens = len(session.last.token_ids)
                times.append((time.perf_counter() - started) / max(tokens, 1))
    ratio = times[1] / times[0]
    if not _fake():
        require(ratio < 1.3, f"{ratio:.2f} times as long")
    return f"{1e3 * times[0]:.2f} and {1e3 * times[1]:.2f} ms a token, {ratio:.2f} times"


@check("16 clients that join one by one", "16 answers, no errors")
def clients() -> str:
    from tests.support.servers import serving

    count, answers = 4 if _fake() else 16, list[Any]()
    with serving(lambda: _engine(budget=32)) as server:
        ask = lambda at: answers.append(server.chat(f"How many are {at}?", max_tokens=24))  # noqa: E731
        threads = [threading.Thread(target=ask, args=(at,)) for at in range(count)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        taken = time.perf_counter() - started
    codes = sorted({answer.status_code for answer in answers})
    require(len(answers) == count and codes == [200], f"{len(answers)} answers, codes {codes}")
    return f"{count} answers in {taken:.1f} s"


@check("20 steps of distill on two cards", "the loss of one card")
def two_cards() -> str:
    import torch

    if torch.cuda.device_count() < 2:
        return "one card here"
    torchrun = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*torchrun, *DISTILL, "--output", folder], check=True, cwd=ROOT)
    return "it ran"


DISTILL = ["-m", "mmkv", "distill", "--model", str(MODEL), "--data", "scenes:dense"]
DISTILL += "--steps 20 --log-every 10 --budget 24 --d-gate 48".split()
TESTS = "-m pytest -p no:cacheprovider".split()


def _tests(*files: str) -> list[str]:
    return [*TESTS, *files, "-m", "not long"]


def steps(folder: Path) -> list[Step]:
    """Return all steps, in their order; programs write to ``folder``."""

    def kernels(name: str, *ideas: str) -> Step:
        files = [f"tests/engine/backends/test_kernels_{idea}.py" for idea in ideas]
        return Step(f"kernels: {name}", "all pass", _tests(*files))

    few = ["-k", "triton and (ties or long_row or gaps or idle)"]  # a sanitizer is slow
    watched = [*kernels("", "attention", "evict").command, *few]
    output = ["--output", str(folder)]
    tiny = "--shape tiny --cases tiny --device cpu --dtype float32"  # of programs of their own
    asked = tiny if _fake() else "--shape qwen3-vl-8b"
    cases = asked if _fake() else f"{asked} --cases 1:4096:256 16:4096:256 --rounds 3"
    decode = f"-m benchmarks.bench.decode {cases} --no-eager --no-parts --peers"
    trained = ["tests/training/test_capacity.py", "tests/training/test_gated_attention.py"]
    return [
        the_machine,
        kernels("pointwise and store", "pointwise", "store"),
        kernels("attention", "attention"),
        kernels("eviction", "evict"),
        kernels("windows and products", "window", "product"),
        kernels("linear layers and write gates", "delta", "write_gated"),
        Step("memory", "no errors", watched, needs="compute-sanitizer memcheck"),
        Step("races", "no errors", watched, needs="compute-sanitizer racecheck"),
        graph_beside_torch,
        chat_beside_the_cpu,
        first_token,
        Step(
            "kernels' share of the bandwidth",
            "over half of it for attention",
            [*f"-m benchmarks.bench.kernels {asked}".split(), *output],
        ),
        Step(
            "a decode step at 8B",
            "6.3 to 7.2 ms at B = 1, 7.0 to 7.8 at B = 16",
            [*decode.split(), *output],
        ),
        profile,
        heads_of_256,
        every_policy,
        stop_string,
        clients,
        Step("the engine beside the CPU", "all pass", _tests("tests/gpu/test_engine.py")),
        Step("the roads to it", "all pass", _tests("tests/gpu/test_roads.py")),
        Step("capacity and gated attention", "all pass", _tests(*trained)),
        Step("20 steps of distill", "a falling loss", [*DISTILL, *output]),
        two_cards,
    ]


def _fake() -> bool:
    return bool(os.environ.get("MMKV_FAKE_CARD"))


@contextlib.contextmanager
def _card() -> Iterator[None]:
    if not _fake():
        yield
        return
    from tests.support.fake_cuda import fake_cuda

    with fake_cuda():
        yield


def run(step: Step) -> dict[str, Any]:
    """Run a step and return its verdict, what it found and the end of its output."""
    program, *options = step.needs.split() if step.needs else [""]
    if program and not shutil.which(program):
        return {"verdict": "left out", "found": f"{program} is not installed", "seconds": 0.0}
    before = [program, "--tool", *options] if program else []
    command = [*before, sys.executable, *step.command]
    if step.check is not None:
        command = [sys.executable, "-m", "tools.first_hour", "--step", step.name]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=PATIENCE,
        )
        code, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, said = 124, (error.stdout or b"").decode(errors="replace")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    passed = re.findall(r"^.*\d+ (?:passed|failed).*$", said, re.MULTILINE)
    found = (passed or lines or ["nothing"])[-1].strip("= ")
    verdict = {0: "good", 124: f"not over after {PATIENCE} s"}.get(code, "FAILED")
    seconds = round(time.perf_counter() - started, 1)
    return {"verdict": verdict, "found": found, "seconds": seconds, "output": said[-TAIL:]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all steps, or those that are named; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tools.first_hour")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "first-hour")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="parts of names")
    parser.add_argument("--fake", action="store_true", help="on the fake card of the tests")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.step is not None:
        with _card():
            made = CHECKS[args.step].check
            assert made is not None
            print(made())
        return 0
    if args.fake:
        os.environ["MMKV_FAKE_CARD"] = "1"
    import torch

    from mmkv.training.measure.record import machine, require_output, versions

    if not (args.fake or torch.cuda.is_available()):
        parser.error("torch finds no GPU here; --fake tries this program without one")

    require_output(args.output)
    target = args.output / "report.json"
    chosen = [
        step
        for step in steps(args.output)
        if not args.only or any(part in step.name for part in args.only)
    ]
    report: dict[str, Any] = {"command": "make first-hour", "fake": args.fake, "steps": {}}
    report |= {"machine": machine(), "versions": versions()}
    for step in chosen:
        made = run(step)
        report["steps"][step.name] = made | {"expected": step.expected}
        files = args.output.glob("gpu-*.json")  # of the benchmarks
        report["figures"] = {path.stem: json.loads(path.read_text()) for path in files}
        target.write_text(json.dumps(report, indent=1) + "\n")
        print(f"{made['verdict']:8} {step.name} ({made['seconds']} s): {made['found']}", flush=True)
        print(f"{'':9}expected: {step.expected}", flush=True)
    verdicts = [made["verdict"] for made in report["steps"].values()]
    good = verdicts.count("good")
    print(f"{good} of {len(verdicts)} good; send in {target}")
    return int(any(verdict not in ("good", "left out") for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
