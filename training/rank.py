"""Train retention gates on the order of future attention: the model reads, only gates learn.

A document is cut at some of its tokens. At a cut c, what entry i <= c of a KV head is still *worth*
is how far the output of any of the head's queries after c would move without it. A query that gives
it the weight w of a softmax, and has the output o, would have ``(o - w v) / (1 - w)``, which lies
``w / (1 - w) |o - v|`` apart. So first tokens, whose values are small and whose weights are large,
count as what they are. The layers' outputs are not brought to one scale: on SmolLM2 the early ones,
whose numbers are small, keep too little. Under a budget the entries of all layers and heads compete
by ``(c + 1 - i) * log_beta_i``, so the loss is one of ranks over all of them (:func:`rank_loss`): a
pair on both sides of a budget costs when the gates order it otherwise than the teacher. KVpop
(arXiv 2607.05061) and KVzap learn the attention to come head by head.

One pass of the frozen model notes the worth, blocks of queries at a time; no gradient goes through
the model. ``--method rank`` has this loss alone, ``--lambda-rank`` adds it to distillation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.teacher_forced import Documents, FullAttention, lay_out
from mmkv.training.student import TrainableGates, with_trunks_in_bf16

_BLOCK = 96  # queries whose weights stand at once
_PAIRS = 4096  # of a cut
_LEAST_REST = 1e-3  # of a softmax without one entry, lest rounding be divided by 0


def future_worth(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asking: Tensor,
    cuts: Sequence[int],
    scale: float,
    window: int = 0,
    block: int = _BLOCK,
) -> list[Tensor]:
    """Return what each entry up to each cut is worth to the queries after it: see above.

    Args:
        query: ``[Hq, T, D]``; key, value: ``[H, T, D]``, one document, H a divisor of Hq.
        asking: bool ``[T]``, which queries count.
        cuts: token indices, ascending; window: queries after a cut that count; 0: all.
        block: queries whose weights stand at once: memory is O(Hq * block * T).

    Returns:
        float32 ``[H, cut + 1]`` for each cut; 0 without queries.
    """
    heads, steps = key.shape[:2]
    grouped, key, value = query.unflatten(0, (heads, -1)), key.float(), value.float()
    square, step = value.square().sum(-1)[:, None], torch.arange(steps, device=key.device)
    largest, last, found = key.new_zeros(heads, steps), steps, list[Tensor]()
    for cut in reversed(cuts):
        if window:  # else the queries after the next cut count for this one, too
            largest.zero_()
            last = min(steps, cut + 1 + window)
        rows = step[cut + 1 : last][asking[cut + 1 : last]]
        for part in rows.split(block) if rows.numel() else ():
            end = int(part[-1]) + 1
            logits = (grouped[:, :, part].float() * scale).flatten(1, 2) @ key[:, :end].mT
            unseen = step[:end] > part.repeat(grouped.shape[1])[:, None]
            weights = torch.softmax(logits.masked_fill_(unseen, -torch.inf), -1)
            out = weights @ value[:, :end]
            apart = out.square().sum(-1, keepdim=True) - 2 * out @ value[:, :end].mT
            apart = (apart + square[..., :end]).clamp_(min=0).sqrt_()
            moved = apart.mul_(weights).div_((1 - weights).clamp_(min=_LEAST_REST)).amax(1)
            largest[:, :end] = torch.maximum(largest[:, :end], moved)
        found.append(largest[:, : cut + 1].clone())
        last = cut + 1
    return found[::-1]


class WatchedAttention(FullAttention):
    """Full attention that notes what each document's entries are still worth.

    Args:
        cuts: of each document, ascending; window: queries after a cut that count; 0: all. Queries
            of pictures never do.

    Attributes:
        worth: per document, per layer that has run, what :func:`future_worth` returns.
    """

    def __init__(
        self, engine: Runtime, documents: Documents, cuts: Sequence[Sequence[int]], window: int
    ) -> None:
        super().__init__(engine, documents)
        self.cuts, self.window = cuts, window
        self.worth: list[list[list[Tensor]]] = [[] for _ in cuts]
        self._asking = (documents.modality == 0).split(documents.lengths)

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = query[0], key[0], value[0], self._asking[index]
        self.worth[index].append(future_worth(*tensors, self.cuts[index], self.scale, self.window))
        return super().attend_document(index, query, key, value)


def watched_states(
    engine: Runtime,
    documents: Documents,
    cuts: Sequence[Sequence[int]],
    window: int,
    read: Callable[[int, Tensor], None] = lambda entry, x: None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Run the frozen model once, and note what entries are worth.

    Args:
        cuts, window: as :class:`WatchedAttention` has them.
        read: called for each layer with entries, with its index among those and what its gates
            read, ``[T, d]``; it alone may keep a graph.

    Returns:
        states ``[T, d]`` before the final norm, and per document and cut what the entries up to it
        are worth, float32 ``[L * H, cut + 1]``.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    step = WatchedAttention(engine, documents, cuts, window)
    rope, hidden = engine.rope.at(documents.positions), documents.hidden
    for index, entry in enumerate(engine.spec.entry_index):
        with torch.no_grad():
            x = decoder.gate_input(index, hidden)
            hidden = decoder.layer(index, hidden, x, rope, step, documents.deepstack)
        if entry is not None:
            read(entry, x)
    return hidden, [[torch.cat(layers) for layers in zip(*own, strict=True)] for own in step.worth]


def scores_at(log_beta: Tensor) -> Tensor:
    """Return ``-log(age * -log_beta)`` of a document's first n tokens; the newest has age 1.

    Args:
        log_beta: ``[R, n]``, below 0.
    """
    age = torch.arange(log_beta.shape[1], 0, -1, device=log_beta.device)
    return -torch.log(age * -log_beta.clamp(max=-1e-12))


def rank_loss(log_beta: Tensor, worth: Tensor, pairs: int = _PAIRS) -> Tensor:
    """Return the mean logistic loss of pairs that a budget parts.

    For each pair a number K of entries to keep is drawn log-uniformly from 1 to half of all; one
    partner is drawn from the K most worth, one from the others. With the scores u of
    :func:`scores_at`, the pair costs ``(1 - worth_low / worth_high) * softplus(u_low - u_high)``;
    nothing where neither is worth anything.

    Args:
        log_beta: ``[R, n]`` of a document's first n tokens, below 0; worth: ``[R, n]``, >= 0.
    """
    score, value = scores_at(log_beta).flatten(), worth.flatten()
    order = value.argsort(descending=True)
    count = order.numel()
    draws = torch.rand(3, pairs).to(log_beta.device)
    kept = (count / 2) ** draws[0]
    high = order[(draws[1] * kept).long()]
    low = order[(kept.floor() + draws[2] * (count - kept.floor())).long().clamp(max=count - 1)]
    weight = (value[high] - value[low]) / value[high].clamp(min=1e-12)
    return (weight.clamp(min=0) * F.softplus(score[low] - score[high])).mean()


def overlap(log_beta: Tensor, worth: Tensor, share: float = 0.125) -> Tensor:
    """Return how many of the best ``share`` of entries by worth the gates would keep, 0 to 1."""
    count = max(1, int(share * worth.numel()))
    chosen = torch.zeros(worth.numel(), dtype=torch.bool, device=worth.device)
    chosen[scores_at(log_beta).flatten().topk(count).indices] = True
    return chosen[worth.flatten().topk(count).indices].float().mean()


def drawn_cuts(length: int, count: int, first: float) -> list[int]:
    """Draw at most ``count`` cuts of a document by torch's generator, ascending.

    Args:
        length: tokens of the document; first: the share of it before which no cut lies.
    """
    start = int(length * first)
    drawn = start + torch.rand(count) * (length - 1 - start)
    return sorted(set(drawn.long().tolist()))


class RankModel(nn.Module):
    """A module whose parameters are the gates; the frozen backbone stands outside.

    Args:
        cuts: of each document, drawn behind its first eighth; window: queries after a cut that
            count; 0: all.
    """

    parts = dict.fromkeys(("rank", "overlap"), "documents")

    def __init__(
        self, engine: Runtime, gates: TrainableGates, cuts: int = 6, window: int = 0
    ) -> None:
        super().__init__()
        self.gates = gates
        self.engine, self.cuts, self.window = engine, cuts, window

    def forward(
        self, examples: Sequence[Mapping[str, Any]], shares: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return loss and its parts over a batch of documents.

        Args:
            examples: per document what the processor returns; labels are not looked at.
            shares: as :class:`mmkv.training.model.DistillModel` has them.

        Returns:
            float32 scalars: ``loss`` and, without gradient, means over the documents' cuts:
            ``rank``, the same, and ``overlap`` at an eighth of the entries.
        """
        engine = self.engine
        documents = lay_out(engine, examples)
        gates: Gates = self.gates.gates().to(engine.device, engine.dtype)
        if engine.decoder.weights.form == "bf16":
            gates = with_trunks_in_bf16(gates)
        said: list[Tensor] = []
        cuts = [drawn_cuts(n, self.cuts, 1 / 8) for n in documents.lengths]
        _, worth = watched_states(
            engine,
            documents,
            cuts,
            self.window,
            lambda entry, x: said.append(gates.log_beta(entry, x)),
        )
        rows = torch.stack(said, 1).flatten(1).T.split(documents.lengths, 1)
        losses, kept = [], []
        for log_beta, own in zip(rows, worth, strict=True):
            pairs = [(log_beta[:, : at.shape[1]], at) for at in own]
            losses.append(torch.stack([rank_loss(*pair) for pair in pairs]).mean())
            kept.append(torch.stack([overlap(*pair) for pair in pairs]).mean())
        rank = torch.stack(losses).mean()
        loss = rank * (1.0 if shares is None else shares["documents"])
        return {"loss": loss, "rank": rank.detach(), "overlap": torch.stack(kept).mean().detach()}
