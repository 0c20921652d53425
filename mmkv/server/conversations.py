"""The conversations that the server keeps, and how a request finds the one it continues."""

from __future__ import annotations

import json
import stat
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from pydantic import NonNegativeInt

from mmkv.calls.tools import Tool, ToolCall, arguments_text
from mmkv.engine.budgets import why_unbound
from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import CapacityError, ContextError, InputError, SessionError
from mmkv.engine.strict import InvalidFile, Strict, parse
from mmkv.notes import conversation_notes
from mmkv.prompt.messages import as_parts
from mmkv.prompt.video import FramesSeen
from mmkv.scheduler.conversation import CachedConversation
from mmkv.server.prompts import Message, Part, closed
from mmkv.server.store import Digest, copy_whole

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.budget import Budget
    from mmkv.engine.contents import Memory, Span
    from mmkv.prompt.held import Held
    from mmkv.prompt.media import Note
    from mmkv.scheduler import Scheduler
    from mmkv.server.prompts import Kind, Rendered, Sampled
    from mmkv.server.store import HibernationFolder
    from mmkv.session import Session


Told = tuple[tuple[str, ...], str | None]  # see mmkv.Session.told
_OWN = "mmkv.server"  # what a file holds beside what every session file does


class _Own(Strict):
    """What it is; older files lack the later fields."""

    seen: tuple[NonNegativeInt, ...] = ()
    root: str = ""
    tools: tuple[dict[str, Any], ...] = ()
    media: tuple[Digest, ...] = ()
    spans: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()


