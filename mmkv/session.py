"""A chat session: text in, a stream of text out; each turn appends its own tokens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch

from mmkv.calls.tools import Tool
from mmkv.engine.errors import ContextError, ForgottenError, MmkvError, SessionError
from mmkv.engine.interrupts import CtrlC, OpenToCtrlC, whole
from mmkv.engine.read_ids import with_ids
from mmkv.engine.sequence import CachedSequence
from mmkv.engine.session_file import checked_extra
from mmkv.notes import MOST_TOLD, conversation_notes
from mmkv.prompt.held import MOST_TO_REREAD, Held, Place, Rewrites
from mmkv.prompt.messages import joined
from mmkv.prompt.special import tokenize
from mmkv.prompt.video import FramesSeen
from mmkv.reply import PAUSED, LogitSettings, Reply, ReplyWriter, following, step
from mmkv.sampling import Sampling, Settled
from mmkv.turn import (
    Observation,
    Observed,
    Prompt,
    TurnReading,
    compose,
    compose_messages,
    compose_observation,
    compose_results,
    shown_tools,
    with_tokens,
)

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.calibration import Outcome, Watched, Weighing
    from mmkv.engine.budget import Budget
    from mmkv.engine.contents import Memory
    from mmkv.explain.snapshot import Frame
    from mmkv.explain.trace import Trace
    from mmkv.prompt.held import Plan, Read
    from mmkv.prompt.media import Note
    from mmkv.prompt.messages import Message
    from mmkv.prompt.template import ChatTemplate


class ReplyStream(Iterator[str]):
    """The pieces of one reply, made as they are asked for.

    The session belongs to the stream from its first piece to its end: other calls on the session
    are refused meanwhile, but for reading and closing it. A stream that is closed, or that nobody
    refers to any more, ends the reply where it stands. Threads may pass a stream on; if two ask at
    the same time, one gets a SessionError, and the reply goes on.
    """

    def __init__(self, session: Session, pieces: Callable[[], Generator[str, None, None]]) -> None:
        self._session, self._pieces = session, pieces()
        self._ended = False

    def __next__(self) -> str:
        if self._ended:
            raise StopIteration
        try:
            with self._session.streaming():
                try:
                    return next(self._pieces)
                except BaseException:
                    self._ended = True
                    raise
        except KeyboardInterrupt:  # it may have come after the piece was made, which nobody sees
            self.close()
            raise

    def close(self) -> None:
        """End the reply where it stands; what was shown stays in the session. Again: no effect."""
        with CtrlC(), self._session.stopping():
            self._ended = True
            self._pieces.close()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


Progress = Callable[[int, int], None]
# What belongs to the object and not to the state of its conversation.
_OWN = tuple("_claim _streaming _in_stream undo_depth rewrites forget_thoughts watched".split())


@dataclass(frozen=True)
class TurnStart:
    """Where a session stood before a turn: its state, and its messages."""

    state: dict[str, Any]
    history: tuple[Message, ...]
    unfed: tuple[int, ...]
    last: Reply | None
    note: str | None
    told: tuple[str, ...]
    held: Held
    cuts: int
    tools: tuple[Tool, ...]


class Session(CachedSequence):
    """One conversation.

    ``history``: its messages in the transformers chat format (pictures and videos as bare
    placeholders). ``tools``: the functions that the model may call. ``last``: the latest Reply.
    ``note``: a remark for the user on how the latest turn was read, or None; ``notes``: those on
    the whole conversation. ``rewrites``: where the chat template, or the way in which pictures are
    read, changes earlier messages, ``reread`` goes back and reads them again, and ``keep`` leaves
    them as they were read. ``forget_thoughts``: whether the entries of a reply's thought are
    dropped once the reply is over; the engine's setting at first. The history then has the answer
    alone. ``undo_depth``: how many turns :meth:`undo` can take back; each costs a copy of the
    cache, so it is 0 unless asked for. ``unfed``: tokens of the latest reply that the cache lacks.
    ``weighing``: of the latest reply against a calibration; ``again``: the conversation read again
    under a larger budget, from which the reply at hand goes on; ``keeps_media``: whether pictures
    are held for that; ``watched``: see :class:`mmkv.calibration.Drift`.

    From the first piece of a stream to its end only the stream changes the session: another call
    raises :class:`SessionError`, unless it reads or closes the session. Threads may share an
    engine and give each its own sessions; a session that another thread uses is refused, too.
    """

    engine: Engine

    def __init__(self, engine: Engine, budget: Budget) -> None:
        super().__init__(engine, budget)
        self.history: list[Message] = []
        self.tools: tuple[Tool, ...] = ()
        self.last: Reply | None = None
        self.note: str | None = None
        self._told: tuple[str, ...] = ()  # notes on what was read, each once
        self.undo_depth = 0
        self.rewrites: Rewrites = "reread"
        self.forget_thoughts = engine.forget_thoughts
        self.held = Held()
        self.frames_seen = FramesSeen()
        self._cuts = 0  # how often the session went back
        # Sampled tokens that are part of the latest reply but not yet in the cache; the next turn
        # begins with them. (The last token of a reply is never needed to produce the reply.)
        self.unfed: tuple[int, ...] = ()
        self._snapshots: list[Session] = []
        self._streaming = False  # from the first piece of a stream to its end
        self._in_stream = False  # while a piece of it is made
        self._turn_mark = object()  # another one after each turn
        self.weighing: Weighing | None = None
        self.watched: Watched | None = None
        self.again: Session | None = None
        self._reply_from = 0  # tokens seen when the latest reply began
        self._before_turn: Session | None = None  # where a reply that is refused goes back to
        control = engine.loss_control
        self.keeps_media = control is not None and control.action == "reread"

    def send(
        self,
        text: str | Sequence[dict[str, Any]],
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        system: str | None = None,
        sampling: Sampling | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        progress: Progress | None = None,
        prefix: str = "",
        tools: Sequence[Any] | None = None,
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        response_format: dict[str, Any] | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> ReplyStream:
        """Append a user's turn and stream the reply as pieces of text.

        ``text``: the question, or a list of parts in the chat format to place pictures inside it;
        ``images``, ``videos``: paths, URLs or objects, put before the text; ``system`` only with
        the first turn; ``progress(done, total)`` is called while the prompt is prefilled.
        ``prefix``: what the reply begins with; the stream gives what follows, and the history has
        both as one message.

        ``tools``: functions that the model may call, from now on: dicts in OpenAI's form,
        :class:`mmkv.Tool`, or functions of Python with type hints and a docstring; none: it may
        call none any more; None: as before. ``tool_choice``: ``auto``, ``required``, ``none`` or
        the function to call, as a dict in OpenAI's form. The pieces then leave calls out; ``last``
        has them, and :meth:`send_results` continues. A call fits its function's schema.
        ``response_format``: the JSON that the reply has to be, as a dict in OpenAI's form;
        ``logit_bias``: numbers that are added to the logits of tokens, by their ids.

        Nothing changes until the first piece is asked for, and an error before that piece leaves
        the session as it was. Ctrl-C, or closing the iterator, ends the reply where it stands
        (Ctrl-C while a prompt of several chunks is prefilled takes the turn back); the session
        holds what was shown. A stream that is no longer referred to is closed. Raises MmkvError;
        where a token cannot be chosen (NotFiniteError) or written, that takes the turn back if
        :meth:`take_back` can.
        """
        drawn = self.engine.settled(sampling, prefix)
        with self.claimed(), OpenToCtrlC():  # pictures may take their time
            settings = self.engine.logit_settings(
                self.tools if tools is None else tools,
                tool_choice,
                parallel_tool_calls,
                response_format,
                logit_bias,
                prefix,
            )
            told = settings.tools
            turn = compose(self, text, images, videos, system, fps, num_frames, prefix, told)
        return ReplyStream(self, lambda: self._stream(turn, drawn, settings, progress))

    def send_results(
        self,
        results: Sequence[Any],
        sampling: Sampling | None = None,
        fps: float | None = None,
        num_frames: int | None = None,
        progress: Progress | None = None,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = "auto",
        parallel_tool_calls: bool = True,
        response_format: dict[str, Any] | None = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> ReplyStream:
        """Append the results of the latest reply's calls and stream the next reply.

        ``results``: for each call a pair: the :class:`mmkv.ToolCall` or its id, and a text or a
        list of parts in the chat format, which may be pictures. All else is as for :meth:`send`.
        """
        drawn = self.engine.settled(sampling)
        with self.claimed(), OpenToCtrlC():
            settings = self.engine.logit_settings(
                self.tools if tools is None else tools,
                tool_choice,
                parallel_tool_calls,
                response_format,
                logit_bias,
            )
            turn = compose_results(self, results, fps, num_frames, settings.tools)
        return ReplyStream(self, lambda: self._stream(turn, drawn, settings, progress))

    def observe(
        self,
        what: Any,
        at: float | None = None,
        fps: float | None = None,
        skip_similar: float | None = None,
        system: str | None = None,
        progress: Progress | None = None,
        undoable: bool = True,
    ) -> Observed:
        """Read frames or a text into memory, without a reply: the beginning of the next question.

        What is observed between two replies is one message of the user, which stays open:
        :meth:`send` goes on with it, and ends it. A failed call leaves the session as it was;
        :meth:`undo` takes back the latest observation or turn.

        Args:
            what: a text, which gets a line of its own; or a frame (PIL picture, array [H, W, C],
                ``Path``), or a list or array [T, H, W, C] of frames. In a list a string is a path,
                URL or ``data:`` URI, as in ``images``.
            at: seconds from the beginning of what is watched to the first frame, or to the text.
                The frames are then read as those of a video, behind their times if the model
                writes them (Qwen3-VL: ``<1.5 seconds>``), else with ``note`` saying that it
                does not. None, or a model that takes no videos: as pictures.
            fps: frames a second, for the times of those after the first; None: 2.
            skip_similar: leave frames out that are like the last one kept: by how much the grey
                levels (0 to 255) of two small copies may differ, on average. None: read all.
            system: only where nothing was said or observed before.
            progress: called with (tokens done, tokens in all) after each chunk.
            undoable: whether :meth:`undo` can take this back by itself, which needs a copy of the
                cache as for a turn; False: it goes with the turn before it.

        Raises:
            MmkvError: the session is as it was.
        """
        with self.claimed():
            with OpenToCtrlC():
                made = compose_observation(self, what, at, fps, skip_similar, system)
            tokens = 0
            if made.turn is not None:
                tokens = made.turn.tokens
                self._append(made.turn, progress, undoable, answers=False)
            self.end_observation(made)
            counts, memory = (tokens, made.frames, made.skipped, self.next_position), self.memory()
            return Observed(*counts, memory, conversation_notes(*self.told, memory))

    def end_observation(self, made: Observation) -> None:
        """Note that an observation is in the cache."""
        if made.turn is not None:
            self._take_in(made.turn.messages, made.turn.reading)
        self.tell(made.notes)
        self.frames_seen = made.seen

    def template_with(self, tools: Sequence[Tool]) -> ChatTemplate:
        """Return the chat template that tells the model of ``tools``."""
        plain = self.engine.processor.template
        return plain.with_tools(shown_tools(tools)) if tools else plain

    def trace(self) -> Trace:
        """Record from now on which entries stay and which go; see :class:`Trace`.

        The record of evictions takes at most 64 MiB, then the oldest steps are dropped (a single
        step stays whole); pictures take 16 MiB, then later ones are not shown. Only pictures of
        turns sent with :meth:`send` are known.
        """
        from mmkv.explain.trace import Trace

        return Trace(self)

    def undo(self) -> bool:
        """Take back the latest turn (question and reply); False when there is none to take back."""
        with self.claimed():
            if not self._snapshots:
                return False
            self._become(self._snapshots.pop())
            return True

    @whole
    def put_back(self, taken: Session) -> None:
        """Reverse an :meth:`undo`: go back to ``taken``, a fork made before it."""
        self._remember(self.fork_apart())
        self._become(taken)

    @property
    def snapshot_bytes(self) -> int:
        """Count the bytes of pages held so that turns can be taken back."""
        return sum(snapshot.memory().kv_bytes for snapshot in self._snapshots)

    def fork(self) -> Session:
        """Copy cache and conversation (turns in it cannot be undone)."""
        with self.claimed():
            other = cast(Session, super().fork())
            other.history, other.last = deepcopy(self.history), self.last
            other.tools, other.frames_seen = self.tools, self.frames_seen
            other._told = self._told
            other.unfed, other.undo_depth = self.unfed, self.undo_depth
            other.held, other.rewrites, other._cuts = self.held.copy(), self.rewrites, self._cuts
            other.forget_thoughts = self.forget_thoughts
            other._turn_mark, other.watched = self._turn_mark, self.watched
            other.weighing = self.weighing
            return other

    def fork_apart(self) -> Session:
        """Copy it to go back to: what shares a budget never takes anything from the copy."""
        with self.engine.lock:  # so that no other thread cuts in between
            other = self.fork()
            self.engine.budgets.leave(other)
            return other

    def save(self, path: str | Path, extra: dict[str, str] | None = None) -> None:
        """Write cache and conversation to one file, atomically. Raises SessionError."""
        kept = checked_extra(extra)
        with self.claimed():
            dialogue = {
                "mmkv.history": json.dumps(self.history),
                "mmkv.unfed": json.dumps(self.unfed),
                "mmkv.held": json.dumps(self.held.as_json()),
                "mmkv.tools": json.dumps([one.as_json() for one in self.tools]),
                "mmkv.frames": json.dumps(self.frames_seen.as_json()),
                "mmkv.notes": json.dumps(self._told),
            }
            super().save(path, kept | dialogue)

    @classmethod
    def load(cls, engine: Engine, path: str | Path) -> Session:
        """Open a session file on ``engine``. Raises SessionError; nothing is held then."""
        return engine.load_session(path)[0]

    def restore_dialogue(self, extra: dict[str, str]) -> None:
        """Take over the conversation from a session file's strings. Raises SessionError."""
        from mmkv.dialogue_schema import (
            InvalidFile,
            parse_frames,
            parse_held,
            parse_history,
            parse_notes,
            parse_tools,
            parse_unfed,
        )

        family = self.engine.family
        known = family.vocab_size, {*family.placeholder.values()}
        try:
            history = parse_history(extra.get("mmkv.history", "[]"))
            tools = parse_tools(extra.get("mmkv.tools", "[]"))
            unfed = parse_unfed(extra.get("mmkv.unfed", "[]"), *known)
            moved = self.compactions > 0
            held = parse_held(extra.get("mmkv.held", "null"), self.seen, *known, moved)
            frames = parse_frames(extra.get("mmkv.frames", "{}"))
            told = parse_notes(extra.get("mmkv.notes", "[]"))
        except InvalidFile as error:
            raise SessionError(
                f"the conversation in the session file is damaged ({error}); use a copy, or begin "
                "a new session"
            ) from error
        self.history, self.unfed, self.held, self.tools = history, unfed, held, tools
        self.frames_seen, self._told = frames, told

    def memory(self) -> Memory:
        """Return physical memory, entries, and how the cache differs from a fresh rendering."""
        told = [self.held.differs, self.held.forgotten]
        differs = "; ".join(filter(None, told)) or None
        escalated = None if self.weighing is None else self.weighing.outcome
        return replace(super().memory(), differs=differs, escalated=escalated)

    def tell(self, notes: Sequence[str]) -> None:
        """Add notes on what was read, for the user; the latest few are kept."""
        self._told = tuple(dict.fromkeys((*self._told, *notes)))[-MOST_TOLD:]

    @property
    def notes(self) -> list[Note]:
        """Remarks for the user on the conversation as it is now: see :mod:`mmkv.notes`."""
        return conversation_notes(*self.told, self.memory())

    @property
    def told(self) -> tuple[tuple[str, ...], str | None]:
        """The notes on what was read, and how it differs from the conversation rendered afresh."""
        return self._told, self.held.differs

    def close(self) -> None:
        """Return every page, also those held for undo; a stream raises at its next piece."""
        with self.engine.lock:
            while self._snapshots:
                self._snapshots.pop().close()
            self.close_again()
            if self._before_turn is not None:
                self._before_turn.close()
            super().close()

    def __enter__(self) -> Self:
        return self

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Claim the session for the next piece of its stream. Raises SessionError."""
        with self._taken():
            before, self._in_stream = self._in_stream, True
            try:
                yield
            finally:
                self._in_stream = before

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Claim the session to end its stream, once a piece that another thread makes is done."""
        with self._claim:
            yield

    def _require_idle(self) -> None:
        if self._streaming and not self._in_stream:
            raise SessionError(
                "the session has an unfinished stream; read it to its end, or close() it first"
            )

    @property
    def basis(self) -> tuple[object, int]:
        """What a turn is composed for: another one once the session has changed."""
        return self._turn_mark, self.seen

    def with_unfed(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Put the tokens of the latest reply that the cache lacks before the new ones."""
        return with_tokens(inputs, self.unfed, behind=False)

    def _stream(
        self, turn: Prompt, drawn: Settled, settings: LogitSettings, progress: Progress | None
    ) -> Generator[str, None, None]:
        self._require_open()
        if self._streaming or turn.basis != self.basis:
            raise SessionError(
                "the session has gone on since this message was sent; send it again when the "
                "stream before it has ended"
            )
        self._streaming = True
        try:
            yield from self._reply(turn, drawn, settings, progress)
        finally:
            self._streaming = False

    def _reply(
        self, turn: Prompt, drawn: Settled, settings: LogitSettings, progress: Progress | None
    ) -> Generator[str, None, None]:
        start = self.turn_start()
        writer = ReplyWriter(
            self.engine,
            drawn,
            settings,
            prompt=turn.end,
            text=turn.text,
            prefix=turn.prefix,
            started=turn.started,
        )
        # The stream holds Ctrl-C back: it is delivered where the session stands for what was shown.
        logits = self._append(turn, progress)
        self.begin_reply(turn, settings.rules.notes)
        try:
            CtrlC.check()
            writer.start(self.read_ids)
            token = following(self, writer, logits)
            while token is not None:
                if token == PAUSED:
                    token = writer.draw_from(self._read_again(turn, writer, progress))
                    continue
                if piece := writer.take():
                    yield piece
                (token,) = step(self.engine, [(self, writer, token)])
                CtrlC.check()
        except ContextError:
            writer.finish("context")
        finally:
            writer.finish("interrupted")
            rest = writer.take()
            if writer.failure is None or not self.take_back(start):
                self.end_reply(writer, turn.tokens)
        if writer.failure is not None:
            raise writer.failure
        if rest:
            yield rest

    def turn_start(self) -> TurnStart:
        """Return where the session stands, for :meth:`take_back`."""
        before = self.state(), tuple(self.history), self.unfed, self.last, self.note
        return TurnStart(*before, self._told, self.held.copy(), self._cuts, self.tools)

    @property
    def place(self) -> Place:
        """Return where the session stands."""
        return Place(self.seen, self.next_position, self.prompt_tokens, self.evicted)

    def go_back(self, plan: Plan, again: int) -> str | None:
        """Drop the part that is to be read again.

        Args:
            plan: from where; again: how many of its tokens stay.

        Returns:
            how the session differs now from one that reads the conversation afresh, or None.
        """
        place = self.held.back(plan, again)
        self.cut_back(place.seen, place.position, place.prompt)
        self.unfed, self._cuts = (), self._cuts + 1
        self._recount_ids()
        lost = self.evicted - plan.evicted
        if not place.seen:
            self.held.differs = None
        if lost <= 0:
            return None
        return (
            "earlier messages were read again, as they are shown now; up to "
            f"{lost:,} entries of what stands before them were evicted while they stood as before"
        )

    def _recount_ids(self) -> None:
        """Leave what was let go out of the ids that penalties count."""
        tokenizer, read = self.engine.processor.tokenizer, 0
        for piece in self.held.pieces or ():
            if piece.ids is not None or piece.known:
                read = with_ids(read, piece.ids or piece.known)
            else:  # with pictures, in a file of an older version
                ids = tokenize(tokenizer, piece.text or "")
                read = with_ids(read, [*ids, *self.engine.media_token_ids])
        self.read_ids = read

    def begin_reply(self, turn: Prompt, notes: Sequence[str] = ()) -> None:
        """Note that a turn is in the cache, and that a reply follows, of which there is nothing.

        Args:
            notes: on the reply, for the user.
        """
        self.last = None
        said = {"role": "assistant", "content": turn.prefix}
        self._take_in([*turn.messages, said], turn.reading)
        if turn.tools is not None:
            self.tools = turn.tools
        self.note = "; ".join(filter(None, [self.note, *notes])) or None
        self._reply_from = self.seen
        self.begin_weighing()

    def _take_in(self, messages: Sequence[Message], reading: TurnReading | None) -> None:
        """Note that ``messages`` are in the cache, but for a reply, of which there is nothing."""
        self.history[:] = joined(self.history, messages)
        self.unfed, self.note = (), None
        if reading is None:
            self.held = Held(None)
        else:
            # Once, not again where only the number has grown.
            again = _kind(reading.differs) == _kind(self.held.differs)
            told = [*reading.notes, None if again else reading.differs]
            self.note = "; ".join(filter(None, told)) or None
            self.tell(reading.notes)
            self.note_read(reading.read, reading.differs)
        self._turn_mark = object()  # a stream that was composed before this turn is out of date

    def note_read(self, read: Read, differs: str | None = None) -> None:
        """Note the text of a prompt that is in the cache."""
        self.held.add_prompt(read, self.place)
        if self.keeps_media:
            self.held.let_go(sys.maxsize, MOST_TO_REREAD)
        else:
            self.held.let_go(read.loose)
        self.held.differs = differs or self.held.differs

    def note_reply(self, writer: ReplyWriter, text: str) -> str:
        """Note a reply that is over, shown as ``text``, and which token of it the cache lacks.

        Returns:
            what the history has of it: the answer alone where the thought is forgotten.
        """
        self.end_weighing(writer)
        with self.engine.lock:
            if not self.closed:
                self.drop_ahead()  # pages of what the reply does not say
        self.unfed = () if writer.unfed is None else (writer.unfed,)
        fed = writer.token_ids if writer.unfed is None else writer.token_ids[:-1]
        thought = writer.thought if self.forget_thoughts and writer.failure is None else None
        # One that is not over stays, also where the next prompt brings its last token.
        if thought is None or thought.state != "closed" or thought.stop > len(fed):
            self.held.add_reply(text, fed, self.place)
            return text
        with self.engine.lock:
            if not self.closed:
                begin = self.seen - len(fed)
                self._forget(begin + thought.start, begin + thought.stop)
        opening = self.held.cut_end(-thought.start, thought.marks.open) if thought.start < 0 else ""
        answer, *others = writer.answers(text, opening)
        ids = [*fed[: max(thought.start, 0)], *fed[max(thought.stop, 0) :]]
        self.held.add_reply(answer, ids, self.place, tuple(others))
        return answer

    def end_reply(self, writer: ReplyWriter, prompt_tokens: int) -> Reply:
        """Put the reply that ``writer`` has finished into the history."""
        message, text = self.history[-1], writer.held_text()
        said = self.note_reply(writer, text)
        # What begins a thought that is forgotten goes with it.
        message["content"] = (message["content"] if said == text else "") + said
        if message["content"] == said:
            message["content"] = said.removeprefix(self.engine.processor.template.reply_blank)
        with self.engine.lock:
            memory = None if self.closed else self.memory()
        reply = self.last = writer.reply(prompt_tokens, memory)
        if reply.tool_calls:
            calls = [one.for_template() for one in reply.tool_calls]
            message |= {"sampled": True, "tool_calls": calls}
        return reply

    def take_back(self, start: TurnStart) -> bool:
        """Leave out all since ``start``, where that can be; whether it could.

        It can with a snapshot (``undo_depth``), and without one as :meth:`rewind` says.
        """
        with self.engine.lock:
            if self.closed:
                return False
            self.close_again()
            self.drop_ahead()
            if self._before_turn is not None:
                before, self._before_turn = self._before_turn, None
                self._become(before)
            elif self.undo_depth and self._snapshots:
                self._become(self._snapshots.pop())
            elif start.cuts != self._cuts or not self.rewind(start.state):
                return False
            self.history[:] = start.history
            self.unfed, self.last, self.note = start.unfed, start.last, start.note
            self._told, self.held, self.tools = start.told, start.held, start.tools
            self._turn_mark = object()
            return True

    def _append(
        self, turn: Prompt, progress: Progress | None, undoable: bool = True, answers: bool = True
    ) -> torch.Tensor:
        """Prefill a turn whole, or leave the session as it was; ``answers``: a reply follows."""
        reading = turn.reading
        assert reading is not None
        appends = reading.plan is None
        frames = self._frames(reading) if appends else []  # what fails here changes nothing
        kept = bool(self.undo_depth) and undoable
        control = self.engine.loss_control if answers else None
        refuses = control is not None and control.action == "refuse"
        if appends and not (kept or refuses) and turn.tokens <= self.engine.prefill_chunk:
            # One chunk: the engine undoes it itself when it fails. A Ctrl-C meanwhile is
            # delivered once the turn stands in the history, as an interrupted empty reply.
            logits = self.prefill(turn.inputs, progress)
            self._show(frames)
            return logits
        snapshot = self.fork_apart()

        def report(done: int, total: int) -> None:
            CtrlC.check()
            if progress is not None:
                progress(done, total)

        try:
            if reading.plan is not None:
                reading.differs = self.go_back(reading.plan, reading.again)
                frames = self._frames(reading)
            logits = self.prefill(turn.inputs, report)
        except BaseException:
            self._become(snapshot)
            raise
        if kept:
            self._remember(snapshot)
        elif refuses:
            self._before_turn = snapshot
        else:
            snapshot.close()
        self._show(frames)
        return logits

    def begin_weighing(self) -> None:
        """Begin to weigh the reply to what has been read, where there is a calibration.

        What lossless decoding drafts is counted from here on, too.
        """
        if self.ahead is not None:
            self.ahead.drafted = self.ahead.accepted = 0
        control = self.engine.loss_control
        self.weighing = None if control is None else control.begin(self)

    def weigh(self, logits: torch.Tensor) -> bool:
        """Weigh the next token of the reply; whether the conversation is to be read again first.

        Args:
            logits: ``[vocab]``.

        Raises:
            ForgottenError: the reply is refused.
        """
        control, weighing = self.engine.loss_control, self.weighing
        if control is None or weighing is None or weighing.outcome is not None:
            return False
        try:
            if not control.doubtful(weighing, logits):
                return False
        except ForgottenError:
            self.watched = control.end(self.watched, weighing)
            raise
        if control.action == "say":
            self.settle("said")
        return control.action == "reread"

    def settle(self, outcome: Outcome, why: str = "") -> None:
        """Note what becomes of a reply that is doubtful."""
        control = self.engine.loss_control
        assert control is not None and self.weighing is not None
        if outcome != "reread":
            self.close_again()
        control.settle(self.weighing, outcome, why)

    def open_again(self) -> Session:
        """Open :attr:`again`, an empty session under the budget of second readings."""
        control = self.engine.loss_control
        assert control is not None
        self.again = self.engine.session(control.reread_budget)
        self.again.keeps_media = False
        return self.again

    def whole_prompt(self, turn: Prompt, again: Session) -> dict[str, torch.Tensor]:
        """Return model inputs of the conversation up to the reply that has begun, for ``again``.

        Args:
            turn: the latest one.

        Raises:
            MmkvError: its pictures or videos are not at hand, or it cannot be read so.
        """
        if turn.tokens == self._reply_from:  # all that there is
            return turn.inputs
        media, (*messages, begun) = self.held.all_media, self.history
        if media is None:
            raise SessionError("its text, pictures or videos are not at hand any more")
        made = compose_messages(again, messages, lambda: media, begun["content"], self.tools)
        return made.inputs

    def _read_again(
        self, turn: Prompt, writer: ReplyWriter, progress: Progress | None
    ) -> torch.Tensor:
        """Return the logits [vocab] that a doubtful reply goes on from: of :attr:`again`, or its
        own where the conversation cannot be read again.
        """

        def report(done: int, total: int) -> None:
            CtrlC.check()
            if progress is not None:
                progress(done, total)

        assert self.weighing is not None and self.weighing.logits is not None
        own = self.weighing.logits
        try:
            again = self.open_again()
            inputs = with_tokens(self.whole_prompt(turn, again), writer.token_ids)
            logits = again.prefill(inputs, report)
        except MmkvError as error:
            self.settle("not_reread", str(error))
            return own
        self.settle("reread")
        return logits

    def end_weighing(self, writer: ReplyWriter) -> None:
        """Let go what a reply was weighed with, now that it is over."""
        self.close_again()
        if self._before_turn is not None:
            self._before_turn.close()
            self._before_turn = None
        control, weighing = self.engine.loss_control, self.weighing
        whole = writer.finish_reason != "interrupted"
        if control is not None and weighing is not None and (whole or weighing.outcome is not None):
            self.watched = control.end(self.watched, weighing)

    def close_again(self) -> None:
        """Let the second reading of the conversation go."""
        if self.again is not None:
            self.again.close()
            self.again = None

    def _frames(self, reading: TurnReading) -> list[tuple[int, Frame, int]]:
        """Encode the pictures of a turn that comes next for the recorder, if there is one."""
        read = reading.read
        if self.recorder is None or not (read.pictures or read.clips):
            return []
        from mmkv.explain.snapshot import frames_of

        family, known = self.engine.family, self.recorder.media
        given = (reading.inputs, family.placeholder, read.pictures, read.clips)
        return frames_of(*given, self.seen, family.config, known)

    def _show(self, frames: list[tuple[int, Frame, int]]) -> None:
        if self.recorder is not None:
            self.recorder.media += frames

    def _remember(self, snapshot: Session) -> None:
        with self.engine.lock:
            self._snapshots.append(snapshot)
            while len(self._snapshots) > (0 if self.closed else self.undo_depth):
                self._snapshots.pop(0).close()

    def _become(self, other: Session) -> None:
        """Take over the state of ``other`` (a fork of this session) and close what was held."""
        with self.engine.lock:
            if self.closed:  # by another thread; closed it stays
                other.close()
                return
            snapshots, self._snapshots = self._snapshots, []
            recorder = self.recorder
            # The objects exchange their state, so that references to this session stay valid.
            self.__dict__, other.__dict__ = other.__dict__, self.__dict__
            for name in _OWN:
                mine, theirs = self.__dict__, other.__dict__
                mine[name], theirs[name] = theirs[name], mine[name]
            other.close()
            self._snapshots = snapshots
            # The recording belongs to the object, too: it goes on, or stays ended.
            if recorder is None:
                self.recorder = None
            elif self.recorder is None:
                self.record(recorder.limit)


def _kind(note: str | None) -> str | None:
    """Return a note without its numbers."""
    return None if note is None else re.sub(r"[\d,]+", "", note)
