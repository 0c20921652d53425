"""Weights in 8 and 4 bits: rounding, products in every form of C, and what engines make of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmkv.engine.backends import kernels_for
from mmkv.engine.backends.cpu import kernels as native
from mmkv.engine.backends.cpu import levels
from mmkv.engine.backends.cpu import rounded as rounding
from mmkv.engine.backends.cpu.binding import INT8_FORMS, Library, library
from mmkv.engine.backends.cuda.kernels.product import product_for
from mmkv.engine.errors import ModelError, SessionError
from mmkv.engine.model import product as reference
from mmkv.engine.model.families.vision import HeldLinear, held_matrices, move
from mmkv.engine.model.product import INTEGERS, Kernels, WeightForm, plain
from mmkv.engine.model.rounded import BLOCK, DIVISORS, IntegerMatrix
from mmkv.engine.runtime import Runtime
from mmkv.resources import bundled_model
from tests.support.factories import checkpoint
from tests.support.native import (
    assert_keeps_as_torch,
    needs_native,
    prompt,
)
from tests.support.sessions import load, text_ids
from tests.support.tiers import long_but, one_in

# (out, in): whole panels and blocks, and neither; beside it, whether there is a bias.
# Long rows have tiles of their own where the CPU has AMX.
SHAPES = [(96, 64), (33, 50), (3, 7), (16, 256), (19, 1050)]
BIASED = [(shape, at % 2 == 1) for at, shape in enumerate(SHAPES)]


def forms() -> list[str]:
    """Every form of every level that this CPU runs, as ``LEVEL-FORM``."""
    found = ["torch"]
    for level in levels():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MMKV_NATIVE", level)
            loaded = library()
            assert isinstance(loaded, Library)
            best = loaded.int8
            found += [f"{level}-{form}" for form in INT8_FORMS if loaded.take_int8(form)]
            loaded.take_int8(best)
    return found


@pytest.fixture(params=forms())
def multiply(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[native.Product]:
    if request.param == "torch":
        yield reference.multiply
        return
    level, form = request.param.split("-")
    monkeypatch.setenv("MMKV_NATIVE", level)
    loaded = library()
    assert isinstance(loaded, Library) and loaded.take_int8(form) and loaded.int8 == form
    yield native.multiply
    loaded.take_int8()


@pytest.fixture(params=INTEGERS)
def bits(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def in_blocks(x: Tensor) -> np.ndarray:
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    return padded.numpy().reshape(*x.shape[:-1], padded.shape[-1] // BLOCK, BLOCK)


def unpacked(matrix: IntegerMatrix) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[out, blocks, 32]`` and steps ``[out, blocks]``, read number by number."""
    rows, blocks = matrix.shape[0], matrix.codes.shape[1]
    held, steps = matrix.codes.numpy(), matrix.scales.float().numpy()
    codes, scales = np.zeros((rows, blocks, BLOCK), np.int64), np.zeros((rows, blocks), np.float32)
    for row, block, at in np.ndindex(codes.shape):
        group = at // 4
        byte = int(held[row // 16, block, group * matrix.bits // 8, row % 16, at % 4])
        nibble = (byte >> 4 * (group % 2)) % 16 - 8 if matrix.bits == 4 else byte
        codes[row, block, at] = nibble
        scales[row, block] = steps[row // 16, block, row % 16]
    return codes, scales


def by_numpy(weight: Tensor, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and steps in float64; of 4 bits those of the candidate with the least squared error."""
    blocks = in_blocks(weight).astype(np.float64)
    size = np.abs(blocks).max(-1)
    if bits == 8:
        least = (size / np.float32(127)).astype(np.float32).view(np.uint32)
        candidates = [((least + 0xFFFF) & 0xFFFF0000).astype(np.uint32).view(np.float32)]
    else:
        greatest = np.where(blocks.max(-1) == size, size, -size).astype(np.float32)
        candidates = [
            torch.tensor(greatest / np.float32(-each)).bfloat16().float().numpy()
            for each in DIVISORS
        ]
    found = []
    for step in candidates:
        codes = np.round(blocks / np.where(step == 0, 1, step)[..., None])
        codes = codes if bits == 8 else codes.clip(-8, 7)
        found.append((codes, step, np.square(blocks - codes * step[..., None]).sum(-1)))
    best = np.argmin([error for _, _, error in found], 0)
    take = [np.stack([each[part] for each in found]) for part in (0, 1)]
    codes, steps = (
        np.take_along_axis(t, best.reshape(1, *best.shape, *(1,) * (t.ndim - 3)), 0)[0]
        for t in take
    )
    return codes.astype(np.int64), steps


def oracle(x: Tensor, held: tuple[np.ndarray, np.ndarray], bias: Tensor | None) -> np.ndarray:
    """States rounded by numpy, whole numbers summed exactly, then everything in float64."""
    codes, step = held
    states = in_blocks(x)
    most = np.abs(states).max(-1, keepdims=True)
    inverse = np.float32(127) / np.where(most == 0, np.inf, most)
    theirs = np.round(states * inverse.astype(np.float32)).astype(np.int64)
    sums = np.einsum("tbi,rbi->trb", theirs, codes).astype(np.float64)
    made = (sums * step[None].astype(np.float64) * (most[..., 0] / 127)[:, None]).sum(-1)
    return made + (0 if bias is None else bias.numpy())


@pytest.mark.parametrize(("shape", "biased"), BIASED, ids=str)
def test_a_product_is_what_numpy_makes_of_the_codes(
    multiply: native.Product, shape: tuple[int, int], biased: bool, bits: int
) -> None:
    weight, bias = random(*shape), random(shape[0]) if biased else None
    weight[1, 3:40] = 0.0
    matrix = INTEGERS[bits].of(weight)
    held = unpacked(matrix)
    for tokens in (0, 1, 2, 5, 8, 9, 21):
        x = random(tokens, shape[1])
        x[:1, :40] = 0.0
        made = multiply(x, matrix, bias)
        assert made.dtype == torch.float32 and made.shape == (tokens, shape[0])
        bound = 2e-5 if shape[1] < 1000 else 1e-4
        np.testing.assert_allclose(made.numpy(), oracle(x, held, bias), rtol=0, atol=bound)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_are_what_numpy_rounds_to(shape: tuple[int, int], bits: int) -> None:
    """Of 4 bits another candidate may be taken that is a thousandth worse."""
    weight = random(*shape)
    weight[1, 3:40] = 0.0
    codes, steps = unpacked(INTEGERS[bits].of(weight))
    wanted, best = by_numpy(weight, bits)
    if bits == 8:
        assert (codes == wanted).all() and (steps == best).all()
    assert (np.abs(codes) <= (127 if bits == 8 else 8)).all()
    off, least = (
        np.square(in_blocks(weight) - one * step[..., None].astype(np.float64)).sum(-1)
        for one, step in ((codes, steps), (wanted, best))
    )
    assert (off <= 1.001 * least).all() and (steps == best).mean() > 0.99


def test_states_at_half_steps_get_the_same_codes_everywhere(
    multiply: native.Product, bits: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-254, 255, (2000, 32), generator=generator) * 0.5
    x[:, 0] = 127.0
    x *= torch.rand(2000, 1, generator=generator) * 3 + 0.1
    one = INTEGERS[bits].of(torch.eye(32))
    made = multiply(x, one)  # a code too many or too few is off by 0.1 at least
    np.testing.assert_allclose(made.numpy(), oracle(x, unpacked(one), None), rtol=0, atol=1e-3)


@needs_native
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="asks Linux what the CPU has")
def test_a_form_runs_where_the_cpu_has_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    for level in levels():
        monkeypatch.setenv("MMKV_NATIVE", level)
        loaded = library()
        assert isinstance(loaded, Library)
        takes = level in ("v3", "v4") and "avx_vnni" in flags
        assert loaded.take_int8("avxvnni") == takes
        assert loaded.take_int8("amx") == (level == "v4" and "amx_int8" in flags)
        loaded.take_int8()
        best = "avx512bf16" if level == "v4" and "avx512_bf16" in flags else "widened"
        assert loaded.bf16 == best and loaded.take_bf16("avx512bf16") == (best != "widened")
        assert not loaded.take_bf16("unheard of")
        loaded.take_bf16()


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=70),
    power=st.integers(-30, 0),
)
def test_no_weight_in_8_bits_is_off_by_more_than_half_a_step(
    numbers: list[float], power: int
) -> None:
    weight = torch.tensor([numbers, numbers[::-1]]) * 10.0**power
    matrix = INTEGERS[8].of(weight)
    assert matrix.codes.abs().max() <= 127
    step = torch.tensor(np.abs(in_blocks(weight)).max(-1) / 127).repeat_interleave(BLOCK, -1)
    error = (matrix.wide() - weight).abs()
    # A step in bfloat16 is up to 1/128 above the least; and what float32 loses near 0.
    assert bool((error <= 0.504 * step[:, : weight.shape[1]] + 1e-37).all())


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=70),
    power=st.integers(-30, 0),
)
def test_a_block_in_4_bits_is_off_by_half_a_step_at_most(numbers: list[float], power: int) -> None:
    """In the mean: the greatest number is cut off where that serves the others."""
    weight = torch.tensor([numbers, numbers[::-1]]) * 10.0**power
    blocks = in_blocks(weight).astype(np.float64)
    codes, steps = unpacked(INTEGERS[4].of(weight))
    error = np.square(blocks - codes * steps[..., None].astype(np.float64)).mean(-1)
    half = np.abs(blocks).max(-1) / min(DIVISORS) / 2
    assert (np.sqrt(error) <= 1.01 * half + 1e-29).all()


def test_the_error_that_is_reported_is_that_of_the_weights(bits: int) -> None:
    weight = random(700, 70)
    kind = INTEGERS[bits]
    matrix = kind.of(weight)
    wanted = (matrix.wide() - weight).double().norm() / weight.double().norm()
    low, high = {8: (0.003, 0.006), 4: (0.06, 0.085)}[bits]
    assert matrix.error == pytest.approx(float(wanted), rel=1e-5) and low < matrix.error < high
    assert torch.equal(matrix.rows(torch.tensor([[3], [699]])), matrix.wide()[[3, 699], None])
    assert kind.of(torch.zeros(3, 5)).error == 0.0
    # 700 rows fill 44 panels, 70 columns 3 blocks.
    assert matrix.nbytes == 44 * 16 * 3 * (4 * bits + 2) and matrix.numel() == 49_000


@needs_native
@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("shape", [*SHAPES, (18, 1100)], ids=str)  # of several runs of blocks
def test_c_rounds_to_the_same_codes(
    shape: tuple[int, int], level: str, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMKV_NATIVE", level)
    weight = random(*shape)
    weight[0, :5], weight[1], weight[2] = torch.arange(5.0) / 2, 0.0, weight[2] * 1e-38
    weight[-1] = torch.arange(shape[1]) % 31 * 0.5 - 7.5  # halves of a step
    weight[0, -3:] *= 1e-17  # squares leave float32's range
    for stored in (weight, weight.bfloat16()):
        ours, theirs = rounding(stored, bits), INTEGERS[bits].of(stored)
        assert ours.shape == theirs.shape and ours.error == pytest.approx(theirs.error, rel=1e-5)
        assert torch.equal(ours.codes, theirs.codes) and torch.equal(ours.scales, theirs.scales)
    weight[0, 1], weight[-1, 0], weight[1, -1] = torch.nan, torch.inf, -torch.inf
    ours, theirs = rounding(weight, bits), INTEGERS[bits].of(weight)
    assert int(ours.scales.isnan().sum()) == 3  # blocks
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scales.isnan(), theirs.scales.isnan())


@needs_native
@pytest.mark.parametrize("width", [20, 50, 150, 1050])
def test_a_row_does_not_depend_on_its_company_or_on_threads(
    width: int, multiply: native.Product, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PER_THREAD", 1)
    matrix, x = INTEGERS[bits].of(random(33, width)), random(23, width)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    together = multiply(x, matrix)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    same = torch.equal if multiply is native.multiply else torch.allclose  # torch.matmul is not so
    for tokens in (1, 2, 5, 7, 8, 9, 16):
        assert same(multiply(x[-tokens:], matrix), together[-tokens:])


def test_what_is_not_finite_stays_no_number(multiply: native.Product, bits: int) -> None:
    """In the row of that state alone; a weight that is not finite shows in its step."""
    for wrong in (torch.nan, torch.inf, -torch.inf):
        x = random(10, 64)
        x[4, 40] = wrong
        made = multiply(x, INTEGERS[bits].of(random(20, 64)))
        assert not made[4].isfinite().any() and made[[0, 3, 5, 9]].isfinite().all()
        weight = random(20, 64)
        weight[2, 3] = wrong
        assert int(INTEGERS[bits].of(weight).scales.isnan().sum()) == 1


def test_gradients_reach_the_states(multiply: native.Product, bits: int) -> None:
    matrix, x = INTEGERS[bits].of(random(24, 40)), random(3, 5, 40).requires_grad_()
    if multiply is reference.multiply:
        pytest.skip("nothing is trained through the reference")
    multiply(x, matrix, random(24)).sum().backward()
    torch.testing.assert_close(x.grad, matrix.wide().sum(0).expand_as(x))


KEEPING = [
    ("qwen3_vl", "int8"),
    ("llama_biased", "int8"),
    ("qwen3_vl", "int4"),
    ("qwen3_5", "int8"),
    ("qwen3_5", "int4"),
]
# Every model with a form, every form with two models: their products are compared above.
SOME = [(*pair, form) for at, form in enumerate(INT8_FORMS) for pair in KEEPING[at % 4 :][:2]]


@one_in(3)
@needs_native
@torch.inference_mode()
@pytest.mark.parametrize(
    ("model", "weights", "form"),
    long_but(SOME, [(*p, form) for p in KEEPING for form in INT8_FORMS], "the other pairs"),
)
def test_c_and_torch_keep_the_same_entries(model: str, weights: str, form: str) -> None:
    loaded = library()
    assert isinstance(loaded, Library)
    if not loaded.take_int8(form):
        pytest.skip(f"{form} is not for this CPU or level")
    try:
        # What lies at the edge of two codes takes the other one, and stays in a hybrid model's
        # states: noise of 1e-7 before torch's own products moves these logits by 3.4e-2, by hand.
        most = 5e-2 if (model, weights) == ("qwen3_5", "int4") else 3e-2
        assert_keeps_as_torch(model, weights, reference.multiply, most)
    finally:
        loaded.take_int8()


@pytest.fixture(scope="module")
def bundled(request: pytest.FixtureRequest) -> Runtime:
    model, form = bundled_model(), request.param
    return Runtime.from_pretrained(model, device="cpu", policy="full", weights=form)


@pytest.mark.parametrize("bundled", ["bf16", "int8", "int4"], indirect=True)
def test_the_bundled_model_says_nearly_the_same(bundled: Runtime) -> None:
    """Trained weights: the greedy tokens of 64 steps, each after the same ones before it.

    Of bfloat16, which the weights are, states alone are rounded.
    """
    exact = Runtime.from_pretrained(bundled_model(), device="cpu", policy="full")
    least, most = {"bf16": (63, 5e-4), "int8": (62, 0.002), "int4": (54, 0.1)}[
        bundled.decoder.weights.form
    ]
    same, divergence = 0, 0.0
    prompt = {"input_ids": torch.arange(20, 60)[None]}
    with bundled.session() as one, exact.session() as two:
        ours, theirs = one.prefill(prompt), two.prefill(prompt)
        for _ in range(64):
            logs = ours.log_softmax(-1), theirs.log_softmax(-1)
            divergence += float(torch.nn.functional.kl_div(*logs, reduction="sum", log_target=True))
            token = int(theirs.argmax())
            same += int(ours.argmax()) == token
            ours, theirs = one.decode(token), two.decode(token)
    assert same >= least and 0 < divergence / 64 < most


@pytest.mark.parametrize("bundled", ["int8", "int4"], indirect=True)
def test_one_copy_in_whole_numbers_is_all_there_is(bundled: Runtime) -> None:
    weights = bundled.decoder.weights
    layers = [getattr(each, name) for each in weights.layers for name in each.matrix_names()]
    bits = 4 if weights.form == "int4" else 8
    assert {(matrix.bits) for matrix in layers} == {bits}
    assert isinstance(weights.embed, INTEGERS[8]) and weights.embed is weights.head
    matrices = {id(matrix): matrix for matrix in weights.matrices()}.values()
    assert sum(each.nbytes for each in layers) < (bits + 0.8) / 8 * sum(m.numel() for m in layers)
    errors = weights.errors()
    worst = f"at most {100 * max(errors.values()):.2f} %, {max(errors, key=lambda n: errors[n])}"
    assert worst in weights.rounding() and weights.form in weights.rounding()
    assert len(errors) == len(matrices) and all(
        0 < error < (0.1 if bits == 4 else 0.01) for error in errors.values()
    )
    assert bundled.backends.cpu.decoder is None or bundled.backends.cpu.decoder.bytes_spared == 0


@pytest.mark.parametrize("pair", [("int8", "int4"), ("auto", "bf16")])
def test_a_session_goes_on_with_the_weights_it_was_made_with(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    """Even where bfloat16 holds them exactly: states are rounded then."""
    model = bundled_model() if "bf16" in pair else checkpoint("qwen3")
    engines = [load(model, weights=form, policy="full", gates=None) for form in pair]
    for engine, stranger in (engines, engines[::-1]):
        session = engine.session()
        session.prefill({"input_ids": text_ids(9, 0)[None]})
        session.save(tmp_path / "session")
        forms = [one.decoder.weights.form for one in (engine, stranger)]
        says = "saved with weights {}, this engine has {}".format(*forms)
        with pytest.raises(SessionError, match=says):
            stranger.load_session(tmp_path / "session")
        read, _ = engine.load_session(tmp_path / "session")
        assert torch.equal(read.decode(5), session.decode(5))


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("qwen3", {"dtype": "bfloat16"}, "not beside bfloat16 states; take dtype float32"),
        ("qwen3_moe", {}, "not for a mixture of experts; leave --weights at auto"),
    ],
)
def test_where_it_cannot_run_it_is_refused(model: str, options: Any, says: str, form: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        Runtime.from_pretrained(checkpoint(model), weights=form, device="cpu", **options)
    assert "\n" not in str(caught.value)


def test_the_names_of_matrices_say_which_take_4_bits() -> None:
    form = WeightForm("int4")
    assert [form.bits(name) for name in ("layers.0.qkv", "layers.11.mlp.down_proj.weight")] == [
        4,
        4,
    ]
    assert {form.bits(name) for name in ("", "embed_tokens", "lm_head", "visual.blocks.0.qkv")} == {
        8
    }
    assert WeightForm("int8").bits("layers.0.qkv") == 8
    assert WeightForm("bf16").bits("layers.0.qkv") is None


def test_other_devices_and_dtypes_keep_their_own_form() -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ModelError, match="not for a mixture of experts; leave --weights at auto"):
        WeightForm.of("int8", Kernels(), torch.bfloat16, cuda, experts=True)
    with pytest.raises(ModelError, match="not beside float16 states; take dtype bfloat16"):
        WeightForm.of("bf16", Kernels(), torch.float16, cuda, experts=False)
    for form, dtype in (("auto", torch.float32), ("auto", torch.float16), ("bf16", torch.bfloat16)):
        made = WeightForm.of(form, kernels_for(form), dtype, cuda, experts=True)
        assert made is None


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_gpu_holds_the_same_codes_beside_bfloat16_states(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No GPU is here: this loads for one, but its tensors lie on the CPU."""
    cuda, model = torch.device("cuda"), checkpoint("qwen3_vl")

    def of(name: str, kernels: Kernels, dtype: torch.dtype, *_: Any) -> WeightForm:
        return WeightForm(name, kernels, dtype, cuda)

    monkeypatch.setattr(WeightForm, "of", of)
    monkeypatch.setattr("mmkv.engine.runtime.kernels_for", lambda form, *_: kernels_for(form, cuda))
    options: dict[str, Any] = {"weights": form, "policy": "full"}
    ours = Runtime.from_pretrained(model, device="cpu", dtype="bfloat16", **options)
    theirs = load(model, **options)
    theirs.backends.cpu.switch_off()
    assert ours.dtype == torch.bfloat16 and ours.decoder.weights.form == form
    assert ours.decoder.weights.product is product_for(form)
    towers = [[m for _, m in held_matrices(engine.family.hf)] for engine in (ours, theirs)]
    texts = [engine.decoder.weights.matrices() for engine in (ours, theirs)]
    for mine, other in (*zip(*towers, strict=True), *zip(*texts, strict=True)):
        assert isinstance(mine, IntegerMatrix) and reference.equal(mine, other)
    assert len(towers[0]) > 6
    assert {p.dtype for p in ours.family.hf.parameters()} == {torch.bfloat16}
    with ours.session() as one, theirs.session() as two:
        made = [session.prefill(prompt("qwen3_vl")) for session in (one, two)]
        for token in (5, 6, 7):
            # 0.06 at most here; 0.04 without any form of weights.
            assert 0 < float((made[0] - made[1]).norm() / made[1].norm()) < 0.1
            made = [session.decode(token) for session in (one, two)]


def test_what_a_tower_holds_moves_with_it() -> None:
    layer = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 20))
    held = HeldLinear(INTEGERS[8].of(layer[1].weight.detach()), layer[1].bias, reference.multiply)
    model = torch.nn.Sequential(layer[0], held)
    model.embed = torch.nn.Parameter(torch.empty(3, device="meta"))
    move(model, torch.device("cpu"))
    assert held.matrix.device.type == "cpu" and model.embed.is_meta
    move(model, torch.device("meta"))  # the one other device that is here
    assert held.matrix.device.type == "meta" and {p.is_meta for p in model.parameters()} == {True}


def test_bf16_rounds_what_is_stored_wider() -> None:
    found = load(checkpoint("qwen3"), weights="bf16").decoder.weights
    wider = load(checkpoint("qwen3")).decoder.weights
    assert found.form == "bf16" and found.dtype == torch.float32
    for ours, theirs in zip(found.matrices(), wider.matrices(), strict=True):
        assert isinstance(theirs, Tensor) and theirs.dtype == torch.float32
        assert torch.equal(plain(ours), theirs.bfloat16())
