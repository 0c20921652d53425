"""Supervise the order of entries by the attention that a teacher still gives them.

At a token c of a document, what entry i <= c of a KV head is still worth is the largest weight
that any of the head's queries gives it among the w tokens after c. Under a budget the entries of
all layers and heads compete by ``(c + 1 - i) * log_beta_i``, so the loss is one of ranks over all
of them: a pair on both sides of a budget costs when the gates order it otherwise than the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.teacher_forced import Documents, FullAttention

BLOCK = 96  # queries whose weights stand at once
PAIRS = 4096  # of a document


def largest_weights(
    query: Tensor, key: Tensor, rows: Tensor, cut: int, scale: float, block: int = BLOCK
) -> Tensor:
    """Return the largest attention weight of each key up to ``cut`` over some later queries.

    Args:
        query: ``[Hq, T, D]``; key: ``[H, T, D]``, one document, H a divisor of Hq.
        rows: int64, ascending: the queries to look at, all above ``cut``.
        block: queries whose weights stand at once: memory is O(Hq * block * T).

    Returns:
        float32 ``[H, cut + 1]``; 0 without queries.
    """
    heads, steps = key.shape[:2]
    grouped = query.unflatten(0, (heads, -1))
    found = key.new_zeros(heads, cut + 1, dtype=torch.float32)
    step = torch.arange(steps, device=key.device)
    for part in rows.split(block) if rows.numel() else ():
        end = int(part[-1]) + 1
        logits = (grouped[:, :, part].float() * scale).flatten(1, 2) @ key[:, :end].float().mT
        logits = logits.unflatten(1, (-1, len(part)))
        logits.masked_fill_(step[:end] > part[:, None], -torch.inf)
        weights = torch.softmax(logits, -1)[..., : cut + 1]
        torch.maximum(found, weights.amax((1, 2)), out=found)
    return found


class WatchedAttention(FullAttention):
    """Full attention that notes what each document's entries are still worth.

    Args:
        cuts: of each document; window: queries after it that count; 0: all.

    Attributes:
        worth: per document, per layer that has run, ``[H, cut + 1]``.
    """

    def __init__(
        self, engine: Runtime, documents: Documents, cuts: Sequence[int], window: int
    ) -> None:
        super().__init__(engine, documents)
        self.cuts = cuts
        self.worth: list[list[Tensor]] = [[] for _ in cuts]
        self._rows = []
        for cut, modality in zip(cuts, documents.modality.split(documents.lengths), strict=True):
            end = min(len(modality), cut + 1 + window) if window else len(modality)
            rows = torch.arange(cut + 1, end, device=modality.device)
            self._rows.append(rows[modality[cut + 1 : end] == 0])

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, cut = self._rows[index], self.cuts[index]
        self.worth[index].append(largest_weights(query[0], key[0], rows, cut, self.scale))
        return super().attend_document(index, query, key, value)


@torch.no_grad()
def watched_states(
    engine: Runtime, documents: Documents, cuts: Sequence[int], window: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the teacher's states ``[T, d]`` before the final norm, and per document what its
    entries up to its cut are still worth, float32 ``[L * H, cut + 1]``.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    step = WatchedAttention(engine, documents, cuts, window)
    rope = engine.rope.at(documents.positions)
    states = decoder.forward(documents.hidden, rope, step, documents.deepstack)[0]
    return states, [torch.cat(layers) for layers in step.worth]


def rank_loss(log_beta: Tensor, worth: Tensor, pairs: int = PAIRS) -> Tensor:
    """Return the mean logistic loss of pairs that a budget parts.

    For each pair a number K of entries to keep is drawn log-uniformly from 1 to half of all; one
    partner is drawn from the K most worth, one from the others. With the score of entry i of n,
    ``u_i = -log((n - i) * -log_beta_i)``, the pair costs
    ``(1 - worth_low / worth_high) * softplus(u_low - u_high)``.

    Args:
        log_beta: ``[R, n]`` of a document's first n tokens, below 0; worth: ``[R, n]``, >= 0.
    """
    age = torch.arange(log_beta.shape[1], 0, -1, device=log_beta.device)
    score = -torch.log(age * -log_beta.clamp(max=-1e-12)).flatten()
    order = worth.flatten().argsort(descending=True)
    count = order.numel()
    draws = torch.rand(3, pairs).to(log_beta.device)
    kept = (count / 2) ** draws[0]
    high = order[(draws[1] * kept).long()]
    low = order[(kept.floor() + draws[2] * (count - kept.floor())).long().clamp(max=count - 1)]
    value = worth.flatten()
    weight = 1 - value[low] / value[high].clamp(min=1e-12)
    return (weight.clamp(min=0) * F.softplus(score[low] - score[high])).mean()
