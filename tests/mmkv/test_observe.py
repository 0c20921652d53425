"""Observations: frames and texts that a session reads between questions, without a reply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmkv import Engine, Session
from mmkv.engine.errors import InputError, SessionError
from mmkv.prompt.special import CUT
from mmkv.prompt.template import ChatTemplate
from mmkv.prompt.video import Clip
from tests.support.chat_models import (
    picture,
    save_internvl,
    save_llama,
    save_llava,
    save_llava_onevision,
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_smolvlm,
    script,
)
from tests.support.tiers import one_in

FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen3": save_qwen3_vl,
    "qwen3.5": partial(save_qwen3_vl, kind="qwen3_5"),
    "qwen2.5": save_qwen2_5_vl,
    "llava": save_llava,
    "onevision": save_llava_onevision,
    "internvl": save_internvl,
    "smolvlm": save_smolvlm,
    "llama": save_llama,
}
RED, BLUE = picture("red"), picture("blue", (56, 40))


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    made: dict[str, Engine] = {}

    def engine(name: str) -> Engine:
        if name not in made:
            folder = FAMILIES[name](tmp_path_factory.mktemp("m"))
            made[name] = Engine.from_pretrained(folder, policy="full", dtype="float32")
        return made[name]

    return engine


def clip(frame: Image.Image, seconds: float) -> dict[str, Any]:
    """A video of one frame, by hand: what observe(frame, at=seconds) is to read."""
    return {"type": "video", "video": Clip(np.asarray(frame)[None], (0,), 2.0, 1, (seconds,))}


def image(frame: Image.Image) -> dict[str, Any]:
    return {"type": "image", "image": frame}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def logits_after(session: Session, monkeypatch: pytest.MonkeyPatch, *given: Any) -> torch.Tensor:
    """Send a message; the logits behind it, before the reply."""
    made: list[torch.Tensor] = []
    extend = Session.prefill

    def watched(*args: Any) -> torch.Tensor:
        made.append(extend(*args))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Session, "prefill", watched)
        list(session.send(*given))
    return made[-1]


CASES = [
    ("qwen3", [(RED, 1.5), (BLUE, 2.5)], [clip(RED, 1.5), clip(BLUE, 2.5)]),
    (
        "qwen3",
        [("a door opens", 3.0), (RED, 4.0)],
        [text("<3.0 seconds>a door opens\n"), clip(RED, 4)],
    ),
    ("qwen3", [(RED, None), ("a red one", None)], [image(RED), text("a red one\n")]),
    ("qwen3.5", [(RED, 1.5), ("it is red", None)], [clip(RED, 1.5), text("it is red\n")]),
    ("qwen2.5", [(RED, 1.5), (BLUE, 2.5)], [clip(RED, 1.5), clip(BLUE, 2.5)]),
    ("llava", [(RED, 1.0), (BLUE, None)], [image(RED), image(BLUE)]),
    ("onevision", [(RED, None), (BLUE, None)], [image(RED), image(BLUE)]),
    ("onevision", [("a red one", None), (RED, None)], [text("a red one\n"), image(RED)]),
    ("internvl", [(RED, None), (BLUE, None)], [image(RED), image(BLUE)]),
    ("smolvlm", [(RED, 61.0), (BLUE, 62.0)], [clip(RED, 61), clip(BLUE, 62)]),
    ("llama", [("one", None), ("two\n", None)], [text("one\n"), text("two\n")]),
]


@one_in(3)
@pytest.mark.parametrize("name, seen, parts", CASES)
def test_observing_bit_by_bit_reads_what_one_message_would(
    engines: Callable[[str], Engine],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    seen: list[tuple[Any, float | None]],
    parts: list[dict[str, Any]],
) -> None:
    """Before a first reply, and after it."""
    engine = engines(name)
    script(monkeypatch, engine, ["yes", "yes", "no", "no"])
    given = [*parts, text("what?")]
    untimed = False
    with engine.session() as session, engine.session() as whole:
        for _ in range(2):
            read = 0
            for what, at in seen:
                made = session.observe(what, at=at)
                read += made.tokens
                assert made.next_position == session.next_position
                untimed |= at is not None and name not in ("qwen3", "qwen3.5", "smolvlm")
                assert any("hold no times" in one for one in made.notes) == untimed, made.notes
            assert session.history[-1]["role"] == "user"
            ours = logits_after(session, monkeypatch, "what?")
            theirs = logits_after(whole, monkeypatch, given)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            assert (session.seen, session.next_position) == (whole.seen, whole.next_position)
            assert session.read_ids == whole.read_ids and session.note is None
            assert session.history == whole.history and session.held.differs is None
            assert session.last is not None and whole.last is not None
            if name != "onevision":  # which reads a lone picture again once there are two
                assert read + session.last.prompt_tokens == whole.last.prompt_tokens
    engine.cache.check()


def test_frames_of_one_call_are_one_video(engines: Callable[[str], Engine]) -> None:
    """Two frames are a temporal patch, behind the mean of their times."""
    engine = engines("qwen3")
    frames = np.stack([np.asarray(RED), np.asarray(RED.rotate(180))])
    with engine.session() as session, engine.session() as single:
        made = session.observe(frames, at=10, fps=4)
        assert made.frames == 2
        known = {token for piece in session.held.pieces or () for token in piece.known}
        assert set(engine.processor.tokenizer("<10.1 seconds>")["input_ids"]) <= known
        assert single.observe(RED, at=10).tokens == made.tokens


def test_near_duplicates_are_skipped_and_counted(
    engines: Callable[[str], Engine], tmp_path: Path
) -> None:
    engine = engines("qwen3")
    grey = [Image.new("RGB", (32, 32), (level,) * 3) for level in (100, 103, 104, 106, 100)]
    grey[3].save(tmp_path / "later.png")
    with engine.session() as session:
        # 103 is like 100, 104 not: each is compared with the last one kept, not with the last.
        made = session.observe(grey[:3], at=0, skip_similar=3)
        assert (made.frames, made.skipped) == (2, 1)
        before = session.seen
        made = session.observe(tmp_path / "later.png", at=3, skip_similar=3)
        assert (made.frames, made.skipped, made.tokens) == (0, 1, 0) and session.seen == before
        session.save(tmp_path / "s.mmkv")
        with Session.load(engine, tmp_path / "s.mmkv") as loaded, session.fork() as fork:
            for one in (loaded, fork):
                assert one.observe(grey[3], at=4, skip_similar=3).skipped == 1
                assert one.observe(grey[3], at=4).frames == 1  # off unless asked for
                assert (one.frames_seen.kept, one.frames_seen.skipped) == (3, 3)
        assert (session.frames_seen.kept, session.frames_seen.skipped) == (2, 2)


def test_a_saved_open_message_goes_on(
    engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = engines("qwen3")
    script(monkeypatch, engine, ["yes"] * 3)
    with engine.session() as session:
        session.observe(RED, at=1)
        session.save(tmp_path / "s.mmkv")
        with Session.load(engine, tmp_path / "s.mmkv") as loaded, session.fork() as fork:
            for one in (session, loaded, fork):
                one.observe(BLUE, at=2)
            given = [logits_after(one, monkeypatch, "what?") for one in (session, loaded, fork)]
            torch.testing.assert_close(given[1], given[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(given[2], given[0], atol=1e-5, rtol=1e-5)
            assert session.history == loaded.history == fork.history
            assert [one["role"] for one in session.history] == ["user", "assistant"]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_failed_observation_leaves_all_as_it_was_and_undo_takes_one_back(
    engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    engine = engines("qwen3")
    script(monkeypatch, engine, ["yes"])

    def state(session: Session) -> Any:
        held = session.held.pieces, session.frames_seen, session.unfed
        return session.state(), [*session.history], held, session.memory().entries

    with engine.session() as session:
        session.undo_depth = depth
        session.observe(RED, at=1)
        first = state(session)
        for what, more in ((BLUE, {"at": -1}), ("", {}), ([], {}), ("a.png", {"fps": 2})):
            with pytest.raises(InputError):
                session.observe(what, **more)
        with monkeypatch.context() as broken:
            broken.setattr(Session, "prefill", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.observe(BLUE, at=2)
        assert state(session) == first
        session.observe(BLUE, at=2)
        second = state(session)
        stream = session.send("what?")
        next(stream)
        with pytest.raises(SessionError, match="unfinished stream"):
            session.observe(BLUE)
        list(stream)
        if depth:
            assert session.undo() and state(session) == second
            assert session.undo() and state(session) == first
            assert not session.undo()
    engine.cache.check()


def test_a_reply_that_cannot_be_made_gives_back_the_open_message(
    engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines("qwen3")
    with engine.session() as session:
        session.observe(RED, at=1)
        before, start = [*session.history], session.turn_start()
        script(monkeypatch, engine, ["yes"])
        list(session.send("what?"))
        assert len(session.history) == 2 and session.take_back(start)
        assert session.history == before and session.observe(BLUE, at=2).frames == 1


def test_a_template_that_moves_what_was_said_is_refused(
    engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures before texts, as LLaVA's: read again while that can be, else said in one line."""
    engine = engines("llava")
    first = "{% for p in m.content if p.type == '@' %}"
    moving = (
        "{% for m in messages %}" + first.replace("@", "image") + "<image>{% endfor %}"
        + first.replace("@", "text") + "{{ p.text }}{% endfor %}|{% endfor %}"
    )  # fmt: skip
    tokenizer = engine.processor.tokenizer
    template = ChatTemplate(tokenizer, moving, True, tokens=["<image>"])
    monkeypatch.setattr(engine.processor, "template", template)
    script(monkeypatch, engine, ["yes"] * 2)
    with engine.session() as session, engine.session() as whole:
        session.observe("a red one")
        session.observe(RED)
        ours = logits_after(session, monkeypatch, "what?")
        theirs = logits_after(whole, monkeypatch, [image(RED), text("a red one\nwhat?")])
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    with engine.session() as session:
        session.rewrites = "keep"
        session.observe("a red one")
        before = session.seen, [*session.history]
        with pytest.raises(InputError, match="moves what was observed"):
            session.observe(RED)
        assert (session.seen, session.history) == before
    hiding = ChatTemplate(tokenizer, "{{ messages | length }}", True)
    monkeypatch.setattr(engine.processor, "template", hiding)
    with engine.session() as session, pytest.raises(InputError, match="nothing can be observed"):
        session.observe("a red one")


