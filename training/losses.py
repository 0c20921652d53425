"""Compute the quality losses of distillation in blocks, so that all logits never exist at once.

KL(teacher || student) and next-token prediction over one mask of shifted labels (DBTrimKV,
arXiv 2605.09649, eq. 3; TRIM-KV, arXiv 2512.03324, eq. 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmkv.engine.model.decoder import Decoder
from mmkv.training.data.labels import predicted

KINDS = ("kl", "reverse-kl", "ntp")


@dataclass(frozen=True)
class Quality:
    """Means over the N predicted tokens, scalars float32.

    Attributes:
        kl: KL(teacher || student), or KL(student || teacher) where that was asked for.
        ntp: negative log-likelihood of the label.
        agreement: share of tokens whose most likely continuation is the teacher's; no gradient.
        tokens: N.
    """

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
    block: int = 512,
) -> Quality:
    """Compare student and teacher where labels stand.

    Args:
        student, teacher: states ``[T, d]`` before the final norm.
        labels: int64 ``[T]``, -100 where nothing is predicted.
        block: tokens whose logits stand at once; they are recomputed in the backward pass.

    Raises:
        ValueError: without any label.
    """
    where, targets = predicted(labels)
    if not where.numel():
        raise ValueError("no token has a label")

    def sums(states: Tensor, reference: Tensor, target: Tensor) -> Tensor:
        ours = F.log_softmax(decoder.logits(states), -1)
        theirs = F.log_softmax(decoder.logits(reference), -1)
        high, low = (ours, theirs) if reverse else (theirs, ours)
        kl = (high.exp() * (high - low)).sum()
        ntp = F.nll_loss(ours, target, reduction="sum")
        agree = (ours.argmax(-1) == theirs.argmax(-1)).sum().float()
        return torch.stack([kl, ntp, agree])

    total = torch.zeros(3, device=student.device)
    for part, target in zip(where.split(block), targets.split(block), strict=True):
        total = total + checkpoint(sums, student[part], teacher[part], target, use_reentrant=False)
    kl, ntp, agreement = total / where.numel()
    return Quality(kl, ntp, agreement.detach(), where.numel())
