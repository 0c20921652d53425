"""One training step of retention gates or write gates, as a torch module that holds the gates only.

The quality losses are computed in blocks, gradient and all, so that all logits never exist at
once: KL(teacher || student) and next-token prediction over one mask of shifted labels (DBTrimKV,
arXiv 2605.09649, eq. 3; TRIM-KV, arXiv 2512.03324, eq. 4). Write gates have the loss of WG-KV
(arXiv 2512.17452, section 3.3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmkv.engine.model.decoder import Decoder
from mmkv.engine.model.families.vision import held_matrices
from mmkv.engine.model.product import plain
from mmkv.engine.policies.base import admitted
from mmkv.engine.runtime import Runtime
from mmkv.training.capacity import (
    capacity_loss,
    retained_counts,
    retained_total,
    retained_total_grouped,
)
from mmkv.training.data.labels import predicted
from mmkv.training.measure.teacher_forced import (
    full_attention_states,
    lay_out,
)
from mmkv.training.rank import drawn_cuts, rank_loss, watched_states
from mmkv.training.student import (
    TrainableGates,
    TrainableWriteGates,
    student_states,
    with_trunks_in_bf16,
    write_gated_states,
)

# p at the start: what gates of a fixed M hold softly grows as the square root of a temperature.
_EXPONENT = 2.0
KINDS = ("kl", "reverse-kl", "ntp")


@dataclass(frozen=True)
class Quality:
    """Means over the N predicted tokens, scalars float32.

    Attributes:
        loss: the weighted sum of the next two, and the only one with a gradient.
        kl: KL(teacher || student), or KL(student || teacher) where that was asked for.
        ntp: negative log-likelihood of the label.
        agreement: share of tokens whose most likely continuation is the teacher's.
        tokens: N.
    """

    loss: Tensor
    kl: Tensor
    ntp: Tensor
    agreement: Tensor
    tokens: int


def quality_losses(
    decoder: Decoder,
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    reverse: bool = False,
    block: int = 128,
    weights: tuple[float, float] = (1.0, 1.0),
) -> Quality:
    """Compare student and teacher where labels stand.

    The gradient of the student's states is worked out beside the losses, so that no logits are
    kept or computed again.

    Args:
        student, teacher: states ``[T, d]`` before the final norm.
        labels: int64 ``[T]``, -100 where nothing is predicted.
        block: tokens whose logits stand at once.
        weights: of the two losses in ``loss``.

    Raises:
        ValueError: without any label.
    """
    where, targets = predicted(labels)
    count = where.numel()
    if not count:
        raise ValueError("no token has a label")
    gradient = student.requires_grad and torch.is_grad_enabled()
    chosen = student[where]
    total = torch.zeros(3, device=student.device)
    grads: list[Tensor] = []
    for part, target in zip(torch.arange(count).split(block), targets.split(block), strict=True):
        states = chosen[part].detach().requires_grad_(gradient)
        ours = decoder.logits(states)
        with torch.no_grad():
            theirs = decoder.logits(teacher[where[part]])
            sums, d_logits = _compare(ours.detach(), theirs, target, reverse, weights)
            total += sums
        if gradient:
            grads += torch.autograd.grad(ours, states, d_logits)
    kl, ntp, agreement = total / count
    loss = weights[0] * kl + weights[1] * ntp
    if gradient:
        made: Tensor = _WithGradient.apply(chosen, loss, torch.cat(grads) / count)
        loss = made
    return Quality(loss, kl, ntp, agreement, count)


def _compare(
    ours: Tensor, theirs: Tensor, target: Tensor, reverse: bool, weights: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Return the sums of KL, next-token loss and agreement over logits ``[n, vocab]``, ``[3]``, and
    the gradient of the weighted losses with respect to ``ours``.
    """
    agree = (ours.argmax(-1) == theirs.argmax(-1)).sum()
    student = F.log_softmax(ours, -1)
    ntp = F.nll_loss(student, target, reduction="sum")
    probability = F.softmax(ours, -1)
    if reverse:
        apart = student.sub_(F.log_softmax(theirs, -1))
        kl = (probability * apart).sum(-1, keepdim=True)
        grad = apart.sub_(kl).mul_(probability).mul_(weights[0]).add_(probability, alpha=weights[1])
    else:
        teacher = F.softmax(theirs, -1)
        kl = F.log_softmax(theirs, -1).sub_(student).mul_(teacher)
        grad = probability.mul_(sum(weights)).sub_(teacher, alpha=weights[0])
    grad[torch.arange(len(target), device=grad.device), target] -= weights[1]
    return torch.stack([kl.sum(), ntp, agree.float()]), grad


