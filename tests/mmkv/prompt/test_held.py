"""A session's prompt after several turns beside a fresh rendering of them all."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from mmkv import Engine, Sampling, Session
from mmkv.engine.errors import ContextError, InputError
from mmkv.engine.read_ids import with_ids
from mmkv.prompt.held import Held, Piece, Place, Read
from mmkv.prompt.template import REWRITES, ChatTemplate
from mmkv.scheduler.conversation import CachedConversation
from mmkv.scheduler.replies import ReplyJob, message
from tests.support.chat_models import (
    CHATML,
    picture,
    save_internvl,
    save_llama,
    save_llava,
    save_llava_onevision,
    save_mistral3,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_smolvlm,
    script,
)
from tests.support.theirs import processor_of
from tests.support.tiers import one_in

# What templates of published models do with earlier turns, shortened.
THOUGHTS = (
    "{%- set ns = namespace(last=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set text = m.content if m.content is string else m.content[-1].text %}"
    "{% if m.content is not string %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif p.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}"
    "{{ text.split('</think>')[-1].lstrip('\n') }}{% else %}{{ text }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENED = THOUGHTS.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
)
TRIMMED = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
# As Mistral's: the system's message stands in the last user's.
MOVING = (
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}[{{ s + '|' if loop.last else '' }}{{ m.content }}]"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
COUNTED = "{% for m in messages %}({{ messages | length }}){{ m.content }};{% endfor %}"
LATEST = "{{ messages[-1].content }}"
REWRITING = {
    "thoughts": THOUGHTS,
    "opened thoughts": OPENED,
    "trimmed": TRIMMED,
    "moving": MOVING,
    "counted": COUNTED,
    "latest": LATEST,
}
TALK = [
    ("hello", "<think>\nwell, well\n</think>\n\n hi "),
    ("and now?", "<think>x</think>y"),
    ("so?", "z"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(llama: Path) -> Engine:
    return Engine.from_pretrained(llama, policy="full", dtype="float32")


def with_template(engine: Engine, source: str, parts: bool = False) -> None:
    processor = engine.processor
    more = [token for token in (processor.image_token, processor.video_token) if token]
    processor.template = ChatTemplate(processor.tokenizer, source, parts, tokens=more)


def held_ids(session: Session) -> list[int]:
    """The tokens that the session says it holds; its length says whether that is so."""
    assert session.held.pieces is not None
    ids = [token for piece in session.held.pieces for token in piece.ids or ()]
    assert len(ids) == session.seen
    return ids


def reads(session: Session, text: str, **more: Any) -> torch.Tensor:
    """Send a message; the logits behind it, before the reply."""
    made: list[torch.Tensor] = []
    extend = session.prefill

    def watched(*given: Any) -> torch.Tensor:
        made.append(extend(*given))
        return made[-1]

    session.prefill = watched  # type: ignore[method-assign]
    try:
        list(session.send(text, **more))
    finally:
        del session.prefill
    return made[-1]


@pytest.mark.parametrize("kind", REWRITING)
@pytest.mark.parametrize("system", [None, "be kind"])
def test_a_session_holds_what_a_fresh_rendering_holds(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str, system: str | None
) -> None:
    with_template(engine, REWRITING[kind])
    script(monkeypatch, engine, [reply for _, reply in TALK])
    tokenizer, talk = engine.processor.tokenizer, []
    with engine.session() as session, engine.session() as fresh:
        for at, (asked, replied) in enumerate(TALK):
            if system and not at:
                talk.append({"role": "system", "content": system})
            talk.append({"role": "user", "content": asked})
            logits = reads(session, asked, system=None if at else system)
            wanted = tokenizer.apply_chat_template(
                talk, chat_template=REWRITING[kind], add_generation_prompt=True
            )["input_ids"]
            prompt = held_ids(session)[: len(wanted)]
            assert prompt == wanted
            # What was let go counts no more for penalties.
            assert session.read_ids == with_ids(0, held_ids(session))
            with engine.session() as fresh:
                exact = fresh.prefill({"input_ids": torch.tensor([wanted])})
            torch.testing.assert_close(logits, exact, atol=1e-5, rtol=1e-5)
            assert session.note is None and session.memory().differs is None
            talk.append({"role": "assistant", "content": replied})
        engine.cache.check()


def test_only_what_changed_is_read_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>" + "thought " * 8 + "</think>y", "z"])
    with engine.session() as session:
        list(session.send("a question of some length, which stays"))
        assert session.seen == 57 + 80  # the last token of the reply comes with the next turn
        list(session.send("b"))
        assert session.last is not None
        # y, its end, and a message: one token a byte or marker, by hand.
        assert session.last.prompt_tokens == 3 + 9 + 11 and session.seen == 57 + 23 + 1


def test_a_clock_in_the_template_is_read_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(engine, "{{ strftime_now('%f') }}|" + CHATML)
    script(monkeypatch, engine, ["y", "z"])
    with engine.session() as session:
        times = []
        for text in ("a", "b"):
            list(session.send(text))
            times.append(engine.processor.tokenizer.decode(held_ids(session)).split("|<")[0])
        assert len(set(times)) == 2 and session.note is None


def test_thoughts_can_be_kept_on_purpose(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z", "u"])
    with engine.session() as session:
        session.rewrites = "keep"
        list(session.send("a"))
        list(session.send("b"))
        decoded = engine.processor.tokenizer.decode(held_ids(session))
        assert "<think>t</think>y<|im_end|>" in decoded
        assert session.note == session.memory().differs
        assert session.note is not None and "stays as it was read, as wanted" in session.note
        session.rewrites = "reread"
        list(session.send("c"))
        assert "think" not in engine.processor.tokenizer.decode(held_ids(session))


def test_under_eviction_it_is_read_again_and_says_what_is_lost(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(llama, policy="streamingllm", budget=24, dtype="float32")
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>" + "thought " * 8 + "</think>y", "z", "z"])
    with engine.session() as session:
        list(session.send("a question of some length, which stays"))
        list(session.send("b"))
        memory = session.memory()
        assert memory.entries + memory.evicted == session.seen * engine.spec.rows
        assert memory.differs == session.note
        assert memory.differs is not None and "were evicted while they stood" in memory.differs
        list(session.send("c"))
        assert session.memory().differs is not None and session.note is None  # said once
    engine.cache.check()
    assert engine.cache.pool.free_pages == engine.cache.pool.num_pages


@pytest.mark.parametrize(
    "policy", ["snapkv:window=32", "h2o", "streamingllm", "dbtrimkv", "of linear layers"]
)
def test_with_room_for_all_every_policy_reads_what_a_fresh_rendering_has(
    llama: Path, monkeypatch: pytest.MonkeyPatch, policy: str, tmp_path: Path
) -> None:
    """And scores alike afterwards: a cut to a small budget leaves the same entries.

    Linear layers cannot go back either, and read all of it again.
    """
    folder = llama
    if policy == "of linear layers":
        folder, policy = save_qwen3_vl(tmp_path, kind="qwen3_5"), "streamingllm"
    engine = Engine.from_pretrained(
        folder, policy=policy, budget=400, dtype="float32", gates="random", prefill_chunk=400
    )
    with_template(engine, THOUGHTS)
    replies = ["<think>" + "thought " * 8 + "</think>y", "z"]
    script(monkeypatch, engine, replies)
    talk = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": replies[0]}]
    talk += [{"role": "user", "content": "b"}]
    with engine.session() as session, engine.session() as fresh:
        list(session.send("a question"))
        list(session.send("b"))
        assert session.memory().differs is None
        ids = engine.processor.tokenizer.apply_chat_template(
            talk, chat_template=THOUGHTS, add_generation_prompt=True
        )["input_ids"]
        fresh.prefill({"input_ids": torch.tensor([ids])})
        fresh.decode(engine.processor.tokenizer("z")["input_ids"][0])
        assert held_ids(session)[: len(ids)] == ids
        kept, wanted = (engine.cache.export(one.seq) for one in (session, fresh))
        for name in wanted:
            if name.startswith("state."):
                torch.testing.assert_close(kept[name], wanted[name], atol=1e-5, rtol=1e-5)
        for one in (session, fresh):
            one.set_budget(20)
        same = [
            torch.equal(mine, theirs)
            for rows in zip(session.retained(), fresh.retained(), strict=True)
            for mine, theirs in zip(*rows, strict=True)
        ]
        assert all(same)


def test_a_saved_session_goes_back_as_well(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z", "z"])
    with engine.session() as session:
        list(session.send("a"))
        session.save(tmp_path / "s.mmkv")
        with Session.load(engine, tmp_path / "s.mmkv") as loaded, session.fork() as fork:
            for one in (session, loaded):
                list(one.send("b"))
            assert held_ids(loaded) == held_ids(session) != held_ids(fork)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_turn_that_goes_back_can_be_taken_back_and_fail(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z"])
    with engine.session() as session:
        session.undo_depth = depth
        list(session.send("a"))
        before = held_ids(session), session.history[:], session.memory().entries
        with monkeypatch.context() as broken:
            broken.setattr(Session, "prefill", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                list(session.send("b"))
        assert (held_ids(session), session.history, session.memory().entries) == before
        list(session.send("b"))
        if depth:
            assert session.undo()
            assert (held_ids(session), session.history, session.memory().entries) == before
    engine.cache.check()


def shown(messages: list[dict[str, Any]]) -> Iterator[Image.Image]:
    for one in messages:
        for part in one["content"]:
            if part["type"] == "image":
                yield part["image"]


def fresh_inputs(folder: Path, messages: list[dict[str, Any]], source: str | None = None) -> Any:
    """What transformers makes of a conversation with pictures, by its template or ``source``."""
    processor = processor_of(folder)
    images = list(shown(messages))
    text = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, chat_template=source, add_generation_prompt=True, tokenize=False
    )
    return processor(text=[text], images=[images] if images else None, return_tensors="pt")


def test_a_picture_that_moves_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that puts the system's message into the latest question changes the one before."""
    folder = save_qwen3_vl(tmp_path)
    moving = (
        "{% set s = messages[0].content[0].text %}{% for m in messages if m.role != 'system' %}"
        "{% if m.role == 'user' %}[{{ s if loop.last }}{% for p in m.content %}"
        "{{ '<|image_pad|>' if p.type == 'image' else p.text }}{% endfor %}]{% else %}"
        "{{ m.content[0].text }}<|im_end|>{% endif %}{% endfor %}"
    )
    engine = Engine.from_pretrained(folder, policy="full", dtype="float32")
    with_template(engine, moving, parts=True)
    script(monkeypatch, engine, ["red", "blue", "green"])
    talk: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "be kind"}]}
    ]
    with engine.session() as session:
        for at, colour in enumerate(["red", "blue", "green"]):
            image = picture(colour, (40 + 16 * at, 24))
            asked = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
            talk.append({"role": "user", "content": asked})
            logits = reads(session, "what?", images=[image], system=None if at else "be kind")
            with engine.session() as fresh:
                exact = fresh.prefill(engine.inputs(talk))
                assert fresh.next_position == session.next_position - len(colour)
            torch.testing.assert_close(logits, exact, atol=1e-5, rtol=1e-5)
            talk.append({"role": "assistant", "content": [{"type": "text", "text": colour}]})
            assert session.held.has_media and session.note is None


