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

    def entries(self, rows: int, seen: int, page_size: int, page_bytes: int, slack: int = 0) -> int:
        """Return M_global: the entries one sequence may hold after eviction.

        Bytes are turned into entries with every row's last page counted as nearly empty, so
        the pages really held never pass them, nor between two evictions.

        Args:
            slack: entries above M_global that are let be between two evictions; only bytes leave
                room for them.

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
            total = pages * page_size - rows * (page_size - 1) - slack
        if total < rows:
            least = -(-(rows * page_size + slack) // page_size) * page_bytes
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
