"""What the routes share, and who asks."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from mmkv.engine.errors import CapacityError
from mmkv.server.errors import ApiError

if TYPE_CHECKING:
    from mmkv.server.footprint import Footprint
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
        media: fetches and decodes what requests name; footprint: what the process may take.
        busy: requests under way, by caller.
    """

    settings: Settings
    facts: Facts
    worker: Worker
    metrics: Metrics
    media: MediaResolver
    footprint: Footprint | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    busy: Counter[str] = field(default_factory=Counter)

    @cached_property
    def weights(self) -> dict[str, float]:
        """By tenant, what its sessions weigh in a shared budget; 1 for those that are not there."""
        tenants = [digest_of_key(key).hex() for key in self.settings.api_keys]
        return dict(zip(tenants, self.settings.key_weights, strict=False))

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


def digest_of_key(key: str) -> bytes:
    """Return SHA-256 of an API key: the name of its tenant."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
