"""Sample the next token: settings, their checks, and the draw."""

from __future__ import annotations

import copy
import functools
import math
import random
import secrets
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from mmkv.engine.errors import InputError, NotFiniteError, require_real, require_type, require_whole
from mmkv.engine.read_ids import mask_of

if TYPE_CHECKING:
    import torch

    from mmkv.engine.backends.cuda.kernels.sample import Draw


# Below the first, logits are divided by it as differences to the greatest; a divisor below the
# second would be 0 where a processor has no denormal numbers.
_SMALL_TEMPERATURE, _LEAST_DIVISOR = 1e-6, 1e-30
# By setting: what holds, and in words.
_WHOLE = {
    "max_new_tokens": (lambda x: x >= 1, "1 or more"),
    "top_k": (lambda x: x >= 0, "0 (off) or more"),
    "seed": (lambda x: 0 <= x < 2**63, "0 or more, below 2^63"),
    "thinking_budget": (lambda x: x >= 0, "0 or more"),
}
_REAL = {
    "temperature": (lambda x: 0.0 <= x <= 100.0, "0 to 100"),
    "top_p": (lambda x: 0.0 < x <= 1.0, "above 0 and at most 1"),
    "min_p": (lambda x: 0.0 <= x <= 1.0, "0 (off) to 1"),
    # OpenAI bounds its penalties so; beyond, logits say nothing any more.
    "repetition_penalty": (lambda x: 0.0 < x <= 100.0, "above 0 and at most 100 (1: off)"),
    "presence_penalty": (lambda x: -2.0 <= x <= 2.0, "-2 to 2 (0: off)"),
    "frequency_penalty": (lambda x: -2.0 <= x <= 2.0, "-2 to 2 (0: off)"),
}


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one reply.

    Settings that are None come from the checkpoint's ``generation_config.json``
    (:attr:`mmkv.Engine.default_sampling`); what that file leaves open is 512 tokens, greedy, no
    penalties. :meth:`greedy` takes nothing from the checkpoint.

    ``temperature`` 0 takes the likeliest token and ignores ``top_k``, ``top_p`` and ``min_p``;
    ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 switch those filters off. ``min_p`` drops tokens with
    less than that share of the likeliest token's probability. ``repetition_penalty`` divides the
    logits above 0 of all tokens that the conversation has (prompts and replies, evicted or not),
    and multiplies those below; 1 is off. ``presence_penalty`` and ``frequency_penalty`` are
    subtracted from the logit of a token in this reply, once and for each time it occurs.
    ``bad_words`` holds token ids in a row that no reply has. ``seed`` None draws a fresh seed for
    each reply; ``stop`` holds strings that end the reply (they are not part of the shown text),
    beside the checkpoint's. ``thinking_budget``: tokens that a thought may have before its end is
    written for the model; None: as many as it likes.

    The order is that of transformers: penalties, bad words, temperature, top-k, top-p, min-p.
    Raises InputError when a value is out of its range, TypeError when it is of another type.
    """

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    bad_words: tuple[tuple[int, ...], ...] | None = None
    thinking_budget: int | None = None

    _may_be_none: ClassVar[Collection[str]] = {*_WHOLE, *_REAL}

    def __post_init__(self) -> None:
        # A single string would otherwise be read as its letters.
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        require_type("stop", texts, (tuple, list), "a text, or a list or tuple of texts")
        for text in texts:
            require_type("each text of stop", text, str, "a text")
        stop = tuple(texts)
        object.__setattr__(self, "stop", stop)
        if not all(stop):
            raise _wrong("stop", "an empty string", "at least one character")
        for checks, kind in ((_WHOLE, require_whole), (_REAL, require_real)):
            for name, (holds, wanted) in checks.items():
                value = getattr(self, name)
                if value is None and name in self._may_be_none:
                    continue
                kind(name, value)
                if not holds(value):
                    raise _wrong(name, value, wanted)
        if self.bad_words is not None:
            object.__setattr__(self, "bad_words", _checked_words(self.bad_words))

    @staticmethod
    def greedy(**settings: Any) -> Settled:
        """Return settings that take nothing from the checkpoint: the likeliest token, no penalties.

        ``settings``: those that differ, for example ``max_new_tokens=64``.
        """
        return Settled(**settings)

    def settled(self, defaults: Settled | None = None) -> Settled:
        """Return the settings with ``defaults`` (greedy decoding for None) where they are None."""
        known = {each.name: getattr(self, each.name) for each in fields(self)}
        given = {name: value for name, value in known.items() if value is not None}
        given |= {"stop": self.stop, "seed": self.seed}
        if defaults is not None and defaults.stop:
            given["stop"] = (
                *defaults.stop,
                *(one for one in self.stop if one not in defaults.stop),
            )
        return replace(defaults or Settled(), **given)


@dataclass(frozen=True)
class Settled(Sampling):
    """Sampling settings of one reply, all of them known; made by :meth:`Sampling.settled`."""

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()

    _may_be_none: ClassVar[Collection[str]] = {"seed", "thinking_budget"}

    def settled(self, defaults: Settled | None = None) -> Settled:
        """Return these settings: none is left open."""
        return self

    @property
    def penalises(self) -> bool:
        """Whether a token depends on those before in another way than through the model."""
        away = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(away or any(len(word) > 1 for word in self.bad_words))


def checked(sampling: Sampling | None, defaults: Settled | None = None) -> Settled:
    """Return the settings, settled by ``defaults``. Raises TypeError: they are none."""
    if sampling is not None:
        require_type("sampling", sampling, Sampling, "a mmkv.Sampling")
    return (sampling or Sampling()).settled(defaults)


def _checked_words(words: Any) -> tuple[tuple[int, ...], ...]:
    require_type("bad_words", words, (tuple, list), "a list of lists of token ids")
    for word in words:
        require_type("each of bad_words", word, (tuple, list), "a list of token ids")
        for token in word:
            require_whole("each token id of bad_words", token)
            if not 0 <= token < 2**31:
                raise _wrong("a token id of bad_words", token, "0 or more")
        if not word:
            raise _wrong("one of bad_words", "empty", "at least one token id")
    return tuple(tuple(map(int, word)) for word in words)


def _wrong(name: str, value: object, wanted: str) -> InputError:
    return InputError(f"{name} is {value}; it must be {wanted}")


class Sampler:
    """Draws token ids for one reply, with a random state of its own; none that is in ``never``.

    The generator is private, so two replies (or a batch and a single run) with the same seed draw
    the same tokens whatever else runs in the process. All work on a row of logits is numpy's, in
    one thread: a team of threads for so little waits for whoever else uses the machine.
    """

    def __init__(self, sampling: Sampling, never: Collection[int] = ()) -> None:
        self.sampling = sampling.settled()
        words = self.sampling.bad_words
        self._never = np.array(
            sorted({*never, *(word[0] for word in words if len(word) == 1)}), dtype=np.int64
        )
        self._words = [word for word in words if len(word) > 1]
        self._random = random.Random(self.sampling.seed)
        self._before = 0
        self._read: np.ndarray | None = None  # bool [vocab]
        self._counts: Counter[int] = Counter()
        self._said: list[int] = []

    def copy(self) -> Sampler:
        """Return one of its own that draws as this one would; neither changes the other."""
        made = copy.copy(self)
        made._random, made._counts = copy.copy(self._random), self._counts.copy()
        made._said, made._read = [*self._said], None if self._read is None else self._read.copy()
        return made

    def begin(self, read: int) -> None:
        """Note which ids stand before the reply (:mod:`mmkv.engine.read_ids`)."""
        self._before, self._read = read, None

    def note_token(self, token: int) -> None:
        """Note that the reply has gone on with a token."""
        if self.sampling.penalises:
            self._counts[token] += 1
            self._said.append(token)
            if self._read is not None and token < self._read.size:
                self._read[token] = True

    def draw(
        self,
        logits: torch.Tensor,
        changed: torch.Tensor | None = None,
        likeliest: tuple[float, float] | None = None,
    ) -> int:
        """Draw a token id for ``logits`` [vocab] (any float dtype, any device).

        Args:
            changed: what to draw from in their place; it may hold minus infinity.
            likeliest: index of the greatest logit and their sum, from :func:`likeliest_of`: where
                that token is drawn, it is not read from the device again.

        Raises:
            NotFiniteError: the logits hold NaN or infinity.
        """
        chosen = self.sampling
        own = changed is None or changed is logits
        if chosen.temperature == 0 and own and not chosen.penalises:
            [(token, read)] = likeliest_of(logits[None]) if likeliest is None else [likeliest]
            if not math.isfinite(read):
                raise NotFiniteError
            if int(token) not in self._never:
                return int(token)
            return int(self._allowed(_values(logits)).argmax())
        values = _values(logits)
        if not math.isfinite(_total(values)):
            raise NotFiniteError
        values = self._allowed(values if changed is None or own else _values(changed))
        if chosen.temperature == 0:
            return int(values.argmax())
        ids, weight = _likely(values, chosen)
        mass = weight.cumsum(dtype=np.float64)
        place = int(np.searchsorted(mass, self._random.random() * mass[-1], side="right"))
        if place >= mass.size:  # rounded up to the whole mass
            place = int(weight.nonzero()[0][-1])
        return place if ids is None else int(ids[place])

    def _allowed(self, values: np.ndarray) -> np.ndarray:
        """Return a copy of logits ``[vocab]`` with penalties, and bad words at minus infinity."""
        made, chosen = values.copy(), self.sampling
        if chosen.repetition_penalty != 1:
            if self._read is None:
                self._read = mask_of(self._before, made.size)
                self._read[[token for token in self._counts if token < made.size]] = True
            read = self._read.nonzero()[0]
            one, by = made[read], np.float32(chosen.repetition_penalty)
            made[read] = np.where(one < 0, one * by, one / by)
        if self._counts and (chosen.presence_penalty or chosen.frequency_penalty):
            ids = np.fromiter(self._counts, np.int64)
            times = np.fromiter(self._counts.values(), np.float32)
            made[ids] -= times * np.float32(chosen.frequency_penalty)
            made[ids] -= np.float32(chosen.presence_penalty)
        made[self._never] = -np.inf
        for *start, last in self._words:
            if self._said[len(self._said) - len(start) :] == start:
                made[last] = -np.inf
        return made

    @functools.cached_property
    def _first_draw(self) -> Draw:
        from mmkv.engine.backends.cuda.kernels.sample import Draw

        chosen = self.sampling
        return Draw(
            chosen.temperature,
            chosen.top_k,
            chosen.top_p,
            chosen.min_p,
            chosen.repetition_penalty,
            chosen.presence_penalty,
            chosen.frequency_penalty,
            seed=secrets.randbits(63) if chosen.seed is None else chosen.seed,
        )

    @property
    def draw_on_device(self) -> Draw:
        """Return the settings for ``sample`` at the next token, with one seed for this reply."""
        first = self._first_draw
        return replace(first, read=self._before).after(self._said) if first.penalises else first


def _values(logits: torch.Tensor) -> np.ndarray:
    """Return a row of logits, or several, as float32 of the host; those there are not copied."""
    return logits.detach().float().cpu().numpy()


def _total(values: np.ndarray) -> float:
    """Return the sum, which is finite only if all terms are."""
    with np.errstate(all="ignore"):
        total = float(values.sum())
    return total if math.isfinite(total) else float(values.sum(dtype=np.float64))


def likeliest_of(logits: torch.Tensor) -> list[tuple[float, float]]:
    """Return per row of ``logits [B, vocab]`` the index of its greatest and its sum, in one read.

    A sum is finite only if all its terms are.
    """
    import torch

    if logits.device.type == "cpu":
        return [(float(row.argmax()), _total(row)) for row in _values(logits)]
    both = torch.stack([logits.argmax(-1).double(), logits.sum(-1, dtype=torch.float64)], 1)
    return [(token, total) for token, total in both.tolist()]


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Compute float32 probabilities [vocab] after temperature, then top-k, top-p and min-p.

    top-p keeps the smallest set of likeliest tokens whose mass reaches ``top_p``; the likeliest
    token always stays.
    """
    import torch

    values = _values(logits)
    ids, weight = _likely(values, sampling.settled())
    made = np.zeros_like(values)
    made[slice(None) if ids is None else ids] = weight / weight.sum(dtype=np.float64)
    return torch.from_numpy(made).to(logits.device)


