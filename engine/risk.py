"""How much of what a session has read it has forgotten, by what its retention gates predict.

An entry of retention beta and age a still weighs ``beta^a``, held or not: retention gates are
trained to predict what later queries would pay to it. The share of the predicted weight whose
entries are gone is the session's risk (:data:`mmkv.engine.budget.RISK` says it to users)::

    r = forgotten / (forgotten + held)

Evicted entries are not kept, so their weight is added up as it comes: a :class:`RiskMeter` counts
the entries that are *written*, in bins of log beta, each of which decays by its own beta. What is
written and no longer held is forgotten, whoever dropped it, so no backend has to say what it
evicts; what is held is read from the cache when somebody asks.

The rates ``-log beta`` of the bins lie 16 to the octave, from 2^-24 to 2^4 and one at 0, and an
entry is shared by the two beside its own, linearly in the logarithm. With ``x = -a log beta`` and
``h = ln 2 / 16`` its weight ``e^-x`` is wrong by at most ``e^-x |x^2 - x| h^2 / 8``: 0.0001 of a
fresh entry's, 0.1 % of its own while it weighs more than a tenth, 0.5 % at e^-5, 2 % at e^-10.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmkv.engine.budget import Dial
from mmkv.engine.contents import MODALITIES
from mmkv.engine.policies.allocation import GlobalAllocation
from mmkv.engine.policies.base import CacheView, Policy

_LEAST, _MOST, _EACH = -24, 4, 16  # octaves of -log beta, and bins of one
BINS = (_MOST - _LEAST) * _EACH + 2
# Tokens that wait to be counted: a step of decoding notes where its log betas lie, no more.
_WAITING = 256
_LEAST_WEIGHT = 1e-6  # of a modality that is told of
_REMEMBERED = 4  # earlier states of a meter, for sessions that are cut back


@dataclass(frozen=True)
class Risk:
    """What a session has forgotten, as its gates predict it.

    Attributes:
        total: ``forgotten / (forgotten + held)``, in 0..1; 0 where nothing has any weight.
        by_modality: the same of each modality whose entries, held or not, weigh 1e-6 at least.
        forgotten, held: predicted weight of entries, where a fresh one of beta 1 weighs 1.
    """

    total: float
    by_modality: dict[str, float]
    forgotten: float
    held: float


def exact_risk(log_beta: Tensor, age: Tensor, modality: Tensor, held: Tensor) -> Risk:
    """Compute the risk from all entries ever written: the reference of :class:`RiskMeter`.

    Args:
        log_beta: float32 ``[N]``; age: ``[N]``, tokens seen minus token index: the newest has 1.
        modality: ``[N]`` uint8; held: bool ``[N]``, which the cache still holds.
    """
    weight = torch.exp(age.double() * log_beta.double())
    parts = [
        (weight[(modality == kind) & held], weight[(modality == kind) & ~held])
        for kind in range(len(MODALITIES))
    ]
    return _risk([(float(there.sum()), float(gone.sum())) for there, gone in parts])


def entries_needed(risk: Risk, dial: Dial, view: CacheView, policy: Policy) -> tuple[int, int]:
    """Count the entries that have to stay so that the risk is at most the dial's; at most half.

    An eviction drops the entries with the lowest scores, so what it does to the risk is known.

    Args:
        risk: of the sequence now; view: its entries.

    Returns:
        both counts, of all rows together; more than there are where the risk is above the dial's
        already.
    """
    scores = policy.scores(view, dial.allowed).value
    weights = (view.log_beta * (view.seen - view.position)).double().exp()
    total = risk.forgotten + weights.sum()
    marks = torch.stack([dial.risk * total, dial.risk / 2 * total])
    every = scores.numel()
    if policy.shares(dial.allowed, view.layers, view.kv_heads).share.numel() > 1:
        every = view.rows * int(view.length.max())  # what leaves the longest row whole
    if risk.total > dial.risk:  # all stay, and one more
        return every + 1, every + 1
    if type(policy.allocation) is GlobalAllocation:
        gone = risk.forgotten + weights[scores.argsort()].cumsum(0)
        enough, plenty = (every - torch.searchsorted(gone, marks, right=True)).tolist()
        return enough, plenty
    # Which entries go depends on the rows' shares of the budget.
    budgets = range(dial.least, min(every, dial.most + 1))

    def minus_gone(budget: int) -> float:
        victims = policy.lowest(scores, view, budget)
        return -risk.forgotten - float(weights[victims].sum())

    enough, plenty = (
        dial.least + bisect_left(budgets, -mark, key=minus_gone) for mark in marks.tolist()
    )
    return enough, plenty


class RiskMeter:
    """Adds up the predicted weight of all entries that are written to one sequence.

    No method but :meth:`risk` waits for a device.

    Attributes:
        tokens: that it has counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(MODALITIES), BINS, dtype=torch.float64, device=device)
        self._at = 0  # tokens in the sums, which are of the age that the newest has then
        # What is not in them yet: tensors, modalities, first and last step, index of the sequence.
        self._parts: list[list[Any]] = []
        self.tokens = 0
        self._before: dict[int, Tensor] = {}

    def add(self, log_beta: Tensor, modality: Tensor | None = None) -> None:
        """Count the entries of tokens that follow those counted.

        Args:
            log_beta: float32 ``[T, ...]`` of all rows, which must not change any more.
            modality: ``[T]`` uint8; None: all are text.
        """
        self._parts.append([log_beta, modality, 0, log_beta.shape[0], None])
        self.tokens += log_beta.shape[0]
        if self.tokens - self._at >= _WAITING:
            self._fold()

    def step(self, log_beta: Tensor, step: int, index: int) -> None:
        """Count the entries of a text token that follows those counted.

        Args:
            log_beta: float32 ``[S, B, ...]`` of S steps and B sequences, of all rows; what has been
                written must not change any more.
            step, index: which of the steps and sequences.
        """
        parts = self._parts
        last = parts[-1] if parts else None
        if last is not None and last[0] is log_beta and last[3] == step and last[4] == index:
            last[3] += 1
        else:
            parts.append([log_beta, None, step, step + 1, index])
        self.tokens += 1
        if self.tokens - self._at >= _WAITING:
            self._fold()

    @torch.inference_mode()
    def remove(self, log_beta: Tensor, position: Tensor, modality: Tensor) -> None:
        """Take entries out that somebody has dropped on purpose: float32, int64, uint8 ``[N]``.

        They are gone from what it can go back to, too.
        """
        self._fold()

        def without(sums: Tensor, tokens: int) -> Tensor:
            there = position < tokens
            age = tokens - position[there]
            return _add(sums, log_beta[there], age, modality[there], -1).clamp(min=0)

        self._sums = without(self._sums, self._at)
        self._before = {at: without(sums, at) for at, sums in self._before.items()}

    @torch.inference_mode()
    def refill(self, log_beta: Tensor, position: Tensor, modality: Tensor, tokens: int) -> None:
        """Count the entries of the first ``tokens`` tokens: float32, int64, uint8 ``[N]``."""
        self._sums = _add(torch.zeros_like(self._sums), log_beta, tokens - position, modality)
        self._at, self.tokens, self._parts = tokens, tokens, []

    def remember(self) -> None:
        """Be able to :meth:`go_back` to here; the latest few such places are kept."""
        self._fold()
        self._before.pop(self.tokens, None)
        self._before[self.tokens] = self._sums
        while len(self._before) > _REMEMBERED:
            del self._before[next(iter(self._before))]

    def go_back(self, tokens: int) -> bool:
        """Forget all but the first ``tokens``; False, and nothing has changed: not remembered."""
        if tokens not in self._before:
            return False
        self._sums, self._at, self._parts = self._before[tokens], tokens, []
        self.tokens = tokens
        self._before = {at: kept for at, kept in self._before.items() if at <= tokens}
        return True

    def copy(self) -> RiskMeter:
        """Return one that counts on by itself."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._parts, other._before = [part[:] for part in self._parts], dict(self._before)
        return other

    def __eq__(self, other: object) -> bool:
        """Whether both have counted the same, but for the rounding of the gates, shared by bins."""
        if not isinstance(other, RiskMeter) or self.tokens != other.tokens:
            return False
        return torch.allclose(self.export(), other.export(), rtol=1e-3, atol=1e-3)

    def export(self) -> Tensor:
        """Return what it has added up, float64 ``[modalities, BINS]`` on the CPU."""
        self._fold()
        return self._sums.cpu().clone()

    @classmethod
    def load(cls, sums: Tensor, tokens: int, device: torch.device) -> RiskMeter:
        """Make one of what :meth:`export` gave after so many tokens."""
        made = cls(device)
        made._sums, made._at, made.tokens = sums.to(device), tokens, tokens
        return made

    @torch.inference_mode()
    def risk(self, log_beta: Tensor, position: Tensor, modality: Tensor) -> Risk:
        """Compute the risk; the entries that the cache holds now are float32, int64, uint8 ``[N]``.

        It reads all of them, and waits for the device.
        """
        self._fold()
        age = self._at - position
        zero = self._sums.new_zeros(len(MODALITIES))
        kind = modality.long()
        exact = torch.exp(age * _known(log_beta))
        held = zero.index_add(0, kind, exact)
        lower, share = _place(log_beta)
        rates = _rates(log_beta.device)
        near = torch.exp(-rates[lower] * age) * (1 - share) + torch.exp(-rates[lower + 1] * age) * (
            share
        )
        # By the same rule for what is written and what is held: no error stays of what is there.
        gone = (self._sums.sum(1) - zero.index_add(0, kind, near)).clamp(min=0)
        every = self._sums.sum(1)
        gone = gone.masked_fill(gone <= 1e-9 * every, 0.0)  # what rounding leaves
        return _risk(torch.stack([held, gone], 1).tolist())

    @torch.inference_mode()
    def _fold(self) -> None:
        """Bring what waits into the sums, which then are of the present age."""
        past = self.tokens - self._at
        if not past:
            return
        sums = self._sums * torch.exp(_rates(self._sums.device) * -past)
        first, waiting = self._at, list[Tensor]()
        for log_beta, modality, start, stop, index in self._parts:
            own = log_beta[start:stop] if index is None else log_beta[start:stop, index]
            if modality is None:
                waiting.append(own.flatten(1))
                continue
            if waiting:
                sums, first = self._added(sums, torch.cat(waiting), first, None)
                waiting = []
            sums, first = self._added(sums, own.flatten(1), first, modality)
        if waiting:
            sums, first = self._added(sums, torch.cat(waiting), first, None)
        self._sums, self._at, self._parts = sums, self.tokens, []

    def _added(
        self, sums: Tensor, log_beta: Tensor, first: int, modality: Tensor | None
    ) -> tuple[Tensor, int]:
        """Add tokens ``[T, rows]``, the first of them having that token index, and count on."""
        count, rows = log_beta.shape
        newest = self.tokens - first
        age = torch.arange(newest, newest - count, -1, device=log_beta.device)
        each = age[:, None].expand(-1, rows).flatten()
        if modality is not None:
            modality = modality[:, None].expand(-1, rows).flatten()
        return _add(sums, log_beta.flatten(), each, modality), first + count


def _add(
    sums: Tensor, log_beta: Tensor, age: Tensor, modality: Tensor | None, sign: int = 1
) -> Tensor:
    """Return ``sums`` with entries ``[N]`` added at their ages."""
    lower, share = _place(log_beta)
    rates = _rates(log_beta.device)
    row = lower if modality is None else lower + modality.long() * BINS
    flat = sums.flatten()
    weight = torch.exp(-rates[lower] * age) * (1 - share)
    flat = flat.index_add(0, row, weight, alpha=sign)
    weight = torch.exp(-rates[lower + 1] * age) * share
    return flat.index_add(0, row + 1, weight, alpha=sign).view_as(sums)


def _place(log_beta: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bin below each of ``log_beta [N]``, int64, and the share of the one above."""
    rate = -_known(log_beta)
    place = (rate.log2() - _LEAST) * _EACH + 1
    place = torch.where(place >= 1, place, rate * 2.0**-_LEAST).clamp(0, BINS - 1)
    lower = place.long().clamp(max=BINS - 2)
    return lower, place - lower


def _known(log_beta: Tensor) -> Tensor:
    """Return float64; what is no number, of a model whose states have broken, weighs nothing."""
    return log_beta.double().nan_to_num(nan=-torch.inf, neginf=-torch.inf)


_RATES: dict[torch.device, Tensor] = {}


def _rates(device: torch.device) -> Tensor:
    """Float64 ``[BINS]``: -log beta of each."""
    if device not in _RATES:
        octaves = _LEAST + torch.arange(BINS - 1, dtype=torch.float64) / _EACH
        _RATES[device] = torch.cat([torch.zeros(1, dtype=torch.float64), octaves.exp2()]).to(device)
    return _RATES[device]


def _risk(parts: list[tuple[float, float]]) -> Risk:
    """Make a risk of (held, forgotten) of each modality."""
    held, forgotten = (sum(part[i] for part in parts) for i in (0, 1))
    return Risk(
        forgotten / (forgotten + held) if forgotten + held else 0.0,
        {
            name: gone / (there + gone)
            for name, (there, gone) in zip(MODALITIES, parts, strict=True)
            if there + gone >= _LEAST_WEIGHT
        },
        forgotten,
        held,
    )