def test_pictures_of_text_that_stays_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = (picture("red", (40, 24)),), ()
    held = Held(tuple(Piece(text, None, Place(), 1, media=shown) for text in ("ab", "cd", "ef")))
    held.let_go(4)
    assert [one.media for one in held.pieces or ()] == [None, shown, shown]
    monkeypatch.setattr("mmkv.prompt.held.MOST_MEDIA", 2 * 40 * 24 * 3 - 1)
    held.let_go(3)
    assert not held.has_media


def test_a_picture_that_is_gone_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_llava_onevision(tmp_path / "m")
    engine = Engine.from_pretrained(folder, policy="full", dtype="float32")
    script(monkeypatch, engine, ["red", "blue"])
    with engine.session() as session:
        list(session.send("what?", images=[picture("red", (50, 70))]))
        session.save(tmp_path / "s.mmkv")
    with Session.load(engine, tmp_path / "s.mmkv") as loaded:
        list(loaded.send("what?", images=[picture("blue", (90, 40))]))
        assert loaded.note is not None and loaded.note == loaded.memory().differs
        assert "an earlier picture stays as it was read" in loaded.note
        assert "begin a new conversation" in loaded.note
        # The first in tiles, as it was; the second as transformers reads it beside another.
        ids = loaded.engine.processor.encode("<image>", [picture("red", (50, 70))])["input_ids"]
        assert loaded.seen == ids.numel() + 17 + 52 + len("blue")


