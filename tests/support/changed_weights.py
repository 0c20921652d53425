"""What may happen to the weights of a model between two calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def _drawn(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _all(model: Any, seed: int) -> dict[str, torch.Tensor]:
    return {
        name: 0.3 * _drawn(part.shape, seed).to(part) for name, part in model.state_dict().items()
    }


def _linear(model: Any, seed: int) -> nn.Linear:
    found = [one for one in model.modules() if isinstance(one, nn.Linear)]
    return found[seed % len(found)]


@torch.no_grad()
def _write(model: Any, seed: int) -> None:
    part = _linear(model, seed).weight
    part += 0.5 * _drawn(part.shape, seed)


def _write_data(model: Any, seed: int) -> None:
    part = _linear(model, seed).weight.data
    part += 0.5 * _drawn(part.shape, seed)


def _other_data(model: Any, seed: int) -> None:
    part = _linear(model, seed).weight
    part.data = _drawn(part.shape, seed)


def _other_parameter(model: Any, seed: int) -> None:
    module = _linear(model, seed)
    module.weight = nn.Parameter(_drawn(module.weight.shape, seed))


class _Adapted(nn.Module):
    """As PEFT does: another module around the matrix."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base, self.more = base, nn.Parameter(_drawn(base.weight.shape, seed))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.more.T


def _adapter(model: Any, seed: int) -> None:
    attention = model.model.layers[0].self_attn
    if isinstance(attention.q_proj, nn.Linear):
        attention.q_proj = _Adapted(attention.q_proj, seed)


def _other_head(model: Any, seed: int) -> None:
    head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    head.weight.data = _drawn(head.weight.shape, seed)
    model.set_output_embeddings(head)


@torch.no_grad()
def _norm(model: Any, seed: int) -> None:
    part = model.model.norm.weight
    part.copy_(1 + _drawn(part.shape, seed).abs())


def _trained(model: Any, seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    ids = torch.arange(4, 20)[None] + seed % 8
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    model.zero_grad()


CHANGES: dict[str, Callable[[Any, int], Any]] = {
    "nothing": lambda model, _: None,
    "load_state_dict": lambda model, seed: model.load_state_dict(_all(model, seed)),
    "load_state_dict(assign=True)": lambda model, seed: model.load_state_dict(
        _all(model, seed), assign=True
    ),
    "an in-place write": _write,
    "a write through .data": _write_data,
    "other .data": _other_data,
    "another parameter": _other_parameter,
    "an adapter": _adapter,
    "another head": _other_head,
    "the last norm": _norm,
    "to(bfloat16) and back": lambda model, _: model.to(torch.bfloat16).to(torch.float32),
    "half": lambda model, _: model.half().float(),
    "an optimizer's step": _trained,
}
