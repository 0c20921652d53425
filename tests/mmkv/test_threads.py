"""One engine shared by threads: as if each had come alone; sessions in use are refused."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv import Engine, Sampling
from mmkv.engine.errors import SessionError
from mmkv.engine.interrupts import FairLock
from mmkv.session import Session
from tests.support.chat_models import picture, save_qwen3_vl, script
from tests.support.tiers import slow_but

THREADS = 8


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


def opened(folder: Path, backend: str = "native", **settings: Any) -> Engine:
    made = Engine.from_pretrained(
        folder,
        **{
            "policy": "dbtrimkv",
            "gates": "random",
            "budget": 24,
            "dtype": "float32",
            "prefill_chunk": 16,
            "page_size": 8,
            **settings,
        },
    )
    if backend == "torch":
        made.backends.cpu.switch_off()
    elif made.decode_path != "native":
        pytest.skip(f"runs on {made.decode_path}")
    return made


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Let threads take turns between nearly all bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def life(engine: Engine, number: int, folder: Path) -> list[Any]:
    """Lead a few conversations; returns all that they said and kept."""
    few = Sampling(max_new_tokens=4 + number % 3)
    warm = Sampling(max_new_tokens=4, temperature=1.5, top_k=40, seed=number)
    seen: list[Any] = []

    def note(session: Any) -> None:
        seen.append(session.last.token_ids)
        seen.append(session.history[-1]["content"])
        seen.append([[row.tolist() for row in rows] for rows in session.retained()])
        seen.append(session.memory().entries)

    with engine.session(12 + number) as session:
        session.undo_depth = 1
        image = picture(("red", "green", "blue")[number % 3])
        list(session.send(f"what is this, number {number}?", images=[image], sampling=few))
        note(session)
        stream = session.send("and what else, in a few more words?", sampling=few)
        next(stream, None)
        if number % 2:
            stream.close()
        else:
            list(stream)
        note(session)
        path = folder / f"{number}.mmkv"
        session.save(path)
        with session.fork() as fork:
            list(fork.send("go on <|im_end|>", sampling=warm))
            note(fork)
        assert session.undo()
        session.set_budget(10)
        list(session.send("or rather?", sampling=few))
        note(session)
    loaded, _ = engine.load_session(path)
    with loaded:
        list(loaded.send("go on", sampling=few))
        note(loaded)
    talk = [{"role": "user", "content": f"a short question, number {number}"}]
    replies = engine.generate([talk, talk], few)
    seen += [reply.token_ids for reply in replies]
    return seen


@pytest.mark.parametrize("backend", slow_but(["native"], ["native", "torch"], "the other path"))
def test_eight_threads_say_what_they_say_one_after_the_other(
    backend: str, qwen: Path, tmp_path: Path, quick_switches: None
) -> None:
    alone = opened(qwen, backend)
    expected = [life(alone, number, tmp_path) for number in range(THREADS)]
    shared = opened(qwen, backend)  # whose processor is loaded by whoever needs it first
    start = threading.Barrier(THREADS)

    def run(number: int) -> list[Any]:
        torch.set_num_threads(1)
        start.wait()
        return life(shared, number, tmp_path)

    with ThreadPoolExecutor(THREADS) as pool:
        together = list(pool.map(run, range(THREADS)))
    assert together == expected
    shared.cache.check()
    assert shared.cache.pool.free_pages == shared.cache.pool.num_pages


def test_a_lock_goes_to_who_waits_before_it_is_taken_again() -> None:
    lock, order = FairLock(), []

    def other() -> None:
        with lock:
            order.append("other")

    thread = threading.Thread(target=other)
    with lock, lock:
        thread.start()
        while lock._queue.acquire(blocking=False):  # until the other stands in it
            lock._queue.release()
    with lock:
        order.append("again")
    thread.join()
    assert order == ["other", "again"]


# --- sessions in use ---

LONG = "a prompt of more than two chunks of 16 tokens"
FEW = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def engine(qwen: Path) -> Engine:
    return opened(qwen)


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Yield a session; afterwards every page must be back."""
    with engine.session() as made:
        yield made
    engine.cache.check()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def elsewhere(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns in another thread; raises what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(timeout=60)


CHANGES: dict[str, Callable[[Session, Path], Any]] = {
    "send": lambda session, path: session.send("hi"),
    "prefill": lambda session, path: session.prefill({"input_ids": torch.tensor([[5]])}),
    "begin_prefill": lambda session, path: session.begin_prefill(
        {"input_ids": torch.tensor([[5]])}
    ),
    "decode": lambda session, path: session.decode(5),
    "decode_many": lambda session, path: session.engine.decode_many([session], [5], 2),
    "fork": lambda session, path: session.fork(),
    "undo": lambda session, path: session.undo(),
    "save": lambda session, path: session.save(path),
    "set_budget": lambda session, path: session.set_budget(9),
}


def test_an_unfinished_stream_has_its_session_for_itself(session: Session, tmp_path: Path) -> None:
    with session.fork() as undisturbed:
        expected = "".join(undisturbed.send("tell me", sampling=FEW))
        kept = undisturbed.memory().entries
    stream = session.send("tell me", sampling=FEW)
    text = next(stream)
    for name, change in CHANGES.items():
        for where in (lambda call: call(), elsewhere):
            with pytest.raises(SessionError, match="unfinished stream"):
                where(lambda change=change: change(session, tmp_path / "s"))
            assert not (tmp_path / "s").exists(), name
    assert elsewhere(session.memory).entries == session.memory().entries
    text += "".join(stream)
    assert text == expected and session.memory().entries == kept
    assert list(session.send("go on", sampling=FEW)) and next(stream, None) is None


def test_the_session_of_a_call_in_another_thread_is_refused(
    session: Session, tmp_path: Path
) -> None:
    """Between two chunks of its prompt, where the engine is free for others."""
    refused: list[str] = []

    def meanwhile(done: int, total: int) -> None:
        for name, change in CHANGES.items():
            with pytest.raises(SessionError, match="another thread"):
                elsewhere(lambda change=change: change(session, tmp_path / "s"))
            refused.append(name)
        with pytest.raises(SessionError, match="another thread"):
            elsewhere(lambda: next(stream))

    with session.fork() as undisturbed:
        expected = "".join(undisturbed.send(LONG, sampling=FEW))
    stream = session.send(LONG, sampling=FEW, progress=meanwhile)
    assert "".join(stream) == expected
    assert len(refused) >= 2 * len(CHANGES)


def test_others_run_between_chunks_and_between_pieces(engine: Engine, session: Session) -> None:
    def turn() -> str:
        with engine.session() as own:
            return "".join(own.send("hello", sampling=FEW))

    expected, between = turn(), []
    stream = session.send(LONG, sampling=FEW, progress=lambda *_: between.append(elsewhere(turn)))
    for _ in stream:
        between.append(elsewhere(turn))
    assert len(between) > 4 and set(between) == {expected}


def test_of_two_messages_for_one_state_the_second_is_refused(session: Session) -> None:
    first, second = session.send("one", sampling=FEW), session.send("two", sampling=FEW)
    next(first)
    with pytest.raises(SessionError, match="send it again"):
        next(second)
    list(first)
    assert [message["role"] for message in session.history] == ["user", "assistant"]
    list(session.send("three", sampling=FEW))
    late = session.send("four", sampling=FEW)
    session.decode(5)
    with pytest.raises(SessionError, match="send it again"):
        next(late)


@pytest.mark.parametrize("how", ["closed", "closed elsewhere", "dropped", "in a cycle"])
def test_an_abandoned_stream_ends_its_reply(
    how: str, engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, engine, ["abcdef"])
    stream = session.send("?")
    assert [next(stream), next(stream)] == ["a", "b"]
    if how == "closed":
        stream.close()
    elif how == "closed elsewhere":
        elsewhere(stream.close)
    elif how == "in a cycle":
        ring: list[Any] = [stream]
        ring.append(ring)
        del ring
    del stream
    gc.collect()
    assert session.last is not None and session.last.finish_reason == "interrupted"
    assert session.last.memory == session.memory()
    assert session.history[-1]["content"] == "ab"
    script(monkeypatch, engine, ["ok"])
    assert "".join(session.send("go on")) == "ok"


def test_a_session_closed_under_its_stream_stays_closed(engine: Engine) -> None:
    """By another thread, also where a failed prompt would have been taken back."""
    for when in ("piece", "chunk"):
        session = engine.session()
        session.undo_depth = 1
        list(session.send("hello", sampling=FEW))

        def close(*_: int, session: Session = session) -> None:
            elsewhere(session.close)

        stream = session.send(LONG, sampling=FEW, progress=close if when == "chunk" else None)
        with pytest.raises(SessionError, match="closed"):
            for _ in stream:
                close()
        assert session.closed and engine.cache.pool.free_pages == engine.cache.pool.num_pages
        engine.cache.check()


def test_what_is_gone_back_to_competes_with_nobody_from_the_start(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = opened(qwen)
    engine.share(12)
    shared = engine.shared
    assert shared is not None
    lock, leave, before = engine.lock._lock, shared.leave, []

    def watched(session: Any) -> None:
        before.append(lock._is_owned())  # type: ignore[attr-defined]
        leave(session)

    with engine.session() as session:
        session.undo_depth = 1
        monkeypatch.setattr(shared, "leave", watched)
        list(session.send("hi", sampling=FEW))
        assert before == [True]
        taken = session.fork()
        assert session.undo()
        session.put_back(taken)
        assert list(shared._weights) == [session]