def test_a_session_whose_text_is_not_known_says_that_it_differs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a file from before texts were kept: the template drops thoughts, a marker has none."""
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z"])
    with engine.session() as session:
        list(session.send("a"))
        session.held.pieces = None
        list(session.send("b"))
        assert session.note == session.memory().differs == REWRITES


def test_a_cancelled_turn_that_went_back_is_read_by_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z"])
    stored = CachedConversation(engine)
    session = stored.wake()
    list(session.send("a"))
    job = ReplyJob(engine, message("b" * 30), session=stored, chunk=8)
    job.begin()
    job.prefill.advance()
    job.roll_back()
    assert session.seen == len(held_ids(session)) and len(session.history) == 2
    list(session.send("c"))
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>t</think>y"}]
    talk += [{"role": "user", "content": "c"}]
    wanted = engine.processor.tokenizer.apply_chat_template(
        talk, chat_template=THOUGHTS, add_generation_prompt=True
    )["input_ids"]
    assert held_ids(session)[: len(wanted)] == wanted and session.note is None
    stored.close()
    engine.cache.check()


def test_what_a_cancelled_turn_lost_by_going_back_is_said(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine.from_pretrained(
        llama, policy="streamingllm", dtype="float32", budget=24, endless=False
    )
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>well</think>y", "z"])
    stored = CachedConversation(engine)
    session = stored.wake()
    list(session.send("a" * 30, sampling=Sampling(max_new_tokens=20)))
    assert session.unfed  # the reply was cut at its length
    job = ReplyJob(engine, message("b" * 3000), session=stored, chunk=8)
    with pytest.raises(ContextError):
        job.begin()
    job.roll_back()
    assert session._cuts == 1 and "entries" in (session.memory().differs or "")
    assert not session.unfed
    list(session.send("c"))
    assert "entries" in (session.memory().differs or "")
    stored.close()


def test_tokens_that_were_put_in_directly_are_not_let_go(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z"])
    with engine.session() as session:
        list(session.send("a"))
        before = session.seen
        session.prefill({"input_ids": torch.arange(5, 25)[None]})
        list(session.send("b"))
        assert session.seen > before + 20 and session._cuts == 0
        assert session.note == session.memory().differs == REWRITES


@pytest.mark.parametrize("saved", [False, True])
def test_times_of_frames_count_for_penalties_after_going_back_behind_a_video(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """Right value: the ids of a session that reads the whole conversation afresh."""
    engine = Engine.from_pretrained(save_qwen3_vl(tmp_path / "m"), policy="full", dtype="float32")
    with_template(engine, THOUGHTS, parts=True)
    script(monkeypatch, engine, ["<think>t</think>y", "z"])
    frames = [picture("red", (64, 64)) for _ in range(8)]
    session = engine.session()
    list(session.send("a", videos=[frames]))
    if saved:
        session.save(tmp_path / "s.mmkv")
        session = Session.load(engine, tmp_path / "s.mmkv")
    list(session.send("b"))
    assert session._cuts == 1 and session.memory().differs is None
    talk: list[Any] = [
        {
            "role": "user",
            "content": [{"type": "video", "video": frames}, {"type": "text", "text": "a"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "<think>t</think>y"}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
    ]
    with engine.session() as fresh:
        inputs = engine.inputs(talk)
        fresh.prefill(inputs)
        seconds = set(engine.processor.tokenizer("<0.2 seconds>")["input_ids"])
        assert seconds <= set(inputs["input_ids"][0].tolist())
        assert session.held.pieces is not None
        assert session.read_ids == with_ids(fresh.read_ids, session.held.pieces[-1].ids or ())


def test_a_setting_outlives_undo_and_hibernation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["x", "y"])
    stored = CachedConversation(engine, folder=tmp_path)
    session = stored.wake()
    session.undo_depth = 1
    list(session.send("a"))
    session.rewrites, session.undo_depth = "keep", 2
    assert session.undo() and (session.rewrites, session.undo_depth) == ("keep", 2)
    list(session.send("a"))
    stored.hibernate()
    again = stored.wake()
    assert (again.rewrites, again.undo_depth) == ("keep", 2)
    stored.close()


@pytest.mark.parametrize("thoughts", [True, False])
def test_pictures_of_a_cancelled_turn_that_went_back_are_read_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thoughts: bool
) -> None:
    """What went back behind a picture, for thoughts or for tiles, holds it until it is read."""
    folder = save_qwen3_vl(tmp_path) if thoughts else save_llava_onevision(tmp_path)
    engine = Engine.from_pretrained(folder, policy="full", dtype="float32")
    if thoughts:
        with_template(engine, THOUGHTS, parts=True)
    said = ["<think>t</think>y", "<think>u</think>z", "w"]
    script(monkeypatch, engine, said)
    images = [picture("red", (50, 70)), picture("blue", (90, 40))]
    stored = CachedConversation(engine)
    session = stored.wake()
    list(session.send("a", images=images[:1]))
    if thoughts:  # so that the next turn goes back behind the second picture
        session.rewrites = "keep"
        list(session.send("b", images=images[1:]))
        session.rewrites = "reread"
    job = ReplyJob(engine, message("c" * 30, images=images[1:]), session=stored, chunk=8)
    job.begin()
    job.prefill.advance()
    job.roll_back()
    assert session._cuts == 1
    session.save(tmp_path / "s.mmkv")
    with Session.load(engine, tmp_path / "s.mmkv") as loaded, pytest.raises(InputError) as caught:
        loaded.send("d", images=images[1:])
    assert "start a new conversation" in str(caught.value)
    logits = reads(session, "d", images=images[1:])
    talk: list[dict[str, Any]] = []
    shown = [*zip("ab", images, said, strict=False)] if thoughts else [("a", images[0], said[0])]
    for asked, image, reply in [*shown, ("d", images[1], "")]:
        parts = [{"type": "image", "image": image}, {"type": "text", "text": asked}]
        talk += [{"role": "user", "content": parts}, {"role": "assistant", "content": reply}]
    with engine.session() as fresh:
        exact = fresh.prefill(engine.inputs(talk[:-1]))
    torch.testing.assert_close(logits, exact, atol=1e-5, rtol=1e-5)
    assert session.note is None and session.held.unread == ((), ())
    stored.close()
    engine.cache.check()


@pytest.mark.parametrize("budget", [24, 400])
def test_a_recording_goes_back_as_well(
    llama: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Entries that were born are there or have died, as far as the record goes back."""
    engine = Engine.from_pretrained(llama, policy="streamingllm", budget=budget, dtype="float32")
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>" + "thought " * 8 + "</think>y", "z"])
    with engine.session() as session:
        recorder = session.record()
        list(session.send("a question of some length"))
        list(session.send("b"))
        assert (session.recorder is recorder) == (budget == 400)
        assert session.recorder is not None
        record = session.recorder.read(session)
        assert len(record.token_ids) == session.seen
        born = session.seen * engine.spec.rows
        if budget == 400:
            assert record.token_ids.tolist() == held_ids(session) and len(record.row) == born
        assert len(record.row) == session.memory().entries


