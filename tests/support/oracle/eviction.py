"""Eviction by one full sort, under write gates too, and pruning of visual tokens at prefill.

Where a test says nothing of it, the defaults are the engine's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmkv.engine.config import EngineConfig
from mmkv.engine.errors import DEFAULT_LOOKAHEAD
from mmkv.engine.policies import Policy
from tests.support.oracle.methods import PAPER_WINDOW, make_method
from tests.support.oracle.simulation import GateFunction, Group, Row, Simulation

Retained = list[list[Tensor]]
RELATIVE_TIE = 1e-6


@dataclass
class Eviction:
    """What the last eviction saw, NaN for absent entries, and what stayed.

    score: ``[L, H, T]``; nearness: what near-ties are told by.
    """

    score: Tensor
    nearness: Tensor
    keep: Tensor
    groups: list[Group]


class Oracle(Simulation):
    """One conversation with a transformers model under a simulated cache budget.

    Attributes:
        evictions: how often entries went; evicted_nan: how many of them had no score.
        swaps: see :meth:`follow`; last: the last eviction.
    """

    def __init__(
        self,
        hf: nn.Module,
        gate: GateFunction | None,
        policy: str,
        budget: float = 1e9,
        *,
        fraction: float | None = None,
        lookahead: float = DEFAULT_LOOKAHEAD,
        evict_every: int | None = None,
        prefill_chunk: int = EngineConfig.prefill_chunk,
        **parameters: Any,
    ) -> None:
        """Begin a conversation.

        Args:
            hf: the model as transformers loads it.
            gate: (layer, ``[T, d]``) -> log_beta ``[T, H]``.
            budget: M, mean entries per (layer, KV head).
            evict_every: steps between evictions; None: the method's, see :meth:`_let_be`.
            fraction: instead of M, a share of the tokens seen.
            parameters: those of the method, by the names of docs/reference/policies.md.
        """
        super().__init__(hf, gate)
        self.budget, self.fraction = budget, fraction
        self.evict_every, self.prefill_chunk = evict_every, prefill_chunk
        self.method = make_method(policy, lookahead, parameters)
        self.last: Eviction | None = None
        self.evictions = self.evicted_nan = self.swaps = 0
        self.struck: list[tuple[int, int, int]] = []  # entries that were forgotten on purpose

    @property
    def total(self) -> int:
        """B: entries that may stay at the present length."""
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
        out, ends = hidden, self.picture_ends(inputs["input_ids"][0])
        for number, (start, stop) in enumerate(self.chunks(inputs["input_ids"][0])):
            part = slice(start, stop)
            self.until = self.seen + torch.tensor(ends[part]) - start
            levels = [level[part] for level in deepstack]
            out = self._forward(hidden[part], positions[:, part], levels, prompt=True)
            self.method.passed(self)
            self._evict(slack=0)
            if retained is not None:
                self.follow(retained[number])
        self.until = None
        return self._logits(out)

    def chunks(self, ids: Tensor) -> list[tuple[int, int]]:
        """Return where the chunks of a prompt begin and end; none begins inside a whole picture."""
        ends, made, start = self.picture_ends(ids), [], 0
        longest = 1 + max(end - at for at, end in enumerate(ends))
        while start < len(ids):
            stop = min(start + max(self.prefill_chunk, longest), len(ids))
            while stop < len(ids) and ends[stop - 1] != stop - 1:
                stop -= 1
            made.append((start, stop))
            start = stop
        return made

    def decode(self, token: int) -> Tensor:
        """Append one text token; logits ``[vocab]``."""
        inputs = {"input_ids": torch.tensor([[token]])}
        positions = self._positions(inputs)
        out = self._forward(self._embed(inputs)[0], positions, [], prompt=False)
        self.method.passed(self)
        self._evict(slack=self._let_be())
        return self._logits(out)

    def _let_be(self) -> int:
        """Entries of a row above what it may keep: below the method's interval and a quarter of
        that, prompts that are kept beside the budget included.
        """
        if self.evict_every is not None:
            return self.evict_every - 1
        interval = getattr(self.method, "interval", Policy.interval)
        kept = sum(group.share for group in self.method.groups(self, self.total))
        return max(min(interval, max(kept, self.total) // self.rows // 4), 1) - 1

    def set_budget(self, budget: float) -> None:
        self.budget = budget
        self._evict(slack=0)

    def forget(self, start: int, stop: int) -> None:
        """Mask the entries of tokens from now on, in every row."""
        gone = self.keep[..., start:stop].nonzero()
        self.struck += [(layer, head, start + at) for layer, head, at in gone.tolist()]
        self.keep = self.keep.clone()
        self.keep[..., start:stop] = False

    def risk(self, tokens: Tensor | None = None) -> float:
        """Share of the weight ``beta^age`` of entries ever written that is gone, of some tokens."""
        age = self.seen - torch.arange(self.seen)
        weight = (age.double() * self.log_beta.double()).exp()
        for entry in self.struck:
            weight[entry] = 0
        if tokens is not None:
            weight = weight * tokens
        return float(weight[~self.keep].sum() / weight.sum())

    def retained(self) -> Retained:
        return [[row.nonzero().flatten() for row in layer] for layer in self.keep]

    def close(self) -> None:
        """Leave the model as it was."""

    def _evict(self, slack: int) -> None:
        """Cut every group to its share as soon as one stands above its share and slack.

        ``slack`` counts entries of one row.
        """
        groups = self.method.groups(self, self.total)
        held = [sum(int(self.keep[row].sum()) for row in group.rows) for group in groups]
        if all(
            n <= group.share + slack * len(group.rows)
            for n, group in zip(held, groups, strict=True)
        ):
            return
        score = self.method.score(self)
        near, protected = self.method.nearness(score), self._protected()
        score, near = (x.masked_fill(protected, torch.inf) for x in (score, near))
        self.evictions += 1
        seen = (x.masked_fill(~self.keep, torch.nan) for x in (score, near))
        self.last = Eviction(*seen, self.keep, groups)
        self.keep = self.keep.clone()
        for group, count in zip(groups, held, strict=True):
            for row, t in self._order(group, score)[: max(count - group.share, 0)]:
                self.keep[*row, t] = False
                self.evicted_nan += math.isnan(score[row][t])
        self.last.keep = self.keep.clone()

    def _protected(self) -> Tensor:
        """Bool, to be broadcast to ``[L, H, T]``: what goes only when nothing else is left."""
        return self.method.protected(self, self.total)

    def _order(self, group: Group, score: Tensor) -> list[tuple[Row, int]]:
        """The entries (row, position) of a group in the order in which they go."""
        entries = []
        for row in group.rows:
            kept = self.kept(*row)
            for t, value in zip(kept.tolist(), score[row][kept].tolist(), strict=True):
                known = not math.isnan(value)
                entries.append((known, value if known else 0.0, t, *row))
        entries.sort()
        free, guarded, left = [], [], {row: group.floor for row in group.rows}
        for _, _, t, *row in reversed(entries):
            entry = (tuple(row), t)
            (guarded if left[tuple(row)] > 0 else free).append(entry)
            left[tuple(row)] -= 1
        return free[::-1] + guarded[::-1]

    def follow(self, retained: Retained) -> None:
        """Check the engine's retained sets against ours; counts swaps in ``swaps``.

        A swap is an entry kept in place of another whose float64 score, at the last eviction,
        differs by less than 1e-6 relative: to the score, or to the terms that it is the difference
        of (``Method.scale``). The oracle then goes on with the engine's choice, so that one
        rounding difference is counted once.

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
        assert differing.shape[-1] <= self.last.score.shape[-1], f"{counts}; first {shown}"
        for group in self.last.groups:
            layer, head = zip(*group.rows, strict=True)
            wrong = differing[layer, head, : self.last.score.shape[-1]]
            if not wrong.any():
                continue
            scores = self.last.nearness[layer, head][wrong]
            gap = float(scores.max() - scores.min())
            size = max(float(scores.abs().max()), self.method.scale)
            # A protected entry (inf) is never a near-tie of anything.
            close = math.isfinite(gap) and gap <= RELATIVE_TIE * size
            assert close, f"retained sets differ: {counts}; scores {scores.tolist()[:8]}; {shown}"
        self.keep = theirs
        self.swaps += int(differing.sum()) // 2


