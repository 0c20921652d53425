"""A document's session, reused when a new round continues the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.lmms.messages import Frames, Key, keys
from mmkv.prompt.media import load_image
from mmkv.prompt.messages import take_media
from mmkv.reply import Reply, ReplyWriter

if TYPE_CHECKING:
    from mmkv import Engine, Sampling, Session
    from mmkv.prompt.template import Message


class Dialogue:
    """A session and the messages it holds.

    lmms-eval's rounds carry no state: a task with a history sends all of it in every round. When
    the new messages begin with those the session holds, only the rest is prefilled; otherwise the
    session is replaced.
    """

    def __init__(self, engine: Engine, frames: Frames) -> None:
        self.engine, self.frames = engine, frames
        self.session: Session | None = None
        self._held: list[Key] = []
        self._prompt_tokens = 0

    def open_turn(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> tuple[ReplyWriter, int | None]:
        """Prefill the reply to ``messages``; its writer and first token (None: it is over).

        Raises InputError, ContextError, BudgetError; the dialogue can only be closed then.
        """
        wanted = keys(messages)
        known = len(self._held)
        if self.session is None or wanted[:known] != self._held or known == len(wanted):
            self.close()
            self.session, known = self.engine.session(), 0
        session, processor = self.session, self.engine.processor
        plain, images, videos = take_media(messages[known:])
        addition = processor.template.addition(session.history, plain)
        writer = ReplyWriter(processor.tokenizer, sampling, self.engine.eos_token_ids)
        inputs = processor.encode(
            addition.text,
            [load_image(image) for image in images],
            [self.frames.load(video, processor.size_rule) for video in videos],
            addition.continuing,
        )
        # The last token of the reply before, sampled but never fed, goes in front.
        inputs = session._with_unfed(inputs)
        self._prompt_tokens = inputs["input_ids"].shape[-1]
        token = writer.advance(session.prefill(inputs))
        session.history += plain
        session._unfed = []
        self._held = wanted
        return writer, token

    def close_turn(self, writer: ReplyWriter) -> Reply:
        """End the turn: the reply, which the next round's messages may hold as they got it."""
        assert self.session is not None
        session = self.session
        session._unfed = [] if writer.unfed is None else [writer.unfed]
        session.history.append({"role": "assistant", "content": writer.held_text()})
        reply = writer.reply(self._prompt_tokens, session.memory())
        self._held += keys(
            [{"role": "assistant", "content": [{"type": "text", "text": reply.text}]}]
        )
        return reply

    def close(self) -> None:
        """Return the session's pages."""
        if self.session is not None:
            self.session.close()
        self.session, self._held = None, []
