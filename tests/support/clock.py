"""A clock that a test owns."""

from __future__ import annotations

from collections.abc import Callable


class Clock:
    """Time that passes only when somebody waits, and then at once.

    ``waits``: seconds of every wait. ``meanwhile``: called at the start of the next wait.
    """

    def __init__(self) -> None:
        self.time = 0.0
        self.waits: list[float] = []
        self.meanwhile: Callable[[], object] | None = None

    def now(self) -> float:
        return self.time

    def wait(self, seconds: float) -> None:
        started = self.time
        self.waits.append(seconds)
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        self.time = max(self.time, started + seconds)
