"""The gated delta rule in torch: its short convolution, one step, and a chunk of a prompt.

A value head keeps a matrix ``S [dk, dv]`` in place of cached entries (Yang et al., arXiv
2412.06464). A token with key k, value v, decay g <= 0 (in log space) and rate beta changes and
reads it:

    S <- exp(g) S;  delta = beta (v - S^T k);  S <- S + k delta^T;  o = S^T q

All of it is float32. Queries and keys come as the convolution leaves them: each function here
divides them by their length (:data:`EPS` under the root) and queries by the root of dk besides.
Each key head serves the ``Hv / Hk`` value heads that follow each other. Beside the chunk's
blockwise form stands a reference that takes token after token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # added to the squared length of a query or key
BLOCK = 64  # tokens that are computed together


def causal_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its last K tokens, then SiLU; in float32.

    Args:
        x: ``[T, C]``; weight: ``[C, K]``, the newest token's last.
        state: ``[C, K - 1]``, the tokens before ``x``, oldest first; zeros where there were none.

    Returns:
        ``[T, C]`` in ``x``'s dtype, and the state after it, a new tensor of the state's dtype.
    """
    past = state.shape[1]
    wide = torch.cat([state.float(), x.float().T], 1)
    made = F.silu(F.conv1d(wide[None], weight.float()[:, None], groups=len(weight))[0])
    return made.T.to(x.dtype), wide[:, wide.shape[1] - past :].to(state.dtype, copy=True)


def conv_step(x: Tensor, weight: Tensor, states: Tensor, slot: Tensor) -> Tensor:
    """Compute :func:`causal_conv` of one token of each of B sequences.

    Args:
        x: ``[B, C]``; weight: ``[C, K]``.
        states: ``[slots, C, K - 1]``; slot: ``[B]`` int64, all different: these are updated in
            place.

    Returns:
        ``[B, C]`` in ``x``'s dtype.
    """
    wide = torch.cat([states[slot].float(), x.float()[..., None]], -1)
    states[slot] = wide[..., 1:].to(states.dtype)
    return F.silu((wide * weight.float()).sum(-1)).to(x.dtype)


def delta_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slot: Tensor
) -> Tensor:
    """Take one token of each of B sequences.

    Args:
        q, k: ``[B, Hk, dk]``; v: ``[B, Hv, dv]``; g, beta: ``[B, Hv]`` float32.
        states: ``[slots, Hv, dk, dv]`` float32; slot: ``[B]`` int64, all different: these are
            updated in place.

    Returns:
        ``[B, Hv, dv]`` in ``v``'s dtype.
    """
    q, k = _prepared(q, k, v.shape[1])
    state = states[slot] * g.float().exp()[..., None, None]
    seen = (k[..., None, :] @ state)[..., 0, :]
    delta = (v.float() - seen) * beta.float()[..., None]
    state += k[..., None] * delta[..., None, :]
    states[slot] = state
    return (q[..., None, :] @ state)[..., 0, :].to(v.dtype)


def delta_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Take T tokens of one sequence, :data:`BLOCK` of them at a time.

    With G the running sum of g inside a block, A_ti = exp(G_t - G_i), and S what was there before
    it, the deltas of the block solve a triangular system, and the rest is products of matrices:

        delta_t + beta_t sum_{i<t} A_ti (k_t . k_i) delta_i = beta_t (v_t - exp(G_t) S^T k_t)
        o_t = exp(G_t) S^T q_t + sum_{i<=t} A_ti (q_t . k_i) delta_i

    No exponent is above 0, so nothing overflows; G is float64. Results differ from those of token
    after token, or of any other split into chunks, by rounding: within 1e-5 of the largest number.

    Args:
        q, k: ``[T, Hk, dk]``; v: ``[T, Hv, dv]``; g, beta: ``[T, Hv]`` float32.
        state: ``[Hv, dk, dv]`` float32, not changed.

    Returns:
        ``[T, Hv, dv]`` in ``v``'s dtype, and the state after it.
    """
    dtype, tokens = v.dtype, len(v)
    q, k = (x.transpose(0, 1) for x in _prepared(q, k, v.shape[1]))
    v, g, beta = v.float().transpose(0, 1), g.float().T, beta.float().T[..., None]
    out, state = v.new_empty(v.shape), state.clone()
    for first in range(0, tokens, BLOCK):
        part = slice(first, first + BLOCK)
        # A head that forgets at once has sums in the thousands, of which float32 keeps 3 digits.
        total = g[:, part].double().cumsum(1)
        key, since_start = k[:, part], total.exp().float()[..., None]
        left = (total[:, -1:] - total).float().exp()[..., None]
        between = (total[:, :, None] - total[:, None]).float().tril().exp().tril()
        system = beta[:, part] * between * (key @ key.mT)
        wanted = beta[:, part] * (v[:, part] - since_start * (key @ state))
        delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        query = q[:, part]
        out[:, part] = since_start * (query @ state) + (between * (query @ key.mT)) @ delta
        state = since_start[:, -1:] * state + (key * left).mT @ delta
    return out.transpose(0, 1).to(dtype), state


def delta_chunk_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute :func:`delta_chunk` token after token: the reference."""
    states, slot, out = state.clone()[None], torch.zeros(1, dtype=torch.int64), torch.empty_like(v)
    slot = slot.to(state.device)
    for token in range(len(v)):
        now = slice(token, token + 1)
        out[now] = delta_step(q[now], k[now], v[now], g[now], beta[now], states, slot)
    return out, states[0]


def _prepared(q: Tensor, k: Tensor, value_heads: int) -> tuple[Tensor, Tensor]:
    """Return unit queries over the root of dk and unit keys, one per value head, float32."""
    q, k = (x.float() for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt() for x in (q, k))
    group = value_heads // k.shape[-2]
    return (q * q.shape[-1] ** -0.5).repeat_interleave(group, -2), k.repeat_interleave(group, -2)


@dataclass(frozen=True)
class DeltaFunctions:
    """What a layer computes with; torch's own, unless a backend has others."""

    causal_conv: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = causal_conv
    conv_step: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = conv_step
    delta_step: Callable[..., Tensor] = delta_step
    delta_chunk: Callable[..., tuple[Tensor, Tensor]] = delta_chunk
