"""A fake engine: sessions are lists of tokens, and pages are counted as they are taken."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from mmkv.engine.errors import BudgetError, SessionError
from mmkv.scheduler import Job, Reservation

CHUNK = 4
PAGE = 2  # tokens in a page; a session holds its newest tokens, up to its bound


class FakePool:
    """Counts the pages of every owner, and calls ``watch`` whenever they change."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.held: dict[Hashable, int] = {}
        self.watch: Callable[[], None] = lambda: None

    def set(self, owner: Hashable, pages: int) -> None:
        self.held[owner] = pages
        if not pages:
            del self.held[owner]
        self.watch()

    @property
    def total(self) -> int:
        return sum(self.held.values())


class FakeSession:
    """Keeps at most ``bound`` pages of tokens; its whole state is ``tokens`` and ``seen``."""

    def __init__(self, pool: FakePool, bound: int) -> None:
        self.pool, self.bound = pool, bound
        self.tokens: list[int] = []
        self.seen = 0
        self.file: tuple[list[int], int] | None = None
        self.open = False
        self.disk_full = False

    @property
    def resident(self) -> bool:
        return self.open

    def resting(self) -> int:
        return self.bound

    def hibernate(self) -> None:
        if self.disk_full:
            raise SessionError("cannot write: the disk is full")
        self.file = (list(self.tokens), self.seen)
        self.tokens, self.seen, self.open = [], -1, False
        self.pool.set(self, 0)

    def wake(self) -> None:
        if not self.open:
            self.open = True
            self.tokens, self.seen = self.file or ([], 0)
            self.file = None
            self.hold()

    def close(self) -> None:
        self.open, self.file = False, None
        self.pool.set(self, 0)

    def hold(self) -> None:
        self.pool.set(self, _pages(len(self.tokens)))

    def append(self, tokens: Sequence[int]) -> None:
        """Hold all of them for a moment, then cut back to the bound."""
        self.store(tokens)
        self.cut()

    def store(self, tokens: Sequence[int]) -> None:
        self.tokens = [*self.tokens, *tokens]
        self.seen += len(tokens)
        self.hold()

    def cut(self) -> None:
        self.tokens = self.tokens[-self.bound * PAGE :]
        self.hold()

    def state(self) -> tuple[list[int], int]:
        if self.file is not None:
            return self.file
        return list(self.tokens), max(self.seen, 0)


