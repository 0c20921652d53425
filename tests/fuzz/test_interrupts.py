"""Ctrl-C at any bytecode of any public call: no page is lost, what the caller holds is whole, and
the engine computes what it did.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import signal
import sys
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmkv.api import Engine
from mmkv.engine import interrupts
from mmkv.engine.runtime import Runtime
from mmkv.hf import RetainedCache, retain
from mmkv.sampling import Sampling
from mmkv.scheduler import Limits, Scheduler
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import EngineExecutor, Prompt, ReplyJob, message
from mmkv.session import Session
from tests.fuzz.trial import Wrong, examples, trial
from tests.support.chat_models import save_llama
from tests.support.tiers import long_but, one_in

_SHORT = Sampling(max_new_tokens=3)
_ASKED = [{"role": "user", "content": "What?"}]
_CHUNK = 8
Calls = Callable[["World"], Callable[[], Any]]


class World:
    """An engine whose sessions have budgets of their own, one where they share, and a model.

    Attributes:
        engine: that runs the calls; alive: what a call leaves with its caller.
        interrupted: how many calls were, so far.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        checkpoint = save_llama(folder / "model")
        options: dict[str, Any] = {"budget": 12, "page_size": 4, "prefill_chunk": _CHUNK}
        self.own = Engine.from_pretrained(checkpoint, policy="streamingllm", **options)
        self.shared = Engine.from_pretrained(
            checkpoint, policy="dbtrimkv", gates="random", **options | {"budget": 30}
        )
        self.shared.share(30)
        self.engine, self.engines = self.own, (self.own, self.shared)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        self._wanted = {id(one): _few_logits(one) for one in self.engines}
        for one in self.engines:
            one.processor  # noqa: B018 (loaded once, not in a call)
        self._lengths: dict[tuple[str, bool], int] = {}
        self.alive: list[Any] = []
        self.interrupted, self.folder, self.file = 0, folder, folder / "saved.mmkv"
        with self.session() as session:
            session.save(self.file)

    def session(self) -> Session:
        """Open a session with a turn and a reply."""
        session = self.engine.session()
        for _ in session.send("Hello there", sampling=_SHORT):
            pass
        return session

    def interrupt(self, name: str, at: float, shared: bool) -> None:
        """Press Ctrl-C when a call has run the part ``at`` of its bytecodes.

        Raises:
            Wrong: that does harm.
        """
        self.engine = self.shared if shared else self.own
        if (name, shared) not in self._lengths:
            self._lengths[name, shared] = self._pressed(name, sys.maxsize)
        self._pressed(name, int(at * self._lengths[name, shared]))
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            raise Wrong("Ctrl-C is held back for good")

    def _pressed(self, name: str, at: int) -> int:
        """Run a call, interrupt it, and look at what is left; return how many bytecodes it ran."""
        self.alive = []
        call = CALLS[name](self)
        watch, raised = _Watch(at), False
        try:
            watch.trace(call)
        except KeyboardInterrupt as error:
            raised = True
            _forget(error)
        if watch.pressed and not raised:
            raise Wrong(f"{name}: Ctrl-C at bytecode {at} was swallowed")
        while self.alive:
            _look_at(self.alive.pop(), name)
        del call
        gc.collect()
        for engine in self.engines:
            _look_at_all(engine, name)
            if not torch.equal(_few_logits(engine), self._wanted[id(engine)]):
                raise Wrong(f"{name}: the engine computes something else now")
        if "generate" in vars(self.model):
            raise Wrong(f"{name}: the model is retained by nobody")
        self.interrupted += raised
        return watch.count


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
    """Whether Ctrl-C in such a file is the same as where it was called: torch's are slow.

    Python itself swallows what is raised in a callback of a weak reference.
    """
    return any(part in file for part in ("/tests/", "/torch/", "importlib", "weakref"))


