"""Appending an entry on the device: the same pages as the eager cache, in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.append import empty_room
from mmkv.engine.cache import RaggedCache
from mmkv.engine.errors import BudgetError
from tests.support.kernels import (
    DEVICE,
    ONE_SPILL,
    assert_same,
    compile_for_hopper,
    eager_cache,
    forms,
    is_triton,
    needs_compiler,
    snapshot,
    to_device,
    unchanged,
)

FORMS = forms("append", "make_room")
LENGTHS = torch.tensor([[[0, 7, 8], [15, 16, 1]], [[8, 8, 8], [8, 8, 8]], [[9, 3, 0], [0, 6, 24]]])


def batch_slots(seqs: list[int]) -> Tensor:
    return torch.tensor(seqs, device=DEVICE)


def eager_slots(cache: RaggedCache, seqs: list[int]) -> Tensor:
    """Return what the eager cache hands out, with -1 in idle batch slots."""
    slots = torch.full((len(seqs), cache.layers, cache.kv_heads), -1)
    live = [seq for seq in seqs if seq >= 0]
    if live:
        slots[torch.tensor(seqs) >= 0] = cache.append(torch.tensor(live), 1)[..., 0]
    return slots


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page", [1, 8, 16])
def test_slots_and_pages_are_those_of_the_eager_cache(form: Any, page: int) -> None:
    """Rounds of appends to changing batches, in any order, with idle batch slots between."""
    lengths = LENGTHS // 8 if page == 1 else LENGTHS * page // 8
    cache = eager_cache(lengths, page, pages=300, width=4 if page > 1 else 20)
    rows, columns = to_device(cache)
    room = empty_room(4, rows)
    batches = [[2, -1, 0, 1], [-1, -1, 1, -1], [0, 1, 2, -1], [-1] * 4]
    for number in range(3 if is_triton(form) else 12):
        seqs = batches[number % len(batches)]
        slots = form(room, rows, batch_slots(seqs))
        assert slots is room.slots
        assert torch.equal(slots.cpu(), eager_slots(cache, seqs))
        assert_same(cache, rows, columns)
    assert int(room.error) == 0


@pytest.mark.parametrize("form", FORMS)
def test_an_idle_batch_changes_nothing(form: Any) -> None:
    rows, _ = to_device(eager_cache(LENGTHS, 8, pages=40, width=4))
    room, before = empty_room(2, rows), snapshot(rows)
    room.slots.zero_()
    assert form(room, rows, batch_slots([-1, -1])).eq(-1).all()
    assert unchanged(before, rows) and int(room.error) == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_last_free_page_is_used(form: Any) -> None:
    """Batch slots 1 and 0 take 6 and 3 pages; the table's last column is used too."""
    held = int(((LENGTHS + 7) // 8).sum())
    cache = eager_cache(LENGTHS, 8, pages=held + 9, width=3)
    rows, columns = to_device(cache)
    room = empty_room(2, rows)
    assert torch.equal(form(room, rows, batch_slots([1, 0])).cpu(), eager_slots(cache, [1, 0]))
    assert int(rows.top) == 0 and int(room.error) == 0
    assert_same(cache, rows, columns)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("why", ["a page short", "a column short"])
def test_a_refused_append_changes_nothing_until_the_host_has_read_it(form: Any, why: str) -> None:
    held, seqs = int(((LENGTHS + 7) // 8).sum()), [1, -1, 0]
    cache = eager_cache(LENGTHS, 8, pages=held + 8, width=4)
    if why == "a column short":
        cache = eager_cache(LENGTHS, 8, pages=100, width=3)
        seqs = [1, -1, 2]  # a row of sequence 2 fills its 3 columns
    else:
        with pytest.raises(BudgetError):
            eager_slots(cache, seqs)
    rows, columns = to_device(cache)
    room, before = empty_room(3, rows), snapshot(rows)
    assert form(room, rows, batch_slots(seqs)).eq(-1).all()
    assert int(room.error) == 1 and unchanged(before, rows)
    # Sequence 1 alone would fit, but the step before it has not been made up for.
    assert form(room, rows, batch_slots([1, -1, -1])).eq(-1).all()
    assert int(room.error) == 1 and unchanged(before, rows)
    room.error.zero_()
    assert torch.equal(
        form(room, rows, batch_slots([1, -1, -1])).cpu(), eager_slots(cache, [1, -1, -1])
    )
    assert int(room.error) == 0
    assert_same(cache, rows, columns)


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_a_warp_and_an_odd_number_of_batch_slots(form: Any) -> None:
    source = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 33, (5, 31, 10), generator=source) // 4 * 4
    cache = eager_cache(lengths, 8, pages=9000, width=6)
    rows, columns = to_device(cache)
    seqs = [4, 0, -1, 2, 1]
    assert torch.equal(
        form(empty_room(5, rows), rows, batch_slots(seqs)).cpu(), eager_slots(cache, seqs)
    )
    assert_same(cache, rows, columns)


LONGS = ["seqs", "length", "table", "stack", "top", "wanted", "top_before", "slots"]
TYPES = dict.fromkeys(LONGS, "*i64") | {"error": "*i32"} | dict.fromkeys(["rows", "width"], "i32")


@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "registers", "shared"),
    [
        ("count_kernel", 40, 64),
        ("take_kernel", 64, 4096),
    ],
)
def test_kernels_fit_a_hopper_sm(kernel: str, registers: int, shared: int, tmp_path: Path) -> None:
    """36 layers of 8 heads, 64 batch slots."""
    from mmkv.engine.backends.cuda.kernels import append_triton as ours

    report = compile_for_hopper(
        "mmkv.engine.backends.cuda.kernels.append_triton",
        kernel,
        {**TYPES, "batch_slots": "i32"},
        {"PAGE": 16, "BLOCK": 512, "BATCH": 64},
        ours.WARPS,
        tmp_path,
    )
    assert report.registers <= registers and report.spills <= ONE_SPILL
    assert report.shared <= shared
