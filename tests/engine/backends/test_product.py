"""Weights in bfloat16, in panels: torch and every level of C, and what the engine holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import kernels, levels, packed
from mmkv.engine.backends.cpu import kernels as native
from mmkv.engine.errors import SessionError
from mmkv.engine.model import product as reference
from mmkv.engine.model.bf16 import Bf16Matrix
from mmkv.engine.model.finite import find_not_finite
from mmkv.engine.model.product import Kernels, Matrix
from mmkv.engine.model.weights import DecoderWeights
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.factories import checkpoint
from tests.support.native import assert_close, needs_native

FORMS = ["torch", *levels()]
# (out, in): whole panels, neither rows nor columns that fill one, and two stretches of columns.
SHAPES = [(96, 64), (33, 51), (3, 7), (9, 16), (33, 257)]


@pytest.fixture(params=FORMS)
def multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.Product:
    monkeypatch.setenv("MMKV_NATIVE", "0" if request.param == "torch" else request.param)
    return reference.multiply if request.param == "torch" else native.multiply


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_what_numpy_makes_of_it(
    multiply: native.Product, shape: tuple[int, int], biased: bool
) -> None:
    weight, bias = random(*shape).bfloat16(), random(shape[0]) if biased else None
    held = Bf16Matrix.of(weight)
    matrix = weight.float().numpy().astype(np.float64)
    for tokens in (0, 1, 2, 5, 6, 7, 13, 40):
        x = random(tokens, shape[1])
        wanted = x.numpy().astype(np.float64) @ matrix.T + (0 if bias is None else bias.numpy())
        made = multiply(x, held, bias)
        assert made.dtype == torch.float32 and made.shape == wanted.shape
        np.testing.assert_allclose(made.numpy(), wanted, rtol=0, atol=1e-5 * shape[1] ** 0.5)


def test_sums_of_thousands_of_columns_are_no_worse_than_torchs(multiply: native.Product) -> None:
    weight, x = random(96, 4864).bfloat16(), random(24, 4864)
    wanted = x.double() @ weight.double().T
    theirs = (x @ weight.float().T - wanted).abs().max()
    assert (multiply(x, packed(weight)) - wanted).abs().max() <= 1.5 * theirs


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_does_not_depend_on_its_company_or_on_threads(
    shape: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    monkeypatch.setattr(native, "PER_THREAD", 1)
    weight, x = Bf16Matrix.of(random(*shape).bfloat16()), random(23, shape[1])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    together = native.multiply(x, weight)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for tokens in (1, 2, 3, 4, 5, 6, 9):
        assert torch.equal(native.multiply(x[-tokens:], weight), together[-tokens:])


def test_gradients_reach_the_states(multiply: native.Product) -> None:
    weight, bias = random(24, 40).bfloat16(), random(24)
    x = random(3, 5, 40).requires_grad_()
    multiply(x, Bf16Matrix.of(weight), bias).square().sum().backward()
    ours, x.grad = x.grad, None
    (x @ weight.float().T + bias).square().sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-5, atol=1e-4)


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_c_lays_out_the_same_panels(
    shape: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    weight = random(*shape).bfloat16()
    ours, theirs = packed(weight), Bf16Matrix.of(weight)
    monkeypatch.setattr(kernels, "PER_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(packed(weight).panels, ours.panels)
    assert ours.shape == theirs.shape == shape and torch.equal(ours.panels, theirs.panels)
    assert torch.equal(ours.in_rows(), weight) and torch.equal(ours.wide(), weight.float())
    ids = torch.tensor([[0, shape[0] - 1], [2, 1]])
    assert torch.equal(ours.rows(ids), weight[ids])
    assert torch.equal(ours.sample(20), weight.flatten()[:: max(1, weight.numel() // 20)])
    assert not torch.equal(ours.panels.flatten()[: weight.numel()], weight.flatten())
    weight[1, 1] = torch.nan
    assert find_not_finite([("a", ours), ("b", packed(weight))]) == "b"


@needs_native
@pytest.mark.parametrize("other", ["rows in bfloat16", "bfloat16 states"])
def test_other_forms_are_torchs(other: str) -> None:
    weight, x = random(12, 16).bfloat16(), random(4, 16)
    if other == "bfloat16 states":
        made = native.multiply(x.bfloat16(), packed(weight))
        torch.testing.assert_close(made, x.bfloat16() @ weight.T)
    else:
        torch.testing.assert_close(native.multiply(x, weight), x @ weight.T.float())


def test_what_bfloat16_does_not_hold_stays_float32() -> None:
    weight = random(300, 256).bfloat16().float()
    assert torch.equal(reference.narrowed(weight), weight.bfloat16())
    weight[-1, -1] += 2.0**-20
    assert reference.narrowed(weight) is weight
    assert reference.narrowed(weight.half()).dtype == torch.float16


@needs_native
def test_files_of_weights_that_bfloat16_holds_exactly_fit_both_forms(tmp_path: Path) -> None:
    """The bundled model's are such; of others the weights differ, and so do answers."""
    path = tmp_path / "session"
    for model, fits in ((bundled_model(), True), (checkpoint("qwen3"), False)):
        engines = [
            Runtime.from_pretrained(model, device="cpu", policy="full", weights=weights)
            for weights in ("auto", "bf16")
        ]
        for one, other in (engines, engines[::-1]):
            session = one.session()
            session.prefill({"input_ids": torch.arange(20, 60)[None]})
            session.save(path)
            if fits:
                read, _ = other.load_session(path)
                assert torch.equal(session.decode(7), read.decode(7))
                continue
            with pytest.raises(SessionError, match="load it with weights="):
                other.load_session(path)


@needs_native
def test_the_bundled_model_is_held_once_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a prompt's logits are those of its weights in float32."""
    narrow = Runtime.from_pretrained(bundled_model(), device="cpu", policy="full")
    monkeypatch.setattr("mmkv.engine.runtime.kernels_for", lambda _: Kernels())
    plain = Runtime.from_pretrained(bundled_model(), device="cpu", policy="full")
    ours, theirs = (engine.decoder.weights for engine in (narrow, plain))
    assert all(isinstance(matrix, Bf16Matrix) for matrix in ours.matrices())
    assert ours.embed is ours.head
    assert {matrix.dtype for matrix in theirs.matrices()} == {torch.float32}
    vectors = ours.numbers() - sum(matrix.numel() for matrix in unique(ours))
    held = sum(matrix.nbytes for matrix in unique(ours))
    assert ours.nbytes() == held + 4 * vectors and held < 1.01 * 2 * (ours.numbers() - vectors)
    assert ours.fingerprint() == theirs.fingerprint()
    assert narrow.dtype == plain.dtype == narrow.cache.pool.dtype == torch.float32
    assert narrow.identity() == plain.identity()
    prompt = {"input_ids": torch.arange(20, 60)[None]}
    with narrow.session() as one, plain.session() as two:
        assert_close(one.prefill(prompt), two.prefill(prompt))
        assert_close(one.decode(7), two.decode(7))
        assert narrow.decode_path == plain.decode_path == "native"
        assert narrow.backends.cpu.decoder.bytes_spared == 0  # no copy
        narrow.backends.cpu.decoder = None
        assert_close(one.decode(8), two.decode(8))


def unique(weights: DecoderWeights) -> list[Matrix]:
    return list({matrix.data_ptr(): matrix for matrix in weights.matrices()}.values())