def _forget(error: BaseException | None) -> None:
    """Drop the frames that an error and those before it hold, and what they refer to."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


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

    def made(world: World) -> Callable[[], Any]:
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


def _budgeted(world: World) -> Callable[[], Any]:
    """Open a session whose budget is its own, and give the call that lowers it."""
    session = world.own.session()
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


def _two(world: World) -> Callable[[], Any]:
    sessions = [world.session(), world.session()]
    world.alive += sessions
    return lambda: world.engine.decode(sessions, [5, 6])


def _many(world: World) -> Callable[[], Any]:
    sessions = [world.session(), world.session()]
    world.alive += sessions
    return lambda: world.engine.decode_many(sessions, [5, 6], 4)


def _trim(world: World) -> Callable[[], Any]:
    world.alive.append(world.session())
    return world.engine.trim


def _jobs(world: World) -> tuple[Scheduler, CachedConversation]:
    scheduler = Scheduler(EngineExecutor(world.engine), Limits(quantum=_CHUNK), to_files=True)
    kept = CachedConversation(world.engine, folder=world.folder)
    scheduler.submit(ReplyJob(world.engine, message("Hi"), _SHORT, session=kept))
    scheduler.submit(ReplyJob(world.engine, Prompt(_ids(19)), _SHORT))
    world.alive.append(scheduler)
    return scheduler, kept


def _turns(world: World) -> Callable[[], Any]:
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


def _broken_off(world: World) -> Callable[[], Any]:
    scheduler, _ = _jobs(world)
    scheduler.turn()
    return scheduler.close


def _retained(world: World, call: Callable[[RetainedCache], Any]) -> Callable[[], Any]:
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


def _generate(world: World, cache: RetainedCache | None) -> Any:
    ids = torch.arange(3, 15).view(2, 6)
    given = {} if cache is None else {"past_key_values": cache}
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
    return world.model.generate(ids, pad_token_id=0, **options, **given)


def _copied(world: World, cache: RetainedCache) -> None:
    _generate(world, cache)
    other = copy.deepcopy(cache)
    other.reset()
    cache.close()


CALLS: dict[str, Calls] = {
    "Engine.session": lambda world: lambda: world.alive.append(world.engine.session()),
    "Engine.generate": lambda world: lambda: world.engine.generate([_ASKED, _ASKED], _SHORT),
    "Engine.load_session": lambda world: (
        lambda: world.alive.append(world.own.load_session(world.file)[0])
    ),
    "Engine.inputs": lambda world: lambda: world.engine.inputs(_ASKED),
    "Engine.decode": _two,
    "Engine.decode_many": _many,
    "Engine.trim": _trim,
    "Session.load": lambda world: lambda: world.alive.append(Session.load(world.own, world.file)),
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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("interrupts"))


# The others do much of what one of these does.
QUICK = ["Engine.generate", "Engine.load_session", "Engine.decode", "Session.prefill in chunks"]
QUICK += ["Session.send", "Session.fork", "Session.undo", "Session.save", "Scheduler"]
QUICK += ["hf generate with a cache"]


@one_in(2)
@pytest.mark.parametrize("name", long_but(QUICK, sorted(CALLS), "1.7 s each"))
@examples(1)
@given(ahead=st.integers(0, 9_999), shared=st.booleans())
def test_ctrl_c_at_any_bytecode_of_a_public_call(
    world: World, name: str, ahead: int, shared: bool
) -> None:
    # The first that is drawn is 0 and False: each call has a place and an engine of its own.
    own = zlib.crc32(name.encode())
    with trial():
        world.interrupt(name, (own + ahead) % 10_000 / 10_000, shared ^ bool(own & 1))


def test_a_ctrl_c_that_is_lost_would_be_found(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.interrupt("Session.decode", 0.5, shared=False)
    assert world.interrupted
    monkeypatch.setattr(interrupts, "_deliver", lambda: None)
    with pytest.raises(Wrong, match="was swallowed"):
        world.interrupt("Session.decode", 0.5, shared=False)
