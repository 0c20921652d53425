"""Choosing the next token inside a CUDA graph: static shapes, no host sync, no generator state.

Probabilities are held as integers (fixed point), so that every sum is exact: it depends neither
on the order of summation nor on the device, and a scan on the GPU cannot change a draw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from mmkv.engine.backends.cuda.kernels.available import in_triton
from mmkv.engine.read_ids import mask_of, with_ids


@dataclass(frozen=True)
class SamplingColumns:
    """Settings of the batch slots, as tensors on the device that replays read anew; each ``[B]``.

    Attributes:
        temperature: float32; 0 takes the likeliest token (the first of equals).
        top_k: int64; 0 is off. Tokens as likely as the k-th stay too.
        top_p: float32; 1 is off.
        min_p: float32, the least probability as a share of the likeliest token's; 0 is off.
        repetition: float32, divides positive logits of ids that were read and multiplies negative
            ones; 1 is off.
        presence, frequency: float32, taken from the logit of a token that the reply has, once and
            for each time it has it; 0 is off.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    @classmethod
    def idle(cls, batch: int, device: torch.device) -> SamplingColumns:
        """Return columns that change nothing and draw at temperature 1."""
        return columns_of([Draw()] * batch, device)[0]


@dataclass(frozen=True)
class Draw:
    """How one sequence's tokens are drawn; see :class:`SamplingColumns`.

    Attributes:
        seed: of its noise.
        read: a bit for each id that stands before the next token (:mod:`mmkv.engine.read_ids`).
        counts: how often the reply has each id so far.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    read: int = field(default=0, repr=False)
    counts: Mapping[int, int] = field(default_factory=dict, repr=False)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition != 1 or bool(self.presence or self.frequency)

    @property
    def plain(self) -> bool:
        """Whether the likeliest token by the model's own logits is taken."""
        return self.temperature == 0 and not self.penalises

    def after(self, tokens: Sequence[int]) -> Draw:
        """Return how the next token is drawn when the reply has gone on with ``tokens``."""
        if not self.penalises:
            return self
        counts = Counter(self.counts) + Counter(tokens)
        return replace(self, read=with_ids(self.read, tokens), counts=counts)


def columns_of(draws: Sequence[Draw], device: torch.device) -> tuple[SamplingColumns, Tensor]:
    """Return the draws' settings as tensors on ``device``, and their seeds ``[B]`` int64."""
    made = {
        name: torch.tensor([getattr(draw, name) for draw in draws], dtype=dtype, device=device)
        for name, dtype in _DTYPES.items()
    }
    seed = made.pop("seed")
    return SamplingColumns(**made), seed


_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition": torch.float32,
    "presence": torch.float32,
    "frequency": torch.float32,
    "seed": torch.int64,
}


@dataclass(frozen=True)
class PenaltyState:
    """What penalties look at, on the device.

    Attributes:
        read: bool ``[B, vocab]``, which ids stand before the next token.
        count: float32 ``[B, vocab]``, how often the reply has each.
    """

    read: Tensor
    count: Tensor

    @classmethod
    def empty(cls, batch: int, vocab: int, device: torch.device) -> PenaltyState:
        """Return that of sequences without a token."""
        read = torch.zeros(batch, vocab, dtype=torch.bool, device=device)
        return cls(read, torch.zeros(batch, vocab, device=device))

    def fill(self, draws: Sequence[Draw]) -> None:
        """Set the first rows to what stands before the next tokens; nothing is read back."""
        vocab = self.read.shape[1]
        for row, draw in enumerate(draws):
            if not draw.penalises:
                continue
            self.read[row] = torch.from_numpy(mask_of(draw.read, vocab)).to(self.read.device)
            # Made whole on the host: an index would have to be copied, too.
            counts = torch.zeros(vocab)
            if draw.counts:
                counts[list(draw.counts)] = torch.tensor([*draw.counts.values()]).float()
            self.count[row] = counts.to(self.count.device)

    def add(self, token: Tensor, live: Tensor) -> None:
        """Note the tokens ``[B]`` int64 of the rows that are ``live`` (bool ``[B]``)."""
        at, live = token[:, None], live[:, None]
        self.read.scatter_(1, at, self.read.gather(1, at) | live)
        self.count.scatter_add_(1, at, live.float())


def penalise(logits: Tensor, columns: SamplingColumns, said: PenaltyState) -> Tensor:
    """Return logits ``[B, vocab]`` float32 after repetition, then presence and frequency penalties.

    The first is that of CTRL (Keskar et al., arXiv 1909.05858) as transformers computes it, over
    prompt and reply; the others are OpenAI's, over the reply.
    """
    by = columns.repetition[:, None]
    logits = torch.where(said.read, torch.where(logits < 0, logits * by, logits / by), logits)
    less = said.count * columns.frequency[:, None]
    return logits - less - (said.count > 0) * columns.presence[:, None]


