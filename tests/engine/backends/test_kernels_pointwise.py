"""RMSNorm, SwiGLU and the choice of the next token, against float64 and the eager engine.

Rounding. Where a kernel states how it rounds, the test computes in float64, rounds where it does
and allows one unit in the last place (of the dtype) for the order of float32 sums and the last
bits of exp and rsqrt. Triton's interpreter cuts float32 to bfloat16 off instead of rounding, so
there every rounding of the Triton form may cost one unit more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.pointwise import gated, rms_norm
from mmkv.engine.backends.cuda.kernels.sample import (
    Draw,
    SamplingColumns,
    columns_of,
    sample,
    uniform,
)
from mmkv.sampling import Sampling, distribution
from tests.support.kernels import (
    DEVICE,
    INTERPRETED,
    compiled,
    forms,
    is_triton,
    needs_compiler,
)
from tests.support.tiers import one_in

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def normal(
    *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 1
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * std).to(dtype).to(DEVICE)


def assert_within_units(got: Tensor, want: Tensor, units: float) -> None:
    """``got`` is within so many units in the last place of its dtype of the float64 ``want``."""
    eps = torch.finfo(got.dtype).eps
    tiny = torch.finfo(got.dtype).smallest_normal
    error = (got.double() - want).abs() / (want.abs().clamp(min=tiny) * eps)
    assert error.max() <= units, f"{error.max():.2f} units"


def allowance(form: Callable[..., Tensor], dtype: torch.dtype, roundings: int) -> float:
    """Return the units in the last place for values that were rounded so often."""
    cut_off = INTERPRETED and is_triton(form) and dtype == torch.bfloat16
    # float32: rsqrt, exp and a sum over up to 5000 features cost a few units themselves.
    return {torch.float32: 8.0}.get(dtype, 1.0 * roundings) + roundings * cut_off


@pytest.mark.parametrize("form", forms("pointwise", "rms_norm"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 24), (2, 2560), (2, 4096), (1, 5120)])
@pytest.mark.parametrize("with_residual", [False, True])
def test_rms_norm(
    form: Callable[..., tuple[Tensor, Tensor]],
    dtype: torch.dtype,
    tokens: int,
    width: int,
    with_residual: bool,
) -> None:
    x, gain = normal(tokens, width, dtype=dtype, std=3), normal(width, dtype=dtype, seed=1)
    residual = normal(tokens, width, dtype=dtype, seed=2, std=30) if with_residual else None
    before = None if residual is None else residual.clone()
    normed, total = form(x, residual, gain, 1e-6)
    assert normed.dtype == total.dtype == dtype and normed.shape == total.shape == x.shape
    exact = x.double() if residual is None else x.double() + residual.double()
    if not with_residual:
        assert torch.equal(total, x)
    elif dtype == torch.bfloat16 and INTERPRETED and is_triton(form):
        assert_within_units(total, exact, 1)
    else:  # to the last bit: one addition, rounded
        assert torch.equal(total, exact.to(dtype))
    # The norm is that of the rounded sum.
    sum_ = total.double()
    scale = (sum_.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    assert_within_units(normed, sum_ * scale * gain.double(), allowance(form, dtype, 1))
    if residual is not None:
        assert torch.equal(residual, before)


@pytest.mark.parametrize("form", forms("pointwise", "rms_norm"))
def test_rms_norm_of_extreme_values(form: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Zeros stay zeros; eps decides for small rows; strided rows are read where they lie."""
    gain = normal(48, seed=1)
    assert not form(torch.zeros(1, 48, device=DEVICE), None, gain, 1e-6)[0].any()
    small = normal(1, 48, std=1e-4)
    want = small.double() / (small.double().square().mean() + 1e-5).sqrt() * gain.double()
    assert_within_units(form(small, None, gain, 1e-5)[0], want, 8)
    half = small.bfloat16()  # beside gains in float32
    want = half.double() / (half.double().square().mean() + 1e-5).sqrt() * gain.double()
    got = form(half, None, gain, 1e-5)[0]
    assert got.dtype == torch.bfloat16
    assert_within_units(got, want, allowance(form, torch.bfloat16, 1))
    wide, beside = normal(3, 100), normal(3, 64, seed=4)
    got = form(wide[:, 20:68], beside[:, :48], gain, 1e-6)
    want = form(wide[:, 20:68].contiguous(), beside[:, :48].contiguous(), gain, 1e-6)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("form", forms("pointwise", "gated"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 37), (2, 1024), (2, 2100)])
