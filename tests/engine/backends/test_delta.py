"""The gated delta rule: steps and chunks in every form against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

from mmkv.engine.backends.torch import delta


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
SHAPES = [(5, 2, 4, 16, 16), (200, 1, 3, 32, 24), (65, 2, 2, 7, 5), (64, 1, 1, 128, 128)]


@pytest.mark.parametrize("form", [delta.delta_chunk, delta.delta_chunk_reference])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_chunk_equals_transformers_recurrence_however_it_is_split(form: Any, shape: Any) -> None:
    *of_tokens, state = drawn(*shape)
    before = state.clone()
    wanted, left = expected(*of_tokens, state)
    for size in (shape[0], 64, 13):
        held, parts = state, []
        for first in range(0, shape[0], size):
            made, held = form(*(x[first : first + size] for x in of_tokens), held)
            parts.append(made)
        assert_close(torch.cat(parts), wanted)
        assert_close(held, left)
    assert torch.equal(state, before)


def test_steps_of_a_batch_equal_each_sequence_alone_and_leave_other_slots() -> None:
    made = [drawn(6, 2, 4, 16, 12)]
    made.append(tuple(x.flip(0) for x in made[0]))
    states = torch.zeros(5, 4, 16, 12)
    slot = torch.tensor([3, 1])
    for one, mine in zip(made, slot.tolist(), strict=True):
        states[mine] = one[-1]
    before = states.clone()
    steps = []
    for token in range(6):
        now = [torch.stack([one[n][token] for one in made]) for n in range(5)]
        steps.append(delta.delta_step(*now, states, slot))
    for index, (one, mine) in enumerate(zip(made, slot.tolist(), strict=True)):
        wanted, left = expected(*one)
        assert_close(torch.stack([step[index] for step in steps]), wanted)
        assert_close(states[mine], left)
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def test_the_convolution_equals_transformers_in_chunks_and_in_steps() -> None:
    source = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 9, 10, generator=source), torch.randn(10, 4, generator=source)
    wanted = theirs.causal_conv1d_fn(x.mT, weight, activation="silu").mT
    states, slot = torch.zeros(4, 10, 3), torch.tensor([2, 0])
    for index in range(2):
        for size in (1, 2, 5, 9):
            state, parts = torch.zeros(10, 3), []
            for part in x[index].split(size):
                made, state = delta.causal_conv(part, weight, state)
                parts.append(made)
            assert_close(torch.cat(parts), wanted[index])
            assert torch.equal(state, x[index, -3:].T)
    steps = [delta.conv_step(x[:, token], weight, states, slot) for token in range(9)]
    assert_close(torch.stack(steps, 1), wanted)
    assert torch.equal(states[slot], x[:, -3:].mT) and not states[[1, 3]].any()
