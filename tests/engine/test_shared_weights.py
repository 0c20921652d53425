"""A model's weights used where they are: no second copy, and the model stays what it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmkv.engine.errors import ModelError
from mmkv.engine.model.families import family_for
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.weights import DecoderWeights, separate
from tests.support.factories import CHECKPOINTS, make_model, make_turn

NAMES = ["qwen3_vl", "llava_qwen2", "llama_biased", "phi3", "qwen3_moe_mixed", "qwen3_5"]


def parts(model: Any) -> tuple[Any, Tensor, DecoderSpec]:
    family = family_for(model.config)
    text_model: Any = family.text_model(model)
    return text_model, family.output_head(model), DecoderSpec.from_hf(text_model)


def tensors(weights: DecoderWeights) -> list[Tensor]:
    layers = [tensor for layer in weights.layers for _, tensor in layer.parts()]
    return [weights.embed, weights.norm, weights.head, *layers]


def storages(of: list[Tensor]) -> dict[int, int]:
    """Return the bytes of each storage by its address."""
    held = [tensor.untyped_storage() for tensor in of]
    return {storage.data_ptr(): storage.nbytes() for storage in held}


@pytest.mark.parametrize("name", NAMES)
def test_shared_weights_are_the_models_own(name: str) -> None:
    model = make_model(CHECKPOINTS[name])
    before = copy.deepcopy(model.state_dict())
    wanted = DecoderWeights.take(*parts(copy.deepcopy(model)))
    text_model, head, spec = parts(model)
    parameters = dict(model.named_parameters())
    weights, views = DecoderWeights.share(text_model, head, spec)

    assert all(torch.equal(a, b) for a, b in zip(tensors(weights), tensors(wanted), strict=True))
    assert {key: id(value) for key, value in model.named_parameters()} == {
        key: id(value) for key, value in parameters.items()
    }
    assert_equal_states(model.state_dict(), before)
    # All lies in the model's memory but joined gains of q and k, and those that are 1 + weight.
    joined = {layer.qk_norm.data_ptr() for layer in weights.layers if layer.qk_norm is not None}
    if spec.unit_offset:
        joined |= {gain.data_ptr() for gain in tensors(weights) if gain.dim() == 1}
    own = storages(list(model.parameters()))
    assert set(storages(tensors(weights))) - joined <= set(own)
    assert sum(own.values()) == sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        text_model.layers[0].mlp.down_proj.weight.add_(1.0)
        at = spec.entry_index.index(0)
        first = text_model.layers[at].self_attn
        (first.v_proj if hasattr(first, "v_proj") else first.qkv_proj).weight[-1].add_(1.0)
    assert not torch.equal(weights.layers[0].down, wanted.layers[0].down)
    assert not torch.equal(weights.layers[at].qkv[-1], wanted.layers[at].qkv[-1])
    assert bool(views) == (name != "phi3")

    separate(views)
    owners = storages(list(model.parameters()))
    assert sum(owners.values()) == sum(p.nbytes for p in model.parameters())


def assert_equal_states(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def test_a_model_with_views_runs_and_trains_as_before() -> None:
    model = make_model(CHECKPOINTS["qwen3_vl"])
    turn = make_turn("qwen3_vl", [4, ("image", 16, 16), 5])
    wanted = loss_and_gradient(model, turn)
    _, views = DecoderWeights.share(*parts(model))
    found = loss_and_gradient(model, turn)
    separate(views)
    again = loss_and_gradient(model, turn)
    for one in (found, again):
        assert all(torch.equal(a, b) for a, b in zip(one, wanted, strict=True))


def loss_and_gradient(model: Any, turn: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    model.zero_grad()
    loss = model(**turn, labels=turn["input_ids"]).loss
    loss.backward()
    return loss.detach(), model.model.language_model.layers[1].self_attn.k_proj.weight.grad.clone()


def test_a_layer_that_cannot_run_leaves_the_model_as_it_was() -> None:
    model = make_model(CHECKPOINTS["llama"])
    before = copy.deepcopy(model.state_dict())
    model.model.layers[1].extra = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="extra"):
        DecoderWeights.share(*parts(model))
    del model.model.layers[1].extra
    assert_equal_states(model.state_dict(), before)
    owners = storages(list(model.parameters()))
    assert len(owners) == len(list(model.parameters())), "none is a view of what was fused"
