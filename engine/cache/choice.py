"""Choose how the cache holds keys and values where a budget in bytes leaves that open.

The same bytes hold a few exact entries or more rounded ones. Which of them answers best was
measured at equal bytes (``python -m eval.quality --bytes``: eval/results/quality-bytes-*.json,
docs/kv-forms.md), and :data:`BEST` is what these figures say; a test compares it with them.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.budget import Budget, format_bytes
from engine.cache.forms import FORMS, Form
from engine.cache.layout import Layout

# (entries per layer and KV head that the bytes hold in bfloat16, the form that is best from there
# on), falling. Where entries are few, more of them count for more than exact ones.
BEST = ((32, "int8"), (13, "k8v4"), (0, "int4"))


def best_at(entries: float) -> str:
    """Return the best form where the bytes hold so many ``entries`` per row in bfloat16."""
    return next(name for least, name in BEST if entries >= least)


def choose_form(
    kv: str | None, budget: Budget, rows: int, longest: int, layout: Layout
) -> tuple[Form, str | None]:
    """Return the form of an engine's cache, and a line on why where nobody named it.

    Only a budget in bytes chooses. A form in which the bytes hold every position of the model comes
    first: nothing is evicted there, and bits would be lost for nothing.

    Args:
        kv: the form that was asked for; None: none.
        rows: layers x KV heads; longest: positions of the model; layout: of the model's dtype.

    Raises:
        PolicyError: the form asked for cannot be for this head_dim.
    """
    if kv is not None or budget.kind != "bytes":
        return Form.of(kv or "auto", layout.dtype, layout.head_dim), None
    given = f"a budget of {format_bytes(budget.value)}"
    pages = rows * math.ceil(longest / layout.page_size)
    for name in ("auto", "bf16"):
        form = Form.of(name, layout.dtype, layout.head_dim)
        if pages * layout.page_size * replace(layout, form=form).entry_bytes() <= budget.value:
            return form, f"kv {name}: {given} holds all {longest:,} positions of the model"
    held = {
        name: budget.value / rows / replace(layout, form=FORMS[name]).entry_bytes()
        for name in ("bf16", *(name for _, name in BEST))
    }
    best = best_at(held["bf16"])
    if layout.head_dim % 2:  # codes of 4 bits come in pairs
        best = "int8"
    note = (
        f"kv {best}: {given} holds {held[best]:,.0f} entries per row in it, {held['bf16']:,.0f} in "
        "bfloat16, and there it answered best (docs/kv-forms.md); kv auto keeps exact ones"
    )
    return Form.of(best, layout.dtype, layout.head_dim), note