def _likely(values: np.ndarray, chosen: Settled) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the tokens that may be drawn from logits ``[vocab]``, and a weight for each.

    Returns:
        int64 ids, None for all of the vocabulary; float32 weights.
    """
    if chosen.temperature < _SMALL_TEMPERATURE:
        # The quotients would pass float32; their differences to the greatest may.
        divisor = np.float32(max(chosen.temperature, _LEAST_DIVISOR))
        with np.errstate(over="ignore"):
            scaled = (values - values.max()) / divisor
    else:
        scaled = values / np.float32(chosen.temperature)
    ids: np.ndarray | None = None
    if 0 < chosen.top_k < scaled.size:
        least = np.partition(scaled, scaled.size - chosen.top_k)[scaled.size - chosen.top_k]
        ids = (scaled >= least).nonzero()[0]  # those as likely as the k-th stay, too
        scaled = scaled[ids]
    weight = np.exp(scaled - scaled.max())
    if chosen.top_p < 1.0:
        mass = weight.sum(dtype=np.float64)
        # Tokens below have less than 1 - top_p together, so that those above are enough to sort.
        few = (weight > mass * (1 - chosen.top_p) / (2 * weight.size)).nonzero()[0]
        few = few[np.argsort(-weight[few], kind="stable")]
        ordered = weight[few]
        before = ordered.cumsum(dtype=np.float64) - ordered
        few = few[before < mass * chosen.top_p]
        few.sort()
        ids, weight = few if ids is None else ids[few], weight[few]
    if chosen.min_p > 0:
        kept = (weight >= np.float32(chosen.min_p) * weight.max()).nonzero()[0]
        ids, weight = kept if ids is None else ids[kept], weight[kept]
    return ids, weight
