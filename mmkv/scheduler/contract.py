"""Protocols between the scheduler and an engine: jobs, the executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mmkv.scheduler.capacity import PersistentSession, Reservation


class Job(Protocol):
    """One request: a prompt for a session, and the reply to it."""

    @property
    def session(self) -> PersistentSession | None:
        """The session that is kept; None where one is opened for this job alone."""
        ...

    @property
    def next_chunk(self) -> int:
        """Count the tokens of the next chunk; before :meth:`begin` the most that it can have."""
        ...

    @property
    def slow_to_begin(self) -> bool:
        """Whether the next :meth:`begin` encodes pictures; a turn begins at most one such job."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the reply is complete."""
        ...

    @property
    def failure(self) -> Exception | None:
        """Why the reply has failed; None where it has not."""
        ...

    @property
    def ready(self) -> bool:
        """Whether the prompt can be read; asked before the first chunk, after :meth:`prepare`."""
        ...

    @property
    def fetches(self) -> bool:
        """Whether :meth:`prepare` waits for other servers; such a job does not count as running."""
        ...

    def reservation(self) -> Reservation:
        """Return what the job may take, before anything is read. Raises MmkvError."""
        ...

    def prepare(self) -> None:
        """Start what has to be done before the first chunk; called once, on admission."""
        ...

    def begin(self) -> None:
        """Make the next chunk ready to be read; called before each chunk.

        The first call may also open or wake the session and make the prompt.
        """
        ...

    def grant(self, fits: bool) -> bool | Reservation:
        """Go on with the room that it asked for, or without it; it is asked for in
        :meth:`Executor.read` and :meth:`Executor.step`.

        Returns:
            whether all is read that it has to read, or what it asks for next.
        """
        ...

    def roll_back(self) -> None:
        """Return the session to where it was before the prompt.

        A session that was opened for this job alone is closed.
        """
        ...

    def interrupt(self) -> None:
        """End the reply where it stands."""
        ...

    def end(self) -> None:
        """Put the reply together; close a session that was opened for this job alone."""
        ...


class Executor(Protocol):
    """Reads chunks of several jobs in one pass, and decodes for all at once.

    Attributes:
        pass_tokens: the most tokens of chunks that share a pass; 0: chunks are read alone.
    """

    @property
    def pass_tokens(self) -> int: ...

    def limit(self) -> int | None:
        """Return the most pages that the scheduler's sessions may hold; None: no limit."""
        ...

    def pages_for(self, job: Job) -> int:
        """Count the pages that a job holds while its next chunk is stored; it has begun it."""
        ...

    def read(
        self, jobs: Sequence[Job], seconds: float | None = None
    ) -> list[bool | Reservation | Exception] | None:
        """Read the next chunk of each, in one pass; the jobs have begun it.

        Args:
            seconds: after which the pass is left, where it can be, with some of it done; the next
                call has the same jobs and goes on with it. None: it is read to its end.

        Returns:
            for each whether its prompt is complete (and the first token drawn), or why it fails,
            or the room that it asks for beside its own, which it need not get (:meth:`Job.grant`);
            None where the pass was left.
        """
        ...

    def abort(self) -> None:
        """Take back the pass that was left."""
        ...

    def step(self, jobs: Sequence[Job]) -> Sequence[Reservation | None]:
        """Decode for each job, one token or a few; jobs may be finished then.

        Returns:
            for each the room that it asks for, to read more before it goes on; mostly None.

        Raises:
            MmkvError: before anything has changed.
        """
        ...
