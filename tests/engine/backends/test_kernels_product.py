"""Products with matrices in 8, 4 and 16 bits as a GPU computes them.

Whole numbers have the bits of the reference, which test_int8.py holds to numpy: in Triton, too,
whatever the tile and the other states are. On a GPU, the reference is computed on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels import product
from mmkv.engine.model import product as reference
from mmkv.engine.model.product import INTEGERS
from mmkv.engine.model.rounded import BLOCK, IntegerMatrix, code_states
from tests.support.kernels import (
    DEVICE,
    compiled,
    forms,
    needs_compiler,
)

# Tokens, (out, in): tiles of every size and several of them, whole panels and blocks and neither,
# more blocks than are rounded or read ahead at once.
CASES = [(1, (3, 7)), (2, (150, 1100)), (17, (33, 50)), (40, (96, 64)), (131, (140, 30))]
# The interpreter's arithmetic in bfloat16 is wrong: there it is for a GPU.
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def states(tokens: int, width: int) -> Tensor:
    """Rows of many sizes, and blocks of zeros, of numbers too small for codes, of equal ones."""
    x = random(tokens, width) * 10 ** torch.linspace(-2, 1, tokens)[:, None]
    x[-1, :BLOCK] = 0
    x[tokens // 2, -5:] = 1e-31
    x[0, BLOCK:] = 0.5
    return x


def exact(x: Tensor, weight: IntegerMatrix, bias: Tensor | None) -> Tensor:
    """What the codes stand for, multiplied in float64."""
    codes, steps = code_states(x)
    wide = (codes.double() * steps.double()[..., None]).flatten(-2)[..., : x.shape[-1]]
    return wide @ weight.wide().double().T + (0 if bias is None else bias.double())


@pytest.mark.parametrize("form", forms("product", "multiply"))
@pytest.mark.parametrize("bits", INTEGERS)
@pytest.mark.parametrize(("tokens", "shape"), CASES, ids=str)
def test_whole_numbers_have_the_references_bits(
    form: Callable[..., Tensor], bits: int, tokens: int, shape: tuple[int, int]
) -> None:
    weight, bias = INTEGERS[bits].of(random(*shape)), random(shape[0])
    there = weight.to(DEVICE)
    assert there.device.type == DEVICE.type and there.nbytes == weight.nbytes
    dtype = HALF if tokens in (2, 40) else torch.float32
    added = None if tokens == 17 else bias.to(dtype)
    x = states(tokens, shape[1]).to(dtype)
    made = form(x.to(DEVICE), there, None if added is None else added.to(DEVICE)).cpu()
    assert made.dtype == dtype and made.shape == (tokens, shape[0])
    assert torch.equal(made, reference.multiply(x, weight, added))
    # And these are the right numbers, but for float32 sums.
    wanted = exact(x.float(), weight, bias)
    ours = reference.multiply(x.float(), weight, bias)
    assert float((ours - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("form", forms("product", "multiply"))
@pytest.mark.parametrize("bits", INTEGERS)
def test_states_that_are_not_finite_spoil_their_own_row_alone(
    form: Callable[..., Tensor], bits: int
) -> None:
    weight, x = INTEGERS[bits].of(random(20, 70)).to(DEVICE), random(5, 70).to(DEVICE)
    whole = form(x, weight, None)
    x[1, 3], x[3, 69] = torch.nan, -torch.inf
    made = form(x, weight, None)
    assert made[[1, 3]].isnan().all() and torch.equal(made[[0, 2, 4]], whole[[0, 2, 4]])


@pytest.mark.parametrize("form", forms("product", "multiply"))
def test_any_axes_and_strides_and_no_states_at_all(form: Callable[..., Tensor]) -> None:
    weight, x = INTEGERS[4].of(random(20, 70)).to(DEVICE), random(2, 70, 3).to(DEVICE)
    made = form(x.transpose(1, 2), weight, None)
    assert made.shape == (2, 3, 20)
    assert torch.equal(made[1, 2], form(x[1, :, 2], weight, None))
    assert form(x[:0].transpose(1, 2), weight, None).shape == (0, 3, 20)


@pytest.mark.parametrize("form", forms("product", "multiply_rounded"))
@pytest.mark.parametrize(("tokens", "shape"), CASES, ids=str)
def test_bfloat16_rows_are_summed_in_float32(
    form: Callable[..., Tensor], tokens: int, shape: tuple[int, int]
) -> None:
    weight, bias = random(*shape).bfloat16(), random(shape[0])
    x = random(tokens, shape[1])
    made = form(x.to(DEVICE), weight.to(DEVICE), bias.to(DEVICE)).cpu()
    assert made.dtype == torch.float32
    wanted = x.bfloat16().double() @ weight.double().T + bias.double()
    assert float((made - wanted).norm() / wanted.norm()) < 1e-6


def test_dispatch_on_a_cpu_is_the_reference() -> None:
    x, weight = random(3, 40), random(8, 40)
    for held in (weight, weight.bfloat16(), *(kind.of(weight) for kind in INTEGERS.values())):
        assert torch.equal(product.multiply(x, held), reference.multiply(x, held))
        rounded = product.product_for("bf16")(x, held)
        assert torch.equal(rounded, reference.multiply_rounded(x, held))
    assert product.product_for("int4") is product.multiply


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: captures a graph")
@pytest.mark.parametrize("bits", INTEGERS)
@pytest.mark.parametrize("tokens", [1, 16, 64, 300])
def test_products_are_captured_in_a_graph(bits: int, tokens: int) -> None:
    weight = INTEGERS[bits].of(random(4096, 2560)).to(DEVICE)
    x = random(tokens, 2560).to(DEVICE, torch.bfloat16)
    product.multiply(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = product.multiply(x, weight)
    x.copy_(x.flip(0) * 2)
    graph.replay()
    wanted = reference.multiply(x.cpu(), weight.to(torch.device("cpu")))
    assert torch.equal(made.cpu(), wanted)


@needs_compiler
@pytest.mark.parametrize(
    ("bits", "tokens", "registers", "shared"), [(8, 1, 80, 20_000), (4, 64, 96, 32_000)]
)
def test_products_fit_a_hopper_sm(bits: int, tokens: int, registers: int, shared: int) -> None:
    """Tensor cores, nothing spilled or fused, and nothing in the loop that waits for memory."""
    code, product = compiled("product", bits=bits, tokens=tokens)
    assert code.spills == 0 and code.registers <= 48 and code.shared <= 2048
    assert "st.global.v4.b32" in code.ptx or "st.global.v2.b32" in code.ptx
    assert product.spills == 0 and product.registers <= registers and product.shared <= shared
    assert ".s32.s8.s8" in product.ptx and "fma.rn.f32" not in product.ptx
    # Weights, their steps, states and theirs come through shared memory; the bias alone is loaded.
    assert "cp.async" in product.ptx
    assert "ld.global" not in product.ptx.split("mma.", 1)[0]


@needs_compiler
def test_no_launch_lets_the_compiler_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter does not see: its operations are never fused."""
    from mmkv.engine.backends.cuda.kernels import product_triton

    options: list[dict[str, object]] = []
    kernel = defaultdict(lambda: lambda *_, **given: options.append(given))
    for name in ("code_kernel", "integer_kernel"):
        monkeypatch.setattr(product_triton, name, kernel)
    product_triton.multiply(random(2, 40), INTEGERS[8].of(random(8, 40)))
    assert [each["enable_fp_fusion"] for each in options] == [False, False]
