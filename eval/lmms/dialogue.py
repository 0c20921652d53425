"""A document's session, reused when a new round continues the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mmkv.eval.lmms.messages import Frames, Key, keys
from mmkv.prompt.template import take_media
from mmkv.reply import Reply
from mmkv.scheduler.replies import Prompt, ReplyJob
from mmkv.scheduler.stored import StoredSession
from mmkv.turn import compose_messages

if TYPE_CHECKING:
    from mmkv import Engine, Sampling, Session
    from mmkv.prompt.template import Message
    from mmkv.scheduler import Scheduler


class Dialogue:
    """A session and the messages it holds.

    lmms-eval's rounds carry no state: a task with a history sends all of it in every round. When
    the new messages begin with those the session holds, only the rest is prefilled; otherwise the
    session is replaced.
    """

    def __init__(self, engine: Engine, frames: Frames) -> None:
        self.engine, self.frames = engine, frames
        self._session = StoredSession(engine)
        self._held: list[Key] = []

    def turn(
        self, messages: Sequence[Message], sampling: Sampling, scheduler: Scheduler
    ) -> ReplyJob:
        """Return the request for the reply to ``messages``."""
        wanted = keys(messages)
        known = len(self._held)
        if wanted[:known] != self._held or known == len(wanted):
            self.close(scheduler)
            self._session, known = StoredSession(self.engine), 0
        self._held = wanted
        return ReplyJob(
            self.engine,
            lambda session: self._prompt(session, messages[known:]),
            sampling,
            session=self._session,
        )

    def replied(self, reply: Reply) -> None:
        """Note the reply, which the next round's messages may hold as they got it."""
        content = [{"type": "text", "text": reply.text}]
        self._held += keys([{"role": "assistant", "content": content}])

    def close(self, scheduler: Scheduler) -> None:
        """Return the session's pages."""
        scheduler.close_session(self._session)
        self._held = []

    def _prompt(self, session: Session, messages: Sequence[Message]) -> Prompt:
        """Read the pictures of the new messages. Raises InputError."""
        plain, images, videos = take_media(messages)

        def load() -> tuple[list[Any], list[Any]]:
            processor = self.engine.processor
            pictures = [processor.load_picture(image) for image in images]
            return pictures, [self.frames.load(video, processor) for video in videos]

        reading = compose_messages(session, plain, load)
        return Prompt(reading.inputs, plain, reading)
