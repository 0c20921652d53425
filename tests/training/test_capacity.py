"""Retained counts: the chunked form and the Triton kernels against the definition in float64.

Tolerance. A term ``exp(x)`` with ``x = age * log_beta`` rounded in float32 is off by up to
``|x| 2**-24`` of itself, at most ``2**-24 / e`` of 1, and is a product of two such; sums of up to
some hundred terms add a few units more. 32 units of 2**-24 hold for S relative to itself (all
terms are positive), and for the gradient relative to the sum of its terms' absolute values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.training import capacity
from mmkv.training.capacity import (
    capacity_loss,
    retained_counts,
    retained_total,
    retained_total_grouped,
)
from tests.support.kernels import DEVICE, compiled, needs_compiler, triton_form
from tests.support.tiers import long_but, slow_but

TOLERANCE = 32 * 2.0**-24


def triton_counts(log_beta: Tensor, document_start: Tensor | None = None) -> Tensor:
    from mmkv.training import capacity_triton

    start = None if document_start is None else document_start.to(DEVICE)
    return capacity_triton.retained_counts(log_beta.to(DEVICE), start).to(log_beta.device)


TRITON = triton_form(triton_counts)
FORMS = [pytest.param(retained_counts, id="torch"), TRITON]


def rates(rows: int, steps: int, seed: int = 0) -> Tensor:
    """Return log_beta from -1e-9 to -50, with an exact 0 in every row."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.rand(rows, steps, generator=generator) * 10.7 - 9
    log_beta = -(10.0**powers)
    log_beta[:, steps // 3] = 0.0
    return log_beta


def documents(steps: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, steps, (count,), generator=generator)
    start = torch.zeros(steps, dtype=torch.int64)
    start[cuts] = cuts
    return start.cummax(0).values


def by_definition(log_beta: Tensor, start: Tensor | None = None) -> Tensor:
    """Return ``S[r, t] = sum over i <= t of beta[r, i] ** (t - i)``, float64, by documents."""
    rows, steps = log_beta.shape
    cuts = [0] if start is None else sorted(set(start.tolist()))
    counts = []
    for first, end in zip(cuts, [*cuts[1:], steps], strict=True):
        rate = log_beta.double()[:, first:end]
        age = torch.arange(end - first).view(-1, 1) - torch.arange(end - first)
        # Entries of the future have age below 0 and are cut off above the diagonal.
        counts.append((age.clamp(min=0) * rate.unsqueeze(1)).exp().tril().sum(2))
    return torch.cat(counts, 1).view(rows, steps)


def check(
    form: Callable[..., Tensor], log_beta: Tensor, start: Tensor | None, seed: int = 0
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.rand(log_beta.shape, generator=generator) - 0.3
    fast, exact = log_beta.clone().requires_grad_(), log_beta.double().requires_grad_()
    got, want = form(fast, start), by_definition(exact, start)
    assert got.dtype == torch.float32
    assert ((got - want).abs() <= TOLERANCE * want).all()
    (d_got,) = torch.autograd.grad(got, fast, weight)
    (d_want,) = torch.autograd.grad(want, exact, weight.double(), retain_graph=True)
    (size,) = torch.autograd.grad(want, exact, weight.double().abs())
    assert ((d_got - d_want).abs() <= TOLERANCE * size + 1e-12).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 31, 64, 65, 200])
def test_counts_match_the_definition(form: Callable[..., Tensor], packed: bool, steps: int) -> None:
    check(form, rates(2, steps), documents(steps, 4) if packed else None)


