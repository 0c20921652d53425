"""Write one reply, or several together: sample, make text of token ids, keep the numbers.

A stream of token ids becomes text of whole characters only, without stop strings
(:class:`Detokenizer`). Several replies decode together by one step, or by several where a graph
runs.
"""

from __future__ import annotations

import codecs
import json
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from mmkv.calls.parser import ReplyParser, ThoughtMarks, parse
from mmkv.engine.errors import BROKEN, STOPS, NotFiniteError, as_exception
from mmkv.engine.steps import BURST
from mmkv.sampling import Sampler, Sampling, likeliest_of
from mmkv.thoughts import PROMPT_END, Thought, closing

if TYPE_CHECKING:
    import torch

    from mmkv.api import Engine
    from mmkv.calls.tools import ToolCall
    from mmkv.engine.backends.cuda.kernels.sample import Draw
    from mmkv.engine.contents import Memory
    from mmkv.engine.sequence import CachedSequence
    from mmkv.grammar import Constraint


# What decoders put in place of bytes that do not (yet) form a character.
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_BLANK = "\u2581"  # SentencePiece's mark of a space


def _byte_of() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    found = {chr(byte): byte for byte in shown}
    return found | {chr(256 + index): byte for index, byte in enumerate(hidden)}


_BYTES = _byte_of()


class TokenBytes:
    """What each token of a vocabulary stands for, in bytes: several may make up one character.

    Attributes:
        level: whether the vocabulary's tokens are bytes (byte-level BPE).
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token: (str(one), bool(one.special))
            for token, one in getattr(tokenizer, "added_tokens_decoder", {}).items()
        }
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self.level = "ByteLevel" in kinds
        self._fallback = "ByteFallback" in kinds
        self._blanks = any(
            step["type"] == "Metaspace"
            or (step["type"] == "Replace" and step.get("pattern") == {"String": _BLANK})
            for step in steps
        )

    def of(self, token: int) -> bytes | None:
        """Return the bytes of a token wherever it stands, of a special one those of its name.

        None where the vocabulary does not tell: half a character of an unknown kind.
        """
        if token in self._added:
            return self._added[token][0].encode()
        raw = self.raw(token)
        if raw is not None:
            return raw
        if self._blanks:
            name = self._tokenizer.convert_ids_to_tokens(token)
            return None if name is None else name.replace(_BLANK, " ").encode()
        text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return None if _REPLACEMENT in text else text.encode()

    def raw(self, token: int) -> bytes | None:
        """Return the bytes that a token adds to a text, None where its neighbours decide that."""
        if self.level:
            name, special = self._added.get(token) or (self._name(token), False)
            if special:
                return b""  # not shown
            if all(mark in _BYTES for mark in name):
                return bytes(_BYTES[mark] for mark in name)
            return name.encode()  # as the tokenizer does with added tokens
        if self._fallback and token not in self._added:
            found = _BYTE_TOKEN.fullmatch(self._name(token))
            return bytes([int(found[1], 16)]) if found else None
        return None

    def _name(self, token: int) -> str:
        return self._tokenizer.convert_ids_to_tokens(token) or ""


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the steps of a fast tokenizer's decoder; none for another tokenizer."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


_known: WeakKeyDictionary[Any, TokenBytes] = WeakKeyDictionary()


def token_bytes(tokenizer: Any) -> TokenBytes:
    """Return what a tokenizer's tokens stand for; made once for each tokenizer."""
    if tokenizer not in _known:
        _known[tokenizer] = TokenBytes(tokenizer)
    return _known[tokenizer]


