"""Memories of conversations, in memory or in files, found again by what they hold."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mmkv.engine.contents import MODALITIES
from mmkv.engine.errors import SessionError
from mmkv.server.prompts import Message, Part

if TYPE_CHECKING:
    from mmkv.api import Engine
    from mmkv.engine.contents import Memory
    from mmkv.prompt.held import Held
    from mmkv.scheduler import Scheduler
    from mmkv.server.prompts import Rendered
    from mmkv.server.store import HibernationFolder
    from mmkv.session import Session


SUFFIX = ".mmkv"
_OWN = "mmkv.server"  # what a file holds beside what every session file does


@dataclass
class ConversationInfo:
    """What is known of a memory wherever it lies.

    Attributes:
        messages: of the conversation, with the digests of their media; the last is a reply.
        root: what else the memory depends on, see :func:`mmkv.server.prompts.chain`.
        seen: tokens that it has seen, by modality.
        memory: its numbers.
        rendered: the text that was read before the reply; None where that is not known.
    """

    messages: tuple[Message, ...]
    root: str
    seen: tuple[int, ...]
    memory: Memory
    rendered: Rendered | None = None


class Kept:
    """The memory of a conversation as it stood after a reply. It never changes.

    (Where sessions share a budget, others may evict from it, but for the time of its own turns.)
    A turn goes on from a copy, so a turn that is cut off changes nothing. All methods belong to the
    engine's thread; the attributes may be read by any.

    Args:
        session: taken over; path: where it hibernates; folder: of that.

    Attributes:
        facets: what is known of it; budget: of its session; bytes: of its pages.
        references: how many sessions and responses go on from it.
        expendable: whether it may be dropped where it cannot hibernate: nobody was promised more.
    """

    replied = True

    def __init__(
        self, session: Session, info: ConversationInfo, path: Path, folder: HibernationFolder
    ) -> None:
        self._folder, self.expendable = folder, False
        self.info, self.budget, self.path = info, session.budget, path
        self.seen, self.rendered = info.seen, info.rendered
        self.references = 1  # who asked for it
        pool = session.engine.cache.pool
        self._pages = session.engine.cache.held_pages(session.seq)
        self.bytes = self._pages * pool.page_bytes
        shared = session.engine.shared
        self._weight = 1.0 if shared is None else shared.weight(session)
        self._apart: set[int] = set()  # turns that go on from it, where it shares a budget
        self._engine, self._in_file = session.engine, False
        self._live: Session | None = session
        session.history = []  # stands in the facets: a fork need not copy it

    @property
    def resident(self) -> bool:
        """See :class:`mmkv.scheduler.contract.PersistentSession`."""
        return self._live is not None

    def resting(self) -> int:
        """Return the pages that it holds, or may hold beside those of a shared budget."""
        shared = self._engine.shared
        if shared is None or self._live is None:
            return self._pages
        return self.pages if self._apart else shared.pages_each

    @property
    def pages(self) -> int:
        """Count the pages that it holds, or held when it moved to its file."""
        if self._live is None:
            return self._pages
        return self._engine.cache.held_pages(self._live.seq)

    def look(self) -> None:
        """Take down what it holds now: where it shares a budget, others change that."""
        if self._live is not None:
            self.info.memory, self._pages = self._live.memory(), self.pages
            self.bytes = self._pages * self._engine.cache.pool.page_bytes

    def leave_shared_budget(self, turn: object) -> None:
        """Let it compete with no one while a turn's session stands for it."""
        if self._engine.shared is not None and self._live is not None:
            self._engine.shared.leave(self._live)
            self._apart.add(id(turn))

    def join_shared_budget(self, turn: object) -> None:
        """End what :meth:`leave_shared_budget` began; all are cut to the shared budget then."""
        shared = self._engine.shared
        self._apart.discard(id(turn))
        if shared is None or self._live is None or self._apart:
            return
        with self._engine.lock, torch.inference_mode():
            shared.join(self._live, self._weight)
            shared.cut([], self._engine.slack)

    @property
    def held(self) -> Held | None:
        """Return what it has read, as text; None while it lies in its file."""
        return None if self._live is None else self._live.held

    def open(self) -> Session:
        """Return a session that goes on from here. Raises SessionError."""
        if self._live is not None:
            return self._live.fork()
        if self.lost:
            raise SessionError("the memory of this conversation is gone; begin a new one")
        try:
            return self._engine.load_session(self.path)[0]
        except SessionError as error:  # of a file that is this server's own affair
            raise SessionError(str(error).replace(str(self.path), "its file")) from error

    @property
    def lost(self) -> bool:
        """Whether it lies nowhere: it was dropped, or somebody has removed its file."""
        return self._live is None and not (self._in_file and os.path.exists(self.path))

    def hibernate(self) -> None:
        """Move it to its file, or drop it if nobody was promised more.

        Raises:
            SessionError: it cannot be written; it stays in memory then.
        """
        live = self._live
        if live is None:
            return
        if not self._in_file or not os.path.exists(self.path):
            self.look()
            try:
                with self._folder.writing():
                    self._save(live, self.path)
            except SessionError:
                if not self.expendable or self.references > 1:  # a turn goes on from it
                    raise
            else:
                self._in_file = True
        self._live = None
        live.close()

    def save(self, path: Path) -> None:
        """Write it to another file, whole or not at all. Raises SessionError."""
        if self._live is not None:
            self._save(self._live, path)
            return
        try:
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as to:
                draft = Path(to.name)
            try:
                shutil.copyfile(self.path, draft)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
        except OSError as error:
            raise SessionError(
                f"cannot write {path.name}: {error.strerror}; the old file is untouched"
            ) from error

    def close(self) -> None:
        """Return its pages and remove its file."""
        if self._live is not None:
            self._live.close()
        self._live, self._in_file = None, False
        with contextlib.suppress(OSError):  # the folder may be gone; what is left goes with it
            self.path.unlink(missing_ok=True)

    def _save(self, live: Session, path: Path) -> None:
        live.history = [_plain(message) for message in self.info.messages]
        try:
            live.save(path, self._extra())
        finally:
            live.history = []

    def _extra(self) -> dict[str, str]:
        return {_OWN: json.dumps({"seen": self.seen, "root": self.info.root})}


