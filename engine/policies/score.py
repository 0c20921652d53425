"""The lookahead retention score (001, equation 9), in log space and float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for ``x < 0``, accurate at both ends (-inf at 0)."""
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))


def lookahead_log_score(log_beta: Tensor, age: Tensor, lookahead: float) -> Tensor:
    """Log of the retention an entry will have summed over the next ``lookahead`` steps.

    ``log G = a lb + log1mexp(n lb) - log1mexp(lb)``, that is
    ``log(beta^a + ... + beta^(a+n-1))``, without ever forming ``1 - beta`` from beta.

    Args:
        log_beta: ``[N]`` float32, <= 0.
        age: ``[N]``, tokens seen minus position, >= 1.
        lookahead: n = T - t >= 1; ``math.inf`` allowed.

    Returns:
        float32 ``[N]``; +inf for ``log_beta = 0`` under an infinite horizon.
    """
    decayed = age.to(torch.float32) * log_beta
    if lookahead == 1:
        return decayed
    if lookahead == 2:
        return decayed + torch.log1p(torch.exp(log_beta))
    if math.isinf(lookahead):
        return decayed - log1mexp(log_beta)
    # The ratio (1 - beta^n) / (1 - beta) is formed before the log is taken: each of the two logs
    # is near -20 for log_beta near -1e-9, and their difference would lose a microunit.
    ratio = torch.expm1(lookahead * log_beta) / torch.expm1(log_beta)
    return decayed + torch.log(torch.where(log_beta == 0, float(lookahead), ratio))
