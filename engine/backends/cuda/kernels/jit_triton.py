"""``triton.jit`` for kernels whose numbers change while an engine runs.

Triton compiles a kernel anew where a number becomes 1, becomes divisible by 16 or ceases to be, and
where an address is no longer a multiple of 16 bytes. Compiling takes about a second, in which
everybody waits for the next token. So what depends on lengths, on the batch or on how far pool and
tables have grown is left out, and so are the addresses of views that lie anywhere. A kernel that
knows more about one of them says so: ``tl.multiple_of``.
"""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

from functools import partial

import triton

NUMBERS = (
    # Of the batch and the model.
    *("batch_slots", "rows", "groups", "per_group", "layers", "runs", "chunks", "turn", "blocks"),
    # Of a policy and its budget.
    *("slack", "free", "most_entries", "most_row", "most_seen", "protect_first", "protect_recent"),
    # Of lengths, pool and tables.
    *("width", "capacity", "cells", "splits", "count", "entries", "tokens", "table_head"),
    *("pairs", "stage", "left_lse_head", "right_lse_head"),
    # Of the only row of a batch of one, which may be anything.
    "slots_row",
)
ADDRESSES = ("slots", "length", "table", "share", "floor", "above", "recent")

jit = partial(triton.jit, do_not_specialize=NUMBERS, do_not_specialize_on_alignment=ADDRESSES)
