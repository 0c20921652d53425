"""Compute the lookahead retention score (DBTrimKV, arXiv 2605.09649, eq. 9) in log space."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log1mexp(x: Tensor) -> Tensor:
    """Compute ``log(1 - exp(x))`` for ``x < 0``, accurate at both ends (-inf at 0)."""
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def lookahead_log_score(
    log_beta: Tensor, age: Tensor, lookahead: float, least_age: int = 1
) -> Tensor:
    """Log of the retention an entry will have summed over the next ``lookahead`` steps.

    ``log G = a lb + log1mexp(n lb) - log1mexp(lb)``, that is
    ``log(beta^a + ... + beta^(a+n-1))``, without ever forming ``1 - beta`` from beta.

    Args:
        log_beta: ``[N]`` float32, <= 0.
        age: ``[N]`` whole numbers; equation 9 counts tokens seen minus position, so the newest
            is 1.
        lookahead: n = T - t >= 1; ``math.inf`` allowed.
        least_age: 0 where there may be ages of 0: an entry is whole then, ``beta^0 = 1``, whatever
            its log_beta.

    Returns:
        float32 ``[N]``; +inf for ``log_beta = 0`` under an infinite horizon.
    """
    decayed = age.to(torch.float32) * log_beta
    if least_age == 0:
        decayed = decayed.masked_fill(age == 0, 0.0)  # not 0 * -inf
    # No float32 form of exp, expm1 or log1p is the same on every machine. What does not depend on
    # age is computed in float64 and rounded once, so that CPUs and GPUs order entries alike.
    x = log_beta.double()
    if lookahead == 1:
        return decayed
    if lookahead == 2:
        ahead = torch.log1p(torch.exp(x))
    elif math.isinf(lookahead):
        ahead = -log1mexp(x)
    else:
        ratio = torch.expm1(lookahead * x) / torch.expm1(x)
        ahead = torch.log(torch.where(x == 0, float(lookahead), ratio))
    return decayed + ahead.float()
