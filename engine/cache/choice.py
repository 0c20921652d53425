"""Choose how the cache holds keys and values where a budget in bytes leaves that open.

The same bytes hold a few exact entries or more rounded ones. Which of them answers best was
measured at equal bytes (``python -m benchmarks.quality --bytes``:
benchmarks/results/quality-bytes-*.json, benchmarks/notes/kv-forms.md), and :data:`BEST` is what
these figures say; a test compares it with them.
"""

from __future__ import annotations

from dataclasses import replace

from mmkv.engine.budget import EVERY_STEP, Budget, Interval, format_bytes
from mmkv.engine.cache.forms import FORMS, KVForm
from mmkv.engine.cache.layout import Layout
from mmkv.engine.errors import BudgetError

# (entries per layer and KV head that the bytes hold in bfloat16, the form that is best from there
# on), falling. Where entries are few, more of them count for more than exact ones.
BEST = ((32, "int8"), (13, "k8v4"), (0, "int4"))


def best_at(entries: float) -> str:
    """Return the best form where the bytes hold so many ``entries`` per row in bfloat16."""
    return next(name for least, name in BEST if entries >= least)


def choose_form(
    kv: str | None,
    budget: Budget,
    rows: int,
    longest: int,
    layout: Layout,
    interval: Interval = EVERY_STEP,
) -> tuple[KVForm, str | None]:
    """Return the form of an engine's cache, and a line on why where nobody named it.

    Only a budget in bytes chooses. A form in which the bytes hold every position of the model comes
    first: nothing is evicted there, and bits would be lost for nothing.

    Args:
        kv: the form that was asked for; None: none.
        rows: layers x KV heads; longest: positions of the model; layout: of the model's dtype.
        interval: when sequences are cut while they decode.

    Raises:
        PolicyError: the form asked for cannot be for this head_dim.
    """
    size, head_dim = layout.page_size, layout.head_dim

    def form(name: str) -> KVForm:
        return KVForm.of(name, layout.dtype, head_dim)

    def entry_bytes(name: str) -> int:
        # Codes of 4 bits come in pairs: an odd head_dim is counted as if it were even.
        return replace(layout, form=FORMS[name], head_dim=head_dim + head_dim % 2).entry_bytes()

    def entries(name: str) -> float:
        """Return the entries per row that the budget lets stay, however full their pages are."""
        try:
            return budget.entries(rows, 0, size, size * entry_bytes(name), interval) / rows
        except BudgetError:
            return 0.0

    if kv is not None or budget.kind != "bytes":
        return form(kv or "auto"), None
    given = f"a budget of {format_bytes(budget.value)}"
    for name in ("auto", "bf16"):
        if entries(name) >= longest:
            return form(name), f"kv {name}: {given} holds all {longest:,} positions of the model"
    # The bytes left for entries once the last page of each row is counted as nearly empty.
    best = best_at(entries("k8v4") * entry_bytes("k8v4") / entry_bytes("bf16"))
    best = "int8" if head_dim % 2 else best
    return form(best), (
        f"kv {best}: {given} holds {entries(best):,.0f} entries per row in it, "
        f"{entries('bf16'):,.0f} in bfloat16, and there it answered best of two small models "
        "(docs/reference/kv-forms.md; no other one was measured); kv auto keeps exact ones"
    )
