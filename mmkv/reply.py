"""Write one reply token by token, and keep its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from mmkv.detokenizer import Detokenizer, StopStrings
from mmkv.engine.errors import BROKEN, STOPS, NotFiniteError, as_exception
from mmkv.sampling import Sampler, Sampling

if TYPE_CHECKING:
    import torch

    from mmkv.engine.backends.cuda.kernels.sample import Draw
    from mmkv.engine.contents import Memory

T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A finished reply.

    ``text``: without stop strings and special tokens. ``token_ids``: as sampled, without the
    end-of-turn token. ``prompt_tokens``: tokens this turn appended before the reply.
    ``finish_reason``: ``eos``, ``length``, ``stop`` (a stop string), ``context`` (the model's
    positions are used up) or ``interrupted``. ``memory``: the session's afterwards, None when
    it was closed meanwhile. Times in seconds; ``tokens_per_second`` counts decoding alone.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    prompt_tokens: int
    finish_reason: str
    seconds_to_first_token: float
    tokens_per_second: float
    memory: Memory | None = None


class ReplyWriter:
    """Samples the tokens of one reply, turns them into text, and ends it.

    ``unfed`` is the token that was sampled but that the session does not hold yet: part of the
    reply, so it must be appended before the next turn. ``failure``: why the reply ended where no
    token could be chosen or written; ``finish_reason`` is ``interrupted`` then.

    Args:
        eos: token ids that end it; never: those that are not to be drawn.
    """

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        eos: Collection[int],
        never: Collection[int] = (),
    ) -> None:
        self._sampler, self._eos = Sampler(sampling, never), frozenset(eos)
        self._detokenizer, self._stops = Detokenizer(tokenizer), StopStrings(sampling.stop)
        self._tokenizer, self._limit = tokenizer, self._sampler.sampling.max_new_tokens
        # At every token: for stop strings, and for what the GPU's sampler cannot do.
        self._looks = bool(sampling.stop) or self._sampler.looks
        self._ready = ""
        self._text: list[str] = []
        self._started = self._mark = time.perf_counter()
        self._first: float | None = None
        self._decoding = 0.0
        self.token_ids: list[int] = []
        self.unfed: int | None = None
        self.finish_reason: str | None = None
        self.failure: Exception | None = None

    def start_clock(self, at: float) -> None:
        """Count the time to the first token from ``at`` (time.perf_counter())."""
        self._started = at

    def begin(self, logits: torch.Tensor, read: int) -> int | None:
        """Sample the first token; the one to feed next, or None when the reply ends.

        Args:
            logits: ``[vocab]`` of the prompt's last token.
            read: a bit for each id before the reply, as the session has them (``read_ids``).
        """
        self._sampler.begin(read)
        return self.put(self.choose(logits))

    @property
    def greedy(self) -> bool:
        """Whether the token that the model finds likeliest is the next one."""
        chosen = self._sampler.sampling
        return chosen.temperature == 0 and not chosen.penalises

    def choose(self, logits: torch.Tensor, likeliest: tuple[float, float] | None = None) -> int:
        """Sample a token from ``logits`` [vocab]; BROKEN where they are not finite.

        ``likeliest``: as :meth:`mmkv.sampling.Sampler.draw` takes it.
        """
        try:
            return self._sampler.draw(logits, self.changed(logits), likeliest)
        except NotFiniteError:
            return BROKEN

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what a token is drawn from: the model's logits [vocab], here as they are."""
        return logits

    @property
    def ahead(self) -> int:
        """Return how many more tokens may be decoded before this has to look at them."""
        return 1 if self._looks else self._limit - len(self.token_ids)

    @property
    def draw(self) -> Draw:
        """Return the GPU's sampling settings for this reply.

        Its random numbers differ from the CPU's.
        """
        return self._sampler.draw_on_device

    def take_burst(self, tokens: Sequence[int]) -> int | None:
        """Take tokens that were decoded one after the other; see :meth:`put`.

        All but the last have been appended to the session already.
        """
        following: int | None = None
        for token in tokens:
            self.fed()
            following = self.put(token)
        return following

    def put(self, token: int) -> int | None:
        """Add a token to the reply; the token to feed next, or None when the reply ends."""
        now = time.perf_counter()
        if self._first is None:
            self._first = now - self._started
        else:
            self._decoding += now - self._mark
        if token == BROKEN:
            self.failure = self.failure or NotFiniteError()
            self.finish("interrupted")
            return None
        if token in self._eos:
            self.finish("eos")
            return None
        self.token_ids.append(token)
        self._sampler.took(token)
        self.unfed = token
        self._ready += self._stops.push(self._detokenizer.push(token))
        if self._stops.hit:
            self.finish("stop")
            return None
        if len(self.token_ids) >= self._limit:
            self.finish("length")
            return None
        self._mark = time.perf_counter()
        return token

    def fed(self) -> None:
        """Note that the session now holds every token sampled so far."""
        self.unfed = None

    def feeding(self) -> None:
        """Start the clock of the next token: the reader's own time does not count."""
        self._mark = time.perf_counter()

    def finish(self, reason: str) -> None:
        """End the reply (again: no effect) and release the text that was held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            rest = self._stops.push(self._detokenizer.flush())
            self._ready += rest + self._stops.flush()

    def attempt(self, call: Callable[..., T], *given: Any) -> T | None:
        """Call one of its own methods; what that raises ends this reply, and no other one."""
        try:
            return call(*given)
        except STOPS:
            raise
        except BaseException as error:
            self.failure = self.failure or as_exception(error)
            # Not by finish(), which writes the rest of the text and may be what raises.
            self.finish_reason = "interrupted"
            return None

    def take(self) -> str:
        """Return the text that became certain since the last call."""
        piece, self._ready = self._ready, ""
        if piece:
            self._text.append(piece)
        return piece

    def held_text(self) -> str:
        """Return the text of all sampled tokens, stop strings included."""
        return self._tokenizer.decode(
            self.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def reply(self, prompt_tokens: int, memory: Memory | None) -> Reply:
        """Return the finished reply."""
        decoded = len(self.token_ids) - 1 + (self.finish_reason == "eos")
        return Reply(
            text="".join(self._text) + self._ready,
            token_ids=list(self.token_ids),
            prompt_tokens=prompt_tokens,
            finish_reason=self.finish_reason or "interrupted",
            seconds_to_first_token=self._first or 0.0,
            tokens_per_second=decoded / self._decoding if self._decoding > 0 else 0.0,
            memory=memory,
        )
