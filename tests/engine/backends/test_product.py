"""Weights in bfloat16, in panels: torch and every level of C, and what the engine holds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cpu import kernels, levels, packed
from mmkv.engine.backends.cpu import kernels as native
from mmkv.engine.backends.cpu.binding import BF16_FORMS, Library, library
from mmkv.engine.model import product as reference
from mmkv.engine.model.panels import Bf16Matrix
from mmkv.engine.model.product import Kernels, Matrix
from mmkv.engine.model.weights import DecoderWeights, find_not_finite
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.factories import checkpoint
from tests.support.native import (
    assert_close,
    assert_keeps_as_torch,
    needs_native,
)
from tests.support.sessions import load, text_ids

FORMS = ["torch", *levels()]


def rounded_forms() -> list[str]:
    """Every form of products with rounded states, of every level that this CPU runs."""
    found = ["torch"]
    for level in levels():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MMKV_NATIVE", level)
            loaded = library()
            assert isinstance(loaded, Library)
            found += [f"{level}-{form}" for form in BF16_FORMS if loaded.take_bf16(form)]
            loaded.take_bf16()
    return found


# (out, in): whole panels, neither rows nor columns that fill one, and two stretches of columns.
SHAPES = [(96, 64), (33, 51), (3, 7), (9, 16), (33, 257)]
BIASED = [(shape, at % 2 == 1) for at, shape in enumerate(SHAPES)]


@pytest.fixture(params=FORMS)
def multiply(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> native.Product:
    monkeypatch.setenv("MMKV_NATIVE", "0" if request.param == "torch" else request.param)
    return reference.multiply if request.param == "torch" else native.multiply


@pytest.fixture(params=rounded_forms())
def multiply_rounded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[native.Product]:
    if request.param == "torch":
        yield reference.multiply_rounded
        return
    level, form = request.param.split("-")
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded = library()
    assert isinstance(loaded, Library) and loaded.take_bf16(form) and loaded.bf16 == form
    yield native.multiply_rounded
    loaded.take_bf16()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def nearest_bf16(x: Tensor) -> np.ndarray:
    """Round to 8 bits of a number's own power of 2, even where two are as near; float64."""
    mantissa, exponent = np.frexp(x.numpy().astype(np.float64))
    return np.ldexp(np.round(mantissa * 256), exponent - 8)


@pytest.mark.parametrize(("shape", "biased"), BIASED, ids=str)
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


@pytest.mark.parametrize(("shape", "biased"), BIASED, ids=str)
def test_a_product_of_rounded_states_is_what_numpy_makes_of_them(
    multiply_rounded: native.Product, shape: tuple[int, int], biased: bool
) -> None:
    """And no further from that of the states themselves than 2^-8 of all products' sizes."""
    weight, bias = random(*shape).bfloat16(), random(shape[0]) if biased else None
    matrix, add = weight.double().numpy(), 0 if bias is None else bias.double().numpy()
    for tokens in (0, 1, 2, 5, 8, 9, 13, 40):
        x = random(tokens, shape[1])
        x[1:2, :2] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8])  # halfway: to even
        made = multiply_rounded(x, Bf16Matrix.of(weight), bias)
        assert made.dtype == torch.float32
        wanted = nearest_bf16(x) @ matrix.T + add
        np.testing.assert_allclose(made.numpy(), wanted, rtol=0, atol=1e-5 * shape[1] ** 0.5)
        exact, sizes = x.double().numpy() @ matrix.T + add, x.abs().numpy() @ abs(matrix).T
        assert (abs(made.numpy() - exact) <= 2.0**-8 * sizes + 1e-6).all()
        assert not tokens or abs(made.numpy() - exact).max() > 2.0**-14 * sizes.max()


@pytest.mark.parametrize("columns", [64, 257, 4864])
def test_sums_of_rounded_states_are_no_worse_than_torchs(
    multiply_rounded: native.Product, columns: int
) -> None:
    weight, x = random(96, columns).bfloat16(), random(24, columns)
    states = x.bfloat16()
    wanted = states.double() @ weight.double().T
    theirs = (states.float() @ weight.float().T - wanted).abs().max()
    assert (multiply_rounded(x, packed(weight)) - wanted).abs().max() <= 1.5 * theirs


def test_what_is_not_finite_stays_so_in_its_row(multiply_rounded: native.Product) -> None:
    """A number that bfloat16 has no room for is infinite, too."""
    weight, x = random(33, 51).bfloat16(), random(10, 51)
    x[2, 50], x[3, 7], x[4, 0], x[5, 1] = torch.nan, torch.inf, -torch.inf, 3.4e38
    x[6, :2] = torch.tensor([torch.inf, -torch.inf])
    x[7, 3] = torch.tensor(0x7F800001).int().view(torch.float32)  # whose upper half is infinite
    weight[:, 1] = weight[:, 0] = 1.0
    made = multiply_rounded(x, Bf16Matrix.of(weight))
    wanted = reference.multiply_rounded(x, weight)
    assert torch.equal(made.isnan(), wanted.isnan()) and torch.equal(made.isinf(), wanted.isinf())
    assert made[[0, 1, 8, 9]].isfinite().all() and not made[2:8].isfinite().any()
    assert made[[2, 6, 7]].isnan().all() and torch.equal(made[3:6] > 0, wanted[3:6] > 0)


