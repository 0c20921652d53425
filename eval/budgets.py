"""Parse budgets of comparisons: shares of the dialogue (``1/8``) or entries (``64``).

A number of 1 or less is a share of the dialogue's tokens; a larger one is the mean number of
entries per layer and KV head.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

_ENTRIES = "entries per layer and KV head"


def is_share(budget: str) -> bool:
    """Return whether a budget is a share, which grows with the dialogue."""
    return Fraction(budget) <= 1


def in_words(budget: str) -> str:
    """Return the words for a budget in titles."""
    return f"{budget} of the context" if is_share(budget) else f"{budget} {_ENTRIES}"


def axis_label(budgets: Sequence[str]) -> str:
    """Return the label of a plot's axis over these budgets."""
    kinds = {is_share(budget) for budget in budgets}
    if len(kinds) > 1:
        return "budget"
    return "budget, share of the context" if kinds == {True} else f"budget, {_ENTRIES}"
