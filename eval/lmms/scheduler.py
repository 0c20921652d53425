"""Run several documents in one batch; when one is done, the next one starts in its slot.

A document is a *script*: a generator that yields requests and is sent the replies, one for a single
question, several for a dialogue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import MmkvError
from eval.lmms.dialogue import Dialogue
from eval.lmms.messages import Frames
from mmkv.stepping import step

if TYPE_CHECKING:
    from mmkv import Engine, Sampling
    from mmkv.prompt.template import Message
    from mmkv.reply import Reply, ReplyWriter


@dataclass(frozen=True)
class Ask:
    """A request: the whole conversation so far, which the model continues."""

    messages: Sequence[Message]
    sampling: Sampling


Script = Generator[Ask, "Reply", None]


class _Member:
    """A script that runs."""

    def __init__(self, name: str, script: Script, dialogue: Dialogue) -> None:
        self.name, self.script, self.dialogue = name, script, dialogue
        self.writer: ReplyWriter | None = None
        self.token: int | None = None

    def proceed(self) -> bool:
        """Hand over finished replies until a token is to be decoded; False when all is done."""
        try:
            while self.token is None:
                if self.writer is None:
                    ask = next(self.script)
                else:
                    ask = self.script.send(self.dialogue.close_turn(self.writer))
                self.writer, self.token = self.dialogue.open_turn(ask.messages, ask.sampling)
        except StopIteration:
            self.dialogue.close()
            return False
        except MmkvError as error:
            raise type(error)(f"{self.name}: {error}") from error
        return True


def run(
    engine: Engine,
    scripts: Iterable[tuple[str, Script]],
    batch_size: int,
    frames: Frames,
    done: Callable[[], object],
) -> None:
    """Run named scripts to their ends, up to ``batch_size`` in every decode step.

    ``done`` is called for each that ends. Raises the MmkvError of the first document that cannot
    be answered, with its name in front; no session stays open.
    """
    waiting = deque(scripts)
    running: list[_Member] = []
    try:
        while waiting or running:
            while waiting and len(running) < batch_size:
                name, script = waiting.popleft()
                running.append(_Member(name, script, Dialogue(engine, frames)))
            for member in list(running):
                if not member.proceed():
                    running.remove(member)
                    done()
            _end_full(engine, running)
            ready = [member for member in running if member.token is not None]
            if ready:
                _step(engine, ready)
    finally:
        for member in running:
            member.dialogue.close()


def _end_full(engine: Engine, members: Sequence[_Member]) -> None:
    """End replies whose sequence has no position left, so that they do not stop the others."""
    for member in members:
        session = member.dialogue.session
        if session is not None and session.next_position >= engine.spec.max_position:
            assert member.writer is not None
            member.writer.finish("context")
            member.token = None


def _step(engine: Engine, members: Sequence[_Member]) -> None:
    """Append each member's token and draw its next one."""
    going = [
        (m.dialogue.session, m.writer, m.token)
        for m in members
        if m.dialogue.session is not None and m.writer is not None and m.token is not None
    ]
    for member, token in zip(members, step(engine, going), strict=True):
        member.token = token
