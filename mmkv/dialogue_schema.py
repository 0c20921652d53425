"""The conversation in a session file. Imports pydantic: imported only when such a file is read."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import NonNegativeInt, StringConstraints

from mmkv.calls.tools import Tool, ToolUse
from mmkv.engine.errors import InputError
from mmkv.engine.strict import InvalidFile, Strict, parse
from mmkv.notes import MOST_TOLD
from mmkv.prompt.held import Held, Piece, Place
from mmkv.prompt.video import SMALL, FramesSeen

_Line = Annotated[str, StringConstraints(max_length=2000)]


class _Text(Strict):
    type: Literal["text"]
    text: str


class _Media(Strict):
    type: Literal["image", "video"]


class _Function(Strict):
    name: str
    arguments: str | dict[str, Any]


class _Call(Strict):
    id: str
    type: Literal["function"]
    function: _Function


class _Message(Strict):
    """See :class:`mmkv.prompt.template.ChatTemplate`; fields after ``content`` may be absent."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[_Text | _Media]
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    name: str | None = None
    sampled: bool | None = None


class _Piece(Strict):
    """See :class:`mmkv.prompt.held.Piece`; ``end``: of its numbers, in their order."""

    text: str | None
    ids: list[int] | None
    end: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt, NonNegativeInt]
    pictures: NonNegativeInt
    rule: bool | None
    reply: bool
    known: list[int] = []  # older files have none of what follows
    forgot: bool = False
    others: list[str] = []


class _Held(Strict):
    """See :class:`mmkv.prompt.held.Held`; ``unread``: whether there are such, which are gone."""

    pieces: list[_Piece] | None
    differs: str | None
    unread: bool = False
    thoughts: NonNegativeInt = 0


class _Frames(Strict):
    """See :class:`mmkv.prompt.video.FramesSeen`; ``last``: base64."""

    kept: NonNegativeInt = 0
    skipped: NonNegativeInt = 0
    last: str = ""


class _Options(Strict):
    """What ``mmkv chat`` keeps of its command line, in JSON."""

    model: str | None = None
    mmproj: str | None = None
    adapter: str | None = None
    policy: str | None = None
    lookahead: float | None = None
    evict_every: int | None = None
    gates: str | None = None
    dtype: str | None = None
    weights: str | None = None
    kv: str | None = None


def parse_options(extra: str, key: str) -> dict[str, Any]:
    """Return the options under ``key`` of a header's ``extra``, JSON inside JSON.

    Raises InvalidFile.
    """
    held: dict[str, str] = parse(dict[str, str], extra, is_json=True)
    options: _Options = parse(_Options, held.get(key, "{}"), is_json=True)
    return options.model_dump(exclude_none=True)


def parse_history(text: str) -> list[dict[str, Any]]:
    """Return the messages in JSON ``text``. Raises InvalidFile."""
    messages: list[_Message] = parse(list[_Message], text, is_json=True)
    return [message.model_dump(exclude_none=True) for message in messages]


def parse_tools(text: str) -> tuple[Tool, ...]:
    """Return the functions in JSON ``text``. Raises InvalidFile."""
    given: list[dict[str, Any]] = parse(list[dict[str, Any]], text, is_json=True)
    try:
        return ToolUse(tuple(map(Tool.of, given))).tools
    except InputError as error:
        raise InvalidFile(str(error)) from error


def parse_frames(text: str) -> FramesSeen:
    """Return what is remembered of frames, from JSON ``text``. Raises InvalidFile."""
    made: _Frames = parse(_Frames, text, is_json=True)
    try:
        last = base64.b64decode(made.last, validate=True)
    except ValueError:
        last = b"?"
    if len(last) not in (0, SMALL**2):
        raise InvalidFile("the copy of the last frame is none")
    return FramesSeen(made.kept, made.skipped, last)


def parse_notes(text: str) -> tuple[str, ...]:
    """Return the notes in JSON ``text``. Raises InvalidFile."""
    notes: list[str] = parse(Annotated[list[_Line], Len(0, MOST_TOLD)], text, is_json=True)
    return tuple(notes)


def parse_unfed(text: str, vocabulary: int, placeholders: set[int]) -> tuple[int, ...]:
    """Return the token ids in JSON ``text``; none may stand for a picture. Raises InvalidFile."""
    ids: list[int] = parse(list[int], text, is_json=True)
    if not _are_known(ids, vocabulary, placeholders):
        raise InvalidFile("a token of the latest reply cannot have been generated")
    return tuple(ids)


def _are_known(ids: Sequence[int], vocabulary: int, besides: Collection[int] = frozenset()) -> bool:
    """Whether all ids are of the vocabulary, and none is among ``besides``."""
    return all(0 <= token < vocabulary and token not in besides for token in ids)


def parse_held(
    text: str, seen: int, vocabulary: int, placeholders: set[int], moved: bool = False
) -> Held:
    """Return what a session of ``seen`` tokens has read, from JSON ``text``. Raises InvalidFile.

    Files from before it was kept have ``null``.

    Args:
        moved: whether rope positions were drawn together meanwhile: then they need not grow, and
            none is used again.
    """
    made: _Held | None = parse(_Held | None, text, is_json=True)
    if made is None or made.pieces is None:
        if made is None:
            return Held(None)
        return Held(None, made.differs, thoughts=made.thoughts)
    pieces, at = [], Place()
    for one in made.pieces:
        end, ids = Place(*one.end), one.ids
        if not _adds_up(one, at, moved):
            raise InvalidFile("the numbers of what was read do not add up")
        if not _are_known(ids or (), vocabulary, placeholders):
            raise InvalidFile("a token of what was read is none of a text")
        if not _are_known(one.known, vocabulary):
            raise InvalidFile("a token of what was read is none of the model's")
        held = None if ids is None else tuple(ids)
        pieces.append(
            Piece(
                one.text,
                held,
                end,
                one.pictures,
                one.rule,
                reply=one.reply,
                known=tuple(one.known),
                forgot=one.forgot,
                others=tuple(one.others),
            )
        )
        at = end
    if pieces and at.seen != seen:
        raise InvalidFile("what was read is not as long as the session")
    unread = None if made.unread else ((), ())
    return Held(tuple(pieces), made.differs, unread, made.thoughts)


def _adds_up(one: _Piece, start: Place, moved: bool) -> bool:
    """Whether a piece that begins at ``start`` ends where its token ids, if any, lead."""
    end = Place(*one.end)
    tokens, positions = end.seen - start.seen, end.position - start.position
    if moved:
        positions = tokens
    if min(tokens, positions, end.prompt - start.prompt) < 0:
        return False
    if one.ids is None:
        return one.text is not None
    left_out = tokens - len(one.ids)  # of a thought that is forgotten
    return tokens == positions and left_out >= 0 and (one.forgot or not left_out)
