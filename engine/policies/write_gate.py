"""What a write gate admits to memory, and what a token sees of it.

Source: WG-KV, arXiv 2512.17452, sections 3.2 and 4.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Admission:
    """What a policy admits to memory by write gates; log g of an entry is state 0.

    Attributes:
        window: W_local, the newest tokens, of which every entry is kept and seen; 0 for the number
            that the gates were trained with (``gates.json``), 256 where they do not say.
        threshold: tau: an entry that leaves the window stays if g >= tau.
        gates: where the write gates lie, beside the retention gates of the same policy; empty where
            they are the only ones.
        observed: whether the policy's scorer has a window of queries that is to be as wide.
    """

    window: int = 0
    threshold: float = 0.1
    gates: str = field(default="", repr=False, compare=False)
    observed: bool = field(default=False, repr=False)

    def refused(self, position: Tensor, log_g: Tensor, seen: int) -> Tensor:
        """Bool ``[N]``: which entries the next token, of index ``seen``, may not see."""
        return (position <= seen - self.window) & ~admitted(log_g, self.threshold)


def admitted(log_g: Tensor, threshold: float) -> Tensor:
    """Return which entries stay when they leave the local window: ``g >= threshold``.

    Args:
        log_g: float32, any shape; threshold: tau, 0 admits all.
    """
    return log_g >= (math.log(threshold) if threshold > 0 else -math.inf)


def visible(
    query: Tensor, key: Tensor, log_g: Tensor, window: int, threshold: float = 0.1
) -> Tensor:
    """Return the mask of a pass under a write gate (section 4.2).

    Token i sees entry j when ``i >= j`` and either ``i - j < window`` or ``g_j >= threshold``. It
    is the same for prefill in chunks and for decoding, because an entry that was not admitted is
    out of every later token's window.

    Args:
        query: int64 ``[Q]``, positions i of the tokens in their document; key: int64 ``[N]``,
            positions j of the entries.
        log_g: float32 ``[..., N]`` of the entries.
        window: W_local, tokens that every entry stays visible for, its own included.

    Returns:
        bool ``[..., Q, N]``.
    """
    age = query[:, None] - key
    return (age >= 0) & ((age < window) | admitted(log_g, threshold)[..., None, :])
