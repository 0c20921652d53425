"""Mixtures of experts: every form of the computation beside transformers' own block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmkv.engine.model.families import family_for
from mmkv.engine.model.mixture import mixture
from mmkv.engine.model.spec import DecoderSpec, Routing
from mmkv.engine.model.weights import DecoderWeights, LayerWeights
from tests.support.factories import CHECKPOINTS, make_model


def block(name: str) -> tuple[Any, LayerWeights, Routing]:
    """The MLP of the last layer of a checkpoint, and what the engine takes of that layer."""
    model = make_model(CHECKPOINTS[name])
    text: Any = family_for(model.config).text_model(model)
    theirs, spec = text.layers[-1].mlp, DecoderSpec.from_hf(text)
    weights = DecoderWeights.take(text, model.get_output_embeddings().weight, spec)
    assert spec.routing is not None
    return theirs, weights.layers[-1], spec.routing


def states(layer: LayerWeights, tokens: int) -> Tensor:
    assert layer.router is not None
    return torch.randn(
        tokens, layer.router.shape[1], generator=torch.Generator().manual_seed(tokens)
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_mixed", "qwen3_vl_moe"])
def test_it_is_the_block_of_transformers(name: str) -> None:
    """``qwen3_moe_mixed`` does not normalize the weights of the chosen experts."""
    theirs, layer, routing = block(name)
    assert routing.normalized == (name != "qwen3_moe_mixed") and layer.router is not None
    for tokens in (0, 1, 5, 40):
        x = states(layer, tokens)
        with torch.no_grad():
            wanted = theirs(x[None])[0]
        found = mixture(x, layer.router, layer.gate_up, layer.down, routing)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_transformers() -> None:
    theirs, layer, routing = block("qwen3_moe")
    assert layer.router is not None
    given = states(layer, 9).requires_grad_()
    mixture(given, layer.router, layer.gate_up, layer.down, routing).square().sum().backward()
    other = given.detach().clone().requires_grad_()
    theirs(other[None])[0].square().sum().backward()
    assert given.grad is not None and float(given.grad.abs().max()) > 0
    torch.testing.assert_close(given.grad, other.grad, rtol=1e-4, atol=1e-4)