class _WithGradient(torch.autograd.Function):
    """A number and its gradient, which are both known."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] * ctx.saved_tensors[0], None, None


# What the means of a loss are taken over.
UNITS = ("targets", "tokens", "documents")
PARTS = {
    "kl": "targets",
    "ntp": "targets",
    "capacity": "tokens",
    "rank": "documents",
    "kept": "tokens",
    "kept_least": "documents",
    "kept_most": "documents",
    "visual_share": "documents",
    "agreement": "targets",
}


@dataclass(frozen=True)
class Objective:
    """The loss: its terms and weights.

    Attributes:
        kl, ntp: weights of the two quality terms.
        reverse: KL(student || teacher) instead of KL(teacher || student).
        capacity: lambda, weight of the capacity term.
        budget: M, mean entries per (layer, KV head).
        scope: ``global`` bounds the sum over layers and heads, ``head`` every head alone.
        normaliser: see :func:`mmkv.training.capacity.capacity_loss`.
        gating: see :func:`mmkv.training.student.student_states`.
        rates: 0 for the exact count, else the number of decay rates of its approximation.
        least_budget: 0: all documents have ``budget``; above 0: each has an M of its own, drawn
            log-uniformly between this and half of its tokens (:meth:`DistillModel.draw`).
        rank: weight of :func:`mmkv.training.rank.rank_loss`, at one token of each
            document, drawn from its last three quarters; rank_window: tokens after it whose
            queries count; 0: all.
    """

    kl: float = 1.0
    ntp: float = 1.0
    reverse: bool = False
    capacity: float = 1.0
    budget: float = 256.0
    scope: str = "global"
    normaliser: str = "relative"
    gating: str = "log-bias"
    rates: int = 0
    least_budget: float = 0.0
    rank: float = 0.0
    rank_window: int = 0


class DistillModel(nn.Module):
    """A module whose parameters are the gates; the frozen backbone stands outside.

    Args:
        checkpointing: recompute layers in the backward pass.
        scale: of the rank term, as :func:`mmkv.training.rank.head_scales` returns it; None: ones.

    Attributes:
        parts: of the loss, and which of :data:`UNITS` each is a mean over.
    """

    def __init__(
        self,
        engine: Runtime,
        gates: TrainableGates,
        objective: Objective,
        checkpointing: bool = False,
        scale: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.gates, self.scale = gates, scale
        self.engine, self.objective, self.checkpointing = engine, objective, checkpointing
        self.parts = PARTS
        if objective.normaliser == "tt":
            self.parts = {**PARTS, "capacity": "documents"}
        if objective.least_budget:
            self.exponent = nn.Parameter(torch.tensor(_EXPONENT))

    def draw(self, lengths: Sequence[int]) -> Tensor:
        """Draw M for documents of so many tokens, ``[documents]`` float32, by torch's generator."""
        least = torch.full((len(lengths),), self.objective.least_budget)
        most = torch.maximum(torch.tensor(lengths) / 2, least)
        return least * (most / least) ** torch.rand(len(lengths))

    def forward(
        self, examples: Sequence[Mapping[str, Any]], shares: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return loss and its parts over a batch of documents.

        With an M of its own for each document, its log_beta is divided by ``(M / budget) ** p`` in
        the student and in the capacity term, p a learned number: no order of entries changes, so
        the gates that come out hold no temperature.

        Args:
            examples: per document what the processor returns, and ``labels [t]``.
            shares: of :data:`UNITS`, by which the terms of the loss count; None: 1.

        Returns:
            float32 scalars: ``loss`` and, without gradient, those named in :data:`PARTS`:
            ``kept`` is the mean of S_t / (L H), the soft count of entries per head; at the end
            of the documents, ``kept_least`` and ``kept_most`` are that of the heads with the
            fewest and the most, and ``visual_share`` the share of visual entries.
        """
        engine, goal = self.engine, self.objective
        documents = lay_out(engine, examples)
        labels = torch.cat([_labels(example) for example in examples]).to(engine.device)
        gates = self.gates.gates().to(engine.device, engine.dtype)
        if engine.decoder.weights.form == "bf16":
            gates = with_trunks_in_bf16(gates)
        if goal.rank:
            cuts = [drawn_cuts(n, 1, 1 / 4) for n in documents.lengths]
            teacher, worth = watched_states(engine, documents, cuts, goal.rank_window, self.scale)
        else:
            teacher, worth = full_attention_states(engine, documents), []
        budget: float | Tensor = goal.budget
        temperature = None
        if goal.least_budget:
            drawn = self.draw(documents.lengths).to(engine.device)
            repeats = torch.tensor(documents.lengths, device=engine.device)
            budget = drawn.repeat_interleave(repeats)
            temperature = (budget / goal.budget) ** self.exponent
        student, log_beta = student_states(
            engine, documents, gates, goal.gating, self.checkpointing, temperature
        )
        decoder = Decoder(engine.spec, engine.decoder.weights, None)
        weights = goal.kl, goal.ntp
        quality = quality_losses(decoder, student, teacher, labels, goal.reverse, weights=weights)
        rows = log_beta.flatten(1).T.contiguous()
        capacity, kept = self._capacity(rows, documents.start, budget)
        share: Mapping[str, Tensor | float] = shares or dict.fromkeys(UNITS, 1.0)
        loss = quality.loss * share["targets"]
        loss = loss + goal.capacity * capacity * share[self.parts["capacity"]]
        ranks = loss.new_zeros(())
        if goal.rank:
            each = rows.split(documents.lengths, 1)
            terms = [rank_loss(x[:, : w.shape[1]], w) for x, [w] in zip(each, worth, strict=True)]
            ranks = torch.stack(terms).mean()
            loss = loss + goal.rank * ranks * share["documents"]
        at_end = weights_at_end(rows, documents.start)
        by_head = at_end.sum(1) / len(documents.lengths)
        parts = {
            "kl": quality.kl,
            "ntp": quality.ntp,
            "capacity": capacity,
            "rank": ranks,
            "kept": kept,
            "kept_least": by_head.min(),
            "kept_most": by_head.max(),
            "visual_share": at_end[:, documents.modality > 0].sum() / at_end.sum(),
            "agreement": quality.agreement,
        }
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}

    def _capacity(
        self, rows: Tensor, start: Tensor, budget: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        goal, count = self.objective, rows.shape[0]
        if goal.scope == "head":
            counts = retained_counts(rows, start)
            each = capacity_loss(counts, budget, goal.normaliser, document_start=start)
            return each, counts.detach().mean()
        if goal.rates:
            total = retained_total_grouped(rows, start, goal.rates)
        else:
            total = retained_total(rows, start)
        allowed = budget * count
        cap = capacity_loss(total, allowed, goal.normaliser, rows=count, document_start=start)
        return cap, total.detach().mean() / count


@torch.no_grad()
def weights_at_end(rows: Tensor, start: Tensor) -> Tensor:
    """Return what each entry still weighs at the last token of its document, ``beta^(end - i)``.

    Args:
        rows: log_beta ``[R, T]``; start: int64 ``[T]``, first token of each token's document.

    Returns:
        ``[R, T]``.
    """
    step = torch.arange(rows.shape[1], device=rows.device)
    last = torch.cat([step[1:][start[1:] == step[1:]] - 1, step[-1:]])
    ends = last[torch.searchsorted(last, step)]
    return torch.exp((ends - step) * rows)


def backbone_digest(engine: Runtime) -> str:
    """Return SHA-256 over every weight, the vision side's too: equal before and after training."""
    weights, digest = engine.decoder.weights, hashlib.sha256()
    tensors = [plain(weights.embed), weights.norm, plain(weights.head)]
    tensors += [plain(tensor) for layer in weights.layers for _, tensor in layer.parts()]
    # What the decoder has not taken out.
    tensors += [t for t in engine.family.hf.parameters() if not t.is_meta]
    tensors += [plain(matrix) for _, matrix in held_matrices(engine.family.hf)]
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _labels(example: Mapping[str, Any]) -> Tensor:
    labels = example["labels"].flatten().clone()
    labels[0] = -100  # nothing stands before a document's first token
    return labels


@dataclass(frozen=True)
class WriteObjective:
    """The loss: its terms, and what the log lines count as admitted.

    Attributes:
        sparsity: lambda, weight of the sparsity term.
        window: W_local, tokens that every entry is seen in full for.
        threshold: tau, the gate from which an entry is admitted.
    """

    sparsity: float = 0.04
    window: int = 256
    threshold: float = 0.1


class WriteGateModel(nn.Module):
    """A module whose parameters are the write gates; the frozen backbone stands outside.

    Args:
        checkpointing: recompute layers in the backward pass.
    """

    parts = dict.fromkeys(
        ("distill", "sparsity", "gate", "admitted", "admitted_least", "admitted_most"), "tokens"
    )

    def __init__(
        self,
        engine: Runtime,
        gates: TrainableWriteGates,
        objective: WriteObjective,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.gates = gates
        self.engine, self.objective, self.checkpointing = engine, objective, checkpointing

    def forward(
        self, examples: Sequence[Mapping[str, Any]], shares: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Return loss and its parts over a batch of documents.

        Args:
            examples: per document what the processor returns; labels are not looked at.
            shares: of :data:`UNITS`, by which the terms of the loss count; None: 1.

        Returns:
            float32 scalars: ``loss`` and, without gradient, those named in :attr:`parts`:
            ``distill`` and ``sparsity`` are the two terms, ``gate`` the mean of g, ``admitted``
            the share of entries with g at the threshold or above, and ``admitted_least`` and
            ``admitted_most`` that share in the (layer, KV head) with the fewest and the most.
        """
        engine, goal = self.engine, self.objective
        documents = lay_out(engine, examples)
        gates = self.gates.gates().to(engine.device, engine.dtype)
        teacher = full_attention_states(engine, documents)
        student, log_g = write_gated_states(
            engine, documents, gates, goal.window, checkpointing=self.checkpointing
        )
        distill = distillation_loss(engine, student, teacher)
        sparsity = sparsity_loss(log_g, documents.lengths, goal.window)
        chosen = admitted(log_g.detach(), goal.threshold).float().mean(0)
        parts = {
            "distill": distill,
            "sparsity": sparsity,
            "gate": log_g.exp().mean(),
            "admitted": chosen.mean(),
            "admitted_least": chosen.min(),
            "admitted_most": chosen.max(),
        }
        loss = (distill + goal.sparsity * sparsity) * (1.0 if shares is None else shares["tokens"])
        return {"loss": loss, **{name: part.detach() for name, part in parts.items()}}


def distillation_loss(engine: Runtime, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the last hidden states, after the final norm.

    The paper says "hidden states of the final layer"; after the norm is where the authors' released
    code takes them.

    Args:
        student, teacher: states ``[T, d]`` before the final norm.
    """
    gain = engine.decoder.weights.norm.float()
    ours, theirs = (
        F.rms_norm(x.float(), gain.shape, gain, engine.spec.rms_eps) for x in (student, teacher)
    )
    return F.mse_loss(ours, theirs)


def sparsity_loss(log_g: Tensor, lengths: Sequence[int], window: int) -> Tensor:
    """Return the mean over tokens, layers and heads of ``w_s (g + g (1 - g))``.

    ``w_s = 1 - min(1, window / (T - s))`` for token s, counted from 0, of a document of T tokens:
    an entry costs by the share of its time in which it is past the window. The paper has no such
    weight; the authors' released code has it.

    Args:
        log_g: ``[T, L, H]`` of documents laid end to end; lengths: of each document.
    """
    left = torch.cat([torch.arange(n, 0, -1, device=log_g.device) for n in lengths])
    weight = 1 - (window / left).clamp(max=1)
    g = log_g.exp()
    return (weight[:, None, None] * (g + g * (1 - g))).mean()
