"""The engine's semantics written the slow, obvious way.

Nothing here is shared with ``engine/``. Hidden states run through transformers' own modules;
keys and values of every token ever seen stay in dense tensors; a boolean mask ``keep [L, H, T]``
says what the cache would still hold; scores are float64 and eviction is one full sort.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

GateFunction = Callable[[int, Tensor], Tensor]
Retained = list[list[Tensor]]
RELATIVE_TIE = 1e-6


def log_score(log_beta: Tensor, age: Tensor, lookahead: float) -> Tensor:
    """``log(beta^a + ... + beta^(a+n-1))`` in float64."""
    x = log_beta.double()
    decayed = age.double() * x
    if lookahead == 1:
        return decayed
    if math.isinf(lookahead):
        return decayed - torch.log(-torch.expm1(x))
    ratio = torch.expm1(lookahead * x) / torch.expm1(x)
    return decayed + torch.where(x == 0, float(lookahead), ratio).log()


@dataclass
class Eviction:
    """What the last eviction saw: ``score [L, H, T]`` (NaN for absent entries) and what stayed."""

    score: Tensor
    keep: Tensor


@dataclass
class Method:
    """A preset in the oracle's own words."""

    score: str  # retention | position | attention | none
    per_row: bool = False
    lookahead: float = 1
    first: int = 0
    recent: int = 0
    window: int = 16
    kernel: int = 5


def method(name: str, lookahead: float = 2) -> Method:
    """The five presets of the issue."""
    return {
        "full": Method("none"),
        "dbtrimkv": Method("retention", lookahead=lookahead),
        "trimkv": Method("retention", per_row=True, lookahead=1),
        "streamingllm": Method("position", per_row=True, first=4),
        "snapkv": Method("attention", per_row=True, recent=16),
    }[name]


