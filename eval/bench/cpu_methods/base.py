"""What every method of the comparison on a CPU can do."""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Every how many-th logit is compared between methods.
SAMPLE = 64
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Job:
    """What a process is started with.

    Attributes:
        method: a name of :data:`METHODS`; weights: their form: bf16, int8, f16 or q8_0.
        model: checkpoint folder; gguf: the same weights as a GGUF file, for llama.cpp.
        threads: of what is timed; preparing: threads of what is not.
        longest: most tokens that one sequence will hold; short: that each of several will.
        budget: entries per layer and KV head of methods that evict; policy, gates, kv: of mmkv.
    """

    method: str
    weights: str
    model: str
    gguf: str
    threads: int
    preparing: int
    longest: int
    short: int
    budget: int
    policy: str
    gates: str | None
    kv: str


class Method(ABC):
    """A model with some sequences in its cache."""

    packages: tuple[str, ...] = ()

    def __init__(self, job: Job) -> None:
        self.job = job
        self.held: list[list[int]] = []

    def hold(self, prompts: Prompts) -> None:
        """Have ``prompts`` in the cache; one that continues what is held reads the rest alone."""
        wanted = [list(prompt) for prompt in prompts]
        starts = [wanted[i][: len(seen)] == seen for i, seen in enumerate(self.held[: len(wanted)])]
        if len(self.held) != len(wanted) or not all(starts) or not self.extends:
            self.forget(len(wanted))
            self.held = [[] for _ in wanted]
        rest = [new[len(seen) :] for new, seen in zip(wanted, self.held, strict=True)]
        if any(rest):
            self.append(rest)
        self.held = wanted

    def read(self, prompt: Sequence[int]) -> None:
        """Read one prompt into an empty cache, logits of its last token included."""
        self.append([prompt])
        self.held = [list(prompt)]

    extends = True

    @abstractmethod
    def use(self, threads: int) -> None:
        """Compute with so many threads from now on."""

    @abstractmethod
    def forget(self, count: int) -> None:
        """Hold ``count`` empty sequences."""

    @abstractmethod
    def append(self, prompts: Prompts) -> None:
        """Append a prompt to every sequence."""

    @abstractmethod
    def decode(self, steps: int) -> list[list[int]]:
        """Append the likeliest token to every sequence, ``steps`` times.

        Returns:
            those of each step, and the ones after the last.
        """

    @abstractmethod
    def before(self) -> None:
        """Prepare :meth:`decode`; not timed."""

    @abstractmethod
    def after(self) -> None:
        """Take back what :meth:`decode` appended; not timed."""

    @abstractmethod
    def logits(self) -> list[float]:
        """Return every 64th logit behind the last prompt that was read."""

    def about(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {name: importlib.metadata.version(name) for name in self.packages}
