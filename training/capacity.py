"""Compute how many entries the gates retain at each step, and the loss above the budget.

Sources: TRIM-KV (arXiv 2512.03324), eq. 5; DBTrimKV (arXiv 2605.09649), eq. 4 and section 4.1. A
token written at step i with ``log_beta[r, i]`` still counts ``exp((t - i) * log_beta[r, i])`` at
step t, so that

    S[r, t] = sum over i = start(t) .. t of exp((t - i) * log_beta[r, i]),

with one row r per layer and KV head, and start(t) the first token of t's document. Beta itself is
never formed: at a gate bias of 18, ``1 - beta = 1.5e-8`` is below float32's resolution at 1.

Time is cut into chunks of C tokens. For a query step ``t = t0 + u`` in a later chunk than i,

    exp((t - i) lb) = exp((t0 - i) lb) * exp(u lb),

both exponents <= 0: T/C + C exponentials per entry instead of T, and the sum over i becomes a
matrix product. It is the same sum, with one rounding more per term. Terms below exp(-80) are
taken as 0; every S is at least 1.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmkv.training.settings import LEAST_RATES

NEGLIGIBLE = -80.0  # exp(-80) = 2e-35 is nothing beside S >= 1, and just above the denormals
TILE = 1 << 18  # elements of one block of exponentials


def retained_counts(log_beta: Tensor, document_start: Tensor | None = None) -> Tensor:
    """Return S of the module docstring, exact, in O(R T) memory forward and backward.

    Args:
        log_beta: ``[R, T]`` float32 (float64 is allowed), finite and <= 0; may need a gradient.
        document_start: ``[T]`` int64, index of the first token of each token's document:
            non-decreasing and ``document_start[t] <= t``. None: one document.

    Returns:
        ``[R, T]`` in log_beta's dtype.

    Raises:
        ValueError: on other shapes or dtypes.
    """
    _check(log_beta, document_start)
    if log_beta.is_cuda and log_beta.dtype == torch.float32 and importlib.util.find_spec("triton"):
        from mmkv.training import capacity_triton

        return capacity_triton.retained_counts(log_beta, document_start)
    return _Retained.apply(log_beta, document_start)


def retained_total(log_beta: Tensor, document_start: Tensor | None = None) -> Tensor:
    """Return ``retained_counts(...)`` summed over rows, DBTrimKV's global S_t: ``[R, T]`` ->
    ``[T]``.

    Summing inside the matrix products instead was measured and is no faster. Arguments and errors
    as for ``retained_counts``.
    """
    return retained_counts(log_beta, document_start).sum(0)


def retained_total_grouped(
    log_beta: Tensor, document_start: Tensor | None = None, rates: int = 32
) -> Tensor:
    """Return ``retained_total``, approximately, in O(R T + T rates) time and memory.

    Beyond the papers. Each entry's decay is written as a combination of K fixed decays, cubic
    (Lagrange) in ``y = log(1 + (1 - beta) T / 2)`` between the four nearest of K equal steps from
    ``beta = 1`` to ``beta = 0``. The scale is linear where an entry outlives the sequence, so
    that gates at their first bias of 18 still get their gradient, and logarithmic elsewhere. The
    combinations are summed over rows, and each of the K sums decays by a recurrence in float64.

    Largest relative error of S, and of its gradient in L1, over spread, trained-like and constant
    gates at T = 512 .. 4096: 2e-1 and 3e-1 at K = 8, 1e-2 and 4e-2 at 16, 7e-4 and 3e-3 at 32,
    8e-5 and 4e-4 at 64 (a test holds them at T = 512).

    Args:
        log_beta, document_start: as for ``retained_counts``.
        rates: K >= 4.

    Returns:
        ``[T]`` in log_beta's dtype.

    Raises:
        ValueError: as ``retained_counts``, and for ``rates < 4``.
    """
    _check(log_beta, document_start)
    if rates < LEAST_RATES:
        raise ValueError(f"rates is {rates}; cubic interpolation needs at least {LEAST_RATES}")
    steps = log_beta.shape[1]
    unit = 2 / steps
    width = math.log1p(1 / unit) / (rates - 1)
    place = torch.log1p(-torch.expm1(log_beta) / unit) / width
    first = (place.detach().long() - 1).clamp(0, rates - 4)
    a = place - first
    b, c, d = a - 1, a - 2, a - 3
    parts = torch.cat((b * c * d / -6, a * c * d / 2, a * b * d / -2, a * b * c / 6))
    nodes = torch.cat([first + k for k in range(4)])
    added = log_beta.new_zeros(rates, steps).scatter_add(0, nodes, parts).double()

    grid = torch.arange(rates - 1, device=log_beta.device, dtype=torch.float64) * width
    decay = F.pad(torch.log1p(-unit * torch.expm1(grid)), (0, 1), value=-1e4)  # beta = 0 at last
    kept = _decayed_sums(added, decay)
    if document_start is not None:
        step = torch.arange(steps, device=log_beta.device)
        before = F.pad(kept, (1, 0))[:, document_start]
        kept = kept - before * torch.exp((step + 1 - document_start) * decay[:, None])
    return kept.sum(0).to(log_beta.dtype)


def capacity_loss(
    counts: Tensor,
    budget: float | Tensor,
    normaliser: str = "relative",
    *,
    rows: int = 1,
    document_start: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute the capacity loss of TRIM-KV (arXiv 2512.03324, eq. 5) or its global form.

    The global form is DBTrimKV's (arXiv 2605.09649, section 4.1). With
    ``hinge[t] = max(0, S_t - M)`` over documents that lie end to end:

    - ``relative``: mean over all steps of ``hinge[t] / max(seen[t] * rows - M, 1)``, the share of
      what could be over budget at t that is; ``seen[t]`` counts the tokens of t's document up to
      and with t. A longer document weighs more.
    - ``tt``: mean over documents of ``sum over t of hinge[t] / (T * max(T * rows - M, 1))``, T
      being the document's own unmasked steps; for ``rows=1`` each term is equation 5. The paper
      trains on one sequence a pass and averages over passes (appendix B.1), so every document
      weighs the same, and one that is too short to be over budget adds 0 to the mean.

    Global form: ``counts [T]`` is S_t summed over all layers and heads, ``budget`` is M_global
    (entries in the whole model) and ``rows`` is L * H. Per-head form: ``counts [R, T]``,
    ``budget`` is M (entries of one head), ``rows`` stays 1, and the loss is the mean over rows,
    so that both forms agree where every row is over budget and ``M_global = R * M``. (DBTrimKV
    writes the sum over heads: multiply by R, or lambda by R.)

    Args:
        counts: ``[T]`` or ``[R, T]`` float.
        budget: M, >= 0; ``[T]`` where documents differ in it.
        normaliser: ``relative`` or ``tt``.
        rows: entries that one token adds to ``counts``.
        document_start: as for ``retained_counts``.
        mask: ``[T]`` bool, False where a step is padding.

    Returns:
        A scalar in counts' dtype, 0 if every step is masked.

    Raises:
        ValueError: when ``normaliser`` is neither of the two.
    """
    step = torch.arange(counts.shape[-1], device=counts.device)
    start = torch.zeros_like(step) if document_start is None else document_start
    keep = torch.ones_like(step, dtype=torch.bool) if mask is None else mask
    hinge = torch.where(keep, (counts - budget).clamp(min=0), 0.0)
    if normaliser == "relative":
        scaled = hinge / ((step - start + 1) * rows - budget).clamp(min=1)
        parts = keep.sum()
    elif normaliser == "tt":
        # Each document's steps are counted at the index of its first token.
        lengths = counts.new_zeros(len(step)).index_add_(0, start, keep.to(counts.dtype))
        own = lengths[start]
        scaled = hinge / (own.clamp(min=1) * (own * rows - budget).clamp(min=1))
        parts = (lengths > 0).sum()
    else:
        raise ValueError(f"normaliser is {normaliser!r}; use 'relative' or 'tt'")
    return (scaled.sum(-1) / parts.clamp(min=1)).mean()