def test_gated(form: Callable[..., Tensor], dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up = normal(tokens, 2 * width, dtype=dtype, std=4)
    gate, up = gate_up.double().chunk(2, -1)
    for name in ("silu", "gelu_tanh"):
        got = form(gate_up, name)
        assert got.shape == (tokens, width) and got.dtype == dtype
        exact = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
        if name == "silu":
            # A last bit of exp can push the first rounding to its neighbour: one unit more.
            want = exact.to(dtype).double() * up
            assert_within_units(got, want, allowance(form, dtype, 2))
        else:  # float32's tanh near -1 leaves no digit of what is small
            error = (got.double() - exact * up).abs()
            kind, units = torch.finfo(dtype), allowance(form, dtype, 2)
            unit = kind.eps * (exact.abs().clamp(min=kind.smallest_normal) * up.abs())
            assert (error <= units * unit + 4e-7 * (gate * up).abs()).all()


@pytest.mark.parametrize("form", forms("pointwise", "gated"))
def test_swiglu_of_extreme_values(form: Callable[..., Tensor]) -> None:
    """exp overflows for large negative gates: the result is 0, not NaN. Strided rows are read."""
    gate = torch.tensor([[-200.0, -88.8, -20.0, 0.0, 20.0, 200.0]], device=DEVICE)
    got = form(torch.cat([gate, torch.full_like(gate, 2.0)], 1))
    want = 2 * F.silu(gate.double())
    assert got.isfinite().all() and torch.allclose(got.double(), want, rtol=2e-6, atol=1e-30)
    wide = normal(3, 50)
    assert torch.equal(form(wide[:, 7:31]), form(wide[:, 7:31].contiguous()))


def test_dispatch_on_a_cpu_is_the_reference() -> None:
    x, gain = torch.randn(2, 8), torch.randn(8)
    assert torch.equal(rms_norm(x, x, gain, 1e-6)[0], F.rms_norm(x + x, (8,), gain, 1e-6))
    assert torch.equal(gated(x), F.silu(x[:, :4]) * x[:, 4:])


@pytest.mark.parametrize("form", forms("pointwise", "turned"))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gains", ["", "own", "float32"])
@pytest.mark.parametrize(("shape", "rot"), [((3, 5, 16), 16), ((2, 40, 24), 16), ((1, 9, 64), 64)])
def test_heads_are_normed_and_turned(
    form: Callable[..., Tensor], dtype: torch.dtype, gains: str, shape: tuple[int, ...], rot: int
) -> None:
    """In float64, rounded where torch rounds; heads lie beside values in a wider product."""
    tokens, rows, dim = shape
    heads = normal(tokens, rows + 3, dim, dtype=dtype)[:, 1:-2]
    gain = normal(rows, dim, seed=1, dtype=torch.float32 if gains == "float32" else dtype)
    angle = normal(tokens, rot // 2, seed=2, std=3).repeat(1, 2)
    sign = torch.ones(rot, device=DEVICE)
    sign[: rot // 2] = -1
    cos, sin = angle.cos().to(dtype), (angle.sin() * sign).to(dtype)
    made = form(heads, gain if gains else None, 1e-5, (cos, sin))
    x = heads.double()
    if gains:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        x = x if gains == "float32" else x.to(dtype).double()
        x = (x * gain.double()).to(dtype).double()
    first, last = x[..., : rot // 2], x[..., rot // 2 : rot]
    c, s = cos.double()[:, None], sin.double()[:, None]
    wanted = torch.cat([x[..., :rot] * c + torch.cat([last, first], -1) * s, x[..., rot:]], -1)
    assert made.dtype == dtype and made.shape == shape
    # A rounding of each factor, and of each product, moves the sum by that of the larger parts.
    most = x.abs().amax(-1, keepdim=True)
    error = (made.double() - wanted).abs() / (most * torch.finfo(dtype).eps)
    assert float(error.max()) <= allowance(form, dtype, 4)


@pytest.mark.parametrize("form", forms("pointwise", "merged"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_parts_are_merged(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """Each side alone, too; outputs and sums lie as the kernels of either side leave them."""
    heads, count, dim = 3, 5, 12
    scores, values = normal(heads, count, 30, std=4).double(), normal(heads, 30, dim).double()
    scores[0, :2, :11], scores[1, 3, 11:] = -torch.inf, -torch.inf

    def attend(part: slice) -> tuple[Tensor, Tensor]:
        own = scores[..., part]
        out = (own.softmax(-1).nan_to_num() @ values[:, part]).to(dtype)
        return out.transpose(0, 1).contiguous().transpose(0, 1), own.logsumexp(-1).float()

    wider = torch.stack([attend(slice(11, 30))[1]] * 2, -1)[..., 0]
    made = form(*attend(slice(0, 11)), attend(slice(11, 30))[0], wider)
    wanted = scores.softmax(-1) @ values
    assert made.shape == wanted.shape and made.dtype == dtype
    error = float((made.double() - wanted).abs().max())
    assert error <= allowance(form, dtype, 2) * torch.finfo(dtype).eps * float(values.abs().max())


# --- the next token ------------------------------------------------------------------------


def columns(batch_slots: int, **values: Any) -> SamplingColumns:
    return columns_of([Draw(**values)] * batch_slots, DEVICE)[0]


def frequencies(row: Tensor, batch_slots: int = 20_000, **values: Any) -> Tensor:
    """Return how often each token is drawn from ``row [vocab]`` when the noise covers [0, 1)
    evenly.
    """
    noise = (torch.arange(batch_slots, device=DEVICE, dtype=torch.float64) + 0.5) / batch_slots
    rows = row.to(DEVICE).expand(batch_slots, -1).contiguous()
    drawn = sample(rows, columns(batch_slots, **values), noise)
    assert drawn.dtype == torch.int64 and drawn.shape == (batch_slots,)
    return torch.bincount(drawn.cpu(), minlength=row.numel()).double() / batch_slots


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 0.8, "top_k": 5},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 1.7, "top_k": 500},
    {"temperature": 0.9, "top_p": 0.7},
    {"temperature": 2.0, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 0.8, "top_k": 8, "top_p": 0.5},
]


@one_in(3)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_the_distribution_is_that_of_the_sampler(setting: dict[str, Any], ties: bool) -> None:
    """With evenly spread noise each token's share is its probability, to 1 / batch slots a side."""
    row = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3
    if ties:
        row = row.round()  # as logits of a bfloat16 head are: equal values everywhere
    wanted = distribution(row, Sampling(**setting)).double()
    got = frequencies(row, **setting)
    assert ((got - wanted).abs() <= 2 / 20_000).all()
    assert not got[wanted == 0].any()


def test_batch_slots_have_their_own_settings() -> None:
    rows = normal(6, 300, std=2)
    setting = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.7),
        Sampling(temperature=1.0, top_k=3),
        Sampling(temperature=1.3, top_p=0.5),
        Sampling(temperature=0.5, top_k=40, top_p=0.9),
        Sampling(temperature=0.0, top_k=4),
    ]
    draws = [Draw(s.temperature or 0.0, s.top_k or 0, s.top_p or 1.0) for s in setting]
    batch_slots, _ = columns_of(draws, DEVICE)
    for step in range(50):
        noise = uniform(torch.arange(6, device=DEVICE), torch.full((6,), step, device=DEVICE))
        drawn = sample(rows, batch_slots, noise)
        for batch_slot, one in enumerate(setting):
            if one.temperature == 0:
                assert drawn[batch_slot] == rows[batch_slot].argmax()
            else:
                assert distribution(rows[batch_slot], one)[drawn[batch_slot]] > 0
            alone = SamplingColumns(
                *(x[batch_slot : batch_slot + 1] for x in vars(batch_slots).values())
            )
            assert (
                sample(
                    rows[batch_slot : batch_slot + 1], alone, noise[batch_slot : batch_slot + 1]
                )[0]
                == drawn[batch_slot]
            )


@pytest.mark.parametrize("form", forms("sample", "sample"))
@pytest.mark.parametrize(
    ("first", "values"),
    enumerate(
        [
            normal(5, 4500, std=3),
            (normal(5, 4500, std=3) * 2).round() * -0.5,  # few values, some of them -0
            normal(5, 4500, std=3).where(normal(5, 4500, seed=1) > 1, -torch.inf),
            normal(5, 1),
        ]
    ),
    ids=["spread", "tied", "forbidden", "one"],
)
def test_a_draw_is_a_place_in_the_sorted_row(
    form: Callable[..., Tensor], first: int, values: Tensor
) -> None:
    """In whole numbers, without torch: equal logits in the order of their ids.

    Noise is below 1, but a product of it may round up. The interpreter, which takes seconds, draws
    each of the rows with one of the noises, and with another one of other values.
    """
    draws = [
        Draw(0.7, 20, 0.8),
        Draw(1.0),
        Draw(50.0, 700, 0.999, 0.9),
        Draw(1e-30, 3),
        Draw(0.9, 2499, 1.0, 0.05),
    ]
    settings, vocab = columns_of(draws, DEVICE)[0], values.shape[1]
    for turn in range(1 if is_triton(form) else 3):
        noises = [(0.0, 0.6, 1.0)[(first + turn + row) % 3] for row in range(5)]
        got = form(
            values, settings, torch.tensor(noises, dtype=torch.float64, device=DEVICE)
        ).tolist()
        for row, draw, noise, token in zip(values.cpu(), draws, noises, got, strict=True):
            heat = torch.tensor(draw.temperature)
            one = 1 << (62 - (vocab - 1).bit_length())
            weight = (((row - row.max()) / heat).exp() * float(one)).long().tolist()
            logit = row.tolist()
            order = sorted(range(vocab), key=lambda at, of=logit: (-of[at], at))
            if 0 < draw.top_k < vocab:
                least = logit[order[draw.top_k - 1]]
                order = [at for at in order if logit[at] >= least]
            mass, before, kept = sum(weight[at] for at in order), 0, []
            top_p, min_p = torch.tensor([draw.top_p, draw.min_p]).tolist()
            for at in order:
                if (top_p == 1 or before < mass * top_p) and weight[at] >= min_p * one:
                    kept.append(at)
                before += weight[at]
            total = sum(weight[at] for at in kept)
            place = min(int(noise * total), total - 1)
            while weight[kept[0]] <= place:
                place -= weight[kept.pop(0)]
            assert token == kept[0]


def test_a_vocabulary_of_true_size() -> None:
    """Fixed point holds 151,936 weights: flat, peaked and partly forbidden rows."""
    vocab = 151_936
    rows = torch.zeros(4, vocab, device=DEVICE)
    rows[1] = normal(vocab, std=2)
    rows[2, :1000] = 60.0
    rows[3, 7:] = -torch.inf
    noise = torch.tensor([0.25, 0.5, 1 - 2.0**-53, 1 - 2.0**-53], device=DEVICE).double()
    drawn = sample(rows, columns(4), noise).tolist()
    ordered = rows[1].double().sort(descending=True, stable=True)
    running = ordered.values.softmax(-1).cumsum(-1)
    near = int(ordered.indices[int((running <= 0.5).sum())])
    assert drawn[0] == vocab // 4 and drawn[2] == 999 and drawn[3] == 6
    assert abs(rows[1, drawn[1]] - rows[1, near]) < 1e-4
    tiny = sample(rows, columns(4, temperature=1e-30), noise)
    assert tiny[1] == rows[1].argmax() and 0 <= tiny[2] < 1000


def test_greedy_takes_the_first_of_equal_logits() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]], device=DEVICE)
    noise = torch.full((2,), 0.9, device=DEVICE, dtype=torch.float64)
    assert sample(rows, columns(2, temperature=0.0), noise).tolist() == [1, 0]


