"""The mass that queries pay, against sums by hand; in blocks, and in sliding windows."""

from __future__ import annotations

import pytest
import torch

from mmkv.engine.backends.torch import attention as module
from mmkv.engine.backends.torch.attention import Rows
from tests.support.native import engine_for
from tests.support.sessions import text_ids


@pytest.mark.parametrize("elements", [1, 60, 2**20])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("group", ["mean", "max"])
def test_equals_a_sum_by_hand(
    elements: int, window: int, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of 9 and 5 entries in any order, 2 heads, 7 queries; one, two or all at a time."""
    monkeypatch.setattr(module, "_MASS_BLOCK_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, 2, 7, 4, generator=generator)
    at = torch.arange(3, 10).expand(2, -1)
    keys = torch.randn(16, 4, generator=generator)
    position = torch.randperm(16, generator=generator) % 10
    length, table = torch.tensor([9, 5]), torch.tensor([[2, 0, 3], [1, 4, 4]])
    rows = Rows.of(length, table[:, :3] % 4, 4)
    got = module.attention_mass(query, at, keys, position, rows, 0.5, group, window)
    for row, count in enumerate(length.tolist()):
        slots = [int(table[row, i // 4]) % 4 * 4 + i % 4 for i in range(count)]
        want = torch.zeros(count, dtype=torch.float64)
        for index in range(7):
            now = int(at[row, index])
            seen = [i for i, s in enumerate(slots) if 0 <= now - int(position[s]) < (window or 99)]
            if not seen:
                continue
            shares = torch.zeros(2, count, dtype=torch.float64)
            for head in range(2):
                scores = keys[[slots[i] for i in seen]].double() @ query[row, head, index].double()
                shares[head, seen] = (scores * 0.5).softmax(-1)
            want += shares.mean(0) if group == "mean" else shares.amax(0)
        torch.testing.assert_close(got[row, :count].double(), want, rtol=1e-5, atol=1e-6)
        assert not got[row, count:].any()


def test_h2o_gives_nothing_to_what_a_window_hides() -> None:
    """Layers 1 and 2 look 20 tokens back, layer 0 at all."""
    engine = engine_for("qwen2_sliding", "h2o", budget=200, prefill_chunk=16)
    windows = engine.spec.sliding_window
    assert windows[0] is None and windows[1] == windows[2] == 20
    session = engine.session()
    session.prefill({"input_ids": text_ids(40, 1)[None]})
    before = session.view()
    mass = before.state()[:, 0].clone()
    session.decode(3)
    after = session.view()
    old = after.position < 40
    gained = after.state()[old, 0] - mass
    assert torch.equal(after.position[old], before.position)
    layer, hidden = before.row // before.kv_heads, before.position <= 40 - 20
    assert (gained[(layer > 0) & hidden] == 0).all()
    assert (gained[(layer > 0) & ~hidden] > 0).all() and (gained[layer == 0] > 0).all()
    # The prompt, in chunks: what a window's length before its end has been seen by 20 queries.
    total = torch.zeros(before.rows).index_add(0, before.row, mass)
    torch.testing.assert_close(total, torch.full_like(total, 40.0), rtol=1e-5, atol=0)