@pytest.mark.parametrize(
    ("tile", "packed", "steps"),
    [
        *((tile, packed, 700) for tile in (1, 1 << 14, 1 << 18) for packed in (False, True)),
        # Chunks of 64 in place of 32; tiles of 1 take longest.
        *slow_but((), [(1 << 14, True, 2100)], "a reference of 2,100 x 2,100"),
        *long_but((), [(1, False, 2100), (1 << 18, False, 2100)], "the same, 3 s each"),
    ],
)
def test_counts_do_not_depend_on_the_blocks(
    monkeypatch: pytest.MonkeyPatch, tile: int, packed: bool, steps: int
) -> None:
    monkeypatch.setattr(capacity, "TILE", tile)
    check(retained_counts, rates(3, steps), documents(steps, 9) if packed else None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rate", [-50.0, -1.0, -0.2])
def test_blocks_without_contributions_are_skipped(form: Callable[..., Tensor], rate: float) -> None:
    check(form, torch.full((1, 300), rate), None)


def test_memory_grows_with_rows_times_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the inputs is saved, and no tensor on the way is larger than a block's."""
    largest, saved = 0, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                # The storage counts, not the view: expanded and skewed views are larger.
                if isinstance(x, Tensor):
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return out

    rows, steps = 4, 3000
    log_beta = rates(rows, steps).requires_grad_()
    monkeypatch.setattr(capacity, "TILE", 1)
    pack = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with pack, Watch():
        counts = retained_counts(log_beta)
        counts.sum().backward()
    assert sum(x.numel() for x in saved) <= rows * steps
    assert largest <= 8 * rows * steps  # T * T would be 750 * rows * steps


GROUPED_LIMITS = {8: (2e-1, 3e-1), 16: (1e-2, 4e-2), 32: (7e-4, 3e-3), 64: (8e-5, 4e-4)}


def gate_logits(kind: str, rows: int, steps: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(rows, steps, generator=generator)
    return {
        "spread": 4 * noise + 3,
        "heads differ": 3 * noise + torch.linspace(-2, 8, rows)[:, None],
        "fast": noise - 2,
        "first bias 18": torch.full_like(noise, 18.0),
        "first bias 8": torch.full_like(noise, 8.0),
        "constant 4": torch.full_like(noise, 4.0),
    }[kind]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "kind", ["spread", "heads differ", "fast", "first bias 18", "first bias 8", "constant 4"]
)
def test_grouped_error(kind: str, packed: bool) -> None:
    """The errors stated by ``retained_total_grouped``: of S, and of the gradient in L1."""
    start = documents(512, 3) if packed else None
    log_beta = F.logsigmoid(gate_logits(kind, 12, 512)).requires_grad_()
    exact = retained_total(log_beta.double(), start)
    (d_exact,) = torch.autograd.grad(exact.sum(), log_beta)
    for count, (limit, d_limit) in GROUPED_LIMITS.items():
        near = retained_total_grouped(log_beta, start, count)
        (d_near,) = torch.autograd.grad(near.sum(), log_beta)
        error = ((near - exact).abs() / exact).max().item()
        d_error = ((d_near - d_exact).abs().sum() / d_exact.abs().sum()).item()
        print(f"{kind}, {count} rates: S {error:.1e}, gradient {d_error:.1e}")
        assert error <= limit
        assert d_error <= d_limit


@pytest.mark.parametrize("steps", [1, 64, 65])
def test_grouped_at_the_ends_of_its_scale(steps: int) -> None:
    """beta = 1 and beta = 0 are exact, at the first and the last rate."""
    log_beta = torch.tensor([0.0, -50.0])[:, None].repeat(1, steps).requires_grad_()
    total = retained_total_grouped(log_beta)
    torch.testing.assert_close(total, torch.arange(2.0, steps + 2), rtol=1e-5, atol=0)
    total.sum().backward()
    assert log_beta.grad.isfinite().all()


def test_relative_loss() -> None:
    """Half of what could be over budget is: 0.5 where anything could, 0 before."""
    seen, budget, rows = torch.arange(1, 11), 20.0, 8
    counts = budget + 0.5 * (seen * rows - budget)
    loss = capacity_loss(counts, budget, rows=rows)
    assert loss.item() == pytest.approx(0.5 * 8 / 10)  # steps 3 .. 10
    assert capacity_loss(counts, budget, rows=rows, mask=seen > 2).item() == pytest.approx(0.5)
    assert capacity_loss(counts, budget, rows=rows, mask=seen > 99).item() == 0.0
    # Documents that lie end to end: what each token could be over is counted from its own first.
    start = torch.tensor([0, 0, 0, 3, 3, 3, 3])
    many = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0]) - 0.25
    each = [capacity_loss(part, 1.0) * len(part) for part in (many[:3], many[3:])]
    torch.testing.assert_close(capacity_loss(many, 1.0, document_start=start), sum(each) / 7)


