"""The text that a session has read, and where a fresh rendering of its conversation differs.

A session appends. A chat template may still show earlier messages in another way once there are
later ones (without the thoughts of earlier replies, with the system's message further down), and a
family may read a picture in another way once there are two. So the text that was read is kept
beside the cache, in pieces that begin where a fresh text would be tokenized alike: prompts,
replies, and what stands behind the last picture of a prompt. Where the fresh text leaves it, the
session can go back and read on from there.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from mmkv.engine.errors import InputError
from mmkv.prompt.special import CUT

if TYPE_CHECKING:
    from mmkv.prompt.processing import Processor
    from mmkv.prompt.template import ResumePoint

# What a session does where earlier messages are shown in another way than they were read.
Rewrites = Literal["reread", "keep"]
# Bytes of loaded pictures and videos that a session holds, in case a later turn changes them.
MOST_MEDIA = 2**26
MOST_TO_REREAD = 2**28  # the same, where the conversation may be read again


_Media = tuple[tuple[Any, ...], tuple[Any, ...]] | None  # pictures and videos


@dataclass(frozen=True, slots=True)
class Place:
    """Where a session stands.

    Attributes:
        seen: tokens so far; position: rope position of the next text token.
        prompt: tokens that came in prompts; evicted: entries that were evicted up to there.
    """

    seen: int = 0
    position: int = 0
    prompt: int = 0
    evicted: int = 0

    def after(self, tokens: int, prompt: int) -> Place:
        """Return the place ``tokens`` of text later, ``prompt`` of them from prompts."""
        return Place(self.seen + tokens, self.position + tokens, self.prompt + prompt, self.evicted)


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that was read. An endless session keeps all of it: token ids as C integers.

    Attributes:
        text: without cuts; None: not known, tokens of a piece that was cut in two.
        ids: its tokens; None where pictures or videos stand in it. known: the ids of those, each
            once, where that is known: a processor adds texts, such as the times of frames.
        end: where it ends.
        pictures: how many stand in it; rule: how those were read, see
            :meth:`mmkv.prompt.processing.Processor.rule`.
        media: its pictures and videos, while a later turn may want them again.
        reply: whether it is a reply.
        forgot: whether a thought stood in it whose entries were dropped; others: the texts beside
            ``text`` that a template may then show for it.
    """

    text: str | None
    ids: Sequence[int] | None
    end: Place
    pictures: int = 0
    rule: Any = None
    media: _Media = None
    reply: bool = False
    known: Sequence[int] = ()
    forgot: bool = False
    others: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ids is not None:
            object.__setattr__(self, "ids", array("i", self.ids))
        object.__setattr__(self, "known", array("i", self.known))

    def length_in(self, whole: str, at: int) -> int | None:
        """Return how many characters of ``whole`` at ``at`` show this; None: others stand there."""
        if self.text is None:
            return None
        lengths = [len(one) for one in (self.text, *self.others) if whole.startswith(one, at)]
        return max(lengths, default=None)


@dataclass(frozen=True)
class Plan:
    """What a session has to read to hold a text.

    Attributes:
        kept: pieces that stay; start: where they end; text: what follows, with cuts.
        ids: tokens that the session holds after ``start``, up to the next picture.
        media: pictures and videos of earlier turns in ``text``; None: they are not at hand.
        appends: whether all pieces stay.
        evicted: entries that were evicted before what is not so any more was read.
    """

    kept: int
    start: Place
    text: str
    ids: tuple[int, ...] = ()
    media: _Media = ((), ())
    appends: bool = True
    evicted: int = 0


