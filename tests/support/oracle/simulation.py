"""A conversation with a model of transformers, whose cache holds only some of its entries.

Nothing here is shared with ``engine/``. Hidden states run through transformers' own modules; keys,
values, queries and residual streams of every token ever seen stay in dense tensors; a boolean mask
``keep [L, H, T]`` says what the cache would still hold.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.hf_models import with_positions_of_the_paper

Row = tuple[int, int]


@dataclass(frozen=True)
class Group:
    """Rows (layer, KV head) that compete, what they keep together and what each is sure of."""

    rows: list[Row]
    share: int
    floor: int = 0


def rows_of(layers: int, heads: int) -> list[Row]:
    """All rows, in order."""
    return [(layer, head) for layer in range(layers) for head in range(heads)]


def equal(total: int, parts: int) -> list[int]:
    """Equal shares; the first get one more, so that they add up to ``total``."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def equal_in_layers(total: int, layers: int, heads: int) -> list[int]:
    """Shares of rows, the same in all rows of a layer; the first layers get one more a row."""
    each, left = divmod(total, layers * heads)
    return [each + (layer < left // heads) for layer, _ in rows_of(layers, heads)]


def pyramid(total: int, layers: int, heads: int, window: int, beta: int) -> list[int]:
    """Shares of rows by PyramidKV (arXiv 2406.02069), section 4.2.1 and equation 1.

    ``k_total`` is what the windows of all rows leave; the top layer gets ``k_total / (beta m)``,
    the bottom ``2 k_total / m`` minus that, layers between them an arithmetic sequence. Here all
    is for one row, in exact fractions; what rounding down leaves goes to the first rows.
    """
    rows = layers * heads
    window = min(window, total // rows)
    mean = Fraction(total - rows * window, rows)
    top = mean / beta
    bottom = 2 * mean - top
    shares = []
    for layer, _ in rows_of(layers, heads):
        share = bottom - (bottom - top) / (layers - 1) * layer if layers > 1 else mean
        shares.append(window + math.floor(share))
    for number in range(total - sum(shares)):
        shares[number] += 1
    return shares


# Entries in fewer bits: the rounding of keys and values, written anew, and its check.
#
# ``docs/reference/kv-forms.md`` has the definition. A number halfway between two steps may go to
# either side, and a scale between two numbers of float16, too: keys of two programs differ in
# their last bits. So :class:`Quantiser` takes over what the engine stored once it has found it to
# be right, feature by feature, for some input within 1e-5 of its own.


# Form -> bits of keys, bits of values, whether they are rotated.
FORMS = {
    "bf16": (16, 16, False),
    "int8": (8, 8, False),
    "k8v4": (8, 4, True),
    "int4": (4, 4, True),
}
NEAR = 1e-5  # relative: what keys of two programs may differ by
HALF = 0.502  # of a step, and what NEAR makes of 127 steps


def hadamard(size: int) -> np.ndarray:
    """Orthonormal, in blocks of the largest power of two that divides ``size``."""
    block = np.ones((1, 1))
    while size % (2 * len(block)) == 0:
        block = np.kron([[1, 1], [1, -1]], block)
    return np.kron(np.eye(size // len(block)), block) / np.sqrt(len(block))


def half_from(x: np.ndarray, upwards: bool) -> np.ndarray:
    """The nearest float16 on one side of ``x``, or ``x`` itself."""
    near = x.astype(np.float16)
    wrong = near.astype(np.float64) < x if upwards else near.astype(np.float64) > x
    beside = np.nextafter(near, np.float16(np.inf if upwards else -np.inf))
    return np.where(wrong, beside, near).astype(np.float64)


def grid(low: np.ndarray, high: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Step and lowest number ``[...]`` for vectors between ``low`` and ``high``."""
    if bits == 8:
        step = half_from(np.maximum(abs(low), abs(high)) / 127, upwards=True)
        return step, -127 * step
    zero = half_from(low, upwards=False)
    return half_from((high - zero) / 15, upwards=True), zero


def is_rounded(x: np.ndarray, stored: np.ndarray, bits: int) -> np.ndarray:
    """Whether ``stored [..., D]`` is a rounding of ``x [..., D]``, per vector."""
    if bits == 16:
        return is_bfloat16(x, stored)
    low, high = x.min(-1), x.max(-1)
    found = np.zeros(low.shape, dtype=bool)
    for a, b in itertools.product((0, NEAR, -NEAR), repeat=2):
        step, zero = grid(low * (1 + a), high * (1 + b), bits)
        size = np.where(step > 0, step, 1)[..., None]
        code = (stored - zero[..., None]) / size
        whole = abs(code - code.round()) < 1e-2
        inside = (code > -0.01) & (code < 2**bits - 0.99)
        found |= (whole & inside & (abs(stored - x) <= HALF * size)).all(-1)
    return found


def is_bfloat16(x: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Whether ``stored`` holds numbers of 8 significant bits, each the nearest to its ``x``."""
    fraction, exponent = np.frexp(stored)
    short = fraction * 2**8 == np.round(fraction * 2**8)
    unit = np.ldexp(1.0, exponent - 8)
    apart = NEAR * abs(x).max(-1, keepdims=True)
    return (short & (abs(stored - x) <= 0.5 * unit + apart)).all(-1)


class Quantiser:
    """Rounds what a simulation stores, as the engine has just done.

    Attributes:
        theirs: keys and values ``[H, T, D]`` of each layer in turn, as the engine holds them.
        rounded: vectors that were found right.
    """

    def __init__(self, form: str) -> None:
        self.key_bits, self.value_bits, self.rotated = FORMS[form]
        self.theirs: list[tuple[Tensor, Tensor]] = []
        self.rounded = 0

    def store(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Round keys and values ``[H, T, D]`` of one layer's new entries."""
        keys, values = self.theirs.pop(0)
        return self._take(key, keys, self.key_bits), self._take(value, values, self.value_bits)

    def _take(self, own: Tensor, theirs: Tensor, bits: int) -> Tensor:
        turn = hadamard(own.shape[-1]) if self.rotated else np.eye(own.shape[-1])
        x, stored = own.double().numpy() @ turn, theirs.double().numpy()
        assert x.shape == stored.shape
        right = is_rounded(x, stored, bits)
        assert right.all(), (
            f"{(~right).sum()} of {right.size} vectors are not rounded to {bits} bits"
        )
        self.rounded += right.size
        return torch.from_numpy(stored @ turn.T).to(own.dtype)


GateFunction = Callable[[int, Tensor], Tensor]


class Simulation:
    """The model's side of a conversation, and all that a method may look at.

    Attributes:
        layers, heads, group, dim: layers that attend, KV heads, query heads per KV head, head_dim.
            Those that do not read every token again in each pass.
        seen: tokens so far. keep: bool ``[L, H, T]``, the entries that the cache still holds.
        log_beta: ``[L, H, T]``, of retention gates. prompt: bool ``[T]``, tokens of a prefill.
        key, value: per layer ``[H, T, D]``, after RoPE; query: per layer ``[Hq, T, D]``;
            unrotated: the same before RoPE. rope_position: ``[A, T]``.
        residual: per layer ``[T, d]``, what the next layer, of any kind, reads.
        new: tokens of the last pass. weights: per layer ``[Hq, new, T]``, the probabilities of
            the last pass, at the time of the pass.
        quantiser: how new keys and values are rounded before anything reads them; None: not.
    """

    def __init__(self, hf: nn.Module, gate: GateFunction | None) -> None:
        self.hf, self.gate = with_positions_of_the_paper(hf), gate
        inner = hf.model
        self.text = getattr(inner, "language_model", getattr(inner, "text_model", inner))
        self.rotate = importlib.import_module(type(self.text).__module__).apply_rotary_pos_emb
        config = self.text.config
        attending = [hasattr(layer, "self_attn") for layer in self.text.layers]
        self.layers = sum(attending)
        self.heads = config.num_key_value_heads
        self.group = config.num_attention_heads // self.heads
        self.attentions = [x.self_attn for x in self.text.layers if hasattr(x, "self_attn")]
        self.dim, self.scale = self.attentions[0].head_dim, self.attentions[0].scaling
        self.config_window = getattr(config, "sliding_window", None)
        self.past: dict[str, list[Tensor]] = {}
        self.seen = self.new = 0
        self.keep = torch.zeros(self.layers, self.heads, 0, dtype=torch.bool)
        self.prompt = torch.zeros(0, dtype=torch.bool)
        self.log_beta = torch.zeros(self.layers, self.heads, 0)
        empty = torch.zeros(self.heads, 0, self.dim)
        self.key = [empty] * self.layers
        self.value = [empty] * self.layers
        self.query = [empty.repeat_interleave(self.group, 0)] * self.layers
        self.unrotated = list(self.query)
        self.rope_position = torch.zeros(0, 0, dtype=torch.int64)
        self.residual = [torch.zeros(0, config.hidden_size)] * self.layers
        self.linear_inputs = [torch.zeros(0, config.hidden_size)] * len(attending)
        self.weights = [torch.zeros(0)] * self.layers
        self.quantiser: Quantiser | None = None
        # Gemma's pictures see all of themselves: until which token the new ones see.
        self.whole_pictures = config.model_type == "gemma3_text"
        self.until: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.layers * self.heads

    def kept(self, layer: int, head: int) -> Tensor:
        """Positions ``[N]`` of the entries of a row, ascending."""
        return self.keep[layer, head].nonzero().flatten()

    @torch.no_grad()
    def window_logits(self, layer: int, window: int) -> tuple[Tensor, Tensor]:
        """Attention logits of the newest queries, as the cache stands now.

        Returns:
            float64 ``[H, G, w, T]``, and bool ``[H, 1, w, T]``: what a query sees, which is what
            is kept and no newer than itself.
        """
        window = min(window, self.seen)
        query = self.query[layer][:, -window:].double().view(self.heads, self.group, window, -1)
        logits = query @ self.key[layer].double()[:, None].transpose(-1, -2) * self.scale
        at = torch.arange(self.seen)
        visible = self.keep[layer][:, None, None] & (at <= at[-window:, None])
        return logits, visible

    def window_attention(self, layer: int, window: int) -> Tensor:
        """Probabilities ``[H, G, w, T]`` of :meth:`window_logits`; zeros where nothing is seen."""
        logits, visible = self.window_logits(layer, window)
        return logits.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num(0.0)

    @torch.no_grad()
    def mean_rotation(self, layer: int, positions: Sequence[int]) -> Tensor:
        """The mean ``[D, D]`` of the matrices of RoPE at the positions of text tokens.

        A rotation is linear in cos and sin, so it is that of their means.
        """
        rotary, kind = self.text.rotary_emb, []
        if hasattr(rotary, "layer_types"):
            kind = [self.attentions[layer].layer_type]
        frequency = getattr(rotary, "_".join([*kind, "inv_freq"])).double()
        scale = getattr(rotary, "_".join([*kind, "attention_scaling"]))
        # Far positions need float64, in the order of features that transformers has in float32.
        one = torch.ones((3, 1, 1) if len(self.rope_position) == 3 else (1, 1))
        sine = rotary(torch.zeros(1), one, *kind)[1].flatten().double() / scale
        angle = frequency[(sine[:, None] - frequency.sin()).abs().argmin(1)]
        angle = torch.tensor(positions).double()[:, None] * angle
        cos, sin = (scale * x.mean(0)[None, None] for x in (angle.cos(), angle.sin()))
        each = torch.eye(self.dim, dtype=torch.float64)[None, :, None]  # a head for each feature
        matrix: Tensor = self.rotate(each, each, cos, sin)[0][0, :, 0].T
        return matrix

    @torch.no_grad()
    def contributions(self, layer: int) -> Tensor:
        """What each query head adds to the stream if it attends to one entry alone.

        Returns:
            float64 ``[Hq, T, d]``, by the module itself: all heads but one are 0.
        """
        project = self.attentions[layer].o_proj
        values = self.value[layer].double().repeat_interleave(self.group, 0)
        alone = torch.eye(len(values), dtype=torch.float64)[:, None, :, None] * values[:, :, None]
        weight = project.weight.double()
        return nn.functional.linear(alone.flatten(2), weight)

    # --- the model -----------------------------------------------------------------------

    @torch.no_grad()
    def _embed(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Token states ``[T, d]`` and, per deepstack level, what is added to them ``[T, d]``.

        transformers' own forward pass is run up to the point where its text model starts.
        """
        if not any(name.startswith("pixel_values") for name in inputs):
            return self.text.embed_tokens(inputs["input_ids"][0]), []
        caught: dict[str, Any] = {}

        def catch(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            caught.update(kwargs)
            raise StopIteration

        with (
            self.text.register_forward_pre_hook(catch, with_kwargs=True),
            contextlib.suppress(StopIteration),
        ):
            self.hf.model(**inputs)
        hidden = caught["inputs_embeds"][0]
        levels = []
        for features in caught.get("deepstack_visual_embeds") or ():
            level = torch.zeros_like(hidden)
            level[caught["visual_pos_masks"][0]] = features
            levels.append(level)
        return hidden, levels

    def _positions(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Rope positions ``[A, T]`` of the new tokens, from the whole conversation so far."""
        for name, value in inputs.items():
            self.past.setdefault(name, []).append(value)
        ids = torch.cat(self.past["input_ids"], 1)
        new = inputs["input_ids"].shape[1]
        if not hasattr(self.hf.model, "get_rope_index"):
            return torch.arange(ids.shape[1])[None, -new:]
        config = self.hf.config
        kinds = (ids == config.image_token_id) + 2 * (ids == config.video_token_id)
        if "glm" in config.model_type:  # frames have the tokens of pictures, between two marks
            marks = config.video_start_token_id, config.video_end_token_id
            begun, ended = ((ids == mark).cumsum(1) for mark in marks)
            kinds = kinds + (kinds * (begun > ended))
        names = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        grids = {name: torch.cat(self.past[name]) for name in names if name in self.past}
        whole, _ = self.hf.model.get_rope_index(ids, mm_token_type_ids=kinds.int(), **grids)
        return whole[:, 0, -new:]

    def picture_ends(self, ids: Tensor) -> list[int]:
        """Return for each new token behind which token its picture ends; of text, itself."""
        token = getattr(self.hf.config, "image_token_id", None)
        ends, count = [], len(ids)
        for at in range(count):
            end = at
            while self.whole_pictures and end + 1 < count and ids[at] == ids[end + 1] == token:
                end += 1
            ends.append(end)
        return ends

    @torch.no_grad()
    def _forward(
        self, hidden: Tensor, positions: Tensor, deepstack: list[Tensor], prompt: bool
    ) -> Tensor:
        """Run new tokens ``[T, d]`` through all layers; states before the final norm."""
        new, before = hidden.shape[0], self.seen
        self.seen += new
        self.new = new
        known = self.rope_position if before else positions[:, :0]
        self.rope_position = torch.cat([known, positions], 1)
        self.prompt = torch.cat([self.prompt, torch.full((new,), prompt)])
        grown = torch.ones(self.layers, self.heads, new, dtype=torch.bool)
        self.keep = torch.cat([self.keep, grown], -1)
        log_betas = []
        shaped = positions[:, None] if positions.shape[0] == 3 else positions
        kinds = getattr(self.text.rotary_emb, "layer_types", ())  # with angles of their own
        angles = {kind: self.text.rotary_emb(hidden[None], shaped, kind) for kind in kinds}
        if not kinds:
            angles[None] = self.text.rotary_emb(hidden[None], shaped)
        index = 0  # among the layers that attend
        for depth, layer in enumerate(self.text.layers):
            x = layer.input_layernorm(hidden)
            if not hasattr(layer, "self_attn"):
                whole = self.linear_inputs[depth] = torch.cat([self.linear_inputs[depth], x])
                hidden = hidden + layer.linear_attn(whole[None])[0, before:]
                hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
                continue
            attention = layer.self_attn
            if self.gate is not None:
                log_betas.append(self.gate(index, x).T)
            if hasattr(attention, "qkv_proj"):
                width = self.heads * self.dim
                parts = attention.qkv_proj(x).split([self.group * width, width, width], -1)
            else:
                parts = (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))
            gate = None
            if parts[0].shape[-1] == 2 * self.group * self.heads * self.dim:
                asked, gate = parts[0].view(new, -1, 2 * self.dim).chunk(2, -1)
                parts = (asked, *parts[1:])
            query, key, value = (part.reshape(new, -1, self.dim) for part in parts)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            value = value.transpose(0, 1)
            query, key = query.transpose(0, 1), key.transpose(0, 1)
            self.unrotated[index] = torch.cat([self.unrotated[index], query], 1)
            turned = angles[attention.layer_type if kinds else None]
            query, key = (t[0] for t in self.rotate(query[None], key[None], *turned))
            if self.quantiser is not None:
                key, value = self.quantiser.store(key, value)
            self.query[index] = torch.cat([self.query[index], query], 1)
            self.key[index] = torch.cat([self.key[index], key], 1)
            self.value[index] = torch.cat([self.value[index], value], 1)
            # Where a layer has no window of its own, it is the whole model's.
            window = getattr(attention, "sliding_window", self.config_window)
            weights = self._attention(index, query, torch.arange(before, self.seen), window)
            self.weights[index] = weights
            mixed = weights @ self.value[index].repeat_interleave(self.group, 0)
            mixed = mixed.transpose(0, 1).reshape(new, -1)
            if gate is not None:
                mixed = mixed * gate.reshape(new, -1).sigmoid()
            before_mlp, *after = self._norms(layer)
            hidden = hidden + after[0](attention.o_proj(mixed))
            hidden = hidden + after[1](layer.mlp(before_mlp(hidden)[None])[0])
            if depth < len(deepstack):
                hidden = hidden + deepstack[depth]
            self.residual[index] = torch.cat([self.residual[index], hidden])
            index += 1
        if log_betas:
            self.log_beta = torch.cat([self.log_beta, torch.stack(log_betas)], -1)
        return hidden

    @staticmethod
    def _norms(layer: Any) -> tuple[Callable[[Tensor], Tensor], ...]:
        """The norms before the MLP, and of what attention and MLP add, which most models lack."""
        if hasattr(layer, "pre_feedforward_layernorm"):  # Gemma
            names = ["pre_feedforward", "post_attention", "post_feedforward"]
        elif hasattr(layer, "post_self_attn_layernorm"):  # GLM
            names = ["post_attention", "post_self_attn", "post_mlp"]
        else:
            return layer.post_attention_layernorm, nn.Identity(), nn.Identity()
        return tuple(getattr(layer, f"{name}_layernorm") for name in names)

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        """Probabilities ``[Hq, T, seen]`` of queries at token indices ``at`` over what is kept."""
        key = self.key[layer].repeat_interleave(self.group, 0)
        allowed = self.keep[layer].repeat_interleave(self.group, 0)[:, None]
        back = at[:, None] - torch.arange(self.seen)
        until = at if self.until is None else self.until
        behind = torch.arange(self.seen) > until[:, None]
        allowed = allowed & ~behind & (back < (window or math.inf))
        scores = (query @ key.transpose(1, 2) * self.scale).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0)  # a query may have outlived all it could see

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.hf.lm_head(self.text.norm(hidden[-1])).float()