# Write gates (WG-KV, arXiv 2512.17452, section 4.2), alone or beside a method with a budget.


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
        attending = (layer.self_attn for layer in self.text.layers if hasattr(layer, "self_attn"))
        for index, attention in enumerate(attending):
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
        scores = query @ key.transpose(1, 2) * self.scale
        sees = sees.repeat_interleave(self.group, 0)
        return scores.masked_fill(~sees, -torch.inf).softmax(-1).nan_to_num(0.0)

    def forget(self, start: int, stop: int) -> None:
        super().forget(start, stop)
        self.evicted[..., start:stop] = True

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


# Pruning of visual tokens at prefill (FastV, arXiv 2403.06764; DivPrune, arXiv 2503.02175).


class Pruned(Oracle):
    """Keeps what a pruner drops out of sight from its layer on.

    All tokens run through all layers; a token that nobody sees changes nothing.
    """

    def __init__(
        self,
        hf: nn.Module,
        policy: str,
        *,
        prefill_chunk: int = EngineConfig.prefill_chunk,
        **parameters: Any,
    ) -> None:
        super().__init__(hf, None, "full", prefill_chunk=prefill_chunk)
        first = policy in ("divprune", "cdpruner")
        self.policy, self.after = policy, 0 if first else parameters.get("layer", 2)
        share = {"divprune": 0.098, "fastv": 0.5, "dart": 0.222, "cdpruner": 0.111}[policy]
        self.share, self.most = parameters.get("keep", share), parameters.get("tokens", 0)
        self.by = parameters.get("attention", "all")
        self.pivots = parameters.get("visual_pivots", 4), parameters.get("text_pivots", 4)

    def _forward(
        self, hidden: Tensor, positions: Tensor, deepstack: list[Tensor], prompt: bool
    ) -> Tensor:
        self.embedded = hidden
        return super()._forward(hidden, positions, deepstack, prompt)

    def _attention(
        self, layer: int, query: Tensor, at: Tensor, window: int | None = None
    ) -> Tensor:
        picture = getattr(self.hf.config, "image_token_id", None)
        if layer == self.after and self.prompt[-1] and picture is not None:
            ids = torch.cat(self.past["input_ids"], 1)[0, : self.seen]
            visual = (ids[-self.new :] == picture).nonzero().flatten()
            for index in self._dropped(visual.tolist()) if len(visual) else ():
                if index != self.new - 1:
                    self.keep[layer:, :, self.seen - self.new + index] = False
        return super()._attention(layer, query, at, window)

    def _dropped(self, visual: list[int]) -> set[int]:
        count = min(max(self.most or round(self.share * len(visual)), 1), len(visual))
        if self.policy != "fastv":
            choose = {"divprune": self._diverse, "dart": self._unlike, "cdpruner": self._volume}
            return set(visual) - set(choose[self.policy](visual, count))
        weights = self.weights[self.after - 1][..., -self.new :].mean(0)
        received = weights[-1] if self.by == "last" else weights.sum(0)
        order = sorted(visual, key=lambda index: (-float(received[index]), index))
        return set(order[count:])

    def _diverse(self, visual: list[int], count: int) -> list[int]:
        def distance(a: int, b: int) -> float:
            return 1 - float(torch.cosine_similarity(self.embedded[a], self.embedded[b], dim=0))

        chosen: list[int] = []
        while len(chosen) < count:
            rest = [index for index in visual if index not in chosen]
            among = chosen or visual
            near = [min([distance(a, b) for b in among if b != a] or [0.0]) for a in rest]
            chosen.append(rest[near.index(max(near))])
        return chosen

    def _unlike(self, visual: list[int], count: int) -> list[int]:
        """DART: around each pivot, in order, the tokens that resemble it the least."""
        states = self.residual[self.after - 1][-self.new :]
        size = self.key[self.after - 1][:, -self.new :].abs().sum((0, 2))

        def largest(among: list[int], number: int) -> list[int]:
            return sorted(among, key=lambda index: (-float(size[index]), index))[:number]

        chosen = largest(visual, min(self.pivots[0], count))
        text = largest(list(range(visual[-1] + 1, self.new)), self.pivots[1])
        rest, pivots = count - len(chosen), sorted(chosen + text)
        for number, pivot in enumerate(pivots):
            share = rest // len(pivots) + (number < rest % len(pivots))
            free = [index for index in visual if index not in chosen]
            alike = torch.cosine_similarity(states[pivot], states[free], dim=-1).tolist()
            chosen += [index for _, index in sorted(zip(alike, free, strict=True))[:share]]
        return chosen

    def _volume(self, visual: list[int], count: int) -> list[int]:
        """CDPruner: each token added makes the determinant of the chosen ones' kernel largest."""
        unit = torch.nn.functional.normalize(self.embedded.double(), dim=-1)
        text = [index for index in range(self.new) if index not in visual]
        relevance = torch.ones(len(visual), dtype=torch.float64)
        if text:
            relevance = (unit[visual] @ unit[text].T).mean(1)
            spread = relevance.max() - relevance.min()
            relevance = (relevance - relevance.min() + 1e-6) / spread
        weighted = relevance[:, None] * unit[visual]
        chosen: list[int] = []
        while len(chosen) < count:
            free = [index for index in range(len(visual)) if index not in chosen]
            sets = torch.stack([weighted[[*chosen, index]] for index in free])
            volume = torch.linalg.det(sets @ sets.transpose(1, 2))
            best = volume >= volume.max() * (1 - 1e-9)  # of equal ones the first
            chosen.append(free[int(best.nonzero()[0])])
        return [visual[index] for index in chosen]