FAMILIES = [save_llava, save_llava_onevision, save_internvl, save_qwen2_5_vl, save_qwen3_vl]
FAMILIES += [save_smolvlm, save_mistral3]


def save_qwen3_5(folder: Path) -> Path:
    """Its linear layers cannot go back by tokens: earlier pictures are read again, too."""
    return save_qwen3_vl(folder, kind="qwen3_5")


FAMILIES.append(save_qwen3_5)


@one_in(3)
@pytest.mark.parametrize("save", FAMILIES)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long(reason="again"))])
def test_pictures_over_turns_are_read_as_in_one_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path], Path], seed: int
) -> None:
    """Any number of pictures of any size in each turn, under a template that drops thoughts."""
    folder = save(tmp_path)
    engine = Engine.from_pretrained(folder, policy="full", dtype="float32")
    shown_text = "(p.text.split('</think>')[-1] if m.role == 'assistant' else p.text)"
    source = str(engine.processor.template.source).replace("p.text", shown_text)
    engine.processor.template = ChatTemplate(
        engine.processor.tokenizer, source, True, tokens=[engine.processor.image_token]
    )
    rng = random.Random(seed)
    counts = rng.choice([[1, 0, 2], [0, 2, 1], [1, 0, 1]])
    script(monkeypatch, engine, [f"<think>{'t' * n}</think>reply" for n in range(len(counts))])
    talk: list[dict[str, Any]] = []
    with engine.session() as session:
        for at, count in enumerate(counts):
            images = [
                picture("red", (rng.randint(20, 100), rng.randint(20, 100))) for _ in range(count)
            ]
            parts = [{"type": "image", "image": image} for image in images]
            talk.append({"role": "user", "content": [*parts, {"type": "text", "text": "what?"}]})
            logits = reads(session, "what?", images=images)
            theirs = fresh_inputs(folder, talk, source)["input_ids"]
            with engine.session() as fresh:
                inputs = engine.inputs(talk)
                assert torch.equal(inputs["input_ids"], theirs)
                exact = fresh.prefill(inputs)
                said = len(f"<think>{'t' * at}</think>reply")
                assert session.seen - said == fresh.seen == theirs.shape[1]
                assert session.next_position - said == fresh.next_position
            torch.testing.assert_close(logits, exact, atol=1e-4, rtol=1e-4)
            assert session.note is None
            reply = session.history[-1]["content"]
            talk.append({"role": "assistant", "content": [{"type": "text", "text": reply}]})


