"""The products of chosen experts as a GPU computes them, beside one token at a time in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels import experts as kernel
from tests.support.kernels import (
    DEVICE,
    INTERPRETED,
    compiled,
    forms,
    needs_compiler,
)

# The interpreter cuts bfloat16 off: there it is for a GPU.
HALF = torch.float16 if INTERPRETED else torch.bfloat16


def drawn(tokens: int, chosen: int, count: int, width: int, inner: int) -> tuple[Tensor, ...]:
    """States, different experts for each token, and matrices."""
    noise = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=noise)
    ids = torch.rand(tokens, count, generator=noise).argsort(1)[:, :chosen]
    gate_up = torch.randn(count, 2 * inner, width, generator=noise) / width**0.5
    return x, ids, gate_up, torch.randn(count, width, inner, generator=noise) / inner**0.5


def one_by_one(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    rows = []
    for state, own in zip(x, ids.tolist(), strict=True):
        for expert in own:
            gate, up = (gate_up[expert] @ state).chunk(2)
            rows.append(down[expert] @ (gate * gate.sigmoid() * up))
    return torch.stack(rows).view(*ids.shape, -1)


# One token; experts with none, with one and with several tiles of tokens; widths of no whole tile;
# more pairs than a program looks at together; large tiles.
@pytest.mark.parametrize("form", forms("experts", "experts"))
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 5, 40, 24), (9, 3, 7, 37, 21), (50, 3, 9, 24, 16), (130, 2, 3, 80, 33)],
    ids=str,
)
def test_each_token_meets_its_experts(
    form: Callable[..., Tensor], dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, ids, *weights = drawn(*shape)
    x, *weights = (each.to(dtype) for each in (x, *weights))
    if shape[0] == 50:
        ids[:, 0] = 4  # an expert of all tokens; beside it, none of another
        ids[:, 1:] = torch.where(ids[:, 1:] % 9 > 4, ids[:, 1:], 8)
    made = form(*(each.to(DEVICE) for each in (x, ids, *weights)))
    wanted = one_by_one(x, ids, *weights)
    assert made.dtype == dtype and made.shape == wanted.shape
    most = 2e-5 if dtype == torch.float32 else 2e-2
    assert float((made.cpu().double() - wanted).abs().max()) <= most * float(wanted.abs().max())
    alone = form(*(each[:0].to(DEVICE) for each in (x, ids)), *(w.to(DEVICE) for w in weights))
    assert alone.shape == (0, *made.shape[1:])


def test_what_asks_for_gradients_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a long prompt, where torch waits for nothing; a step never is."""
    from mmkv.engine.backends.cuda.kernels import experts_triton

    seen: list[int] = []

    def counted(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        seen.append(len(x))
        return x.new_zeros(*ids.shape, x.shape[1])

    monkeypatch.setattr(kernel, "on_triton", lambda tensor: True)
    monkeypatch.setattr(experts_triton, "experts", counted)
    x, ids, *weights = drawn(300, 2, 5, 16, 8)
    kernel.experts(x[:4], ids[:4], *weights)
    kernel.experts(x[:4].requires_grad_(), ids[:4], *weights)
    kernel.experts(x, ids, *weights)
    monkeypatch.setattr(kernel, "_waits_for_nothing", lambda *tensors: True)
    kernel.experts(x, ids, *weights)
    kernel.experts(x[:256], ids[:256], *weights)
    assert seen == [4, 300, 256]


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tokens", [16, 4096])
def test_the_products_fit_a_hopper_sm(tokens: int, dtype: str) -> None:
    """Of 128 experts, the first with two sums: nothing spilled."""
    for code in compiled("experts", tokens=tokens, dtype=dtype):
        # What cards of capability 8.9 and 12 have; a few programs of a step on an SM of Hopper.
        assert code.spills == 0 and code.shared <= (101_376 if tokens > 16 else 50_000)
