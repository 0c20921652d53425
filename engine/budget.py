"""A KV budget in any of its three units."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

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

    def above(self, allowed: int, rows: int) -> int:
        """Return the entries of each row above its share that are let be; no more than there are
        in any cache, so that a tensor can count those of all rows.
        """
        return min(self.at(allowed, rows) - 1, _MOST)

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
# What a risk is, wherever one is printed or documented.
RISK = (
    "the share of later attention, as the gates predict it, that belongs to dropped entries; not "
    "the chance of a wrong answer"
)
# Tokens of a reply between two looks at the risk, each of which waits for a GPU.
TURN = 16


@dataclass(frozen=True)
class Budget:
    """How much of a sequence may stay.

    Attributes:
        kind: ``entries``: value = M, mean entries per (layer, KV head), the papers' unit;
            ``bytes``: value = physical bytes of pages after a step or a prompt;
            ``fraction``: value = share of the tokens seen, in (0, 1].
        risk, most: a sequence keeps more than that, at most ``most``, while its :data:`RISK` would
            be above ``risk`` (:class:`Dial`); both or neither.
    """

    kind: Literal["entries", "bytes", "fraction"]
    value: float
    risk: float | None = None
    most: Budget | None = None

    @classmethod
    def bytes(cls, count: int) -> Budget:
        """Return a budget of ``count`` physical bytes per sequence."""
        return cls("bytes", count)

    @classmethod
    def fraction(cls, share: float) -> Budget:
        """Return a budget that keeps ``share`` of the tokens seen."""
        return cls("fraction", share)

    @classmethod
    def dialled(
        cls,
        budget: Budget | float | str | None,
        risk: float | None,
        most: Budget | float | str | None,
    ) -> Budget | None:
        """Return ``budget`` with a risk that it grows by, up to ``most``.

        Args:
            budget: the part that a sequence may always keep; None: an eighth of ``most``. Without
                ``risk`` and ``most`` it is returned as :meth:`of` reads it, or None.

        Raises:
            BudgetError: one of ``risk`` and ``most`` is missing, or they cannot be.
        """
        if risk is None and most is None:
            return None if budget is None else cls.of(budget)
        if risk is None:
            raise BudgetError(
                "budget_max is how far a risk may grow the budget, and there is no risk; give one, "
                "such as 0.02, or a budget in place of budget_max, which does not grow"
            )
        if most is None:
            raise BudgetError(
                "a risk grows the budget up to budget_max, which is missing; give it, such as 64MiB"
            )
        bound = cls.of(most)
        if budget is None:
            return cls.of(bound.grown_by(risk))
        least = cls.of(budget)
        return cls.of(cls(least.kind, least.value, risk, bound))

    def grown_by(self, risk: float | None) -> Budget:
        """Return a budget that a risk grows up to this one, where only this one is given."""
        return Budget(self.kind, self.value / 8, risk, self)

    def as_list(self) -> list[Any]:
        """Return its form in files: unit and value; with a risk, that and its bound."""
        own: list[Any] = [self.kind, self.value]
        return own if self.most is None else [*own, self.risk, self.most.kind, self.most.value]

    @classmethod
    def of_list(cls, kind: Any, value: float, *dial: Any) -> Budget:
        """Return what :meth:`as_list` was called on. Raises BudgetError: it cannot be."""
        if not dial:
            return cls.of(cls(kind, value))
        risk, most_kind, most = dial
        return cls.of(cls(kind, value, risk, cls(most_kind, most)))

    @property
    def ceiling(self) -> Budget:
        """Return the most that a sequence may ever keep under it."""
        return self if self.most is None else self.most

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
        made._check_dial()
        return made

    def _check_dial(self) -> None:
        """Raise BudgetError where a risk and its bound cannot be."""
        if self.risk is None or self.most is None:
            if self.risk is not None or self.most is not None:
                raise BudgetError("a budget has both a risk and a bound, or neither; give both")
            return
        require_real("the risk", self.risk)
        if not 0 < self.risk < 1:
            raise BudgetError(
                f"a risk of {self.risk:g} cannot be; give a share between 0 and 1, such as 0.02"
            )
        most = Budget.of(self.most)
        if most.most is not None:
            raise BudgetError("budget_max has a risk of its own; give entries per row or bytes")
        if "fraction" in (self.kind, most.kind):
            raise BudgetError(
                "a budget that is a share of the tokens cannot follow a risk; give budget and "
                "budget_max in entries per row (256) or bytes (64MiB)"
            )
        if self.kind == most.kind and self.value > most.value:
            raise BudgetError(above_most(self))

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
            own = Budget(self.kind, self.value).describe()
            if self.most is not None and self == self.of(self.most).grown_by(self.risk):
                own = f"{own} (an eighth of budget_max, unless a budget is given)"
            raise BudgetError(
                f"the budget of {own} leaves {max(total, 0)} entries for {rows} rows "
                f"(layers x KV heads); give at least 1 entry per row ({least:,} bytes of pages)"
            )
        return total

    def describe(self) -> str:
        """Return the budget in words."""
        said = {
            "entries": f"{self.value:g} entries per row",
            "bytes": f"{self.value:,.0f} bytes",
            "fraction": f"{self.value:g} of the tokens seen",
        }[self.kind]
        if self.most is None:
            return said
        return f"{said} to {self.most.describe()} at risk {self.risk:g}"


@dataclass
class Dial:
    """How many entries a sequence may keep now, by how much of it has been forgotten.

    The risk r is predicted weight: forgotten / (forgotten + held). What an eviction will do to r is
    known beforehand: scores and the rows' shares say what goes. So the dial allows at least what
    keeps r at ``risk``, and at most what keeps it at half of that; between the two it stands still
    and does not flutter. Where r is above ``risk`` already, nothing more goes while there is room.

    Attributes:
        risk: the target; least, most: bounds, in entries of all rows; page: entries that it moves
            by, those of one page.
        allowed: entries that may stay now.
        room: how many of these are for tokens that come before it is turned again.
        turned_at: tokens seen when a reply turned it last; 0: a prompt has, and the first token of
            the reply, which needs room, will.
        full: whether more than ``most`` would have had to stay.
    """

    risk: float
    least: int
    most: int
    page: int
    allowed: int = 0
    room: int = 0
    turned_at: int = 0
    full: bool = False

    def __post_init__(self) -> None:
        self.allowed = min(max(self.allowed, self.least), self.most)

    def turn(self, enough: int, plenty: int, room: int = 0) -> None:
        """Turn it, by whole pages.

        Args:
            enough: entries that have to stay so that r is at most ``risk``, or more than there are
                where it is above that already; plenty: so that it is at most half of that.
        """
        wanted = self.allowed - self.room
        if wanted < enough or wanted > self._whole(plenty):
            wanted = self._whole(enough if wanted < enough else plenty)
        wanted, self.full = max(wanted, self.least), enough > self.most
        self.allowed = min(wanted + room, self.most)
        self.room = max(self.allowed - wanted, 0)

    def _whole(self, entries: int) -> int:
        """Return the least number of whole pages that is as many."""
        return -(-entries // self.page) * self.page


def above_most(budget: Budget) -> str:
    """Return the message for a budget that is above the bound it may grow to."""
    assert budget.most is not None
    least = Budget(budget.kind, budget.value)
    return (
        f"budget_max is {budget.most.describe()}, which is below the budget of {least.describe()} "
        "that always stays; raise budget_max or lower the budget"
    )


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
