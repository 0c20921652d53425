"""Sampling that OpenAI's API adds, log probabilities, biases and grammars, and tokens as text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import BROKEN
from mmkv.grammar import ReplyRules
from mmkv.reply import ReplyWriter, token_bytes

if TYPE_CHECKING:
    import torch

    from mmkv.calls.parser import ThoughtMarks
    from mmkv.grammar import Constraint
    from mmkv.sampling import Sampling


@dataclass(frozen=True)
class LogitSettings:
    """What is done with the logits of each token.

    Attributes:
        top_logprobs: how many of the likeliest tokens are reported; None: no log probabilities.
        bias: added to logits, by token id.
        rules: what the reply has to follow.
        stop_tokens: ids that end a reply, beside the model's own.
    """

    top_logprobs: int | None = None
    bias: dict[int, float] = field(default_factory=dict)
    rules: ReplyRules = field(default_factory=ReplyRules)
    stop_tokens: frozenset[int] = frozenset()

    @property
    def changes(self) -> bool:
        """Whether another token may be drawn."""
        return bool(self.bias) or self.rules.bind


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its natural log probability; ``top``: the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ScoredWriter(ReplyWriter):
    """Writes a reply and applies :class:`LogitSettings`.

    Attributes:
        scored: a row per token of the reply that was not taken yet, when log probabilities were
            asked for. They are those of the model: before bias, penalties, grammar, temperature,
            top-p and top-k.
    """

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        eos: Collection[int],
        logit_settings: LogitSettings,
        constraint: Constraint | None = None,
        never: Collection[int] = (),
        shown: Collection[int] = (),
        marks: ThoughtMarks | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        ends = {*eos, *logit_settings.stop_tokens}
        super().__init__(tokenizer, sampling, ends, never, constraint, shown, marks, prompt)
        self._logit_settings = logit_settings
        self._looks |= logit_settings.changes or logit_settings.top_logprobs is not None
        self._looks |= bool(logit_settings.stop_tokens)
        self._own_ends = logit_settings.stop_tokens - {*eos}
        self._ended_at: int | None = None  # which of those ended it
        self.scored: list[TokenLogprob] = []
        self._scored_taken = 0
        self._added: torch.Tensor | None = None  # to the logits [vocab]

    def take_scored(self) -> list[TokenLogprob]:
        """Return the rows that are new since the last call."""
        count = len(self.token_ids) - self._scored_taken
        taken, self.scored = self.scored[:count], self.scored[count:]
        self._scored_taken += len(taken)
        return taken

    def choose(self, logits: torch.Tensor, likeliest: tuple[float, float] | None = None) -> int:
        """Sample a token from ``logits`` [vocab], and note its log probability."""
        import torch

        token = super().choose(logits, likeliest)
        if token == BROKEN:
            return BROKEN
        if self._logit_settings.top_logprobs is not None:
            logprobs = logits.float().log_softmax(-1)
            best = logprobs.topk(min(self._logit_settings.top_logprobs, logprobs.numel()))
            # All in one read: float64 holds token ids and float32 as they are.
            own, *rest = torch.cat(
                [logprobs[token, None].double(), best.values.double(), best.indices.double()]
            ).tolist()
            values, tokens = rest[: len(rest) // 2], map(int, rest[len(rest) // 2 :])
            self.scored.append(TokenLogprob(token, own, tuple(zip(tokens, values, strict=True))))
        return token

    def put(self, token: int) -> int | None:
        """Add a token to the reply; see :meth:`mmkv.reply.ReplyWriter.put`."""
        if token in self._own_ends:
            self._ended_at = token
        return super().put(token)

    @property
    def stop_text(self) -> str | None:
        """Return the stop string, or the text of the request's stop token, that ended the reply."""
        if self._ended_at is None:
            return super().stop_text
        return (token_bytes(self._tokenizer).of(self._ended_at) or b"").decode(errors="replace")

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits ``[vocab]`` with :class:`LogitSettings` applied."""
        import torch

        if not self._logit_settings.bias:
            return super().changed(logits)
        if self._added is None:
            self._added = torch.zeros_like(logits, dtype=torch.float32)
            for token, bias in self._logit_settings.bias.items():
                self._added[token] += bias
        return super().changed(logits + self._added)


_LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Spelled:
    """A token as text with its log probability.

    Attributes:
        bytes: of the token; those of several may make up one character. None: not known.
    """

    text: str
    logprob: float
    bytes: list[int] | None
    top: tuple[Spelled, ...] = ()


def spell(tokenizer: Any, scored: Sequence[TokenLogprob]) -> list[Spelled]:
    """Return tokens as text."""
    return [
        _spelled(
            tokenizer, one.token, one.logprob, tuple(_spelled(tokenizer, *two) for two in one.top)
        )
        for one in scored
    ]


def _spelled(tokenizer: Any, token: int, logprob: float, top: tuple[Spelled, ...] = ()) -> Spelled:
    raw = token_bytes(tokenizer).of(token)
    if raw is None:
        text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    else:
        text = raw.decode("utf-8", errors="replace")
    return Spelled(text, max(logprob, _LOWEST), None if raw is None else list(raw), top)
