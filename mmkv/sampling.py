"""Sample the next token: settings, their checks, and the draw."""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.checks import require_real, require_type, require_whole
from engine.errors import InputError, NotFiniteError

if TYPE_CHECKING:
    import torch

    from engine.backends.cuda.kernels.sample import Draw


# Below the first, logits are divided by it as differences to the greatest; a divisor below the
# second would be 0 where a processor has no denormal numbers.
_SMALL_TEMPERATURE, _LEAST_DIVISOR = 1e-6, 1e-30


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one reply. The default is greedy decoding.

    ``temperature`` 0 takes the likeliest token and ignores ``top_p`` and ``top_k``; ``top_k`` 0
    and ``top_p`` 1 switch those filters off; ``seed`` None draws a fresh seed for each reply;
    ``stop`` holds strings that end the reply (they are not part of the shown text).
    Raises InputError when a value is out of its range, TypeError when it is of another type.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # A single string would otherwise be read as its letters.
        texts = (self.stop,) if isinstance(self.stop, str) else self.stop
        require_type("stop", texts, (tuple, list), "a text, or a list or tuple of texts")
        for text in texts:
            require_type("each text of stop", text, str, "a text")
        stop = tuple(texts)
        object.__setattr__(self, "stop", stop)
        for name in ("max_new_tokens", "top_k", *(["seed"] if self.seed is not None else [])):
            require_whole(name, getattr(self, name))
        for name in ("temperature", "top_p"):
            require_real(name, getattr(self, name))
        _require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        _require(0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "0 to 100")
        _require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "0 (off) or more")
        _require(
            self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "0 or more, below 2^63"
        )
        _require(all(stop), "stop", "an empty string", "at least one character")


def checked(sampling: Sampling | None) -> Sampling:
    """Return the settings, greedy decoding for None. Raises TypeError: they are none."""
    if sampling is not None:
        require_type("sampling", sampling, Sampling, "a mmkv.Sampling")
    return sampling or Sampling()


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise InputError(f"{name} is {value}; it must be {wanted}")


class Sampler:
    """Draws token ids for one reply, with a random state of its own; none that is in ``never``.

    The generator is private, so two replies (or a batch and a single run) with the same seed draw
    the same tokens whatever else runs in the process.
    """

    def __init__(self, sampling: Sampling, never: Collection[int] = ()) -> None:
        self.sampling, self._never = sampling, sorted(never)
        self._generator: torch.Generator | None = None

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
        import torch

        if self.sampling.temperature == 0 and (changed is None or changed is logits):
            [(token, read)] = likeliest_of(logits[None]) if likeliest is None else [likeliest]
            _require_finite(read)
            return int(token) if token not in self._never else int(self._allowed(logits).argmax())
        # A sum is finite only if all its terms are; it is read together with the token.
        total = logits.sum(dtype=torch.float64)[None]
        logits = logits if changed is None else changed
        if self.sampling.temperature == 0:
            token, read = torch.cat([logits.argmax()[None].double(), total]).tolist()
            _require_finite(read)
            return int(token) if token not in self._never else int(self._allowed(logits).argmax())
        if self._generator is None:
            self._generator = torch.Generator()  # on the CPU: the same draws for every device
            if self.sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.sampling.seed)
        probabilities = distribution(self._allowed(logits), self.sampling)
        both = torch.cat([probabilities, total.float()]).cpu()
        _require_finite(float(both[-1]))
        return int(torch.multinomial(both[:-1], 1, generator=self._generator))

    def _allowed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits with those of tokens that are never drawn at minus infinity."""
        import torch

        if not self._never:
            return logits
        return logits.index_fill(0, torch.tensor(self._never, device=logits.device), -torch.inf)

    @functools.cached_property
    def draw_on_device(self) -> Draw:
        """Return the settings for ``sample``, with a seed for this reply."""
        from engine.backends.cuda.kernels.sample import Draw

        chosen = self.sampling
        seed = secrets.randbits(63) if chosen.seed is None else chosen.seed
        return Draw(chosen.temperature, chosen.top_k, chosen.top_p, seed=seed)


def likeliest_of(logits: torch.Tensor) -> list[tuple[float, float]]:
    """Return per row of ``logits [B, vocab]`` the index of its greatest and its sum, in one read.

    A sum is finite only if all its terms are.
    """
    import torch

    both = torch.stack([logits.argmax(-1).double(), logits.sum(-1, dtype=torch.float64)], 1)
    return [(token, total) for token, total in both.tolist()]


def _require_finite(total: float) -> None:
    if not math.isfinite(total):
        raise NotFiniteError


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Compute float32 probabilities [vocab] after temperature, then top-k, then top-p.

    top-p keeps the smallest set of likeliest tokens whose mass reaches ``top_p``; the likeliest
    token always stays.
    """
    import torch

    scaled = logits.float()
    if sampling.temperature < _SMALL_TEMPERATURE:
        # The quotients would pass float32; their differences to the greatest may.
        scaled = (scaled - scaled.max()) / max(sampling.temperature, _LEAST_DIVISOR)
    else:
        scaled = scaled / sampling.temperature
    if 0 < sampling.top_k < scaled.numel():
        threshold = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    probabilities = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        ordered, order = probabilities.sort(descending=True, stable=True)
        mass_before = ordered.cumsum(-1) - ordered
        probabilities[order[mass_before >= sampling.top_p]] = 0.0
        probabilities = probabilities / probabilities.sum()
    return probabilities