class Detokenizer:
    """Decodes ids one by one; returns a piece once its characters are complete.

    Tokens that are bytes go through a UTF-8 decoder, so what counts is bytes: a token may end one
    character and begin the next. Of other tokens a short window of ids that were shown already is
    decoded again with each new one, because some tokenizers (SentencePiece) decode a token
    differently at the start of a text.

    Args:
        shown: special tokens whose names are part of the text; others are not shown.
    """

    def __init__(self, tokenizer: Any, shown: Collection[int] = ()) -> None:
        self._tokenizer, self._bytes = tokenizer, token_bytes(tokenizer)
        self._named = frozenset(shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0  # number of ids of the window whose text was returned

    def follow(self, ids: Sequence[int]) -> None:
        """Decode what comes next as it stands behind the tokens ``ids``."""
        self._window, self._shown = list(ids), len(ids)

    def push(self, token_id: int) -> str:
        """Add one id; return the text that became certain (possibly empty)."""
        if token_id in self._named:
            self._window, self._shown = [], 0
            return self._broken_off() + (self._bytes.of(token_id) or b"").decode()
        raw = self._bytes.raw(token_id)
        if raw is not None:
            if not self._bytes.level:
                self._window, self._shown = [token_id], 1
            return self._utf8.decode(raw)
        self._window.append(token_id)
        before = self._decode(self._window[: self._shown])
        piece = self._decode(self._window)[len(before) :]
        if not piece:
            return ""
        # The ids just shown become the context for the next ones. An id that decodes to
        # nothing (a special token) must not become the whole context, so it is kept waiting.
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return self._broken_off() + piece

    def flush(self) -> str:
        """End the text; an unfinished character is dropped."""
        self._utf8.reset()
        return ""

    def _broken_off(self) -> str:
        """Return what stands for a character whose bytes broke off."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


class StopStrings:
    """Cuts a text stream at the first stop string, also when it spans several pieces.

    Attributes:
        hit: the one that was found.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """Return the part of the stream that can no longer belong to a stop string."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = self._open_tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back in case a stop string had been about to begin."""
        held, self._held = self._held, ""
        return held

    def _open_tail(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that begins one of the stop strings."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


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


class ReplyWriter:
    """Samples the tokens of one reply, turns them into text, and ends it.

    ``unfed`` is the token that was sampled but that the session does not hold yet: part of the
    reply, so it must be appended before the next turn. ``failure``: why the reply ended where no
    token could be chosen or written; ``finish_reason`` is ``interrupted`` then.

    Args:
        eos: token ids that end it; never: those that are not to be drawn.
        constraint: what binds its tokens; None: nothing.
        shown: special tokens whose names are part of the text.
        marks: of thoughts; None: it has none.
        prompt: the tokens that it follows, or the latest of them: they may open a thought.
    """

    def __init__(
        self,
        tokenizer: Any,
        sampling: Sampling,
        eos: Collection[int],
        never: Collection[int] = (),
        constraint: Constraint | None = None,
        shown: Collection[int] = (),
        marks: ThoughtMarks | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._sampler, self._eos = Sampler(sampling, never), frozenset(eos)
        self._shown_ids = frozenset(shown)
        self._detokenizer = Detokenizer(tokenizer, self._shown_ids)
        self._stops, self._constraint = StopStrings(sampling.stop), constraint
        self._tokenizer, self._limit = tokenizer, self._sampler.sampling.max_new_tokens
        # At every token: for stop strings, and for what the GPU's sampler cannot do.
        self._looks = bool(sampling.stop) or self._sampler.looks or constraint is not None
        self._marks, self._prompt = marks, tuple(prompt[-PROMPT_END:])
        # Followed token by token only where the thought has a budget.
        self._budget = None if marks is None else self._sampler.sampling.thinking_budget
        self._thought = None if self._budget is None else self._new_thought()
        self._forced: deque[int] = deque()
        self._ready = ""
        self._before: list[int] = []  # tokens of a word, where the reply stands behind some
        self._text: list[str] = []
        self._started = self._mark = time.perf_counter()
        self._first: float | None = None
        self._decoding = 0.0
        self.token_ids: list[int] = []
        self.unfed: int | None = None
        self.finish_reason: str | None = None
        self.failure: Exception | None = None

    def follow_text(self) -> None:
        """Write the reply as it stands behind words, which keeps a space that it begins with.

        (SentencePiece drops it at the beginning of a text.)
        """
        self._before = self._tokenizer("a", add_special_tokens=False)["input_ids"]
        self._detokenizer.follow(self._before)

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
        self._bound_thought()
        return self.put(self.choose(logits))

    @property
    def greedy(self) -> bool:
        """Whether the token that the model finds likeliest is the next one."""
        chosen = self._sampler.sampling
        return chosen.temperature == 0 and not chosen.penalises

    def choose(self, logits: torch.Tensor, likeliest: tuple[float, float] | None = None) -> int:
        """Sample a token from ``logits`` [vocab]; BROKEN where they are not finite, or none can be.

        ``likeliest``: as :meth:`mmkv.sampling.Sampler.draw` takes it. Where a thought's budget is
        spent, the next token of its end comes instead.
        """
        bound = self._constraint
        if bound is not None and bound.masks:
            self._forced.clear()  # the answer begins as it has to
        if self._forced:
            token = self._forced.popleft()
        else:
            try:
                token = self._sampler.draw(logits, self.changed(logits), likeliest)
            except NotFiniteError:
                token = BROKEN
        if bound is None:
            return token
        self.failure = bound.failure
        if token == BROKEN or self.failure is not None:
            return BROKEN
        bound.take(token)
        return token

    def changed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what a token is drawn from: the model's logits [vocab], but for what is bound."""
        bound = self._constraint
        return logits if bound is None or not bound.masks else bound.allowed(logits)

    @property
    def ahead(self) -> int:
        """Return how many more tokens may be decoded before this has to look at them."""
        if self._looks or self._forced:
            return 1
        left = self._limit - len(self.token_ids)
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
        self._sampler.note_token(token)
        if self._thought is not None:
            self._thought.push(token)
            self._bound_thought()
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

    @property
    def stop_text(self) -> str | None:
        """Return the stop string that ended the reply, if one did."""
        return self._stops.hit

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
        text = "".join(self._text) + self._ready
        reasoning, content = self.split(text)
        return Reply(
            text=text,
            token_ids=list(self.token_ids),
            prompt_tokens=prompt_tokens,
            finish_reason=self.finish_reason or "interrupted",
            seconds_to_first_token=self._first or 0.0,
            tokens_per_second=decoded / self._decoding if self._decoding > 0 else 0.0,
            memory=memory,
            reasoning=reasoning,
            content=content,
        )


def step(
    engine: Engine, going: Sequence[tuple[CachedSequence, ReplyWriter, int]]
) -> list[int | None]:
    """Append each reply's token and choose what follows.

    Args:
        going: session, writer and the token that the session does not hold yet.

    Returns:
        per reply the token to feed next, None where it has ended (or failed: see its writer).
        What a writer raises is its own failure; the sessions of all hold their tokens by then.

    Raises:
        ContextError: a session has no position left; nothing has changed.
    """
    sessions, writers = [session for session, *_ in going], [writer for _, writer, _ in going]
    tokens = [token for *_, token in going]
    for writer in writers:
        writer.feeding()
    steps = _ahead(engine, sessions, writers)
    if steps < 2:
        following: list[int | None] = []
        with engine.lock:  # the logits are read back before another thread's step
            logits = engine.decode(sessions, tokens)
            read: Sequence[tuple[float, float] | None] = [None] * len(writers)
            if sum(writer.greedy for writer in writers) > 1:
                read = likeliest_of(logits)
            chosen = [
                writer.attempt(writer.choose, *row)
                for writer, *row in zip(writers, logits, read, strict=True)
            ]
        for writer, token in zip(writers, chosen, strict=True):
            writer.fed()
            following.append(None if token is None else writer.attempt(writer.put, token))
        return following
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


def _ahead(
    engine: Engine, sessions: Sequence[CachedSequence], writers: Sequence[ReplyWriter]
) -> int:
    """Return how many steps all replies can take before the host has to look."""
    if engine.many_path != "graph":
        return 1
    positions = engine.spec.max_position - max(session.next_position for session in sessions)
    if positions < 1:  # one step, before which they are drawn together
        return 1
    return min(BURST, positions, *(writer.ahead for writer in writers))
