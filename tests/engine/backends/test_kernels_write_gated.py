"""Block-sparse attention under write gates against the whole mask, and what it leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.bench.kernel_code import SHARED_LIMITS
from mmkv.engine.backends.cuda.kernels import available
from mmkv.engine.backends.cuda.kernels.write_gated_attention import (
    GatedRows,
    Ranges,
)
from mmkv.engine.backends.cuda.kernels.write_gated_attention import (
    write_gated_attention_reference as reference,
)
from mmkv.engine.backends.torch import write_step
from mmkv.engine.model.gates import make_random_write_gates
from mmkv.engine.model.rope import rotate
from mmkv.engine.policies import make_policy
from mmkv.engine.runtime import Runtime
from tests.support.kernels import DEVICE, compiled, forms, needs_compiler
from tests.support.native import loaded
from tests.support.sessions import text_ids

FORMS = forms("write_gated_attention", "write_gated_attention")
LAST = torch.iinfo(torch.int64).max


def case(heads: int, group: int, count: int, past: int, dim: int, rate: float) -> tuple[Any, ...]:
    """A chunk of ``count`` behind ``past`` tokens, some of whose entries are gone in each row."""
    source = torch.Generator().manual_seed(count)
    seen = past + count
    held = [torch.rand(past, generator=source).lt(0.8).nonzero()[:, 0] for _ in range(heads)]
    longest = max(map(len, held)) + count
    at = torch.full((heads, longest), LAST)
    for head, old in enumerate(held):
        at[head, : len(old) + count] = torch.cat([old, torch.arange(past, seen)])
    slot = torch.randperm(heads * longest, generator=source).view(heads, longest)
    log_g = torch.where(torch.rand(heads, longest, generator=source) < rate, 0.0, -torch.inf)
    keys, values = torch.randn(2, heads * longest, dim, generator=source)
    query = torch.randn(count, heads, group, dim, generator=source).permute(1, 2, 0, 3)
    rows = GatedRows(*(one.to(DEVICE) for one in (slot, at, log_g)))
    parts = (query, torch.arange(past, seen), keys, values)
    return (*(one.to(DEVICE) for one in parts), rows)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("heads", "group", "count", "past", "dim", "window", "rate"),
    [
        (2, 3, 21, 50, 24, 9, 0.3),
        (1, 1, 70, 0, 16, 70, 0.5),
        (1, 8, 17, 33, 32, 1, 0.0),
        (2, 2, 19, 20, 256, 9, 0.5),
    ],
)
def test_a_chunk_sees_what_the_mask_lets_it_see(
    form: Any, heads: int, group: int, count: int, past: int, dim: int, window: int, rate: float
) -> None:
    made = case(heads, group, count, past, dim, rate)
    out, computed, whole = form(*made, window, 0.1, 0.3)
    want, *_ = reference(
        *(x.double() if x.is_floating_point() else x for x in made[:4]), made[4], window, 0.1, 0.3
    )
    assert out.shape == want.shape
    torch.testing.assert_close(out, want.float(), rtol=1e-5, atol=1e-5)
    assert bool((computed <= whole + 1).all())


@pytest.mark.parametrize("form", [one for one in FORMS if one.id == "triton"])
def test_blocks_that_nobody_sees_are_not_multiplied(form: Any) -> None:
    """320 tokens before a chunk of 16, of which 40 in a row are admitted; a window of 8.

    What is not seen holds NaN. Blocks of 8 tokens; tiles of 32: two admitted, one of the window.
    """
    query, position, keys, values, rows = case(1, 4, 16, 0, 32, 0.0)
    at = torch.arange(336, device=DEVICE)[None]
    admitted = (at >= 100) & (at < 140)
    log_g = torch.where(admitted, 0.0, -torch.inf)
    keys, values = (x[:1].repeat(336, 1).contiguous() for x in (keys, values))
    unseen = ~admitted[0] & (at[0] < 313)
    keys[unseen], values[unseen] = torch.nan, torch.nan
    rows = GatedRows(at, at, log_g)
    out, computed, whole = form(query, position + 320, keys, values, rows, 8, 0.1, 0.3)
    assert computed.tolist() == [[3, 3]] and whole.tolist() == [[11, 11]]
    torch.testing.assert_close(out, values[-1].expand_as(out))


def test_ranges_by_hand() -> None:
    """Two blocks of two tokens, 4 to 7, window 2: the far ones end 3 and 5 tokens back."""
    at = torch.tensor([[0, 1, 2, 4, 5, 6, 7, LAST]])
    log_g = torch.tensor([[0.0, -9.0, 0.0, -9.0, 0.0, 0.0, 0.0, 0.0]])
    found = Ranges.of(GatedRows(at, at, log_g), torch.arange(4, 8), 2, 0.1, 2)
    assert found.position[0, :5].tolist() == [0, 2, 5, 6, 7]
    assert (found.far.tolist(), found.begin.tolist(), found.end.tolist()) == (
        [[2, 3]],
        [[3, 4]],
        [[5, 7]],
    )
    computed, whole = found.tiles(2)
    assert (computed.tolist(), whole.tolist()) == ([[2, 4]], [[3, 4]])


@pytest.mark.parametrize("form", [one for one in FORMS if one.id == "triton"])
def test_a_prompt_is_read_by_the_kernel_as_in_torch(
    form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks, of which the second has entries before it; the program's count of tiles."""
    disk, policy = loaded("odd"), make_policy("wgkv:window=5")
    parts = disk.family, disk.spec, disk.decoder.weights, make_random_write_gates(disk.spec)
    found, tiles = [], []
    for kernel in (False, True):
        if kernel:
            for name in (write_step.__name__, available.__name__):
                monkeypatch.setattr(f"{name}.on_triton", lambda tensor: True)
            monkeypatch.setattr(write_step.WriteGatePass, "tiles", tiles)
        engine = Runtime(*parts, policy, prefill_chunk=16, page_size=8)
        with engine.session() as session:
            logits = session.prefill({"input_ids": text_ids(29, 1)[None]})
            found.append((logits, [row.tolist() for layer in session.retained() for row in layer]))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    assert found[1][1] == found[0][1]
    assert len(tiles) == 2 * disk.spec.num_layers
    assert all(0 < int(computed) <= 2 * int(whole) for computed, whole in tiles)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_write_gated_kernel_fits_a_hopper_sm(dtype: str) -> None:
    (code,) = compiled("write_gated", dtype=dtype)
    assert code.spills == 0 and code.shared <= SHARED_LIMITS[86 if dtype == "float32" else 90]


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("rotary", [16, 24])
def test_write_gates_see_keys_as_they_were_before_rope(rotary: int, scale: float) -> None:
    """Features that rope leaves alone, and the factor that angles of a long rope carry."""
    key, angle = torch.randn(5, 2, 24), torch.rand(5, rotary // 2) * 9
    cos, sin = angle.cos().repeat(1, 2), torch.cat([-angle.sin(), angle.sin()], -1)
    rope, seen = (cos * scale, sin * scale), list[torch.Tensor]()
    gates = SimpleNamespace(log_g=lambda layer, before, after: seen.append(before))
    write_step.WriteGatePass(gates, None, rope, scale).log_g(0, rotate(key, *rope))  # type: ignore[arg-type]
    torch.testing.assert_close(seen[0], key)