class ConversationStore:
    """What is kept, on the engine's thread; idle ones hibernate when room is short.

    Args:
        folder: where they hibernate.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, folder: HibernationFolder) -> None:
        self._engine, self._scheduler, self._folder = engine, scheduler, folder

    def keep(self, session: Session, info: ConversationInfo) -> Kept:
        """Take over a session that no request uses any more."""
        path = self._folder.path / f"{uuid.uuid4().hex}{SUFFIX}"
        kept = Kept(session, info, path, self._folder)
        self._scheduler.adopt(kept)
        return kept

    def used(self, kept: Kept) -> None:
        """Note that it was used last."""
        self._scheduler.adopt(kept)

    def leave_shared_budget(self, kept: Kept, turn: object) -> None:
        """Let a memory compete with no one while a turn goes on from it."""
        if self._engine.shared is not None:
            kept.leave_shared_budget(turn)
            self._scheduler.adopt(kept)

    def join_shared_budget(self, kept: Kept, turn: object) -> None:
        """End what :meth:`leave_shared_budget` began, unless nobody needs the memory any more."""
        if self._engine.shared is not None and kept.references:
            kept.join_shared_budget(turn)
            self._scheduler.adopt(kept)

    def hold(self, kept: Kept) -> None:
        """Count one that goes on from it."""
        kept.references += 1

    def release(self, kept: Kept) -> None:
        """Count one less; the last one closes it."""
        kept.references -= 1
        if not kept.references:
            self._scheduler.close_session(kept)

    def load(self, path: Path, name: str, root: str, weight: float = 1.0) -> Kept:
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
            return self.keep(session, _facets(session, extra, root))
        except BaseException:
            session.close()
            raise

    def _most_pages(self, path: Path, name: str) -> int:
        """Bound the pages of a file by its size: a page may be nearly empty once in each row."""
        try:
            size = path.stat().st_size
        except OSError as error:
            raise SessionError(f"there is no session file {name}; check the name") from error
        engine = self._engine
        return size // engine.cache.pool.kv_page_bytes + engine.spec.rows + 1


def _facets(session: Session, extra: dict[str, str], root: str) -> ConversationInfo:
    """Return what a session file says of its session.

    Files that ``mmkv chat`` wrote lack the number of tokens by modality: the entries that are left
    are the least that there can have been.
    """
    memory = session.memory()
    messages = tuple(_message(one) for one in session.history)
    if not messages or messages[-1].role != "assistant":
        raise SessionError("the session file holds no finished turn; save it after a reply")
    try:
        seen = [int(count) for count in json.loads(extra.get(_OWN, "{}")).get("seen", ())]
    except (ValueError, TypeError, AttributeError) as error:
        raise SessionError("the session file is damaged; use another one") from error
    if len(seen) != len(MODALITIES) or sum(seen) != session.seen:
        rows = session.engine.spec.rows
        seen = [-(-memory.by_modality[name] // rows) for name in MODALITIES]
        seen[0] = session.seen - sum(seen[1:])
    return ConversationInfo(messages, root, tuple(seen), memory)


def _message(stored: Mapping[str, Any]) -> Message:
    """Return a message of a session's history; its media are known by nothing but a mark."""
    content = stored["content"]
    texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [
        Part("text", one["text"])
        if one["type"] == "text"
        else Part("image" if one["type"] == "image" else "video", digest=uuid.uuid4().hex)
        for one in texts
    ]
    return Message(
        stored["role"], tuple(part for part in parts if part.kind != "text" or part.text)
    )


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as a session's history has it."""
    if message.media:
        return message.for_template()
    return {"role": message.role, "content": "".join(part.text for part in message.parts)}


