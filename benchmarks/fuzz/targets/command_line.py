"""The command line, and Ctrl-C at any bytecode of any public call.

The command line gets options, their values, what is piped in, and closed streams. After a Ctrl-C no
page is lost, and everything goes on.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import importlib.metadata
import io
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import typer.main

from benchmarks.fuzz import mutate
from benchmarks.fuzz.models import SharedModels, save_text_model, small_engine
from benchmarks.fuzz.target import Case, Target, Wrong, as_bytes, as_text
from mmkv.api import Engine
from mmkv.cli.app import run
from mmkv.engine.runtime import Runtime
from mmkv.hf import RetainedCache, retain
from mmkv.resources import asset
from mmkv.sampling import Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, ReplyJob, message
from mmkv.session import Session
from mmkv.turn import Prompt

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
            mock.patch("mmkv.eval.step.copy_bandwidth", lambda *_: 1e9),
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


_SHORT = Sampling(max_new_tokens=3)
_ASKED = [{"role": "user", "content": "What?"}]
_CHUNK = 8
Calls = Callable[["Interrupts"], Callable[[], Any]]


class Interrupts(Target):
    """Presses Ctrl-C where a call has run so many bytecodes, and looks at what is left.

    A case: ``call``, one of :data:`CALLS`; ``at``, how far it has come, as a part of its bytecodes;
    ``shared``, whether sessions share a budget.

    Attributes:
        engine: that the case runs on; alive: what a call leaves with its caller.
        interrupted: how many cases were, so far.
    """

    name = "interrupts"

    def __init__(self) -> None:
        super().__init__()
        self._lengths: dict[str, int] = {}
        self.alive: list[Any] = []
        self.interrupted = 0

    def prepare(self, folder: Path) -> None:
        """Make an engine whose sessions have budgets of their own, and one where they share."""
        from transformers import AutoModelForCausalLM

        super().prepare(folder)
        # A program that a shell starts in the background ignores it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        checkpoint = save_text_model(folder / "model")
        options: dict[str, Any] = {"budget": 12, "page_size": 4, "prefill_chunk": _CHUNK}
        own = Engine.from_pretrained(checkpoint, policy="streamingllm", **options)
        shared = Engine.from_pretrained(
            checkpoint, policy="dbtrimkv", gates="random", **options | {"budget": 30}
        )
        shared.share(30)
        self.engine, self._own, self._shared = own, own, shared
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._wanted = {id(one): _few_logits(one) for one in (own, shared)}
        self.engines = [own, shared]
        own.processor  # noqa: B018 (loaded once, not in a case)
        shared.processor  # noqa: B018
        self.file = folder / "saved.mmkv"
        with self.session() as session:
            session.save(self.file)

    def make(self, rng: Random) -> Case:
        """Return a case."""
        call = rng.choice(sorted(CALLS))
        return {"call": call, "at": rng.random(), "shared": rng.random() < 0.3}

    def run(self, case: Case) -> None:
        """Interrupt the call. Raises Wrong where that does harm."""
        self.engine = self._shared if case["shared"] else self._own
        key = f"{case['call']} {case['shared']}"
        if key not in self._lengths:
            self._lengths[key] = self._interrupted(case["call"], sys.maxsize)[0]
        _, raised = self._interrupted(case["call"], int(case["at"] * self._lengths[key]))
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise Wrong("Ctrl-C is held back for good")
        self.interrupted += raised

    def session(self) -> Session:
        """Open a session with a turn and a reply."""
        session = self.engine.session()
        for _ in session.send("Hello there", sampling=_SHORT):
            pass
        return session

    def _interrupted(self, name: str, at: int) -> tuple[int, bool]:
        """Run a call and interrupt it; its bytecodes, and whether that was felt."""
        self.alive = []
        call = CALLS[name](self)
        watch = _Watch(at)
        raised = False
        try:
            watch.trace(call)
        except KeyboardInterrupt as error:
            raised = True
            _forget(error)
        if watch.pressed and not raised:
            raise Wrong(f"{name}: Ctrl-C at bytecode {at} was swallowed")
        while self.alive:
            _look_at(self.alive.pop(), name)
        call = _nothing
        gc.collect()
        for engine in self.engines:
            _look_at_all(engine, name)
            if not torch.equal(_few_logits(engine), self._wanted[id(engine)]):
                raise Wrong(f"{name}: the engine computes something else now")
        if "generate" in vars(self.model):
            raise Wrong(f"{name}: the model is retained by nobody")
        return watch.count, raised


# What Python does when SIGINT comes: the handler runs where the interpreter looks next. Called from
# Python code, it would run right there, in the function that watches.
_press = ctypes.pythonapi.PyErr_SetInterrupt
_press.argtypes, _press.restype = [ctypes.py_object], None


class _Token:
    pass


class _Watch:
    """Counts bytecodes and presses Ctrl-C at one of them."""

    def __init__(self, at: int) -> None:
        self.at, self.count, self.pressed = at, 0, False
        self._ref: weakref.ref[_Token] | None = None

    def trace(self, call: Callable[[], Any]) -> None:
        """Run ``call``. Raises KeyboardInterrupt when the signal is delivered."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        if self.pressed or _not_ours(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and not self.pressed:
            self.count += 1
            if self.count >= self.at:
                self.pressed = True
                sys.settrace(None)
                dies_on_return = _Token()
                self._ref = weakref.ref(dies_on_return, _press)
        return self._step


