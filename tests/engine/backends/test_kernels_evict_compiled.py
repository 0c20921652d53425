"""The eviction kernels on a GPU: in a CUDA graph, and what a Hopper SM has room for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmkv.engine.backends.cuda.kernels.append import empty_room, make_room
from mmkv.engine.backends.cuda.kernels.buffers import BLOCK, TURNS
from mmkv.engine.backends.cuda.kernels.evict import empty_eviction
from mmkv.engine.policies import make_policy
from tests.support.kernels import (
    COLUMNS,
    DEVICE,
    ONE_SPILL,
    assert_same,
    compile_for_hopper,
    eager_cache,
    eager_evict,
    needs_compiler,
    on_device,
    snapshot,
    to_device,
)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("name", ["dbtrimkv", "trimkv"])
def test_append_and_evict_in_one_cuda_graph(name: str) -> None:
    """Captured once, replayed for steps that take pages, drop entries, and do neither."""
    from mmkv.engine.backends.cuda.kernels.evict import evict

    policy = make_policy(name)
    lengths = torch.full((2, 2, 2), 20)
    cache = eager_cache(lengths, 8, pages=120, width=8)
    rows, columns = to_device(cache)
    seqs, seen, allowed = on_device([1, 0, -1]), on_device([20, 20, 0]), on_device([90, 70, 0])
    room, work = empty_room(3, rows), empty_eviction(3, rows)
    graph, state = torch.cuda.CUDAGraph(), snapshot(rows, columns)

    def step() -> None:
        slots = make_room(room, rows, seqs)
        seat = slots.clamp(min=0).flatten()
        columns.position.view(-1)[seat] = seen[:, None].expand(3, 4).flatten().int()
        seen.add_(1)
        evict(work, policy, rows, columns, seqs, seen, allowed)

    step()  # compiles; a capture may not
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    now = [rows.length, rows.table, rows.stack, rows.top]
    now += [getattr(columns, column) for column in COLUMNS]
    for tensor, old in zip(now, state, strict=True):
        tensor.copy_(old)
    seen.copy_(on_device([20, 20, 0]))
    for number in range(40):
        graph.replay()
        place = cache.append(torch.tensor([1, 0]), 1)[..., 0]
        cache.pool.position.view(-1)[place] = 20 + number
        for seq, budget in ((1, 90), (0, 70)):
            if int(cache.length[seq].sum()) > budget:
                eager_evict(cache, policy, seq, 21 + number, budget)
    assert int(room.error) == 0
    assert_same(cache, rows, columns)


LONG, INT = "*i64", "*i32"
LONGS = [
    "seqs",
    "seen",
    "allowed",
    "length",
    "table",
    "top",
    "top_before",
    "stack",
    "plan",
    "dropped",
    "nan",
    "state",
    "threshold",
]
INTS = ["starts", "keys", "ties", "counts", "freed", "position", "pool_position"]
SCALARS = [
    "rows",
    "width",
    "capacity",
    "batch_slots",
    "chunks",
    "slack",
    "most_entries",
    "most_seen",
    "protect_first",
    "protect_recent",
]
TYPES = (
    dict.fromkeys(LONGS, LONG)
    | dict.fromkeys(INTS, INT)
    | dict.fromkeys(SCALARS, "i32")
    | dict.fromkeys(["log_beta", "pool_log_beta"], "*fp32")
    | {"pool_modality": "*u8", "pool_state": "*fp32"}
    | dict.fromkeys(["pool_keys", "pool_values"], "*bf16")
    | dict.fromkeys(["pool_key_scale", "pool_value_scale"], "*fp16")
    | {"lookahead": "fp32"}
)
SIZES = {
    "PAGE": 16,
    "KEY": 128,
    "KEY_BLOCK": 128,
    "VALUE": 128,
    "VALUE_BLOCK": 128,
    "KEY_SCALE": 0,
    "KEY_SCALE_BLOCK": 1,
    "VALUE_SCALE": 0,
    "VALUE_SCALE_BLOCK": 1,
    "STATE": 0,
    "STATE_BLOCK": 1,
    "MOVES": 4,
    "ROWS": 512,
    "TURNS": TURNS,
    "BINS": 256,
    "SHIFT": 0,
}
# Module, kernel, what varies, warps; then the most registers and bytes of shared memory.
BUDGETS = [
    ("evict", "plan_kernel", {"BLOCK": 512, "PER_ROW": False}, 4, 40, 64),
    ("evict", "plan_kernel", {"BLOCK": 512, "PER_ROW": True}, 4, 40, 64),
    ("score", "score_kernel", {"BLOCK": 256, "HORIZON": 1, "PER_ROW": True}, 2, 64, 64),
    ("score", "score_kernel", {"BLOCK": 256, "HORIZON": 2, "PER_ROW": False}, 2, 64, 64),
    ("score", "score_kernel", {"BLOCK": 256, "HORIZON": 3, "PER_ROW": False}, 2, 96, 64),
    ("score", "score_kernel", {"BLOCK": 256, "HORIZON": 4, "PER_ROW": False}, 2, 72, 64),
    ("select", "count_kernel", {"BLOCK": BLOCK, "TURN": 0}, 8, 80, 16384),
    ("select", "count_kernel", {"BLOCK": BLOCK, "TURN": 3}, 8, 80, 16384),
    ("select", "count_kernel", {"BLOCK": BLOCK, "TURN": 7}, 8, 80, 16384),
    ("select", "count_kernel", {"BLOCK": BLOCK, "TURN": TURNS}, 8, 64, 4096),
    ("evict", "fill_kernel", {"BLOCK": 256, "PER_ROW": False}, 2, 64, 1024),
    ("evict", "fill_kernel", {"BLOCK": 256, "PER_ROW": True}, 2, 80, 1024),
    ("evict", "pages_kernel", {"BLOCK": 4096}, 8, 40, 4096),
]


@needs_compiler
@pytest.mark.parametrize(
    ("module", "kernel", "sizes", "warps", "registers", "shared"), BUDGETS, ids=str
)
def test_kernels_fit_a_hopper_sm(
    module: str,
    kernel: str,
    sizes: dict[str, Any],
    warps: int,
    registers: int,
    shared: int,
    tmp_path: Path,
) -> None:
    """36 layers of 8 heads of 128 in bfloat16."""
    report = compile_for_hopper(
        f"mmkv.engine.backends.cuda.kernels.{module}_triton",
        kernel,
        TYPES,
        SIZES | sizes,
        warps,
        tmp_path,
    )
    assert report.registers <= registers and report.spills <= ONE_SPILL
    assert report.shared <= shared
    if kernel == "score_kernel":
        assert "fma.rn.f32" not in report.ptx, "a rounding that torch makes is left out"
