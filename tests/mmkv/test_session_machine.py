"""A chat session under random turns beside a fresh one that took those alone which stand: texts,
notes, what is held of the conversation, and all that the engine's machine compares.
"""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from PIL import Image

from mmkv import Engine, Sampling
from mmkv.engine.errors import InputError, NotFiniteError
from mmkv.session import Session
from tests.engine.test_session_machine import assert_same
from tests.support.chat_models import picture, save_qwen3_vl
from tests.support.replies import LONG, load

DEPTH = 2
TEXTS = ["short?", f"{LONG}?"]  # of one chunk, and of several


def animated() -> Image.Image:
    """A picture with a note on it."""
    file, frames = BytesIO(), [picture(colour, (40, 24)) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return Image.open(file)


class ChatMachine(RuleBasedStateMachine):
    """``session`` makes all calls; ``twin``, of another engine, those alone that stand."""

    engine: ClassVar[Engine]
    fresh: ClassVar[Engine]
    folder: ClassVar[Path]

    @initialize(depth=st.sampled_from([0, DEPTH, DEPTH]))
    def start(self, depth: int) -> None:
        self.session, self.twin = self.engine.session(), self.fresh.session()
        self.session.undo_depth = self.depth = depth
        self.calls: list[Callable[[Session], Any]] = []
        self.places: list[int] = []  # where in them an undo leads, the latest last
        self.seed = 0

    def stands(self, call: Callable[[Session], Any], undoable: bool = True) -> None:
        """Make a call on both."""
        if undoable and self.depth:
            self.places = [*self.places, len(self.calls)][-DEPTH:]
        for one in (self.session, self.twin):
            call(one)
        self.calls.append(call)

    def sampling(self) -> Sampling:
        self.seed += 1
        return Sampling(max_new_tokens=4, temperature=1.5, seed=self.seed)

    @rule(text=st.sampled_from(TEXTS), sees=st.booleans(), stop=st.sampled_from([1, 9]))
    def send(self, text: str, sees: bool, stop: int) -> None:
        """To the end of the reply, or to its first piece."""
        images, sampling = [animated()] * sees, self.sampling()

        def call(one: Session) -> None:
            with one.send(text, images, sampling=sampling) as stream:
                for _ in range(stop):
                    next(stream, None)

        self.stands(call)

    @rule(what=st.sampled_from(["it rains", picture("blue", (24, 24))]), undoable=st.booleans())
    def observe(self, what: Any, undoable: bool) -> None:
        self.seed += 1
        at = None if undoable else float(self.seed)
        self.stands(lambda one: one.observe(what, at, undoable=undoable), undoable)

    @rule(entries=st.sampled_from([12, 40]))
    def set_budget(self, entries: int) -> None:
        self.stands(lambda one: one.set_budget(entries), undoable=False)

    @rule(count=st.integers(1, DEPTH + 1))
    def undo(self, count: int) -> None:
        for _ in range(count):
            assert self.session.undo() is bool(self.places)
            self.calls = self.calls[: self.places.pop()] if self.places else self.calls
        self.twin.close()
        self.twin = self.fresh.session()
        for call in self.calls:
            call(self.twin)

    @rule()
    def undo_and_put_back(self) -> None:
        for _ in self.places[:1] * 2:
            taken = self.session.fork()
            assert self.session.undo()
            self.session.put_back(taken)

    @rule(how=st.sampled_from(["fork", "file", "the original"]))
    def copy(self, how: str) -> None:
        """Go on with a copy or beside one, which says something else meanwhile."""
        other = self.session.fork()
        if how == "file":
            other.close()
            self.session.save(self.folder / "saved")
            other, _ = self.engine.load_session(self.folder / "saved")
        if how != "the original":
            self.session, other = other, self.session
            self.session.undo_depth, self.places = self.depth, []
        "".join(other.send("else", sampling=self.sampling()))
        other.observe("more")
        other.close()

    @rule(text=st.sampled_from(TEXTS), where=st.sampled_from(["start", "prompt", "logits", "step"]))
    def fail(self, text: str, where: str) -> None:
        """An error takes the turn back; where it cannot, the turn stands with an empty reply."""

        def stop(done: int, total: int) -> None:
            raise InputError("enough")

        def call(one: Session) -> None:
            owner: Any = one.engine.decoder if where == "logits" else one.engine
            name = "logits" if where == "logits" else "decode"
            real = getattr(owner, name)
            broken = mock.patch.object(owner, name, lambda *given: real(*given) * torch.nan)
            with broken, pytest.raises(NotFiniteError):
                "".join(one.send(text, [animated()]))

        if where in ("logits", "step"):
            said = len(self.session.history)
            call(self.session)
            self.places = [*self.places, 0][-DEPTH:][:-1]
            if len(self.session.history) > said:
                assert not self.depth and not self.session.unfed  # it is in the cache
                call(self.twin)
                self.calls.append(call)
            return
        images, progress = (["nowhere.png"], None) if where == "start" else ([], stop)
        with pytest.raises(InputError):
            "".join(self.session.send(text, images, progress=progress))

    @invariant()
    def agree(self) -> None:
        assert_same(self.session, self.twin)
        for name in ("history", "unfed", "tools", "frames_seen", "told"):
            assert getattr(self.session, name) == getattr(self.twin, name), name
        assert self.session.held.as_json() == self.twin.held.as_json()

    def teardown(self) -> None:
        for one in (self.session, self.twin):
            one.close()
        pool = self.engine.cache.pool
        assert pool.free_pages == pool.num_pages


def test_what_is_left_is_what_a_fresh_session_has(tmp_path: Path) -> None:
    model = save_qwen3_vl(tmp_path / "model")

    class Chosen(ChatMachine):
        engine, fresh, folder = load(model), load(model), tmp_path

    chosen = settings(
        max_examples=8,
        stateful_step_count=15,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    run_state_machine_as_test(Chosen, settings=chosen)  # type: ignore[no-untyped-call]


def test_a_token_that_was_read_is_not_read_again(tmp_path: Path) -> None:
    """Where a reply breaks off behind it, and what was evicted meanwhile does not come back."""
    engine = load(save_qwen3_vl(tmp_path))
    decode = engine.decode
    with engine.session() as session:
        for said in ([], ["user", "assistant"] * 2):  # nothing stood before the first one
            broken = mock.patch.object(engine, "decode", lambda *given: decode(*given) * torch.nan)
            with broken, pytest.raises(NotFiniteError):
                "".join(session.send(LONG, [animated()]))
            assert [one["role"] for one in session.history] == said and session.unfed == ()
            assert bool(session.told[0]) is bool(said)
            if not said:
                "".join(session.send(LONG, sampling=Sampling(max_new_tokens=2)))
                session.save(tmp_path / "saved")
                assert engine.load_session(tmp_path / "saved")[0].unfed == session.unfed != ()
