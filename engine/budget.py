"""A KV budget in any of its three units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal

from mmkv.engine.errors import BudgetError, require_real

_KINDS = ("entries", "bytes", "fraction")
_MOST = 2**40
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True)
class Interval:
    """How many decode steps lie between two evictions of a sequence.

    Attributes:
        steps: so many at most.
        part: a row stands above its budget by less than one ``part``-th of it, so a small budget is
            cut more often; 0: ``steps`` whatever the budget.
    """

    steps: int = 1
    part: int = 0

    def at(self, allowed: int, rows: int) -> int:
        """Return the steps for a sequence that may keep ``allowed`` entries in all its rows."""
        if not self.part:
            return self.steps
        return min(self.steps, max(allowed // rows // self.part, 1))

    def slack(self, allowed: int, rows: int) -> int:
        """Count the entries above ``allowed`` that are let be, the same number in each row."""
        return (self.at(allowed, rows) - 1) * rows

    def within(self, total: int, rows: int) -> int:
        """Return what may stay so that, with the slack, at most ``total`` entries stand."""
        steps = self.steps
        if self.part:  # the least s with at(total - (s - 1) rows) <= s
            per_row = total // rows
            steps = min(steps, max((per_row + 1 - self.part) // (self.part + 1) + 1, 1))
        return total - (steps - 1) * rows

    @property
    def named(self) -> int | str:
        """Return what session files write: the steps, or both numbers as text."""
        if not self.part or self.steps == 1:
            return self.steps
        return f"{self.steps}, at most 1/{self.part} of the budget"


EVERY_STEP = Interval()


@dataclass(frozen=True)
class Budget:
    """How much of a sequence may stay.

    Attributes:
        kind: ``entries``: value = M, mean entries per (layer, KV head), the papers' unit;
            ``bytes``: value = physical bytes of pages after a step or a prompt;
            ``fraction``: value = share of the tokens seen, in (0, 1].
    """

    kind: Literal["entries", "bytes", "fraction"]
    value: float

    @classmethod
    def bytes(cls, count: int) -> Budget:
        """Return a budget of ``count`` physical bytes per sequence."""
        return cls("bytes", count)

    @classmethod
    def fraction(cls, share: float) -> Budget:
        """Return a budget that keeps ``share`` of the tokens seen."""
        return cls("fraction", share)

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read a budget as people write it: 256 (entries per row), 25 % (a share) or 64MiB.

        Raises:
            BudgetError: for text that is none of these, or no budget.
        """
        written = text.strip()
        try:
            if written.endswith("%"):
                return cls.of(cls.fraction(float(written[:-1]) / 100))
            if written[-1:].lower() == "b":
                return cls.of(cls.bytes(parse_bytes(written)))
            return cls.of(float(written))
        except ValueError as error:
            raise BudgetError(
                f"{text!r} is not a budget; write entries per row (256), a share (25%) or bytes "
                "(64MiB)"
            ) from error

    @classmethod
    def of(cls, budget: Budget | float | str) -> Budget:
        """Return ``budget`` itself, M entries per row from a number, or text as :meth:`parse` reads
        it.

        Raises:
            BudgetError: for what cannot be a budget.
        """
        if isinstance(budget, str):
            return cls.parse(budget)
        if not isinstance(budget, Budget):
            require_real("a budget that is no text and no mmkv.Budget", budget)
        made = budget if isinstance(budget, Budget) else cls("entries", float(budget))
        require_real("the value of a budget", made.value)
        if made.kind not in _KINDS:
            raise BudgetError(f"{made.kind!r} is no unit of a budget; use {', '.join(_KINDS)}")
        if not math.isfinite(made.value) or made.value <= 0:
            raise BudgetError(f"a budget of {made.value} keeps nothing; give a positive number")
        if made.kind == "fraction" and made.value > 1:
            raise BudgetError(f"a budget fraction of {made.value} is above 1; give one in (0, 1]")
        return made

    def entries(
        self,
        rows: int,
        seen: int,
        page_size: int,
        page_bytes: int,
        interval: Interval = EVERY_STEP,
    ) -> int:
        """Return M_global: the entries one sequence may hold after eviction.

        Bytes are turned into entries with every row's last page counted as nearly empty, so
        the pages really held never pass them, nor between two evictions.

        Args:
            interval: what is let be above M_global between two evictions; only bytes leave room
                for it.

        Raises:
            BudgetError: when fewer than one entry per row would be left.
        """
        if self.kind == "fraction":
            return max(rows, math.floor(self.value * seen * rows))
        # Past any sequence's length a budget keeps all; int64 holds no more.
        if self.kind == "entries":
            total = math.floor(min(self.value, _MOST) * rows)
        else:
            pages = int(min(self.value, _MOST * page_bytes)) // page_bytes
            total = interval.within(pages * page_size - rows * (page_size - 1), rows)
        if total < rows:
            least = rows * page_size + interval.slack(rows, rows)
            least = -(-least // page_size) * page_bytes
            raise BudgetError(
                f"the budget of {self.describe()} leaves {max(total, 0)} entries for {rows} rows "
                f"(layers x KV heads); give at least 1 entry per row ({least:,} bytes of pages)"
            )
        return total

    def describe(self) -> str:
        """Return the budget in words."""
        return {
            "entries": f"{self.value:g} entries per row",
            "bytes": f"{self.value:,.0f} bytes",
            "fraction": f"{self.value:g} of the tokens seen",
        }[self.kind]


def format_bytes(count: float) -> str:
    """Format a number of bytes, such as 264.0 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} B" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def parse_bytes(text: str) -> int:
    """Read an amount of memory such as 4096, 64MiB or 1.5 GB.

    Returns:
        whole bytes.

    Raises:
        BudgetError: for other text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise BudgetError(f"{text!r} is not an amount of memory; write for example 64MiB")
    count = float(match[1]) * _UNITS[match[2]]
    if not math.isfinite(count):
        raise BudgetError(
            f"{text[:40]!r} is more memory than there can be; write for example 64MiB"
        )
    return int(count)
