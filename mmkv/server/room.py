"""What the routes share, and who asks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import CapacityError
from mmkv.server.errors import ApiError

if TYPE_CHECKING:
    from mmkv.server.media.resolver import MediaResolver
    from mmkv.server.metrics import Metrics
    from mmkv.server.settings import Facts, Settings
    from mmkv.server.worker import Worker


@dataclass(frozen=True)
class Caller:
    """Who asks: ``tenant`` has a memory of its own, ``name`` (a key or an address) has turns."""

    tenant: str
    name: str


@dataclass
class Room:
    """What the routes share.

    Attributes:
        media: fetches and decodes what requests name.
        busy: requests under way, by caller.
    """

    settings: Settings
    facts: Facts
    worker: Worker
    metrics: Metrics
    media: MediaResolver
    started: int = field(default_factory=lambda: int(time.time()))
    busy: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def entered(self, caller: Caller) -> Iterator[None]:
        """Count a request of ``caller`` while it is under way. Raises ApiError (429)."""
        most = self.settings.max_per_key
        if most is not None and self.busy[caller.name] >= most:
            self.metrics.rejected.labels("rate").inc()
            raise ApiError(
                429,
                f"{most} requests of yours are under way, as many as this server allows; wait for "
                "one to end",
                "rate_limit_exceeded",
            )
        self.busy[caller.name] += 1
        try:
            yield
        except CapacityError as error:
            waits = "queue" if error.unit == "requests" else "memory"
            reason = "too_large" if error.final else waits
            self.metrics.rejected.labels(reason).inc()
            raise
        finally:
            self.busy[caller.name] -= 1
            if not self.busy[caller.name]:
                del self.busy[caller.name]