class Draws:
    """Draws a token for each of some sequences, step after step.

    Args:
        draws: one a sequence, before the first token.
        vocab: of the logits.
    """

    def __init__(self, draws: Sequence[Draw], vocab: int, device: torch.device) -> None:
        self._columns, self._seed = columns_of(draws, device)
        self._said: PenaltyState | None = None
        if any(draw.penalises for draw in draws):
            self._said = PenaltyState.empty(len(draws), vocab, device)
            self._said.fill(draws)

    def next(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Draw token ids ``[B]`` int64; penalties count them from then on.

        Args:
            logits: float32 ``[B, vocab]``; seen: int64 ``[B]``, tokens of each sequence so far.
        """
        if self._said is not None:
            logits = penalise(logits, self._columns, self._said)
        chosen = sample(logits, self._columns, uniform(self._seed, seen))
        if self._said is not None:
            self._said.add(chosen, torch.ones_like(chosen, dtype=torch.bool))
        return chosen

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the sequences, by their indices; the others have ended."""
        at = torch.tensor(rows, device=self._seed.device)
        of = {each.name: getattr(self._columns, each.name)[at] for each in fields(SamplingColumns)}
        self._columns, self._seed = SamplingColumns(**of), self._seed[at]
        if self._said is not None:
            self._said = PenaltyState(self._said.read[at], self._said.count[at])


def guard(logits: Tensor, never: Tensor) -> tuple[Tensor, Tensor]:
    """Make logits fit to choose a token from.

    Args:
        logits: ``[B, vocab]`` float32; rows with NaN or infinity become 0.
        never: int64 ids of tokens that are not to be chosen.

    Returns:
        the logits, and bool ``[B]``: which rows were not finite. A sum is finite only if all its
        terms are.
    """
    broken = ~logits.sum(-1).isfinite()
    fit = logits.masked_fill(broken[:, None], 0.0)
    return fit.index_fill_(-1, never, -torch.inf), broken


def uniform_reference(seed: Tensor, counter: Tensor) -> Tensor:
    """Draw the noise for :func:`sample`: a float64 in [0, 1) for each (seed, counter), both ``[B]``
    int64.

    Counter-based (SplitMix64: Steele, Lea, Flood, OOPSLA 2014), so a replay needs no generator
    and a batch slot's draws do not depend on its neighbours. The counter is the token's index.
    """
    mixed = _mix(_mix(seed) + counter * _GOLDEN)
    return _shift(mixed, 11).double() * 2.0**-53


uniform = in_triton(uniform_reference, "seed")


def sample_reference(logits: Tensor, columns: SamplingColumns, noise: Tensor) -> Tensor:
    """Draw a token per batch slot, from the distribution of :func:`mmkv.sampling.distribution`.

    Temperature, then top-k, then top-p over what top-k left (the smallest set of likeliest
    tokens that reaches ``top_p``), then min-p.

    Args:
        logits: ``[B, vocab]`` float32.
        columns: the batch slots' settings.
        noise: ``[B]`` float64 in [0, 1), as :func:`uniform` makes it.

    Returns:
        token ids ``[B]`` int64.
    """
    vocab = logits.shape[-1]
    values, token = logits.sort(stable=True, dim=-1, descending=True)
    weight = weights_of(values, values[:, :1], columns.temperature)
    by_k = (columns.top_k > 0) & (columns.top_k < vocab)
    last = torch.where(by_k, columns.top_k, vocab) - 1
    weight = weight * ((values >= values.gather(1, last[:, None])) | ~by_k[:, None])
    before, mass = weight.cumsum(-1) - weight, weight.sum(-1, keepdim=True)
    top_p = columns.top_p[:, None].double()
    kept = (before < (mass * top_p).ceil().long()) | (top_p >= 1)
    kept &= weight >= columns.min_p[:, None].double() * weight[:, :1]
    running = (weight * kept).cumsum(-1)
    total = running[:, -1]
    place = (noise * total).long().clamp(max=total - 1)
    drawn = token.gather(1, torch.searchsorted(running, place[:, None], right=True))[:, 0]
    return torch.where(columns.temperature > 0, drawn, logits.argmax(-1))


sample = in_triton(sample_reference, "logits")


def weights_of(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Return the weights of logits ``[B, vocab]``, int64; ``highest [B, 1]``: the greatest."""
    heat = temperature[:, None]
    # Dividing the difference keeps the smallest temperatures finite. At 0 nothing is drawn.
    heat = torch.where(heat > 0, heat, 1.0)
    return (((logits - highest) / heat).exp() * float(greatest_weight(logits.shape[-1]))).long()


def greatest_weight(vocab: int) -> int:
    """Return the weight of the likeliest token: a sum of ``vocab`` of them stays in range."""
    return 1 << (62 - (vocab - 1).bit_length())


_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as a signed integer


def _mix(x: Tensor) -> Tensor:
    """Apply SplitMix64's finaliser to int64, whose products wrap."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