@dataclass
class Held:
    """The text of one session.

    Attributes:
        pieces: in order; None: what it has read is not known as text.
        differs: how what was read differs from the conversation rendered afresh, for the user.
        thoughts: how many replies have lost their thoughts, on purpose.
        unread: pictures and videos of text that was let go to be read again, and was not since the
            turn was not completed; None: they are not at hand.
        checkpoint: from where its conversation's rendering may be gone on from; None: from nowhere.
    """

    pieces: tuple[Piece, ...] | None = ()
    differs: str | None = None
    unread: _Media = ((), ())
    thoughts: int = 0
    checkpoint: ResumePoint | None = None
    _at: tuple[int, int] = (0, 0)  # the checkpoint's piece, and characters of it before it
    _media_from: int = 0  # pieces before that have no pictures and videos any more

    @property
    def all_media(self) -> _Media:
        """Return all pictures and videos of the conversation; None: some are not at hand."""
        if self.pieces is None:
            return None
        return _joined(*(one.media for one in self.pieces if one.ids is None))

    @property
    def forgotten(self) -> str | None:
        """Say how what is held differs for want of thoughts, for the user; None: it does not."""
        if not self.thoughts:
            return None
        whose = "a reply" if self.thoughts == 1 else f"{self.thoughts:,} replies"
        return f"the thoughts of {whose} were forgotten after the answers were written with them"

    def copy(self) -> Held:
        """Return one that goes on for itself."""
        return replace(self)

    def plan(self, whole: str, rule: Any, chosen: int | None = None) -> Plan:
        """Return what to read so that the session holds ``whole``, a rendered conversation.

        Args:
            rule: how its pictures are to be read.
            chosen: go back at least to the end of so many pieces.
        """
        pieces, plain = self.pieces or (), whole.replace(CUT, "")
        begins, at = [0], 0
        first = len(pieces)
        for i, piece in enumerate(pieces):
            length = piece.length_in(plain, at)
            if length is None or (piece.pictures and piece.rule != rule):
                first = i
                break
            at += length
            begins.append(at)
        if first == len(pieces) and chosen is None:
            return Plan(first, self._end(first), _from(whole, at), media=self.unread)
        # A reply begins behind the prompt's last tokens, with which it may be tokenized together.
        kept = first
        if 0 < kept < len(pieces) and pieces[kept].reply:
            kept -= pieces[kept - 1].ids is not None
        kept = kept if chosen is None else min(kept, chosen)
        again = pieces[kept:]
        ids: list[int] = []
        seen = self._end(kept).seen
        for piece in again:
            if piece.ids is None or seen + len(piece.ids) != piece.end.seen:
                break  # a picture, or what stood before a thought that is forgotten
            ids += piece.ids
            seen = piece.end.seen
        media = _joined(*(piece.media for piece in again if piece.ids is None), self.unread)
        text, before = _from(whole, begins[kept]), self._end(first).evicted
        return Plan(kept, self._end(kept), text, tuple(ids), media, False, before)

    def unread_of(self, text: str) -> str | None:
        """Return what has not been read of a text that follows the checkpoint, with cuts.

        None: what was read from there on is another text.
        """
        pieces, (first, inside), at, plain = self.pieces or (), self._at, 0, text.replace(CUT, "")
        if inside:
            rest = (pieces[first].text or "")[inside:]
            if not plain.startswith(rest):
                return None
            first, at = first + 1, len(rest)
        for piece in pieces[first:]:
            length = piece.length_in(plain, at)
            if length is None:
                return None
            at += length
        return _from(text, at)

    def _place(self, behind: int) -> tuple[int, int] | None:
        """Return which piece begins ``behind`` characters before the end, or what of it does not.

        None: that is not known.
        """
        pieces = self.pieces or ()
        at = len(pieces)
        while behind > 0 and at:
            at -= 1
            if pieces[at].text is None or pieces[at].others:
                return None
            behind -= len(pieces[at].text or "")
        return None if behind > 0 else (at, -behind)

    def appending(self, text: str) -> Plan:
        """Return the plan of a session that reads ``text`` behind all that it holds."""
        count = len(self.pieces or ())
        return Plan(count, self._end(count), text, media=self.unread)

    def back(self, plan: Plan, tokens: int) -> Place:
        """Forget what follows a plan's start but for ``tokens`` of text; where that ends."""
        pieces = (self.pieces or ())[: plan.kept]
        end = plan.start
        left = tokens
        for piece in (self.pieces or ())[plan.kept :]:
            if not left or piece.ids is None:
                break
            count = min(left, len(piece.ids))
            whole = count == len(piece.ids)
            prompt = min(count, piece.end.prompt - end.prompt)
            end, left = piece.end if whole else end.after(count, prompt), left - count
        if tokens:
            pieces += (Piece(None, plan.ids[:tokens], end),)
        self.pieces, self.unread, self.checkpoint = pieces, plan.media, None
        self._media_from = min(self._media_from, len(pieces))
        self.thoughts = sum(piece.forgot for piece in pieces)
        return end

    def add_prompt(self, read: Read, end: Place) -> None:
        """Note that a prompt has been read, up to ``end``."""
        self.unread = ((), ())
        if self.pieces is None:
            return
        pieces = self.pieces
        if pieces and pieces[-1].text is None:
            pieces = pieces[:-1]
        if pieces and read.unfed and pieces[-1].ids is not None:
            reply, count = pieces[-1], len(read.unfed)
            moved = reply.end.after(count, count)
            whole = replace(reply, ids=(*pieces[-1].ids, *read.unfed), end=moved)
            pieces = (*pieces[:-1], whole)
        if (pieces[-1].end.seen if pieces else 0) + len(read.ids) != end.seen:
            self.pieces = self.checkpoint = None  # tokens came in that nobody noted as text
            return
        self.pieces = pieces + tuple(read.pieces(end))
        if read.goes_on is not None:
            place = self._place(read.behind)
            self.checkpoint = None if place is None else read.goes_on
            self._at = place or (0, 0)
        elif not read.stands:
            self.checkpoint = None

    def add_reply(
        self, text: str, ids: Sequence[int], end: Place, others: tuple[str, ...] | None = None
    ) -> None:
        """Note a reply, of which the session holds the tokens ``ids``, up to ``end``.

        Args:
            others: see :class:`Piece`, of a reply whose thought is forgotten; None: it is not.
        """
        forgot = others is not None
        self.thoughts += forgot
        if self.pieces is not None:
            made = Piece(text, tuple(ids), end, reply=True, forgot=forgot, others=others or ())
            self.pieces = (*self.pieces, made)

    def cut_end(self, tokens: int, opening: str) -> str:
        """Leave out the last tokens of the latest prompt, whose text begins with ``opening``.

        Returns:
            that text.
        """
        if not self.pieces or not tokens:
            return ""
        last = self.pieces[-1]
        at = (last.text or "").rfind(opening)
        if last.text is None or at < 0 or (last.ids is not None and len(last.ids) < tokens):
            self.pieces = None  # never so: the prompt's own tokens were read
            return ""
        ids = None if last.ids is None else last.ids[: len(last.ids) - tokens]
        made = replace(last, text=last.text[:at], ids=ids, end=last.end.after(-tokens, -tokens))
        self.pieces = (*self.pieces[:-1], made)
        return last.text[at:]

    def let_go(self, loose: int, most: int | None = None) -> None:
        """Let go the pictures of text that no later rendering changes: it is not read again.

        Where the others take more than ``most`` bytes, all go: a plan needs all or none.

        Args:
            loose: characters at the end that a later one may change, see :class:`Read`.
        """
        if self.pieces is None:
            return
        if not self.has_media:
            self._media_from = len(self.pieces)
            return
        pieces, behind, size, kept = self.pieces[self._media_from :], 0, 0, list[Piece]()
        for piece in reversed(pieces):
            stays = behind >= loose
            behind += len(piece.text or "")
            if piece.media is not None and not stays:
                size += sum(map(_size, (*piece.media[0], *piece.media[1])))
            kept.append(replace(piece, media=None) if piece.media is not None and stays else piece)
        if size > (MOST_MEDIA if most is None else most):
            kept = [piece if piece.media is None else replace(piece, media=None) for piece in kept]
        self.pieces = self.pieces[: self._media_from] + tuple(reversed(kept))
        while self._media_from < len(self.pieces) and self.pieces[self._media_from].media is None:
            self._media_from += 1

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it, without pictures."""
        made = None
        if self.pieces is not None:
            made = [
                {
                    "text": one.text,
                    "ids": None if one.ids is None else list(one.ids),
                    "end": astuple(one.end),
                }
                | {"pictures": one.pictures, "rule": one.rule, "reply": one.reply}
                | ({"known": list(one.known)} if one.known else {})
                | ({"forgot": True, "others": one.others} if one.forgot else {})
                for one in self.pieces
            ]
        told = {"pieces": made, "differs": self.differs, "unread": self.unread != ((), ())}
        return told | ({"thoughts": self.thoughts} if self.thoughts else {})

    @property
    def seen(self) -> int:
        """Count the tokens of what is known as text."""
        return self._end(len(self.pieces or ())).seen

    @property
    def ends_with_reply(self) -> bool:
        """Whether a reply stands at the end."""
        return bool(self.pieces) and self.pieces[-1].reply  # type: ignore[index]

    @property
    def has_media(self) -> bool:
        """Whether pictures or videos are held."""
        return any(piece.media is not None for piece in (self.pieces or ())[self._media_from :])

    def _end(self, count: int) -> Place:
        return (self.pieces or ())[count - 1].end if count else Place()


@dataclass(frozen=True)
class Read:
    """A prompt that is about to be read.

    Attributes:
        text: with cuts; ids: all of its tokens; pictures, clips: in it; rule: how they are read.
        unfed: tokens of the reply before it that come first.
        tail: tokens behind the last picture, whose text is ``tail_text``; None: not known.
        loose: characters at the end of the conversation that the next turn may change.
        goes_on: a place ``behind`` characters before the end, for :attr:`Held.checkpoint`; None: no
            other than before, which still ``stands`` or not.
    """

    text: str
    ids: tuple[int, ...]
    pictures: Sequence[Any] = ()
    clips: Sequence[Any] = ()
    rule: Any = None
    unfed: tuple[int, ...] = ()
    tail: tuple[int, ...] | None = None
    tail_text: str = field(default="", repr=False)
    loose: int = sys.maxsize
    goes_on: ResumePoint | None = None
    behind: int = 0
    stands: bool = False

    def pieces(self, end: Place) -> list[Piece]:
        """Return it as what a session holds up to ``end``."""
        plain = self.text.replace(CUT, "")
        if not (self.pictures or self.clips):
            return [Piece(plain, self.ids, end)]
        behind = len(self.tail or ())
        text = plain[: len(plain) - len(self.tail_text)] if self.tail is not None else plain
        # Where positions were drawn together behind it, its own is not used again.
        position = max(end.position - behind, 0)
        middle = Place(end.seen - behind, position, end.prompt - behind, end.evicted)
        media = (tuple(self.pictures), tuple(self.clips))
        known = tuple(sorted({*self.ids[: len(self.ids) - behind]}))
        count = len(self.pictures)
        made = [Piece(text, None, middle, count, self.rule, media, known=known)]
        return made if self.tail is None else [*made, Piece(self.tail_text, self.tail, end)]


def read_of(
    processor: Processor,
    text: str,
    ids: Sequence[int],
    pictures: Sequence[Any] = (),
    clips: Sequence[Any] = (),
    **more: Any,
) -> Read:
    """Return what :meth:`Held.add_prompt` wants to know of a text that was encoded to ``ids``."""
    made = Read(text, tuple(ids), pictures=pictures, clips=clips, **more)
    if not (pictures or clips):
        return made
    tokens = [token for token in (processor.image_token, processor.video_token) if token]
    tail = text[max(text.rfind(token) + len(token) for token in tokens if token in text) :]
    if not tail:
        return replace(made, tail=())
    try:
        behind = tuple(processor.encode(tail, continuing=True)["input_ids"][0].tolist())
    except InputError:
        return made
    same = made.ids[len(made.ids) - len(behind) :] == behind
    return replace(made, tail=behind, tail_text=tail.replace(CUT, "")) if same else made


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how much of two texts or lists is the same at their beginnings."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _size(media: Any) -> int:
    """Return the bytes of a picture, or of the frames of a video."""
    frames = getattr(media, "frames", None)
    return media.width * media.height * 3 if frames is None else frames.nbytes


def _from(raw: str, plain: int) -> str:
    """Return the rest of a text with cuts, behind ``plain`` characters that are none."""
    at = passed = 0
    for part in raw.split(CUT):
        if passed + len(part) >= plain:
            return raw[at + plain - passed :].removeprefix(CUT)
        passed, at = passed + len(part), at + len(part) + len(CUT)
    return ""


def _joined(*media: _Media) -> _Media:
    """Return pictures and videos together; None where some are not at hand."""
    there = [one for one in media if one is not None]
    if len(there) < len(media):
        return None
    return tuple(chain(*(one[0] for one in there))), tuple(chain(*(one[1] for one in there)))
