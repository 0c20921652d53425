"""A user's turn: its messages, pictures and videos made into what a session appends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from engine.checks import require_list
from engine.errors import InputError
from mmkv.prompt.media import load_image
from mmkv.prompt.messages import is_blank, take_media
from mmkv.prompt.video import load_video

if TYPE_CHECKING:
    from mmkv.prompt.template import Message
    from mmkv.session import Session


@dataclass
class UserTurn:
    """A turn, ready to be appended.

    Attributes:
        messages: what the history gets; inputs: the processor's tensors, one row.
        note: on how the messages were rendered, for the user, or None.
        started: when composing began, on ``time.perf_counter``'s clock.
        basis: what it was composed for, :attr:`mmkv.Session.basis`.
        pictures, clips: as they were loaded, in their order.
    """

    messages: list[Message]
    inputs: dict[str, Tensor]
    note: str | None
    started: float
    basis: tuple[object, int]
    pictures: Sequence[Any] = ()
    clips: Sequence[Any] = ()

    @property
    def tokens(self) -> int:
        """Count the tokens."""
        return self.inputs["input_ids"].shape[-1]


def compose(
    session: Session,
    text: str | Sequence[dict[str, Any]],
    images: Sequence[Any] = (),
    videos: Sequence[Any] = (),
    system: str | None = None,
    fps: float | None = None,
    num_frames: int | None = None,
) -> UserTurn:
    """Compose all of a turn that can be wrong, and leave the session as it is.

    The arguments are those of :meth:`mmkv.Session.send`. Raises MmkvError.
    """
    started = time.perf_counter()
    if system is not None and session.history:
        raise InputError("a system message opens a conversation; start a new session for it")
    if not isinstance(text, str):
        require_list("text", text, "parts, or a text")
    require_list("images", images, "pictures")
    require_list("videos", videos, "videos")
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else list(text)
    media = [{"type": "image", "image": image} for image in images]
    media += [{"type": "video", "video": video} for video in videos]
    opening = [] if system is None else [{"role": "system", "content": system}]
    messages, pictures, films = take_media(
        [*opening, {"role": "user", "content": [*media, *parts]}]
    )
    if is_blank(messages[-1]):
        raise InputError("the prompt is empty; write a question")
    processor = session.engine.processor
    addition = processor.template.addition(session.history, messages)
    seen = [load_image(picture) for picture in pictures]
    clips = [load_video(film, fps, num_frames, processor.size_rule) for film in films]
    if (seen or clips) and processor.sees:
        _ = session.engine.family.hf  # Ctrl-C ends it here, and not while the turn is appended
    inputs = processor.encode(addition.text, seen, clips, addition.continuing)
    fed = session.with_unfed(inputs)
    return UserTurn(messages, fed, addition.note, started, session.basis, seen, clips)
