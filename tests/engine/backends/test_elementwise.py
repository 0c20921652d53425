"""What is between the products of a prompt: torch and every level of C, beside numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import kernels as native
from mmkv.engine.backends.cpu import levels
from mmkv.engine.model.elementwise import Elementwise, TorchElementwise
from mmkv.engine.model.rope import Rope
from mmkv.engine.model.spec import RopeSpec
from tests.support.native import needs_native

EPS = 1e-5


@pytest.fixture(params=["torch", *levels()])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Elementwise:
    monkeypatch.setenv("MMKV_NATIVE", "0" if request.param == "torch" else request.param)
    made = native.native_elementwise()
    assert (type(made) is TorchElementwise) == (request.param == "torch")
    return made


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def angles(tokens: int, rotary: int) -> np.ndarray:
    return np.arange(tokens)[:, None] * 100.0 ** -(np.arange(rotary // 2) / rotary)


def rope(tokens: int, rotary: int) -> tuple[Tensor, Tensor]:
    spec = RopeSpec("default", torch.tensor(angles(2, rotary)[1], dtype=torch.float32))
    return Rope(spec, torch.device("cpu"), torch.float32).text(torch.arange(tokens))


def wide(x: Tensor) -> np.ndarray:
    return x.numpy().astype(np.float64)


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS)


@pytest.mark.parametrize("size", [1, 7, 192, 577])
def test_norm(ops: Elementwise, size: int) -> None:
    for tokens in (0, 1, 5, 40):
        x, gain = random(tokens, size), random(size)
        made = ops.norm(x, gain, EPS)
        np.testing.assert_allclose(made.numpy(), normed(wide(x)) * wide(gain), atol=1e-5, rtol=0)


@pytest.mark.parametrize("gained", [False, True])
@pytest.mark.parametrize(("dim", "rotary"), [(32, 32), (20, 20), (64, 16)])
def test_heads_are_normed_then_rotated(
    ops: Elementwise, dim: int, rotary: int, gained: bool
) -> None:
    for tokens in (0, 1, 5, 40):
        fused = random(tokens, 7, dim)
        gain = random(5, dim) if gained else None
        wanted, value = wide(fused[:, :5]), fused[:, 5:].clone()
        if gain is not None:
            wanted = normed(wanted) * wide(gain)
        half, angle = rotary // 2, angles(tokens, rotary)[:, None]
        turned = (wanted[..., :half] + 1j * wanted[..., half:rotary]) * np.exp(1j * angle)
        wanted = np.concatenate([turned.real, turned.imag, wanted[..., rotary:]], -1)
        made = ops.turned(fused[:, :5], gain, EPS, rope(tokens, rotary))
        np.testing.assert_allclose(made.numpy(), wanted, atol=2e-5, rtol=0)
        assert torch.equal(fused[:, 5:], value)


@pytest.mark.parametrize("inner", [1, 7, 576])
def test_the_gate(ops: Elementwise, inner: int) -> None:
    for tokens in (0, 1, 40):
        x = 10 * random(tokens, 2 * inner)
        gate, up = wide(x[:, :inner]), wide(x[:, inner:])
        wanted = gate / (1 + np.exp(-gate)) * up
        np.testing.assert_allclose(ops.gated(x).numpy(), wanted, atol=1e-6, rtol=1e-5)
        wanted = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
        made = ops.gated(x, "gelu_tanh").numpy()
        np.testing.assert_allclose(made, wanted, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("level", levels())
def test_a_token_does_not_depend_on_others_or_on_threads(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    monkeypatch.setattr(native, "_PER_THREAD", 1)
    ops, x, gain = native.native_elementwise(), random(23, 6 * 50), random(6, 50)
    cos, sin = rope(23, 50)

    def made(first: int, threads: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        part, heads = x[first:], x[first:].clone().view(-1, 6, 50)
        turned = ops.turned(heads, gain, EPS, (cos[first:], sin[first:]))
        return ops.norm(part, gain.flatten(), EPS), turned, ops.gated(part)

    together = made(0, 2)
    for first in (0, 1, 9, 22):
        for alone, all_of_them in zip(made(first, 1), together, strict=True):
            assert torch.equal(alone, all_of_them[first:])


def test_gradients_pass(ops: Elementwise) -> None:
    gain = random(24)
    for call in (
        lambda x: ops.norm(x, gain, EPS),
        lambda x: ops.turned(x.view(5, 3, 8), None, EPS, rope(5, 8)),
        ops.gated,
    ):
        x = random(5, 24).requires_grad_()
        call(x).square().sum().backward()
        assert x.grad is not None and x.grad.abs().sum() > 0