@pytest.mark.parametrize("form", forms("sample", "uniform"))
def test_noise_is_that_of_whole_numbers(form: Callable[..., Tensor]) -> None:
    """In Python's integers, for seeds and counters of all sizes."""
    golden, most = 0x9E3779B97F4A7C15, 2**64

    def mix(x: int) -> int:
        x = (x + golden) % most
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % most
        x = (x ^ x >> 27) * 0x94D049BB133111EB % most
        return x ^ x >> 31

    seeds, counters = [0, 1, 2**63 - 1, -5, 1234567], [0, 70_000, 2**40, 3, 2**31]
    given = (torch.tensor(x, device=DEVICE) for x in (seeds, counters))
    wanted = [
        (mix((mix(seed % most) + counter * golden) % most) >> 11) * 2.0**-53
        for seed, counter in zip(seeds, counters, strict=True)
    ]
    assert form(*given).tolist() == wanted


def test_noise_is_splitmix64() -> None:
    """The published first outputs for seed 1234567, and even spread over slots and counters."""
    from mmkv.engine.backends.cuda.kernels import sample as module

    seed = 1234567
    states = seed + torch.arange(3) * module._GOLDEN
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [x % 2**64 for x in module._mix(states).tolist()] == wanted
    seeds = torch.arange(100).repeat_interleave(1000)
    noise = uniform(seeds, torch.arange(1000).repeat(100))
    assert noise.dtype == torch.float64 and noise.min() >= 0 and noise.max() < 1
    counts = torch.histc(noise.float(), 50, 0, 1)
    assert ((counts - 2000) ** 2 / 2000).sum() < 100  # chi-square, 49 degrees: p = 2e-5
    table = noise.view(100, 1000)
    for other in (table.roll(1, 0), table.roll(1, 1)):  # the next seed, the next counter
        assert abs(torch.corrcoef(torch.stack([table.flatten(), other.flatten()]))[0, 1]) < 0.015


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_sampling_is_captured_in_a_graph() -> None:
    rows, batch_slots = normal(3, 5000, std=2), columns(3, temperature=0.9, top_k=20, top_p=0.8)
    seed, counter = torch.arange(3, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    sample(rows, batch_slots, uniform(seed, counter))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample(rows, batch_slots, uniform(seed, counter))
    for step in range(4):
        counter.fill_(step)
        graph.replay()
        assert torch.equal(drawn, sample(rows, batch_slots, uniform(seed, counter)))


# --- what the compiler makes of it ---------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("add", [False, True])
def test_rms_norm_fits_a_hopper_sm(add: bool) -> None:
    """bf16, 16 warps for d up to 4096: <= 40 registers, nothing spilled, 16-byte accesses."""
    (report,) = compiled("norm", width=2560, add=add)
    assert report.spills == 0 and report.registers <= 40 and report.shared <= 128
    assert "ld.global.v4.b32" in report.ptx and "st.global.v4.b32" in report.ptx


@needs_compiler
def test_swiglu_fits_a_hopper_sm() -> None:
    """bf16, f of Qwen3-8B: <= 32 registers (full occupancy), no shared memory."""
    (report,) = compiled("gated", width=12288, activation="gelu_tanh")
    assert report.spills == 0 and report.registers <= 32 and report.shared == 0
    assert "ld.global.v4.b32" in report.ptx and "st.global.v4.b32" in report.ptx


@needs_compiler
def test_the_draw_fits_a_hopper_sm() -> None:
    """Qwen3's vocabulary: nothing spilled, two programs of 8 warps on an SM."""
    for code in compiled("draw"):
        assert code.spills == 0 and code.registers <= 128 and code.shared <= 16384