def test_the_smallest_numbers_count_or_are_nothing(multiply_rounded: native.Product) -> None:
    """Instructions for bfloat16 take what lies below 2^-126 for 0."""
    weight, x = random(40, 70).bfloat16(), random(9, 70)
    normal = multiply_rounded(x * 2.0**-100, Bf16Matrix.of(weight)) * 2.0**100
    torch.testing.assert_close(normal, reference.multiply_rounded(x, weight), rtol=0, atol=1e-4)
    for states, matrix in ((x * 2.0**-130, weight), (x, weight * 2.0**-130)):
        made = multiply_rounded(states, Bf16Matrix.of(matrix))
        wanted = reference.multiply_rounded(states, matrix)
        assert (made - wanted).abs().max() <= 70 * 2.0**-126 * 4  # no number of x is above 4


@pytest.mark.parametrize("shape", [(33, 51), (33, 257)], ids=str)
def test_a_row_does_not_depend_on_its_company_or_on_threads(
    multiply_rounded: native.Product, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own products do."""
    if multiply_rounded is reference.multiply_rounded:
        pytest.skip("torch's products do")
    monkeypatch.setattr(native, "PER_THREAD", 1)
    weight, x = Bf16Matrix.of(random(*shape).bfloat16()), random(23, shape[1])
    for multiply in (native.multiply, multiply_rounded):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
        together = multiply(x, weight)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        for tokens in (1, 2, 3, 4, 5, 6, 9, 17):
            assert torch.equal(multiply(x[-tokens:], weight), together[-tokens:])


@pytest.mark.parametrize(("shape", "rows"), [((), 24), ((4,), 24), ((3, 5), 70)])
def test_gradients_reach_the_states(
    multiply: native.Product, shape: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of the matrix where it has many rows."""
    monkeypatch.setattr(native, "_ROWS_BACK", 32)
    weight, bias = random(rows, 40).bfloat16(), random(rows)
    x = random(*shape, 40).requires_grad_()
    multiply(x, Bf16Matrix.of(weight), bias).square().sum().backward()
    ours, x.grad = x.grad, None
    (x @ weight.float().T + bias).square().sum().backward()
    torch.testing.assert_close(ours, x.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [24, 70])
def test_gradients_pass_the_rounding(
    multiply_rounded: native.Product, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In C they are rounded themselves, to 2^-9 of each number and of each sum."""
    monkeypatch.setattr(native, "_ROWS_BACK", 32)
    weight, x = random(rows, 40).bfloat16(), random(3, 5, 40).requires_grad_()
    grad = random(3, 5, rows)
    multiply_rounded(x, Bf16Matrix.of(weight), random(rows)).backward(grad)
    most = 3 * 2**-8 * (grad.abs() @ weight.float().abs())
    assert ((x.grad - grad @ weight.float()).abs() <= most).all()


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("form", BF16_FORMS)
@pytest.mark.parametrize("model", ["qwen3_vl", "llama_biased", "qwen3_5"])
def test_c_and_torch_keep_the_same_entries(model: str, form: str) -> None:
    loaded = library()
    assert isinstance(loaded, Library)
    if not loaded.take_bf16(form):
        pytest.skip(f"{form} is not for this CPU or level")
    try:
        assert_keeps_as_torch(model, "bf16", reference.multiply_rounded, 2e-2)
    finally:
        loaded.take_bf16()


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("form", BF16_FORMS)
def test_a_step_in_c_rounds_states_and_no_logits_depend_on_company(form: str) -> None:
    engine = load(checkpoint("qwen3_vl"), weights="bf16", policy="full", fresh=True)
    loaded = library()
    assert isinstance(loaded, Library)
    if not loaded.take_bf16(form):
        pytest.skip(f"{form} is not for this CPU or level")
    try:
        sessions = [engine.session() for _ in range(4)]
        for at, session in enumerate(sessions):
            session.prefill({"input_ids": text_ids(9 + at, 0)[None]})
        forks = [session.fork() for session in sessions]
        together = engine.decode(sessions, [5, 6, 7, 8])
        again = [forks[0].fork() for _ in range(2)]
        for token, fork, logits in zip((5, 6, 7, 8), forks, together, strict=True):
            assert torch.equal(fork.decode(token), logits)
        assert engine.decode_path == "native"
        engine.backends.cpu.switch_off()
        off = []
        for product, fork in zip(
            (reference.multiply_rounded, reference.multiply), again, strict=True
        ):
            engine.decoder.weights.product = product
            off.append(float((fork.decode(5) - together[0]).abs().max()))
        assert off[0] < off[1] / 4
    finally:
        loaded.take_bf16()


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
    for bad in (torch.nan, torch.inf, -torch.inf):
        weight[1, 1] = bad
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
def test_the_bundled_model_is_held_once_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a prompt's logits are those of its weights in float32."""
    narrow = Runtime.from_pretrained(bundled_model(), device="cpu", policy="full")
    monkeypatch.setattr("mmkv.engine.runtime.kernels_for", lambda *_: Kernels())
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
