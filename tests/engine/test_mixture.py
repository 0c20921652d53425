"""Mixtures of experts: every form of the computation beside transformers' own block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmkv.engine.model.families import family_for
from mmkv.engine.model.mixture import gathered, grouped, mixture, route
from mmkv.engine.model.spec import DecoderSpec, Routing
from mmkv.engine.model.weights import DecoderWeights, LayerWeights
from tests.support.factories import CHECKPOINTS, make_model

# Operations that wait for a GPU.
READS_BACK = "_local_scalar_dense nonzero bincount unique repeat_interleave.Tensor grouped".split()


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


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_moe_mixed", "qwen3_vl_moe"])
def test_it_is_the_block_of_transformers(name: str, captured: bool) -> None:
    """``qwen3_moe_mixed`` does not normalize the weights of the chosen experts."""
    theirs, layer, routing = block(name)
    assert routing.normalized == (name != "qwen3_moe_mixed") and layer.router is not None
    for tokens in (0, 1, 5, 40):
        x = states(layer, tokens)
        with torch.no_grad():
            wanted = theirs(x[None])[0]
        found = mixture(x, layer.router, layer.gate_up, layer.down, routing, captured)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_all_forms_agree_in_bfloat16_and_in_gradients() -> None:
    _, layer, routing = block("qwen3_moe")
    assert layer.router is not None
    x = states(layer, 9)
    ids, _ = route(x, layer.router, routing)
    short = [part.bfloat16() for part in (layer.gate_up, layer.down)]
    one, two = (form(x.bfloat16(), ids, *short) for form in (gathered, grouped))
    torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2)
    gradients = []
    for captured in (False, True):
        given = x.clone().requires_grad_()
        made = mixture(given, layer.router, layer.gate_up, layer.down, routing, captured)
        made.square().sum().backward()
        assert given.grad is not None
        gradients.append(given.grad)
    assert float(gradients[0].abs().max()) > 0
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_any_width(dtype: torch.dtype) -> None:
    noise = torch.Generator().manual_seed(0)
    shapes = ((3, 22), (5, 14, 22), (5, 22, 7))
    x, gate_up, down = (torch.randn(shape, generator=noise).to(dtype) for shape in shapes)
    ids = torch.tensor([[0, 4], [4, 1], [2, 0]])
    one, two = (form(x, ids, gate_up, down) for form in (gathered, grouped))
    torch.testing.assert_close(one, two, rtol=2e-2, atol=2e-2 if dtype == torch.float16 else 1e-4)


class NothingReadBack(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in READS_BACK), func
        return func(*args, **(kwargs or {}))


def test_a_captured_step_reads_nothing_back() -> None:
    _, layer, routing = block("qwen3_moe")
    assert layer.router is not None
    with pytest.raises(AssertionError), NothingReadBack():
        int(states(layer, 1).sum())
    with NothingReadBack():
        mixture(states(layer, 33), layer.router, layer.gate_up, layer.down, routing, captured=True)


@pytest.mark.parametrize("width", [22, 32])
def test_an_eager_step_off_the_cpu_reads_nothing_back(width: int) -> None:
    """On the meta device, which has no numbers to read."""
    shapes = ((40, 32), (5, 32), (5, 2 * width, 32), (5, 32, width))
    x, router, gate_up, down = (torch.empty(shape, device="meta") for shape in shapes)
    seen: list[str] = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Products():
        made = mixture(x, router, gate_up, down, Routing(5, 2, True, width))
    assert made.shape == x.shape and not any("grouped" in name for name in seen)
