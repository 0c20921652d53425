"""Layers that keep a state of fixed size of each sequence, in place of entries in the cache.

What such a layer keeps cannot be evicted, nor taken back token by token: the cache copies it where
a sequence is forked, a session file holds it, and a pass puts the new one there when it is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkv.engine.model.delta import DeltaFunctions
from mmkv.engine.model.spec import DeltaSpec

if TYPE_CHECKING:
    from mmkv.engine.model.product import Product
    from mmkv.engine.model.weights import LayerWeights

# What a layer keeps of a sequence, by name.
State = dict[str, Tensor]
# Shape and dtype of each part of it.
StateShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


class StateLayer:
    """Mixes tokens of a sequence by what it keeps of those before them.

    A subclass has :meth:`states` and :meth:`chunk`; the rest is for speed. The decoder adds what
    :meth:`outputs` returns to the residual stream; norms and MLP around it are the decoder's.
    """

    def states(self, dtype: torch.dtype) -> StateShapes:
        """Return shape and dtype of what it keeps of a sequence, which begins as zeros.

        Args:
            dtype: of the model's states.
        """
        raise NotImplementedError

    def chunk(self, inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        """Mix T tokens of one sequence, which may be any part of it.

        Args:
            inputs: what :meth:`inputs` made of them, ``[T, ...]`` each.
            state: after the token before them; its tensors are not to be changed.

        Returns:
            ``[T, ...]``, and the state after them, in new tensors.
        """
        raise NotImplementedError

    def inputs(self, x: Tensor, layer: LayerWeights, product: Product) -> tuple[Tensor, ...]:
        """Compute what :meth:`chunk` reads of each token alone, of several sequences at once.

        Args:
            x: ``[T, d]``, the output of input_layernorm.
            product: multiplies by the matrices of ``layer``.
        """
        return (x,)

    def step(self, inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        """Mix one token of each of B sequences: ``[B, ...]`` of all tensors.

        ``state`` belongs to the callee, who may change it and return it.
        """
        made = [
            self.chunk(
                tuple(part[index : index + 1] for part in inputs),
                {name: kept[index] for name, kept in state.items()},
            )
            for index in range(len(inputs[0]))
        ]
        after = {name: torch.stack([own[name] for _, own in made]) for name in state}
        return torch.cat([out for out, _ in made]), after

    def outputs(
        self, mixed: Tensor, inputs: tuple[Tensor, ...], layer: LayerWeights, product: Product
    ) -> Tensor:
        """Compute ``[T, d]`` from what :meth:`chunk` or :meth:`step` returned, token by token."""
        return mixed

    def tensors(self) -> Mapping[str, Tensor]:
        """Return its weights by name, those of modules too, but for those in LayerWeights."""
        found: dict[str, Tensor] = {}
        for name, part in vars(self).items():
            if isinstance(part, Tensor):
                found[name] = part
            elif isinstance(part, nn.Module):
                found |= {f"{name}.{own}": tensor for own, tensor in part.named_parameters()}
        return found


def _apart(
    call: Callable[..., tuple[Tensor, ...]], counts: Sequence[int], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Join what ``call`` makes of parts of so many rows; of all rows at once with one part."""
    if len(counts) < 2:
        return call(*tensors)
    parts = zip(*(tensor.split(list(counts)) for tensor in tensors), strict=True)
    return tuple(map(torch.cat, zip(*(call(*part) for part in parts), strict=True)))


@dataclass
class DeltaLayer(StateLayer):
    """The gated delta rule behind a short convolution (Yang et al., arXiv 2412.06464).

    ``qkv`` of the layer's weights makes queries, keys and values of the convolution, and then the
    gate z of the output ``[channels + Hv dv, d]``; ``out`` is ``[d, Hv dv]``.

    Attributes:
        conv: ``[channels, K]``, the newest token's weight last.
        rates: ``[2 Hv, d]``, makes beta and then the step of the decay of each value head.
        log_decay: ``[Hv]`` float32, A_log; step_bias: ``[Hv]`` float32, of the step.
        gain: ``[dv]`` of the gated norm.
        functions: the convolution and the rule, of the device that the model runs on.
    """

    spec: DeltaSpec
    eps: float
    conv: Tensor
    rates: Tensor
    log_decay: Tensor
    step_bias: Tensor
    gain: Tensor
    functions: DeltaFunctions = field(default_factory=DeltaFunctions)

    def states(self, dtype: torch.dtype) -> StateShapes:
        return self.spec.states(dtype)

    def inputs(
        self, x: Tensor, layer: LayerWeights, product: Product, counts: Sequence[int] = ()
    ) -> tuple[Tensor, ...]:
        """Return what is convolved, decay g and rate beta, float32 ``[T, Hv]``, and z.

        ``counts``: of tokens that all but ``product`` reads apart from the others.
        """
        mixed, z = product(x, layer.qkv).split([self.spec.channels, self.spec.value_width], -1)
        return mixed, *_apart(self._rates, counts, x), z

    def _rates(self, x: Tensor) -> tuple[Tensor, ...]:
        rate, step = F.linear(x, self.rates).float().chunk(2, -1)
        decay = -self.log_decay.exp() * F.softplus(step + self.step_bias)
        return decay, rate.sigmoid()

    def chunk(self, inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        mixed, decay, rate, _ = inputs
        mixed, conv = self.functions.causal_conv(mixed, self.conv, state["conv"])
        out, delta = self.functions.delta_chunk(*self._heads(mixed), decay, rate, state["delta"])
        return out, {"conv": conv, "delta": delta}

    def step(self, inputs: tuple[Tensor, ...], state: State) -> tuple[Tensor, State]:
        slot = torch.arange(len(inputs[0]), device=inputs[0].device)
        return self.step_in_place(inputs, state, slot, self.functions), state

    def step_in_place(
        self, inputs: tuple[Tensor, ...], states: State, slot: Tensor, functions: DeltaFunctions
    ) -> Tensor:
        """Mix one token of each of B sequences, whose states change where they lie.

        Args:
            states: of all sequences; slot: ``[B]`` int64, those of these, all different. -1 where
                ``functions`` skip it.
            functions: to compute with.
        """
        mixed, decay, rate, _ = inputs
        mixed = functions.conv_step(mixed, self.conv, states["conv"], slot)
        return functions.delta_step(*self._heads(mixed), decay, rate, states["delta"], slot)

    def outputs(
        self,
        mixed: Tensor,
        inputs: tuple[Tensor, ...],
        layer: LayerWeights,
        product: Product,
        counts: Sequence[int] = (),
    ) -> Tensor:
        """Norm each head, multiply it by silu(z), and project; ``counts``: see :meth:`inputs`."""
        (gated,) = _apart(self._gated, counts, mixed, inputs[-1])
        return product(gated, layer.out)

    def _gated(self, mixed: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        normed = F.rms_norm(mixed.float(), self.gain.shape, eps=self.eps).to(mixed.dtype)
        gated = (self.gain * normed) * F.silu(z.view(mixed.shape).float())
        return (gated.to(mixed.dtype).flatten(1),)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        width = spec.key_heads * spec.key_dim
        q, k, v = mixed.split([width, width, spec.value_width], -1)
        keys = (spec.key_heads, spec.key_dim)
        return (
            q.unflatten(-1, keys),
            k.unflatten(-1, keys),
            v.unflatten(-1, (spec.value_heads, spec.value_dim)),
        )