@pytest.mark.parametrize("counted", [False, True])
def test_the_end_of_a_long_message_is_rendered_alone_where_that_is_the_same(
    engines: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """A template that numbers its parts is rendered whole."""
    engine = engines("llama")
    source = "{% for m in messages %}<{{ m.content }}{% endfor %}"
    if counted:  # numbers stand before each text
        source = "{% for p in messages[0].content %}({{ loop.index }}){{ p.text }}{% endfor %}"
    tokenizer = engine.processor.tokenizer
    template = ChatTemplate(tokenizer, source, counted)
    monkeypatch.setattr(engine.processor, "template", template)
    lengths = []
    cut = ChatTemplate._cut

    def watched(self: ChatTemplate, messages: Any) -> Any:
        lengths.append(len(messages[-1]["content"]))
        return cut(self, messages)

    with engine.session() as session:
        for at in range(36):
            session.observe(f"{at} is seen <|im_end|> now")
        monkeypatch.setattr(ChatTemplate, "_cut", watched)
        session.observe("n <|im_end|> is last")
        assert min(lengths) < 10 and (max(lengths) > 36) is counted
        monkeypatch.undo()
        monkeypatch.setattr(engine.processor, "template", template)
        whole = template.render_open(session.history)
        text = "".join(piece.text or "" for piece in session.held.pieces or ())
        assert text == whole.replace(CUT, "") and session.held.differs is None


def test_a_long_stream_keeps_its_budget_and_its_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far beyond the positions that the model was trained for."""
    folder = save_qwen3_vl(tmp_path, positions=160)
    engine = Engine.from_pretrained(
        folder, policy="streamingllm", budget=64, dtype="float32", endless=True
    )
    script(monkeypatch, engine, ["yes"])
    with engine.session() as session:
        for second in range(24):
            made = session.observe(RED, at=second)
            assert made.memory.entries <= 64 * engine.spec.rows
        assert session.seen > 3 * 160 and session.next_position <= 160
        assert made.memory.compactions > 0 and not session.held.has_media
        assert list(session.send("what?")) and session.memory().differs is None
    engine.cache.check()
