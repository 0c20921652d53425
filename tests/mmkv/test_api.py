"""Chat sessions: turns, batches, stopping, undo, saving."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv import Budget, Engine, Sampling
from mmkv.engine.errors import InputError, MmkvError, SessionError
from mmkv.session import Session
from tests.support.chat_models import picture, save_qwen3_vl, script, watch


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

    def pressing(self: Engine, sessions: Any, tokens: Any) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        logits = decode(self, sessions, tokens)
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


def test_a_saved_conversation_continues_identically(
    engine: Engine, session: Session, tmp_path: Path
) -> None:
    few = Sampling(max_new_tokens=4)
    list(session.send("what?", images=[picture()], system="Hm.", sampling=few))
    session.save(tmp_path / "talk.mmkv")
    with Session.load(engine, tmp_path / "talk.mmkv") as loaded, session.fork() as forked:
        assert loaded.history == session.history == forked.history
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


def test_importing_mmkv_does_not_import_torch() -> None:
    code = "import sys, mmkv, mmkv.cli; print('torch' in sys.modules, mmkv.__version__)"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.split()[0] == "False"
