"""The states of the cache in which ``eval.bench.kernels`` times each kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One state of the cache: ``batch`` sequences of ``mean`` entries per row."""

    kernel: str
    batch: int
    mean: int
    skew: float = 1.0
    layers: int = 0  # 0: the model's own, for attention more if the GPU's cache would hold them
    chunk: int = 0

    def __str__(self) -> str:
        """Return a short name for tables."""
        rows = "even" if self.skew == 1 else f"{self.skew:g}x skew"
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kernel}, B={self.batch}, {self.mean}/row, {rows}{chunk}"


CASES = [
    Case("attention", 16, 16384, layers=4),
    Case("attention", 1, 32768),
    *(Case("attention", 16, 256, skew) for skew in (1, 10)),
    *(Case("attention", batch, 256, 10) for batch in (1, 4, 64)),
    *(Case("attention", 64, mean, 10) for mean in (64, 1024)),
    *(Case("work list", batch, 256, 10) for batch in (1, 16, 64)),
    *(Case("append", batch, 256, 10) for batch in (1, 16, 64)),
    *(Case("eviction", batch, 256, skew) for batch in (1, 16, 64) for skew in (1, 10)),
    Case("eviction", 16, 1024, 10),
    *(Case("prefill", 1, mean, skew, 36, 2048) for mean, skew in ((256, 10), (1024, 10))),
    Case("prefill", 1, 16384, 1, 4, 2048),
    *(Case("window scores", 16, mean, skew) for mean, skew in ((256, 1), (256, 10), (1024, 10))),
]
QUICK = [
    CASES[0],
    CASES[2],
    CASES[3],
    Case("append", 16, 256, 10),
    Case("eviction", 16, 256, 10),
    Case("prefill", 1, 1024, 10, 36, 2048),
]
TINY = [
    Case(kernel, 3, 12, skew, 2, chunk=6 if kernel == "prefill" else 0)
    for kernel in ("attention", "work list", "append", "eviction", "prefill", "window scores")
    for skew in (1, 4)
]