@functools.cache
def _not_ours(file: str) -> bool:
    """Whether Ctrl-C in such a file is the same as where it was called: torch's are slow."""
    return "/fuzz/" in file or "/torch/" in file or "importlib" in file


def _forget(error: BaseException | None) -> None:
    """Drop the frames that an error and those before it hold, and what they refer to."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def _nothing() -> None:
    pass


def _few_logits(engine: Runtime) -> torch.Tensor:
    with engine.session() as session:
        session.prefill({"input_ids": torch.arange(5, 25)[None]})
        return session.decode(7).clone()


def _look_at(one: Any, name: str) -> None:
    """Use what a caller still has. Raises Wrong where it is half of something."""
    if isinstance(one, RetainedCache):
        for row in one.rows:
            _look_at(row.session, name)
    elif isinstance(one, Session) and not one.closed:
        _whole(one, name)
        for _ in one.send("Go on", sampling=_SHORT):
            pass
        _whole(one, name)
        one.fork().close()
    elif hasattr(one, "seq") and not one.closed:
        _whole(one, name)
    elif isinstance(one, Scheduler):
        one.close()


def _whole(session: Any, name: str) -> None:
    held = int(session.engine.cache.length[session.seq].sum())
    if session.entries != held:
        raise Wrong(f"{name}: the session counts {session.entries} entries and holds {held}")


def _look_at_all(engine: Runtime, name: str) -> None:
    """Raise Wrong unless every page is free, now that nobody holds a session."""
    with engine.lock:
        engine.cache.check()
        held = engine.cache.pool.num_pages - engine.cache.pool.free_pages
        if held or engine.cache.open_count:
            count = engine.cache.open_count
            raise Wrong(f"{name}: {held} pages and {count} sequences are held by nobody")


def _ids(count: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(3, 3 + count)[None]}


def _of_session(call: Callable[[Session], Any]) -> Calls:
    """Return what opens a session and gives the call of it."""

    def made(world: Interrupts) -> Callable[[], Any]:
        session = world.session()
        world.alive.append(session)
        return lambda: call(session)

    return made


def _read(session: Session, text: str) -> None:
    for _ in session.send(text, sampling=_SHORT):
        pass


def _chunks(session: Session, back: bool) -> None:
    prefill = session.begin_prefill(_ids(20), 7)
    prefill.advance()
    if back:
        prefill.roll_back()
    else:
        while not prefill.advance():
            pass


def _budgeted(world: Interrupts) -> Callable[[], Any]:
    """Open a session whose budget is its own, and give the call that lowers it."""
    session = world._own.session()
    world.alive.append(session)
    return lambda: session.set_budget(6)


def _undone(session: Session) -> None:
    session.undo_depth = 2
    _read(session, "One more thing")
    before = session.fork()
    session.undo()
    session.put_back(before)


def _traced(session: Session) -> None:
    session.trace()
    _read(session, "Shown")


def _two(world: Interrupts) -> Callable[[], Any]:
    sessions = [world.session(), world.session()]
    world.alive += sessions
    return lambda: world.engine.decode(sessions, [5, 6])


def _many(world: Interrupts) -> Callable[[], Any]:
    sessions = [world.session(), world.session()]
    world.alive += sessions
    return lambda: world.engine.decode_many(sessions, [5, 6], 4)


def _trim(world: Interrupts) -> Callable[[], Any]:
    world.alive.append(world.session())
    return world.engine.trim


def _jobs(world: Interrupts) -> tuple[Scheduler, CachedConversation]:
    scheduler = Scheduler(EngineExecutor(world.engine), Limits(quantum=_CHUNK), to_files=True)
    kept = CachedConversation(world.engine, folder=world.folder)
    scheduler.submit(ReplyJob(world.engine, message("Hi"), _SHORT, session=kept))
    scheduler.submit(ReplyJob(world.engine, Prompt(_ids(19)), _SHORT))
    world.alive.append(scheduler)
    return scheduler, kept


def _turns(world: Interrupts) -> Callable[[], Any]:
    def call() -> None:
        scheduler, kept = _jobs(world)
        while scheduler.turn():
            pass
        scheduler.hibernate(kept)
        job = ReplyJob(world.engine, message("On"), _SHORT, session=kept, undo=True)
        ticket = scheduler.submit(job)
        scheduler.turn()
        ticket.cancel()
        scheduler.turn()
        scheduler.close_session(kept)
        scheduler.close()

    return call


def _broken_off(world: Interrupts) -> Callable[[], Any]:
    scheduler, _ = _jobs(world)
    scheduler.turn()
    return scheduler.close


def _retained(world: Interrupts, call: Callable[[RetainedCache], Any]) -> Callable[[], Any]:
    def run() -> None:
        try:
            with retain(world.model, budget=8, page_size=4, policy="streamingllm") as handle:
                cache = RetainedCache()
                call(cache)
                handle.trim()
                _look_at_retained(handle, cache)
        finally:
            made = vars(world.model).get("generate")
            if made is not None:  # it came before the handle could be named
                made.handle.close()

    return run


def _look_at_retained(handle: Any, cache: RetainedCache) -> None:
    handle.memory()
    handle.engine.cache.check()


def _generate(world: Interrupts, cache: RetainedCache | None) -> Any:
    ids = torch.arange(3, 15).view(2, 6)
    given = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    return world.model.generate(ids, pad_token_id=0, **options, **given)


def _copied(world: Interrupts, cache: RetainedCache) -> None:
    _generate(world, cache)
    other = copy.deepcopy(cache)
    other.reset()
    cache.close()


CALLS: dict[str, Calls] = {
    "Engine.session": lambda world: lambda: world.alive.append(world.engine.session()),
    "Engine.generate": lambda world: lambda: world.engine.generate([_ASKED, _ASKED], _SHORT),
    "Engine.load_session": lambda world: (
        lambda: world.alive.append(world._own.load_session(world.file)[0])
    ),
    "Engine.inputs": lambda world: lambda: world.engine.inputs(_ASKED),
    "Engine.decode": _two,
    "Engine.decode_many": _many,
    "Engine.trim": _trim,
    "Session.load": lambda world: lambda: world.alive.append(Session.load(world._own, world.file)),
    "Session.prefill": _of_session(lambda one: one.prefill(_ids(5))),
    "Session.prefill in chunks": _of_session(lambda one: one.prefill(_ids(20))),
    "Session.begin_prefill": _of_session(lambda one: _chunks(one, False)),
    "Prefill.roll_back": _of_session(lambda one: _chunks(one, True)),
    "Session.decode": _of_session(lambda one: one.decode(5)),
    "Session.send": _of_session(lambda one: _read(one, "Hi")),
    "Session.send in chunks": _of_session(lambda one: _read(one, "a long question " * 4)),
    "Session.fork": _of_session(lambda one: one.fork()),
    "Session.fork_apart": _of_session(lambda one: one.fork_apart()),
    "Session.undo": _of_session(_undone),
    "Session.trace": _of_session(_traced),
    "Session.set_budget": _budgeted,
    "Session.save": lambda world: _of_session(lambda one: one.save(world.folder / "new.mmkv"))(
        world
    ),
    "Session.memory": _of_session(lambda one: (one.memory(), one.retained())),
    "Session.close": _of_session(lambda one: one.close()),
    "Scheduler": _turns,
    "Scheduler.close": _broken_off,
    "hf.retain": lambda world: _retained(world, lambda cache: None),
    "hf generate": lambda world: _retained(world, lambda cache: _generate(world, None)),
    "hf generate with a cache": lambda world: _retained(
        world, lambda cache: (_generate(world, cache), _generate(world, cache))
    ),
    "hf cache": lambda world: _retained(world, lambda cache: _copied(world, cache)),
}