@dataclass
class Oracle:
    """One conversation with a transformers model under a simulated cache budget.

    Attributes:
        hf: the model as transformers loads it; gate: (layer, ``[T, d]``) -> log_beta ``[T, H]``.
        budget: M, mean entries per (layer, KV head); fraction: instead, a share of tokens seen.
    """

    hf: nn.Module
    gate: GateFunction | None
    policy: str
    budget: float = 1e9
    fraction: float | None = None
    lookahead: float = 2
    evict_every: int = 1
    prefill_chunk: int = 2048
    last: Eviction | None = None
    evictions: int = 0
    evicted_nan: int = 0
    swaps: int = 0
    past: dict[str, list[Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inner = self.hf.model
        self.text = getattr(inner, "language_model", inner)
        self.rotate = importlib.import_module(type(self.text).__module__).apply_rotary_pos_emb
        config = self.text.config
        self.layers, self.heads = config.num_hidden_layers, config.num_key_value_heads
        self.group = config.num_attention_heads // self.heads
        self.dim = self.text.layers[0].self_attn.head_dim
        self.config_window = getattr(config, "sliding_window", None)
        self.method = method(self.policy, self.lookahead)
        self.seen = 0
        self.keep = torch.zeros(self.layers, self.heads, 0, dtype=torch.bool)
        self.log_beta = torch.zeros(self.layers, self.heads, 0)
        empty = torch.zeros(self.heads, 0, self.dim)
        self.key = [empty] * self.layers
        self.value = [empty] * self.layers
        self.query = [empty.repeat_interleave(self.group, 0)] * self.layers

    @property
    def rows(self) -> int:
        return self.layers * self.heads

    @property
    def total(self) -> int:
        """M_global: entries that may stay at the present length."""
        if self.fraction is not None:
            return max(self.rows, math.floor(self.fraction * self.seen * self.rows))
        return math.floor(self.budget * self.rows)

    def prefill(
        self, inputs: Mapping[str, Tensor], retained: Sequence[Retained] | None = None
    ) -> Tensor:
        """Append one turn; logits ``[vocab]`` of its last token.

        ``retained``: what the engine kept after each chunk, to :meth:`follow` at once: a swap
        in one chunk would otherwise look like an error in the next.
        """
        positions = self._positions(inputs)
        hidden, deepstack = self._embed(inputs)
        count, out = hidden.shape[0], hidden
        for start in range(0, count, self.prefill_chunk):
            part = slice(start, min(start + self.prefill_chunk, count))
            levels = [level[part] for level in deepstack]
            out = self._forward(hidden[part], positions[:, part], levels)
            self._evict(slack=0)
            if retained is not None:
                self.follow(retained[start // self.prefill_chunk])
        return self._logits(out)

    def decode(self, token: int) -> Tensor:
        """Append one text token; logits ``[vocab]``."""
        inputs = {"input_ids": torch.tensor([[token]])}
        positions = self._positions(inputs)
        out = self._forward(self._embed(inputs)[0], positions, [])
        self._evict(slack=(self.evict_every - 1) * self.rows)
        return self._logits(out)

    def set_budget(self, budget: float) -> None:
        self.budget = budget
        self._evict(slack=0)

    def retained(self) -> Retained:
        return [[row.nonzero().flatten() for row in layer] for layer in self.keep]

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
        names = ("image_grid_thw", "video_grid_thw")
        grids = {name: torch.cat(self.past[name]) for name in names if name in self.past}
        whole, _ = self.hf.model.get_rope_index(ids, mm_token_type_ids=kinds.int(), **grids)
        return whole[:, 0, -new:]

    @torch.no_grad()
    def _forward(self, hidden: Tensor, positions: Tensor, deepstack: list[Tensor]) -> Tensor:
        """Run new tokens ``[T, d]`` through all layers; states before the final norm."""
        new, before = hidden.shape[0], self.seen
        self.seen += new
        grown = torch.ones(self.layers, self.heads, new, dtype=torch.bool)
        self.keep = torch.cat([self.keep, grown], -1)
        log_betas = []
        shaped = positions[:, None] if positions.shape[0] == 3 else positions
        cos, sin = self.text.rotary_emb(hidden[None], shaped)
        for index, layer in enumerate(self.text.layers):
            attention = layer.self_attn
            x = layer.input_layernorm(hidden)
            if self.gate is not None:
                log_betas.append(self.gate(index, x).T)
            if hasattr(attention, "qkv_proj"):
                width = self.heads * self.dim
                parts = attention.qkv_proj(x).split([self.group * width, width, width], -1)
            else:
                parts = (attention.q_proj(x), attention.k_proj(x), attention.v_proj(x))
            query, key, value = (part.view(new, -1, self.dim) for part in parts)
            if hasattr(attention, "q_norm"):
                query, key = attention.q_norm(query), attention.k_norm(key)
            value = value.transpose(0, 1)
            query, key = query.transpose(0, 1), key.transpose(0, 1)
            query, key = (t[0] for t in self.rotate(query[None], key[None], cos, sin))
            self.query[index] = torch.cat([self.query[index], query], 1)
            self.key[index] = torch.cat([self.key[index], key], 1)
            self.value[index] = torch.cat([self.value[index], value], 1)
            # Where a layer has no window of its own, it is the whole model's.
            window = getattr(attention, "sliding_window", self.config_window)
            weights = self._attention(index, query, torch.arange(before, self.seen), window)
            mixed = weights @ self.value[index].repeat_interleave(self.group, 0)
            hidden = hidden + attention.o_proj(mixed.transpose(0, 1).reshape(new, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if index < len(deepstack):
                hidden = hidden + deepstack[index]
        if log_betas:
            self.log_beta = torch.cat([self.log_beta, torch.stack(log_betas)], -1)
        return hidden

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        """Probabilities ``[Hq, T, seen]`` of queries at token indices ``at`` over what is kept."""
        key = self.key[layer].repeat_interleave(self.group, 0)
        allowed = self.keep[layer].repeat_interleave(self.group, 0)[:, None]
        back = at[:, None] - torch.arange(self.seen)
        allowed = allowed & (back >= 0) & (back < (window or math.inf))
        scores = (query @ key.transpose(1, 2) * self.dim**-0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0)  # a query may have outlived all it could see

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        return self.hf.lm_head(self.text.norm(hidden[-1])).float()

    # --- the cache -----------------------------------------------------------------------

    def _evict(self, slack: int) -> None:
        """Cut groups of rows to their shares as soon as one stands above its share and slack.

        One group of all rows, or each row a group; ``slack`` counts the entries of all rows.
        """
        if self.method.score == "none":
            return
        groups = self._groups()
        held = [sum(int(self.keep[row].sum()) for row in rows) for rows, _ in groups]
        slacks = [slack // self.rows * len(rows) for rows, _ in groups]
        if all(n <= share + s for n, (_, share), s in zip(held, groups, slacks, strict=True)):
            return
        score = self._scores()
        self.evictions += 1
        self.last = Eviction(score.masked_fill(~self.keep, torch.nan), self.keep)
        self.keep = self.keep.clone()
        for rows, share in groups:
            entries = [
                (not math.isnan(score[row][t]), score[row][t].nan_to_num(0.0).item(), t, *row)
                for row in rows
                for t in self.keep[row].nonzero().flatten().tolist()
            ]
            for known, _, t, *row in sorted(entries)[: max(len(entries) - share, 0)]:
                self.keep[*row, t] = False
                self.evicted_nan += not known
        self.last.keep = self.keep.clone()

    def _groups(self) -> list[tuple[list[tuple[int, int]], int]]:
        """Rows (layer, head) that compete, and how many entries they may keep together.

        Shares of single rows add up to the budget: the first rows get one more than the others.
        """
        rows = [(layer, head) for layer in range(self.layers) for head in range(self.heads)]
        if not self.method.per_row:
            return [(rows, self.total)]
        shares = [self.total // self.rows] * self.rows
        for number in range(self.total - sum(shares)):
            shares[number] += 1
        return [([row], share) for row, share in zip(rows, shares, strict=True)]

    def _scores(self) -> Tensor:
        """Float64 scores ``[L, H, T]`` at the present step."""
        position = torch.arange(self.seen)
        if self.method.score == "retention":
            score = log_score(self.log_beta, self.seen - position, self.method.lookahead)
        elif self.method.score == "position":
            score = position.double().expand(self.keep.shape).clone()
        else:
            score = self._window_scores()
        score = score.masked_fill(position < self.method.first, torch.inf)
        return score.masked_fill(position >= self.seen - self.method.recent, torch.inf)

    def _window_scores(self) -> Tensor:
        """SnapKV (arXiv 2404.14469), section 4 and its listing, at the present step.

        The observation window is the last ``L_obs`` tokens, the prefix what is kept before it.
        ``W_obs``: softmax over all kept keys of the window's queries, of which the prefix's
        columns count. ``C = mean_obs W_obs``, then 1-D average pooling of C over the prefix alone,
        padded by zeros. The window's own entries always stay.
        """
        window, reach = min(self.method.window, self.seen), self.method.kernel // 2
        at = torch.arange(self.seen - window, self.seen)
        score = torch.full(self.keep.shape, torch.inf, dtype=torch.float64)
        for layer in range(self.layers):
            weights = self._attention(layer, self.query[layer][:, -window:], at).double()
            voted = weights.view(self.heads, self.group * window, -1).mean(1)
            for head in range(self.heads):
                kept = self.keep[layer, head].nonzero().flatten()
                prefix = kept[kept < self.seen - self.method.window]
                padded = torch.zeros(len(prefix) + 2 * reach, dtype=torch.float64)
                padded[reach : reach + len(prefix)] = voted[head, prefix]
                for i, t in enumerate(prefix.tolist()):
                    score[layer, head, t] = padded[i : i + self.method.kernel].mean()
        return score

    # --- comparing -----------------------------------------------------------------------

    def follow(self, retained: Retained) -> None:
        """Check the engine's retained sets against ours; counts swaps in ``swaps``.

        A swap is an entry kept in place of another whose float64 score, at the last eviction,
        differs by less than 1e-6 relative. The oracle then goes on with the engine's choice, so
        that one rounding difference is counted once.

        Raises:
            AssertionError: the sets differ by more than such swaps.
        """
        theirs = torch.zeros_like(self.keep)
        for layer, heads in enumerate(retained):
            for head, row in enumerate(heads):
                assert row.dtype == torch.int64 and bool((row.diff() > 0).all()), "not ascending"
                theirs[layer, head, row] = True
        if torch.equal(theirs, self.keep):
            return
        differing = theirs != self.keep
        assert self.last is not None, "the engine dropped entries, the oracle never has"
        shown = differing.nonzero()[:8].tolist()
        counts = f"engine keeps {int(theirs.sum())}, oracle {int(self.keep.sum())} entries"
        assert int(theirs.sum()) == int(self.keep.sum()), f"{counts}; first {shown}"
        groups = [(layer, h) for layer in range(self.layers) for h in range(self.heads)]
        cuts = groups if self.method.per_row else [(slice(None), slice(None))]
        for cut in cuts:
            wrong = differing[cut]
            if not wrong.any():
                continue
            assert wrong.shape[-1] <= self.last.score.shape[-1], f"{counts}; first {shown}"
            scores = self.last.score[cut][wrong[..., : self.last.score.shape[-1]]]
            gap = float(scores.max() - scores.min())
            # A protected entry (inf) is never a near-tie of anything.
            close = math.isfinite(gap) and gap <= RELATIVE_TIE * float(scores.abs().max())
            assert close, f"retained sets differ: {counts}; scores {scores.tolist()[:8]}; {shown}"
        self.keep = theirs
        self.swaps += int(differing.sum()) // 2
