"""Gated attention: the blocked CPU form and FlexAttention against the dense float64 reference.

Tolerance. Outputs are averages of unit-normal values; a logit of age ``a`` carries an error of
``|a log_beta| 2**-24``, which matters only while ``exp(a log_beta)`` does, and one of
``|q . k| 2**-24``, some units. Gradients are compared relative to the largest of their tensor.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from mmkv.training import gated_attention as module
from mmkv.training.gated_attention import GATINGS, gated_attention, gated_attention_reference
from tests.support.tiers import long_but, one_in

OUT, GRADIENT = 4e-6, 1e-5


def inputs(
    batch: int,
    heads: int,
    group: int,
    steps: int,
    width: int = 8,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Return query, key, value and log_beta from -1e-9 to -50 with exact zeros."""
    generator = torch.Generator().manual_seed(steps)

    def normal(count: int) -> Tensor:
        return torch.randn(batch, count, steps, width, generator=generator, dtype=dtype)

    log_beta = -(10.0 ** (torch.rand(batch, heads, steps, generator=generator) * 10.7 - 9))
    log_beta[..., steps // 3] = 0.0
    tensors = [normal(heads * group), normal(heads), normal(heads), log_beta.to(dtype)]
    return [x.requires_grad_() for x in tensors]


def documents(batch: int, steps: int, count: int) -> Tensor:
    """Return sequences cut at different places."""
    generator = torch.Generator().manual_seed(steps)
    start = torch.zeros(batch, steps, dtype=torch.int64)
    cuts = torch.randint(0, steps, (batch, count), generator=generator)
    return start.scatter(1, cuts, cuts).cummax(1).values


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in tensors]


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_three_tokens_by_hand(gating: str, backend: str) -> None:
    """One number at a time: two query heads on a KV head, the third token in a new document."""
    beta, window, scale = [0.5, 0.25, 0.9], 1, 0.5
    query, key, value = [[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]], [2.0, -1.0, 0.5], [10.0, 20.0, 40.0]

    def out(head: int, step: int) -> float:
        weights = {}
        for i in range(step + 1) if step < 2 else [2]:
            logit, age = scale * query[head][step] * key[i], step - i
            if gating == "log-bias":  # DBTrimKV, section 4
                weight = math.exp(logit) * beta[i] ** age
            elif gating == "logit-scale":  # TRIM-KV, equation 3
                weight = math.exp(logit * beta[i] ** age)
            else:  # WG-KV, section 3.2
                weight = math.exp(logit) * (beta[i] if age >= window else 1.0)
            weights[i] = weight
        return sum(w * value[i] for i, w in weights.items()) / sum(weights.values())

    found = gated_attention(
        torch.tensor(query)[None, ..., None],
        torch.tensor(key)[None, None, :, None],
        torch.tensor(value)[None, None, :, None],
        torch.tensor(beta).log()[None, None],
        scale=scale,
        document_start=torch.tensor([[0, 0, 2]]),
        gating=gating,
        window=window,
        backend=backend,
    )
    wanted = torch.tensor([[out(head, step) for step in range(3)] for head in range(2)])
    torch.testing.assert_close(found[0, ..., 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize(
    ("packed", "block", "heads", "group", "steps"),
    [
        (False, 16, 2, 1, 1),
        (True, 96, 3, 3, 50),
        (False, 96, 1, 4, 96),
        (True, 96, 2, 8, 97),
        (True, 16, 2, 3, 230),
        (False, 16, 2, 3, 230),
    ],
)
def test_blocked_form_matches_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    gating: str,
    packed: bool,
    block: int,
    heads: int,
    group: int,
    steps: int,
) -> None:
    monkeypatch.setattr(module, "BLOCK", block)
    tensors = inputs(2, heads, group, steps)
    references = doubled(tensors)
    settings = {"scale": 0.35, "gating": gating}
    settings["document_start"] = documents(2, steps, 4) if packed else None
    got = gated_attention(*tensors, **settings, backend="sdpa")
    want = gated_attention_reference(*references, **settings)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= OUT
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(got, tensors, weight)
    for got_grad, want_grad in zip(
        grads, torch.autograd.grad(want, references, weight.double()), strict=True
    ):
        assert (got_grad - want_grad).abs().max() <= GRADIENT * (want_grad.abs().max() + 1e-6)


@pytest.mark.parametrize(
    ("window", "packed"), [(13, True), (13, False), (1, False), (50, True), (400, False)]
)
def test_write_gates_spare_the_window(
    window: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocked form against m_ij written out pair by pair (WG-KV, section 3.2)."""
    monkeypatch.setattr(module, "BLOCK", 16)
    steps, group = 60, 2
    tensors = inputs(1, 2, group, steps)
    start = documents(1, steps, 3) if packed else torch.zeros(1, steps, dtype=torch.int64)
    query, key, value, log_g = references = doubled(tensors)
    g = log_g.exp()
    rows = []
    for head in range(2 * group):
        at = head // group
        for i in range(steps):
            seen = range(int(start[0, i]), i + 1)
            m = torch.stack(
                [torch.ones_like(g[0, 0, 0]) if i - j < window else g[0, at, j] for j in seen]
            )
            weight = torch.exp(0.3 * key[0, at, seen] @ query[0, head, i]) * m
            rows.append(weight @ value[0, at, seen] / weight.sum())
    want = torch.stack(rows).view(1, 2 * group, steps, -1)
    got = gated_attention(
        *tensors, scale=0.3, document_start=start, gating="write", window=window, backend="sdpa"
    )
    assert (got - want).abs().max() <= OUT
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(0))
    grads = torch.autograd.grad(got, tensors, weight)
    wanted = torch.autograd.grad(want, references, weight.double(), materialize_grads=True)
    for got_grad, want_grad in zip(grads, wanted, strict=True):
        assert (got_grad - want_grad).abs().max() <= GRADIENT * (want_grad.abs().max() + 1e-6)


def test_write_gates_that_admit_nothing_leave_the_window() -> None:
    """log g = -inf, as evaluation has it: attention to the newest 7 keys alone."""
    query, key, value, log_g = (x.detach() for x in inputs(1, 2, 2, 120))
    log_g.fill_(-torch.inf)
    age = torch.arange(120)[:, None] - torch.arange(120)
    want = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(age >= 0) & (age < 7), scale=0.3, enable_gqa=True
    )
    for backend in ("sdpa", "reference"):
        got = gated_attention(
            query, key, value, log_g, scale=0.3, gating="write", window=7, backend=backend
        )
        torch.testing.assert_close(got, want, rtol=0, atol=OUT)


@one_in(2)
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("group", long_but({3}, [1, 3], "the other group size"))
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_form_matches_the_reference(gating: str, packed: bool, group: int) -> None:
    """Values only, and eager: FlexAttention has no backward pass on CPUs."""
    tensors = [x.detach() for x in inputs(2, 2, group, 150, 16)]
    settings = {"scale": 0.25, "gating": gating}
    settings["document_start"] = documents(2, 150, 3) if packed else None
    got = gated_attention(*tensors, **settings, backend="flex")
    assert (got - gated_attention_reference(*tensors, **settings)).abs().max() <= OUT


@pytest.mark.parametrize("packed", [False, True])
def test_flex_is_asked_for_few_lengths(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is compiled anew, and after eight torch gives up: 40 lengths become four."""
    asked: dict[int, int] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        mask = options["block_mask"]
        assert query.shape[2] == key.shape[2] == value.shape[2] == mask.seq_lengths[0]
        blocks = mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()
        asked[query.shape[2]] = int(blocks) // 2  # of two sequences
        return query

    monkeypatch.setattr(module, "flex_attention", attend)
    for steps in range(1, 1000, 25):
        start = documents(2, steps, 3) if packed else None
        query, *others = (x.detach() for x in inputs(2, 2, 1, steps, 16))
        got = gated_attention(query, *others, scale=1.0, document_start=start, backend="flex")
        assert torch.equal(got, query), "cut back to what was asked for"
        # What is appended sees itself alone: at most the triangles of both parts are computed.
        size = max(asked)
        if not packed and size == 1024:
            own, more = -(-steps // 128), -(-(1024 - steps) // 128) + 1
            assert asked[1024] <= own * (own + 1) // 2 + more * (more + 1) // 2
    assert set(asked) == {128, 256, 512, 1024}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("steps", [1, 128, 300, 1000])
def test_flex_blocks_are_those_of_the_dense_mask(packed: bool, steps: int) -> None:
    """The eager form above looks at the mask only, not at the blocks."""
    start = documents(2, steps, 3) if packed else torch.zeros(1, steps, dtype=torch.int64)
    got = module._block_mask(start if packed else None, steps, torch.device("cpu"))
    want = create_block_mask(
        lambda b, h, t, i: (i <= t) & (i >= start[b, t]),
        len(start),
        None,
        steps,
        steps,
        device="cpu",
    )
    assert got.seq_lengths == want.seq_lengths
    assert torch.equal(got.to_dense(), want.to_dense())
    # A partial last block of queries is never "full" to create_block_mask, and may be to us.
    whole = steps // 128
    assert torch.equal(got.full_kv_num_blocks[..., :whole], want.full_kv_num_blocks[..., :whole])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's gradients need CUDA")
@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("packed", [False, True])
def test_flex_gradients_on_cuda(gating: str, packed: bool) -> None:
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(2, 2, 3, 300, 64)]
    references = doubled(tensors)
    settings = {"scale": 0.125, "gating": gating}
    settings["document_start"] = documents(2, 300, 3).cuda() if packed else None
    got = gated_attention(*tensors, **settings, backend="flex")
    want = gated_attention_reference(*references, **settings)
    weight = torch.randn_like(got)
    grads = torch.autograd.grad(got, tensors, weight)
    for got_grad, want_grad in zip(
        grads, torch.autograd.grad(want, references, weight.double()), strict=True
    ):
        # TF32 products inside the kernel: 10 bits.
        assert (got_grad - want_grad).abs().max() <= 5e-3 * want_grad.abs().max()


@pytest.mark.parametrize("gating", GATINGS)
@pytest.mark.parametrize("rate", [-50.0, -1e4, -1e30])
def test_gates_that_drop_everything_stay_finite(gating: str, rate: float) -> None:
    query, key, value, log_beta = inputs(1, 2, 2, 130)
    log_beta = torch.full_like(log_beta, rate).requires_grad_()
    tensors = [query, key, value, log_beta]
    out = gated_attention(*tensors, scale=0.35, gating=gating, backend="sdpa")
    if gating != "logit-scale":  # only the newest key is left
        torch.testing.assert_close(out, value.repeat_interleave(2, 1))
    for grad in torch.autograd.grad(out.square().sum(), tensors):
        assert grad.isfinite().all()


def test_only_the_inputs_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the backward pass: no attention weights are kept."""
    monkeypatch.setattr(module, "gated_attention_reference", None)
    saved: list[Tensor] = []
    tensors = inputs(1, 2, 3, 300)
    pack = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with pack:
        gated_attention(*tensors, scale=0.3)  # "auto" on a CPU
    assert sum(x.numel() for x in saved) <= sum(x.numel() for x in tensors)


def test_frozen_inputs_get_no_gradient() -> None:
    """The first layer's case: only the gates ask for one."""
    tensors = inputs(1, 2, 3, 100)
    everything = torch.autograd.grad(gated_attention(*tensors, scale=0.3).sum(), tensors)
    frozen = [x.detach() for x in tensors[:3]]
    out = gated_attention(*frozen, tensors[3], scale=0.3)
    (d_rate,) = torch.autograd.grad(out.sum(), tensors[3])
    assert torch.equal(d_rate, everything[3])


def test_half_precision_in_and_out() -> None:
    tensors = inputs(1, 2, 3, 100)
    half = [x.detach().bfloat16().requires_grad_() for x in tensors[:3]]
    out = gated_attention(*half, tensors[3], scale=0.3)
    assert out.dtype == torch.bfloat16
    want = gated_attention_reference(*half, tensors[3], scale=0.3)
    assert (out - want).abs().max() <= 0.02
    out.sum().backward()
    assert half[0].grad.dtype == torch.bfloat16
    assert tensors[3].grad.dtype == torch.float32


def test_bad_arguments_are_named() -> None:
    query, key, value, log_beta = inputs(1, 2, 3, 10)
    with pytest.raises(ValueError, match="gating"):
        gated_attention(query, key, value, log_beta, scale=1, gating="none")
    with pytest.raises(ValueError, match="backend"):
        gated_attention(query, key, value, log_beta, scale=1, backend="none")
    with pytest.raises(ValueError, match="do not fit"):
        gated_attention(query[:, :5], key, value, log_beta, scale=1)
    with pytest.raises(ValueError, match="log_beta"):
        gated_attention(query, key, value, log_beta[:, :1], scale=1)
    with pytest.raises(ValueError, match="document_start"):
        start = torch.zeros(1, 9, dtype=torch.int64)
        gated_attention(query, key, value, log_beta, scale=1, document_start=start)
