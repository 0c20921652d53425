"""A turn that goes on from a kept memory and leaves another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from fastapi import Depends, Request

from mmkv.server.room import Caller, Room

if TYPE_CHECKING:
    from mmkv.server.chat import ChatCall
    from mmkv.server.kept import Kept


async def _caller(request: Request) -> Caller:
    return request.state.caller


Asking = Annotated[Caller, Depends(_caller)]


class Turn:
    """Holds what a turn goes on from while it runs, and drops what nobody claims.

    A turn that is cut off leaves nothing: its memory is never made, or goes with its end.
    """

    def __init__(self, room: Room, call: ChatCall) -> None:
        self._room, self._work = room, call.work
        self._claimed = False

    def claim(self) -> Kept:
        """Return the memory after the reply, once that is complete; it is the caller's then."""
        kept = self._work.kept
        assert kept is not None
        self._claimed = True
        return kept

    async def __aenter__(self) -> Self:
        start = self._work.start
        if start is not None:
            hold(self._room, start)
        return self

    async def __aexit__(self, *_: object) -> None:
        # The request was cancelled before this is called, and the commands of a thread keep their
        # order: its reply is complete by then, or never will be.
        machine, work, claimed = self._room.worker.machine, self._work, self._claimed
        assert machine is not None

        def end() -> None:
            for kept in (work.start, None if claimed else work.kept):
                if kept is not None:
                    machine.shelf.release(kept)
            if work.start is not None and work.kept is not None:
                machine.shelf.let_compete(work.start, work)  # the turn's end: it is over by itself

        self._room.worker.post(end)


def hold(room: Room, kept: Kept) -> None:
    """Count one more that goes on from a memory."""
    machine = room.worker.machine
    assert machine is not None
    room.worker.post(lambda: machine.shelf.hold(kept))


def release(room: Room, kept: Kept) -> None:
    """Count one less; the last one frees it."""
    machine = room.worker.machine
    assert machine is not None
    room.worker.post(lambda: machine.shelf.release(kept))