class _Tile(NamedTuple):
    """One block of N entries of every row.

    ``near [R, N, 2C]`` is ``exp(u lb)`` for u < C, then zeros; ``far [R, K, N]`` is
    ``exp((t0 - i) lb)`` at the first step t0 of the chunks ``later``, with ``distance [K, N]`` =
    t0 - i. ``own`` are the block's own chunks.
    """

    own: slice
    near: Tensor
    later: slice
    far: Tensor
    distance: Tensor


class _Grid:
    """Tokens in chunks of C steps, padded at the end to T'.

    Attributes:
        log_beta: ``[R, T']``; document_start: ``[T']`` or None.
        lag: ``[C]``: u = 0 .. C - 1.
        head: ``[T'/C, C]``, 1 where a step shares the document of its chunk's first step.
    """

    def __init__(self, log_beta: Tensor, document_start: Tensor | None) -> None:
        rows, steps = log_beta.shape
        self.size = size = 32 if steps <= 2048 else 64  # by measurement, as is TILE
        self.chunks = -(-steps // size)
        pad = self.chunks * size - steps
        self.log_beta = F.pad(log_beta, (0, pad), value=NEGLIGIBLE)
        self.block = max(1, TILE // (rows * size * size))
        self.lag = torch.arange(size, device=log_beta.device, dtype=log_beta.dtype)
        self.step = torch.arange(self.chunks * size, device=log_beta.device)
        self.document_start = None
        if document_start is not None:
            self.document_start = F.pad(document_start, (0, pad), value=steps)
            starts = self.document_start.view(-1, size)
            self.head = (starts == starts[:, :1]).to(log_beta.dtype)

    def tiles(self) -> Iterator[_Tile]:
        """Yield all blocks.

        Chunks that every entry of a block has left by then are not in ``later``.
        """
        size = self.size
        for first, end in zip(range(0, self.chunks, self.block), self._ends(), strict=True):
            own = slice(first, min(first + self.block, self.chunks))
            rates = self.log_beta[:, first * size : own.stop * size]
            near = rates.new_zeros(*rates.shape, 2 * size)
            exponent = torch.threshold_(rates[..., None] * self.lag, NEGLIGIBLE, -torch.inf)
            torch.exp(exponent, out=near[..., :size])
            later = slice(first + 1, max(first + 1, end))
            yield _Tile(own, near, later, *self._far(rates, first, later))

    def meets(self, own: slice, skewed: bool) -> Tensor:
        """Return ``[chunks, C, C]``: 1 where entry j and step j + v share a document."""
        span = slice(own.start * self.size, own.stop * self.size)
        entry = self.step[span].view(-1, self.size, 1)
        assert self.document_start is not None, "one document shares everything"
        start = self.document_start[span].view(-1, 1, self.size)
        if skewed:
            start = _hankel(F.pad(start.squeeze(1), (0, self.size), value=len(self.step)))
        return (start <= entry).to(self.lag.dtype)

    def _far(self, rates: Tensor, first: int, later: slice) -> tuple[Tensor, Tensor]:
        begin = self.step[later.start * self.size : later.stop * self.size : self.size, None]
        entry = self.step[first * self.size :][: rates.shape[1]]
        distance = (begin - entry).clamp(min=0).to(rates.dtype)
        far = torch.threshold_(distance * rates[:, None], NEGLIGIBLE, -torch.inf).exp_()
        if self.block > 1 or self.document_start is not None:
            seen = begin > entry
            if self.document_start is not None:
                seen &= self.document_start[begin] <= entry
            far *= seen.to(far.dtype)
        return far, distance

    def _ends(self) -> list[int]:
        """Return per block: one past the last chunk where one of its entries still counts."""
        width, total = self.block * self.size, self.chunks * self.size
        last = torch.arange(width - 1, total + width - 1, width).clamp(max=total - 1)
        slowest = torch.stack([part.amax() for part in self.log_beta.split(width, 1)])
        reach = last + (NEGLIGIBLE / slowest.double().cpu().clamp(max=-1e-30)).clamp(max=total)
        if self.document_start is not None:
            stop = torch.searchsorted(self.document_start.cpu(), last, right=True) - 1
            reach = torch.minimum(reach, stop.double())
        return (reach.long() // self.size + 1).clamp(max=self.chunks).tolist()


class _Retained(torch.autograd.Function):
    """Computes S; saves its inputs only and recomputes every exponential in the backward pass."""

    @staticmethod
    def forward(ctx: Any, log_beta: Tensor, document_start: Tensor | None) -> Tensor:
        ctx.save_for_backward(log_beta, document_start)
        grid = _Grid(log_beta, document_start)
        size = grid.size
        out = log_beta.new_zeros(len(log_beta), grid.chunks, size)
        for own, near, later, far, _ in grid.tiles():
            # Row j of `near` read j places further left: element (j, v) is exp((v - j) lb), and
            # where v < j stand the zeros that end the row before.
            skewed = near.as_strided(
                (len(near), own.stop - own.start, size, size),
                (near.stride(0), 2 * size * size, 2 * size - 1, 1),
            )
            if document_start is not None:
                skewed = skewed * grid.meets(own, skewed=False)
            out[:, own] += skewed.sum(2)
            added = far @ near[..., :size]
            if document_start is not None:
                added *= grid.head[later]
            out[:, later] += added
        return out.flatten(1)[:, : log_beta.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        log_beta, document_start = ctx.saved_tensors
        grid = _Grid(log_beta, document_start)
        size, steps = grid.size, log_beta.shape[1]
        grad = F.pad(grad, (0, grid.chunks * size - steps)).unflatten(1, (-1, size))
        reached = grad if document_start is None else grad * grid.head
        # dS/dlb = (t - i) exp(..): with t - i = (t0 - i) + u, one product for each of the parts.
        moments = torch.stack((reached, reached * grid.lag), 1)
        out = torch.zeros_like(grid.log_beta)
        for own, near, later, far, distance in grid.tiles():
            # Entry j meets step j + u: the gradient read from j places further right.
            near = near[..., :size]
            met = _hankel(F.pad(grad[:, own], (0, size))) * grid.lag
            if document_start is not None:
                met = met * grid.meets(own, skewed=True)
            part = (near * met.flatten(1, 2)).sum(-1)
            plain, lagged = (moments[:, :, later].flatten(1, 2) @ near.mT).chunk(2, 1)
            part += torch.addcmul(lagged, plain, distance).mul_(far).sum(1)
            out[:, own.start * size : own.stop * size] = part
        return out[:, :steps], None


def _hankel(padded: Tensor) -> Tensor:
    """Return ``[..., 2C]`` contiguous -> the view ``[..., C, C]`` whose element (j, u) is ``[j +
    u]``.
    """
    size = padded.shape[-1] // 2
    return padded.as_strided((*padded.shape[:-1], size, size), (*padded.stride(), 1))


def _decayed_sums(x: Tensor, decay: Tensor, size: int = 64) -> Tensor:
    """Return ``y[k, t] = exp(decay[k]) y[k, t-1] + x[k, t]`` for ``x [K, T]``, ``decay [K]``,
    float64.

    Chunks by matrix products; the chunks' last values obey the same recurrence.
    """
    steps = x.shape[1]
    lag = torch.arange(size, device=x.device)
    apart = lag[:, None] - lag
    within = torch.exp(decay[:, None, None] * apart.clamp(min=0)) * (apart >= 0)
    local = F.pad(x, (0, -steps % size)).unflatten(1, (-1, size)) @ within.mT
    if steps > size:
        carried = _decayed_sums(local[..., -1], decay * size, size)
        inherited = F.pad(carried, (1, -1))[..., None]
        local = local + inherited * torch.exp(decay[:, None, None] * (lag + 1))
    return local.flatten(1)[:, :steps]


def _check(log_beta: Tensor, document_start: Tensor | None) -> None:
    if log_beta.ndim != 2 or log_beta.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"log_beta is {log_beta.dtype} {list(log_beta.shape)}; it must be float32 [rows, T]"
        )
    if document_start is None:
        return
    if document_start.shape != log_beta.shape[1:] or document_start.dtype != torch.int64:
        raise ValueError(
            f"document_start is {document_start.dtype} {list(document_start.shape)}; it must be "
            f"int64 [{log_beta.shape[1]}]"
        )
