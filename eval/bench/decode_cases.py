"""The cases of ``eval.bench.decode``: batch, tokens seen and budget, alone and in sets."""

from __future__ import annotations

from dataclasses import dataclass

from mmkv.eval.bench.output import BenchError


@dataclass(frozen=True)
class Case:
    """``batch`` sequences that have seen ``context`` tokens and may keep ``budget`` per row."""

    batch: int
    context: int
    budget: int
    kind: str = "given"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse ``B:CONTEXT:M``. Raises BenchError."""
        try:
            batch, context, budget = (int(part) for part in text.split(":"))
        except ValueError:
            raise BenchError(
                f"case {text!r} is not B:CONTEXT:M, such as 16:16384:256, nor a set: "
                f"{', '.join(SETS)}"
            ) from None
        if min(batch, context, budget) < 1:
            raise BenchError(f"case {text!r} has a number below 1; give B:CONTEXT:M from 1 on")
        return cls(batch, context, budget)


SETS: dict[str, list[Case]] = {
    "targets": [
        Case(batch, context, budget, "targets")
        for batch, context, budget in (
            (1, 16384, 256),
            (4, 32768, 1024),
            (8, 16384, 1024),
            (16, 16384, 256),
            (64, 4096, 256),
        )
    ],
    "grid": [
        Case(batch, context, budget, "grid")
        for batch in (1, 4, 8, 16, 64)
        for context, budget in ((4096, 64), (16384, 128), (32768, 512), (131072, 1024))
    ],
    "largest": [Case(0, 16384, 256, "largest")],
    "tiny": [Case(1, 40, 12, "tiny"), Case(3, 60, 12, "tiny")],
}
