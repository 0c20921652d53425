"""Write one reply, or several together: sample, make text of token ids, keep the numbers.

Sessions, batches and the server write their replies with :class:`ReplyWriter`. Several replies
decode together by one step, or by several where a graph runs.
"""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mmkv.calls.parser import CallFilter, ReplyParser, parse
from mmkv.calls.tools import Tool, ToolCall
from mmkv.detokenizer import Detokenizer, StopStrings, token_bytes
from mmkv.engine.errors import (
    BROKEN,
    STOPS,
    BudgetError,
    ContextError,
    InputError,
    NotFiniteError,
    as_exception,
    shown,
)
from mmkv.engine.steps import BURST, next_ids
from mmkv.grammar import ReplyRules
from mmkv.sampling import Sampler, Sampling, likeliest_of
from mmkv.thoughts import PROMPT_END, Thought, closing, marks_if_first

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.backends.cuda.kernels.sample import Draw
    from mmkv.engine.contents import Memory
    from mmkv.engine.drafts import Guess
    from mmkv.engine.sequence import CachedSequence
    from mmkv.session import Session


T = TypeVar("T")


@dataclass(frozen=True)
class Reply:
    """A finished reply.

    ``text``: without stop strings and special tokens. ``token_ids``: as sampled, without the
    end-of-turn token. ``prompt_tokens``: tokens this turn appended before the reply.
    ``finish_reason``: ``eos``, ``length``, ``stop`` (a stop string), ``context`` (the model's
    positions are used up), ``interrupted`` or ``tool_calls`` (it ended with calls). ``memory``: the
    session's afterwards, None when it was closed meanwhile. Times in seconds;
    ``tokens_per_second`` counts decoding alone. ``reasoning``: the thought at the beginning of
    ``text``, None where the model has not thought;
    ``content``: the answer behind it, without calls. ``tool_calls``: the functions that it calls,
    in order; a call that was cut off is left out.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    prompt_tokens: int
    finish_reason: str
    seconds_to_first_token: float
    tokens_per_second: float
    memory: Memory | None = None
    reasoning: str | None = None
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class LogitSettings:
    """What is done with the logits of each token, beside :class:`mmkv.Sampling`.

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
    def tools(self) -> tuple[Tool, ...]:
        """Return the functions that the model is told of."""
        return () if self.rules.use is None else self.rules.use.tools