@dataclass
class ConversationInfo:
    """What is known of a conversation, wherever its memory lies.

    Attributes:
        seen: tokens that it has seen, by modality.
        rendered: the text that was read, but for a reply at its end; None where it is not known.
        messages: with the digests of their media; none for one that is found by their keys.
        base_key: what else the memory depends on, see :func:`mmkv.server.prompts.chain`.
        memory: its numbers, where somebody may ask for them.
        sampled: the replies with calls or thoughts, as the model wrote them.
        tools: the functions that the model was told of, in OpenAI's form.
        spans: [start, stop) of the tokens of each message; empty where it is not known.
        kept: what is held of each message, where somebody has asked; see :func:`kept_shares`.
        told: see :attr:`mmkv.Session.told`.
        frames: what is remembered of the frames that were observed.
        next_position: rope position of the next text token.
    """

    seen: tuple[int, ...]
    rendered: Rendered | None = None
    messages: tuple[Message, ...] = ()
    base_key: str = ""
    memory: Memory | None = None
    sampled: tuple[Sampled, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    spans: tuple[Span, ...] = ()
    kept: list[dict[str, Any]] | None = None
    told: Told = ((), None)
    frames: FramesSeen = field(default_factory=FramesSeen)
    next_position: int = 0

    @property
    def notes(self) -> list[Note]:
        """Return what the user is to be told, see :mod:`mmkv.notes`."""
        return [] if self.memory is None else conversation_notes(*self.told, self.memory)

    @property
    def digests(self) -> tuple[str, ...]:
        """Return those of all pictures and videos, in order."""
        return tuple(part.digest or "" for one in self.messages for part in one.media)


def most_entries(engine: Engine, budget: Budget, seen: int) -> int | None:
    """Return how many entries a budget lets a conversation hold once it has seen so many tokens.

    None: nothing binds it. Where sessions share a budget, it is that of all.
    """
    if why_unbound(engine) is not None:
        return None
    if engine.shared is not None:
        return engine.shared.entries
    return engine.budgets.allowed(budget.ceiling, seen)


def kept_shares(
    session: Session, messages: Sequence[Message], spans: Sequence[Span]
) -> list[dict[str, Any]]:
    """Return which share of each message's entries a session holds, and of each of its media.

    A message whose tokens are not known has None. Where a message has another number of media than
    the model saw pictures, as frames of a video are, each has the mean of all.
    """
    known = [span for span in spans if span[0] < span[1]]
    shares = dict(zip(known, session.held_shares(known), strict=True))
    pictures = list(zip(session.pictures, session.memory().pictures, strict=True))
    found = []
    for message, (start, stop) in zip(messages, spans, strict=False):
        inside = [share for (at, end), share in pictures if start <= at and end <= stop]
        if inside and len(inside) != len(message.media):
            inside = [sum(inside) / len(inside)] * len(message.media)
        media: Sequence[float | None] = inside or [None] * len(message.media)
        found.append({"kept": shares.get((start, stop)), "media": media})
    return found


class ConversationState(CachedConversation):
    """A conversation as it stood after one of its messages. It never changes.

    (Where sessions share a budget, others may evict from it, but for the time of its own turns.)
    A turn goes on from a copy, so a turn that is cut off changes nothing. All methods belong to the
    engine thread; the attributes may be read by any.

    Args:
        session: taken over; folder: where it hibernates; None: it is dropped instead.
        pages: that the session holds, where that is known.

    Attributes:
        info: what is known of it; bytes: of its pages.
        keys: the hashes by which the prefix cache finds it; none for one of a session or response.
        replied: whether it ends with a reply that was sampled.
        references: how many sessions and responses go on from it; uses: how many requests did,
            the one that left it on its way among them.
        expendable: whether it may be dropped if it cannot hibernate, as a stored response may.
    """

    def __init__(
        self,
        session: Session,
        info: ConversationInfo,
        folder: HibernationFolder | None = None,
        keys: tuple[str, ...] = (),
        replied: bool = True,
        pages: int | None = None,
    ) -> None:
        path = None if folder is None else folder.path
        super().__init__(session.engine, None, path, session)
        self.info, self.keys, self.replied = info, keys, replied
        self.references = 1  # who asked for it
        self.uses = 0 if replied else 1  # who read its last message goes on
        self.expendable = False
        self._folder = folder
        self._pages = super().pages if pages is None else pages
        self.bytes = self._pages * session.engine.cache.pool.page_bytes
        shared = session.engine.shared
        self._weight = 1.0 if shared is None else shared.weight(session)
        self._turns: set[int] = set()  # that go on from it, where it shares a budget
        session.history = []  # stands in the info: a fork need not copy it

    @property
    def held(self) -> Held | None:
        """Return what it has read, as text; None while it lies in its file."""
        return None if self.live is None else self.live.held

    @property
    def tokens(self) -> int:
        """Count the tokens that it has seen, evicted ones too."""
        return sum(self.info.seen)

    @property
    def pages(self) -> int:
        """Count the pages that it holds; only under a shared budget do they change."""
        return self._pages if self.engine.shared is None else super().pages

    def resting(self) -> int:
        """Return the pages that it holds; under a shared budget, those that are its own."""
        shared = self.engine.shared
        if shared is None or self.live is None:
            return self._pages
        return self.pages if self._turns else shared.pages_each

    def refresh(self) -> None:
        """Update its numbers: under a shared budget other sessions change them."""
        if self.live is not None:
            self.info.memory, self._pages = self.live.memory(), self.pages
            self.info.kept = None if self.engine.shared is not None else self.info.kept
            self.bytes = self._pages * self.engine.cache.pool.page_bytes

    def kept(self) -> list[dict[str, Any]] | None:
        """Return what is held of each message; None: it lies in a file, and nobody had asked."""
        if self.live is not None and (self.info.kept is None or self.engine.shared is not None):
            self.info.kept = kept_shares(self.live, self.info.messages, self.info.spans)
        return self.info.kept

    def most_entries(self) -> int | None:
        """Return how many entries it may hold; see :func:`most_entries`."""
        return most_entries(self.engine, self.budget, self.tokens)

    def leave_shared_budget(self, turn: object) -> None:
        """Keep others from evicting from it while a turn goes on from its copy."""
        if self.engine.shared is not None and self.live is not None:
            self.engine.shared.leave(self.live)
            self._turns.add(id(turn))

    def join_shared_budget(self, turn: object) -> None:
        """Let it compete again once no turn needs it; all are then cut to the shared budget."""
        shared = self.engine.shared
        self._turns.discard(id(turn))
        if shared is None or self.live is None or self._turns:
            return
        with self.engine.lock, torch.inference_mode():
            shared.join(self.live, self._weight)
            shared.cut([], self.engine.interval)  # all its sessions, whichever are named

    def save(self, path: Path) -> None:
        """Write it to another file, whole or not at all. Raises SessionError."""
        if self.live is not None:
            self._save(self.live, path)
        else:
            assert self.path is not None
            copy_whole(self.path, path)

    def _write(self, session: Session) -> bool:
        """Write it to its file; an expendable one is dropped if that fails."""
        assert self._folder is not None and self.path is not None
        self.refresh()
        try:
            with self._folder.writing():
                self._save(session, self.path)
        except SessionError:
            if not self.expendable or self.references > 1:  # a turn goes on from it
                raise
            return False
        return True

    def _save(self, session: Session, path: Path) -> None:
        info = self.info
        messages, spans = closed(info.messages, info.spans)
        session.history = [_plain(message) for message in messages]
        session.frames_seen = info.frames
        own = {"seen": info.seen, "root": info.base_key, "tools": info.tools}
        own |= {"media": info.digests, "spans": spans}
        try:
            session.save(path, {_OWN: json.dumps(own)})
        finally:
            session.history = []


class ConversationStore:
    """The conversations that sessions and responses go on from, on the engine thread.

    Idle ones hibernate when room is short.

    Args:
        folder: where they hibernate.

    Attributes:
        longest: tokens that all conversations may have together, those of the prefix cache and
            evicted tokens too: their texts are held. None: each ends at the model's context.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, folder: HibernationFolder) -> None:
        self._engine, self._scheduler, self._folder = engine, scheduler, folder
        self.longest: int | None = None
        self._all: WeakSet[ConversationState] = WeakSet()
        self._found: WeakValueDictionary[str, ConversationState] = WeakValueDictionary()

    def name(self, conversation: ConversationState, keys: Sequence[str]) -> None:
        """Let a conversation be found by its messages, too, by who sends them all again."""
        self._found.update(dict.fromkeys(keys, conversation))

    def at(self, key: str) -> ConversationState | None:
        """Return the conversation whose last message has a key, if somebody still holds it."""
        found = self._found.get(key)
        return found if found is not None and found.references and not found.lost else None

    def keep(self, session: Session, info: ConversationInfo) -> ConversationState:
        """Take over a session that no request uses any more."""
        made = ConversationState(session, info, self._folder)
        self._all.add(made)
        self._scheduler.adopt(made)
        return made

    def touch(self, conversation: ConversationState) -> None:
        """Note that a conversation is the most recently used."""
        self._scheduler.adopt(conversation)

    def require_tokens(self, tokens: int, start: ConversationState | None = None) -> None:
        """Have room for the texts of a conversation with so many tokens; copies make room for it.

        Args:
            start: what it goes on from, which has the same texts.

        Raises:
            ContextError: it would have no room if it were alone; CapacityError: it has none now.
        """
        if self.longest is None:
            return
        if tokens > self.longest:
            raise ContextError(
                f"the conversation would have {tokens:,} tokens, more than the {self.longest:,} "
                "whose texts this server keeps; begin a new one"
            )
        others = (one for one in self._all if one.references and one is not start)
        taken = sum(one.tokens for one in others)
        if taken + tokens > self.longest:
            raise CapacityError(
                f"the texts of all conversations would have {taken + tokens:,} tokens, more than "
                f"the {self.longest:,} that this server keeps; close a session",
                tokens,
                taken,
                self.longest,
                "tokens",
            )
        residents = self._scheduler.residents
        while residents.copies:
            held = (one for one in residents.copies if isinstance(one, ConversationState))
            copies = sum(one.tokens for one in held if one is not start)
            if taken + tokens + copies <= self.longest:
                return
            residents.drop_oldest_copy()

    def leave_shared_budget(self, conversation: ConversationState, turn: object) -> None:
        """Keep others from evicting from a conversation while a turn goes on from its copy."""
        if self._engine.shared is not None:
            conversation.leave_shared_budget(turn)
            self._scheduler.adopt(conversation)

    def join_shared_budget(self, conversation: ConversationState, turn: object) -> None:
        """Let a conversation compete again, unless nobody refers to it any more."""
        if self._engine.shared is not None and conversation.references:
            conversation.join_shared_budget(turn)
            self._scheduler.adopt(conversation)

    def hold(self, conversation: ConversationState) -> None:
        """Add a reference."""
        conversation.references += 1

    def release(self, conversation: ConversationState) -> None:
        """Take a reference away; the last one closes the conversation."""
        conversation.references -= 1
        if not conversation.references:
            self._scheduler.close_session(conversation)

    def load(self, path: Path, name: str, base_key: str, weight: float = 1.0) -> ConversationState:
        """Read a session file, whole or not at all.

        Args:
            name: of the file, for messages; weight: of the session in a shared budget.

        Raises:
            SessionError: it is not there, damaged, or of another model; CapacityError: there is no
                room now.
        """
        self._scheduler.free_up(self._most_pages(path, name))
        try:
            session, extra = self._engine.load_session(path)
        except SessionError as error:
            raise SessionError(str(error).replace(str(path), name)) from error
        try:
            if self._engine.shared is not None:
                with self._engine.lock:
                    self._engine.shared.join(session, weight)
            return self.keep(session, _read_info(session, extra, base_key))
        except BaseException:
            session.close()
            raise

    def _most_pages(self, path: Path, name: str) -> int:
        """Bound the pages of a file by its size: a page may be nearly empty once in each row."""
        try:
            about = path.lstat()  # a link may lead to another tenant's
        except OSError as error:
            raise SessionError(f"there is no session file {name}; check the name") from error
        if not stat.S_ISREG(about.st_mode):
            raise SessionError(f"the session {name} is no file but a link or pipe; remove it")
        engine = self._engine
        return about.st_size // engine.cache.pool.kv_page_bytes + engine.spec.rows + 1


def _read_info(session: Session, extra: dict[str, str], base_key: str) -> ConversationInfo:
    """Return what a session file says of its session.

    Files that ``mmkv chat`` wrote lack the number of tokens by modality: for them it is estimated
    from the entries that are left.
    """
    memory = session.memory()
    messages = tuple(_message(one) for one in session.history)
    if messages and messages[-1].role == "user":
        messages = (*messages[:-1], replace(messages[-1], open=True))
    elif not messages or messages[-1].role != "assistant":
        raise SessionError("the session file holds no finished turn; save it after a reply")
    try:
        own: _Own = parse(_Own, extra.get(_OWN, "{}"), is_json=True)
        tools = tuple(Tool.of(one).for_template() for one in own.tools)
    except (InvalidFile, InputError) as error:
        raise SessionError("the session file is damaged; use another one") from error
    messages, seen, spans = _with_digests(messages, own.media), list(own.seen), own.spans
    if len(seen) != len(MODALITIES) or sum(seen) != session.seen:
        rows = session.engine.spec.rows
        seen = [-(-memory.by_modality[name] // rows) for name in MODALITIES]
        seen[0] = session.seen - sum(seen[1:])
    if not _are_spans(spans, len(messages), session.seen):
        spans = ()
    made = ConversationInfo(tuple(seen), None, messages, base_key, memory, tools=tools, spans=spans)
    frames, told = session.frames_seen, session.told
    return replace(made, frames=frames, told=told, next_position=session.next_position)


def _are_spans(spans: Sequence[Span], messages: int, seen: int) -> bool:
    ends = [at for span in spans for at in span if span != (0, 0)]
    return len(spans) == messages and ends == sorted(ends) and all(0 <= at <= seen for at in ends)


def _with_digests(messages: tuple[Message, ...], digests: Sequence[str]) -> tuple[Message, ...]:
    """Return messages whose media have the digests that their file tells, in order."""
    if len(digests) != sum(len(one.media) for one in messages):
        return messages
    left = iter(digests)
    return tuple(
        replace(
            one,
            parts=tuple(
                replace(part, digest=next(left)) if part.kind != "text" else part
                for part in one.parts
            ),
        )
        for one in messages
    )


def _message(stored: Mapping[str, Any]) -> Message:
    """Return a message of a session's history; its media get a digest that no other has."""
    parts = []
    for one in as_parts(stored["content"]):
        if one["type"] != "text":
            kind: Kind = "image" if one["type"] == "image" else "video"
            parts.append(Part(kind, digest=uuid.uuid4().hex))
        elif one["text"]:
            parts.append(Part("text", one["text"]))
    called = [(one["id"], one["function"]) for one in stored.get("tool_calls") or ()]
    calls = tuple(
        ToolCall(own["name"], arguments_text(own["arguments"]), name) for name, own in called
    )
    return Message(
        stored["role"],
        tuple(parts),
        calls,
        stored.get("reasoning_content"),
        stored.get("tool_call_id"),
        stored.get("name"),
        "".join(part.text for part in parts) if stored.get("sampled") else None,
    )


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as a session's history has it."""
    made = message.for_template()
    if not message.media:
        made["content"] = "".join(part["text"] for part in made["content"])
    return made


class PrefixCache:
    """Conversations that are found by their first messages, for requests that name no session.

    They stay within a limit. The least recently used go first, and all go when a request needs
    their pages. Those that a conversation has left behind, and nobody else has used, go at once.

    Args:
        most: pages that all may hold together; None: as the scheduler has room.
    """

    def __init__(self, scheduler: Scheduler, most: int | None) -> None:
        self._scheduler, self._most = scheduler, most
        self._found: dict[str, ConversationState] = {}

    @property
    def pages(self) -> int:
        """Count the pages that they hold."""
        return self._scheduler.residents.copy_pages

    def at(self, key: str) -> ConversationState | None:
        """Return the state of a conversation after the message with a key.

        The caller calls :meth:`touch` if it is used.
        """
        return self._found.get(key)

    def touch(self, conversation: ConversationState) -> None:
        """Note that a conversation is the most recently used."""
        conversation.uses += 1
        self._scheduler.residents.touch_copy(conversation)

    def leave_behind(self, keys: Sequence[str]) -> None:
        """Drop the states of a conversation that only itself has gone on from.

        Args:
            keys: of its messages up to the turn before the latest: those of the latest are asked
                for again where somebody edits a message, or wants another reply.
        """
        for key in keys:
            found = self._found.get(key)
            if found is not None and found.uses <= 1:
                self._scheduler.residents.drop_copy(found)

    def keep(
        self,
        keys: tuple[str, ...],
        pages: int,
        session: Callable[[], Session],
        info: ConversationInfo,
        replied: bool,
    ) -> bool:
        """Keep the session that ``session`` returns, if there is room for its ``pages``.

        What is found under a key already stays.

        Args:
            replied: whether it ends with a reply that was sampled.

        Returns:
            whether it is kept; if not, ``session`` was not called.
        """
        fresh = tuple(dict.fromkeys(key for key in keys if key not in self._found))
        if not fresh:
            return False

        def make() -> ConversationState:
            return ConversationState(session(), info, None, fresh, replied, pages)

        made = self._scheduler.keep_copy(pages, make, self._dropped, self._most)
        if made is not None:
            self._found |= dict.fromkeys(fresh, made)
        return made is not None

    def _dropped(self, conversation: ConversationState) -> None:
        for key in conversation.keys:
            del self._found[key]