def test_what_eviction_before_a_reply_took_is_not_lost_by_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that evicts nothing leaves what a fresh reading has, by hand from the entries."""
    engine = Engine.from_pretrained(
        llama, policy="streamingllm", budget=40, evict_every=64, dtype="float32"
    )
    with_template(engine, THOUGHTS)
    script(monkeypatch, engine, ["<think>t</think>y", "z"])
    with engine.session() as session:
        list(session.send("a question of some length, which is cut"))
        assert session.evicted == 18 * engine.spec.rows  # of 58 tokens, the reply is not cut yet
        list(session.send("b"))
        assert session.note is None and session.memory().differs is None


def test_what_was_read_takes_few_bytes_a_token() -> None:
    """An endless session keeps every token id, and its file has them as they were."""
    ids = [*range(300, 2300)]
    held = Held()
    held.add_prompt(Read("a" * 2000, tuple(ids)), Place(2000, 2000, 2000))
    held.add_reply("b" * 2000, ids, Place(4000, 4000, 2000))
    written = json.loads(json.dumps(held.as_json()))["pieces"]
    assert held.pieces is not None and [one["ids"] for one in written] == [ids, ids]
    for piece in held.pieces:
        assert piece.ids is not None and list(piece.ids) == ids
        assert sys.getsizeof(piece.ids) < 5 * len(ids)