def test_tt_loss_is_equation_5() -> None:
    counts = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    assert capacity_loss(counts, 2, "tt").item() == pytest.approx((1 + 2 + 3) / (5 * (5 - 2)))
    assert capacity_loss(counts, 9, "tt").item() == 0.0
    mask = torch.tensor([True] * 4 + [False])
    assert capacity_loss(counts, 2, "tt", mask=mask).item() == pytest.approx(3 / (4 * (4 - 2)))


@pytest.mark.parametrize("scope", ["global", "head"])
def test_tt_loss_of_packed_documents_is_the_mean_of_theirs(scope: str) -> None:
    """Documents of 3 to 40 tokens, M = 4: each is weighed by its own length, one is too short.

    Against equation 5 written out in float64 for each document alone, forward and gradient.
    """
    lengths, rows, budget = [40, 3, 17, 9], 5, 4.0
    generator = torch.Generator().manual_seed(1)
    log_beta = F.logsigmoid(2 + torch.randn(rows, sum(lengths), generator=generator)).double()
    log_beta.requires_grad_()
    start = torch.tensor([sum(lengths[:n]) for n, t in enumerate(lengths) for _ in range(t)])
    counts = retained_counts(log_beta, start)
    if scope == "global":
        whole = budget * rows
        loss = capacity_loss(counts.sum(0), whole, "tt", rows=rows, document_start=start)
    else:
        loss = capacity_loss(counts, budget, "tt", document_start=start)
    alone = []
    for part in log_beta.split(lengths, 1):
        steps = part.shape[1]
        age = torch.arange(steps)[:, None] - torch.arange(steps)
        kept = torch.exp(age.clamp(min=0) * part[:, None]).tril().sum(-1)
        if scope == "global":
            over = (kept.sum(0) - budget * rows).clamp(min=0).sum() / rows
        else:
            over = (kept - budget).clamp(min=0).sum() / rows
        alone.append(over / (steps * (steps - budget)))
    assert alone[1] == 0 and all(float(x) > 0.01 for x in (alone[0], *alone[2:]))
    expected = sum(alone) / len(alone)
    torch.testing.assert_close(loss, expected)
    (got,), (wanted,) = (torch.autograd.grad(x, log_beta) for x in (loss, expected))
    torch.testing.assert_close(got, wanted)


def test_tt_loss_counts_the_unmasked_steps_of_each_document() -> None:
    counts = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 1.0, 2.0, 3.0, 9.0, 9.0])
    start = torch.tensor([0] * 5 + [5] * 5)
    mask = torch.tensor([True] * 4 + [False] + [True] * 3 + [False] * 2)
    found = capacity_loss(counts, 2, "tt", document_start=start, mask=mask)
    assert found.item() == pytest.approx((3 / (4 * (4 - 2)) + 1 / (3 * (3 - 2))) / 2)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="must be float32"):
        retained_counts(torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"float32 \[rows, T\]"):
        retained_counts(torch.zeros(3))
    with pytest.raises(ValueError, match="document_start"):
        retained_counts(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))
    for form in (retained_total, retained_total_grouped):
        with pytest.raises(ValueError, match="must be float32"):
            form(torch.zeros(2, 3, dtype=torch.float16))
        with pytest.raises(ValueError, match="document_start"):
            form(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="at least 4"):
        retained_total_grouped(torch.zeros(2, 3), rates=3)
    with pytest.raises(ValueError, match="normaliser"):
        capacity_loss(torch.zeros(3), 1, "sum")


@needs_compiler
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_fit_a_hopper_sm(packed: bool) -> None:
    """No spills; 2 programs of 8 warps per SM and more: <= 128 registers, <= 1 KB shared."""
    for report in compiled("capacity", packed=packed):
        assert report.spills == 0 and report.registers <= 128 and report.shared <= 1024
