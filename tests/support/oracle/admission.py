"""Write gates (WG-KV, arXiv 2512.17452, section 4.2), alone or beside a method with a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.oracle.eviction import Oracle
from tests.support.oracle.methods.admission import PAPER_WINDOW
from tests.support.oracle.simulation import GateFunction

# (layer, keys before RoPE [T, H, D], after RoPE) -> log g [T, H].
WriteGateFunction = Callable[[int, Tensor, Tensor], Tensor]


class Admitted(Oracle):
    """Every token sees the newest ``window`` tokens and those with g of at least the threshold.

    Keys before RoPE are taken from transformers' own modules by hooks, which :meth:`close` removes.
    """

    def __init__(
        self,
        hf: nn.Module,
        gate: GateFunction | None,
        write_gate: WriteGateFunction,
        policy: str,
        budget: float = 1e9,
        **settings: Any,
    ) -> None:
        super().__init__(hf, gate, policy, budget, **settings)
        self.write_gate, self.threshold = write_gate, self.method.threshold
        self.local = self.method.window or PAPER_WINDOW
        self.log_g = torch.zeros(self.layers, self.heads, 0)
        self.evicted = torch.zeros(self.layers, self.heads, 0, dtype=torch.bool)
        self.before: dict[int, Tensor] = {}
        self.hooks = []
        for index, layer in enumerate(self.text.layers):
            attention = layer.self_attn
            source = getattr(attention, "k_norm", attention.k_proj)
            self.hooks.append(source.register_forward_hook(self._keep_key(index)))

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self.hooks:
            hook.remove()

    def _keep_key(self, index: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.before[index] = out.reshape(-1, self.heads, self.dim)

        return hook

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        if self.log_g.shape[-1] < self.seen:
            grown = torch.zeros(self.layers, self.heads, self.new)
            self.log_g = torch.cat([self.log_g, grown], -1)
            self.evicted = torch.cat([self.evicted, grown.bool()], -1)
        after = self.key[layer][:, -self.new :].transpose(0, 1)
        self.log_g[layer, :, -self.new :] = self.write_gate(layer, self.before[layer], after).T
        back = at[:, None] - torch.arange(self.seen)
        sees = (back >= 0) & ((back < self.local) | self._passes()[layer][:, None])
        sees = sees & ~self.evicted[layer][:, None]
        key = self.key[layer].repeat_interleave(self.group, 0)
        scores = query @ key.transpose(1, 2) * self.dim**-0.5
        sees = sees.repeat_interleave(self.group, 0)
        return scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)

    def _passes(self) -> Tensor:
        return self.log_g.exp() >= self.threshold

    def _evict(self, slack: int) -> None:
        """What the next token may not see goes; the method then chooses among what is left."""
        back = self.seen - torch.arange(self.seen)
        self.keep = self.keep & ((back < self.local) | self._passes())
        before = self.keep
        super()._evict(slack)
        self.evicted |= before & ~self.keep

    def _protected(self) -> Tensor:
        newest = torch.arange(self.seen) >= self.seen - self.local
        return super()._protected() | newest

    def follow(self, retained: list[list[Tensor]]) -> None:
        ours = self.keep
        super().follow(retained)
        # A swap of near-ties: go on with the engine's choice.
        self.evicted = (self.evicted | (ours & ~self.keep)) & ~self.keep