class FakeJob:
    """Reads ``prompt`` and replies with ``reply`` tokens; keeps its session or opens one."""

    def __init__(
        self,
        pool: FakePool,
        prompt: Sequence[int],
        reply: int,
        session: FakeSession | None = None,
        bound: int = 3,
    ) -> None:
        self.pool, self.prompt, self.reply = pool, list(prompt), reply
        self.kept, self.own = session, session or FakeSession(pool, bound)
        self.read, self.said = 0, 0
        self.stored: tuple[list[int], int, int] = ([], 0, 0)  # before the chunk that is being read
        self.before: tuple[list[int], int] | None = None
        self.stopped = self.ended = False
        self.fails_at: int | None = None
        self.fails_reading = False  # not when the chunk begins, but in the pass
        self.prepared, self.missing = False, 0  # what has to come before it is ready
        self.fetches = False  # from other servers

    @property
    def session(self) -> FakeSession | None:
        return self.kept

    @property
    def next_chunk(self) -> int:
        return min(CHUNK, len(self.prompt) - self.read)

    failure = None

    @property
    def finished(self) -> bool:
        return self.stopped or self.said >= self.reply

    @property
    def ready(self) -> bool:
        assert self.prepared, "asked before it was told to prepare"
        return not self.missing

    def prepare(self) -> None:
        assert not self.prepared
        self.prepared = True

    def reservation(self) -> Reservation:
        snapshot = 0
        if self.kept is not None and len(self.prompt) > CHUNK:
            snapshot = _pages(len(self.kept.state()[0]))
        if self.kept is None:
            every = _pages(len(self.prompt) + self.reply)
            steady = min(every, self.own.bound + 1)
            return Reservation(steady, min(every, steady + CHUNK // PAGE) - steady)
        return Reservation(self.kept.bound + 1, CHUNK // PAGE, snapshot)

    slow_to_begin = False

    def begin(self) -> None:
        assert self.ready
        if self.before is None:
            self.own.wake()
            self.before = self.own.state()
            if self.kept is not None and len(self.prompt) > CHUNK:
                self.pool.set(self, _pages(len(self.before[0])))
        if self.fails_at == self.read // CHUNK and not self.fails_reading:
            raise BudgetError("this chunk cannot be begun")

    def store(self) -> None:
        """Hold all entries of the next chunk; :meth:`finish_chunk` cuts them back."""
        if self.fails_at == self.read // CHUNK and self.fails_reading:
            raise BudgetError("this chunk cannot be read")
        count = self.next_chunk
        self.stored = (list(self.own.tokens), self.own.seen, self.read)
        self.own.store(self.prompt[self.read : self.read + count])
        self.read += count

    def unstore(self) -> None:
        """Be as before :meth:`store`."""
        self.own.tokens, self.own.seen, self.read = self.stored
        self.own.hold()

    def finish_chunk(self) -> bool:
        self.own.cut()
        if self.read < len(self.prompt):
            return False
        self.pool.set(self, 0)
        self.said = 1
        return True

    def roll_back(self) -> None:
        if self.before is not None:
            self.own.tokens, self.own.seen = self.before
            self.own.hold()
            self.pool.set(self, 0)
        self.end()

    def step(self) -> None:
        self.own.append([-1])
        self.said += 1

    def interrupt(self) -> None:
        self.stopped = True

    def end(self) -> None:
        self.ended = True
        if self.kept is None:
            self.own.close()


class FakeCopy:
    """A copy of so many pages."""

    def __init__(self, pool: FakePool, pages: int) -> None:
        self.pool, self.pages = pool, pages

    def close(self) -> None:
        self.pool.set(self, 0)
        self.pages = 0


class FakeExecutor:
    """Reads and decodes in simulated time; a pass may be left after each of its layers.

    Args:
        layers: of a pass; token: seconds that reading one takes, all layers together.
        step: seconds of a decode step, beside ``stream`` for each reply in it.

    Attributes:
        now: the time; left: the jobs of the pass that was left, and what has come of them so far;
            layers_read: of all passes.
    """

    def __init__(
        self,
        pool: FakePool,
        pass_tokens: int = 0,
        layers: int = 1,
        token: float = 0.0,
        step: float = 0.0,
        stream: float = 0.0,
    ) -> None:
        self.pool, self.pass_tokens = pool, pass_tokens
        self.layers, self.token, self.step_time, self.stream = layers, token, step, stream
        self.now, self.steps, self.aborted = 0.0, 0, 0
        self.passes: list[list[FakeJob]] = []
        self.left: tuple[list[FakeJob], dict[FakeJob, bool | Exception]] | None = None
        self._layer, self._tokens, self.layers_read = 0, 0, 0

    def limit(self) -> int | None:
        return self.pool.limit

    def pages_for(self, job: Job) -> int:
        assert isinstance(job, FakeJob)
        copy = self.pool.held.get(job, 0)
        return copy + _pages(len(job.own.tokens) + job.next_chunk)

    def read(
        self, jobs: Sequence[Job], seconds: float | None = None
    ) -> list[bool | Exception] | None:
        """Store the chunks of all before any is cut back."""
        taken = [job for job in jobs if isinstance(job, FakeJob)]
        until = None if seconds is None else self.now + seconds
        if self.left is None:
            self._begin(taken)
        assert self.left is not None and self.left[0] == taken, "not the pass that was left"
        found, layer = self.left[1], self.token * self._tokens / self.layers
        for _ in range(self._layer, self.layers):
            self.now += layer
            self._layer += 1
            self.layers_read += 1
            if until is not None and self._layer < self.layers and self.now + layer > until:
                return None
        self.left = None
        return [found[job] if job in found else job.finish_chunk() for job in taken]

    def abort(self) -> None:
        assert self.left is not None
        for job in self.left[0]:
            job.unstore()
        self.left = None
        self.aborted += 1

    def _begin(self, taken: list[FakeJob]) -> None:
        assert len({job.own for job in taken}) == len(taken)
        self.passes.append(taken)
        self._layer, self._tokens = 0, sum(job.next_chunk for job in taken)
        found: dict[FakeJob, bool | Exception] = {}
        self.left = taken, found
        for job in taken:
            try:
                job.store()
            except BudgetError as error:
                found[job] = error

    def step(self, jobs: Sequence[Job]) -> None:
        self.steps += 1
        self.now += self.step_time + self.stream * len(jobs)
        for job in jobs:
            assert isinstance(job, FakeJob) and not job.finished
            job.step()


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)
