"""The kernels of the gated delta rule and its convolution, beside the torch forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.model import delta
from tests.engine.backends.test_delta import SHAPES, drawn
from tests.support.kernels import DEVICE, compiled, forms, needs_compiler


def assert_close(ours: Tensor, wanted: Tensor, most: float = 1e-5) -> None:
    assert ours.shape == wanted.shape and ours.dtype == wanted.dtype
    worst = (ours.cpu().float() - wanted.float()).abs().max()
    assert float(worst) <= most * float(wanted.float().abs().max())


@pytest.mark.parametrize("form", forms("delta", "delta_chunk"))
@pytest.mark.parametrize("shape", [*SHAPES, (0, 1, 2, 24, 12)])
def test_a_chunk(form: Any, shape: tuple[int, ...]) -> None:
    *of_tokens, state = drawn(*shape)
    wanted, left = delta.delta_chunk_reference(*of_tokens, state)
    made, after = form(*(x.to(DEVICE) for x in of_tokens), state.to(DEVICE))
    if shape[0]:
        assert_close(made, wanted)
    assert_close(after, left)


@pytest.mark.parametrize("form", forms("delta", "delta_chunk"))
def test_keys_that_repeat(form: Any) -> None:
    """All overwrite the same row of the state: the system has 1 everywhere below its diagonal."""
    q, k, v, _, _, state = drawn(64, 1, 1, 16, 16)
    still, full = torch.zeros(64, 1), torch.ones(64, 1)
    of_tokens = q, k[:1].expand_as(k), v, still, full
    wanted, left = delta.delta_chunk_reference(*of_tokens, state)
    made, after = form(*(x.to(DEVICE) for x in of_tokens), state.to(DEVICE))
    assert_close(made, wanted)
    assert_close(after, left)


@pytest.mark.parametrize("form", forms("delta", "delta_step"))
def test_a_step_skips_idle_batch_slots(form: Any) -> None:
    *of_tokens, _ = drawn(3, 1, 2, 24, 40)
    states, slot = torch.randn(4, 2, 24, 40), torch.tensor([2, -1, 0])
    ours, live = states.to(DEVICE, copy=True), [0, 2]
    made = form(*(x.to(DEVICE) for x in of_tokens), ours, slot.to(DEVICE))
    wanted = delta.delta_step(*(x[live] for x in of_tokens), states, slot[live])
    assert_close(made[live], wanted)
    assert_close(ours, states)


@pytest.mark.parametrize("form", forms("delta", "conv_step"))
def test_a_step_of_the_convolution(form: Any) -> None:
    x, weight, states = torch.randn(3, 300), torch.randn(300, 4), torch.randn(4, 300, 3)
    slot, live = torch.tensor([2, -1, 0]), [0, 2]
    ours = states.to(DEVICE, copy=True)
    made = form(x.to(DEVICE), weight.to(DEVICE), ours, slot.to(DEVICE))
    assert_close(made[live], delta.conv_step(x[live], weight, states, slot[live]))
    assert_close(ours, states)


@pytest.mark.parametrize("form", forms("delta", "causal_conv"))
@pytest.mark.parametrize("tokens", [1, 21])
def test_the_convolution_of_a_chunk(form: Any, tokens: int) -> None:
    x, weight, state = torch.randn(tokens, 600), torch.randn(300, 4), torch.randn(300, 3)
    x = x[:, 100:400]  # where it lies beside others
    made, after = form(x.to(DEVICE), weight.to(DEVICE), state.to(DEVICE))
    wanted, left = delta.causal_conv(x, weight, state)
    assert_close(made, wanted)
    assert_close(after, left)


@needs_compiler
def test_the_kernels_fit_a_hopper_sm() -> None:
    """bf16, heads of 128 x 128: nothing spilled, and an SM holds as many programs as it can."""
    for code in compiled("delta"):
        assert code.spills == 0 and code.shared <= 16_384
        if code.kernel == "delta.step_kernel":
            assert code.registers <= 128 and code.shared <= 4096
