"""What the user is to be told of a conversation: how it was read, and what is left of it.

Every front end shows these lines, and makes none of its own: the terminal, the page, the answers of
all APIs, sessions and sockets. They belong to the conversation, so a copy, a file and a turn that
comes later have them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mmkv.engine.budget import RISK
from mmkv.prompt.media import FROM, NOTE, Note
from mmkv.prompt.template import NO_TEMPLATE
from mmkv.resources import PHOTOS

if TYPE_CHECKING:
    from PIL.Image import Image

    from mmkv.engine.contents import Memory
    from mmkv.prompt.processing import Processor
    from mmkv.prompt.template import ChatTemplate
    from mmkv.prompt.video import Clip

MOST_TOLD = 32  # notes on what was read that a session keeps: one that watches may never end
# It was trained on drawn scenes: cells of so many pixels, their corners white.
_CELL, _WHITE = 32, 0.1
_SCENES_ALONE = (
    "the bundled model knows drawn scenes alone (emoji, coloured shapes and letters on white, in "
    f"cells of 32 pixels); what it says of another picture means nothing; {PHOTOS} names what is "
    "in a photograph (mmkv models)"
)
_ESCALATED = {
    "said": "much of what the latest answer may need had been forgotten: it may be wrong "
    "(--on-risk reread reads the conversation again for such answers)",
    "reread": "the latest answer comes from the conversation read again: much of it had been "
    "forgotten",
    "not_reread": "much of what the latest answer may need had been forgotten, and the "
    "conversation could not be read again: it may be wrong",
}
_NO_TIMES = "this model's prompts hold no times of {}: at was not written"


def media_notes(pictures: Sequence[Image], clips: Sequence[Clip], bundled: bool) -> list[str]:
    """Return the notes on pictures and videos that are read, each once: those that are read in
    part, and those that the model cannot know, which the ``bundled`` one has.
    """
    found = [picture.info.get(NOTE) for picture in pictures] + [clip.note for clip in clips]
    if bundled and (pictures or clips) and not _are_drawn(pictures, clips):
        found.append(_SCENES_ALONE)
    return list(dict.fromkeys(filter(None, found)))


def read_notes(
    template: ChatTemplate, pictures: Sequence[Image], clips: Sequence[Clip], bundled: bool
) -> list[str]:
    """Return the notes on messages that are read with a template; see :func:`media_notes`."""
    plain = template.source is None and not template.raw
    return [*([NO_TEMPLATE] if plain else []), *media_notes(pictures, clips, bundled)]


def times_notes(processor: Processor, what: str, at: float | None) -> list[str]:
    """Return the note on what is observed ``at`` a time where the model's prompts have no times.

    Args:
        what: ``texts``, ``pictures``, or ``frames`` of a video.
    """
    if at is None:
        return []
    match what:
        case "texts":
            written = processor.time_text(at) is not None
        case "frames":
            written = processor.writes_times
        case _:
            written = False  # no model's prompt gives a picture a time
    return [] if written else [_NO_TIMES.format(what)]


def conversation_notes(told: Sequence[str], differs: str | None, memory: Memory) -> list[Note]:
    """Return all notes on a conversation as it stands.

    Args:
        told: those on what was read; differs: how it differs from the conversation rendered afresh.
    """
    found = [*map(Note, told)]
    if differs is not None:  # once, not again where only the number has grown
        found.append(Note(differs, f"differs {re.sub(r'[0-9,]+', '', differs)}"))
    return [*found, *_memory_notes(memory)]


def _memory_notes(memory: Memory) -> Iterator[Note]:
    """Yield the notes on what a conversation has forgotten."""
    if faded := memory.faded:
        some = ", ".join(f"{i + 1} ({memory.pictures[i]:.0%} kept)" for i in faded[:4])
        more = f" and {len(faded) - 4} others" if len(faded) > 4 else ""
        which = f"pictures {some}{more} are" if len(faded) > 1 else f"picture {some} is"
        what = "mostly forgotten: answers may be wrong, and a larger budget keeps more"
        yield Note(f"{which} {what}", "faded")
    if memory.compactions:
        more = f", without {memory.capped:,} entries that did not fit" if memory.capped else ""
        yield Note(
            "the conversation has passed the length that the model was trained for: what is left "
            f"of it was moved together and goes on{more} (--no-endless ends it there)",
            "compacted",
        )
    if memory.worn:
        yield Note(
            f"the memory was moved together {memory.compactions:,} times, and keys in 4 bits are "
            "rounded each time: what is old may be read wrongly by now (--kv k8v4 stays near)",
            "worn",
        )
    if memory.risk_unknown:
        yield Note(
            "how much this conversation has forgotten is not known (an older mmkv saved it, or it "
            "went far back): its budget does not follow --risk; give a fixed one, or begin a new "
            "conversation",
            "risk",
        )
    elif memory.over_risk and memory.risk is not None:
        yield Note(
            f"the risk is {memory.risk:.1%}, more than --risk, and the budget cannot grow: answers "
            f"may be made up; a larger --budget-max keeps more (risk is {RISK})",
            "risk",
        )
    if memory.escalated is not None:
        yield Note(_ESCALATED[memory.escalated], f"escalated {memory.tokens_seen}")
    if memory.evicted_nan:
        what = "dropped entries had a score that is no number: check the gates"
        yield Note(f"{memory.evicted_nan:,} {what}", "nan")


def _are_drawn(pictures: Sequence[Image], clips: Sequence[Clip]) -> bool:
    """Return whether all look like drawn scenes: whole cells, much of it white."""
    import numpy as np

    def white(pixels: Any) -> bool:
        return bool(((pixels.min(-1) >= 250).mean((-2, -1)) >= _WHITE).all())

    sizes = [picture.info.get(FROM, picture.size) for picture in pictures]
    if any(side % _CELL for size in sizes for side in size):
        return False
    shown = (np.asarray(picture.convert("RGB")) for picture in pictures)
    return all(map(white, [*shown, *(clip.frames for clip in clips)]))
