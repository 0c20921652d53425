"""The stream of one reply."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from mmkv.engine.interrupts import CtrlC

if TYPE_CHECKING:
    from mmkv.session import Session


class ReplyStream(Iterator[str]):
    """The pieces of one reply, made as they are asked for.

    The session belongs to the stream from its first piece to its end: other calls on the session
    are refused meanwhile, but for reading and closing it. A stream that is closed, or that nobody
    refers to any more, ends the reply where it stands. Threads may pass a stream on; two that ask
    at the same time are told so (SessionError), and the reply goes on.
    """

    def __init__(self, session: Session, pieces: Callable[[], Generator[str, None, None]]) -> None:
        self._session, self._pieces = session, pieces()
        self._ended = False

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        try:
            with self._session.streaming():
                try:
                    return next(self._pieces)
                except BaseException:
                    self._ended = True
                    raise
        except KeyboardInterrupt:  # it may have come after the piece was made, which nobody sees
            self.close()
            raise

    def close(self) -> None:
        """End the reply where it stands; what was shown stays in the session. Again: no effect."""
        with CtrlC(), self._session.stopping():
            self._ended = True
            self._pieces.close()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
