"""The one decoder of all families: norms, RoPE, grouped-query attention, gated MLP or experts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.elementwise import Elementwise, TorchElementwise, normed_heads
from mmkv.engine.model.families.base import Turn
from mmkv.engine.model.gates import Gates
from mmkv.engine.model.mixture import Experts, grouped, mixture
from mmkv.engine.model.product import embedded, plain
from mmkv.engine.model.rope import rotate
from mmkv.engine.model.spec import DecoderSpec
from mmkv.engine.model.state_layer import DeltaLayer, StateLayer
from mmkv.engine.model.weights import DecoderWeights, LayerWeights

# Tokens that go through an MLP or a projection at once on a CPU. What is between its matrices is by
# far the largest of a chunk, and a product of so many is no slower than one of more.
_MLP_TOKENS = 256


class StepAttention(Protocol):
    """Where a forward pass leaves its keys and values and gets its attention from."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store ``key, value [T, H, D]`` and attend with ``query [T, Hq, D]``: ``[T, Hq D]``.

        ``layer`` counts those with entries.
        """
        ...

    def mix(self, layer: int, by: StateLayer, inputs: tuple[Tensor, ...]) -> Tensor:
        """Mix tokens ``[T, ...]`` in a layer, of all layers, that keeps a state of a sequence."""
        ...


class ChunkAttention(StepAttention, Protocol):
    """The cache side of a pass over chunks of B prompts, whose last tokens alone are asked for."""

    def prune(self, layer: int, hidden: Tensor) -> Tensor | None:
        """Return the indices ``[T']`` of the tokens that go on into ``layer``, None for all.

        ``hidden [T, d]`` are the states before it.
        """
        ...

    @property
    def counts(self) -> Sequence[int]:
        """The tokens of each chunk, among those that go on."""
        ...

    def ends(self) -> Tensor:
        """Return the index int64 ``[B]`` of each chunk's last token, among those that go on."""
        ...

    def attend_last(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Do as :meth:`attend`, for the last token of each chunk alone: ``[B, Hq D]``."""
        ...


class Decoder:
    """Runs token states ``[T, d]`` through all layers: T tokens of B chunks, or of B sequences.

    Attributes:
        on_gate_input: called with (layer, ``[T, d]`` output of input_layernorm) when set, of each
            layer with entries: the tensor that retention gates read. For tools and tests.
        taps: layers after which :meth:`forward` gives out the residual stream.
        elementwise: computes what is between the products; experts: those of a mixture.
        hosted: whether a transformers model runs the layers: the weights then have none.
    """

    hosted: ClassVar[bool] = False

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        gates: Gates | None,
        taps: tuple[int, ...] = (),
        elementwise: Elementwise | None = None,
        experts: Experts = grouped,
    ) -> None:
        self.spec, self.weights, self.gates, self.taps = spec, weights, gates, taps
        self.elementwise, self.experts = elementwise or TorchElementwise(), experts
        # As a tensor of the dtype rounds it.
        self._embed_scale = torch.tensor(spec.embed_scale, dtype=weights.dtype).item()
        self.on_gate_input: Callable[[int, Tensor], None] | None = None
        self._rotated = spec.num_heads + spec.num_kv_heads

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the embeddings ``[T, d]`` of ``token_ids [T]``."""
        rows = embedded(token_ids, self.weights.embed).to(self.weights.dtype)
        return rows if self.spec.embed_scale == 1 else rows * self._embed_scale

    def embed_turn(self, turn: Turn) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """Return the input states ``[T, d]`` of a turn and its deepstack as :meth:`forward` takes
        it.
        """
        device = self.weights.embed.device
        hidden = self.embed(turn.token_ids.to(device))
        if turn.visual is None or not turn.visual.numel():
            return hidden, ()
        where = (turn.modality > 0).nonzero().flatten().to(device)
        hidden = hidden.index_copy(0, where, turn.visual.to(hidden.dtype))
        return hidden, tuple((where, level.to(hidden.dtype)) for level in turn.deepstack)

    def output(self, entry: int) -> Tensor:
        """Return the output matrix of a layer's attention by heads, float32 ``[Hq, D, d]``.

        ``entry`` counts the layers with entries.
        """
        matrix = self.weights.layers[self.spec.entry_index.index(entry)].out
        wide = matrix.float() if isinstance(matrix, Tensor) else matrix.wide()
        return wide.T.unflatten(0, (self.spec.num_heads, -1))

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        step: StepAttention,
        deepstack: tuple[tuple[Tensor, Tensor], ...] = (),
        tapped: list[Tensor] | None = None,
        chunks: ChunkAttention | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run every layer.

        Args:
            hidden: ``[T, d]`` input embeddings.
            rope: cos and signed sin ``[T, rot]``.
            step: the cache side of the pass.
            deepstack: per layer from the first: (token indices ``[V]``, features ``[V, d]``)
                added to the states after that layer (Qwen3-VL).
            tapped: takes the states ``[T, d]`` after each layer of :attr:`taps`.
            chunks: ``step`` again where it reads chunks of prompts: the last layer then computes
                keys and values of all tokens, and the rest for the last ones alone. It may drop
                tokens on the way, not with gates or taps.

        Returns:
            states before the final norm, ``[T, d]`` or with ``chunks`` ``[B, d]`` of their last
            tokens, and log_beta ``[T, L, H]`` float32 (None without gates).
        """
        layers = self.forward_by_layer(hidden, rope, step, deepstack, tapped, chunks)
        while True:
            try:
                next(layers)
            except StopIteration as end:
                made: tuple[Tensor, Tensor | None] = end.value
                return made

    def forward_by_layer(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        step: StepAttention,
        deepstack: tuple[tuple[Tensor, Tensor], ...] = (),
        tapped: list[Tensor] | None = None,
        chunks: ChunkAttention | None = None,
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Do as :meth:`forward`, layer by layer: yield after each, and return what it returns.

        Other sequences may be read and decoded between two layers.
        """
        gate_logits: list[Tensor] = []
        kept: dict[int, Tensor] = {}
        final = len(self.weights.layers) - 1
        apart = final in self.taps or final < len(deepstack)
        ending = None if apart or self.spec.entry_index[final] is None else chunks
        for index in range(final + 1):
            going = None if chunks is None else chunks.prune(index, hidden)
            if going is not None:
                deepstack = _among(going, hidden.shape[0], deepstack)
                hidden, rope = hidden[going], (rope[0][going], rope[1][going])
            x = self.gate_input(index, hidden)
            entry = self.spec.entry_index[index]
            if entry is not None:
                self._gate(entry, x, chunks, gate_logits)
            inputs = self._inputs(index, x, rope)
            del x
            last = ending if index == final else None
            hidden = self._after_attention(index, hidden, inputs, step, last)
            hidden = self._after_mlp(index, hidden, deepstack)
            if index in self.taps:
                kept[index] = hidden
            yield
        if chunks is not None and ending is None:
            hidden = hidden[chunks.ends()]
        if tapped is not None:
            tapped += [kept[index] for index in self.taps]
        log_beta = F.logsigmoid(torch.stack(gate_logits, 1)) if gate_logits else None
        return hidden, log_beta

    def _gate(
        self, entry: int, x: Tensor, chunks: ChunkAttention | None, made: list[Tensor]
    ) -> None:
        """Add the logits of a layer's gates to ``made``, those of the layers before it.

        On a CPU they are computed chunk by chunk, so that none of their bits, which decide what is
        kept, depend on what a chunk is read with.
        """
        if self.on_gate_input is not None:
            self.on_gate_input(entry, x)
        if self.gates is None:
            return
        if chunks is None or len(chunks.counts) < 2 or x.device.type != "cpu":
            logits = self.gates.logits(entry, x)
        else:
            parts = x.split(list(chunks.counts))
            logits = torch.cat([self.gates.logits(entry, part) for part in parts])
        if not torch.is_inference_mode_enabled():
            made.append(logits)
            return
        # All layers in one tensor from the start: small ones that stay would keep the heap between
        # them from being used again.
        if not made:
            shape = (logits.shape[0], self.spec.entry_layers, logits.shape[1])
            made += logits.new_empty(shape).unbind(1)
        made[entry].copy_(logits)

    def gate_input(self, index: int, hidden: Tensor) -> Tensor:
        """Compute the output ``[T, d]`` of the input_layernorm of layer ``index``: what its gate
        reads.
        """
        return self._norm(hidden, self.weights.layers[index].input_norm)

    def layer(
        self,
        index: int,
        hidden: Tensor,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        step: StepAttention,
        deepstack: tuple[tuple[Tensor, Tensor], ...] = (),
        on_keys: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Tensor:
        """Compute the states ``[T, d]`` after one layer from those before it and :meth:`gate_input`
        ``x``.

        Args:
            on_keys: called with the keys ``[T, H, D]`` before and after RoPE, before attention:
                what write gates read.
        """
        hidden = self._after_attention(index, hidden, self._inputs(index, x, rope, on_keys), step)
        return self._after_mlp(index, hidden, deepstack)

    def _inputs(
        self,
        index: int,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        on_keys: Callable[[Tensor, Tensor], None] | None = None,
    ) -> list[Tensor | None]:
        """Return what :meth:`_after_attention` takes: :meth:`_project` of x, or x of a state."""
        layer = self.weights.layers[index]
        if layer.state_layer is not None:
            return [x]
        return list(self._project(x, layer, self.angles(index, rope), on_keys))

    def _after_attention(
        self,
        index: int,
        hidden: Tensor,
        inputs: list[Tensor | None],
        step: StepAttention,
        chunks: ChunkAttention | None = None,
    ) -> Tensor:
        """Add to the states ``[T, d]`` what attention adds, or what a layer has in its place.

        Args:
            inputs: emptied here; they are as large as all that is made of them.
            chunks: those whose last tokens alone are asked for: the states become ``[B, d]``.
        """
        layer, entry = self.weights.layers[index], self.spec.entry_index[index]
        if layer.state_layer is not None:
            x = inputs.pop()
            assert x is not None
            made = self._mix(index, layer, layer.state_layer, x, step)
            return hidden + self._normed_output(made, layer.attention_out_norm)
        query, key, value, gate = inputs
        inputs.clear()
        assert entry is not None and query is not None and key is not None and value is not None
        if chunks is None:
            mixed = step.attend(entry, query, key, value)
        else:
            ends = chunks.ends()
            mixed, hidden = chunks.attend_last(entry, query, key, value), hidden[ends]
            gate = None if gate is None else gate[ends]
        del query, key, value
        if gate is not None:
            mixed = mixed * gate.sigmoid()
        made = self.weights.product(mixed, layer.out, layer.out_bias)
        return self._plus(hidden, self._normed_output(made, layer.attention_out_norm))

    def _mix(
        self, index: int, layer: LayerWeights, by: StateLayer, x: Tensor, step: StepAttention
    ) -> Tensor:
        """Compute what a layer that keeps a state adds to the states ``[T, d]``."""
        product = self.weights.product
        if isinstance(by, DeltaLayer):
            # On a CPU no bit of a chunk may depend on what it is read with, as of its gates.
            counts = getattr(step, "counts", ()) if x.device.type == "cpu" else ()
            inputs = by.inputs(x, layer, product, counts)
            return by.outputs(step.mix(index, by, inputs), inputs, layer, product, counts)
        inputs = by.inputs(x, layer, product)
        return by.outputs(step.mix(index, by, inputs), inputs, layer, product)

    def _after_mlp(
        self, index: int, hidden: Tensor, deepstack: tuple[tuple[Tensor, Tensor], ...] = ()
    ) -> Tensor:
        """Add to the states what the MLP makes of them, and what a picture adds."""
        layer = self.weights.layers[index]

        def mlp(part: Tensor) -> tuple[Tensor]:
            return (self._mlp(self._norm(part, layer.post_norm), layer),)

        apart = hidden.device.type == "cpu" and layer.router is None and len(hidden) > _MLP_TOKENS
        (made,) = self._in_blocks(mlp, hidden) if apart else mlp(hidden)
        hidden = self._plus(hidden, self._normed_output(made, layer.mlp_out_norm))
        if index < len(deepstack):
            where, features = deepstack[index]
            hidden = hidden.index_add(0, where, features)
        return hidden

    @staticmethod
    def _plus(hidden: Tensor, made: Tensor) -> Tensor:
        """Add to the states what a layer has just made, in inference where that lies."""
        if torch.is_inference_mode_enabled() and made.dtype == hidden.dtype:
            return made.add_(hidden)
        return hidden + made

    def _normed_output(self, made: Tensor, gain: Tensor | None) -> Tensor:
        return made if gain is None else self._norm(made, gain)

    def angles(self, index: int, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin ``[T, rot]`` of a layer, see :class:`Rope`."""
        if self.spec.local_rope is None:
            return rope
        rot = rope[0].shape[-1] // 2
        own = slice(rot, None) if self.spec.is_local(index) else slice(rot)
        return rope[0][:, own], rope[1][:, own]

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute float32 logits ``[T, vocab]`` of states ``[T, d]``."""
        weights = self.weights
        return weights.product(self._norm(hidden, weights.norm), weights.head).float()

    def _mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        if layer.router is not None and self.spec.routing is not None:
            matrices = plain(layer.gate_up), plain(layer.down)
            mixed = mixture(x, layer.router, *matrices, self.spec.routing, self.experts)
            return mixed if layer.shared_gate is None else mixed + self.shared_expert(x, layer)
        product = self.weights.product
        gate_up = product(x, layer.gate_up, layer.gate_up_bias)
        wide = self.elementwise.gated(gate_up, self.spec.activation)
        return product(wide, layer.down, layer.down_bias)

    def shared_expert(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """Compute what the expert that every token goes through adds, ``[T, d]``."""
        assert layer.shared_gate is not None and layer.shared_down is not None
        assert layer.shared_gate_up is not None
        wide = self.elementwise.gated(F.linear(x, layer.shared_gate_up))
        return F.linear(x, layer.shared_gate).sigmoid() * F.linear(wide, layer.shared_down)

    def _project(
        self,
        x: Tensor,
        layer: LayerWeights,
        rope: tuple[Tensor, Tensor],
        on_keys: Callable[[Tensor, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values ``[T, heads, D]``, and the output's gate ``[T, Hq D]``."""
        spec = self.spec
        if x.device.type == "cpu" and len(x) > _MLP_TOKENS and on_keys is None:
            made = self._in_blocks(
                lambda *parts: [
                    part for part in self._project(parts[0], layer, parts[1:]) if part is not None
                ],
                *(x, *rope),
            )
            return made[0], made[1], made[2], made[3] if spec.output_gate else None
        fused = self.weights.product(x, layer.qkv, layer.qkv_bias)
        fused, gate = self.without_gate(fused)
        fused = fused.view(x.shape[0], -1, spec.head_dim)
        turned, value = fused[:, : self._rotated], fused[:, self._rotated :]
        if on_keys is None:
            turned = self.elementwise.turned(turned, layer.qk_norm, spec.rms_eps, rope)
        else:
            normed = normed_heads(turned, layer.qk_norm, spec.rms_eps)
            turned = rotate(normed, *rope)
            on_keys(normed[:, spec.num_heads :], turned[:, spec.num_heads :])
        query, key = turned[:, : spec.num_heads], turned[:, spec.num_heads :]
        return query, key, value, gate

    def without_gate(self, fused: Tensor) -> tuple[Tensor, Tensor | None]:
        """Take the output's gate ``[T, Hq D]`` out of a layer's queries, keys and values.

        Where there is one, it lies behind the query of each head: ``fused [T, 2 (Hq + H) D]``.
        """
        if not self.spec.output_gate:
            return fused, None
        both = 2 * self.spec.num_heads * self.spec.head_dim
        pairs = fused[:, :both].unflatten(1, (self.spec.num_heads, 2, -1))
        return torch.cat([pairs[:, :, 0].flatten(1), fused[:, both:]], 1), pairs[:, :, 1].flatten(1)

    @staticmethod
    def _in_blocks(call: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> list[Tensor]:
        """Join what ``call`` makes of some tokens of ``tensors [T, ...]`` at a time.

        In inference each block is put in its place at once, so that two copies of all never stand.
        """
        blocks = zip(*(tensor.split(_MLP_TOKENS) for tensor in tensors), strict=True)
        if not torch.is_inference_mode_enabled():
            parts = zip(*(call(*block) for block in blocks), strict=True)
            return [torch.cat(part) for part in parts]
        made: list[Tensor] = []
        for index, block in enumerate(blocks):
            found = call(*block)
            if not made:
                made = [part.new_empty(len(tensors[0]), *part.shape[1:]) for part in found]
            for whole, part in zip(made, found, strict=True):
                whole[index * _MLP_TOKENS :][: len(part)] = part
        return made

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return self.elementwise.norm(x, gain, self.spec.rms_eps)


def _among(
    kept: Tensor, tokens: int, deepstack: tuple[tuple[Tensor, Tensor], ...]
) -> tuple[tuple[Tensor, Tensor], ...]:
    """The deepstack of the tokens ``kept [T']`` alone, by their new indices."""
    place = torch.full((tokens,), -1, device=kept.device)
    place[kept] = torch.arange(kept.numel(), device=kept.device)
    left = []
    for where, features in deepstack:
        stays = place[where] >= 0
        left.append((place[where][stays], features[stays]))
    return tuple(left)
