"""Cut a conversation's text at the ends of its messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import InputError
from mmkv.prompt.special import new_marker

if TYPE_CHECKING:
    from mmkv.prompt.template import ChatTemplate


@dataclass(frozen=True)
class Segment:
    """Text that is appended at once.

    Attributes:
        first, last: the messages that end in it, ``messages[first:last]``; none for the opening
            of the reply, or if the template renders nothing for one.
    """

    text: str
    first: int
    last: int


def segments(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], held: int = 0, replied: bool = False
) -> list[Segment] | None:
    """Return what follows the first ``held`` messages, a segment per message and the opening.

    A segment ends where the text of the messages so far is a beginning of the whole text, so how
    the first messages are cut does not depend on those after them.

    Args:
        replied: whether the last of those held is a reply that was sampled: the text after it
            (an end marker) is still to come, and comes with the next message.

    Returns:
        None where the template would render the held messages in another way now than before.

    Raises:
        InputError: the template refuses the messages.
    """
    shown = list(messages)
    marker = new_marker()
    if replied:
        shown[held - 1] = {"role": "assistant", "content": marker}
    whole = template.render(shown, opening=True)
    done = 0
    if replied:
        before, found, _ = whole.rpartition(marker)
        if not found or before != template.render(shown[: held - 1], opening=True):
            return None
        done = len(before) + len(marker)
    elif held:
        before = template.render(shown[:held], opening=False)
        if not whole.startswith(before):
            return None
        done = len(before)
    found_segments, first = [], held
    for last in range(held + 1, len(shown) + 1):
        try:
            text = template.render(shown[:last], opening=False)
        except InputError:  # a template may want a user's message after the system's
            continue
        if len(text) > done and whole.startswith(text):
            found_segments.append(Segment(text[done:], first, last))
            done, first = len(text), last
    if done < len(whole):
        found_segments.append(Segment(whole[done:], first, len(shown)))
    return found_segments
