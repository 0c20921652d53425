"""The options of ``mmkv chat``, checked before anything heavy is imported."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.errors import InputError

if TYPE_CHECKING:
    from engine.policies.budget import Budget
    from mmkv.sampling import Sampling

DEFAULT_BUDGET = 256
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


class UsageError(Exception):
    """The command line itself is wrong (exit code 2)."""


@dataclass
class ChatOptions:
    """What was asked for on the command line, one field per option."""

    model: str | None
    prompt: str | None
    interactive: bool
    system: str | None
    image: list[str]
    video: list[str]
    fps: float | None
    num_frames: int | None
    min_pixels: int | None
    max_pixels: int | None
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: list[str] | None
    policy: str | None
    budget: float | None
    budget_bytes: str | None
    budget_fraction: float | None
    lookahead: float
    evict_every: int
    prefill_chunk: int
    page_size: int
    gates: str | None
    device: str
    dtype: str
    no_stream: bool
    json: bool
    quiet: bool

    def check(self) -> None:
        """Raise UsageError for options that contradict each other or are out of range."""
        budgets = (self.budget, self.budget_bytes, self.budget_fraction)
        if sum(given is not None for given in budgets) > 1:
            raise UsageError(
                "--budget, --budget-bytes and --budget-fraction exclude each other; give one"
            )
        if self.budget_bytes is not None:
            parse_bytes(self.budget_bytes)
        if self.fps is not None and self.num_frames is not None:
            raise UsageError("--fps and --num-frames exclude each other; give one")
        try:
            self.sampling()
        except InputError as error:
            raise UsageError(str(error)) from error

    def sampling(self) -> Sampling:
        """The sampling settings. Raises InputError."""
        from mmkv.sampling import Sampling

        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=tuple(self.stop or ()),
        )

    def chosen_budget(self) -> Budget:
        """The budget in the unit it was given in. Raises BudgetError."""
        from engine.policies.budget import Budget

        if self.budget_bytes is not None:
            return Budget.of(Budget.bytes(parse_bytes(self.budget_bytes)))
        if self.budget_fraction is not None:
            return Budget.of(Budget.fraction(self.budget_fraction))
        return Budget.of(DEFAULT_BUDGET if self.budget is None else self.budget)


def parse_bytes(text: str) -> int:
    """Bytes from text such as 4096, 64MiB, 1.5 GB. Raises UsageError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{text!r} is not an amount of memory; write for example 64MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_budget(text: str) -> Budget:
    """A budget typed in the conversation: 256, 25%, 64MiB. Raises InputError, BudgetError."""
    from engine.policies.budget import Budget

    try:
        if text.endswith("%"):
            return Budget.of(Budget.fraction(float(text[:-1]) / 100))
        if text[-1:].lower() == "b":
            return Budget.of(Budget.bytes(parse_bytes(text)))
        return Budget.of(float(text))
    except (ValueError, UsageError) as error:
        raise InputError(
            f"{text!r} is not a budget; write entries per row (256), a share (25%) or bytes (64MiB)"
        ) from error
