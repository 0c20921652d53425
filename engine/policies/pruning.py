"""Policies that drop visual tokens from a prompt on its way through the layers, and evict nothing.

A pruner acts once for each prefill chunk. The tokens that it drops are not computed in the layers
behind it and have no entries there; a token's position stays its own. Text is never dropped.
Mergers choose before that: among the patches of a picture, between vision tower and projector.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.errors import PolicyError
from mmkv.engine.policies.base import ChunkStates, Policy, Pruner
from mmkv.engine.policies.preset import Parameter, Preset
from mmkv.engine.policies.scoring import Recency


def kept_count(share: float, tokens: int, most: int = 0) -> int:
    """How many of ``tokens`` stay, at least one: ``most`` of them, or a share where that is 0."""
    return min(max(most or round(share * tokens), 1), tokens)


def _mask(kept: Tensor, tokens: int) -> Tensor:
    """Bool ``[tokens]``, true at ``kept``."""
    return torch.zeros(tokens, dtype=torch.bool, device=kept.device).index_fill(0, kept, True)


@dataclass(frozen=True)
class LeastAttended:
    """Drops the visual tokens that receive the least attention (FastV, arXiv 2403.06764).

    Section 4: after layer K the R % of image tokens with the lowest average attention from all
    tokens go. ``reads="last"`` takes the last token's only, as later work on FastV does.
    """

    layer: int = 2
    share: float = 0.5
    reads: Literal["all", "last"] = "all"
    tokens: int = 0

    def keep(self, chunk: ChunkStates) -> Tensor:
        """The ``share`` of the tokens with the most attention; of equal ones the earlier."""
        assert chunk.received is not None
        order = chunk.received.argsort(descending=True, stable=True)
        return _mask(order[: kept_count(self.share, len(order), self.tokens)], len(order))


@dataclass(frozen=True)
class MostDiverse:
    """Keeps visual tokens that are far from each other (DivPrune, arXiv 2503.02175, section 3).

    The max-min diversity problem by its greedy algorithm: begin with the token whose nearest other
    is the farthest, and add the token that is the farthest from its nearest kept one. Distance is 1
    minus the cosine of the embeddings.
    """

    share: float = 0.098
    tokens: int = 0
    layer: int = 0
    reads: Literal[""] = ""

    def keep(self, chunk: ChunkStates) -> Tensor:
        """The ``share`` of the tokens that the greedy algorithm picks; of equal ones the first."""
        hidden = chunk.hidden[chunk.visual]
        unit = F.normalize(hidden.float(), dim=-1)
        distance = 1 - unit @ unit.T
        distance.fill_diagonal_(torch.inf)
        nearest, kept = distance.amin(1), torch.zeros(len(hidden), dtype=torch.bool)
        kept = kept.to(hidden.device)
        nearest[nearest.isinf()] = 0  # a single token has no other
        for count in range(kept_count(self.share, len(hidden), self.tokens)):
            chosen = nearest.masked_fill(kept, -torch.inf).argmax()
            kept[chosen] = True
            nearest = torch.minimum(nearest, distance[chosen]) if count else distance[chosen]
        return kept


@dataclass(frozen=True)
class LeastDuplicated:
    """Keeps visual tokens that resemble none of a few pivots (DART, arXiv 2502.11494, section 4).

    Pivots are the visual and the text tokens with the largest keys (L1 norm). Around each, in order
    of position, the visual tokens with the lowest cosine to it stay, and visual pivots do.
    """

    layer: int = 2
    share: float = 0.222
    tokens: int = 0
    visual_pivots: int = 4
    text_pivots: int = 4
    reads: Literal["keys"] = "keys"

    def keep(self, chunk: ChunkStates) -> Tensor:
        """The ``share`` of the tokens, as many around each pivot; of equal ones the earlier.

        Text pivots come from behind the chunk's last visual token, where there is any text.
        """
        assert chunk.keys is not None
        visual, total = chunk.visual, len(chunk.visual)
        size = chunk.keys.float().abs().sum(-1)
        count = kept_count(self.share, total, self.tokens)
        behind = torch.arange(int(visual[-1]) + 1, len(size), device=size.device)
        pivots = _largest(size, visual, min(self.visual_pivots, count))
        kept = (visual[:, None] == pivots).any(-1)
        pivots = torch.cat([pivots, _largest(size, behind, self.text_pivots)])
        states = F.normalize(chunk.hidden.float(), dim=-1)
        alike = states[visual] @ states[pivots.sort().values].T
        rest, around = count - int(kept.sum()), alike.shape[1]
        for index in range(around):
            order = alike[:, index].masked_fill(kept, torch.inf).argsort(stable=True)
            kept[order[: rest // around + (index < rest % around)]] = True
        return kept


def _largest(size: Tensor, among: Tensor, count: int) -> Tensor:
    """The ``count`` indices of ``among`` with the largest ``size``; of equal ones the earlier."""
    return among[size[among].argsort(descending=True, stable=True)[:count]]


@dataclass(frozen=True)
class ConditionallyDiverse:
    """Keeps visual tokens that differ and matter to the text (CDPruner, arXiv 2506.10967, sec. 3).

    A determinantal point process, conditioned on relevance to the text: the kernel of two tokens is
    their cosine, times both tokens' relevance. The greedy algorithm of Chen et al. (2018) finds the
    set of the largest determinant, token after token.
    """

    share: float = 0.111
    tokens: int = 0
    layer: int = 0
    reads: Literal[""] = ""

    def keep(self, chunk: ChunkStates) -> Tensor:
        """The ``share`` of the tokens that the greedy algorithm picks; of equal ones the first.

        Relevance is the mean cosine to the chunk's text embeddings, scaled to (0, 1]; 1 where there
        is no text, or all visual tokens are equally relevant.
        """
        # float64: what is left of a token's volume is a small difference of large numbers.
        unit = F.normalize(chunk.hidden.double(), dim=-1)
        visual = _mask(chunk.visual, len(unit))
        own, text = unit[visual], unit[~visual]
        relevance = own.new_ones(len(own))
        if len(text):
            relevance = own @ text.mean(0)
            least, most = relevance.min(), relevance.max()
            relevance = torch.where(most > least, (relevance - least + 1e-6) / (most - least), 1.0)
        kernel = relevance[:, None] * (own @ own.T) * relevance
        count = kept_count(self.share, len(own), self.tokens)
        left, rows = relevance**2, kernel.new_zeros(count, len(own))
        kept = torch.zeros(len(own), dtype=torch.bool, device=own.device)
        for index in range(count):
            chosen = left.masked_fill(kept, -torch.inf).argmax()
            row = kernel[chosen] - rows[:index, chosen] @ rows[:index]
            rows[index] = row / left[chosen].clamp(min=1e-12).sqrt()
            left = (left - rows[index] ** 2).clamp(min=0.0)
            kept[chosen] = True
        return kept


@dataclass(frozen=True)
class DominantAndContextual:
    """Keeps the patches that get most attention, and merges the others (VisionZip).

    arXiv 2412.04467, section 3: dominant patches are those that the class token attends to the
    most. Of the others, in order, evenly spaced ones are targets; each that is left goes to the
    target with the most similar key (cosine of the means over heads), which adds the mean of its
    patches.
    """

    share: float = 0.111
    tokens: int = 0
    contextual: float = 0.156
    layer: int = 0
    reads: Literal[""] = ""

    def merge(self, states: Tensor, received: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the ``share`` of the patches; ``contextual`` is the share of these that are merged.

        Of patches with equal attention the earlier is dominant.
        """
        total = len(states)
        count = kept_count(self.share, total, self.tokens)
        targets = round(self.contextual * count)
        order = received.argsort(descending=True, stable=True)
        kept = _mask(order[: count - targets], total)
        if not targets:
            return states, kept
        rest = (~kept).nonzero().flatten()
        target = rest[:: len(rest) // targets][:targets]
        kept = kept | _mask(target, total)
        left = (~kept).nonzero().flatten()
        unit = F.normalize(keys.float().mean(1), dim=-1)
        nearest = (unit[left] @ unit[target].T).argmax(-1)
        given = F.one_hot(nearest, targets).T.float()
        means = given @ states[left].float() / given.sum(-1, keepdim=True).clamp(min=1)
        return states.index_add(0, target, means.to(states.dtype)), kept

    def keep(self, chunk: ChunkStates) -> Tensor:
        """Those that :meth:`merge` has kept."""
        assert chunk.merged is not None
        return chunk.merged


@dataclass(frozen=True)
class OutliersWithNeighbours:
    """Keeps patches whose attention stands out, with their neighbours' states (LLaVA-PruMerge).

    arXiv 2403.15388, sections 3.2 and 3.3: attention of the class token is an outlier above the
    third quartile plus 1.5 times the distance of the quartiles. Each patch that stays adds the
    states of those with the most similar keys (cosine, all heads side by side), kept ones too,
    weighted with their attention.
    """

    tokens: int = 0
    neighbours: int = 32
    layer: int = 0
    reads: Literal[""] = ""

    def merge(self, states: Tensor, received: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the outliers, one patch at least, or ``tokens`` of them; of equal ones the first."""
        total = len(states)
        order = received.argsort(descending=True, stable=True)
        kept = _mask(order[: kept_count(0, total, self.tokens)], total)
        if not self.tokens:
            low, high = received.quantile(received.new_tensor([0.25, 0.75])).unbind()
            kept = kept | (received > high + 1.5 * (high - low))
        unit = F.normalize(keys.flatten(1).float(), dim=-1)
        alike = (unit @ unit.T).fill_diagonal_(-torch.inf)[kept]
        near = alike.argsort(dim=-1, descending=True, stable=True)
        near = near[:, : min(self.neighbours, total - 1)]
        weight = torch.zeros_like(alike).scatter(1, near, received[near])
        merged = states.clone()
        merged[kept] += (weight @ states.float()).to(states.dtype)
        return merged, kept

    def keep(self, chunk: ChunkStates) -> Tensor:
        """Those that :meth:`merge` has kept."""
        assert chunk.merged is not None
        return chunk.merged


def check_pruner(pruner: Pruner, layers: int, windows: tuple[int | None, ...]) -> None:
    """Check that a model can be pruned so.

    Raises:
        PolicyError: it has too few layers, or sliding windows.
    """
    if not 0 <= pruner.layer < layers:
        raise PolicyError(
            f"the policy prunes after layer {pruner.layer}; this model has {layers} layers, give "
            f"0 to {layers - 1}"
        )
    if any(windows):
        raise PolicyError(
            "pruning of visual tokens is not made for sliding-window layers; choose another policy"
        )


def _fastv(layer: int, keep: float, tokens: int, attention: Literal["all", "last"]) -> Policy:
    return Policy("fastv", Recency(), None, pruner=LeastAttended(layer, keep, attention, tokens))


def _divprune(keep: float, tokens: int) -> Policy:
    return Policy("divprune", Recency(), None, pruner=MostDiverse(keep, tokens))


def _dart(layer: int, keep: float, tokens: int, visual_pivots: int, text_pivots: int) -> Policy:
    pruner = LeastDuplicated(layer, keep, tokens, visual_pivots, text_pivots)
    return Policy("dart", Recency(), None, pruner=pruner)


def _cdpruner(keep: float, tokens: int) -> Policy:
    return Policy("cdpruner", Recency(), None, pruner=ConditionallyDiverse(keep, tokens))


def _visionzip(keep: float, tokens: int, contextual: float) -> Policy:
    pruner = DominantAndContextual(keep, tokens, contextual)
    return Policy("visionzip", Recency(), None, pruner=pruner)


def _prumerge(tokens: int, neighbours: int) -> Policy:
    return Policy("prumerge", Recency(), None, pruner=OutliersWithNeighbours(tokens, neighbours))


_TOKENS = Parameter(0, "visual tokens of a chunk that stay; 0: a share of them", least=0)


def _keep(share: float, place: str = "") -> Parameter:
    return Parameter(share, "share of visual tokens that stay", place, least=0.0, most=1.0)


PRUNING_PRESETS: dict[str, Preset] = {
    "fastv": Preset(
        _fastv,
        "arXiv 2403.06764",
        "An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for "
        "Large Vision-Language Models",
        {
            "layer": Parameter(2, "layers that see all visual tokens", "title: K = 2", least=1),
            "keep": _keep(0.5, "title: R = 50 %"),
            "tokens": _TOKENS,
            "attention": Parameter(
                "all",
                "whose attention counts: all tokens of the chunk, or the last",
                "section 4",
                choices=("all", "last"),
            ),
        },
    ),
    "divprune": Preset(
        _divprune,
        "arXiv 2503.02175",
        "DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models",
        {"keep": _keep(0.098), "tokens": _TOKENS},
    ),
    "dart": Preset(
        _dart,
        "arXiv 2502.11494",
        "Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More",
        {
            "layer": Parameter(2, "layers that see all visual tokens", "released code", least=1),
            "keep": _keep(0.222, "128 of 576"),
            "tokens": _TOKENS,
            "visual_pivots": Parameter(
                4, "visual tokens that are pivots", "released code", least=1
            ),
            "text_pivots": Parameter(4, "text tokens that are pivots", "released code", least=0),
        },
    ),
    "cdpruner": Preset(
        _cdpruner,
        "arXiv 2506.10967",
        "Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in "
        "MLLMs",
        {"keep": _keep(0.111, "64 of 576"), "tokens": _TOKENS},
    ),
    "visionzip": Preset(
        _visionzip,
        "arXiv 2412.04467",
        "VisionZip: Longer is Better but Not Necessary in Vision Language Models",
        {
            "keep": _keep(0.111, "64 of 576"),
            "tokens": Parameter(0, "patches of a picture that stay; 0: a share of them", least=0),
            "contextual": Parameter(
                0.156, "share of those that are merged ones", "10 of 64", least=0.0, most=1.0
            ),
        },
    ),
    "prumerge": Preset(
        _prumerge,
        "arXiv 2403.15388",
        "LLaVA-PruMerge: Adaptive Token Reduction for Efficient Large Multimodal Models",
        {
            "tokens": Parameter(0, "patches of a picture that stay; 0: the outliers", least=0),
            "neighbours": Parameter(
                32, "patches that each of them adds up", "released code", least=1
            ),
        },
    ),
}
