"""The gated delta rule: steps and chunks in every form against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from mmkv.engine.backends.cpu import kernels, levels
from mmkv.engine.model import delta
from mmkv.engine.model.spec import DeltaSpec
from mmkv.engine.model.state_layer import DeltaLayer

# The same in torch, token after token, and in every level of C.
REFERENCE = SimpleNamespace(**{**vars(delta), "delta_chunk": delta.delta_chunk_reference})


@pytest.fixture(params=["reference", "torch", *levels()])
def ops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "reference":
        return REFERENCE
    monkeypatch.setenv("MMKV_NATIVE", "0" if request.param == "torch" else request.param)
    return kernels


def drawn(tokens: int, key_heads: int, value_heads: int, dk: int, dv: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta and a state, as a model with slow and fast heads has them."""
    source = torch.Generator().manual_seed(tokens + dk)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source)

    g = -((torch.rand(tokens, value_heads, generator=source) * 3) ** 4)  # up to 81: all forgotten
    q, k = normal(tokens, key_heads, dk), normal(tokens, key_heads, dk) + 0.5  # keys overlap
    v, beta = normal(tokens, value_heads, dv), normal(tokens, value_heads).sigmoid()
    return q, k, v, g, beta, normal(value_heads, dk, dv)


def expected(*drawn: Tensor) -> tuple[Tensor, Tensor]:
    """What transformers computes token after token."""
    q, k, v, g, beta, state = (x[None] for x in drawn)
    made = theirs.torch_recurrent_gated_delta_rule(
        q, k, v, g, beta, state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return made[0][0], made[1][0]


def assert_close(ours: Tensor, wanted: Tensor) -> None:
    assert ours.shape == wanted.shape
    assert float((ours - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())


# tokens, key heads, value heads, dk, dv: less than a block, blocks and a rest, groups, odd sizes.
SHAPES = [
    (5, 2, 4, 16, 16),
    (200, 1, 3, 32, 24),
    (65, 2, 2, 7, 5),
    (64, 1, 1, 128, 128),
    (9, 1, 1, 33, 71),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_chunk_equals_transformers_recurrence_however_it_is_split(ops: Any, shape: Any) -> None:
    *of_tokens, state = drawn(*shape)
    before = state.clone()
    wanted, left = expected(*of_tokens, state)
    for size in (shape[0], 64, 13):
        held, parts = state, []
        for first in range(0, shape[0], size):
            made, held = ops.delta_chunk(*(x[first : first + size] for x in of_tokens), held)
            parts.append(made)
        assert_close(torch.cat(parts), wanted)
        assert_close(held, left)
    assert torch.equal(state, before)


def test_steps_of_a_batch_equal_each_sequence_alone_and_leave_other_slots(ops: Any) -> None:
    made = [drawn(6, 2, 4, 16, 37)]
    made.append(tuple(x.flip(0) for x in made[0]))
    states = torch.full((5, 4, 16, 37), 7.0)
    slot = torch.tensor([3, 1])
    for one, mine in zip(made, slot.tolist(), strict=True):
        states[mine] = one[-1]
    before = states.clone()
    steps = []
    for token in range(6):
        now = [torch.stack([one[n][token] for one in made]) for n in range(5)]
        steps.append(ops.delta_step(*now, states, slot))
    for index, (one, mine) in enumerate(zip(made, slot.tolist(), strict=True)):
        wanted, left = expected(*one)
        assert_close(torch.stack([step[index] for step in steps]), wanted)
        assert_close(states[mine], left)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


@pytest.mark.parametrize("taps", [4, 3])
def test_the_convolution_equals_transformers_in_chunks_and_in_steps(ops: Any, taps: int) -> None:
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 9, 70, generator=source), torch.randn(70, taps, generator=source)
    wanted = theirs.causal_conv1d_fn(x.mT, weight, activation="silu").mT
    states, slot = torch.zeros(4, 70, taps - 1), torch.tensor([2, 0])
    for index in range(2):
        for size in (1, 2, 5, 9):
            state, parts = torch.zeros(70, taps - 1), []
            for part in x[index].split(size):
                made, state = ops.causal_conv(part, weight, state)
                parts.append(made)
            assert_close(torch.cat(parts), wanted[index])
            assert torch.equal(state, x[index, 1 - taps :].T)
    steps = [ops.conv_step(x[:, token], weight, states, slot) for token in range(9)]
    assert_close(torch.stack(steps, 1), wanted)
    assert torch.equal(states[slot], x[:, 1 - taps :].mT) and not states[[1, 3]].any()


def test_threads_and_company_change_no_bit() -> None:
    """In C, at the sizes of a model; one thread and alone against two and together."""
    *of_tokens, state = drawn(3, 2, 4, 128, 128)
    slot, alone = torch.arange(3), []
    threads, states = torch.get_num_threads(), state.repeat(3, 1, 1, 1)
    try:
        torch.set_num_threads(1)
        one = kernels.delta_chunk(*(x.repeat(30, *[1] * (x.dim() - 1)) for x in of_tokens), state)
        for token in range(3):
            now = (x[token : token + 1] for x in of_tokens)
            alone.append(kernels.delta_step(*now, state.clone()[None], slot[:1]))
        torch.set_num_threads(2)
        two = kernels.delta_chunk(*(x.repeat(30, *[1] * (x.dim() - 1)) for x in of_tokens), state)
        together = kernels.delta_step(*of_tokens, states, slot)
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, one, two))
    assert torch.equal(together, torch.cat(alone))


def test_what_chunks_read_together_leave_of_each_has_the_bits_of_that_alone() -> None:
    """But for the products with large matrices, which C makes row by row."""
    draw = torch.Generator().manual_seed(0)
    width, heads, tokens = 768, 3, [1, 31, 6]
    spec = DeltaSpec(1, heads, 8, 7, 4)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    matrices = [normal(spec.channels, 4), normal(2 * heads, width), normal(heads), normal(heads)]
    by, layer = DeltaLayer(spec, 1e-6, *matrices, normal(7)), cast(Any, SimpleNamespace())
    layer.qkv = normal(spec.channels + spec.value_width, width)
    layer.out = normal(11, spec.value_width)

    def columns(x: Tensor, weight: Tensor) -> Tensor:
        return x.repeat(1, 1 + len(weight) // x.shape[1])[:, : len(weight)]

    x, mixed = normal(sum(tokens), width), normal(sum(tokens), heads, 7)
    together = by.inputs(x, layer, columns, tokens)
    together += (by.outputs(mixed, together, layer, columns, tokens),)
    split = [part.split(tokens) for part in (x, mixed, *together)]
    for parts in zip(*split, strict=True):
        alone = by.inputs(parts[0], layer, columns)
        alone += (by.outputs(parts[1], alone, layer, columns),)
        assert all(map(torch.equal, alone, parts[2:]))
