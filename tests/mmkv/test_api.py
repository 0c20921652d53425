"""Chat sessions: turns, batches, stopping, undo, saving; wrong arguments; threads."""

from __future__ import annotations

import gc
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmkv
import mmkv.engine.prefill
from mmkv import Budget, Engine, Sampling
from mmkv.engine.cache import PagePool
from mmkv.engine.errors import BudgetError, InputError, MmkvError, PolicyError, SessionError
from mmkv.engine.interrupts import FairLock
from mmkv.engine.system import free_bytes
from mmkv.prompt.messages import take_media
from mmkv.sampling import distribution
from mmkv.session import Session
from tests.support.chat_models import picture, save_qwen3_vl, script, watch
from tests.support.tiers import long_but


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3_vl(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def engine(qwen: Path) -> Engine:
    return Engine.from_pretrained(qwen, policy="full", dtype="float32", prefill_chunk=16)


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """Yield a session; afterwards every page must be back."""
    free = engine.cache.pool.num_pages - engine.cache.pool.free_pages
    with engine.session() as opened:
        yield opened
    assert engine.cache.pool.num_pages - engine.cache.pool.free_pages == free


def test_a_picture_no_grid_fits_is_refused(engine: Engine, session: Session) -> None:
    with pytest.raises(InputError, match="cannot be processed"):
        session.send("hi", images=[picture("red", (1000, 2))])
    assert session.seen == 0 and session.history == []


def test_turns_hold_exactly_what_the_template_renders(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = ["It is réd.", "", "Two 🙂s"]
    script(monkeypatch, engine, replies)
    fed = watch(monkeypatch)
    turns = [("first?", [picture()]), ("second?", []), ("third?", [picture("blue"), picture()])]
    printed = [
        "".join(session.send(text, images=images, system="Be brief." if not i else None))
        for i, (text, images) in enumerate(turns)
    ]
    assert printed == replies
    processor = engine.processor
    messages = [{"role": "system", "content": "Be brief."}]
    for (text, images), reply in zip(turns, replies, strict=True):
        content = [{"type": "image"} for _ in images] + [{"type": "text", "text": text}]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": reply}]
    whole = processor.tokenizer.apply_chat_template(messages, tokenize=False)
    pictures = [image for _, images in turns for image in images]
    wanted = processor.encode(whole, pictures)["input_ids"][0].tolist()
    # What ends the latest reply comes with the next turn.
    assert fed == wanted[: -len(processor.tokenizer("<|im_end|>\n")["input_ids"])]
    assert session.seen == len(fed)
    assert [m["role"] for m in session.history] == ["system", *["user", "assistant"] * 3]


def test_streaming_batches_and_transformers_agree(engine: Engine, qwen: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    greedy = Sampling(max_new_tokens=12)
    asked = [("what?", [picture("green")]), ("and this one, then?", []), ("two", [picture()] * 2)]
    conversations = [
        [
            {
                "role": "user",
                "content": [{"type": "image", "image": image} for image in images]
                + [{"type": "text", "text": text}],
            }
        ]
        for text, images in asked
    ]
    batch = engine.generate(conversations, greedy)
    model = Qwen3VLForConditionalGeneration.from_pretrained(qwen, dtype=torch.float32)
    for (text, images), conversation, reply in zip(asked, conversations, batch, strict=True):
        with engine.session() as session:
            pieces = list(session.send(text, images=images, sampling=greedy))
            assert session.last is not None and session.last.token_ids == reply.token_ids
        assert "".join(pieces) == reply.text == session.last.text
        inputs = engine.inputs(conversation)
        made = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        theirs = made[0, inputs["input_ids"].shape[1] :].tolist()
        assert theirs[: len(reply.token_ids)] == reply.token_ids
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_a_budget_bounds_each_session_of_a_batch(engine: Engine, qwen: Path) -> None:
    bounded = Engine.from_pretrained(qwen, policy="streamingllm", dtype="float32", prefill_chunk=16)
    talk = [{"role": "user", "content": "a question of a certain length, to pass the budget"}]
    replies = bounded.generate([talk, talk], Sampling(max_new_tokens=5), budget=8)
    for reply in replies:
        assert reply.memory is not None and reply.memory.entries == 8 * 4
        assert reply.memory.evicted == (reply.memory.tokens_seen - 8) * 4
    shares = bounded.generate(talk, Sampling(max_new_tokens=5), budget=Budget.fraction(0.5))
    assert shares[0].memory is not None and shares[0].memory.evicted > 0


def test_stop_strings_end_the_reply_but_stay_in_the_cache(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, engine, ["one STOP two"])
    fed = watch(monkeypatch)
    assert "".join(session.send("?", sampling=Sampling(stop="STOP"))) == "one "
    assert session.last is not None and session.last.finish_reason == "stop"
    assert session.history[-1]["content"] == "one STOP"
    script(monkeypatch, engine, ["ok"])
    list(session.send("again?"))
    text = engine.processor.tokenizer.decode(fed)
    assert "one STOP<|im_end|>\n<|im_start|>user\nagain?" in text


def test_the_length_limit_and_the_next_turn(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, engine, ["abcdefg"])
    fed = watch(monkeypatch)
    assert "".join(session.send("?", sampling=Sampling(max_new_tokens=3))) == "abc"
    assert session.last is not None and session.last.finish_reason == "length"
    script(monkeypatch, engine, ["ok"])
    list(session.send("next?"))
    assert "assistant\nabc<|im_end|>\n<|im_start|>user" in engine.processor.tokenizer.decode(fed)


# --- stopping, taking back, saving ---


def continues_alike(one: Session, other: Session) -> bool:
    """Return whether two sessions have the same retained positions and next logits."""
    same = all(
        torch.equal(a, b)
        for rows, others in zip(one.retained(), other.retained(), strict=True)
        for a, b in zip(rows, others, strict=True)
    )
    return same and torch.equal(one.decode(5), other.decode(5))


def test_closing_the_stream_keeps_the_printed_text(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, engine, ["abcdef"])
    stream = session.send("?")
    assert [next(stream), next(stream)] == ["a", "b"]
    stream.close()
    assert session.last is not None and session.last.finish_reason == "interrupted"
    assert session.history[-1]["content"] == "ab"
    fed = watch(monkeypatch)
    script(monkeypatch, engine, ["ok"])
    list(session.send("go on"))
    assert engine.processor.tokenizer.decode(fed).startswith("b<|im_end|>\n<|im_start|>user\ngo on")


@pytest.mark.parametrize("undo_depth", [0, 2])
def test_ctrl_c_while_the_prompt_is_read_takes_the_turn_back(
    engine: Engine, session: Session, undo_depth: int
) -> None:
    session.undo_depth = undo_depth
    list(session.send("hello", sampling=Sampling(max_new_tokens=2)))
    with session.fork() as reference:
        before = [dict(message) for message in session.history]
        chunks: list[int] = []

        def press(done: int, total: int) -> None:
            chunks.append(done)
            signal.raise_signal(signal.SIGINT)

        stream = session.send("a prompt of more than two chunks of 16 tokens", progress=press)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
        assert chunks[0] == 16 and session.history == before and session.seen == reference.seen
        assert continues_alike(session, reference)


def test_ctrl_c_in_a_step_waits_for_its_end(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Engine.decode
    finished: list[int] = []

    def pressing(self: Engine, sessions: Any, tokens: Any, guesses: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        logits = decode(self, sessions, tokens, guesses)
        finished.extend(tokens)
        return logits

    monkeypatch.setattr(Engine, "decode", pressing)
    script(monkeypatch, engine, ["abc"])
    pieces = []
    with pytest.raises(KeyboardInterrupt):
        for piece in session.send("?"):
            pieces.append(piece)
    assert pieces == ["a"] and len(finished) == 1
    assert session.history[-1]["content"] == "ab" and session.last is not None
    engine.cache.check()


def test_undo_removes_turn_by_turn(engine: Engine, session: Session) -> None:
    session.undo_depth = 2
    few = Sampling(max_new_tokens=4)
    states = []
    for question in ("one", "two", "three"):
        states.append(session.fork())
        list(session.send(question, sampling=few))
    assert session.snapshot_bytes > 0
    for state in (states[2], states[1]):
        assert session.undo() and session.history == state.history
        with session.fork() as copy:
            assert continues_alike(copy, state)
    assert not session.undo()  # only two were kept
    for state in states:
        state.close()
    late = session.fork()  # of a turn that another thread's close() has overtaken
    session.close()
    session._remember(late)
    assert late.closed


def test_a_session_that_is_closed_before_its_pass_begins_holds_nothing(
    engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread may get the engine's lock in between."""
    products = mmkv.engine.prefill.exact_products

    def overtaken(device: torch.device) -> Any:
        session.close()
        return products(device)

    monkeypatch.setattr(mmkv.engine.prefill, "exact_products", overtaken)
    with pytest.raises(SessionError, match="is closed"):
        list(session.send("more words than one chunk has, and then more"))
    engine.cache.check()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


def test_a_saved_conversation_continues_identically(
    engine: Engine, session: Session, tmp_path: Path
) -> None:
    few = Sampling(max_new_tokens=4)
    list(session.send("what?", images=[picture()], system="Hm.", sampling=few))
    session.tell(["A remark."])
    session.save(tmp_path / "talk.mmkv")
    with Session.load(engine, tmp_path / "talk.mmkv") as loaded, session.fork() as forked:
        assert loaded.history == session.history == forked.history
        assert loaded.told == session.told == forked.told
        forked.history[0]["role"] = "tool"  # whoever changes a copy's
        assert session.history[0]["role"] == "system"
        forked.history[0]["role"] = "system"
        texts = ["".join(one.send("go on", sampling=few)) for one in (session, loaded, forked)]
        assert len(set(texts)) == 1 and session.seen == loaded.seen == forked.seen
        assert continues_alike(session, loaded)


@pytest.mark.parametrize("history", ["[1]", "nonsense", '[{"role": "x"}]', '{"a": 1}'])
def test_a_damaged_conversation_in_a_session_file(
    engine: Engine, session: Session, tmp_path: Path, history: str
) -> None:
    from mmkv.engine.sequence import CachedSequence

    list(session.send("what?", sampling=Sampling(max_new_tokens=1)))
    CachedSequence.save(session, tmp_path / "talk.mmkv", {"mmkv.history": history})
    held = engine.cache.pool.num_pages - engine.cache.pool.free_pages
    with pytest.raises(SessionError, match="damaged"):
        Session.load(engine, tmp_path / "talk.mmkv")
    assert engine.cache.pool.num_pages - engine.cache.pool.free_pages == held
    engine.cache.check()


@pytest.mark.parametrize(
    "bad",
    [
        lambda s: s.send(""),
        lambda s: s.send("  \n"),
        lambda s: s.send("hi", images=["/nowhere.png"]),
        lambda s: s.send("hi", videos=["/nowhere.mp4"]),
        lambda s: s.send("hi", system="late"),
        lambda s: s.send([{"type": "audio"}]),
        lambda s: s.send([{"type": "image"}]),
        lambda s: next(s.send("long " * 1000)),
    ],
)
def test_bad_turns_leave_the_session_unchanged(
    engine: Engine, session: Session, bad: Callable[[Session], Any]
) -> None:
    list(session.send("hello", sampling=Sampling(max_new_tokens=2)))
    with session.fork() as reference:
        with pytest.raises(MmkvError) as caught:
            bad(session)
        assert "\n" not in str(caught.value)
        assert session.history == reference.history and continues_alike(session, reference)


@pytest.mark.parametrize(
    "conversation",
    [
        [],
        [{"role": "user", "content": ""}],
        [{"role": "robot", "content": "hi"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "user", "content": [{"type": "image", "url": "/nowhere.png"}]}],
    ],
)
def test_bad_conversations(engine: Engine, conversation: list[Any]) -> None:
    with pytest.raises(InputError):
        engine.generate([conversation])
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


# Arguments of other types and beyond their limits: one sentence, whatever they are.


def test_every_error_of_the_engine_is_exported() -> None:
    from mmkv.engine import errors

    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    ours = {name for name, kind in kinds.items() if issubclass(kind, errors.MmkvError)}
    assert ours == {name for name in mmkv.__all__ if name.endswith("Error")}


@pytest.mark.parametrize("value", [1e308, 1e300, 2.0**62, 1e18])
@pytest.mark.parametrize("kind", ["entries", "bytes"])
def test_huge_budgets_keep_everything(kind: Any, value: float) -> None:
    made = mmkv.Budget.of(mmkv.Budget(kind, value))
    assert 2**31 < made.entries(48, 100, 16, 4096) < 2**62
    assert made.describe()
    with pytest.raises(BudgetError):
        mmkv.Budget.of(f"{'9' * 400}GiB")


@settings(max_examples=60, deadline=None)
@given(
    st.floats(min_value=5e-324, max_value=1e-6, allow_subnormal=True),
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=2, max_size=20),
    st.integers(0, 5),
)
def test_small_temperatures_take_the_likeliest(
    temperature: float, logits: list[float], top_k: int
) -> None:
    made = torch.tensor(logits)
    sampling = mmkv.Sampling(temperature=temperature, top_k=top_k, top_p=0.9)
    probabilities = distribution(made, sampling)
    assert torch.isfinite(probabilities).all()
    assert math.isclose(float(probabilities.sum()), 1.0, rel_tol=1e-5)
    assert made[probabilities > 0].min() >= made.max() - 1e-3


@pytest.mark.parametrize("page_size", [1025, 10_000_000, 2**62])
def test_page_sizes_are_bounded(page_size: int) -> None:
    with pytest.raises(PolicyError, match=r"page_size is .* at most 1,024"):
        mmkv.EngineConfig(page_size=page_size)


def test_a_pool_that_cannot_fit_is_refused_before_it_is_made() -> None:
    pool = PagePool(16, 64, 4)
    before = pool.num_pages, pool.free_pages
    free = free_bytes(torch.device("cpu"))
    assert free is not None and free > 2**20
    for pages in (2 * free // pool.page_bytes, 2**60):
        with pytest.raises(BudgetError, match=r"GiB are free; lower"):
            pool.reserve(pages)
        with pytest.raises(BudgetError, match=r"GiB are free; lower"):
            pool.take(pages)
    assert (pool.num_pages, pool.free_pages) == before
    assert pool.take(3).tolist() == [0, 1, 2]


def test_a_small_limit_of_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmkv.engine.cache.pool.free_bytes", lambda _: 100 * 2**20)
    pool = PagePool(16, 64, 4)
    pool.reserve(60 * 2**20 // pool.page_bytes)
    with pytest.raises(BudgetError, match=r"0\.1 GiB are free"):
        pool.reserve(200 * 2**20 // pool.page_bytes)


def test_a_conversation_is_no_text() -> None:
    for odd in ("hello", b"x", 5, {"role": "user"}):
        with pytest.raises(TypeError, match="list of messages"):
            take_media(odd)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="empty"):
        take_media([])


# One engine shared by threads: as if each had come alone; sessions in use are refused.


THREADS = 8


def opened(folder: Path, backend: str = "native", **settings: Any) -> Engine:
    usual: dict[str, Any] = {"policy": "dbtrimkv", "gates": "random", "budget": 24}
    usual |= {"dtype": "float32", "prefill_chunk": 16, "page_size": 8}
    made = Engine.from_pretrained(folder, **(usual | settings))
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


@pytest.mark.parametrize("backend", long_but(["native"], ["native", "torch"], "the other path"))
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
def threads_engine(qwen: Path) -> Engine:
    return opened(qwen)


@pytest.fixture
def threads_session(threads_engine: Engine) -> Iterator[Session]:
    """Yield a session; afterwards every page must be back."""
    with threads_engine.session() as made:
        yield made
    threads_engine.cache.check()
    assert threads_engine.cache.pool.free_pages == threads_engine.cache.pool.num_pages


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


def test_an_unfinished_stream_has_its_session_for_itself(
    threads_session: Session, tmp_path: Path
) -> None:
    with threads_session.fork() as undisturbed:
        expected = "".join(undisturbed.send("tell me", sampling=FEW))
        kept = undisturbed.memory().entries
    stream = threads_session.send("tell me", sampling=FEW)
    text = next(stream)
    for name, change in CHANGES.items():
        for where in (lambda call: call(), elsewhere):
            with pytest.raises(SessionError, match="unfinished stream"):
                where(lambda change=change: change(threads_session, tmp_path / "s"))
            assert not (tmp_path / "s").exists(), name
    assert elsewhere(threads_session.memory).entries == threads_session.memory().entries
    text += "".join(stream)
    assert text == expected and threads_session.memory().entries == kept
    assert list(threads_session.send("go on", sampling=FEW)) and next(stream, None) is None


def test_the_session_of_a_call_in_another_thread_is_refused(
    threads_session: Session, tmp_path: Path
) -> None:
    """Between two chunks of its prompt, where the engine is free for others."""
    refused: list[str] = []

    def meanwhile(done: int, total: int) -> None:
        for name, change in CHANGES.items():
            with pytest.raises(SessionError, match="another thread"):
                elsewhere(lambda change=change: change(threads_session, tmp_path / "s"))
            refused.append(name)
        with pytest.raises(SessionError, match="another thread"):
            elsewhere(lambda: next(stream))

    with threads_session.fork() as undisturbed:
        expected = "".join(undisturbed.send(LONG, sampling=FEW))
    stream = threads_session.send(LONG, sampling=FEW, progress=meanwhile)
    assert "".join(stream) == expected
    assert len(refused) >= 2 * len(CHANGES)


def test_others_run_between_chunks_and_between_pieces(
    threads_engine: Engine, threads_session: Session
) -> None:
    def turn() -> str:
        with threads_engine.session() as own:
            return "".join(own.send("hello", sampling=FEW))

    expected, between = turn(), []
    stream = threads_session.send(
        LONG, sampling=FEW, progress=lambda *_: between.append(elsewhere(turn))
    )
    for _ in stream:
        between.append(elsewhere(turn))
    assert len(between) > 4 and set(between) == {expected}


def test_of_two_messages_for_one_state_the_second_is_refused(threads_session: Session) -> None:
    first, second = (
        threads_session.send("one", sampling=FEW),
        threads_session.send("two", sampling=FEW),
    )
    next(first)
    with pytest.raises(SessionError, match="send it again"):
        next(second)
    list(first)
    assert [message["role"] for message in threads_session.history] == ["user", "assistant"]
    list(threads_session.send("three", sampling=FEW))
    late = threads_session.send("four", sampling=FEW)
    threads_session.decode(5)
    with pytest.raises(SessionError, match="send it again"):
        next(late)


@pytest.mark.parametrize("how", ["closed", "closed elsewhere", "dropped", "in a cycle"])
def test_an_abandoned_stream_ends_its_reply(
    how: str, threads_engine: Engine, threads_session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, threads_engine, ["abcdef"])
    stream = threads_session.send("?")
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
    assert threads_session.last is not None and threads_session.last.finish_reason == "interrupted"
    assert threads_session.last.memory == threads_session.memory()
    assert threads_session.history[-1]["content"] == "ab"
    script(monkeypatch, threads_engine, ["ok"])
    assert "".join(threads_session.send("go on")) == "ok"


def test_a_session_closed_under_its_stream_stays_closed(threads_engine: Engine) -> None:
    """By another thread, also where a failed prompt would have been taken back."""
    for when in ("piece", "chunk"):
        session = threads_engine.session()
        session.undo_depth = 1
        list(session.send("hello", sampling=FEW))

        def close(*_: int, session: Session = session) -> None:
            elsewhere(session.close)

        stream = session.send(LONG, sampling=FEW, progress=close if when == "chunk" else None)
        with pytest.raises(SessionError, match="closed"):
            for _ in stream:
                close()
        assert (
            session.closed
            and threads_engine.cache.pool.free_pages == threads_engine.cache.pool.num_pages
        )
        threads_engine.cache.check()


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