def checked_bias(given: Any, vocabulary: int) -> dict[int, float]:
    """Return what is added to logits by token id. Raises InputError: it cannot be."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InputError(f"logit_bias is {shown(given)}; give a dict of numbers by token id")
    for token, value in given.items():
        if type(token) is not int or not 0 <= token < vocabulary:
            raise InputError(
                f"logit_bias names {shown(token)}; token ids are numbers below {vocabulary}"
            )
        if type(value) not in (int, float) or not math.isfinite(value):
            raise InputError(f"logit_bias of token {token} is {shown(value)}; give a number")
    return dict(given)


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its natural log probability; ``top``: the likeliest ones at its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ReplyWriter:
    """Samples the tokens of one reply, turns them into text, and ends it.

    ``unfed`` is the token that was sampled but that the session does not hold yet: part of the
    reply, so it must be appended before the next turn. ``failure``: why the reply ended where no
    token could be chosen or written; ``finish_reason`` is ``interrupted`` then.
    ``limit``: the most tokens of the reply. ``looks_at_logits``: whether a token depends on more
    than :attr:`draw`. ``scored``: where log probabilities were asked for, a row per token that was
    not taken yet: those of the model, before bias, penalties, grammar, temperature, top-p, top-k.

    Args:
        engine: whose tokenizer, grammars and ends of replies count.
        sampling: how its tokens are drawn; settings: what else is done with their logits.
        prompt: the tokens that it follows, or the latest of them: they may open a thought.
        text: the prompt as it was rendered, which may open a thought.
        prefix: words at the end of the prompt that are the beginning of the reply.
        raw: whether there is no template, and so no thought.
        apart: whether its reader takes the text apart with a :meth:`parser`; otherwise
            :meth:`take` leaves calls out.
        started: from when the time to the first token counts (time.perf_counter()); None: now.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Sampling,
        settings: LogitSettings = LogitSettings(),
        *,
        prompt: Sequence[int] = (),
        text: str = "",
        prefix: str = "",
        raw: bool = False,
        apart: bool = False,
        started: float | None = None,
    ) -> None:
        self._tokenizer = tokenizer = engine.processor.tokenizer
        self._logit_settings, rules = settings, settings.rules
        self._around = around = None if raw else engine.thought_marks
        self._opened = around is not None and (
            text.removesuffix(prefix).rstrip().endswith(around.open)
        )
        self.prefix, self._seed = prefix, secrets.token_hex(16)
        parser = self.parser()
        self._view = None
        if rules.use is not None and not apart:
            self._view = CallFilter(parser, around, parser.thinks)
        self._marks = marks_if_first(around, prefix)
        self._constraint = None
        if rules.bind:
            first = around if parser.thinks else self._marks
            self._constraint = engine.grammars.begin(rules, first, parser.thinks)
        # Special tokens whose names are part of the text.
        self._shown_ids = frozenset[int]()
        if apart or rules.use is not None:
            self._shown_ids = engine.grammars.shown(rules.format, around)
        eos = engine.eos_token_ids
        self._eos, self._own_ends = eos | settings.stop_tokens, settings.stop_tokens - eos
        self._ended_at: int | None = None  # which of its own ends
        self._sampler = Sampler(sampling, engine.media_token_ids)
        self._detokenizer = Detokenizer(tokenizer, self._shown_ids)
        self._before: list[int] = []  # tokens of a word, where the reply stands behind some
        if prefix:  # SentencePiece drops a space at the beginning of a text
            self._before = tokenizer("a", add_special_tokens=False)["input_ids"]
            self._detokenizer.follow(self._before)
        drawn = self._sampler.sampling
        self._stops, self.limit = StopStrings(drawn.stop), drawn.max_new_tokens
        # At every token: for stop strings, and for what the GPU's sampler cannot do.
        bound = self._constraint is not None or settings.top_logprobs is not None
        self.looks_at_logits = bound or bool(drawn.bad_words or settings.bias)
        self._looks = self.looks_at_logits or bool(drawn.stop or settings.stop_tokens)
        self._prompt = tuple(prompt[-PROMPT_END:])
        # Followed token by token only where the thought has a budget.
        self._budget = None if self._marks is None else drawn.thinking_budget
        self._thought = None if self._budget is None else self._new_thought()
        self._forced: deque[int] = deque()
        self._ready = ""
        self._text: list[str] = []
        self._mark = time.perf_counter()
        self._started = self._mark if started is None else started
        self._first: float | None = None
        self._decoding = 0.0
        self._added: torch.Tensor | None = None  # to the logits [vocab]
        self.scored: list[TokenLogprob] = []
        self._scored_taken = 0
        self.token_ids: list[int] = []
        self.unfed: int | None = None
        self.finish_reason: str | None = None
        self.failure: Exception | None = None

    def parser(self, whole: bool = False) -> ReplyParser:
        """Return what takes the reply apart; the ids of its calls are always the same.

        Args:
            whole: whether it is given the reply's prefix, too.
        """
        rules, begun = self._logit_settings.rules, "" if whole else self.prefix
        return ReplyParser(rules.format, rules.use, self._around, self._opened, self._seed, begun)

    @property
    def thought_tokens(self) -> int:
        """Count the tokens up to the end of its thought, as its text is taken apart."""
        detokenizer = Detokenizer(self._tokenizer, self._shown_ids)
        parser, end = self.parser(), 0
        for count, token in enumerate(self.token_ids, 1):
            thinks = parser.thinks
            parser.push(detokenizer.push(token))
            if thinks or parser.thinks:
                end = count
        return end

    def start(self, read: int) -> None:
        """Make ready for the first token.

        Args:
            read: a bit for each id before the reply, as the session has them (``read_ids``).
        """
        self._sampler.begin(read)
        self._bound_thought()

    def draw_from(self, logits: torch.Tensor) -> int | None:
        """Sample a token from ``logits`` [vocab]; the one to feed next, or None when it ends."""
        return self.put(self.choose(logits))

    @property
    def greedy(self) -> bool:
        """Whether the token that the model finds likeliest is the next one."""
        chosen = self._sampler.sampling
        return chosen.temperature == 0 and not chosen.penalises

    def choose(
        self,
        logits: torch.Tensor,
        likeliest: tuple[float, float] | None = None,
        drawn: int | None = None,
    ) -> int:
        """Sample a token from ``logits`` [vocab]; BROKEN where they are not finite, or none can be.

        ``likeliest``: as :meth:`mmkv.sampling.Sampler.draw` takes it; ``drawn``: what the GPU has
        drawn. Where a thought's budget is spent, the next token of its end comes instead.
        """
        bound = self._constraint
        if bound is not None and bound.masks:
            self._forced.clear()  # the answer begins as it has to
        if self._forced:
            token = self._forced.popleft()
        elif drawn is not None:
            token = drawn
        else:
            try:
                token = self._sampler.draw(logits, self._changed(logits), likeliest)
            except NotFiniteError:
                token = BROKEN
        if bound is not None:
            self.failure = bound.failure
            if token == BROKEN or self.failure is not None:
                return BROKEN
            bound.take(token)
        if self._logit_settings.top_logprobs is not None and token != BROKEN:
            logprobs = logits.float().log_softmax(-1)
            best = logprobs.topk(min(self._logit_settings.top_logprobs, logprobs.numel()))
            # All in one read: float64 holds token ids and float32 as they are.
            own, *rest = torch.cat(
                [logprobs[token, None].double(), best.values.double(), best.indices.double()]
            ).tolist()
            values, tokens = rest[: len(rest) // 2], map(int, rest[len(rest) // 2 :])
            self.scored.append(TokenLogprob(token, own, tuple(zip(tokens, values, strict=True))))
        return token

    def foresee(self) -> Guess:
        """Return what chooses the tokens that are drafted behind the latest one.

        They are chosen as this reply will choose them if the logits are right, with the same random
        numbers, which stay its own. Only what a grammar or a thought's budget may ask for by then
        is not known. It ends at a token that is never fed: the reply's last, or behind it.
        """
        forced, left = deque(self._forced), self.limit - len(self.token_ids) - 1
        sampler: Sampler | None = None

        def guess(logits: torch.Tensor) -> int | None:
            nonlocal left, sampler
            if left < 1:
                return None
            if sampler is None:  # most steps are drafted already, and ask for no guess
                sampler = self._sampler.copy()
            try:
                token = forced.popleft() if forced else sampler.draw(logits, self._biased(logits))
            except STOPS:
                raise
            except BaseException:  # it is the reply's own when it gets there
                return None
            sampler.note_token(token)
            left -= 1
            return None if token in self._eos else token

        return guess

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what a token is drawn from: the model's logits [vocab], biased and bound."""
        bound, logits = self._constraint, self._biased(logits)
        return logits if bound is None or not bound.masks else bound.allowed(logits)

    def _biased(self, logits: torch.Tensor) -> torch.Tensor:
        if self._logit_settings.bias:
            if self._added is None:
                self._added = torch.zeros_like(logits, dtype=torch.float32)
                for token, bias in self._logit_settings.bias.items():
                    self._added[token] += bias
            logits = logits + self._added
        return logits

    def take_scored(self) -> list[TokenLogprob]:
        """Return the log probabilities that are new since the last call."""
        count = len(self.token_ids) - self._scored_taken
        taken, self.scored = self.scored[:count], self.scored[count:]
        self._scored_taken += len(taken)
        return taken

    @property
    def ahead(self) -> int:
        """Return how many more tokens may be decoded before this has to look at them."""
        if self._looks or self._forced:
            return 1
        left = self.limit - len(self.token_ids)
        if self._thought is None or self._thought.over:
            return left
        assert self._budget is not None
        return min(left, max(self._budget - self._thought.tokens, 1))

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
            following = self.put(token)
        return following

    def put(self, token: int) -> int | None:
        """Add a token to the reply; the token to feed next, or None when the reply ends.

        The session holds every token before it by then.
        """
        now, self.unfed = time.perf_counter(), None
        if self._first is None:
            self._first = now - self._started
        else:
            self._decoding += now - self._mark
        if token == BROKEN:
            self.failure = self.failure or NotFiniteError()
            self.finish("interrupted")
            return None
        if token in self._eos:
            if token in self._own_ends:
                self._ended_at = token
            self.finish("eos")
            return None
        self.token_ids.append(token)
        self._sampler.note_token(token)
        if self._thought is not None:
            self._thought.push(token)
            self._bound_thought()
        self.unfed = token
        self._ready += self._stops.push(self._detokenizer.push(token))
        if self._stops.hit:
            self.finish("stop")
            return None
        if len(self.token_ids) >= self.limit:
            self.finish("length")
            return None
        self._mark = time.perf_counter()
        return token

    def feeding(self) -> None:
        """Start the clock of the next token: the reader's own time does not count."""
        self._mark = time.perf_counter()

    def finish(self, reason: str) -> None:
        """End the reply (again: no effect) and release the text that was held back."""
        if self.finish_reason is None:
            self.finish_reason = reason
            rest = self._stops.push(self._detokenizer.flush())
            self._ready += rest + self._stops.flush()

    @property
    def stop_text(self) -> str | None:
        """Return the stop string, or the text of its own stop token, that ended the reply."""
        if self._ended_at is None:
            return self._stops.hit
        return (token_bytes(self._tokenizer).of(self._ended_at) or b"").decode(errors="replace")

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
        """Return the text that became certain since the last call, without calls."""
        piece, self._ready = self._ready, ""
        if piece:
            self._text.append(piece)
        if self._view is not None:
            piece = self._view.push(piece)
            if self.finish_reason is not None:
                piece += self._view.finish(self.cut, self.stop_text)
                self._view = None
        return piece

    @property
    def text(self) -> str:
        """Return what has been written, calls included."""
        return "".join(self._text) + self._ready

    @property
    def cut(self) -> bool:
        """Whether it was cut off, so that its last call may be incomplete."""
        return self.finish_reason != "eos" or self.stop_text is not None

    @property
    def thought(self) -> Thought | None:
        """Return where the thought is among the tokens; None where the model has none."""
        if self._thought is not None or self._marks is None:
            return self._thought
        made = self._new_thought()
        for token in self.token_ids:
            made.push(token)
        return made

    def _new_thought(self) -> Thought:
        assert self._marks is not None
        return Thought(token_bytes(self._tokenizer), self._marks, self._prompt)

    def _bound_thought(self) -> None:
        """End the thought if its budget is spent."""
        thought = self._thought
        if thought is None or thought.state != "open" or self._forced:
            return
        if self._constraint is not None and self._constraint.masks:
            return  # once what is bound is over
        assert self._budget is not None and self._marks is not None
        if thought.tokens >= self._budget:
            self._forced.extend(closing(self._tokenizer, self._marks, thought.at_line_start))

    def split(self, text: str) -> tuple[str | None, str]:
        """Return the thought in the reply's ``text``, None where it has none, and what follows."""
        thought = self.thought
        if thought is None or self._marks is None or thought.state in ("begin", "none"):
            return None, text
        if thought.state == "closed" and thought.stop <= 0:  # by the prompt
            return None, text
        opened = thought.start < 0
        begun = self._decode(self.token_ids[: thought.stop or None])
        if not opened and self._marks.open not in begun and text.startswith(begun):
            # Special tokens, which no text shows.
            return begun.strip() or None, text[len(begun) :].lstrip()
        parsed = parse(ReplyParser(marks=self._marks, opened=opened), text)
        return parsed.thought, parsed.text

    def answers(self, text: str, opening: str) -> list[str]:
        """Return what a template may show of a reply whose thought is left out: the answer first.

        Args:
            text: of the whole reply; opening: with which the prompt has begun the thought.
        """
        thought = self.thought
        assert thought is not None and thought.state == "closed"
        parser = ReplyParser(marks=thought.marks, opened=thought.start < 0 < thought.stop)
        before = text[: len(text) - len(parse(parser, text).text)].rstrip()
        after = text[len(before) :]
        if thought.stop > 0 and thought.marks.close not in text:  # which shows no marks
            before, after = "", self._decode(self.token_ids[thought.stop :])
        inside = before.removesuffix(thought.marks.close).rpartition(thought.marks.open)[2]
        inside = inside.strip("\n")
        whole = f"{thought.marks.open}\n{inside}\n{thought.marks.close}\n\n"  # as Qwen3's has it
        answer = after.lstrip()
        shown = [after, after.lstrip("\n"), after.strip(), text, opening + text]
        return list(dict.fromkeys([answer, *shown, whole + after.lstrip("\n")]))

    def held_text(self) -> str:
        """Return the text of all sampled tokens, stop strings included."""
        return self._decode(self.token_ids)

    def _decode(self, ids: list[int]) -> str:
        if self._shown_ids:
            written = Detokenizer(self._tokenizer, self._shown_ids)
            written.follow(self._before)
            return "".join(map(written.push, ids)) + written.flush()
        before, whole = (
            self._tokenizer.decode(
                each, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            for each in (self._before, [*self._before, *ids])
        )
        return whole[len(before) :]

    def reply(self, prompt_tokens: int, memory: Memory | None) -> Reply:
        """Return the finished reply."""
        decoded = len(self.token_ids) - 1 + (self.finish_reason == "eos")
        text, reason, calls = self.text, self.finish_reason or "interrupted", list[ToolCall]()
        if self._logit_settings.rules.use is None:
            thought, content = self.split(text)
        else:
            parsed = parse(self.parser(), text, self.cut, self.stop_text)
            thought, content, calls = parsed.thought, parsed.text, parsed.calls
            if not parsed.complete:
                calls.pop()
            elif calls and reason in ("eos", "stop"):
                reason = "tool_calls"
        return Reply(
            text=text,
            token_ids=list(self.token_ids),
            prompt_tokens=prompt_tokens,
            finish_reason=reason,
            seconds_to_first_token=self._first or 0.0,
            tokens_per_second=decoded / self._decoding if self._decoding > 0 else 0.0,
            memory=memory,
            reasoning=thought,
            content=content,
            tool_calls=calls,
        )


PAUSED = -3  # in place of a token: the conversation is to be read again first


def following(session: Session, writer: ReplyWriter, logits: torch.Tensor) -> int | None:
    """Choose the token that follows in a reply; PAUSED where :meth:`Session.weigh` says so."""
    if writer.attempt(session.weigh, logits):
        return PAUSED
    return None if writer.failure is not None else writer.draw_from(logits)


def step(engine: Engine, going: Sequence[tuple[Session, ReplyWriter, int]]) -> list[int | None]:
    """Append each reply's token and choose what follows.

    Args:
        going: session, writer and the token that the session does not hold yet.

    Returns:
        per reply the token to feed next, None where it has ended (or failed: see its writer),
        PAUSED where the conversation is to be read again before the next is chosen.
        What a writer raises is its own failure; the sessions of all hold their tokens by then.

    Raises:
        ContextError: a session has no position left; nothing has changed.
    """
    sessions, writers, tokens = zip(*going, strict=True)
    for writer in writers:
        writer.feeding()
    steps = _ahead(engine, sessions, writers)
    if steps < 2:
        with engine.lock:  # the logits are read back before another thread's step
            if engine.loss_control is None:
                logits = engine.decode(sessions, tokens, _guesses(engine, writers))
                chosen = _chosen(engine, sessions, writers, logits)
            else:
                chosen = _weighed(engine, sessions, writers, tokens)
        for writer in writers:
            writer.unfed = None  # the session holds it now
        return [
            writer.attempt(writer.put, token) if token not in (None, PAUSED) else token
            for writer, token in zip(writers, chosen, strict=True)
        ]
    draws = [writer.draw for writer in writers]
    try:
        generated = engine.decode_many(
            sessions,
            tokens,
            steps,
            sorted(engine.eos_token_ids),
            None if all(draw.plain for draw in draws) else draws,
        )
    except NotFiniteError as error:  # of some of them, which their writers will say
        generated = error.generated
    return [
        writer.attempt(writer.take_burst, row)
        for writer, row in zip(writers, generated, strict=True)
    ]


def _guesses(engine: Engine, writers: Sequence[ReplyWriter]) -> list[Guess] | None:
    """Return what foresees the tokens of replies as :func:`_chosen` chooses them."""
    if engine.drafts is None:
        return None
    graph = engine.many_path == "graph"
    return [
        writer.draw if graph and not writer.looks_at_logits else writer.foresee()
        for writer in writers
    ]


def _weighed(
    engine: Engine,
    sessions: Sequence[Session],
    writers: Sequence[ReplyWriter],
    tokens: Sequence[int],
) -> list[int | None]:
    """Append a token to each session and choose what follows, as a calibration has it.

    A reply whose conversation was read again goes on from that, which gets the token, too; where
    there is no room for that any more, without it. None is chosen where it is to be read again
    first, or where the reply is refused.
    """
    again = {at: one.again for at, one in enumerate(sessions) if one.again is not None}
    every = [*sessions, *again.values()], [*tokens, *(tokens[at] for at in again)]
    try:
        logits = engine.decode(*every)
    except (BudgetError, ContextError) as error:  # nothing has changed
        if not again:
            raise
        for at in again:
            sessions[at].settle("not_reread", str(error))
        return _weighed(engine, sessions, writers, tokens)
    rows = {at: len(sessions) + place for place, at in enumerate(again)}
    logits = logits[[rows.get(at, at) for at in range(len(sessions))]]
    read = [again.get(at, one) for at, one in enumerate(sessions)]
    pauses = [
        writer.attempt(session.weigh, row)
        for session, writer, row in zip(sessions, writers, logits, strict=True)
    ]
    on = [at for at, writer in enumerate(writers) if not pauses[at] and writer.failure is None]
    given = [read[at] for at in on], [writers[at] for at in on], logits[on]
    chosen = dict(zip(on, _chosen(engine, *given), strict=True)) if on else {}
    return [PAUSED if paused else chosen.get(at) for at, paused in enumerate(pauses)]


def _chosen(
    engine: Engine,
    sessions: Sequence[CachedSequence],
    writers: Sequence[ReplyWriter],
    logits: torch.Tensor,
) -> list[int | None]:
    """Choose what follows in each reply; None where that failed.

    On a GPU, replies that would be decoded in bursts without the others get the tokens of those
    bursts, all in one read.
    """
    alone: Sequence[int] = range(len(writers))
    drawn = dict[int, int]()
    if engine.many_path == "graph":
        alone = [index for index, writer in enumerate(writers) if writer.looks_at_logits]
        others = [index for index in range(len(writers)) if index not in alone]
        if others:
            rows = logits if len(others) == len(writers) else logits[others]
            draws = [writers[index].draw for index in others]
            chosen = next_ids(engine, [sessions[index] for index in others], rows, draws)
            drawn = dict(zip(others, chosen, strict=True))
    read: Sequence[tuple[float, float] | None] = [None] * len(writers)
    if sum(writers[index].greedy for index in alone) > 1:
        read = likeliest_of(logits)
    return [
        writer.attempt(writer.choose, logits[index], read[index], drawn.get(index))
        for index, writer in enumerate(writers)
    ]


def _ahead(engine: Engine, sessions: Sequence[Session], writers: Sequence[ReplyWriter]) -> int:
    """Return how many steps all replies can take before the host has to look."""
    if engine.many_path != "graph" or engine.loss_control is not None:
        return 1
    positions = engine.spec.max_position - max(session.next_position for session in sessions)
    if positions < 1:  # one step, before which they are drawn together
        return 1
    return min(BURST, positions, *(writer.ahead for writer in writers))