@dataclass(eq=False)
class Snapshot:
    """A session at the end of a message.

    Attributes:
        keys: those it is found by; replied: whether it ends with a reply that was sampled.
        seen: tokens that it has seen, by modality; pages: that it holds, which does not change.
        rendered: the text that was read, but for such a reply.
    """

    keys: tuple[str, ...]
    session: Session
    replied: bool
    seen: tuple[int, ...]
    pages: int
    rendered: Rendered | None = None

    @property
    def held(self) -> Held:
        """Return what it has read, as text."""
        return self.session.held

    def open(self) -> Session:
        """Return a session that goes on from here."""
        return self.session.fork()

    def close(self) -> None:
        """Return its pages."""
        self.session.close()


class PrefixCache:
    """Snapshots within a limit; those used longest ago, and those in a request's way, go first.

    Args:
        most: pages that all may hold together; None: as the scheduler has room.
    """

    def __init__(self, scheduler: Scheduler, most: int | None) -> None:
        self._scheduler, self._most = scheduler, most
        self._found: dict[str, Snapshot] = {}

    @property
    def pages(self) -> int:
        """Count the pages that they hold."""
        return self._scheduler.residents.copy_pages

    def find(self, keys: Sequence[str]) -> Iterator[tuple[int, Snapshot]]:
        """Yield snapshots of a conversation's first messages, the longest first.

        Whoever goes on from one calls :meth:`used`.

        Args:
            keys: of its messages, in order.

        Yields:
            how many messages it holds, and the snapshot.
        """
        for count in range(len(keys), 0, -1):
            if (found := self._found.get(keys[count - 1])) is not None:
                yield count, found

    def used(self, snapshot: Snapshot) -> None:
        """Note that a snapshot was used last."""
        self._scheduler.residents.touch_copy(snapshot)

    def keep(
        self,
        keys: tuple[str, ...],
        pages: int,
        session: Callable[[], Session],
        replied: bool,
        seen: tuple[int, ...],
        rendered: Rendered | None = None,
    ) -> bool:
        """Keep what ``session`` returns, if there is room for its ``pages``; whether there is.

        The first that was kept under a key stays.
        """
        fresh = tuple(dict.fromkeys(key for key in keys if key not in self._found))
        if not fresh:
            return False

        def make() -> Snapshot:
            return Snapshot(fresh, session(), replied, seen, pages, rendered)

        made = self._scheduler.keep_copy(pages, make, self._dropped, self._most)
        if made is not None:
            self._found |= dict.fromkeys(fresh, made)
        return made is not None

    def _dropped(self, snapshot: Snapshot) -> None:
        for key in snapshot.keys:
            del self._found[key]
