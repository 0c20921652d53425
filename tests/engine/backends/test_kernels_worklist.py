"""The work list: every tile of every row is assigned once, in order, in equal runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.buffers import WorkList
from mmkv.engine.backends.cuda.kernels.worklist import (
    build_worklist_reference,
    empty_worklist,
    tile_entries,
)
from tests.support.kernels import DEVICE, compile_for_hopper, forms, needs_compiler

FORMS = forms("worklist", "build_worklist")


def expected(entries: list[int], sources: list[int], tile: int, runs: int):
    """Deal tiles one by one; returns the rows' and the runs' columns."""
    tiles = [
        (row, start)
        for row, count in enumerate(entries)
        for start in (range(0, count, tile) or [0])
    ]
    busy = min(runs, len(tiles))
    dealt = [
        tiles[p * len(tiles) // busy : (p + 1) * len(tiles) // busy] if p < busy else []
        for p in range(runs)
    ]
    rows = []
    for row, count in enumerate(entries):
        owners = [p for p, mine in enumerate(dealt) if any(r == row for r, _ in mine)]
        rows.append([count, sources[row], owners[0], len(owners)])
    heads = []
    for mine in dealt:
        row, start = mine[0] if mine else (0, 0)
        heads.append([len(mine), row, start, entries[row], sources[row]] if mine else [0] * 5)
    return rows, heads


def check(form, length: Tensor, seqs: list[int], tile: int, runs: int) -> WorkList:
    layers, heads = length.shape[1:]
    work = empty_worklist(len(seqs), layers, heads, tile, runs, DEVICE)
    work.rows.fill_(-7)
    work.runs.fill_(-7)
    form(work, torch.tensor(seqs, device=DEVICE), length.to(DEVICE))
    for layer in range(layers):
        where = [(max(s, 0), h, s >= 0) for s in seqs for h in range(heads)]
        entries = [int(length[s, layer, h]) if live else 0 for s, h, live in where]
        sources = [(s * layers + layer) * heads + h for s, h, _ in where]
        rows, columns = expected(entries, sources, tile, runs)
        assert work.rows[layer].tolist() == rows
        assert work.runs[layer, :, :5].tolist() == columns
    return work


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("runs", [1, 5, 70])
def test_tiles_are_assigned_once_and_evenly(form, runs) -> None:
    length = torch.tensor([[[1, 16], [0, 0]], [[33, 400], [15, 17]], [[64, 3], [90, 0]]])
    check(form, length, [2, 0, 1], 16, runs)


@pytest.mark.parametrize("form", FORMS)
def test_idle_batch_slots_count_as_empty(form) -> None:
    length = torch.tensor([[[40, 16]], [[33, 40]]])
    work = check(form, length, [-1, 1, -1], 16, 4)
    assert work.rows[0, :, 0].tolist() == [0, 0, 33, 40, 0, 0]
    check(form, length, [-1, -1], 16, 9)


@pytest.mark.parametrize("form", FORMS)
def test_more_rows_than_one_block(form) -> None:
    """300 rows, and runs in four blocks: sums carry over from block to block."""
    generator = torch.Generator().manual_seed(0)
    length = torch.randint(0, 70, (60, 1, 5), generator=generator)
    check(form, length, torch.randperm(60, generator=generator).tolist(), 16, 100)


def test_long_rows_do_not_overflow() -> None:
    """Tiles times runs pass 2**31."""
    work = check(build_worklist_reference, torch.full((1, 1, 2), 10_000_000), [0], 16, 2000)
    assert int(work.runs[0, :, 0].sum()) == 2 * 625_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 130), min_size=2, max_size=2), min_size=1, max_size=6),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 20),
    st.randoms(use_true_random=False),
)
def test_any_lengths(lengths, tile, runs, random) -> None:
    seqs = [random.choice([-1, random.randrange(len(lengths))]) for _ in range(4)]
    check(build_worklist_reference, torch.tensor(lengths)[:, None], seqs, tile, runs)


def test_a_tile_is_a_fixed_number_of_bytes() -> None:
    half = {d: tile_entries(d, torch.bfloat16) for d in (32, 64, 96, 128)}
    assert half == {32: 128, 64: 64, 96: 32, 128: 32}
    assert tile_entries(128, torch.float32) == 16


@needs_compiler
def test_kernel_fits_a_hopper_sm(tmp_path: Path) -> None:
    types = dict.fromkeys(("seqs", "length"), "*i64")
    types |= dict.fromkeys(("rows_out", "runs_out"), "*i32")
    types |= dict.fromkeys(("rows", "runs", "layers"), "i32")
    constants = {"HEADS": 8, "TILE": 32, "BLOCK_ROWS": 128, "BLOCK_RUNS": 32}
    report = compile_for_hopper(
        "mmkv.engine.backends.cuda.kernels.worklist_triton",
        "worklist_kernel",
        types,
        constants,
        4,
        tmp_path,
    )
    assert report.spills == 0 and report.registers <= 168 and report.shared <= 4096
