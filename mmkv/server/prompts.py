"""Cut a conversation's text at the ends of its messages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmkv.engine.errors import InputError
from mmkv.prompt.special import new_marker
from mmkv.prompt.template import as_parts

if TYPE_CHECKING:
    from mmkv.prompt.template import ChatTemplate, Layout

_FEW = 3  # messages, up to which each is rendered to find its end
_SHORT = 256  # characters of a question that is cheaper to read again than to end a pass after


@dataclass(frozen=True)
class Segment:
    """Text that is appended at once.

    Attributes:
        first, last: the messages that end in it, ``messages[first:last]``; none for the opening
            of the reply, or if the template renders nothing for one.
        held: tokens at its beginning that the session holds already.
    """

    text: str
    first: int
    last: int
    held: int = 0


@dataclass(frozen=True)
class Rendered:
    """A text by its length and SHA-256: enough to know it again."""

    length: int
    digest: bytes

    @classmethod
    def of(cls, text: str) -> Rendered:
        """Return that of ``text``."""
        return cls(len(text), hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())

    def begins(self, text: str) -> bool:
        """Whether ``text`` begins with it."""
        return len(text) >= self.length and Rendered.of(text[: self.length]) == self


@dataclass(frozen=True)
class Outline:
    """A conversation's text, and what of it is to be read.

    Attributes:
        text: all of it, up to the opening of the reply.
        segments: its end, cut; whoever reads one takes it out.
    """

    text: str
    segments: list[Segment]

    def rendered(self) -> Rendered:
        """Return the text that has been read, but for the reply."""
        left = sum(len(one.text) for one in self.segments)
        return Rendered.of(self.text[: len(self.text) - left])


def outline(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    held: int = 0,
    replied: bool = False,
    known: Rendered | None = None,
    unread: Callable[[str], str | None] | None = None,
) -> Outline | None:
    """Return what follows the first ``held`` messages, a segment per message and the opening.

    A segment ends where the text of the messages so far is a beginning of the whole text, so how
    the first messages are cut does not depend on those after them. A short last message without
    pictures goes into one segment with the opening: who asks once more has that read again.

    Args:
        replied: whether the last of those held is a reply that was sampled: the text after it
            (an end marker) is still to come, and comes with the next message.
        known: the text that was read of those held, but for such a reply. While the template shows
            it still, they need not be rendered by themselves.
        unread: returns the end of the whole text that has not been read, or None where that goes
            on from another text; then nothing else is asked.

    Returns:
        None where the template would render the held messages in another way now than before.

    Raises:
        InputError: the template refuses the messages.
    """
    shown = list(messages)
    marker = new_marker()
    if replied and unread is None:
        shown[held - 1] = {"role": "assistant", "content": marker}
    layout = template.layout(shown, opening=True)
    text = whole = layout.text
    done = 0
    if unread is not None:
        rest_of_text = unread(whole)
        if rest_of_text is None:
            return None
        done = len(whole) - len(rest_of_text)
    elif replied:
        before, found, after = whole.rpartition(marker)
        same = known is not None and known.length == len(before) and known.begins(before)
        if not found or not (same or before == template.render(shown[: held - 1], opening=True)):
            return None
        done = len(before) + len(marker)
        said = "".join(part.get("text", "") for part in as_parts(messages[held - 1]["content"]))
        text = before + said + after
    elif held and known is not None and known.begins(whole):
        done = known.length
    elif held:
        before = template.render(shown[:held], opening=False)
        if not whole.startswith(before):
            return None
        done = len(before)
    found_segments, first = [], held
    for last, end in _ends(template, shown, held, layout):
        if end > done:
            found_segments.append(Segment(whole[done:end], first, last))
            done, first = end, last
    if done < len(whole):
        rest = Segment(whole[done:], first, len(shown))
        if (
            found_segments
            and first == len(shown)
            and _is_short(messages[found_segments[-1].first :])
        ):
            question = found_segments.pop()
            rest = Segment(question.text + rest.text, question.first, len(shown))
        found_segments.append(rest)
    return Outline(text, found_segments)


def _is_short(messages: Sequence[dict[str, Any]]) -> bool:
    parts = [part for message in messages for part in as_parts(message["content"])]
    if any(part["type"] != "text" for part in parts):
        return False
    return sum(len(part["text"]) for part in parts) <= _SHORT


def _ends(
    template: ChatTemplate, shown: list[dict[str, Any]], held: int, layout: Layout
) -> list[tuple[int, int]]:
    """Return how many messages end where in the text, of those after the ``held`` ones."""
    if len(shown) - held > _FEW:
        found = _ends_by_loop(template, shown, layout)
        if found is not None:
            return [(last, end) for last, end in enumerate(found, 1) if last > held and end > 0]
    each = range(held + 1, len(shown) + 1)
    found = [_length(template, shown[:last], layout.text) for last in each[:-1]]
    found += [_whole_length(template, shown, layout)] if each else []
    return [(last, end) for last, end in zip(each, found, strict=True) if end > 0]


def _ends_by_loop(
    template: ChatTemplate, shown: list[dict[str, Any]], layout: Layout
) -> list[int] | None:
    """Return where each message ends, by where the template's loop began the next one.

    So a long conversation is not rendered once for each of its messages. Trusted if it is true of
    the last two messages and of the system's, and if the last one changes nothing before it.

    Returns:
        0 for messages of the system that do not end by themselves; None where it is not so.
    """
    whole, begins = layout.text, layout.begins
    try:
        before = template.layout(shown[:-1], opening=False)
    except InputError:
        return None
    ends = [*begins[1:], _whole_length(template, shown, layout)]
    if len(before.text) != ends[-2] or not whole.startswith(before.text):
        return None
    if before.begins[1:] != begins[1:-1] or min(ends) < 0 or sorted(ends) != ends:
        return None
    leading = next((i for i, one in enumerate(shown) if one["role"] != "system"), len(shown))
    if leading and _length(template, shown[:leading], whole) != ends[leading - 1]:
        ends[:leading] = [0] * leading
    return ends


def _whole_length(template: ChatTemplate, shown: list[dict[str, Any]], layout: Layout) -> int:
    """Return the length of the text without its opening if it begins with that, else 0."""
    return _length(template, shown, layout.text) if layout.end is None else layout.end


def _length(template: ChatTemplate, messages: list[dict[str, Any]], whole: str) -> int:
    """Return the length of the messages' text if ``whole`` begins with it, else 0."""
    try:
        text = template.render(messages, opening=False)
    except InputError:  # a template may want a user's message after the system's
        return 0
    return len(text) if whole.startswith(text) else 0
