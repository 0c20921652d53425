"""Train retention gates on the order of future attention: the model reads, only gates learn.

A document is cut at some of its tokens. At a cut c, what entry i <= c of a KV head is still *worth*
is how far the model's predictions would move if a query of the head after c did without it. A query
that gives it the weight w of a softmax, and has the output o, would have ``(o - w v) / (1 - w)``,
which lies ``w / (1 - w) |o - v|`` apart. So first tokens, whose values are small and whose weights
are large, count as what they are. How much predictions depend on a head's output differs by layer;
:func:`head_scales` measures it, and the product is the worth. Under a budget the entries of all
layers and heads compete by ``(c + 1 - i) * log_beta_i``, so the loss is one of ranks over all of
them (:func:`rank_loss`): a pair on both sides of a budget costs when the gates order it otherwise
than the teacher. KVpop (arXiv 2607.05061) and KVzap learn the attention to come head by head.

Scales come from the first two documents. Then one pass of the frozen model over each document notes
the worth, blocks of queries at a time; no gradient goes through the model. ``--method rank`` has
this loss alone, ``--lambda-rank`` adds it to distillation's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.gates import Gates
from mmkv.engine.runtime import Runtime
from mmkv.training.measure.teacher_forced import Documents, FullAttention, lay_out
from mmkv.training.student import TrainableGates, with_trunks_in_bf16

_BLOCK = 96  # queries whose weights stand at once
_PAIRS = 4096  # of a cut
_LOGITS = 512  # tokens whose logits stand at once
SCALED_BY = 2  # documents that :func:`head_scales` is given
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
    """Return how far the outputs of the queries after each cut move without each entry: see above.

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


class _FeltAttention(FullAttention):
    """Full attention that adds up the squared gradients of its outputs.

    Attributes:
        squares: ``[L, H]``, of layers with entries; a backward pass fills it.
    """

    def __init__(self, engine: Runtime, documents: Documents) -> None:
        super().__init__(engine, documents)
        self.squares = torch.zeros(
            engine.spec.entry_layers, engine.spec.num_kv_heads, device=engine.device
        )

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = super().attend(layer, query, key, value)
        text = self.documents.modality == 0

        def add(gradient: Tensor) -> None:
            heads = gradient[text].float().unflatten(1, (len(self.squares[layer]), -1))
            self.squares[layer] += heads.square().sum((0, 2))

        if out.requires_grad:
            out.register_hook(add)
        return out


def head_scales(
    engine: Runtime, examples: Sequence[Mapping[str, Any]], checkpointing: bool = False
) -> Tensor:
    """Measure how much predictions depend on the outputs of each KV head's queries.

    Each token of text predicts a next one, of which one is drawn by a fixed seed. The gradient g of
    these tokens' log probabilities by an output has the outputs' Fisher matrix as E[g g.T]: a small
    change x costs ``x.T E[g g.T] x / 2`` of KL. A head's scale is the root of the sum of g's
    squares at tokens of text.

    Args:
        examples: documents, one at a time; checkpointing: recompute each layer in the backward
            pass.

    Returns:
        float32 ``[L * H]``; ones without text.
    """
    decoder = Decoder(engine.spec, engine.decoder.weights, None)
    generator = torch.Generator(engine.device).manual_seed(0)
    squares = torch.zeros(engine.spec.rows, device=engine.device)
    for example in examples:
        documents = lay_out(engine, [example])
        step = _FeltAttention(engine, documents)
        rope = engine.rope.at(documents.positions)

        run = partial(_layer, decoder, documents, step, rope)
        hidden = documents.hidden.detach().requires_grad_()
        for index in range(engine.spec.num_layers):
            if checkpointing:
                hidden = checkpoint(run, index, hidden, use_reentrant=False)
            else:
                hidden = run(index, hidden)
        end = hidden.detach().requires_grad_()
        for rows in (documents.modality == 0).nonzero()[:, 0].split(_LOGITS):
            said = torch.log_softmax(decoder.logits(end[rows]), -1)
            drawn = torch.multinomial(said.detach().exp(), 1, generator=generator)
            said.gather(1, drawn).sum().backward()
        if end.grad is not None:
            hidden.backward(end.grad)
        squares += step.squares.flatten()
    return squares.sqrt() if squares.any() else torch.ones_like(squares)


def _layer(
    decoder: Decoder,
    documents: Documents,
    step: FullAttention,
    rope: tuple[Tensor, Tensor],
    index: int,
    hidden: Tensor,
) -> Tensor:
    x = decoder.gate_input(index, hidden)
    return decoder.layer(index, hidden, x, rope, step, documents.deepstack)


class WatchedAttention(FullAttention):
    """Full attention that notes how far outputs move without each document's entries.

    Args:
        cuts: of each document, ascending; window: queries after a cut that count; 0: all. Queries
            of pictures never do.

    Attributes:
        moved: per document, per layer that has run, what :func:`future_worth` returns.
    """

    def __init__(
        self, engine: Runtime, documents: Documents, cuts: Sequence[Sequence[int]], window: int
    ) -> None:
        super().__init__(engine, documents)
        self.cuts, self.window = cuts, window
        self.moved: list[list[list[Tensor]]] = [[] for _ in cuts]
        self._asking = (documents.modality == 0).split(documents.lengths)

    def attend_document(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tensors = query[0], key[0], value[0], self._asking[index]
        self.moved[index].append(future_worth(*tensors, self.cuts[index], self.scale, self.window))
        return super().attend_document(index, query, key, value)


def watched_states(
    engine: Runtime,
    documents: Documents,
    cuts: Sequence[Sequence[int]],
    window: int,
    scale: Tensor | None = None,
    read: Callable[[int, Tensor], None] = lambda entry, x: None,
) -> tuple[Tensor, list[list[Tensor]]]:
    """Run the frozen model once, and note what entries are worth.

    Args:
        cuts, window: as :class:`WatchedAttention` has them; scale: ``[L * H]``, as
            :func:`head_scales` returns it; None: ones.
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
    by = 1.0 if scale is None else scale[:, None]
    return hidden, [[torch.cat(at) * by for at in zip(*own, strict=True)] for own in step.moved]


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
        scale: ``[L * H]``, as :func:`head_scales` returns it.
        cuts: of each document, drawn behind its first eighth; window: queries after a cut that
            count; 0: all.
    """

    parts = dict.fromkeys(("rank", "overlap"), "documents")

    def __init__(
        self,
        engine: Runtime,
        gates: TrainableGates,
        scale: Tensor,
        cuts: int = 6,
        window: int = 0,
    ) -> None:
        super().__init__()
        self.gates = gates
        self.engine, self.scale, self.cuts, self.window = engine, scale, cuts, window

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
            self.scale,
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
